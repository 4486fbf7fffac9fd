"""What other libraries need beyond a layer class: timm's normalisation with activation, and MONAI's registry."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from onlinenorm.torch.layers import OnlineNorm1d, OnlineNorm2d, OnlineNorm3d


class TimmNormAct2d(OnlineNorm2d):
    """Online Normalization, drop and activation in one layer: what `BatchNormAct2d` is to timm.

    `onlinenorm.torch.convert` makes it of timm's layer. A new timm model takes it as `norm_layer`, with the activation
    named once, as timm does not hand its own to layers that it does not know:

        def norm_layer(channels, **kwargs):
            return TimmNormAct2d(channels, act_layer=nn.SiLU, **kwargs)

    Args:
        num_features: channels.
        apply_act: whether there is an activation at all.
        act_layer: what makes the activation, or timm's name for it.
        act_kwargs: arguments of act_layer.
        inplace: whether the activation works in place, unless act_kwargs says.
        drop_layer: what makes the layer between normalisation and activation.
        settings: of `OnlineNorm2d`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        apply_act: bool = True,
        act_layer: Callable[..., nn.Module] | str = nn.ReLU,
        act_kwargs: dict[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(num_features, **settings)
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        self.act: nn.Module = nn.Identity()
        if apply_act:
            # timm knows which activations have an in-place form
            from timm.layers import create_act_layer  # type: ignore[import-not-found,unused-ignore]

            self.act = create_act_layer(act_layer, **{"inplace": inplace, **(act_kwargs or {})})

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, drop, activate."""
        z: Tensor = self.act(self.drop(super().forward(x)))
        return z


def register_monai() -> None:
    """Make "online" a norm of MONAI's networks: `UNet(..., norm=("online", {"alpha_fwd": 0.999}))`."""
    try:
        from monai.networks.layers.factories import Norm  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError("MONAI is not installed: pip install monai") from error
    if "ONLINE" not in Norm.names:
        kinds = (OnlineNorm1d, OnlineNorm2d, OnlineNorm3d)
        Norm.add_factory_callable("online", lambda dimensions: kinds[dimensions - 1], "Online Normalization")
