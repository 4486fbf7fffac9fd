"""Small made data, for trying things in seconds and without any download. The same arguments give the same data."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onlinenorm.experiments.data.images import ImageData, Images
from onlinenorm.experiments.data.normalisation import Normalisation
from onlinenorm.experiments.data.text import Text

PATCHES = 5  # a pattern is made of so many random values down and across
BRIGHTNESS = 0.5, 0.05  # mean and standard deviation over the images, of 1
CONTRAST = 0.06  # standard deviation over the pixels of a class's pattern
DISTURBANCE = 0.05  # and of the pattern that each image has of its own
GRAIN = 0.15  # standard deviation of what each pixel has of its own
ODDS = 0.5, 0.25, 0.25  # of the words that can follow a word
PERPLEXITY = 2**1.5  # of made text, to whoever knows which can: two to the power of the odds' entropy in bits


def made_images(
    train: int = 2000, test: int = 500, *, size: int = 28, channels: int = 1, classes: int = 10, seed: int = 0
) -> ImageData:
    """Each class has a smooth pattern; each image shows it beside another one of its own, in its own light, with grain.

    The light, which says nothing, is many times brighter than the pattern: a network that does not centre what it sees
    learns slowly.
    """
    generator = torch.Generator().manual_seed(seed)

    def patterns(count: int) -> Tensor:
        values = torch.randn(count, channels, PATCHES, PATCHES, generator=generator)
        return F.interpolate(values, (size, size), mode="bilinear")

    shown = CONTRAST * patterns(classes)
    mean, std = BRIGHTNESS

    def draw(count: int) -> Images:
        labels = torch.arange(count) % classes
        brightness = mean + std * torch.randn(count, 1, 1, 1, generator=generator)
        grain = torch.randn(count, channels, size, size, generator=generator)
        light = brightness + shown[labels] + DISTURBANCE * patterns(count) + GRAIN * grain
        return Images((255 * light).round().clamp(0, 255).byte(), labels, classes, Normalisation((0.0,), (1.0,)))

    return ImageData(draw(train), draw(test))


def made_text(
    train: int = 20_000, validation: int = 2_000, test: int = 2_000, *, words: int = 50, seed: int = 0
) -> Text:
    """A Markov chain: three words can follow a word, one of them twice as likely as the others.

    All words are equally frequent, so nothing is learnt from their frequencies.
    """
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randperm(words, generator=generator).tolist()
    count = train + validation + test
    drawn = torch.multinomial(torch.tensor(ODDS), count, replacement=True, generator=generator).tolist()
    text = [0]
    for which in drawn[1:]:
        text.append(follows[(text[-1] + which) % words])
    first, second, third = torch.split(torch.tensor(text), [train, validation, test])
    return Text(first, second, third, [f"word{i}" for i in range(words)])
