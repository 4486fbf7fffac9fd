"""ImageNet, or anything like it: JPEGs in one folder per class, decoded and augmented by several workers."""

import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from onlinenorm.experiments.data.images import normalise, shares
from onlinenorm.experiments.data.normalisation import IMAGENET
from onlinenorm.experiments.errors import ExperimentError

SUFFIXES = ".jpg", ".jpeg", ".png"
AREA = 0.08, 1.0  # of a training crop, as part of its image's
ASPECT = 3 / 4, 4 / 3  # of a training crop
ATTEMPTS = 10  # at a crop that fits into the image
CENTRE = -1  # in place of a seed: crop at the centre
RESIZE = 256 / 224  # an image's short side, as part of the validation crop's
LAYOUT = """\
Wanted are DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG, a folder for each class. ImageNet's archives (for which
https://image-net.org/download.php wants an account) get there so:
  mkdir train val && tar -xf ILSVRC2012_img_train.tar -C train && tar -xf ILSVRC2012_img_val.tar -C val
  cd train && for t in *.tar; do mkdir ${t%.tar} && tar -xf $t -C ${t%.tar} && rm $t; done; cd ..
and val's images into folders by class, as this script moves them:
  https://raw.githubusercontent.com/soumith/imagenetloader.torch/master/valprep.sh"""


@dataclass(frozen=True, eq=False)
class FolderImages:
    """Labelled images in files.

    Attributes:
        paths: of the files.
        labels: int64, (N,).
        classes: how many.
        size: sides of the images in batches.
    """

    paths: list[str]
    labels: Tensor
    classes: int
    size: int

    def __len__(self) -> int:
        return len(self.paths)

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: torch.Generator | None = None,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        workers: int = 0,
    ) -> "FolderBatches":
        """One epoch's batches: normalised float32 images and their labels.

        Args:
            batch_size: images in a batch, those of all processes together.
            shuffle: draws the order and, for each image, a crop and whether to mirror it: nothing else decides them,
                neither how many workers there are nor how many processes. Without it, images come in the order of
                their names, cropped at the centre, as for validation.
            rank: of this process, which gets its share of every batch.
            world: how many processes there are.
            drop_last: leave out a last, smaller batch.
            device: where to make the batches.
            workers: processes that decode the images; 0 to do so in this one.
        """
        return FolderBatches(
            self, shares(len(self), batch_size, rank, world, drop_last, shuffle is not None), shuffle, device, workers
        )


@dataclass(frozen=True, eq=False)
class FolderData:
    """Images to train on and to validate with."""

    train: FolderImages
    validation: FolderImages


def image_folder(folder: Path | None, size: int = 224, classes: int | None = None) -> FolderData:
    """Find the images in folder/train and folder/val, which have the same classes.

    Args:
        folder: has the two.
        size: sides of the images in batches.
        classes: take only the first so many, by name, or all if there are fewer.
    """
    if folder is None:
        raise ExperimentError(f"ImageNet cannot be downloaded by itself: give its directory with --data DIR.\n{LAYOUT}")
    names = {part: _classes(folder / part) for part in ("train", "val")}
    if names["train"] != names["val"]:
        odd = sorted(set(names["train"]) ^ set(names["val"]))[0]
        has, lacks = ("train", "val") if odd in names["train"] else ("val", "train")
        raise ExperimentError(f"{folder / has} has a class {odd}, and {folder / lacks} does not.\n{LAYOUT}")
    return FolderData(*(_images(folder / part, found[:classes], size) for part, found in names.items()))


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ExperimentError(f"There is no directory {folder}.\n{LAYOUT}")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not names:
        raise ExperimentError(f"{folder} has no folder for each class.\n{LAYOUT}")
    return names


def _images(folder: Path, classes: list[str], size: int) -> FolderImages:
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(entry.path for entry in os.scandir(folder / name) if entry.name.lower().endswith(SUFFIXES))
        if not found:
            raise ExperimentError(f"{folder / name} has no images ({', '.join(SUFFIXES)}).\n{LAYOUT}")
        paths += found
        labels += [label] * len(found)
    return FolderImages(paths, torch.tensor(labels), len(classes), size)


@dataclass(frozen=True, eq=False)
class FolderBatches:
    """An epoch of `FolderImages.batches`. Each time it is gone through is another epoch, drawn anew."""

    images: FolderImages
    shares: list[slice]
    shuffle: torch.Generator | None
    device: torch.device | str | None
    workers: int

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.images)
        if self.shuffle is None:
            order, seeds = torch.arange(count), torch.full((count,), CENTRE)
        else:
            order = torch.randperm(count, generator=self.shuffle)
            seeds = torch.randint(2**63 - 1, (count,), generator=self.shuffle)
        loader = DataLoader(
            _Decoder(self.images.paths, self.images.size),
            batch_size=None,  # the decoder makes whole batches
            sampler=(list(zip(order[s].tolist(), seeds[s].tolist(), strict=True)) for s in self.shares),
            num_workers=self.workers,
            pin_memory=self.device is not None and torch.device(self.device).type == "cuda",
            generator=torch.Generator(),  # its own, as it draws a number that nothing depends on
        )
        for share, batch in zip(self.shares, loader, strict=True):
            if isinstance(batch, ExperimentError):
                raise batch
            pixels = batch.to(self.device, non_blocking=True)
            yield normalise(pixels, IMAGENET), self.images.labels[order[share]].to(self.device)


class _Decoder(Dataset[Tensor | ExperimentError]):
    """Batches of uint8 images. Errors are returned: raised in a worker, their message would be a traceback."""

    def __init__(self, paths: list[str], size: int) -> None:
        self.paths = paths
        self.size = size

    def __getitem__(self, batch: list[tuple[int, int]]) -> Tensor | ExperimentError:
        """The images of so many indices, each with the seed of its crop."""
        try:
            return torch.stack([decode(self.paths[index], self.size, seed) for index, seed in batch])
        except ExperimentError as error:
            return error


def decode(path: str, size: int, seed: int) -> Tensor:
    """Read an image as uint8 (3, size, size): cropped as drawn from the seed, or, if that is CENTRE, at the centre."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except UnidentifiedImageError as error:
        raise ExperimentError(f"{path} is not an image, or its beginning is corrupt. Replace it.") from error
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises any of them where the data make no sense
        raise ExperimentError(f"{path} is truncated or corrupt: {error}. Replace it.") from error
    image = _centre_crop(image, size) if seed == CENTRE else _random_crop(image, size, random.Random(seed))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _centre_crop(image: Image.Image, size: int) -> Image.Image:
    scale = round(size * RESIZE) / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


def _random_crop(image: Image.Image, size: int, draw: random.Random) -> Image.Image:
    """A crop of random area and aspect (Szegedy et al., 2015), resized, and mirrored every second time."""
    for _ in range(ATTEMPTS):
        area = image.width * image.height * draw.uniform(*AREA)
        aspect = math.exp(draw.uniform(*map(math.log, ASPECT)))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= image.width and 0 < height <= image.height:
            break
    else:  # an image much longer than wide: as much of it as the aspect allows
        width = min(image.width, round(image.height * ASPECT[1]))
        height = min(image.height, round(image.width / ASPECT[0]))
    left, top = draw.randint(0, image.width - width), draw.randint(0, image.height - height)
    cropped = image.crop((left, top, left + width, top + height))
    resized = cropped.resize((size, size), Image.Resampling.BILINEAR)
    return resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else resized
