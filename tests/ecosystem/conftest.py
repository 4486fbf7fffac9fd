"""A torchvision that was built for another torch can be imported; random numbers are the same in every test."""

import sys

import pytest
import torch


def declare_torchvision_operators():
    """Let a torchvision that was built for another torch be imported: of its operators it needs two by name.

    The tests use its networks, which consist of plain torch operations.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return operators  # they go with it


try:
    import torchvision  # noqa: F401
except ImportError:
    pass  # not there
except RuntimeError:  # operator torchvision::nms does not exist
    _operators = declare_torchvision_operators()


@pytest.fixture(autouse=True)
def same_random_numbers():
    torch.manual_seed(0)
