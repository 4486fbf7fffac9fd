"""Which figures show the runs of which experiment."""

from collections.abc import Callable, Mapping

from onlinenorm.experiments.report import analyses, training
from onlinenorm.experiments.report.collect import DECAYS, Comparison

DRAWN: Mapping[str, Callable[[Comparison], list[str]]] = {
    "two-elements": analyses.two_elements,
    "gradient-bias": analyses.gradient_bias,
    "activation-growth": analyses.activation_growth,
    "weight-equilibrium": analyses.weight_equilibrium,
    "memory": analyses.memory_chart,
    DECAYS: training.decay_map,
    "batch-size": training.by_batch_size,
    "fine-tune": training.fine_tuning,
}


def draw(comparison: Comparison) -> list[str]:
    """The figures of a comparison's finished runs, each a <figure>; learning curves unless it is of another kind."""
    return DRAWN.get(comparison.experiment.name, training.learning_curves)(comparison)
