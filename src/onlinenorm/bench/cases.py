"""What is measured: the shapes, by group, and the modes (element type and memory layout)."""

import math
from dataclasses import dataclass

Shape = tuple[int, ...]

GROUPS: dict[str, tuple[Shape, ...]] = {
    # ResNet-20 on CIFAR at batch 128: one shape of each of its three stages
    "cifar": ((128, 16, 32, 32), (128, 32, 16, 16), (128, 64, 8, 8)),
    # ResNet-50 on ImageNet: the stem and one shape of each stage, alternating narrow and wide between the two batches
    "imagenet-32": (
        (32, 64, 112, 112), (32, 256, 56, 56), (32, 128, 28, 28), (32, 1024, 14, 14), (32, 512, 7, 7),
    ),
    "imagenet-2": ((2, 64, 112, 112), (2, 64, 56, 56), (2, 512, 28, 28), (2, 256, 14, 14), (2, 2048, 7, 7)),
    # 3D U-Nets on volumes
    "volume": ((1, 16, 64, 64, 64), (2, 32, 32, 32, 32), (1, 32, 64, 64, 64), (2, 16, 64, 64, 64)),
    # high-resolution segmentation: one sample, larger than most caches
    "image": ((1, 64, 512, 512),),
    # fully connected and recurrent layers
    "vector": ((20, 200), (32, 500), (128, 4096)),
    # a few of the above
    "quick": ((128, 16, 32, 32), (2, 64, 56, 56), (2, 32, 32, 32, 32), (20, 200)),
}  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """An element type and a memory layout (cl: channels last); parameters are float32, as under autocast."""

    name: str
    dtype: str
    channels_last: bool


MODES = {
    mode.name: mode
    for mode in (
        Mode("float32", "float32", channels_last=False),
        Mode("float32-cl", "float32", channels_last=True),
        Mode("bfloat16-cl", "bfloat16", channels_last=True),
    )
}


@dataclass(frozen=True)
class LayerCase:
    """One layer on activations (N, C, *) of one shape, in one mode."""

    shape: Shape
    mode: Mode

    @property
    def name(self) -> str:
        """The shape as the user writes it: 128x16x32x32."""
        return "x".join(map(str, self.shape))

    @property
    def activation_bytes(self) -> int:
        """Bytes of the whole input."""
        return math.prod(self.shape) * {"float32": 4, "bfloat16": 2}[self.mode.dtype]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return self.activation_bytes // self.shape[0]


def layer_cases(shapes: list[Shape], modes: list[Mode]) -> list[LayerCase]:
    """Every shape in every mode; channels last only where there are two or three spatial dimensions."""
    return [LayerCase(s, mode) for mode in modes for s in shapes if len(s) > 3 or not mode.channels_last]


def parse_shapes(text: str) -> list[Shape]:
    """Read names of groups and shapes, as "cifar,1x64x512x512"; each shape is kept once, in the order given."""
    shapes: dict[Shape, None] = {}
    for word in map(str.strip, text.split(",")):
        groups = list(GROUPS) if word == "all" else [word]
        for shape in [s for group in groups for s in GROUPS.get(group) or [_shape(word)]]:
            shapes[shape] = None
    return list(shapes)


def parse_names(text: str, allowed: tuple[str, ...]) -> list[str]:
    """Read a comma-separated choice of the allowed names, or "all"; the result is in the order of `allowed`."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word != "all" and word not in allowed:
            raise ValueError(f"{word!r} is none of {', '.join(allowed)}, all")
    return [name for name in allowed if name in words or "all" in words]


def _shape(word: str) -> Shape:
    sizes = word.split("x")
    if not 2 <= len(sizes) <= 5 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(
            f"{word!r} is neither a group of shapes ({', '.join(GROUPS)}, or all) "
            "nor a shape of 2 to 5 positive sizes such as 8x64x56x56"
        )
    return tuple(map(int, sizes))
