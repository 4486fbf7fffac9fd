"""What segmentation is trained and judged by: the loss and the similarity of the paper's U-Net experiment."""

import torch.nn.functional as F
from torch import Tensor


def segmentation_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Half binary cross entropy, half Dice loss of every mask; masks are 0 or 1 in the logits' type."""
    probability = logits.sigmoid()
    overlap = (probability * masks).sum(dim=(2, 3))
    total = probability.sum(dim=(2, 3)) + masks.sum(dim=(2, 3))
    dice = 1 - (2 * overlap + 1) / (total + 1)
    return 0.5 * F.binary_cross_entropy_with_logits(logits, masks) + 0.5 * dice.mean()


def jaccard(predicted: Tensor, masks: Tensor) -> Tensor:
    """Each image's intersection over union, its masks taken together; both are boolean."""
    intersection = (predicted & masks).sum(dim=(1, 2, 3))
    union = (predicted | masks).sum(dim=(1, 2, 3))
    return intersection / union.clamp(min=1)
