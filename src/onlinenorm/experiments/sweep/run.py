"""Doing a sweep: starting its workers, showing how they get on, drawing the map."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Metric
from onlinenorm.experiments.files import write_whole
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import best, number
from onlinenorm.experiments.runs import find_earlier
from onlinenorm.experiments.sweep.claims import Claims, Shared, curve, storage_errors
from onlinenorm.experiments.sweep.map import Map
from onlinenorm.experiments.sweep.plan import Sweep
from onlinenorm.experiments.sweep.workers import Work, Workers, default_count

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


def run_sweep(
    plan: Sweep,
    url: str,
    prune: bool,
    count: int | None,
    device: str,
    folder: Path | None,
    out: Path,
    console: Console,
) -> Map:
    """Do a sweep's runs, or what is left of them; returns the map, which is on disk too."""
    _make_directory(plan.page(out).parent)
    claims = Shared(url, f"{plan.name}/{plan.scale}/{plan.label}", plan.metric, plan.about(), prune).open()
    jobs = {job.label: job for _, its in plan.points() for job in its}
    with storage_errors(url):
        done = claims.done(claims.trials()).keys() & jobs.keys()
        left = [job for label, job in jobs.items() if label not in done]
        if left:
            for job in left:  # what is in the way of one is said before the first
                find_earlier(job, out, resume=True)
            plan.base.load(left[0].settings, folder)  # so that what is missing is said, or downloaded, once
            varied = {label: plan.varied(job) for label, job in jobs.items()}
            work = Work(jobs, varied, claims.shared, out, device, folder)
            with Workers(min(count or default_count(device), len(left)), work, claims) as workers:
                _watch(plan, work, done, claims, workers, console)
        return _draw(plan, claims, out)


def _watch(plan: Sweep, work: Work, seen: set[str], claims: Claims, workers: Workers, console: Console) -> None:
    """Show how the sweep gets on, until its workers have ended; `seen` was done before."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
        transient=True,
        speed_estimate_period=24 * 3600,
        disable=not console.is_terminal,
    )
    count = len(work.jobs)
    said: set[str] = set()
    with progress:
        task = progress.add_task(plan.name, total=count, completed=len(seen), best="")
        at_work = True
        while at_work:
            at_work = workers.at_work
            done = claims.done(claims.trials())
            for label in done.keys() & work.jobs.keys() - seen:
                seen.add(label)
                best = _draw(plan, claims, work.out).sentences()[:1]
                progress.update(task, completed=len(seen), best=" ".join(best))
                if not console.is_terminal:
                    text = f"{len(seen)} of {count}: {label}: {_outcome(done[label], plan.metric)}"
                    console.print(text, highlight=False, soft_wrap=True)
            for message in workers.wait() if at_work else ():
                if message not in said:
                    print(message, file=sys.stderr)
                said.add(message)
    if len(seen) < count:
        raise ExperimentError(f"{count - len(seen)} of {count} runs are left. The same command goes on.")


def _outcome(trial: "FrozenTrial", metric: Metric) -> str:
    return number(trial.value, metric.form) if trial.state.name == "COMPLETE" and trial.value is not None else "pruned"


def _draw(plan: Sweep, claims: Claims, out: Path) -> Map:
    """Write the map as it is so far."""
    curves: dict[str, Any] = {}
    pruned = set()
    for trial in claims.trials():
        if trial.state.name == "COMPLETE":
            curves[trial.user_attrs["run"]] = curve(trial, plan.metric)
        elif trial.state.name == "PRUNED":
            pruned.add(trial.user_attrs["run"])
    found, ended = {}, set()
    for point, jobs in plan.points():
        known = [curves[job.label] for job in jobs if job.label in curves]
        if known:
            found[point] = best(known, plan.metric)
        elif any(job.label in pruned for job in jobs):
            ended.add(point)
    norm = plan.settings.norm
    reported = plan.base.settings("paper", norm)
    drawn = Map(
        title=f"{plan.base.title}: {NORMALIZERS[norm].label}, {plan.scale} scale",
        norm=norm,
        metric=plan.metric,
        grids=plan.grids,
        found=found,
        pruned=frozenset(ended),
        paper=tuple(getattr(reported, grid.name) for grid in plan.grids),
    )
    write_whole(plan.page(out), drawn.page())
    return drawn


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExperimentError(f"Cannot write into {directory}: {error.strerror}. Choose another --out.") from error
