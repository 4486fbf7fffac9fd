"""What the experiments' networks have in common."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]  # makes the normaliser of (N, C, *) for a number of channels C


class Join(nn.Module):
    """Where a residual block ends: relu(residual + shortcut).

    Args:
        identity: whether the shortcut is the block's input as it is, and not a projection of it.
    """

    def __init__(self, identity: bool) -> None:
        super().__init__()
        self.identity = identity

    def forward(self, residual: Tensor, shortcut: Tensor) -> Tensor:
        """The block's output."""
        return F.relu(residual + shortcut)
