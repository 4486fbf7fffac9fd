"""Threads that run at unequal speeds, as where other work shares their cores, do not get into each other's way."""

import pytest
import torch
from helpers import GUARDS, state_of, step

from onlinenorm.torch import OnlineNorm

ACTS = [None, "silu"]


@pytest.fixture
def many_threads():
    before = torch.get_num_threads()
    yield lambda: torch.set_num_threads(16)  # more than there are cores, mostly: the system stops them here and there
    torch.set_num_threads(before)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", [(1000, 200), (700, 1100), (301, 96, 7), (70, 40, 33, 31)])
def test_a_last_shorter_block(shape, guard, act, many_threads):
    torch.manual_seed(0)
    x, grad = torch.randn(2, *shape, dtype=torch.float64)

    def run():
        layer = OnlineNorm(shape[1], alpha_fwd=0.99, alpha_bwd=0.9, guard=guard, dtype=torch.float64)
        layer._act = act
        trained = [*step(layer, x, grad), *state_of(layer).values(), layer.weight.grad]
        return [*trained, layer.eval()(x).detach()]

    torch.set_num_threads(1)
    alone = run()
    many_threads()
    for _ in range(12):
        for expected, got in zip(alone, run(), strict=True):
            assert torch.equal(expected, got)
