"""Training a classifier, epoch by epoch: what the experiments on images have in common."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.experiments.experiment import Metric
from onlinenorm.experiments.runs import Run
from onlinenorm.experiments.weight_norm import is_weight_normalised, start_from

Batches = Iterable[tuple[Tensor, Tensor]]
ACCURACY = Metric("accuracy", "validation accuracy, %", "highest")
LOSS = Metric("loss", "validation loss", "lowest", "{:.3f}")


def train_classifier(
    run: Run[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    learning_rate: Callable[[int], float],
    training: Callable[[int], Batches],
    validation: Callable[[], Batches],
) -> None:
    """Minimise cross entropy.

    Args:
        run: gets the metrics of every epoch.
        model: gives logits for images.
        optimizer: its rate is set before every epoch.
        epochs: to train for.
        learning_rate: of an epoch, from 1 on.
        training: an epoch's batches.
        validation: the batches to validate on.
    """
    if is_weight_normalised(model):
        images, _ = next(iter(training(1)))
        start_from(model, images.cpu())
    model, optimizer = run.setup(model, optimizer)
    for epoch in run.epochs(epochs):
        set_learning_rate(optimizer, learning_rate(epoch))
        model.train()
        for images, labels in run.batches(training(epoch)):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            run.fabric.backward(loss)
            optimizer.step()
            run.observe(loss)
        run.log(**validate(run, model, validation()))


def validate(run: Run[Any], model: nn.Module, batches: Batches) -> dict[str, float]:
    """Accuracy in per cent, and the mean loss."""
    right = loss = count = 0.0
    with run.evaluating(model) as network:
        for images, labels in batches:
            images, labels = run.fabric.to_device((images, labels))
            logits = network(images).float()
            right += (logits.argmax(dim=1) == labels).sum().item()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            count += len(labels)
    return {"accuracy": 100 * run.mean(right, count), "loss": run.mean(loss, count)}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def dropped(rate: float, after: Iterable[int]) -> Callable[[int], float]:
    """A rate that falls to a tenth after each of the given epochs."""
    drops = tuple(after)
    return lambda epoch: rate * 0.1 ** sum(epoch > drop for drop in drops)
