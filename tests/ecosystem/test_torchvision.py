"""A norm_layer of torchvision's networks."""

from functools import partial

import pytest
import torch
from packages import needs
from torch import nn

from onlinenorm.torch import OnlineNorm2d, convert, diagnose

models = needs("torchvision.models")


@pytest.mark.parametrize("layer", [OnlineNorm2d, partial(OnlineNorm2d, alpha_fwd=0.99, guard="clamp")])
def test_norm_layer_of_resnet(layer):
    model = models.resnet18(norm_layer=layer, num_classes=3)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_convert_and_diagnose():
    model = convert(models.resnet18(num_classes=3), report=None)
    with diagnose(model) as diagnosis:
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    results = diagnosis.as_dict()
    assert len(results) == 20
    assert all(result["train"]["backward_samples"] == 2 for result in results.values())


def test_a_checkpoint_of_batchnorm_loads():
    source, target = models.resnet18(num_classes=3), models.resnet18(num_classes=3, norm_layer=OnlineNorm2d)
    for _ in range(3):
        source(torch.randn(4, 3, 32, 32))
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.bn1.running_var, source.bn1.running_var.double())
