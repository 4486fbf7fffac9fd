"""`onlinenorm reproduce`: run an experiment, and say how it compares with what the paper reports."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from onlinenorm.experiments import options
from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.options import check, split_changes

if TYPE_CHECKING:
    from onlinenorm.experiments.experiment import Experiment, Job, Plan, Request
    from onlinenorm.experiments.runs import Record


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which experiment; --list shows them.")] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the experiments, their data and expected time.")
    ] = False,
    scale: options.Scale = "cpu",
    norm: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Normalisers, separated by commas.", show_default="the experiment's"),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Runs of each.", show_default="the experiment's")
    ] = None,
    seed: options.Seed = 0,
    on: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For an experiment over another: over which.", show_default="its first"),
    ] = None,
    change: options.Changes = None,
    device: options.Device = "auto",
    precision: options.Precision = "32",
    data: options.Data = None,
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
    with options.ending("The same command with --resume goes on from the last checkpoint."):
        if listing or name is None:
            console.print(_list())
            return
        from onlinenorm.experiments.experiment import PRECISIONS, SCALES, Request
        from onlinenorm.experiments.recipes import find

        experiment = find(name)
        check("--scale", scale, SCALES)
        check("--precision", precision, PRECISIONS)
        base = find(check("--on", on, experiment.on)) if on else find(experiment.on[0]) if experiment.on else experiment
        norms = tuple(part.strip() for part in norm.split(",")) if norm else experiment.norms
        for part in norms:
            check("--norm", part, experiment.allowed)
            if norms.count(part) > 1:
                raise ExperimentError(f"--norm {part}: given more than once.")
        count = runs or experiment.runs[scale]  # type: ignore[index]
        seeds = tuple(range(seed, seed + count))
        request = Request(scale, norms, seeds, precision, base, split_changes(change or ()))  # type: ignore[arg-type]
        records = run_all(experiment, request, out, device, data, resume, console)
        if records:
            _show(experiment, records, console)


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


def _list() -> Table:
    from onlinenorm.experiments.recipes import EXPERIMENTS

    table = Table(title="onlinenorm reproduce NAME", title_justify="left", caption_justify="left")
    table.caption = "Times are for the whole command, on two cores where no device is named."
    table.add_column("NAME", no_wrap=True)
    for column in ("What", "Data", "cpu", "paper"):
        table.add_column(column)
    for experiment in EXPERIMENTS.values():
        time = experiment.time
        table.add_row(experiment.name, experiment.title, experiment.data, time["cpu"], time["paper"])
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
    waiting = max(record.waiting for record in records)
    console.print(f"Training waited for data for at most {waiting:.1%} of a run's time.")
    console.print(f"Runs: {records[0].directory.parent}", soft_wrap=True)
