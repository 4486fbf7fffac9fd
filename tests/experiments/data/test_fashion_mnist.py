import gzip
import struct

import numpy as np
import pytest
import torch

from onlinenorm.experiments.data import fashion_mnist as module
from onlinenorm.experiments.data.fashion_mnist import fashion_mnist
from onlinenorm.experiments.errors import ExperimentError

FILES = [f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]


def idx(values):
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


@pytest.fixture
def arrays():
    draw = np.random.default_rng(0)
    made = {}
    for part, count in (("train", 20), ("t10k", 7)):
        made[f"{part}-images-idx3-ubyte"] = draw.integers(0, 256, (count, 28, 28), np.uint8)
        made[f"{part}-labels-idx1-ubyte"] = draw.integers(0, 10, count).astype(np.uint8)
    return made


def write(folder, arrays, packed=FILES):
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in arrays.items():
        if name in packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (folder / name).write_bytes(idx(values))


def check(data, arrays):
    for images, part in ((data.train, "train"), (data.test, "t10k")):
        assert images.pixels.dtype == torch.uint8
        assert np.array_equal(images.pixels[:, 0].numpy(), arrays[f"{part}-images-idx3-ubyte"])
        assert images.labels.tolist() == arrays[f"{part}-labels-idx1-ubyte"].tolist()
        assert images.classes == 10


@pytest.mark.parametrize("packed", [FILES, [], FILES[:2]], ids=["published", "unpacked", "both"])
@pytest.mark.parametrize("inside", ["", "fashion-mnist"])
def test_reads_the_published_files(tmp_path, arrays, packed, inside):
    write(tmp_path / inside, arrays, packed)
    check(fashion_mnist(tmp_path), arrays)


def test_finds_debians_by_itself(tmp_path, arrays, monkeypatch):
    write(tmp_path, arrays)
    monkeypatch.setattr(module, "DEBIAN", tmp_path)
    check(fashion_mnist(None), arrays)


@pytest.mark.parametrize("kept", [0, 3, 18, 40, -9, -1])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_a_truncated_file_is_named(tmp_path, arrays, name, packed, kept):
    write(tmp_path, arrays, FILES if packed else [])
    path = tmp_path / (f"{name}.gz" if packed else name)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(kept, len(whole) - 1)])
    with pytest.raises(ExperimentError, match=f"{name}.* truncated or corrupt"):
        fashion_mnist(tmp_path)


def test_a_flipped_bit_is_noticed(tmp_path, arrays):
    write(tmp_path, arrays)
    path = tmp_path / f"{FILES[0]}.gz"
    broken = bytearray(path.read_bytes())
    broken[len(broken) // 2] ^= 1
    path.write_bytes(broken)
    with pytest.raises(ExperimentError, match=f"{FILES[0]}.* truncated or corrupt"):
        fashion_mnist(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("t10k-labels-idx1-ubyte", np.zeros(8, np.uint8), "8 labels for the 7 images"),
        ("t10k-labels-idx1-ubyte", np.full(7, 10, np.uint8), "label 10"),
        ("t10k-labels-idx1-ubyte", np.zeros((7, 28, 28), np.uint8), "1 dimensions"),
        ("train-images-idx3-ubyte", np.zeros((0, 28, 28), np.uint8), "0 bytes"),
    ],
)
def test_files_that_make_no_sense(tmp_path, arrays, name, values, said):
    write(tmp_path, {**arrays, name: values})
    with pytest.raises(ExperimentError, match=f"{name}.*{said}"):
        fashion_mnist(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_with_what_to_do(tmp_path, arrays, name):
    write(tmp_path, arrays)
    (tmp_path / f"{name}.gz").unlink()
    with pytest.raises(ExperimentError) as caught:
        fashion_mnist(tmp_path)
    said = str(caught.value)
    assert str(tmp_path) in said
    assert f"wanted is {name}.gz" in said
    assert f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}.gz" in said
    assert "curl" in said
    assert "apt install dataset-fashion-mnist" in said


def test_no_such_directory(tmp_path):
    with pytest.raises(ExperimentError, match="nowhere does not exist"):
        fashion_mnist(tmp_path / "nowhere")
