import io
import pickle
import struct
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from onlinenorm.experiments.data import cifar
from onlinenorm.experiments.data.cifar import CIFAR_10, CIFAR_100, cifar10, cifar100, read
from onlinenorm.experiments.errors import ExperimentError

SMALL = [replace(CIFAR_10, train=4, test=3), replace(CIFAR_100, train=6, test=3)]
PUBLIC = {"CIFAR-10": cifar10, "CIFAR-100": cifar100}


def title(spec):
    return spec.source.title


both = pytest.mark.parametrize("spec", SMALL, ids=title)
forms = pytest.mark.parametrize("form", ["binary", "python"])


# The published layouts, small


def made(spec):
    """Pixels and labels of each file, and the labels of groups where there are any."""
    draw = np.random.default_rng(0)
    counts = [spec.train] * (len(spec.binary.files) - 1) + [spec.test]
    return [
        (draw.integers(0, 256, (n, 3072), np.uint8), draw.integers(0, spec.classes, n), draw.integers(0, 20, n))
        for n in counts
    ]


def binary(spec, pixels, labels, groups):
    leading = [labels] if spec.label_bytes == 1 else [groups, labels]
    return np.concatenate([*(column.astype(np.uint8)[:, None] for column in leading), pixels], axis=1).tobytes()


def pickled_by_python_2(entries):
    """A dictionary of lists of numbers and uint8 arrays, in the operations that Python 2 and NumPy 1 wrote."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    def value_of(value):
        if isinstance(value, bytes):
            return text(value)
        if isinstance(value, list):
            return b"](" + b"".join(map(number, value)) + b"e"
        dtype = (
            b"cnumpy\ndtype\n("
            + text(b"u1")
            + b"K\x00K\x01tR(K\x03"
            + text(b"|")
            + b"NNN"
            + 2 * number(-1)
            + b"K\x00tb"
        )
        made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
        shape = b"(" + b"".join(map(number, value.shape)) + b"t"
        column_major = not value.flags.c_contiguous
        content = b"T" + struct.pack("<i", value.nbytes) + value.tobytes("F" if column_major else "C")
        return made + b"(K\x01" + shape + dtype + (b"\x88" if column_major else b"\x89") + content + b"tb"

    return b"\x80\x02}(" + b"".join(text(key) + value_of(value) for key, value in entries.items()) + b"u."


def python(spec, pixels, labels, groups):
    entries = {b"data": pixels, b"batch_label": b"one of many", spec.key: labels.tolist()}
    return pickled_by_python_2(entries if spec.label_bytes == 1 else {b"coarse_labels": groups.tolist(), **entries})


WRITERS = {"binary": binary, "python": python}


def contents(spec, form):
    return {name: WRITERS[form](spec, *part) for name, part in zip(getattr(spec, form).files, made(spec), strict=True)}


def unpacked(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def packed(path, directory, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {"readme.html": b"<html>", **files}.items():
            member = tarfile.TarInfo(f"{directory}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def check(data, spec):
    *train, test = made(spec)
    for images, parts in ((data.train, train), (data.test, [test])):
        assert images.pixels.shape[1:] == (3, 32, 32)
        assert images.pixels.dtype == torch.uint8
        assert np.array_equal(images.pixels.flatten(1).numpy(), np.concatenate([pixels for pixels, *_ in parts]))
        assert images.labels.tolist() == np.concatenate([labels for _, labels, _ in parts]).tolist()
        assert images.labels.dtype == torch.int64
        assert images.classes == spec.classes
        assert len(images.normalisation.mean) == len(images.normalisation.std) == 3


@both
@forms
@pytest.mark.parametrize("where", ["directory", "its parent", "archive", "archive's parent"])
def test_reads_what_is_published(tmp_path, spec, form, where):
    layout = getattr(spec, form)
    files = contents(spec, form)
    if "archive" in where:
        packed(tmp_path / layout.archive, layout.directory, files)
        given = tmp_path / layout.archive if where == "archive" else tmp_path
    else:
        unpacked(tmp_path / layout.directory, files)
        given = tmp_path / layout.directory if where == "directory" else tmp_path
    check(read(spec, given), spec)


@both
def test_arrays_pickled_column_by_column(tmp_path, spec):
    parts = [(np.asfortranarray(pixels), *labels) for pixels, *labels in made(spec)]
    unpacked(tmp_path, {name: python(spec, *part) for name, part in zip(spec.python.files, parts, strict=True)})
    check(read(spec, tmp_path), spec)


@pytest.mark.parametrize("spec", [CIFAR_10, CIFAR_100], ids=title)
def test_wants_as_many_images_as_are_published(tmp_path, spec):
    *train, test = spec.binary.files
    for name in spec.binary.files:
        with (tmp_path / name).open("wb") as file:  # sparse
            file.truncate((50_000 // len(train) if name in train else 10_000) * (3072 + spec.label_bytes))
    data = PUBLIC[title(spec)](tmp_path)
    assert (len(data.train), len(data.test)) == (50_000, 10_000)

    with (tmp_path / test).open("r+b") as file:
        file.truncate(9_999 * (3072 + spec.label_bytes))
    with pytest.raises(ExperimentError, match=f"{test} is truncated or corrupt: 10,000 images"):
        PUBLIC[title(spec)](tmp_path)


# Truncated or corrupt


@both
@forms
@pytest.mark.parametrize("part", [0, 0.3, 0.999])
def test_a_truncated_file_is_named(tmp_path, spec, form, part):
    files = contents(spec, form)
    for name, content in files.items():
        unpacked(tmp_path, {**files, name: content[: int(len(content) * part)]})
        with pytest.raises(ExperimentError, match=f"{tmp_path / name} is truncated or corrupt"):
            read(spec, tmp_path)


@both
@forms
@pytest.mark.parametrize("part", [0, 0.001, 0.5, 0.999])
def test_a_truncated_archive_is_named(tmp_path, spec, form, part):
    layout = getattr(spec, form)
    path = tmp_path / layout.archive
    packed(path, layout.directory, contents(spec, form))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ExperimentError, match=f"{path}.* is truncated or corrupt"):
        read(spec, tmp_path)


@both
def test_every_flipped_bit_of_an_archive_is_noticed(tmp_path, spec):
    path = tmp_path / spec.binary.archive
    packed(path, spec.binary.directory, contents(spec, "binary"))
    whole = path.read_bytes()
    for position in np.linspace(100, len(whole) - 1, 25).astype(int):  # past the header, which has the name
        broken = bytearray(whole)
        broken[position] ^= 8
        path.write_bytes(broken)
        with pytest.raises(ExperimentError, match=str(path)):
            read(spec, tmp_path)


@both
@forms
def test_a_label_of_no_class(tmp_path, spec, form):
    name = getattr(spec, form).files[0]
    pixels, labels, groups = made(spec)[0]
    labels[1] = spec.classes
    unpacked(tmp_path, {**contents(spec, form), name: WRITERS[form](spec, pixels, labels, groups)})
    with pytest.raises(ExperimentError, match=f"{name} .* a label {spec.classes}"):
        read(spec, tmp_path)


class Exploit:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("hidden", ["alone", "in the dictionary"])
def test_a_pickle_cannot_run_anything(tmp_path, hidden):
    spec = SMALL[0]
    attack = Exploit(str(tmp_path / "owned"))
    content = pickle.dumps(attack if hidden == "alone" else {"data": attack}, protocol=2)
    unpacked(tmp_path, {**contents(spec, "python"), "test_batch": content})
    with pytest.raises(ExperimentError, match=r"test_batch is truncated or corrupt: .*open has no place"):
        read(spec, tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "entries",
    [
        {b"labels": [0, 1, 2]},
        {b"data": np.zeros((3, 3072), np.uint8)},
        {b"data": np.zeros((3, 3071), np.uint8), b"labels": [0, 1, 2]},
        {b"data": np.zeros((3, 3072), np.uint8), b"labels": [0, 1]},
        {b"data": np.zeros((3, 3072), np.uint8), b"labels": b"012"},
    ],
)
def test_a_pickle_of_something_else(tmp_path, entries):
    spec = SMALL[0]
    unpacked(tmp_path, {**contents(spec, "python"), "test_batch": pickled_by_python_2(entries)})
    with pytest.raises(ExperimentError, match="test_batch is truncated or corrupt"):
        read(spec, tmp_path)


# Missing


@both
@forms
def test_a_missing_file_is_named(tmp_path, spec, form):
    layout = getattr(spec, form)
    files = contents(spec, form)
    del files[layout.files[1]]
    unpacked(tmp_path, files)
    with pytest.raises(ExperimentError, match=f"{tmp_path / layout.files[1]}: No such file"):
        read(spec, tmp_path)
    for name in files:
        (tmp_path / name).unlink()
    packed(tmp_path / layout.archive, layout.directory, files)
    with pytest.raises(ExperimentError, match=f"no {layout.files[1]} in {tmp_path / layout.archive}"):
        read(spec, tmp_path)


@both
def test_no_data_says_what_is_wanted_and_how_to_get_it(tmp_path, spec):
    with pytest.raises(ExperimentError) as caught:
        PUBLIC[title(spec)](tmp_path)
    said = str(caught.value)
    assert f"no {title(spec)} in {tmp_path}" in said
    for form in (spec.binary, spec.python):
        assert form.archive in said
        assert form.directory in said
    assert f"curl --fail --location --create-dirs --output-dir {tmp_path}" in said
    assert f"{cifar.SITE}/{spec.binary.archive}" in said
    assert "--data DIR" in said
    with pytest.raises(ExperimentError, match="nowhere does not exist"):
        PUBLIC[title(spec)](tmp_path / "nowhere")
