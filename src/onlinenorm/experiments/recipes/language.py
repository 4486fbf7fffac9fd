"""`rnn` and `lstm`: word-level language models of Penn Treebank (paper, appendix A.4, figure 12).

Text and training are those of PyTorch's word language model example, which the authors' code follows: 20 streams side
by side, read piece by piece, the state carried along without its gradient; no dropout. A piece's length is uniform in
[1, 128], as the paper says; the authors' code draws it from 2 to 128. Validation reads 10 streams in the same way, and
its perplexity is the exponential of the mean loss of all words; the authors' code averages the perplexities of pieces
of 32 words, which gives up to two per cent more.

OnlineNorm's control error is bounded, as in the authors' code (`bound_control`): by equation 11 as it stands a single
scalar y takes (1 - alpha_bwd) y^2 of it away, and both networks diverge at the paper's rates within a hundred batches.

The paper names no gradient clipping. Without any, chance decides how a run begins: at the initial weights the gradient
of a normalised network grows by some 7 % with each step that it goes back, so that over a hundred steps it is a
thousand times too long, and whether the first piece has so many is drawn. So its norm is clipped at 1, for every
normaliser; once training is on its way, it is below that.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.experiments.data.made import made_text
from onlinenorm.experiments.data.penn_treebank import penn_treebank
from onlinenorm.experiments.data.text import Text
from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Experiment, Metric, Scale, Setting
from onlinenorm.experiments.language import Cell, LanguageModel, detached, drawn_lengths, pieces, side_by_side
from onlinenorm.experiments.runs import Run

PERPLEXITY = Metric("perplexity", "validation perplexity", "lowest", "{:.1f}")
VALIDATION_STREAMS = 10


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """Of the paper, for its RNN with Online Normalization; plain SGD."""

    data: str = "penn-treebank"
    cell: Cell = "rnn"
    size: int = 200  # of the words' vectors and of the state
    epochs: int = 40
    batch_size: int = 20  # streams side by side
    longest: int = 128  # piece of the streams
    learning_rate: float = 1.7
    weight_decay: float = 1e-6
    clip: float = 1.0  # the norm of the gradient
    alpha_fwd: float = 16383 / 16384
    alpha_bwd: float = 127 / 128


PAPER = {"rnn": Settings(), "lstm": Settings(cell="lstm", epochs=25, alpha_fwd=8191 / 8192, alpha_bwd=31 / 32)}
LEARNING_RATES = {
    "rnn": {"online": 1.7, "layer": 0.95, "none": 0.5},
    "lstm": {"online": 6.5, "layer": 3.25, "none": 3.5},
}


def settings(name: Cell, scale: Scale, norm: str) -> Settings:
    """At `cpu`, the first epochs. At `smoke`, one learning rate for all: what differs is the normaliser's doing."""
    paper = replace(PAPER[name], norm=norm, learning_rate=LEARNING_RATES[name][norm])
    if scale == "cpu":
        return replace(paper, epochs=6)
    if scale == "smoke":
        rate = LEARNING_RATES[name]["none"]
        made = replace(paper, data="made", size=32, epochs=4, longest=32, learning_rate=rate)
        return replace(made, alpha_fwd=0.999, alpha_bwd=0.99)
    return paper


def load(settings: Settings, folder: Path | None) -> Text:
    """Penn Treebank, or a made text."""
    return made_text() if settings.data == "made" else penn_treebank(folder)


def train(run: Run[Settings]) -> None:
    """One run."""
    s = run.settings
    text: Text = run.data
    if s.batch_size % run.fabric.world_size:
        raise ExperimentError(f"{s.batch_size} streams cannot be shared equally by {run.fabric.world_size} processes.")
    training = side_by_side(text.train, s.batch_size, **run.part)
    validation = side_by_side(text.validation, VALIDATION_STREAMS, **run.part)
    decays = {"alpha_fwd": s.alpha_fwd, "alpha_bwd": s.alpha_bwd, "bound_control": True} if s.norm == "online" else {}
    model: nn.Module = LanguageModel(len(text.vocabulary), s.size, s.cell, s.norm, **decays)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), s.learning_rate, weight_decay=s.weight_decay)

    model, optimizer = run.setup(model, optimizer)
    for _ in run.epochs(s.epochs):
        model.train()
        hidden = None
        for words, following in run.batches(pieces(training, drawn_lengths(len(training) - 1, s.longest))):
            logits, hidden = model(words, hidden)
            loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            run.fabric.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), s.clip)
            optimizer.step()
            hidden = detached(hidden)
            run.observe(loss)
        run.log(perplexity=perplexity(run, model, pieces(validation, s.longest)))


def perplexity(run: Run[Settings], model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """The exponential of the mean loss of a word."""
    hidden, loss, count = None, 0.0, 0
    with run.evaluating(model) as network:
        for words, following in batches:
            words, following = run.fabric.to_device((words, following))
            logits, hidden = network(words, hidden)
            loss += F.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum").item()
            count += following.numel()
    mean = run.mean(loss, count)
    return math.exp(mean) if mean < 100 else math.inf


def _experiment(name: Cell, shows: str, time: dict[Scale, str]) -> Experiment:
    return Experiment(
        name=name,
        title=f"Penn Treebank, {name.upper()}",
        shows=shows,
        data="Penn Treebank, 6 MB",
        time=time,
        norms=("online", "layer", "none"),
        allowed=("online", "layer", "none"),
        runs={"paper": 25, "cpu": 1, "smoke": 1},
        settings=partial(settings, name),
        load=load,
        train=train,
        metric=PERPLEXITY,
        sweep={"alpha_fwd": (512, 32768), "alpha_bwd": (4, 4096)},
    )


EXPERIMENTS = (
    _experiment("rnn", "normalisation at every time step", {"paper": "100 h", "cpu": "40 min", "smoke": "10 s"}),
    _experiment(
        "lstm", "normalisation of four gates at every time step", {"paper": "75 h", "cpu": "45 min", "smoke": "20 s"}
    ),
)
