"""The experiments that look at networks without training them to the end: what they find is what the paper says."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Experiment, Request
from onlinenorm.experiments.recipes import (
    activation_growth,
    gradient_bias,
    memory,
    two_elements,
    weight_equilibrium,
)
from onlinenorm.experiments.reproduce import run_all
from onlinenorm.experiments.runs import Record
from onlinenorm.torch import OnlineNorm

RECIPES = (two_elements, gradient_bias, activation_growth, weight_equilibrium, memory)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def do(
    experiment: Experiment, out: Path, norms: tuple[str, ...] = (), precision: str = "32", **changes: str
) -> list[Record]:
    request = Request("smoke", norms or experiment.norms, (0,), precision, experiment, changes)
    return run_all(experiment, request, out, "cpu", None, False, Console(quiet=True))


@pytest.mark.parametrize("recipe", [two_elements, gradient_bias, activation_growth, memory])
def test_only_float32_means_anything(recipe, tmp_path):
    with pytest.raises(ExperimentError, match="float32 only: leave out --precision bf16"):
        do(recipe.EXPERIMENT, tmp_path, precision="bf16")
    assert not list(tmp_path.rglob("run.json"))


# two-elements


def test_two_elements(tmp_path):
    batch, online = do(two_elements.EXPERIMENT, tmp_path)
    for row in batch.rows:
        for x2, y1, slope in zip(row["x2"], row["y1"], row["slope"], strict=True):
            x1 = row["x1"]
            if x1 != x2:
                assert y1 == pytest.approx(1 if x1 > x2 else -1, abs=1e-3), "a pair becomes (-1, +1) or (+1, -1)"
                assert slope < 1e-3, f"the gradient of ({x1}, {x2}) should vanish"
    for row in online.rows:
        assert row["y1"] == pytest.approx([row["x1"]] * len(row["y1"]), rel=1e-4)
        assert min(row["slope"]) > 0.9
    (_, found, flat), (_, _, none) = two_elements.EXPERIMENT.summary([batch, online]).rows
    assert found == "-1.00 to 1.00"
    assert float(flat.split()[0]) > 85
    assert none == "0 %"


# gradient-bias


def small(seed: int = 0, count: int = 24, channels: int = 4) -> tuple[gradient_bias.Network, gradient_bias.Images]:
    torch.manual_seed(seed)
    images = torch.randn(count, 3, 4, 4) * torch.rand(count, 1, 1, 1) + torch.randn(count, 1, 1, 1)
    return gradient_bias.Network(channels, (3, 4, 4)), (images, torch.randint(10, (count,)))


def test_true_gradient_is_that_of_one_batch_of_all_images(monkeypatch):
    network, (images, labels) = small()
    logits = network(images, lambda x: F.batch_norm(x, None, None, training=True))
    expected = torch.autograd.grad(F.cross_entropy(logits, labels), list(network.parameters()))
    monkeypatch.setattr(gradient_bias, "AT_ONCE", 7)  # not a divisor of 24
    for found, wanted in zip(gradient_bias.true_gradient(network, (images, labels)), expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


@given(st.integers(2, 9), st.integers(0, 10_000))
def test_batches_side_by_side_are_batches_one_by_one(size, seed):
    x = torch.randn(20, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    one_by_one = [F.batch_norm(part, None, None, training=True) for part in x.split(size)]
    assert torch.allclose(gradient_bias.in_batches(x, size), torch.cat(one_by_one), atol=1e-5)


def test_angle():
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert gradient_bias.angle([x], [3 * x]) == pytest.approx(0, abs=1e-6)
    assert gradient_bias.angle([x, y], [-x, -y]) == pytest.approx(180)
    assert gradient_bias.angle([x], [y]) == pytest.approx(45)
    assert gradient_bias.angle([0 * x], [y]) == pytest.approx(90)


def test_batchnorms_gradient_bias_falls_as_the_batch_grows(tmp_path):
    (batch,) = do(gradient_bias.EXPERIMENT, tmp_path, ("batch",), samples="2,8,32,128,500")
    angles = {row["samples"]: row["angle"] for row in batch.rows}
    assert angles[2] > 5
    for (size, angle), (larger, less) in pairwise(angles.items()):
        assert less < angle, f"the bias grew from {angle}° at {size} to {less}° at {larger}"
    assert angles[500] < 0.1, "one batch of all images has no bias"


def test_onlinenorms_bias_falls_as_its_horizons_grow():
    """On the same network and data; where its horizons are long beside a batch of two, it has much less bias."""
    network, data = small(count=3000)
    truth = gradient_bias.true_gradient(network, data)
    angles = {}
    for horizon in (2, 32, 512):
        decay = 1 - 1 / horizon
        layer = OnlineNorm(4, affine=False, guard=None, alpha_fwd=decay, alpha_bwd=decay)
        gradient_bias.gradient(network, data, layer)
        angles[horizon] = gradient_bias.angle(gradient_bias.gradient(network, data, layer)[:1], truth[:1])
    pairs = gradient_bias.gradient(network, data, lambda x: gradient_bias.in_batches(x, 2))
    assert angles[2] > angles[32] > angles[512]
    assert angles[512] < gradient_bias.angle(pairs[:1], truth[:1]) / 4


def test_at_batch_size_two_a_fully_connected_layers_gradient_vanishes():
    """In the median: the few pairs whose two numbers are nearly equal get huge ones, as eps smooths the step."""
    torch.manual_seed(0)
    inputs, answers = torch.randn(400, 5, requires_grad=True), torch.randn(400, 5)

    def gradient(batch_size: int) -> float:
        outputs = gradient_bias.in_batches(inputs[:, :, None, None], batch_size)
        (found,) = torch.autograd.grad((outputs.flatten(1) * answers).sum(), inputs)
        return found.abs().median().item()

    assert gradient(2) < 1e-3 * gradient(400)
    assert gradient(4) > 0.1 * gradient(400)


# activation-growth


def test_activations_explode_without_layer_scaling_and_do_not_with_it(tmp_path):
    (record,) = do(activation_growth.EXPERIMENT, tmp_path)
    assert [row["layer"] for row in record.rows] == list(range(1, 41))
    first, middle, last = record.rows[0], record.rows[19], record.rows[39]
    for name in ("noise 0.2", "variance × 0.9"):
        assert first[name] < 1.5
        assert last[name] > 10
        assert last[name] / middle[name] > 3, f"{name}: growth must go on"
    for row in record.rows:
        assert row["exact"] == pytest.approx(1, rel=1e-9)
        for name, size in row.items():
            if name.endswith("layer scaling"):
                assert size == pytest.approx(1, rel=1e-4), f"{name}, layer {row['layer']}"
    assert activation_growth.EXPERIMENT.summary([record]).rows[0] == ("exact", "1", "1")


def test_growth_that_is_infinite_is_recorded(tmp_path):
    (record,) = do(activation_growth.EXPERIMENT, tmp_path, noise="4", depth="100")
    assert record.rows[-1]["noise 4"] is None
    assert activation_growth.EXPERIMENT.summary([record]).rows[1][1:] == ("inf", "1")


# weight-equilibrium


@pytest.mark.parametrize("norm", ["online", "batch", "layer"])
def test_weights_settle_at_the_predicted_length(norm, tmp_path):
    (record,) = do(weight_equilibrium.EXPERIMENT, tmp_path, (norm,))
    begin = record.rows[0]
    assert begin["length_3"] > 3 * begin["length_0.3"], "the two must start apart for this to show anything"
    settled = weight_equilibrium.settled(record)
    assert [start for start, *_ in settled] == [0.3, 3.0]
    for start, length, predicted, by_mean in settled:
        assert length == pytest.approx(predicted, rel=0.1), f"from {start} times"
        assert length == pytest.approx(by_mean, rel=0.1), f"from {start} times, the paper's formula"
    assert settled[0][1] == pytest.approx(settled[1][1], rel=0.1), "all starts must end at one length"


def test_without_decay_weights_only_grow(tmp_path):
    (record,) = do(weight_equilibrium.EXPERIMENT, tmp_path, ("batch",), weight_decay="1e-9", steps="500")
    lengths = [row["length_0.3"] for row in record.rows]
    assert lengths == sorted(lengths)


# memory


def test_activations_at_batch_size_1_are_a_thirty_second_of_those_at_32(tmp_path):
    """At the paper's sizes, all on the meta device."""
    online, batch = do(memory.EXPERIMENT, tmp_path, shrunk="1", real_below="0")
    assert {row["network"] for row in online.rows} == set(memory.SUBJECTS)
    kept = {(row["network"], row["batch_size"]): row["activations"] for row in (*online.rows, *batch.rows)}
    for name in memory.SUBJECTS:
        assert kept[name, 1] == pytest.approx(kept[name, 32] / 32, rel=0.01)
        assert kept[name, 128] == pytest.approx(4 * kept[name, 32], rel=0.01)
    table = {
        (name, batch): (paper, device)
        for name, batch, _, _, paper, _, device in memory.EXPERIMENT.summary([online, batch]).rows
    }
    assert table["U-Net, 1024² pixels", "OnlineNorm, 1"] == ("2", "meta")
    assert table["U-Net, 250³ voxels", "BatchNorm, 128"] == ("785", "meta")


def test_what_is_small_enough_runs_for_real(tmp_path):
    (record,) = do(memory.EXPERIMENT, tmp_path, ("online",), shrunk="16", real_below="0.15")
    devices = {row["network"]: row["device"] for row in record.rows}
    assert devices["U-Net, 1024² pixels"] == "cpu"
    assert devices["ResNet-50, PyTorch"] == "meta", "its weights alone, with gradients and momentum, take more"
    assert {cells[4] for cells in memory.EXPERIMENT.summary([record]).rows} == {""}, "not the sizes of the paper"


def test_memory_on_the_meta_device_is_that_of_the_cpu():
    s = memory.settings("smoke", "online")
    for name, batch_size in (("ResNet-50, PyTorch", 2), ("U-Net, 150³ voxels", 1)):
        counted = {d: memory.count_step(memory.SUBJECTS[name], s, batch_size, torch.device(d)) for d in ("cpu", "meta")}
        assert counted["cpu"] == counted["meta"], name


def test_sizes_are_padded_to_what_three_poolings_divide():
    assert memory.SUBJECTS["U-Net, 150³ voxels"].shape(1) == (1, 152, 152, 152)
    assert memory.SUBJECTS["U-Net, 250³ voxels"].shape(1) == (1, 256, 256, 256)
    assert memory.SUBJECTS["ResNet-50, PyTorch"].shape(1) == (3, 224, 224)


def test_a_step_holds_weights_gradients_and_momentum_beside_the_activations():
    s = memory.settings("smoke", "batch")
    subject = memory.SUBJECTS["ResNet-50, PyTorch"]
    activations, peak = memory.count_step(subject, s, 8, torch.device("meta"))
    parameters = 25_557_032 * 4
    assert peak > activations + 2 * parameters  # gradients come as activations go
    assert peak < activations + 4 * parameters
