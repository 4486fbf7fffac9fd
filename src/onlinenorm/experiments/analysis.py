"""What the experiments share that look at networks without training them to the end."""

from pathlib import Path
from typing import Any

from onlinenorm.experiments.errors import ExperimentError


def only_float32(settings: Any) -> None:
    """Refuse another precision, in which these experiments would say something else than the paper."""
    if settings.precision != "32":
        raise ExperimentError(f"This experiment runs in float32 only: leave out --precision {settings.precision}.")


def no_data(settings: Any, folder: Path | None) -> None:
    """What an experiment loads that needs no data."""
    only_float32(settings)
