"""Online Normalization for PyTorch."""

from onlinenorm.torch import functional
from onlinenorm.torch.convert import convert
from onlinenorm.torch.layers import OnlineNorm, OnlineNorm1d, OnlineNorm2d, OnlineNorm3d

__all__ = ["OnlineNorm", "OnlineNorm1d", "OnlineNorm2d", "OnlineNorm3d", "convert", "functional"]
