import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from onlinenorm.experiments.data.images import Augment, Images, shares
from onlinenorm.experiments.data.normalisation import Normalisation
from onlinenorm.experiments.errors import ExperimentError

PLAIN = Normalisation((0.0, 0.0), (1 / 255, 1 / 255))  # pixels as they are


def numbered(count, side=6, normalisation=PLAIN):
    """Images that each know their index, by their label and in every pixel of the first channel."""
    pixels = torch.randint(0, 256, (count, 2, side, side), dtype=torch.uint8)
    pixels[:, 0] = torch.arange(1, count + 1, dtype=torch.uint8).view(-1, 1, 1)
    return Images(pixels, torch.arange(count), count, normalisation)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def epoch(images, *args, **kwargs):
    return [(x.clone(), y.clone()) for x, y in images.batches(*args, **kwargs)]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(p, q) for one, other in zip(a, b, strict=True) for p, q in zip(one, other, strict=True)
    )


# What each process gets

counts = st.integers(1, 60)
worlds = st.integers(1, 5)


@given(counts, counts, worlds)
def test_processes_see_every_image_once(count, batch_size, world):
    seen = [
        i
        for rank in range(world)
        for s in shares(count, batch_size, rank, world, False, False)
        for i in range(count)[s]
    ]
    assert sorted(seen) == list(range(count))


@given(counts, counts, worlds, st.booleans())
def test_processes_that_train_together_take_equally_many_steps_of_equal_size(count, per_process, world, drop_last):
    batch_size = per_process * world
    if drop_last and batch_size > count:
        return
    ranks = [shares(count, batch_size, rank, world, drop_last, True) for rank in range(world)]
    sizes = [[len(range(count)[s]) for s in kept] for kept in ranks]
    assert all(size == sizes[0] for size in sizes)
    assert all(sizes[0])
    left_out = count - world * sum(sizes[0])
    assert left_out == count % batch_size if drop_last else left_out < world
    for together in zip(*ranks, strict=True):  # a step's shares make up one stretch of the epoch's order
        batch = sorted(i for share in together for i in range(count)[share])
        assert batch == list(range(batch[0], batch[0] + len(batch)))


@given(st.integers(2, 40), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_a_batch_does_not_depend_on_the_number_of_processes(count, per_process, world, seed):
    images, batch_size = numbered(count), per_process * world
    kwargs = {"augment": Augment(2)}
    whole = epoch(images, batch_size, shuffle=seeded(seed), **kwargs)
    parts = [epoch(images, batch_size, shuffle=seeded(seed), rank=r, world=world, **kwargs) for r in range(world)]
    for step, ranks in enumerate(zip(*parts, strict=True)):
        for rank, (pixels, labels) in enumerate(ranks):
            assert torch.equal(labels, whole[step][1][rank::world][: len(labels)])
            assert torch.equal(pixels, whole[step][0][rank::world][: len(labels)])


# Order


@given(counts, counts, st.integers(0, 2**32), st.booleans())
def test_an_epoch_is_every_image_once(count, batch_size, seed, shuffled):
    images = numbered(count)
    batches = images.batches(batch_size, shuffle=seeded(seed) if shuffled else None)
    seen = [(x, y) for x, y in batches]
    assert len(seen) == len(batches)
    assert all(len(y) == batch_size for _, y in seen[:-1])
    labels = torch.cat([y for _, y in seen])
    assert torch.equal(labels.sort().values, torch.arange(count))
    assert shuffled or torch.equal(labels, torch.arange(count))
    assert torch.equal(torch.cat([x[:, 0, 0, 0] for x, _ in seen]), labels + 1.0)  # images stay with their labels


def test_a_seeded_epoch_repeats_and_the_next_differs():
    images = numbered(40)
    generator = seeded(3)
    first, second = (epoch(images, 7, shuffle=generator, augment=Augment()) for _ in range(2))
    assert same(first, epoch(images, 7, shuffle=seeded(3), augment=Augment()))
    assert not torch.equal(first[0][1], second[0][1])


def test_the_global_generator_can_be_the_one_that_draws():
    images = numbered(40)
    torch.manual_seed(3)
    drawn = epoch(images, 7, shuffle=torch.default_generator, augment=Augment())
    assert same(drawn, epoch(images, 7, shuffle=seeded(3), augment=Augment()))


def test_batch_size_does_not_change_what_happens_to_an_image():
    images = numbered(40)
    small, large = (epoch(images, size, shuffle=seeded(3), augment=Augment()) for size in (3, 40))
    for position in (0, 1):
        assert torch.equal(torch.cat([batch[position] for batch in small]), large[0][position])


# Pixels


def test_normalised_by_channel():
    normalisation = Normalisation((0.25, 0.5), (0.1, 0.3))
    images = numbered(5, normalisation=normalisation)
    ((pixels, _),) = images.batches(5)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normalisation)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous()
    torch.testing.assert_close(pixels, (images.pixels / 255 - mean) / std, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 7), st.integers(0, 4), st.data())
def test_augmented_as_one_image_after_the_other(channels, height, width, padding, data):
    images = torch.randint(0, 256, (3, channels, height, width), dtype=torch.uint8)
    drawn = [[data.draw(st.integers(0, 2 * padding)) for _ in "yx"] + [data.draw(st.integers(0, 1))] for _ in images]
    augmented = Augment(padding).apply(images, torch.tensor(drawn))
    for image, result, (top, left, mirror) in zip(images, augmented, drawn, strict=True):
        crop = F.pad(image, (padding,) * 4)[:, top : top + height, left : left + width]
        assert torch.equal(result, crop.flip(2) if mirror else crop)


def test_every_crop_is_as_likely_mirrored_or_not():
    count = 81 * 2 * 200
    drawn = Augment(4).draw(count, seeded(0))
    kinds = torch.zeros(9, 9, 2)
    kinds.index_put_(tuple(drawn.T), torch.ones(count), accumulate=True)
    chi2 = ((kinds - 200) ** 2 / 200).sum()
    assert 105 < chi2 < 220, "161 degrees of freedom"  # five standard deviations below, three above


def test_augmented_images_are_shown_and_kept_ones_stay():
    images = numbered(30, side=12)
    before = images.pixels.clone()
    ((pixels, labels),) = images.batches(30, shuffle=seeded(0), augment=Augment(4))
    assert torch.equal(images.pixels, before)
    kept = images.pixels[labels].float()
    changed = (pixels != kept).flatten(1).any(1).sum()
    assert changed >= 28  # 1 of 162 stays as it was
    assert torch.equal((pixels[:, 0] > 0).any(2).any(1), torch.ones(30, dtype=torch.bool))
    assert set(pixels[:, 0].unique().tolist()) <= {0.0, *range(1, 31)}  # black where it was padded


# Bad input


@pytest.mark.parametrize(("batch_size", "drop_last"), [(0, False), (-1, False), (11, True)])
def test_batches_that_cannot_be_had(batch_size, drop_last):
    with pytest.raises(ExperimentError, match=f"batch of {batch_size} .* 10 images.*1 to 10"):
        numbered(10).batches(batch_size, drop_last=drop_last)


def test_a_batch_that_processes_cannot_share():
    with pytest.raises(ExperimentError, match=r"batch of 8 .* 3 processes.*multiple of 3"):
        numbered(10).batches(8, shuffle=seeded(0), world=3)
