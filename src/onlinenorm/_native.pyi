"""The CPU engine (native/include/onlinenorm.h) on tensors of any type that has a DLPack exchange table."""

from typing import Any

class Layer:
    """The settings of a layer; each call adds its tensors."""

    def __init__(
        self,
        tensor_type: type,
        alpha_fwd: float,
        alpha_bwd: float,
        eps: float,
        guard: int,
        guard_eps: float,
        clamp_value: float,
        warmup: bool,
        bound_control: bool,
        activation: int,
    ) -> None: ...
    def fits(
        self, x: Any, mean: Any, var: Any, control_y: Any, control_1: Any, weight: Any, bias: Any, num_samples: Any, /
    ) -> bool: ...
    def replay_bytes(self, x: Any, /) -> int: ...
    def forward(
        self,
        training: bool,
        threads: int,
        x: Any,
        weight: Any,
        bias: Any,
        mean: Any,
        var: Any,
        num_samples: Any,
        z: Any,
        replay: Any,
        /,
    ) -> None: ...
    def backward(
        self,
        training: bool,
        threads: int,
        x: Any,
        grad_z: Any,
        weight: Any,
        bias: Any,
        control_y: Any,
        control_1: Any,
        replay: Any,
        grad_x: Any,
        grad_weight: Any,
        grad_bias: Any,
        /,
    ) -> None: ...

def isa() -> str:
    """The SIMD level in use."""

def floor_forward(source: int, to: int, bytes: int, threads: int, streaming: bool) -> None:
    """Read one, write one: the least that a forward has to move."""

def floor_backward(first: int, second: int, to: int, bytes: int, threads: int, streaming: bool) -> None:
    """Read two, write one: the least that a backward has to move."""
