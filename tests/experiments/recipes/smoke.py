"""Doing an experiment at the scale of seconds."""

from rich.console import Console

from onlinenorm.experiments.experiment import Request
from onlinenorm.experiments.recipes import find
from onlinenorm.experiments.reproduce import run_all


def do(name, out, norms=(), seeds=(0,), on=None, resume=False, **changes):
    """The records of an experiment's runs, in their order."""
    experiment = find(name)
    base = find(on or experiment.on[0]) if experiment.on else experiment
    request = Request("smoke", tuple(norms) or experiment.norms, seeds, "32", base, changes)
    return run_all(experiment, request, out, "cpu", None, resume, Console(quiet=True))
