"""Images in memory, as one uint8 tensor, handed out in batches: no loader, and each batch is augmented as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from onlinenorm.experiments.data.normalisation import Normalisation
from onlinenorm.experiments.errors import ExperimentError


@dataclass(frozen=True)
class Augment:
    """He et al. (2016), section 4.2: pad with black, crop at random to the size before, mirror every second image."""

    padding: int = 4

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """What is to happen to each image: rows and columns to leave out before the crop, whether to mirror it."""
        crop = torch.randint(0, 2 * self.padding + 1, (count, 2), generator=generator)
        mirror = torch.randint(0, 2, (count, 1), generator=generator)
        return torch.cat([crop, mirror], dim=1)

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Do to each image what was drawn for it, in one gather."""
        count, channels, height, width = images.shape
        top, left, mirror = drawn.unsqueeze(2).unbind(1)
        x = torch.arange(width, device=images.device)
        rows = top + torch.arange(height, device=images.device)
        columns = left + torch.where(mirror.bool(), width - 1 - x, x)
        pixels = rows.unsqueeze(2) * (width + 2 * self.padding) + columns.unsqueeze(1)
        padded = F.pad(images, (self.padding,) * 4).flatten(2)
        return padded.gather(2, pixels.view(count, 1, -1).expand(-1, channels, -1)).view_as(images)


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images.

    Attributes:
        pixels: uint8, (N, C, H, W).
        labels: int64, (N,).
        classes: how many.
        normalisation: of the pixels in batches.
    """

    pixels: Tensor
    labels: Tensor
    classes: int
    normalisation: Normalisation

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> "Images":
        """Only the first so many, or all if there are fewer."""
        return replace(self, pixels=self.pixels[:count], labels=self.labels[:count])

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: torch.Generator | None = None,
        augment: Augment | None = None,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        device: torch.device | str | None = None,
    ) -> "Batches":
        """One epoch's batches: normalised float32 images and their labels.

        Args:
            batch_size: images in a batch, those of all processes together.
            shuffle: draws the order; without it, images come as they are kept. As long as each process passes a
                generator in the same state, the order and the augmentation of a batch do not depend on `world`.
            augment: what to do to each image; drawn from `shuffle`, or from PyTorch's global generator without it.
            rank: of this process, which gets its share of every batch.
            world: how many processes there are.
            drop_last: leave out a last, smaller batch.
            device: where to keep the pixels meanwhile, and to make the batches.
        """
        return Batches(
            self, shares(len(self), batch_size, rank, world, drop_last, shuffle is not None), shuffle, augment, device
        )


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images to train on and to test with."""

    train: Images
    test: Images


@dataclass(frozen=True, eq=False)
class Batches:
    """An epoch of `Images.batches`. Each time it is gone through is another epoch, drawn anew."""

    images: Images
    shares: list[slice]
    shuffle: torch.Generator | None
    augment: Augment | None
    device: torch.device | str | None

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        pixels, labels = self.images.pixels.to(self.device), self.images.labels.to(self.device)
        count = len(labels)
        order = torch.arange(count) if self.shuffle is None else torch.randperm(count, generator=self.shuffle)
        order = order.to(labels.device)
        if self.augment is not None:
            drawn = self.augment.draw(count, self.shuffle).to(labels.device)
        for share in self.shares:
            chosen = order[share]
            batch = pixels[chosen]
            if self.augment is not None:
                batch = self.augment.apply(batch, drawn[share])
            yield normalise(batch, self.images.normalisation), labels[chosen]


def normalise(pixels: Tensor, normalisation: Normalisation) -> Tensor:
    """Turn uint8 (N, C, H, W) into float32, by channel."""
    mean, std = (torch.tensor(values, device=pixels.device).view(-1, 1, 1) for values in normalisation)
    return pixels.float().mul_(1 / (255 * std)).sub_(mean / std)


def shares(count: int, batch_size: int, rank: int, world: int, drop_last: bool, together: bool) -> list[slice]:
    """Which of an epoch's `count` images, in the order drawn, one process gets in each batch.

    Processes that train step together, so then each gets equally many of every batch, and what a last batch has beyond
    that (fewer than there are processes) is left out. Otherwise no image is.
    """
    if not 1 <= batch_size <= count and (drop_last or batch_size < 1):
        raise ExperimentError(f"A batch of {batch_size} cannot be had from {count} images. Choose 1 to {count}.")
    if together and batch_size % world:
        raise ExperimentError(
            f"A batch of {batch_size} cannot be shared equally by {world} processes. "
            f"Choose a batch size that is a multiple of {world}, or another number of processes."
        )
    kept = []
    for start in range(0, count, batch_size):
        stop = min(start + batch_size, count)
        if drop_last and stop - start < batch_size:
            break
        if together:
            stop -= (stop - start) % world
        if start + rank < stop:
            kept.append(slice(start + rank, stop, world))
    return kept
