"""The normalisers that the experiments compare."""

from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onlinenorm.experiments.batch_renorm import BatchRenorm
from onlinenorm.experiments.mlp import mlp
from onlinenorm.experiments.normalizers import NORMALIZERS, Bias, build
from onlinenorm.experiments.parts import Join
from onlinenorm.experiments.propagation import NormalisedJoin, NormalisedMaxPool, NormalisedReLU
from onlinenorm.experiments.resnet import resnet20, resnet50
from onlinenorm.experiments.unet import UNet
from onlinenorm.torch import OnlineNorm, convert

make = partial(build, alpha_fwd=0.9, alpha_bwd=0.8)
SHAPES = ((6, 8), (6, 8, 5), (6, 8, 5, 4), (6, 8, 5, 4, 3))


def layer(name: str, channels: int, **settings) -> nn.Module:
    """The normaliser alone, as `build` makes it."""
    return make(name, lambda norm: nn.Sequential(norm(channels)), **settings)[0]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 2


# Every normaliser


@pytest.mark.parametrize("name", NORMALIZERS)
def test_every_network_trains_with_every_normaliser(name):
    networks = {
        "mlp": (mlp, (4, 1, 28, 28)),
        "resnet20": (resnet20, (2, 3, 32, 32)),
        "unet": (partial(UNet, 4), (2, 1, 16, 16)),
        "3D unet": (lambda norm: UNet(4, norm, dims=3), (2, 1, 16, 16, 16)),
    }
    for kind, (network, shape) in networks.items():
        if not NORMALIZERS[name].can_run(shape[0], 1 if kind == "mlp" else 4):
            continue
        torch.manual_seed(0)
        model = make(name, network)
        (model(draw(*shape)) * torch.randn(())).square().mean().backward()
        for key, p in model.named_parameters():
            assert p.grad.isfinite().all(), f"{kind} with {name}: {key}"
            assert p.grad.any(), f"{kind} with {name}: nothing reaches {key}"


@pytest.mark.parametrize("shape", SHAPES)
def test_they_normalise_over_what_they_are_named_for(shape):
    over = {"batch": (0, *range(2, len(shape))), "layer": tuple(range(1, len(shape)))}
    if len(shape) > 2:
        over["instance"] = tuple(range(2, len(shape)))
    for name, dims in over.items():
        y = layer(name, 8)(draw(*shape))
        var, mean = torch.var_mean(y, dims, correction=0)
        assert mean.abs().max() < 1e-5, name
        assert (var - 1).abs().max() < 1e-3, name
    x = draw(*shape)
    groups = layer("group", 8, groups=2)(x)
    for half in groups.chunk(2, dim=1):
        assert half.flatten(1).mean(1).abs().max() < 1e-5
    assert isinstance(layer("online", 8), OnlineNorm)
    assert layer("online", 8).guard == "layer_scaling"


def test_layer_norm_of_vectors_is_pytorchs():
    x = draw(6, 8)
    assert torch.allclose(layer("layer", 8)(x), nn.LayerNorm(8)(x), atol=1e-6)


def test_groups_that_do_not_divide_the_channels():
    assert layer("group", 12, groups=8).num_groups == 4


def test_what_each_needs():
    cannot = {
        (batch, elements): {name for name, norm in NORMALIZERS.items() if not norm.can_run(batch, elements)}
        for batch in (1, 2)
        for elements in (1, 4)
    }
    assert cannot == {
        (1, 1): {"batch", "batch-renorm", "instance"},
        (2, 1): {"instance"},
        (1, 4): set(),
        (2, 4): set(),
    }
    for name in ("batch", "batch-renorm"):
        with pytest.raises(ValueError, match="more than"):
            layer(name, 8)(draw(1, 8))


def test_same_initial_weights_for_all_but_those_that_change_them():
    def weights(name: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [m.weight for m in make(name, resnet20).modules() if isinstance(m, nn.Conv2d | nn.Linear)]

    first = weights("online")
    for name in set(NORMALIZERS) - {"propagation"}:
        for a, b in zip(first, weights(name), strict=True):
            assert torch.allclose(a, b, atol=1e-6), name


def test_batchnorm_becomes_onlinenorm():
    model = convert(make("batch", mlp), report=None)
    assert sum(isinstance(m, OnlineNorm) for m in model.modules()) == 2


def test_none_is_a_network_with_biases():
    torch.manual_seed(0)
    model = make("none", mlp)
    nn.init.normal_(model[2].bias)
    plain = nn.Linear(784, 500)
    plain.weight, plain.bias = model[1].weight, model[2].bias
    x = draw(3, 784)
    assert isinstance(model[2], Bias)
    assert torch.allclose(model[:3](x), plain(x), atol=1e-5)


def test_weight_normalisation_makes_outputs_independent_of_the_weights_length():
    torch.manual_seed(0)
    model, x = make("weight", mlp), draw(3, 784)
    before = model(x)
    direction = model[1].parametrizations.weight.original1
    direction.data *= 7
    assert torch.allclose(model(x), before, atol=1e-5)
    assert not hasattr(model[-1], "parametrizations"), "the last layer's weights must be as they are"


# Batch renormalisation


def renorm_at(step: int, channels: int = 3) -> BatchRenorm:
    renorm = BatchRenorm(channels, warmup=10)
    renorm.num_batches_tracked.fill_(step)
    return renorm


def test_it_starts_as_batch_norm():
    renorm, batch = renorm_at(0), nn.BatchNorm1d(3)
    renorm.running_mean.fill_(5)
    renorm.running_std.fill_(4)
    x, z = draw(6, 3).requires_grad_(), draw(6, 3).requires_grad_()
    weights = torch.randn(6, 3)
    (renorm(x) * weights).sum().backward()
    (batch(z) * weights).sum().backward()
    assert torch.allclose(renorm(x), batch(z), atol=1e-5)
    assert torch.allclose(x.grad, z.grad, atol=1e-5)


def test_within_its_bounds_training_computes_what_evaluation_does():
    renorm, x = renorm_at(100), draw(6, 3)
    renorm.running_mean.fill_(1.5)
    renorm.running_std.fill_(2.5)
    expected = renorm.eval()(x)
    assert torch.allclose(renorm.train()(x), expected, atol=1e-5)
    assert not torch.allclose(renorm.eval()(x), expected, atol=1e-3), "the running statistics must have moved"


def test_beyond_its_bounds_r_and_d_are_clipped():
    renorm = renorm_at(100, channels=1)
    renorm.running_std.fill_(1e-3)
    x = draw(6, 1) + 100
    y = renorm(x)
    assert y.std(correction=0).item() == pytest.approx(3, rel=1e-3)
    assert y.mean().item() == pytest.approx(5, rel=1e-3)


def test_no_gradient_through_the_corrections():
    """With r and d constants the gradient is BatchNorm's times r."""
    renorm = renorm_at(100)
    renorm.running_std.fill_(2.0)
    x, z = draw(6, 3).requires_grad_(), draw(6, 3).requires_grad_()
    weights = torch.randn(6, 3)
    (renorm(x) * weights).sum().backward()
    (nn.BatchNorm1d(3)(z) * weights).sum().backward()
    r = (z.detach().var(0, correction=0) + 1e-5).sqrt() / 2
    assert torch.allclose(x.grad, z.grad * r, atol=1e-5)


@given(st.integers(0, 200))
@settings(deadline=None)
def test_the_bounds_follow_the_papers_schedule(step):
    r_max, d_max = (bound.item() for bound in renorm_at(step).bounds())
    assert r_max == pytest.approx(1 + 2 * min(max(step - 10, 0) / 70, 1))
    assert d_max == pytest.approx(5 * min(max(step - 10, 0) / 40, 1))


def test_it_finds_the_datas_statistics():
    renorm = BatchRenorm(2, momentum=0.05)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        renorm(torch.randn(64, 2, 3, generator=generator) * torch.tensor([[2.0], [0.5]]) + 7)
    assert torch.allclose(renorm.running_mean, torch.tensor([7.0, 7.0]), atol=0.2)
    assert torch.allclose(renorm.running_std, torch.tensor([2.0, 0.5]), rtol=0.05)


# Normalisation propagation


def outputs_of(model: nn.Module, kinds: tuple[type[nn.Module], ...], x: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(lambda _module, _given, output: seen.append(output.detach()))
    with torch.no_grad():
        model(x)
    return seen


def test_relu_of_a_gaussian_is_normalised():
    y = NormalisedReLU()(torch.randn(200_000, generator=torch.Generator().manual_seed(0)))
    assert y.mean().item() == pytest.approx(0, abs=0.01)
    assert y.std().item() == pytest.approx(1, abs=0.01)


def test_gaussian_inputs_stay_normalised_through_a_deep_network():
    def deep(norm):
        layers = [m for _ in range(10) for m in (nn.Linear(256, 256, bias=False), norm(256), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(256, 10))

    torch.manual_seed(0)
    outputs = outputs_of(make("propagation", deep), (NormalisedReLU,), torch.randn(2000, 256))
    assert len(outputs) == 10
    for depth, y in enumerate(outputs, 1):
        assert y.mean().item() == pytest.approx(0, abs=0.1), f"layer {depth}"
        assert y.var().item() == pytest.approx(1, abs=0.2), f"layer {depth}"
    plain = outputs_of(make("none", deep), (nn.ReLU,), torch.randn(2000, 256))
    assert plain[-1].var() < 0.01, "without it the activations vanish, or this test shows nothing"


def test_max_pooling_too():
    for pool in (nn.MaxPool2d(3, 2), nn.MaxPool2d((2, 1)), nn.MaxPool3d(2)):
        noise = torch.randn(50, 8, 33, 33, *[8] * isinstance(pool, nn.MaxPool3d))
        y = NormalisedMaxPool(pool)(NormalisedReLU()(noise))
        assert y.mean().item() == pytest.approx(0, abs=0.02), pool
        assert y.std().item() == pytest.approx(1, abs=0.02), pool


def test_resnet50_stays_normalised_throughout():
    torch.manual_seed(0)
    model, x = make("propagation", resnet50), torch.randn(2, 3, 96, 96)
    assert not any(isinstance(m, nn.ReLU | Join) for m in model.modules())
    blocks = [y for y in outputs_of(model, (NormalisedMaxPool, NormalisedJoin), x)]
    assert len(blocks) == 17
    for depth, y in enumerate(blocks):
        assert y.mean().item() == pytest.approx(0, abs=0.3), f"block {depth}"
        assert 0.5 < y.var().item() < 1.5, f"block {depth}"  # zero padding brings no variance


# How they are drawn


def linear_rgb(colour: str) -> np.ndarray:
    value = np.array(list(bytes.fromhex(colour[1:]))) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear sRGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt((to_xyz @ np.clip(rgb, 0, 1)) / np.array([0.9505, 1, 1.0888]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


SEEN_BY = {  # Machado, Oliveira and Fernandes (2009), full severity
    "all": np.eye(3),
    "deuteranopes": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "protanopes": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
}


def test_colours_differ_for_colour_blind_readers_too():
    for who, seen in SEEN_BY.items():
        for a, b in combinations(NORMALIZERS.values(), 2):
            apart = np.linalg.norm(lab(seen @ linear_rgb(a.colour)) - lab(seen @ linear_rgb(b.colour)))
            assert apart > 16, f"{a.label} and {b.label} look alike to {who}"


def test_colours_stand_out_on_black_and_on_white():
    for normalizer in NORMALIZERS.values():
        luminance = linear_rgb(normalizer.colour) @ np.array([0.2126, 0.7152, 0.0722])
        assert min(1.05 / (luminance + 0.05), (luminance + 0.05) / 0.05) > 2.2, normalizer.label


def test_names_are_keys():
    assert all(name == normalizer.name for name, normalizer in NORMALIZERS.items())
    assert len({normalizer.label for normalizer in NORMALIZERS.values()}) == len(NORMALIZERS)


def test_resnet50_with_every_normaliser_has_none_left_out():
    for name in NORMALIZERS:
        with torch.device("meta"):
            model = make(name, lambda norm: resnet50(norm, num_classes=10))
            assert model(torch.empty(2, 3, 64, 64)).shape == (2, 10), name
