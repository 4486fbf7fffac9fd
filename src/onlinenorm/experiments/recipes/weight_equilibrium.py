"""`weight-equilibrium`: growth and decay of normalised weights balance (paper, section 3.4, appendix C, figure 5).

Behind a normaliser the length of the weights does not matter, so their gradient w' is at a right angle to them and
every step of SGD lengthens them; L2 regularisation shortens them. With rate eta and L2 constant lambda a step makes

    |w|^2 <- (1 - eta lambda)^2 |w|^2 + eta^2 |w'|^2

which in expectation stands still where |w|^2 = eta / (2 lambda) E|w'|^2, as long as eta lambda is small. The paper
writes |w| = sqrt(eta / (2 lambda)) E|w'|, with the mean for the root mean square of |w'|; both are noted here.

The paper has a diagram and no experiment. Ours trains one normalised layer, ReLU and a linear layer on a stream of
made data (normal inputs, labelled by a random linear map), by plain SGD, from initial weights a tenth of, as large
as, and ten times PyTorch's. All three end at one length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.experiments.analysis import no_data
from onlinenorm.experiments.experiment import Experiment, Scale, Setting, Summary
from onlinenorm.experiments.normalizers import NORMALIZERS, build
from onlinenorm.experiments.parts import Norm
from onlinenorm.experiments.runs import Record, Run

LAST = 1 / 4  # of the windows, over which the weights are taken to have settled


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """Ours."""

    inputs: int = 64
    width: int = 32
    classes: int = 10
    starts: tuple[float, ...] = (0.1, 1.0, 10.0)  # initial weights, times PyTorch's
    steps: int = 10_000
    window: int = 250  # steps over which lengths are averaged
    batch_size: int = 32
    learning_rate: float = 0.1
    weight_decay: float = 5e-3
    alpha_fwd: float = 0.999
    alpha_bwd: float = 0.99


def settings(scale: Scale, norm: str) -> Settings:
    """The same at every scale, but for `smoke`, where stronger decay settles the weights sooner."""
    ours = Settings(norm=norm)
    if scale == "smoke":
        return replace(ours, starts=(0.3, 3.0), steps=1500, window=50, learning_rate=0.2, weight_decay=0.02)
    return ours


def train(run: Run[Settings]) -> None:
    """One run: networks from all starts, side by side on the same data."""
    s = run.settings
    teacher = torch.randn(s.inputs, s.classes, device="cpu")
    networks = SideBySide(s)
    model, optimizer = run.setup(
        networks, torch.optim.SGD(networks.parameters(), s.learning_rate, weight_decay=s.weight_decay)
    )
    balance = math.sqrt(s.learning_rate / (2 * s.weight_decay))
    for _ in run.each("step", range(s.window, s.steps + 1, s.window)):
        lengths, gradients = [], []
        data = torch.randn(s.window, s.batch_size, s.inputs)
        for inputs, labels in run.batches(list(zip(data, (data @ teacher).argmax(2), strict=True))):
            loss = torch.stack([F.cross_entropy(logits, labels) for logits in model(inputs)]).sum()
            optimizer.zero_grad()
            run.fabric.backward(loss)
            lengths.append([w.norm().item() for w in networks.weights])
            gradients.append([w.grad.norm().item() for w in networks.weights if w.grad is not None])
            optimizer.step()
        row = {}
        for start, length, gradient in zip(
            s.starts, zip(*lengths, strict=True), zip(*gradients, strict=True), strict=True
        ):
            row[f"length_{start:g}"] = root_mean_square(length)
            row[f"predicted_{start:g}"] = balance * root_mean_square(gradient)
            row[f"by_mean_{start:g}"] = balance * fmean(gradient)
        run.log(**row)


class SideBySide(nn.Module):
    """Networks that differ in the size of the weights before their normaliser."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

        def network(norm: Norm) -> nn.Module:
            layer = nn.Linear(s.inputs, s.width, bias=False)
            self.weights.append(layer.weight)
            return nn.Sequential(layer, norm(s.width), nn.ReLU(), nn.Linear(s.width, s.classes))

        self.networks = nn.ModuleList(
            build(s.norm, network, alpha_fwd=s.alpha_fwd, alpha_bwd=s.alpha_bwd) for _ in s.starts
        )
        for weights, start in zip(self.weights, s.starts, strict=True):
            weights.data *= start

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """The logits of each."""
        return [network(inputs) for network in self.networks]


def root_mean_square(values: Sequence[float]) -> float:
    """Of |w| and |w'|."""
    return math.sqrt(fmean(value**2 for value in values))


def settled(record: Record) -> list[tuple[float, float, float, float]]:
    """Each start, the length that its weights settled at, the one predicted, and that by the mean gradient."""
    rows = [row for row in record.rows if row["step"] > (1 - LAST) * record.settings["steps"]]

    def mean(key: str) -> float:
        return fmean(row[key] for row in rows)

    return [
        (start, mean(f"length_{start:g}"), mean(f"predicted_{start:g}"), mean(f"by_mean_{start:g}"))
        for start in record.settings["starts"]
    ]


def summary(records: Sequence[Record]) -> Summary:
    """Length and prediction over the last quarter of the steps."""
    rows = tuple(
        (
            NORMALIZERS[record.settings["norm"]].label,
            f"{start:g}",
            f"{length:.3f}",
            f"{predicted:.3f}",
            f"{by_mean:.3f}",
        )
        for record in records
        for start, length, predicted, by_mean in settled(record)
    )
    columns = ("Normaliser", "Start", "|w|", "√(η/2λ) √E|w'|²", "√(η/2λ) E|w'|")
    return Summary(columns, rows, "Start: initial weights, times PyTorch's. Means over the last quarter of the steps.")


EXPERIMENT = Experiment(
    name="weight-equilibrium",
    title="Weight equilibrium",
    shows="normalised weights settle where their growth and L2 regularisation balance",
    data="none",
    time={"paper": "30 s", "cpu": "30 s", "smoke": "5 s"},
    norms=("online", "batch"),
    allowed=("online", "batch", "layer"),
    runs={"paper": 1, "cpu": 1, "smoke": 1},
    settings=settings,
    load=no_data,
    train=train,
    x="step",
    summary=summary,
)
