import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from onlinenorm.experiments.data.made import ODDS, PERPLEXITY, made_images, made_text


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (16, 3)])
def test_images_depend_on_the_seed_alone(size, channels):
    one, again, other = (made_images(50, 20, size=size, channels=channels, seed=seed) for seed in (1, 1, 2))
    assert one.train.pixels.shape == (50, channels, size, size)
    assert one.train.pixels.dtype == torch.uint8
    assert torch.equal(one.train.pixels, again.train.pixels)
    assert torch.equal(one.test.pixels, again.test.pixels)
    assert not torch.equal(one.train.pixels, other.train.pixels)


def test_classes_are_balanced_and_pixels_not_cut_off():
    data = made_images(100, 50, classes=5)
    assert torch.bincount(data.train.labels).tolist() == [20] * 5
    assert torch.bincount(data.test.labels).tolist() == [10] * 5
    at_an_end = (data.train.pixels == 0) | (data.train.pixels == 255)
    assert at_an_end.float().mean() < 0.01


def test_images_of_a_class_can_be_told_by_its_pattern_but_not_by_their_brightness():
    data = made_images(2000, 500)
    train, test = (images.pixels.flatten(1).double() for images in (data.train, data.test))

    def accuracy(train, test):
        means = torch.stack([train[data.train.labels == i].mean(0) for i in range(10)])
        return (torch.cdist(test, means).argmin(1) == data.test.labels).double().mean()

    brightness = [pixels.mean(1, keepdim=True) for pixels in (train, test)]
    assert accuracy(train - brightness[0], test - brightness[1]) > 0.9
    assert accuracy(*brightness) < 0.3


def test_text_follows_its_odds():
    text = made_text()
    assert [len(part) for part in (text.train, text.validation, text.test)] == [20_000, 2_000, 2_000]
    words = text.train.tolist()
    pairs = Counter(pairwise(words))
    for word in range(50):
        followers = sorted((count for (first, _), count in pairs.items() if first == word), reverse=True)
        assert len(followers) == len(ODDS)
        total = sum(followers)
        assert total == pytest.approx(400, rel=0.3), "all words are equally frequent"
        assert [count / total for count in followers] == pytest.approx(ODDS, abs=0.12)


def test_the_best_perplexity_is_as_it_says():
    text = made_text(200_000, 20_000, 0)
    words = text.train.tolist()
    pairs, singles = Counter(pairwise(words)), Counter(words[:-1])
    held_out = text.validation.tolist()
    losses = [-math.log(pairs[a, b] / singles[a]) for a, b in pairwise(held_out)]
    assert math.exp(sum(losses) / len(losses)) == pytest.approx(PERPLEXITY, rel=0.02)


def test_text_depends_on_the_seed_alone():
    one, again, other = (made_text(1000, 100, 100, words=20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.train, again.train)
    assert not torch.equal(one.train, other.train)
    assert len(one.vocabulary) == 20
    assert one.train.max() < 20
