"""The paper's fully connected network: 784-500-300-10 (appendix A.3), with a normaliser before every ReLU."""

from torch import nn

from onlinenorm.experiments.parts import Norm


def mlp(norm: Norm, pixels: int = 28 * 28, classes: int = 10) -> nn.Sequential:
    """Images, any shape of `pixels` numbers, to logits.

    Args:
        norm: makes the normaliser for a number of channels.
        pixels: of an image.
        classes: of the last layer.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, 500, bias=False), norm(500), nn.ReLU(),
        nn.Linear(500, 300, bias=False), norm(300), nn.ReLU(),
        nn.Linear(300, classes),
    )  # fmt: skip
