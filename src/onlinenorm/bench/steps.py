"""Whole training steps: forward, loss, backward, SGD with momentum, of one network with each normaliser."""

from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.bench.cases import Mode
from onlinenorm.bench.measure import Contestant, Times
from onlinenorm.bench.networks import NETWORKS
from onlinenorm.bench.peers import layout, make_norm

STEP_PEERS = ("online", "batch", "group")


@dataclass(frozen=True)
class StepCase:
    """One network's training step at one batch size, in one mode; bfloat16 means autocast."""

    network: str
    batch: int
    mode: Mode
    compiled: bool = False

    @property
    def name(self) -> str:
        """As in: resnet20, batch 8, compiled."""
        return f"{self.network}, batch {self.batch}{', compiled' * self.compiled}"


class Step:
    """Training steps with one normaliser. The optimizer's part counts as backward, the loss as forward.

    With `compiled` the network runs by torch.compile, which works when it is first called: before anything is timed.
    """

    every = 1

    def __init__(
        self, name: str, network: nn.Module, x: Tensor, target: Tensor, mode: Mode, compiled: bool = False
    ) -> None:
        self.name = name
        self.network = network
        self.call = torch.compile(network, fullgraph=True, dynamic=False) if compiled else network
        self.x = x
        self.target = target
        self.autocast = mode.dtype == "bfloat16"
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def run(self, passes: int) -> Times:
        """Time so many steps."""
        forward = backward = 0.0
        for _ in range(passes):
            start = perf_counter()
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = F.cross_entropy(self.call(self.x), self.target)
            middle = perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            end = perf_counter()
            forward += middle - start
            backward += end - middle
            del loss
        return Times(forward / passes, backward / passes)


def step_cases(networks: list[str], modes: list[Mode], quick: bool, compiled: bool = False) -> list[StepCase]:
    """Every network at its batch sizes (`quick`: small ones) in its modes."""
    return [
        StepCase(network, batch, mode, compiled)
        for network in networks
        for mode in modes
        if mode.name in NETWORKS[network].modes
        for batch in NETWORKS[network].batches
        if batch < 100 or not quick
    ]


def step_contestants(case: StepCase, names: list[str]) -> list[Contestant]:
    """Those of the named normalisers that fit the network, from the same initial weights, on the same batch."""
    spec = NETWORKS[case.network]
    if case.compiled:
        torch.compiler.reset()  # it keeps a few variants of each function, and would give up over more cases than that
    torch.manual_seed(0)
    x, classes = torch.randn(case.batch, *spec.input), torch.randint(2, (case.batch, *spec.target))
    format_ = layout(case.mode, spec.dims)
    found: list[Contestant] = []
    for name in names:
        torch.manual_seed(1)
        try:
            network = spec.build(partial(_fitting, name, spec.dims))
        except LookupError:
            continue
        network = network.to(memory_format=format_)  # type: ignore[call-overload]
        found.append(Step(name, network, x.contiguous(memory_format=format_), classes, case.mode, case.compiled))
    return found


def _fitting(name: str, dims: int, channels: int) -> nn.Module:
    norm = make_norm(name, channels, dims)
    if norm is None:
        raise LookupError(f"no {name} normaliser for {channels} channels")
    return norm
