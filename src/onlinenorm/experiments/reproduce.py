"""`onlinenorm reproduce`: run an experiment, and say how it compares with what the paper reports."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from onlinenorm.experiments.errors import ExperimentError

if TYPE_CHECKING:
    from onlinenorm.experiments.experiment import Experiment, Job, Plan, Request
    from onlinenorm.experiments.runs import Record

EXIT_INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which experiment; --list shows them.")] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the experiments, their data and expected time.")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            metavar="SCALE",
            help="paper: exactly the paper's setting. cpu: reduced to what two cores do within the hour. "
            "smoke: seconds, on made data.",
        ),
    ] = "cpu",
    norm: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Normalisers, separated by commas.", show_default="the experiment's"),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Runs of each.", show_default="the experiment's")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the first run; the others count on.")] = 0,
    on: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For an experiment over another: over which.", show_default="its first"),
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or mps.")] = "auto",
    precision: Annotated[
        str, typer.Option(metavar="BITS", help="32, or bf16: bfloat16 where autocast allows it.")
    ] = "32",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the data is, as published or unpacked.",
            show_default="downloaded to the user's cache",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Runs go to DIR/NAME/SCALE/.")] = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with runs that were killed, and use those that finished.")
    ] = False,
) -> None:
    """Run an experiment of the paper, and compare with what it reports.

    Every run leaves settings, metrics and a checkpoint in DIR/NAME/SCALE/RUN.
    After Ctrl-C, or a crash, the same command with --resume goes on, and ends
    with the same numbers. Under torchrun the processes share each batch.
    """
    console = Console(quiet=int(os.environ.get("RANK", 0)) > 0)
    try:
        if listing or name is None:
            console.print(_list())
            return
        from onlinenorm.experiments.experiment import PRECISIONS, SCALES, Request
        from onlinenorm.experiments.recipes import find

        experiment = find(name)
        _check("--scale", scale, SCALES)
        _check("--precision", precision, PRECISIONS)
        base = (
            find(_check("--on", on, experiment.on)) if on else find(experiment.on[0]) if experiment.on else experiment
        )
        norms = tuple(part.strip() for part in norm.split(",")) if norm else experiment.norms
        for part in norms:
            _check("--norm", part, experiment.allowed)
        count = runs or experiment.runs[scale]  # type: ignore[index]
        seeds = tuple(range(seed, seed + count))
        changes = dict(_split(text) for text in change or ())
        request = Request(scale, norms, seeds, precision, base, changes)  # type: ignore[arg-type]
        records = run_all(experiment, request, out, device, data, resume, console)
        if records:
            _show(experiment, records, console)
    except ExperimentError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C. The same command with --resume goes on from the last checkpoint.", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def run_all(
    experiment: "Experiment",
    request: "Request",
    out: Path,
    device: str,
    folder: Path | None,
    resume: bool,
    console: Console,
) -> "list[Record]":
    """Do the runs that a request asks for, or what is left of them; returns their records."""
    from onlinenorm.experiments.display import TerminalDisplay
    from onlinenorm.experiments.runs import find_earlier, make_fabric, run_job

    fabric = make_fabric(device, request.precision)

    def earlier(job: "Job") -> "Record | None":
        found = find_earlier(job, out, resume) if fabric.is_global_zero else None
        return fabric.broadcast(found)

    if experiment.plan is None:  # then all runs are known, and what is in the way of one is said before the first
        for known in experiment.jobs(request):
            earlier(known)
    records: list[Record] = []
    loaded: dict[Any, Any] = {}
    plan = experiment.jobs(request)
    with TerminalDisplay(console) as display:
        job = next(plan, None)
        while job:
            record = earlier(job)
            if record is None or not record.finished:
                source = (job.base.load, getattr(job.settings, "data", ""))
                if source not in loaded:
                    loaded[source] = job.base.load(job.settings, folder)
                record = run_job(job, out, fabric, loaded[source], display)
            records.append(record)
            job = _next(plan, record)
    return records


def _next(plan: "Plan", record: "Record") -> "Job | None":
    try:
        return plan.send(record)
    except StopIteration:
        return None


def _check(option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        among = f"Allowed: {', '.join(allowed)}." if allowed else "This experiment has no such choice."
        raise ExperimentError(f"{option} {value}: {among}")
    return value


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ExperimentError(f"--set {text}: NAME=VALUE is wanted, such as epochs=3.")
    return name.strip(), value.strip()


def _list() -> Table:
    from onlinenorm.experiments.recipes import EXPERIMENTS

    table = Table(title="onlinenorm reproduce NAME", title_justify="left", caption_justify="left")
    table.caption = "Times are for the whole command: cpu on two cores, paper on one GPU or, where small, on two cores."
    for column in ("NAME", "What", "Data", "cpu", "paper"):
        table.add_column(column)
    for experiment in EXPERIMENTS.values():
        what = f"{experiment.title}: {experiment.shows}"
        table.add_row(experiment.name, what, experiment.data, experiment.time["cpu"], experiment.time["paper"])
    return table


def _show(experiment: "Experiment", records: "list[Record]", console: Console) -> None:
    from onlinenorm.experiments.summary import summarize

    summary = summarize(experiment, records)
    table = Table(title=experiment.title, title_justify="left")
    for column in summary.columns:
        table.add_column(column, justify="left" if column == summary.columns[0] else "right")
    for row in summary.rows:
        table.add_row(*row)
    console.print(table)
    if summary.note:
        console.print(summary.note)
    console.print(f"Runs: {records[0].directory.parent}", soft_wrap=True)
