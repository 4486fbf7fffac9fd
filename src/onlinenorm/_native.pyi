"""The CPU engine (native/include/onlinenorm.h) on plain addresses."""

class Layer:
    """The settings of a layer; each call adds its shape."""

    def __init__(
        self,
        channels: int,
        alpha_fwd: float,
        alpha_bwd: float,
        eps: float,
        guard: int,
        guard_eps: float,
        clamp_value: float,
    ) -> None: ...
    def replay_bytes(self, samples: int, elements: int, dtype: int) -> int: ...
    def forward(
        self,
        samples: int,
        elements: int,
        layout: int,
        dtype: int,
        param_dtype: int,
        training: bool,
        threads: int,
        x: int,
        weight: int,
        bias: int,
        mean: int,
        var: int,
        num_samples: int,
        z: int,
        replay: int,
    ) -> None: ...
    def backward(
        self,
        samples: int,
        elements: int,
        layout: int,
        dtype: int,
        param_dtype: int,
        training: bool,
        threads: int,
        x: int,
        grad_z: int,
        weight: int,
        bias: int,
        control_y: int,
        control_1: int,
        replay: int,
        grad_x: int,
        grad_weight: int,
        grad_bias: int,
    ) -> None: ...

def isa() -> str:
    """The SIMD level in use."""

def floor_forward(source: int, to: int, bytes: int, threads: int, streaming: bool) -> None:
    """Read one, write one: the least that a forward has to move."""

def floor_backward(first: int, second: int, to: int, bytes: int, threads: int, streaming: bool) -> None:
    """Read two, write one: the least that a backward has to move."""
