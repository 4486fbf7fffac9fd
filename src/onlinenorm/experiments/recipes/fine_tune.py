"""`fine-tune`: a network trained with BatchNorm goes on at batch size 2. Not in the paper.

People who fine-tune large models have no memory for batches. A ResNet-20 is trained with BatchNorm at its usual batch
size; then it goes on at batch size 2, at the rate that appendix F gives for a tenth of the usual one:

    online   `onlinenorm.torch.convert` has turned its BatchNorm layers into OnlineNorm, statistics included
    batch    as it is
    frozen   BatchNorm that uses, and keeps, its running statistics, which is what people do today
    group    GroupNorm in BatchNorm's place, with BatchNorm's weights and biases
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from onlinenorm.experiments.classification import train_classifier
from onlinenorm.experiments.data.images import Augment, ImageData
from onlinenorm.experiments.experiment import Experiment, Job, Plan, Request, Scale, Summary
from onlinenorm.experiments.normalizers import NORMALIZERS, build
from onlinenorm.experiments.recipes import cifar
from onlinenorm.experiments.resnet import resnet20
from onlinenorm.experiments.runs import Record, Run
from onlinenorm.experiments.summary import by_norm
from onlinenorm.hyperparameters import scale_hyperparameters
from onlinenorm.torch import convert

BASE = cifar.CIFAR10
FIRST: dict[Scale, dict[str, Any]] = {  # what training with BatchNorm changes of cifar10's settings
    "paper": {},
    "cpu": {"epochs": 8, "drop_after": (3, 5, 7)},
    "smoke": {"epochs": 3},
}


@dataclass(frozen=True, kw_only=True)
class Settings(cifar.Settings):
    """Ours. The decays are the paper's for CIFAR-10."""

    start: str = ""  # label of the run to go on from
    epochs: int = 5
    batch_size: int = 2


def settings(scale: Scale, norm: str) -> Settings:
    """At `cpu`, one epoch."""
    usual = BASE.settings(scale, norm)
    scaled = scale_hyperparameters(usual.batch_size, 2, usual.learning_rate / 10, usual.momentum)
    ours = Settings(**{**vars(usual), "epochs": 5, "batch_size": 2, "drop_after": ()})
    ours = replace(ours, learning_rate=scaled.learning_rate, momentum=scaled.momentum)
    return ours if scale == "paper" else replace(ours, epochs=1)


def plan(experiment: Experiment, request: Request) -> Plan:
    """For each seed, first the network, then what becomes of it with each normaliser."""
    for seed in request.seeds:
        first = replace(BASE.settings(request.scale, "batch"), seed=seed, **FIRST[request.scale])
        trained = yield Job(experiment.name, BASE, request.scale, first)
        for norm in request.norms:
            asked = request.settings(norm, seed)
            yield Job(experiment.name, experiment, request.scale, replace(asked, start=trained.label))


def train(run: Run[Settings]) -> None:
    """Go on with a trained network."""
    s = run.settings
    data: ImageData = run.data
    model = build("batch", resnet20, alpha_fwd=s.alpha_fwd, alpha_bwd=s.alpha_bwd)
    model.load_state_dict(torch.load(run.beside(s.start) / "checkpoint.pt", weights_only=True)["model"])
    model = adapt(model, s)
    optimizer = torch.optim.SGD(model.parameters(), s.learning_rate, s.momentum, weight_decay=s.weight_decay)
    training, shuffle = data.train.first(s.images), torch.default_generator
    train_classifier(
        run,
        model,
        optimizer,
        epochs=s.epochs,
        learning_rate=lambda _: s.learning_rate,
        training=lambda _: training.batches(s.batch_size, shuffle=shuffle, augment=Augment(), **run.part),
        validation=lambda: data.test.batches(500, **run.part),
    )


class Frozen(_BatchNorm):
    """BatchNorm that stays as it is in evaluation, whatever mode the network is in."""

    def train(self, mode: bool = True) -> "Frozen":
        """Stay."""
        return super().train(False)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


def adapt(model: nn.Module, s: Settings) -> nn.Module:
    """A network with BatchNorm as the normaliser's name has it."""
    if s.norm == "batch":
        return model
    if s.norm == "online":
        return convert(model, alpha_fwd=s.alpha_fwd, alpha_bwd=s.alpha_bwd, report=None)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, _BatchNorm):
            channels = layer.num_features
            other: nn.Module = Frozen(channels) if s.norm == "frozen" else nn.GroupNorm(s.groups, channels)
            other.load_state_dict(layer.state_dict(), strict=s.norm == "frozen")
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, other)
    return model


def summary(records: Sequence[Record]) -> Summary:
    """The best accuracy of each, beside what they started from."""
    metric = BASE.metric
    assert metric is not None
    started = by_norm([r for r in records if r.base == BASE.name], metric)["batch"]
    rows = [("Trained with BatchNorm, batch 128", started.describe(metric.form))]
    tuned = by_norm([r for r in records if r.base != BASE.name], metric)
    rows += [(f"then {LABELS[norm]}, batch 2", values.describe(metric.form)) for norm, values in tuned.items()]
    return Summary(("", metric.label), tuple(rows))


LABELS = {name: NORMALIZERS[name].label for name in ("online", "batch", "group")} | {"frozen": "BatchNorm, frozen"}
EXPERIMENT = Experiment(
    name="fine-tune",
    title="Fine-tuning at batch size 2",
    shows="a network trained with BatchNorm can go on with OnlineNorm where batches no longer fit",
    data="CIFAR-10, 170 MB",
    time={"paper": "25 h", "cpu": "20 min", "smoke": "20 s"},
    norms=("online", "batch", "frozen", "group"),
    allowed=("online", "batch", "frozen", "group"),
    runs={"paper": 5, "cpu": 1, "smoke": 1},
    settings=settings,
    load=cifar.load,
    train=train,
    metric=BASE.metric,
    also=BASE.also,
    plan=plan,
    summary=summary,
)
