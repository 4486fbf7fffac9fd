import io
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from onlinenorm.experiments.data.image_folder import decode, image_folder
from onlinenorm.experiments.data.normalisation import IMAGENET
from onlinenorm.experiments.errors import ExperimentError

CLASSES = ("n01", "n02", "n03")
SIZE = 32


def photo(seed, width, height):
    """A smooth made image, as JPEG: nothing in it is lost on the way."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (4, 5, 3), np.uint8))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=95)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenet")
    for part, count in (("train", 8), ("val", 3)):
        for number, name in enumerate(CLASSES):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                content = photo(100 * number + i + (part == "val") * 1000, 60 + 7 * i, 50 + 3 * number)
                (root / part / name / f"{name}_{i}.JPEG").write_bytes(content)
    return root


@pytest.fixture
def copy(folder, tmp_path):
    """One to damage."""
    return shutil.copytree(folder, tmp_path / "imagenet")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def epoch(images, batch_size, **kwargs):
    return list(images.batches(batch_size, **kwargs))


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(p, q) for one, other in zip(a, b, strict=True) for p, q in zip(one, other, strict=True)
    )


def test_finds_classes_and_images(folder):
    data = image_folder(folder, SIZE)
    assert (len(data.train), len(data.validation)) == (24, 9)
    assert data.train.classes == 3
    assert data.train.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    batches = data.validation.batches(4)
    seen = list(batches)
    assert len(batches) == len(seen) == 3
    assert torch.cat([labels for _, labels in seen]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(images.shape == (len(labels), 3, SIZE, SIZE) for images, labels in seen)


def test_other_files_and_formats(copy):
    (copy / "train" / "n01" / "notes.txt").write_text("not an image")
    Image.new("L", (40, 30), 7).save(copy / "train" / "n01" / "grey.png")
    data = image_folder(copy, SIZE)
    assert len(data.train) == 25
    grey = next(path for path in data.train.paths if path.endswith("grey.png"))
    assert torch.equal(decode(grey, SIZE, 3), torch.full((3, SIZE, SIZE), 7, dtype=torch.uint8))


# The same images whatever does the work


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(folder, workers):
    data = image_folder(folder, SIZE)
    for images, shuffle in ((data.train, True), (data.validation, False)):
        alone, together = (epoch(images, 5, workers=w, shuffle=seeded(4) if shuffle else None) for w in (0, workers))
        assert same(alone, together)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_every_batch(folder, world):
    images = image_folder(folder, SIZE).train
    whole = epoch(images, 6, shuffle=seeded(4))
    for rank in range(world):
        part = epoch(images, 6, shuffle=seeded(4), rank=rank, world=world)
        assert same(part, [(pixels[rank::world], labels[rank::world]) for pixels, labels in whole])


def test_validation_sees_every_image_once_in_any_number_of_processes(folder):
    images = image_folder(folder, SIZE).validation
    labels = [y for rank in range(4) for _, y in epoch(images, 6, rank=rank, world=4)]
    assert torch.cat(labels).sort().values.tolist() == images.labels.tolist()


def test_a_seeded_epoch_repeats_and_the_next_differs(folder):
    images = image_folder(folder, SIZE).train
    generator = seeded(4)
    first, second = (epoch(images, 24, shuffle=generator) for _ in range(2))
    assert same(first, epoch(images, 24, shuffle=seeded(4)))
    assert not torch.equal(first[0][1], second[0][1])


def test_pytorchs_global_generator_is_left_alone(folder):
    images = image_folder(folder, SIZE).train
    torch.manual_seed(0)
    before = torch.get_rng_state()
    epoch(images, 8, shuffle=seeded(4), workers=1)
    assert torch.equal(torch.get_rng_state(), before)


# The usual augmentation


def test_validation_crops_the_centre(folder):
    data = image_folder(folder, 224)
    ((pixels, _),) = data.validation.batches(9)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in IMAGENET)
    for path, image in zip(data.validation.paths, pixels, strict=True):
        with Image.open(path) as file:
            scale = 256 / min(file.size)
            resized = file.resize([round(side * scale) for side in file.size], Image.Resampling.BILINEAR)
        left, top = ((side - 224) // 2 for side in resized.size)
        wanted = np.asarray(resized)[top : top + 224, left : left + 224]
        torch.testing.assert_close(image * std + mean, torch.tensor(wanted).permute(2, 0, 1) / 255, rtol=0, atol=1e-5)


def coordinates(tmp_path, width, height):
    """An image whose red says how far right a pixel is, and whose green how far down."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    path = tmp_path / f"{width}x{height}.png"
    Image.fromarray(np.stack([x, y, 0 * x], axis=2).round().astype(np.uint8)).save(path)
    return str(path)


def mean_area(width, height):
    """Of crops that are uniform in area and in the logarithm of their aspect, where they fit."""
    draw = np.random.default_rng(0)
    area, aspect = draw.uniform(0.08, 1, 10**5), np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3), 10**5))
    pixels = area * width * height
    return area[(pixels * aspect <= width**2) & (pixels / aspect <= height**2)].mean()


def test_training_crops_have_the_usual_areas_and_aspects_and_half_are_mirrored(tmp_path):
    width, height, count = 200, 150, 600
    path = coordinates(tmp_path, width, height)
    crops = torch.stack([decode(path, 64, seed) for seed in range(count)]).float()
    right, down = crops[:, 0, 32] / 255 * width, crops[:, 1, :, 32] / 255 * height
    wide, high = ((ends[:, -1] - ends[:, 0]) * 64 / 63 for ends in (right, down))
    assert (wide < 0).float().mean() == pytest.approx(0.5, abs=0.08)
    assert (high > 0).all()
    wide = wide.abs()
    area, aspect = wide * high / (width * height), wide / high
    assert 0.07 < area.min() < 0.12
    assert 0.9 < area.max() <= 1.02
    assert area.mean() == pytest.approx(mean_area(width, height), abs=0.03)
    assert 0.7 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.42
    assert aspect.log().mean() == pytest.approx(0, abs=0.05)
    assert right.min() < 3
    assert right.max() > width - 3
    assert down.min() < 3
    assert down.max() > height - 3


@pytest.mark.parametrize(("width", "height"), [(400, 8), (8, 400), (1, 1), (33, 32)])
def test_any_shape_can_be_cropped(tmp_path, width, height):
    path = coordinates(tmp_path, width, height)
    for seed in (*range(20), -1):
        assert decode(path, 24, seed).shape == (3, 24, 24)


# Bad input


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kept", [0, 30, 0.5, 0.95])
def test_a_truncated_image_is_named(copy, workers, kept):
    path = copy / "train" / "n02" / "n02_3.JPEG"
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if kept >= 1 else int(kept * len(whole))])
    images = image_folder(copy, SIZE).train
    with pytest.raises(ExperimentError) as caught:
        epoch(images, 4, shuffle=seeded(0), workers=workers)
    assert str(caught.value).startswith(str(path))
    assert "corrupt" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_an_image_that_went_away_is_named(copy):
    images = image_folder(copy, SIZE).train
    path = copy / "train" / "n02" / "n02_3.JPEG"
    path.unlink()
    with pytest.raises(ExperimentError, match=f"{path}.*No such file"):
        epoch(images, 4)


def damage_nothing_there(root):
    shutil.rmtree(root)


def damage_archives(root):
    for part in ("train", "val"):
        shutil.rmtree(root / part)
        (root / f"ILSVRC2012_img_{part}.tar").touch()


def damage_val_without_folders(root):
    for path in (root / "val").glob("*/*.JPEG"):
        path.rename(root / "val" / path.name)
    for name in CLASSES:
        (root / "val" / name).rmdir()


def damage_class_without_validation(root):
    shutil.rmtree(root / "val" / "n02")


def damage_class_without_training(root):
    shutil.rmtree(root / "train" / "n03")


def damage_empty_class(root):
    for path in (root / "train" / "n02").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_nothing_there, r"no directory {0}/train"),
        (damage_archives, r"no directory {0}/train"),
        (damage_val_without_folders, r"{0}/val has no folder for each class"),
        (damage_class_without_validation, r"{0}/train has a class n02, and {0}/val does not"),
        (damage_class_without_training, r"{0}/val has a class n03, and {0}/train does not"),
        (damage_empty_class, r"{0}/train/n02 has no images"),
    ],
)
def test_another_layout(copy, damage, said):
    damage(copy)
    with pytest.raises(ExperimentError, match=said.format(copy)) as caught:
        image_folder(copy)
    assert "DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG" in str(caught.value)


def test_no_directory_given():
    with pytest.raises(ExperimentError, match=r"--data DIR(.|\n)*https://image-net\.org/download\.php(.|\n)*tar -xf"):
        image_folder(None)
