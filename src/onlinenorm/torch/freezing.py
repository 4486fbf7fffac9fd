"""Leave the streams of a model alone while it learns on."""

from torch import nn

from onlinenorm.torch.layers import online_norm_layers


def freeze_statistics(model: nn.Module, frozen: bool = True) -> nn.Module:
    """Let the OnlineNorm layers of a model use their statistics as they are, whatever `model.train()` says.

    A frozen layer acts as in `eval()`: neither the statistics nor the control errors move, and the backward is the
    plain derivative. Its weight and bias go on learning; `requires_grad_(False)` ends that, and does not freeze the
    statistics. The switch is the attribute `freeze_statistics` of each layer. A state dict does not carry it.

    Args:
        model: a model, a part of one, or a layer.
        frozen: False to let the streams go on, from where they stopped.

    Returns:
        The model.
    """
    for layer in online_norm_layers(model):
        layer.freeze_statistics = frozen
    return model
