"""What the commands that run experiments share: options, and how they end."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from onlinenorm.experiments.errors import ExperimentError

EXIT_INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C

Scale = Annotated[
    str,
    typer.Option(
        metavar="SCALE",
        help="paper: exactly the paper's setting. cpu: reduced to what two cores do within the hour. "
        "smoke: seconds, on made data.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of the first run; the others count on.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; may be repeated.")
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or mps.")]
Precision = Annotated[str, typer.Option(metavar="BITS", help="32, or bf16: bfloat16 where autocast allows it.")]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where the data is, as published or unpacked.",
        show_default="downloaded to the user's cache",
    ),
]


def check(option: str, value: str, allowed: Sequence[str]) -> str:
    """An option's value, if it is one of those allowed."""
    if value not in allowed:
        among = f"Allowed: {', '.join(allowed)}." if allowed else "This experiment has no such choice."
        raise ExperimentError(f"{option} {value}: {among}")
    return value


def split_changes(texts: Iterable[str]) -> dict[str, str]:
    """The values of --set by the settings' names."""
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ExperimentError(f"--set {text}: NAME=VALUE is wanted, such as epochs=3.")
        changes[name.strip()] = value.strip()
    return changes


@contextmanager
def ending(interrupted: str) -> Iterator[None]:
    """End the command with a message after an error that its user can do something about, and after Ctrl-C."""
    try:
        yield
    except ExperimentError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print(f"Stopped by Ctrl-C. {interrupted}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
