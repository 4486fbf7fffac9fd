"""The experiments, one recipe a file. Each reads like the paper's appendix A: settings, data, network, training."""

from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Experiment
from onlinenorm.experiments.recipes import (
    activation_growth,
    batch_size,
    cifar,
    decay_sweep,
    fine_tune,
    gradient_bias,
    imagenet,
    language,
    memory,
    mlp,
    reproducibility,
    two_elements,
    unet,
    weight_equilibrium,
)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        two_elements.EXPERIMENT,
        gradient_bias.EXPERIMENT,
        activation_growth.EXPERIMENT,
        weight_equilibrium.EXPERIMENT,
        cifar.CIFAR10,
        cifar.CIFAR100,
        imagenet.EXPERIMENT,
        unet.EXPERIMENT,
        mlp.EXPERIMENT,
        *language.EXPERIMENTS,
        memory.EXPERIMENT,
        decay_sweep.EXPERIMENT,
        reproducibility.EXPERIMENT,
        batch_size.EXPERIMENT,
        fine_tune.EXPERIMENT,
    )
}


def find(name: str) -> Experiment:
    """The experiment of a name."""
    if name not in EXPERIMENTS:
        raise ExperimentError(f"There is no experiment {name!r}. There are: {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]
