"""The three steps as Triton kernels, for CUDA and ROCm.

The notation is that of `portable`, which says what each step computes; here each is a kernel. Moments and apply see
tensors as (N, C, D) by their strides, so channels may lie second or last. The scan is a loop over samples in one
kernel, with a channel in each thread, so that it is the same arithmetic as anywhere else.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onlinenorm.torch.native import dense
from onlinenorm.torch.portable import Replay, accumulate_in
from onlinenorm.torch.settings import LEAKY_SLOPE, Settings

TILE = 2048  # elements that a program of moments and apply has in hand at a time
PROGRAMS = 512  # that keep a large device busy; where planes are fewer, several share one
SCAN_CHANNELS = 32  # of one program of the scan
_SLOPE = tl.constexpr(LEAKY_SLOPE)


# ---- moments


@triton.jit
def _moments(x, m, v, N, C, D, sn, sc, sd, share, BC: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr):
    """Mean and variance of a share of every (sample, channel) plane, about a first, rounded mean."""
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    planes = x + n * sn + c[:, None].to(tl.int64) * sc
    start = part * share
    stop = tl.minimum(start + share, D)
    total = tl.zeros([BC, BD], WIDE)
    for at in range(start, stop, BD):
        d = at + tl.arange(0, BD)
        inside = (c < C)[:, None] & (d < stop)[None, :]
        total += tl.load(planes + d[None, :].to(tl.int64) * sd, mask=inside, other=0).to(WIDE)
    rough = tl.sum(total, 1) / (stop - start)
    off = tl.zeros([BC, BD], WIDE)
    squares = tl.zeros([BC, BD], WIDE)
    for at in range(start, stop, BD):
        d = at + tl.arange(0, BD)
        inside = (c < C)[:, None] & (d < stop)[None, :]
        t = tl.load(planes + d[None, :].to(tl.int64) * sd, mask=inside, other=0).to(WIDE) - rough[:, None]
        t = tl.where(inside, t, 0)
        off += t
        squares += t * t
    more = tl.sum(off, 1) / (stop - start)
    variance = tl.sum(squares, 1) / (stop - start) - more * more
    out = (part * N + n) * C + c
    tl.store(m + out, rough + more, mask=c < C)
    tl.store(v + out, tl.where(variance < 0, 0, variance), mask=c < C)


@triton.jit
def _yhat(x, mu, inv, WIDE: tl.constexpr):
    """Eq. 8a. The mean's rounding to the type of the sum is made good, so that large offsets cost no precision."""
    near = mu.to(WIDE)
    return ((x - near[:, None]) - (mu - near).to(WIDE)[:, None]) * inv.to(WIDE)[:, None]


@triton.jit
def _gradient_before_ending(
    grad, yhat, gamma, beta, inv_zeta, CLAMP: tl.constexpr, CLAMP_VALUE: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient at what the clamp and the activation were given."""
    if ACT != "" or CLAMP:
        r = (yhat * gamma.to(WIDE)[:, None] + beta.to(WIDE)[:, None]) * inv_zeta.to(WIDE)
        if ACT == "relu":
            grad = tl.where(r <= 0, 0, grad)
        elif ACT == "leaky_relu":
            grad = tl.where(r <= 0, grad * tl.full([], _SLOPE, WIDE), grad)
        elif ACT == "silu":
            s = 1 / (1 + tl.exp(-r))
            grad = grad * s * (1 + r * (1 - s))
        elif ACT == "gelu":
            grad = grad * (0.5 * (1 + tl.erf(r * 0.7071067811865476)) + r * tl.exp(-0.5 * r * r) * 0.3989422804014327)
        if CLAMP:
            grad = tl.where(tl.abs(r) > CLAMP_VALUE, 0, grad)
    return grad


@triton.jit
def _grad_moments(
    x, grad_z, mu, inv, inv_zeta, weight, bias, s1, s2, N, C, D, sn, sc, sd, share,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMP: tl.constexpr, CLAMP_VALUE: tl.constexpr, ACT: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum of z' and of z' yhat over a share of every plane."""
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    place = n * sn + c[:, None].to(tl.int64) * sc
    mu_c = tl.load(mu + n * C + c, mask=c < C, other=0)
    inv_c = tl.load(inv + n * C + c, mask=c < C, other=0)
    gamma, beta = _affine(weight, bias, c, C, HAS_WEIGHT, HAS_BIAS)
    zeta = tl.load(inv_zeta + n)
    start = part * share
    stop = tl.minimum(start + share, D)
    sum_1 = tl.zeros([BC, BD], WIDE)
    sum_2 = tl.zeros([BC, BD], WIDE)
    for at in range(start, stop, BD):
        d = at + tl.arange(0, BD)
        inside = (c < C)[:, None] & (d < stop)[None, :]
        where = place + d[None, :].to(tl.int64) * sd
        yhat = _yhat(tl.load(x + where, mask=inside, other=0).to(WIDE), mu_c, inv_c, WIDE)
        grad = tl.load(grad_z + where, mask=inside, other=0).to(WIDE)
        grad = _gradient_before_ending(grad, yhat, gamma, beta, zeta, CLAMP, CLAMP_VALUE, ACT, WIDE)
        sum_1 += tl.where(inside, grad, 0)
        sum_2 += tl.where(inside, grad * yhat, 0)
    out = (part * N + n) * C + c
    tl.store(s1 + out, tl.sum(sum_1, 1), mask=c < C)
    tl.store(s2 + out, tl.sum(sum_2, 1), mask=c < C)


# ---- scan


@triton.jit
def _affine(weight, bias, c, C, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    gamma = tl.full(c.shape, 1.0, tl.float64)
    beta = tl.full(c.shape, 0.0, tl.float64)
    if HAS_WEIGHT:
        gamma = tl.load(weight + c, mask=c < C, other=0).to(tl.float64)
    if HAS_BIAS:
        beta = tl.load(bias + c, mask=c < C, other=0).to(tl.float64)
    return gamma, beta


@triton.jit
def _finite(x):
    return x - x == 0


@triton.jit
def _scan_statistics(
    m, v, mean, var, count, weight, bias, mu, inv, power, N, C,
    ALPHA: tl.constexpr, EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    TRAINING: tl.constexpr, WARMUP: tl.constexpr, MOVE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Eqs. 8b and 8c: the streams before each sample, and each channel's part in its second moment (for eq. 9)."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    here = c < C
    mu_c = tl.load(mean + c, mask=here, other=0).to(tl.float64)
    s2_c = tl.load(var + c, mask=here, other=1).to(tl.float64)
    gamma, beta = _affine(weight, bias, c, C, HAS_WEIGHT, HAS_BIAS)
    before = tl.load(count).to(tl.float64) if WARMUP else 0.0
    next_m = tl.load(m + c, mask=here, other=0).to(tl.float64)
    next_v = tl.load(v + c, mask=here, other=0).to(tl.float64)
    for n in range(N):
        m_n, v_n = next_m, next_v
        ahead = tl.minimum(n + 1, N - 1) * C + c  # the next one's moments are on their way while these are used
        next_m = tl.load(m + ahead, mask=here, other=0).to(tl.float64)
        next_v = tl.load(v + ahead, mask=here, other=0).to(tl.float64)
        inv_c = 1 / tl.sqrt(s2_c + EPS)
        y1 = (m_n - mu_c) * inv_c
        variance = v_n * inv_c * inv_c
        tl.store(mu + n * C + c, mu_c, mask=here)
        tl.store(inv + n * C + c, inv_c, mask=here)
        shifted = gamma * y1 + beta
        tl.store(power + n * C + c, gamma * gamma * variance + shifted * shifted, mask=here)
        if TRAINING:
            a = tl.full([], ALPHA, tl.float64)
            if WARMUP:
                a = tl.minimum(1 - 1 / (before + n + 2), a)
            apart = m_n - mu_c
            ok = _finite(m_n) & _finite(v_n)
            s2_c = tl.where(ok, a * s2_c + (1 - a) * v_n + a * (1 - a) * apart * apart, s2_c)
            mu_c = tl.where(ok, a * mu_c + (1 - a) * m_n, mu_c)
    if MOVE:
        tl.store(mean + c, mu_c, mask=here)
        tl.store(var + c, s2_c, mask=here)


@triton.jit
def _inverse_zeta(power, inv_zeta, C, GUARD_EPS: tl.constexpr, BC: tl.constexpr):
    """1 / zeta of eq. 9; not a number where the second moment is not finite."""
    n = tl.program_id(0)
    total = tl.zeros([BC], tl.float64)
    for at in range(0, C, BC):
        c = at + tl.arange(0, BC)
        total += tl.load(power + n * C + c, mask=c < C, other=0)
    q = tl.sum(total, 0) / C
    tl.store(inv_zeta + n, tl.where(_finite(q), 1 / tl.sqrt(q + GUARD_EPS), q - q))


@triton.jit
def _common(
    s1, s2, weight, bias, inv_zeta, common, C, D,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What eq. 10 subtracts from all channels of a sample, over zeta squared."""
    n = tl.program_id(0)
    total = tl.zeros([BC], tl.float64)
    for at in range(0, C, BC):
        c = at + tl.arange(0, BC)
        gamma, beta = _affine(weight, bias, c, C, HAS_WEIGHT, HAS_BIAS)
        s1_c = tl.load(s1 + n * C + c, mask=c < C, other=0).to(tl.float64)
        s2_c = tl.load(s2 + n * C + c, mask=c < C, other=0).to(tl.float64)
        total += gamma * s2_c + beta * s1_c
    zeta = tl.load(inv_zeta + n)
    tl.store(common + n, tl.sum(total, 0) / D / C * zeta * zeta)


@triton.jit
def _scan_control(
    s1, s2, m, v, mu, inv, inv_zeta, common, weight, bias, control_y, control_1, by_grad, by_yhat, less,
    grad_weight, grad_bias, N, C, D,
    DECAY: tl.constexpr, BOUND: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, TRAINING: tl.constexpr,
    WIDE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Eqs. 11b and 12b, the coefficients of x' for every sample, and the parameters' gradients."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    here = c < C
    ey = tl.load(control_y + c, mask=here, other=0).to(tl.float64)
    e1 = tl.load(control_1 + c, mask=here, other=0).to(tl.float64)
    gamma, beta = _affine(weight, bias, c, C, HAS_WEIGHT, HAS_BIAS)
    total_1 = tl.zeros([BC], tl.float64)
    total_2 = tl.zeros([BC], tl.float64)
    for n in range(N):
        at = n * C + c
        inv_c = tl.load(inv + at, mask=here, other=1)
        y1 = (tl.load(m + at, mask=here, other=0).to(tl.float64) - tl.load(mu + at, mask=here, other=0)) * inv_c
        y2 = tl.load(v + at, mask=here, other=0).to(tl.float64) * inv_c * inv_c + y1 * y1
        zeta = tl.load(inv_zeta + n)
        k = tl.load(common + n)
        a1 = (tl.load(s1 + at, mask=here, other=0).to(tl.float64) / D - k * (gamma * y1 + beta)) * zeta
        a2 = (tl.load(s2 + at, mask=here, other=0).to(tl.float64) / D - k * (gamma * y2 + beta * y1)) * zeta
        total_1 += a1
        total_2 += a2
        tl.store(by_grad + at, (inv_c * gamma * zeta).to(WIDE), mask=here)
        tl.store(by_yhat + at, (inv_c * (gamma * gamma * k * zeta + DECAY * ey)).to(WIDE), mask=here)
        tl.store(less + at, (inv_c * gamma * beta * k * zeta + DECAY * e1).to(WIDE), mask=here)
        if TRAINING:
            pull = DECAY * ey
            share = DECAY * y2
            if BOUND:
                share = tl.where(share > 1, 1, share)
            next_y = ey + (gamma * a2 - ey * share)
            next_1 = e1 + (inv_c * (gamma * a1 - pull * y1) - DECAY * e1)
            ok = _finite(next_y) & _finite(next_1)
            ey = tl.where(ok, next_y, ey)
            e1 = tl.where(ok, next_1, e1)
    if TRAINING:
        tl.store(control_y + c, ey, mask=here)
        tl.store(control_1 + c, e1, mask=here)
    if HAS_WEIGHT:
        tl.store(grad_weight + c, total_2 * D, mask=here)
    if HAS_BIAS:
        tl.store(grad_bias + c, total_1 * D, mask=here)


# ---- apply


@triton.jit
def _apply(
    x, z, mu, inv, inv_zeta, weight, bias, C, D, sn, sc, sd,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMP: tl.constexpr, CLAMP_VALUE: tl.constexpr, ACT: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Eqs. 8a and 9, the affine transform between them, the clamp and the activation."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    inside = (c < C)[:, None] & (d < D)[None, :]
    where = n * sn + c[:, None].to(tl.int64) * sc + d[None, :].to(tl.int64) * sd
    mu_c = tl.load(mu + n * C + c, mask=c < C, other=0)
    inv_c = tl.load(inv + n * C + c, mask=c < C, other=0)
    gamma, beta = _affine(weight, bias, c, C, HAS_WEIGHT, HAS_BIAS)
    yhat = _yhat(tl.load(x + where, mask=inside, other=0).to(WIDE), mu_c, inv_c, WIDE)
    r = (yhat * gamma.to(WIDE)[:, None] + beta.to(WIDE)[:, None]) * tl.load(inv_zeta + n).to(WIDE)
    if CLAMP:
        r = tl.where(r > CLAMP_VALUE, CLAMP_VALUE, tl.where(r < -CLAMP_VALUE, -CLAMP_VALUE, r))
    if ACT == "relu":
        r = tl.where(r < 0, 0, r)
    elif ACT == "leaky_relu":
        r = tl.where(r < 0, r * tl.full([], _SLOPE, WIDE), r)
    elif ACT == "silu":
        r = r / (1 + tl.exp(-r))
    elif ACT == "gelu":
        r = r * 0.5 * (1 + tl.erf(r * 0.7071067811865476))
    tl.store(z + where, r, mask=inside)


@triton.jit
def _apply_backward(
    x, grad_z, grad_x, mu, inv, inv_zeta, by_grad, by_yhat, less, weight, bias, C, D, sn, sc, sd,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMP: tl.constexpr, CLAMP_VALUE: tl.constexpr, ACT: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Eqs. 10 to 12 in one multiply-add for each element."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    inside = (c < C)[:, None] & (d < D)[None, :]
    where = n * sn + c[:, None].to(tl.int64) * sc + d[None, :].to(tl.int64) * sd
    mu_c = tl.load(mu + n * C + c, mask=c < C, other=0)
    inv_c = tl.load(inv + n * C + c, mask=c < C, other=0)
    gamma, beta = _affine(weight, bias, c, C, HAS_WEIGHT, HAS_BIAS)
    yhat = _yhat(tl.load(x + where, mask=inside, other=0).to(WIDE), mu_c, inv_c, WIDE)
    grad = tl.load(grad_z + where, mask=inside, other=0).to(WIDE)
    zeta = tl.load(inv_zeta + n)
    grad = _gradient_before_ending(grad, yhat, gamma, beta, zeta, CLAMP, CLAMP_VALUE, ACT, WIDE)
    g = tl.load(by_grad + n * C + c, mask=c < C, other=0)[:, None]
    y = tl.load(by_yhat + n * C + c, mask=c < C, other=0)[:, None]
    e = tl.load(less + n * C + c, mask=c < C, other=0)[:, None]
    tl.store(grad_x + where, g * grad - y * yhat - e, mask=inside)


# ---- both passes


class _Shape(NamedTuple):
    """A tensor as (N, C, D), and how it is cut into tiles."""

    samples: int
    channels: int
    elements: int
    strides: tuple[int, int, int]
    block: tuple[int, int]
    parts: int  # into which moments cut a plane, so that few large planes keep the device busy

    @property
    def share(self) -> int:
        return -(-self.elements // self.parts)

    @property
    def moments_grid(self) -> tuple[int, int, int]:
        return self.samples, triton.cdiv(self.channels, self.block[0]), triton.cdiv(self.elements, self.share)

    @property
    def apply_grid(self) -> tuple[int, int, int]:
        return self.samples, triton.cdiv(self.channels, self.block[0]), triton.cdiv(self.elements, self.block[1])


def _shape(x: Tensor) -> _Shape:
    n, c = x.shape[:2]
    d = x.shape[2:].numel()
    last = not x.is_contiguous()  # dense, so channels lie last
    strides = (c * d, 1, c) if last else (c * d, d, 1)
    if last or d == 1:
        channels = min(triton.next_power_of_2(c), 64 if d > 1 else TILE // 2)
        block = channels, min(triton.next_power_of_2(d), TILE // channels)
    else:
        elements = min(triton.next_power_of_2(d), TILE)
        block = min(triton.next_power_of_2(c), TILE // elements), elements
    programs = n * triton.cdiv(c, block[0])
    parts = max(1, min(PROGRAMS // programs, d // (4 * block[1])))
    return _Shape(n, c, d, strides, block, parts)


def _ending(settings: Settings) -> dict[str, Any]:
    return {"CLAMP": settings.guard == "clamp", "CLAMP_VALUE": settings.clamp_value, "ACT": settings.act or ""}


def _tiles(shape: _Shape, x: Tensor) -> dict[str, Any]:
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    return {"BC": shape.block[0], "BD": shape.block[1], "WIDE": wide}


def _given(weight: Tensor | None, bias: Tensor | None) -> dict[str, bool]:
    return {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}


def moments(x: Tensor, shape: _Shape) -> tuple[Tensor, Tensor]:
    """Mean and variance of every (sample, channel) plane."""
    n, c, d, strides, *_ = shape
    parts = shape.moments_grid[2]
    m, v = torch.empty((2, parts, n, c), dtype=accumulate_in(x), device=x.device)
    _moments[shape.moments_grid](x, m, v, n, c, d, *strides, shape.share, **_tiles(shape, x))
    if parts == 1:
        return m[0], v[0]
    weights = torch.full((parts, 1, 1), shape.share, dtype=m.dtype, device=x.device)
    weights[-1] = d - shape.share * (parts - 1)
    weights /= d
    mean = (weights * m).sum(0)
    return mean, (weights * (v + (m - mean).square())).sum(0)


def _scan(
    settings: Settings,
    training: bool,
    shape: _Shape,
    m: Tensor,
    v: Tensor,
    mean: Tensor,
    var: Tensor,
    count: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    move: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The streams before each sample, as mean and inverse deviation, and 1 / zeta."""
    n, c, *_ = shape
    mu, inv, power = torch.empty((3, n, c), dtype=torch.float64, device=m.device)
    _scan_statistics[triton.cdiv(c, SCAN_CHANNELS),](
        m, v, mean, var, m if count is None else count, weight, bias, mu, inv, power, n, c,
        ALPHA=settings.alpha_fwd, EPS=settings.eps, **_given(weight, bias),
        TRAINING=training, WARMUP=settings.warmup and training, MOVE=move,
        BC=SCAN_CHANNELS, num_warps=1,
    )  # fmt: skip
    if settings.guard != "layer_scaling":
        return mu, inv, torch.ones(n, dtype=torch.float64, device=m.device)
    inv_zeta = torch.empty(n, dtype=torch.float64, device=m.device)
    block = min(triton.next_power_of_2(c), 1024)
    _inverse_zeta[n,](power, inv_zeta, c, GUARD_EPS=settings.guard_eps, BC=block)
    return mu, inv, inv_zeta


def forward(
    settings: Settings,
    training: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    num_samples_tracked: Tensor | None,
    keep: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Normalise x of shape (N, C, *); in training move the streams. Also what the backward needs, if `keep`."""
    like, x = x, dense(x)
    shape = _shape(x)
    replay: tuple[Tensor, ...] = ()
    with torch.cuda.device_of(x):
        m, v = moments(x, shape)
        if keep:
            count = m.new_zeros((), dtype=torch.int64) if num_samples_tracked is None else num_samples_tracked.clone()
            replay = Replay(running_mean.clone(), running_var.clone(), count, m, v)
        mu, inv, inv_zeta = _scan(
            settings, training, shape, m, v, running_mean, running_var, num_samples_tracked, weight, bias, training
        )
        z = torch.empty_like(x)
        _apply[shape.apply_grid](x, z, mu, inv, inv_zeta, weight, bias, shape.channels, shape.elements,
            *shape.strides, **_given(weight, bias), **_ending(settings), **_tiles(shape, x),
        )  # fmt: skip
        if training and num_samples_tracked is not None:
            num_samples_tracked += x.shape[0]
    return z if z.stride() == like.stride() else torch.empty_like(like).copy_(z), replay


def backward(
    settings: Settings,
    training: bool,
    x: Tensor,
    grad_z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    control_y: Tensor,
    control_1: Tensor,
    replay: tuple[Tensor, ...],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias, as far as they are needed; in training move the control errors."""
    like, x = x, dense(x)
    if grad_z.stride() != x.stride():
        grad_z = torch.empty_like(x).copy_(grad_z)
    shape = _shape(x)
    n, c, d, strides, *_ = shape
    mean, var, count, m, v = replay
    given, ending, tiles = _given(weight, bias), _ending(settings), _tiles(shape, x)
    with torch.cuda.device_of(x):
        mu, inv, inv_zeta = _scan(settings, training, shape, m, v, mean, var, count, weight, bias, False)
        sums = torch.empty((2, shape.moments_grid[2], n, c), dtype=accumulate_in(x), device=x.device)
        _grad_moments[shape.moments_grid](x, grad_z, mu, inv, inv_zeta, weight, bias, sums[0], sums[1], n, c, d,
            *strides, shape.share, **given, **ending, **tiles,
        )  # fmt: skip
        s1, s2 = sums.sum(1) if sums.shape[1] > 1 else sums[:, 0]
        common = torch.zeros_like(inv_zeta)
        if settings.guard == "layer_scaling":
            block = min(triton.next_power_of_2(c), 1024)
            _common[n,](s1, s2, weight, bias, inv_zeta, common, c, d, **given, BC=block)
        by_grad, by_yhat, less = torch.empty((3, n, c), dtype=accumulate_in(x), device=x.device)
        grad_weight = torch.empty_like(weight) if weight is not None else None
        grad_bias = torch.empty_like(bias) if bias is not None else None
        _scan_control[triton.cdiv(c, SCAN_CHANNELS),](
            s1, s2, m, v, mu, inv, inv_zeta, common, weight, bias, control_y, control_1, by_grad, by_yhat, less,
            grad_weight, grad_bias, n, c, d,
            DECAY=1 - settings.alpha_bwd if training else 0.0, BOUND=settings.bound_control, **given, TRAINING=training,
            WIDE=tiles["WIDE"], BC=SCAN_CHANNELS, num_warps=1,
        )  # fmt: skip
        grad_x = None
        if needs[0]:
            grad_x = torch.empty_like(x)
            _apply_backward[shape.apply_grid](x, grad_z, grad_x, mu, inv, inv_zeta, by_grad, by_yhat, less,
                weight, bias, c, d, *strides, **given, **ending, **tiles,
            )  # fmt: skip
            if grad_x.stride() != like.stride():
                grad_x = torch.empty_like(like).copy_(grad_x)
    return grad_x, grad_weight if needs[1] else None, grad_bias if needs[2] else None
