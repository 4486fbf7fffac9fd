"""The layer's default hyperparameters, said once, and the paper's rules for another batch size (appendix F)."""

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

ALPHA_FWD = 0.999  # decay of the forward statistics: the paper's setting for ImageNet and fully connected networks
ALPHA_BWD = 0.99  # decay of the backward control process, likewise
EPS = 1e-5  # added to the streaming variance, as in BatchNorm
GUARD: Final = "layer_scaling"  # the paper's guard against exponential growth of activations
GUARD_EPS = 1e-5  # added to the second moment under layer scaling's root
WARMUP = False  # the paper's: full weight on the decay from the first sample on
BOUND_CONTROL = False  # the paper's: a sample may take more than all of the control error in y away
CLAMP_VALUE = 5.0  # the bound of the guard "clamp"


# Decay and horizon


def horizon_of(decay: float) -> float:
    """How many samples a decay averages over: h = 1 / (1 - decay), as in the paper's sweeps."""
    return 1 / (1 - _fraction("decay", decay))


def decay_of(horizon: float) -> float:
    """The decay that averages over so many samples: 1 - 1 / horizon."""
    if not 1 <= horizon < math.inf:
        raise ValueError(f"horizon is {horizon}: it must be a number of samples, 1 or more")
    return 1 - 1 / horizon


# Another batch size (appendix F)

Convention = Literal["pytorch", "damped"]
Rule = Literal["text", "imagenet"]


@dataclass(frozen=True)
class Scaled:
    """Learning rate and momentum for the new batch size; L2 regularisation stays what it was."""

    learning_rate: float
    momentum: float


def scale_hyperparameters(
    batch_size_old: int,
    batch_size_new: int,
    learning_rate: float,
    momentum: float = 0.0,
    convention: Convention = "pytorch",
    rule: Rule = "text",
) -> Scaled:
    """Learning rate and momentum for another batch size.

    Appendix F raises the momentum to the power batch_size_new / batch_size_old and multiplies the rate by that same
    ratio. Where the momentum is not damped, it also multiplies the rate by (1 - new momentum) / (1 - old momentum).

    Args:
        batch_size_old: the batch size that the rate and the momentum are for.
        batch_size_new: the batch size to find them for.
        learning_rate: at the old batch size.
        momentum: at the old batch size.
        convention: "pytorch" for v = momentum v + g, as in `torch.optim.SGD` and Sutskever et al.; "damped" for the
            paper's v = momentum v + (1 - momentum) g. The result is in the same convention.
        rule: "text" is the appendix's; "imagenet" leaves out the ratio of the batch sizes, which is how the paper's
            column for ImageNet follows from its source.
    """
    _one_of("convention", convention, get_args(Convention))
    _one_of("rule", rule, get_args(Rule))
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate is {learning_rate}: it must be a number above 0")
    new_momentum = scale_momentum(batch_size_old, batch_size_new, momentum)
    ratio = _ratio(batch_size_old, batch_size_new)
    if rule == "text":
        learning_rate *= ratio
    if convention == "pytorch":
        learning_rate *= _one_minus_power(momentum, ratio) / (1 - momentum)
    return Scaled(learning_rate, new_momentum)


def scale_momentum(batch_size_old: int, batch_size_new: int, momentum: float) -> float:
    """The momentum that forgets as much per sample as the old one: momentum ** (batch_size_new / batch_size_old)."""
    _fraction("momentum", momentum)
    return math.pow(momentum, _ratio(batch_size_old, batch_size_new))


def scale_decay(batch_size_old: int, batch_size_new: int, decay: float) -> float:
    """The decay that forgets as much per weight update as the old one: decay ** (batch_size_old / batch_size_new).

    The paper keeps its decays, which are per sample, and so does the rule "text", under which weights move as far per
    sample as before. Where weights move as far per update as before, this one lets as much movement into the
    statistics as the old decay did. Its horizon in updates is the old one's.
    """
    _fraction("decay", decay)
    return math.pow(decay, 1 / _ratio(batch_size_old, batch_size_new))


def _one_minus_power(base: float, exponent: float) -> float:
    """1 - base ** exponent, without the cancellation where the power is close to 1."""
    return -math.expm1(exponent * math.log(base)) if base else 1.0


def _ratio(batch_size_old: int, batch_size_new: int) -> float:
    for name, value in (("batch_size_old", batch_size_old), ("batch_size_new", batch_size_new)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: it must be a whole number, 1 or more")
    return batch_size_new / batch_size_old


def _fraction(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 0 and below 1")
    return value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}: it must be {' or '.join(map(repr, allowed))}")
