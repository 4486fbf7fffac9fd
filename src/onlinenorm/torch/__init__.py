"""Online Normalization for PyTorch."""

from onlinenorm.torch import functional, nn
from onlinenorm.torch.control import follow_scaler, scale_control_errors
from onlinenorm.torch.convert import convert
from onlinenorm.torch.diagnose import diagnose
from onlinenorm.torch.distributed import keep_streams_apart, sync_every, sync_statistics
from onlinenorm.torch.fold import fold
from onlinenorm.torch.freezing import freeze_statistics
from onlinenorm.torch.layers import (
    OnlineNorm,
    OnlineNorm1d,
    OnlineNorm2d,
    OnlineNorm3d,
    OnlineNormAct,
    OnlineNormAct1d,
    OnlineNormAct2d,
    OnlineNormAct3d,
)

__all__ = [
    "OnlineNorm",
    "OnlineNorm1d",
    "OnlineNorm2d",
    "OnlineNorm3d",
    "OnlineNormAct",
    "OnlineNormAct1d",
    "OnlineNormAct2d",
    "OnlineNormAct3d",
    "convert",
    "diagnose",
    "fold",
    "follow_scaler",
    "freeze_statistics",
    "functional",
    "keep_streams_apart",
    "nn",
    "scale_control_errors",
    "sync_every",
    "sync_statistics",
]
