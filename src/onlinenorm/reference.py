"""The paper, literally: Online Normalization in NumPy float64, one sample at a time.

The equations are those of section 4 of Chiley et al., "Online Normalization for Training Neural Networks",
NeurIPS 2019; each line that computes one carries its number. Every other implementation is tested by this
one, so it imports none of them and does nothing for speed.

A sample is a (C, D) array: C features, D elements in each. The paper's mean over a feature, μ(·), is the mean
over D; its mean over all features, μ({·}), is the mean over C and D. A leading `d` is the paper's prime: `dx`
is x', the gradient of the loss with respect to x.

What the paper leaves to the implementer:

- eps stands under the root: σ = sqrt(running_var + eps); guard_eps likewise: ζ = sqrt(μ({u²}) + guard_eps).
- The affine transform u = weight·y + bias stands between (8) and (9), so layer scaling sees u in place of y.
  The control process (11), (12) acts on y, which is before the affine transform.
- State stays finite. A feature whose running statistics a sample would make non-finite keeps both for that
  sample, and one whose control errors a sample's gradient would make non-finite keeps both of those. Outputs
  and gradients are what the equations give, except that a sample whose ζ is not finite comes out NaN in every
  feature, where the equations would give some of them as zero.
"""

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Guard = Literal["layer_scaling", "clamp"] | None


class _Sample(NamedTuple):
    """One sample's way through the forward pass; columns are (C, 1), the rest is (C, D)."""

    sigma: Array  # column
    y: Array  # normalised
    weight: Array  # column
    u: Array  # after the affine transform
    zeta: float  # layer scaling's divisor; 1 under other guards
    z: Array  # the output


class OnlineNorm:
    """Normalise (N, C, *) arrays by statistics that stream from sample to sample.

    Args:
        num_features: C, the number of features (channels).
        alpha_fwd: decay of the running mean and variance, the paper's α_f.
        alpha_bwd: decay of the backward control process, the paper's α_b.
        eps: added to the running variance.
        affine: whether there are a `weight` and a `bias`; without, they and their gradients are None.
        guard: "layer_scaling", the paper's; "clamp", which clips to ±clamp_value; or None.
        guard_eps: added to layer scaling's mean of squares.
        clamp_value: the bound of the guard "clamp".
        warmup: whether sample t = 0, 1, ... averages with decay 1 - 1 / (t + 2) until that reaches alpha_fwd. This is
            not in the paper: its streams start at mean 0 and variance 1 and have to forget that.
        bound_control: whether a sample takes away no more of ε^(y) than there is. By (11b) it takes the share
            (1 - α_b) μ(y²), which may exceed 1 and, beyond 2, makes ε^(y) grow. The authors' code bounds it.

    The state is eight float64 arrays of shape (C,): `weight`, `bias`, `running_mean`, `running_var`,
    `control_y` and `control_1` (the paper's ε^(y) and ε^(1)), `weight_grad` and `bias_grad`. The gradients
    add up from one `backward` to the next until the user zeroes them.
    """

    def __init__(
        self,
        num_features: int,
        alpha_fwd: float = 0.999,
        alpha_bwd: float = 0.99,
        eps: float = 1e-5,
        affine: bool = True,
        guard: Guard = "layer_scaling",
        guard_eps: float = 1e-5,
        clamp_value: float = 5.0,
        warmup: bool = False,
        bound_control: bool = False,
    ) -> None:
        if guard not in ("layer_scaling", "clamp", None):
            raise ValueError(f"guard must be 'layer_scaling', 'clamp' or None, got {guard!r}")
        self.num_features = num_features
        self.alpha_fwd = alpha_fwd
        self.alpha_bwd = alpha_bwd
        self.eps = eps
        self.affine = affine
        self.guard = guard
        self.guard_eps = guard_eps
        self.clamp_value = clamp_value
        self.warmup = warmup
        self.bound_control = bound_control

        self.weight: Array | None = np.ones(num_features) if affine else None
        self.bias: Array | None = np.zeros(num_features) if affine else None
        self.weight_grad: Array | None = np.zeros(num_features) if affine else None
        self.bias_grad: Array | None = np.zeros(num_features) if affine else None
        self.running_mean: Array = np.zeros(num_features)
        self.running_var: Array = np.ones(num_features)
        self.control_y: Array = np.zeros(num_features)
        self.control_1: Array = np.zeros(num_features)
        self.num_samples_tracked = 0
        self._forwards: list[tuple[tuple[int, ...], list[_Sample]]] = []  # those that await their backward

    @np.errstate(all="ignore")
    def forward(self, x: npt.ArrayLike) -> Array:
        """Normalise the samples of `x` in order, updating the running statistics after each.

        Each `forward` awaits one `backward`; they pair up last in, first out.
        """
        shape, samples = self._split(x)
        passed = []
        for sample in samples:
            passed.append(self._normalize(sample))
            self._update_statistics(sample)
        self._forwards.append((shape, passed))
        return _join([sample.z for sample in passed], shape)

    @np.errstate(all="ignore")
    def backward(self, grad: npt.ArrayLike) -> Array:
        """Return the gradient for the input of the last forward pass that has had no backward yet.

        `grad` is the gradient for that pass's output. The samples are taken in the order of the forward pass;
        each adds to `weight_grad` and `bias_grad` and updates the control errors.
        """
        if not self._forwards:
            raise RuntimeError("backward needs a forward pass that has had no backward yet")
        expected, passed = self._forwards[-1]
        if np.shape(grad) != expected:
            raise ValueError(f"grad must have its output's shape {expected}, got {np.shape(grad)}")
        shape, dzs = self._split(grad)
        self._forwards.pop()
        return _join([self._backward(sample, dz) for sample, dz in zip(passed, dzs, strict=True)], shape)

    @np.errstate(all="ignore")
    def infer(self, x: npt.ArrayLike) -> Array:
        """Normalise every sample of `x` by the running statistics as they stand; no state changes."""
        shape, samples = self._split(x)
        return _join([self._normalize(sample).z for sample in samples], shape)

    def _split(self, x: npt.ArrayLike) -> tuple[tuple[int, ...], list[Array]]:
        """Return the shape of `x` and its samples, each (C, D); none where `x` has no elements."""
        x = np.asarray(x, dtype=np.float64, order="C")
        if x.ndim < 2:
            raise ValueError(f"expected (N, C, *), at least 2 dimensions, got shape {x.shape}")
        if x.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} features in dimension 1, got shape {x.shape}")
        return x.shape, [sample.reshape(self.num_features, -1) for sample in x] if x.size else []

    def _normalize(self, x: Array) -> _Sample:
        """One sample's forward pass: normalise, affine, guard."""
        sigma = np.sqrt(self.running_var + self.eps)[:, None]
        y = (x - self.running_mean[:, None]) / sigma  # (8a)

        weight = np.ones((self.num_features, 1)) if self.weight is None else self.weight[:, None].copy()
        bias = np.zeros((self.num_features, 1)) if self.bias is None else self.bias[:, None]
        u = weight * y + bias

        zeta, z = 1.0, u
        if self.guard == "layer_scaling":
            zeta = float(np.sqrt(np.mean(u**2) + self.guard_eps))  # (9), right
            zeta = zeta if np.isfinite(zeta) else np.nan
            z = u / zeta  # (9), left
        elif self.guard == "clamp":
            z = np.clip(u, -self.clamp_value, self.clamp_value)
        return _Sample(sigma, y, weight, u, zeta, z)

    def _update_statistics(self, x: Array) -> None:
        """Let one sample into the running mean and variance."""
        alpha, old_mean, old_var = self.alpha_fwd, self.running_mean, self.running_var
        if self.warmup:
            alpha = min(alpha, 1 - 1 / (self.num_samples_tracked + 2))
        self.num_samples_tracked += 1
        mean, var = np.mean(x, axis=1), np.var(x, axis=1)  # μ(x_t), σ²(x_t)

        new_mean = alpha * old_mean + (1 - alpha) * mean  # (8b)
        new_var = alpha * old_var + (1 - alpha) * var + alpha * (1 - alpha) * (mean - old_mean) ** 2  # (8c)

        finite = np.isfinite(new_mean) & np.isfinite(new_var)
        self.running_mean = np.where(finite, new_mean, old_mean)
        self.running_var = np.where(finite, new_var, old_var)

    def _backward(self, sample: _Sample, dz: Array) -> Array:
        """One sample's backward pass: guard, affine, then the control process of the normalisation."""
        sigma, y, weight, u, zeta, z = sample
        old_y, old_1 = self.control_y, self.control_1

        du = dz
        if self.guard == "layer_scaling":
            du = (dz - z * np.mean(z * dz)) / zeta  # (10)
        elif self.guard == "clamp":
            du = np.where(np.abs(u) > self.clamp_value, 0.0, dz)

        if self.weight_grad is not None and self.bias_grad is not None:
            self.weight_grad = self.weight_grad + np.sum(du * y, axis=1)
            self.bias_grad = self.bias_grad + np.sum(du, axis=1)
        dy = weight * du

        dx_tilde = dy - (1 - self.alpha_bwd) * old_y[:, None] * y  # (11a)
        new_y = old_y + np.mean(dx_tilde * y, axis=1)  # (11b)
        if self.bound_control:
            share = np.minimum((1 - self.alpha_bwd) * np.mean(y**2, axis=1), 1)
            new_y = old_y * (1 - share) + np.mean(dy * y, axis=1)  # (11b), bounded

        dx = dx_tilde / sigma - (1 - self.alpha_bwd) * old_1[:, None]  # (12a)
        new_1 = old_1 + np.mean(dx, axis=1)  # (12b)

        finite = np.isfinite(new_y) & np.isfinite(new_1)
        self.control_y = np.where(finite, new_y, old_y)
        self.control_1 = np.where(finite, new_1, old_1)
        return dx


def _join(samples: list[Array], shape: tuple[int, ...]) -> Array:
    """Put (C, D) samples back together as one array of the given shape."""
    return np.array(samples).reshape(shape)
