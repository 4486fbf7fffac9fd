"""`onlinenorm sweep`: an experiment over a grid of settings, by several processes, on any number of machines."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onlinenorm.experiments import options
from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.options import check, split_changes


def sweep(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which experiment.", show_default=False)],
    scale: options.Scale = "cpu",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="A setting and its values, FROM..TO or separated by commas; give one or two. "
            "FROM..TO doubles from one to the other; of a decay factor, the horizon does.",
            show_default="the paper's decay factors",
        ),
    ] = None,
    step: Annotated[
        int, typer.Option(metavar="N", min=1, help="Only every Nth power of two of each grid: a coarser map.")
    ] = 1,
    norm: Annotated[str, typer.Option(metavar="NAME", help="The normaliser.")] = "online",
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each point; the map has their median.")] = 1,
    seed: options.Seed = 0,
    change: options.Changes = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Processes on this machine.", show_default="one a GPU, otherwise one a core"
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where the sweep is shared: any URL that Optuna takes. Commands with the same one share the runs.",
            show_default="sqlite:///DIR/sweep-NAME/study.db",
        ),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="End runs that fall behind the median of the others.")] = False,
    device: options.Device = "auto",
    precision: options.Precision = "32",
    data: options.Data = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Runs go to DIR/sweep-NAME/SCALE/.")] = Path("runs"),
) -> None:
    """Run an experiment over a grid of settings, and draw the map.

    The same command goes on after Ctrl-C, a crash or a kill -9, and on further
    machines, with the same --storage, it joins in. A smaller --step adds to a
    coarse map. For example:

        onlinenorm sweep mlp --step 3

        onlinenorm sweep mlp --norm layer --grid learning_rate=0.01..0.16
    """
    with options.ending("The same command goes on."):
        from onlinenorm.experiments.experiment import PRECISIONS, SCALES
        from onlinenorm.experiments.recipes import find
        from onlinenorm.experiments.sweep.plan import plan_sweep
        from onlinenorm.experiments.sweep.run import run_sweep

        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ExperimentError("A sweep starts its own processes: use --workers in place of torchrun.")
        experiment = find(name)
        check("--scale", scale, SCALES)
        check("--precision", precision, PRECISIONS)
        check("--norm", norm, experiment.allowed)
        changes = split_changes(change or ())
        seeds = tuple(range(seed, seed + runs))
        plan = plan_sweep(experiment, scale, norm, changes, precision, grid or (), step, seeds)  # type: ignore[arg-type]
        url = storage or f"sqlite:///{out / plan.name / 'study.db'}"
        console = Console()
        found = run_sweep(plan, url, prune, workers, device, data, out, console)
        found.show(console)
        console.print(f"Map: {plan.page(out)}", highlight=False, soft_wrap=True)
