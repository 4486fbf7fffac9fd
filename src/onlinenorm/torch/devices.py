"""What computes where the engine does not."""

from functools import cache
from types import ModuleType

from torch import Tensor

from onlinenorm.torch import portable


def without_engine(x: Tensor) -> ModuleType:
    """The backend for a tensor that the engine does not take: kernels on a GPU, elsewhere plain torch."""
    return _gpu() if x.is_cuda else portable


@cache
def _gpu() -> ModuleType:
    """The kernels, if Triton is there, which PyTorch brings along wherever it can run."""
    try:
        from onlinenorm.torch import gpu
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return portable
    return gpu
