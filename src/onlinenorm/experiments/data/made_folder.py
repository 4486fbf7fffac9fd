"""Small made JPEGs in ImageNet's layout, so that all that reads it can be tried in seconds."""

from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image

LEAST, MOST = 40, 90  # sides of the images
SHADE = 0.08  # standard deviation of the light over images, and within each
GRAIN = 0.05  # standard deviation of what each pixel has of its own
TINT = 0.15  # by how much a class's colours differ from grey, of 1


def made_folder(folder: Path, train: int = 240, validation: int = 81, *, classes: int = 4, seed: int = 0) -> None:
    """Write JPEGs of several sizes in ImageNet's layout. A class is a tint, faint beside light and shade.

    Whatever is cropped or mirrored, the tint is still there.

    Args:
        folder: to write `train` and `val` into.
        train: images to train on, of all classes together.
        validation: images to validate with.
        classes: how many.
        seed: decides the images.
    """
    generator = torch.Generator().manual_seed(seed)
    angles = 2 * torch.pi * (torch.arange(classes).unsqueeze(1) / classes + torch.arange(3) / 3)
    for part, count in (("train", train), ("val", validation)):
        for number in range(count):
            label = number % classes
            height, width = torch.randint(LEAST, MOST, (2,), generator=generator).tolist()
            shade = F.interpolate(torch.randn(1, 1, 4, 4, generator=generator), (height, width), mode="bicubic")[0]
            light = 0.5 + SHADE * torch.randn(1, generator=generator) + SHADE * shade
            noise = GRAIN * torch.randn(3, height, width, generator=generator)
            pixels = light + TINT * angles[label].cos().view(3, 1, 1) + noise
            image = Image.fromarray((255 * pixels.clamp(0, 1)).byte().permute(1, 2, 0).numpy())
            path = folder / part / f"class{label}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, quality=90)
