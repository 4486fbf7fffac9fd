"""The command line: each command lives in its own module and is only registered here."""

from typing import Annotated

import typer

import onlinenorm
from onlinenorm.bench import bench
from onlinenorm.experiments.demo import demo
from onlinenorm.experiments.report import report
from onlinenorm.experiments.reproduce import reproduce
from onlinenorm.experiments.sweep import sweep
from onlinenorm.scale import scale

app = typer.Typer(
    help="Online Normalization: see it train, reproduce the paper, measure its speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onlinenorm {onlinenorm.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (demo, reproduce, sweep, report, scale, bench):
    app.command()(command)
