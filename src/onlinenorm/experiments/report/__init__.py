"""`onlinenorm report`: one page over all runs."""

from pathlib import Path
from typing import Annotated

import typer

from onlinenorm.experiments.options import ending


def report(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the runs are; the page goes to DIR/report/index.html.")
    ] = Path("runs"),
) -> None:
    """Put all runs on one page, beside what the paper reports.

    The page needs nothing else: it can be sent, or opened on a phone. Runs
    that are not finished are named and left out, as is what cannot be read.
    """
    with ending("The report is as it was."):
        from onlinenorm.experiments.files import write_whole
        from onlinenorm.experiments.report.collect import collect
        from onlinenorm.experiments.report.page import render

        page = out / "report" / "index.html"
        html, warnings = render(collect(out))
        write_whole(page, html)
        for warning in warnings:
            typer.echo(f"Left out: {warning}", err=True)
        typer.echo(f"{page}")
