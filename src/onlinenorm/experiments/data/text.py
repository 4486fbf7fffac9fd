"""A corpus of words."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Text:
    """Words in their order, as indices (int64) into the vocabulary."""

    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: list[str]
