"""Online Normalization for PyTorch."""

from onlinenorm.torch import functional
from onlinenorm.torch.control import follow_scaler, scale_control_errors
from onlinenorm.torch.convert import convert
from onlinenorm.torch.freezing import freeze_statistics
from onlinenorm.torch.layers import OnlineNorm, OnlineNorm1d, OnlineNorm2d, OnlineNorm3d

__all__ = [
    "OnlineNorm",
    "OnlineNorm1d",
    "OnlineNorm2d",
    "OnlineNorm3d",
    "convert",
    "follow_scaler",
    "freeze_statistics",
    "functional",
    "scale_control_errors",
]
