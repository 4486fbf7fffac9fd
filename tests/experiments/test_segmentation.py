"""The loss and the similarity that segmentation is trained and judged by."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onlinenorm.experiments.segmentation import jaccard, segmentation_loss


def made_masks(seed: int, share: float = 0.5) -> torch.Tensor:
    return torch.rand(3, 2, 4, 5, generator=torch.Generator().manual_seed(seed)) < share


def test_jaccard_of_an_image_takes_its_masks_together():
    masks = torch.zeros(2, 6, 4, 4, dtype=torch.bool)
    masks[:, 0, :2] = True
    predicted = masks.clone()
    predicted[1, 0, 1] = False
    predicted[1, 1, 0, 0] = True
    assert jaccard(predicted, masks).tolist() == pytest.approx([1, 4 / 9])


@given(st.integers(0, 99), st.integers(0, 99), st.floats(0, 1))
def test_jaccard_is_symmetric_and_one_for_the_truth_alone(one, other, share):
    a, b = made_masks(one, share), made_masks(100 + other)
    assert torch.equal(jaccard(a, b), jaccard(b, a))
    assert (jaccard(b, b) == 1).all()
    same = (a == b).flatten(1).all(dim=1)
    assert torch.equal(jaccard(a, b) == 1, same)
    assert ((jaccard(a, b) >= 0) & (jaccard(a, b) <= 1)).all()


def test_the_loss_is_small_for_the_truth_and_large_for_its_opposite():
    masks = made_masks(0).float()
    perfect, inverse = (sign * 50 * (masks - 0.5) for sign in (1, -1))
    assert segmentation_loss(perfect, masks) < 1e-6
    assert segmentation_loss(inverse, masks) > 5


@given(st.integers(0, 99))
def test_the_loss_is_half_cross_entropy_half_dice(seed):
    masks = made_masks(seed).double()
    p = torch.rand(masks.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.98 + 0.01
    entropy = -(masks * p.log() + (1 - masks) * (1 - p).log()).mean()
    dice = [
        1 - (2 * (p[n, c] * masks[n, c]).sum() + 1) / (p[n, c].sum() + masks[n, c].sum() + 1)
        for n in range(3)
        for c in range(2)
    ]
    assert segmentation_loss(p.logit(), masks).item() == pytest.approx(((entropy + sum(dice) / 6) / 2).item())
