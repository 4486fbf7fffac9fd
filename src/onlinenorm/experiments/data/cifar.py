"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32 x 32 pixels (Krizhevsky, 2009)."""

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onlinenorm.experiments.data.fetch import Remote, Source, fetch
from onlinenorm.experiments.data.images import ImageData, Images
from onlinenorm.experiments.data.normalisation import CIFAR10, CIFAR100, Normalisation
from onlinenorm.experiments.data.published import Form, Found, corrupt, find

SITE = "https://www.cs.toronto.edu/~kriz"
SHAPE = (3, 32, 32)
PIXELS = math.prod(SHAPE)


@dataclass(frozen=True)
class Cifar:
    """One of the two.

    Attributes:
        source: where the binary form is.
        classes: how many.
        normalisation: of its pixels.
        binary: the form with fixed-length records; its last file is the test set, the others are the training set.
        python: the pickled form; its files in the same order.
        label_bytes: in each record; the last is the class (the one before it, in CIFAR-100, a group of classes).
        key: of the labels in the pickled form.
        train: images in each file of the training set.
        test: images in the test set.
    """

    source: Source
    classes: int
    normalisation: Normalisation
    binary: Form
    python: Form
    label_bytes: int
    key: bytes
    train: int
    test: int


CIFAR_10 = Cifar(
    source=Source(
        "CIFAR-10",
        "cifar-10",
        (Remote(f"{SITE}/cifar-10-binary.tar.gz", "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),),
    ),
    classes=10,
    normalisation=CIFAR10,
    binary=Form(
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
        (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    ),
    python=Form(
        "cifar-10-python.tar.gz", "cifar-10-batches-py", (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    ),
    label_bytes=1,
    key=b"labels",
    train=10_000,
    test=10_000,
)
CIFAR_100 = Cifar(
    source=Source(
        "CIFAR-100",
        "cifar-100",
        (
            Remote(
                f"{SITE}/cifar-100-binary.tar.gz", "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
            ),
        ),
    ),
    classes=100,
    normalisation=CIFAR100,
    binary=Form("cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin", "test.bin")),
    python=Form("cifar-100-python.tar.gz", "cifar-100-python", ("train", "test")),
    label_bytes=2,
    key=b"fine_labels",
    train=50_000,
    test=10_000,
)


def cifar10(folder: Path | None) -> ImageData:
    """Read CIFAR-10 from either published form, packed or not. None: from the cache."""
    return read(CIFAR_10, folder)


def cifar100(folder: Path | None) -> ImageData:
    """Read CIFAR-100, with its 100 fine labels, from either published form, packed or not. None: from the cache."""
    return read(CIFAR_100, folder)


def read(cifar: Cifar, folder: Path | None) -> ImageData:
    """Read one of the two."""
    if folder is None:
        folder = fetch(cifar.source)
    found = find(cifar.source, folder, [cifar.binary, cifar.python])
    content = found.read()
    parts = [_decode(cifar, found, name, content.pop(name)) for name in found.form.files]
    return ImageData(_images(cifar, parts[:-1]), _images(cifar, parts[-1:]))


Part = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # pixels, uint8 (N, 3072), and labels (N,) of one file


def _decode(cifar: Cifar, found: Found, name: str, content: bytes) -> Part:
    count = cifar.test if name == found.form.files[-1] else cifar.train
    decode = _decode_binary if found.form is cifar.binary else _decode_pickle
    try:
        pixels, labels = decode(cifar, content, count)
    except ValueError as error:
        raise corrupt(found.where(name), str(error)) from error
    wrong = labels[(labels < 0) | (labels >= cifar.classes)]
    if len(wrong):
        raise corrupt(
            found.where(name), f"it has a label {wrong[0]}, and {cifar.source.title} has {cifar.classes} classes"
        )
    return pixels, labels


def _decode_binary(cifar: Cifar, content: bytes, count: int) -> Part:
    """Records of the labels, a byte each, and the pixels: red, green, then blue, each row by row."""
    size = cifar.label_bytes + PIXELS
    if len(content) != count * size:
        raise ValueError(f"{count:,} images take {count * size:,} bytes, and it has {len(content):,}")
    records = np.frombuffer(content, np.uint8).reshape(count, size)
    return records[:, cifar.label_bytes :], records[:, cifar.label_bytes - 1]


def _decode_pickle(cifar: Cifar, content: bytes, count: int) -> Part:
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        _, shape, dtype, column_major, values = batch[b"data"].state
        is_bytes = dtype.arguments[0] in (b"u1", "u1")  # as Python 2 and 3 write it
        pixels = np.frombuffer(values, np.uint8).reshape(shape, order="F" if column_major else "C")
        labels = np.asarray(batch[cifar.key])
    except Exception as error:  # what it is depends on where the pickle broke
        raise ValueError(f"it cannot be unpickled ({error!r})") from error
    if not is_bytes or pixels.shape != (count, PIXELS):
        raise ValueError(f"{count:,} images of {PIXELS:,} bytes are wanted")
    if labels.shape != (count,) or labels.dtype.kind != "i":
        raise ValueError(f"{count:,} labels are wanted")
    return pixels, labels


class _Unpickler(pickle.Unpickler):
    """Calls nothing and makes nothing that a pickle asks for: it could be any function, or an array that is none."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        if (module.split(".")[0], name) not in (("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return _Described


class _Described:
    """In place of an array or its type: what the pickle says of it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _images(cifar: Cifar, parts: list[Part]) -> Images:
    pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts])).view(-1, *SHAPE)
    labels = torch.from_numpy(np.concatenate([labels for _, labels in parts]).astype(np.int64))
    return Images(pixels, labels, cifar.classes, cifar.normalisation)
