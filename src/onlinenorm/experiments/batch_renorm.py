"""Batch Renormalization (Ioffe, 2017): BatchNorm whose output is moved to where its running statistics would put it."""

import torch
from torch import Tensor, nn


class BatchRenorm(nn.Module):
    """Batch Renormalization of (N, C, *).

    With mu_B, sigma_B the batch's mean and deviation and mu, sigma the running ones,

        yhat = (x - mu_B) / sigma_B * r + d      r = sigma_B / sigma      d = (mu_B - mu) / sigma

    where r is clipped to [1 / r_max, r_max] and d to [-d_max, d_max]. Without the clipping yhat is exactly what
    evaluation computes. No gradient passes through r and d, so the gradient is BatchNorm's, times r.

    The bounds follow the paper's schedule. It trains 5,000 steps as BatchNorm, then lets r_max grow from 1 to 3 until
    step 40,000 and d_max from 0 to 5 until step 25,000: linearly here, the paper says "gradually".

    Args:
        num_features: channels C.
        warmup: steps that are BatchNorm's; the schedule's other steps keep their ratio to it, 8 and 5.
        momentum: weight of a batch in the running statistics; the paper's.
        eps: added to the batch's variance.
    """

    running_mean: Tensor
    running_std: Tensor
    num_batches_tracked: Tensor

    R_MAX, R_UNTIL = 3.0, 8
    D_MAX, D_UNTIL = 5.0, 5

    def __init__(self, num_features: int, warmup: int = 5000, momentum: float = 0.01, eps: float = 1e-5) -> None:
        super().__init__()
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1 step, got {warmup}")
        self.warmup = warmup
        self.momentum = momentum
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_std", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def bounds(self) -> tuple[Tensor, Tensor]:
        """r_max and d_max at this step."""
        warmups = self.num_batches_tracked / self.warmup - 1  # how often over, since the first was done
        r_max = 1 + (self.R_MAX - 1) * (warmups / (self.R_UNTIL - 1)).clamp(0, 1)
        d_max = self.D_MAX * (warmups / (self.D_UNTIL - 1)).clamp(0, 1)
        return r_max, d_max

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x; in training by its own statistics, corrected, and move the running ones."""
        x = x.to(self.weight.dtype)
        per_channel = (1, -1, *[1] * (x.dim() - 2))
        if self.training:
            if x.numel() == x.shape[1]:
                raise ValueError(f"Batch Renormalization needs more than one value a channel, got {tuple(x.shape)}")
            over = [0, *range(2, x.dim())]
            var, mean = torch.var_mean(x, over, correction=0)
            std = (var + self.eps).sqrt()
            with torch.no_grad():
                r_max, d_max = self.bounds()
                r = (std / self.running_std).clamp(1 / r_max, r_max)
                d = ((mean - self.running_mean) / self.running_std).clamp(-d_max, d_max)
                self.running_mean += self.momentum * (mean - self.running_mean)
                self.running_std += self.momentum * (std - self.running_std)
                self.num_batches_tracked += 1
            scale, shift = r / std, d - mean * r / std
        else:
            scale = 1 / self.running_std
            shift = -self.running_mean * scale
        weight, bias = self.weight * scale, self.weight * shift + self.bias
        return x * weight.view(per_channel) + bias.view(per_channel)
