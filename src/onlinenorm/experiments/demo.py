"""`onlinenorm demo`: one small U-Net for each normaliser, trained at batch size 2 on made shapes.

This is the paper's segmentation experiment, reduced to a few minutes on two processor cores:

                       paper        here
    image              192 x 192    64 x 64, with shapes twice as large within it
    training images    2,000        500
    held-out images    200          100
    width              64           16
    batch size         25           2
    epochs             40           12
    learning rate      0.04         0.1
    alpha_fwd          63/64        31/32
    alpha_bwd          1/2          7/8

Kept are the six classes, the network's form, the loss, SGD with momentum 0.9 and L2 1e-6, and a tenth of the rate
after five eighths of the epochs. The rate is the best of 0.003, 0.01, 0.03, 0.1 and 0.2 for BatchNorm and for
GroupNorm, and OnlineNorm takes it as it is. Its decay factors were chosen at that rate, as the paper chose them:
with thirty times the paper's rate per sample, weights move faster from sample to sample, and the statistics must
follow. The paper's alpha_bwd of 1/2 diverges here.

All normalisers get the same images in the same order, the same initial weights and the same rate. They take
turns, an epoch each, so the comparison holds whenever it is stopped.
"""

import copy
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import onlinenorm
from onlinenorm.experiments import page
from onlinenorm.experiments.memory import count_saved
from onlinenorm.experiments.normalizers import NORMALIZERS, build
from onlinenorm.experiments.segmentation import jaccard, segmentation_loss
from onlinenorm.experiments.shapes import CLASSES, make_shapes
from onlinenorm.experiments.unet import UNet

ALPHA_FWD, ALPHA_BWD = 31 / 32, 7 / 8
SETTINGS = {  # of the normalisers compared, in words
    "batch": "PyTorch's defaults",
    "group": "8 groups",
    "online": "alpha_fwd 31/32, alpha_bwd 7/8",
}
HELD_OUT_IMAGES = 100
SHOWN_IMAGES = 3  # of the held-out ones, on the page
EVALUATION_BATCH = 20
EXIT_INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C
DROP_AFTER = 5 / 8  # the paper drops the rate after 25 of 40 epochs


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result."""

    normalizers: tuple[str, ...]
    epochs: int
    batch_size: int
    size: int
    train_images: int
    seed: int
    threads: int
    held_out_images: int = HELD_OUT_IMAGES
    zoom: float = 2.0
    width: int = 16
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-6

    @property
    def steps(self) -> int:
        """Training steps in an epoch; a last, smaller batch is left out."""
        return self.train_images // self.batch_size


@dataclass(frozen=True)
class Data:
    """Images and masks, to train on and held out."""

    images: Tensor
    masks: Tensor
    held_out_images: Tensor
    held_out_masks: Tensor


@dataclass
class Run:
    """One normaliser's network, and what has been measured of it so far."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    activation_bytes: int
    seconds: list[float] = field(default_factory=list)  # of each training step
    history: list[dict[str, float | None]] = field(default_factory=list)  # of each finished epoch
    predictions: Tensor | None = None  # masks for the images on the page, after the last finished epoch


class CtrlC:
    """True once Ctrl-C was pressed; the work looks here between steps, so that nothing is left half done."""

    def __init__(self) -> None:
        self.pressed = False

    def __bool__(self) -> bool:
        return self.pressed

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.pressed = True


@contextmanager
def catch_ctrl_c() -> Iterator[CtrlC]:
    """Turn Ctrl-C into a flag for the duration."""
    stop = CtrlC()
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


# The experiment


def make_data(recipe: Recipe) -> Data:
    """Draw the training and the held-out images."""
    train = make_shapes(recipe.train_images, recipe.size, seed=2 * recipe.seed, zoom=recipe.zoom)
    held_out = make_shapes(recipe.held_out_images, recipe.size, seed=2 * recipe.seed + 1, zoom=recipe.zoom)
    return Data(*train, *held_out)


def start_run(name: str, recipe: Recipe, data: Data) -> Run:
    """Build a network; its weights depend on the seed alone, not on the normaliser."""
    torch.manual_seed(recipe.seed)
    model = build(
        name,
        lambda norm: UNet(recipe.width, norm, classes=len(CLASSES)),
        alpha_fwd=ALPHA_FWD,
        alpha_bwd=ALPHA_BWD,
    )
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.learning_rate, recipe.momentum, weight_decay=recipe.weight_decay
    )
    batch = slice(recipe.batch_size)
    return Run(name, model, optimizer, activation_bytes(model, data.images[batch], data.masks[batch]))


def activation_bytes(model: nn.Module, images: Tensor, masks: Tensor) -> int:
    """What autograd keeps for the backward of one training step, without parameters and buffers."""
    model = copy.deepcopy(model).train()  # a step changes running statistics
    _, beside_parameters = count_saved(model, images, lambda logits: segmentation_loss(logits, masks.float()))
    return beside_parameters


def train_epoch(run: Run, data: Data, order: Tensor, stop: CtrlC, tell: Callable[[float], None]) -> float:
    """Train on the batches of `order`; returns the mean loss. Ends early once `stop` is set."""
    run.model.train()
    losses = []
    for batch in order:
        if stop:
            break
        started = time.perf_counter()
        run.optimizer.zero_grad()
        loss = segmentation_loss(run.model(data.images[batch]), data.masks[batch].float())
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        losses.append(loss.item())
        run.seconds.append(time.perf_counter() - started)
        tell(losses[-1])
    return statistics.fmean(losses) if losses else math.nan


@torch.no_grad()
def evaluate(run: Run, data: Data, stop: CtrlC) -> tuple[float, float, Tensor]:
    """Jaccard similarity and loss over the held-out images, and the masks predicted for those on the page."""
    run.model.eval()
    logits = []
    for images in torch.split(data.held_out_images, EVALUATION_BATCH):
        if stop:
            return math.nan, math.nan, torch.empty(0)
        logits.append(run.model(images))
    every = torch.cat(logits)
    similarity = jaccard(every > 0, data.held_out_masks).mean()
    loss = segmentation_loss(every, data.held_out_masks.float())
    return similarity.item(), loss.item(), every[:SHOWN_IMAGES] > 0


def train(recipe: Recipe, data: Data, runs: list[Run], stop: CtrlC, console: Console) -> None:
    """Train all networks, taking turns, an epoch each; fills in `runs`."""
    shuffle = torch.Generator().manual_seed(recipe.seed)
    total = recipe.epochs * recipe.steps
    with _progress(console) as progress:
        bars = {run.name: progress.add_task(NORMALIZERS[run.name].label, total=total, score="") for run in runs}
        everything = progress.add_task("All", total=len(runs) * total, score="")
        for epoch in range(1, recipe.epochs + 1):
            order = torch.randperm(recipe.train_images, generator=shuffle)[: recipe.steps * recipe.batch_size]
            for run in runs:
                if epoch - 1 == math.ceil(DROP_AFTER * recipe.epochs):
                    run.optimizer.param_groups[0]["lr"] *= 0.1

                def tell(loss: float, run: Run = run) -> None:
                    progress.update(bars[run.name], advance=1, score=_score(run, loss))
                    progress.advance(everything)

                train_loss = train_epoch(run, data, order.view(recipe.steps, recipe.batch_size), stop, tell)
                similarity, loss, predictions = evaluate(run, data, stop)
                if stop:
                    return
                run.predictions = predictions
                run.history.append(
                    {
                        "epoch": epoch,
                        "step": epoch * recipe.steps,
                        "jaccard": similarity,
                        "loss": _finite(loss),
                        "train_loss": _finite(train_loss),
                    }
                )
                progress.update(bars[run.name], score=_score(run, train_loss))
            if not console.is_terminal:  # no bars there: a line for each epoch instead
                scores = (f"{NORMALIZERS[run.name].label} {run.history[-1]['jaccard']:.3f}" for run in runs)
                console.print(f"epoch {epoch} of {recipe.epochs}: Jaccard {', '.join(scores)}")


# What happened


def summarize(recipe: Recipe, runs: list[Run]) -> dict[str, Any]:
    """Everything measured, as it is written to result.json."""
    return {
        "status": "finished" if all(len(run.history) == recipe.epochs for run in runs) else "stopped",
        "versions": {
            "onlinenorm": onlinenorm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
        },
        "config": {**asdict(recipe), "steps_per_epoch": recipe.steps, "classes": CLASSES},
        "normalizers": [_summarize_run(recipe, run) for run in runs],
    }


def _summarize_run(recipe: Recipe, run: Run) -> dict[str, Any]:
    last = run.history[-1] if run.history else {"jaccard": None, "loss": None}
    return {
        "name": run.name,
        "label": NORMALIZERS[run.name].label,
        "settings": SETTINGS[run.name],
        "status": "finished" if len(run.history) == recipe.epochs else "stopped",
        "epochs": len(run.history),
        "steps": len(run.seconds),
        "jaccard": last["jaccard"],
        "loss": last["loss"],
        "ms_per_step": 1e3 * statistics.median(run.seconds) if run.seconds else None,
        "activation_bytes": run.activation_bytes,
        "history": run.history,
    }


def write(out: Path, result: dict[str, Any], data: Data, runs: list[Run]) -> None:
    """Write result.json and index.html, each whole or not at all."""
    predictions = {run.name: run.predictions for run in runs if run.predictions is not None}
    shown = slice(SHOWN_IMAGES)
    samples = page.Samples(data.held_out_images[shown], data.held_out_masks[shown], predictions)
    texts = {
        "result.json": json.dumps(result, indent=2, allow_nan=False) + "\n",
        "index.html": page.render(result, samples),
    }
    for name, text in texts.items():
        part = out / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(out / name)


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=page.caption(result["config"]), title_justify="left")
    for name in page.COLUMNS:
        table.add_column(name, justify="left" if name == page.COLUMNS[0] else "right")
    for row in page.rows(result):
        table.add_row(*(f"[bold]{cell.text}[/]" if cell.best else cell.text for cell in row))
    return table


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
    )


def _score(run: Run, loss: float) -> str:
    similarity = f"{run.history[-1]['jaccard']:.3f}" if run.history else "  -  "
    return f"Jaccard {similarity}  loss {loss:.3f}  {1 / statistics.median(run.seconds[-50:]):3.0f} steps/s"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# The command


def _parse_normalizers(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    allowed = f"Allowed: {', '.join(SETTINGS)}, each at most once, separated by commas."
    for name in names:
        if name not in SETTINGS:
            raise typer.BadParameter(f"{name!r} is not a normaliser. {allowed}", param_hint="--norm")
        if names.count(name) > 1:
            raise typer.BadParameter(f"{name!r} is given more than once. {allowed}", param_hint="--norm")
    return names


def _check_directory(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it exists and is not a directory" if out.exists() else str(error.strerror).lower()
        raise typer.BadParameter(f"cannot write into {str(out)!r}: {reason}.", param_hint="--out") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"cannot write into {str(out)!r}: permission denied.", param_hint="--out")


def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where to write; files of an earlier demo are replaced.")
    ] = Path("runs/demo"),
    norm: Annotated[str, typer.Option(metavar="NAMES", help="Which of these normalisers, in which order.")] = ",".join(
        SETTINGS
    ),
    epochs: Annotated[int, typer.Option(metavar="N", help="Passes over the training images.")] = 12,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images a step.")] = 2,
    images: Annotated[int, typer.Option(metavar="N", help="Training images.")] = 500,
    size: Annotated[int, typer.Option(metavar="PIXELS", help="Side of an image: a multiple of 8 from 32 to 256.")] = 64,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Decides the images, their order and the initial weights.")
    ] = 0,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Processor threads.", show_default="PyTorch's choice")
    ] = None,
) -> None:
    """See it train: one small U-Net for each normaliser, at batch size 2.

    They learn to segment shapes that are drawn on the spot, so nothing is
    downloaded; two processor cores need a few minutes. The networks differ
    in nothing but the normaliser.

    A table is printed at the end. DIR/index.html shows learning curves and
    predicted masks, DIR/result.json has every number. Ctrl-C stops early
    and keeps what is done.
    """
    names = _parse_normalizers(norm)
    for option, value, least in (
        ("--epochs", epochs, 1),
        ("--batch-size", batch_size, 1),
        ("--images", images, 1),
        ("--seed", seed, 0),
        ("--threads", threads, 1),
    ):
        if value is not None and value < least:
            raise typer.BadParameter(f"{value} is too small: at least {least} is allowed.", param_hint=option)
    if size % 8 or not 32 <= size <= 256:
        raise typer.BadParameter(f"{size} is not a multiple of 8 from 32 to 256.", param_hint="--size")
    if batch_size > images:
        raise typer.BadParameter(
            f"{batch_size} is more than the {images} training images (--images): at most {images} is allowed.",
            param_hint="--batch-size",
        )
    _check_directory(out)
    if threads is not None:
        torch.set_num_threads(threads)
    recipe = Recipe(names, epochs, batch_size, size, images, seed, torch.get_num_threads())

    console = Console()
    with catch_ctrl_c() as stop:
        console.print(page.caption(asdict(recipe)))
        data = make_data(recipe)
        runs = [start_run(name, recipe, data) for name in names]
        train(recipe, data, runs, stop, console)
        result = summarize(recipe, runs)
        write(out, result, data, runs)
        console.print(_table(result))
        console.print(page.headline(result))
        console.print(f"Page: {out / 'index.html'}   Numbers: {out / 'result.json'}", soft_wrap=True)
        if stop:
            print(f"Stopped by Ctrl-C; what was done is in {out}.", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED)
