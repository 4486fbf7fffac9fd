"""What makes two layers differ besides their tensors, checked once."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from onlinenorm import hyperparameters as default

Guard = Literal["layer_scaling", "clamp"] | None
GUARDS: tuple[Guard, ...] = ("layer_scaling", "clamp", None)
Act = Literal["relu", "leaky_relu", "silu", "gelu"] | None
ACTS: tuple[Act, ...] = (None, "relu", "leaky_relu", "silu", "gelu")
LEAKY_SLOPE = 0.01  # of "leaky_relu" below 0


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """The hyperparameters of Online Normalization, named as in the layers' documentation.

    Equal ones are one object if they come from `checked_settings`, so they are compared, and looked up, by identity.
    """

    alpha_fwd: float = default.ALPHA_FWD
    alpha_bwd: float = default.ALPHA_BWD
    eps: float = default.EPS
    guard: Guard = default.GUARD
    guard_eps: float = default.GUARD_EPS
    clamp_value: float = default.CLAMP_VALUE
    warmup: bool = default.WARMUP
    bound_control: bool = default.BOUND_CONTROL
    act: Act = None

    def __post_init__(self) -> None:
        for name in ("alpha_fwd", "alpha_bwd"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        for name in ("eps", "guard_eps"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if not 0 < self.clamp_value < float("inf"):
            raise ValueError(f"clamp_value must be finite and positive, got {self.clamp_value}")
        for name, allowed in (
            ("guard", GUARDS),
            ("act", ACTS),
            ("warmup", (False, True)),
            ("bound_control", (False, True)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


checked_settings = lru_cache(maxsize=1024)(Settings)
