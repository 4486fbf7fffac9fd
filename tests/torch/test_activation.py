"""The activation inside the layer: what the layer followed by PyTorch's own would give, in less memory."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import GUARDS, STATE, assert_close, channels_last, step
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onlinenorm.experiments.memory import count_saved
from onlinenorm.torch import OnlineNormAct, OnlineNormAct1d, OnlineNormAct2d, OnlineNormAct3d, functional
from onlinenorm.torch.settings import ACTS

FUNCTIONS = {"relu": F.relu, "leaky_relu": F.leaky_relu, "silu": F.silu, "gelu": F.gelu}
# (9, 20): one scalar a feature; (4, 130, 19, 19): more channels than a strip, more rows than a chunk; several blocks
SHAPES = [(9, 20), (70, 300), (6, 3, 70, 70), (4, 130, 19, 19), (40, 64, 8, 8), (2, 5, 3)]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 3e-2}


def pair(shape, guard, act, dtype=torch.float32, **settings):
    """A layer with its activation, and the same one without."""
    settings = {"alpha_fwd": 0.9, "alpha_bwd": 0.8, "clamp_value": 1.5, "guard": guard, **settings}
    fused = OnlineNormAct(shape[1], act=act, dtype=dtype, **settings)
    torch.manual_seed(0)
    nn.init.uniform_(fused.weight, 0.5, 1.5)
    nn.init.normal_(fused.bias)
    plain = copy.deepcopy(fused)
    plain._act = None
    return fused, plain


@given(
    shape=st.sampled_from(SHAPES),
    guard=st.sampled_from(GUARDS),
    act=st.sampled_from(ACTS[1:]),
    dtype=st.sampled_from(list(TOLERANCE)),
    last=st.booleans(),
    backend=st.sampled_from(["native", "portable"]),
)
def test_it_is_the_layer_followed_by_the_activation(shape, guard, act, dtype, last, backend):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    fused, plain = pair(shape, guard, act, wide)
    with functional.backend(backend):
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            x = (torch.randn(shape, generator=generator) * 2 + 1).to(dtype)
            grad = torch.randn(shape, generator=generator).to(dtype)
            if last and len(shape) > 2:
                x, grad = channels_last(x), channels_last(grad)
            open_ended = copy.deepcopy(plain)  # no gradient where rounding decides on the side of the bend or the bound
            open_ended.guard = None if guard == "clamp" else guard
            r = open_ended(x.to(wide)).detach()
            near = r.abs() < 1e-5
            if guard == "clamp":
                near |= (r.abs() - 1.5).abs() < 1e-4
            grad = torch.where(near, 0, grad)
            z, grad_x = step(fused, x, grad)
            # the plain layer in a wide type, so that what is compared is rounded once
            wide_x = x.to(wide).requires_grad_()
            expected = FUNCTIONS[act](plain(wide_x))
            expected.backward(grad.to(wide))
            assert z.dtype == dtype
            assert z.stride() == x.stride()
            assert_close("z", z, expected.detach().double().numpy(), TOLERANCE[dtype])
            assert_close("grad_x", grad_x, wide_x.grad.double().numpy(), TOLERANCE[dtype])
        for name in STATE:
            assert_close(name, getattr(fused, name), getattr(plain, name).numpy(), TOLERANCE[wide])
        for name in ("weight", "bias"):
            expected = getattr(plain, name).grad.double().numpy()
            assert_close(f"{name}.grad", getattr(fused, name).grad, expected, 1e-4)
        fused.eval(), plain.eval()
        assert_close("eval", fused(x), FUNCTIONS[act](plain(x.to(wide))).detach().double().numpy(), TOLERANCE[dtype])


@pytest.mark.parametrize("act", ACTS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_function_and_its_slope_everywhere(act, dtype):
    """Over the whole range of inputs, huge ones included, through a layer that lets its input pass."""
    r = torch.cat(
        [torch.linspace(-12, 12, 4801), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 90, -90, 1e4, -1e4, 1e30, -1e30])]
    )
    r = r.to(dtype)[None, None]
    layer = OnlineNormAct1d(1, eps=0.0, guard=None, act=act, affine=False).eval()
    ours, theirs = r.clone().requires_grad_(), r.clone().requires_grad_()
    z, expected = layer(ours), FUNCTIONS[act](theirs)
    z.sum().backward()
    expected.sum().backward()
    tolerance = 1e-13 if dtype == torch.float64 else 4e-7
    scale = 1 + r.abs()
    assert ((z - expected).abs() / scale).max() < tolerance
    kink = r == 0 if "relu" in act else torch.zeros_like(r, dtype=torch.bool)
    assert (ours.grad - theirs.grad)[~kink].abs().max() < 10 * tolerance


@pytest.mark.parametrize("act", ACTS[1:])
def test_not_a_number_stays(act):
    layer = OnlineNormAct1d(2, guard=None, act=act).eval()
    z = layer(torch.tensor([[float("nan"), 1.0]]))
    assert z[0, 0].isnan()
    assert z[0, 1].isfinite()


@pytest.mark.parametrize("act", ACTS[1:])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_splits_and_threads(shape, guard, act):
    x, grad = torch.randn(shape), torch.randn(shape)
    threads = torch.get_num_threads()
    results = []
    try:
        for count, size in ((1, shape[0]), (2, shape[0]), (3, 1), (1, 2)):
            torch.set_num_threads(count)
            fused, _ = pair(shape, guard, act)
            parts = [step(fused, *part) for part in zip(x.split(size), grad.split(size), strict=True)]
            z, grad_x = (torch.cat(part) for part in zip(*parts, strict=True))
            results.append((z, grad_x, *(getattr(fused, name) for name in STATE)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for name, a, b in zip(("z", "grad_x", *STATE), results[0], other, strict=True):
            assert torch.equal(a, b), f"{name} depends on threads or on the split"


@pytest.mark.parametrize("act", ACTS[1:])
def test_it_keeps_no_more_than_the_layer_alone(act):
    shape = (2, 16, 32, 32)
    fused, plain = pair(shape, "layer_scaling", act)
    assert count_saved(fused, torch.randn(shape)) == count_saved(plain, torch.randn(shape))


def test_the_gradient_in_eval_is_the_derivative():
    for act in ACTS[1:]:
        for guard in GUARDS:
            layer, _ = pair((4, 3, 5), guard, act, torch.float64)
            layer.eval()
            x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(layer, (x,)), f"{act} after {guard}"


def test_each_kind_checks_its_dimensions_and_shows_its_activation():
    for kind, shape in (
        (OnlineNormAct1d, (2, 4, 5)),
        (OnlineNormAct2d, (2, 4, 5, 6)),
        (OnlineNormAct3d, (2, 4, 5, 6, 3)),
    ):
        layer = kind(4)
        assert layer.act == "relu"
        assert repr(layer).endswith("act='relu')")
        assert (layer(torch.randn(shape)) >= 0).all()
        with pytest.raises(ValueError, match="input"):
            layer(torch.randn(2, 4, 5, 6, 3, 2))
    with pytest.raises(ValueError, match="act must be one of None, 'relu', 'leaky_relu', 'silu', 'gelu', got 'swish'"):
        OnlineNormAct2d(4, act="swish")


def test_compiled_and_folded():
    torch.manual_seed(0)
    for act in ACTS[1:]:
        for guard in GUARDS:
            net = nn.Sequential(nn.Conv2d(3, 8, 3), OnlineNormAct2d(8, guard=guard, act=act)).eval()
            x = torch.randn(2, 3, 9, 9)
            assert_close("compiled", torch.compile(net, backend="aot_eager")(x), net(x).detach().numpy(), 1e-6)
    from onlinenorm.torch import fold

    folded = fold(net, report=None)
    assert "act='gelu'" in repr(folded)
    assert_close("folded", folded(x), net(x).detach().numpy(), 1e-5)
