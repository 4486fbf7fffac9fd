"""Fashion-MNIST: 70,000 grey images of 28 x 28 pixels in ten classes of clothing (Xiao et al., 2017)."""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from onlinenorm.experiments.data.fetch import Remote, Source, fetch
from onlinenorm.experiments.data.images import ImageData, Images
from onlinenorm.experiments.data.normalisation import FASHION_MNIST
from onlinenorm.experiments.data.published import corrupt, missing, read_file

CLASSES = 10
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package
SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
SOURCE = Source(
    "Fashion-MNIST",
    "fashion-mnist",
    (
        Remote(
            f"{SITE}/train-images-idx3-ubyte.gz", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
        ),
        Remote(
            f"{SITE}/train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
        ),
        Remote(f"{SITE}/t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        Remote(f"{SITE}/t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    package="dataset-fashion-mnist",
)
UNSIGNED_BYTE = 8  # the type in the header of an idx file


def fashion_mnist(folder: Path | None) -> ImageData:
    """Read the four files, as published (.gz) or unpacked.

    Args:
        folder: has the files, or a directory fashion-mnist of them. None: Debian's package, or else the cache.
    """
    if folder is None:
        folder = DEBIAN if DEBIAN.is_dir() else fetch(SOURCE)
    elif (folder / SOURCE.directory).is_dir():
        folder /= SOURCE.directory
    return ImageData(_read(folder, "train"), _read(folder, "t10k"))


def _read(folder: Path, part: str) -> Images:
    images = _find(folder, f"{part}-images-idx3-ubyte")
    labels = _find(folder, f"{part}-labels-idx1-ubyte")
    pixels = _read_idx(images, 3).unsqueeze(1)
    classes = _read_idx(labels, 1).long()
    if len(pixels) != len(classes):
        raise corrupt(str(labels), f"{len(classes)} labels for the {len(pixels)} images of {images.name}")
    if classes.max() >= CLASSES:
        raise corrupt(str(labels), f"there is a label {classes.max()}, and 0 to {CLASSES - 1} are wanted")
    return Images(pixels, classes, CLASSES, FASHION_MNIST)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise missing(SOURCE, folder, f"{name}.gz, or {name}")


def _read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx file: two zeros, the type, how many dimensions, each one's size, then the bytes."""
    content = read_file(path)
    begin = 4 * (dimensions + 1)
    if len(content) < begin or content[:4] != bytes([0, 0, UNSIGNED_BYTE, dimensions]):
        raise corrupt(str(path), f"it does not begin like an idx file of bytes with {dimensions} dimensions")
    sizes = struct.unpack(f">{dimensions}I", content[4:begin])
    if len(content) - begin != math.prod(sizes) or not sizes[0]:
        raise corrupt(str(path), f"{math.prod(sizes)} bytes are to follow its header, and {len(content) - begin} do")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=begin).view(sizes)
