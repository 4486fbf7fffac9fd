"""`activation-growth`: errors in statistics, amplified by depth (paper, section 3.3, figure 4).

A fully connected network of 100 layers (linear, normalised, ReLU) at random weights. Its exact statistics, mean and
variance of each neuron over the whole synthetic data set, are computed layer by layer. Then they are perturbed, and
the data set goes through once more, normalised by the perturbed ones:

    mean <- mean + noise * std * e      variance <- variance * underestimate * exp(2 noise * e')

with standard normal e, e' for each neuron. What is measured is the root mean square of the normalised activations,
which is 1 with exact statistics; with and without layer scaling.

The paper does not give width, data, or noise. Here layers are 200 wide, weights are normal with variance 1 / 200, and
the data is 1,000 standard normal samples. In float32 even the rounding of exact statistics grows, to 5 % at layer
100; so it is float64 here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from onlinenorm.experiments.analysis import no_data
from onlinenorm.experiments.experiment import Experiment, Scale, Setting, Summary
from onlinenorm.experiments.runs import Record, Run
from onlinenorm.torch import OnlineNorm


@dataclass(frozen=True)
class Case:
    """How statistics are perturbed, and whether layer scaling follows."""

    noise: float
    underestimate: float
    layer_scaling: bool

    @property
    def name(self) -> str:
        """As in: noise 0.05, layer scaling."""
        noise = f"noise {self.noise:g}" if self.noise else ""
        underestimate = f"variance × {self.underestimate:g}" if self.underestimate != 1 else ""
        statistics = ", ".join(filter(None, (noise, underestimate))) or "exact"
        return f"{statistics}{', layer scaling' * self.layer_scaling}"


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """Ours, but for the depth."""

    depth: int = 100
    width: int = 200
    samples: int = 1000
    noise: tuple[float, ...] = (0.01, 0.05, 0.2)
    underestimate: float = 0.9  # of the variance, without noise


def settings(scale: Scale, norm: str) -> Settings:
    """The same at every scale, narrower and shallower for `smoke`."""
    paper = Settings(norm=norm)
    return replace(paper, depth=40, width=64, samples=200, noise=(0.2,)) if scale == "smoke" else paper


def train(run: Run[Settings]) -> None:
    """The size of each layer's activations in every case. There is nothing to train."""
    s = run.settings
    of = cases(s)
    sizes = propagate(s, of)  # all that is random comes from the run's seed, before any layer
    for layer in run.each("layer", range(1, s.depth + 1)):
        run.log(**{case.name: size for case, size in zip(of, sizes[layer - 1], strict=True)})


def cases(s: Settings) -> list[Case]:
    """Exact statistics, each noise, and an underestimated variance; without and with layer scaling."""
    perturbations = [(0.0, 1.0), *((noise, 1.0) for noise in s.noise), (0.0, s.underestimate)]
    return [Case(*perturbed, scaling) for perturbed in perturbations for scaling in (False, True)]


def propagate(s: Settings, cases: Sequence[Case]) -> list[list[float]]:
    """The size of the activations behind each layer, in each case."""
    generator = torch.Generator().manual_seed(s.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    exact = normal(s.samples, s.width)
    perturbed = [exact for _ in cases]
    sizes = []
    for _ in range(s.depth):
        weights = normal(s.width, s.width) / s.width**0.5
        errors = normal(s.width), normal(s.width)
        var, mean = torch.var_mean(exact @ weights, 0, correction=0)
        exact = torch.relu((exact @ weights - mean) / var.sqrt())
        outputs = [normalise(x @ weights, mean, var, errors, case) for x, case in zip(perturbed, cases, strict=True)]
        sizes.append([y.square().mean().sqrt().item() for y in outputs])
        perturbed = [y.relu() for y in outputs]
    return sizes


def normalise(x: Tensor, mean: Tensor, var: Tensor, errors: tuple[Tensor, Tensor], case: Case) -> Tensor:
    """Inference by a layer of Online Normalization that has perturbed statistics."""
    layer = OnlineNorm(len(mean), affine=False, eps=0, guard="layer_scaling" if case.layer_scaling else None)
    layer.eval()
    of_mean, of_var = errors
    layer.running_mean.copy_(mean + case.noise * var.sqrt() * of_mean)
    layer.running_var.copy_(var * case.underestimate * (2 * case.noise * of_var).exp())
    normalised: Tensor = layer(x)
    return normalised


def summary(records: Sequence[Record]) -> Summary:
    """The size at the last layer: median over the runs."""
    last = [record.rows[-1] for record in records]
    names = [key for key in last[0] if key != "layer"]

    def size(name: str) -> str:
        return f"{median(math.inf if row[name] is None else row[name] for row in last):.4g}"

    rows = tuple(
        (name, size(name), size(f"{name}, layer scaling")) for name in names if not name.endswith("layer scaling")
    )
    columns = ("Statistics", f"Size at layer {last[0]['layer']}", "with layer scaling")
    return Summary(columns, rows, "Size: root mean square of the activations, 1 with exact statistics.")


EXPERIMENT = Experiment(
    name="activation-growth",
    title="Activation growth",
    shows="errors in statistics grow exponentially with depth, and layer scaling prevents it",
    data="none",
    time={"paper": "30 s", "cpu": "30 s", "smoke": "5 s"},
    norms=("online",),
    allowed=("online",),
    runs={"paper": 5, "cpu": 5, "smoke": 1},
    settings=settings,
    load=no_data,
    train=train,
    x="layer",
    summary=summary,
)
