"""The experiments, one recipe a file. Each reads like the paper's appendix A: settings, data, network, training."""

from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Experiment
from onlinenorm.experiments.recipes import mlp

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in (mlp.EXPERIMENT,)}


def find(name: str) -> Experiment:
    """The experiment of a name."""
    if name not in EXPERIMENTS:
        raise ExperimentError(f"There is no experiment {name!r}. There are: {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]
