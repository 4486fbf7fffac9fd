"""The U-Net experiment: that it learns, what it is judged by, and what its recipe says of OnlineNorm and batches."""

import math
from dataclasses import asdict
from functools import partial

import pytest
import torch
from rich.console import Console
from smoke import do
from torch import nn

from onlinenorm.experiments.display import TerminalDisplay
from onlinenorm.experiments.experiment import Job
from onlinenorm.experiments.recipes.unet import EXPERIMENT, draw, judge, settings
from onlinenorm.experiments.runs import Run, make_fabric
from onlinenorm.experiments.segmentation import jaccard, segmentation_loss
from onlinenorm.experiments.unet import UNet
from onlinenorm.torch import OnlineNorm2d


@pytest.mark.parametrize("norm", ["online", "batch"])
def test_it_learns_to_segment(tmp_path, norm):
    (record,) = do("unet", tmp_path, [norm])
    rows = record.rows
    losses = [row["train_loss"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.75 * losses[0]
    assert rows[-1]["loss"] < 0.5
    assert rows[-1]["jaccard"] > 0.15, "masks of nothing, or of everything, have less in common with the truth"


def test_the_paper_s_settings():
    paper = {norm: asdict(settings("paper", norm)) for norm in ("online", "batch", "none")}
    for norm, found in paper.items():
        expected = {
            "size": 192, "images": 2000, "held_out": 200, "width": 64, "epochs": 40, "batch_size": 25, "momentum": 0.9,
            "learning_rate": 0.6 if norm == "none" else 0.04, "weight_decay": 1e-6, "drop_after": (25,), "zoom": 1,
            "alpha_fwd": 63 / 64, "alpha_bwd": 1 / 2,
        }  # fmt: skip
        assert expected.items() <= found.items()
    small = asdict(settings("cpu", "online"))
    assert small["alpha_bwd"] == 1 / 2
    assert small["drop_after"][0] / small["epochs"] == 25 / 40


@pytest.mark.parametrize(("norm", "same"), [(partial(OnlineNorm2d, alpha_fwd=0.9, alpha_bwd=0.8), True),
                                            (nn.BatchNorm2d, False)])  # fmt: skip
def test_accumulating_gradients_of_single_images_is_a_batch_with_online_norm_alone(norm, same):
    s = settings("smoke", "online")
    data = draw(5, s, seed=0)
    images, masks = data.pixels.double() / 255, data.labels.double()

    def gradient(batches):
        torch.manual_seed(0)
        model = UNet(4, norm).double()
        for part in torch.arange(5).chunk(batches):
            (segmentation_loss(model(images[part]), masks[part]) / batches).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole, accumulated = gradient(1), gradient(5)
    off = ((whole - accumulated).norm() / whole.norm()).item()
    assert (off < 1e-9) == same, off


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_the_judgement_is_the_mean_over_images_however_they_are_batched(tmp_path, batch_size):
    s = settings("smoke", "batch")
    run = Run(
        Job("unet", EXPERIMENT, "smoke", s),
        tmp_path,
        make_fabric("cpu", "32"),
        None,
        TerminalDisplay(Console(quiet=True)),
    )
    torch.manual_seed(0)
    network = UNet(4, nn.BatchNorm2d)
    model, _ = run.setup(network, torch.optim.SGD(network.parameters()))
    data = draw(7, s, seed=1)
    found = judge(run, model, data.batches(batch_size))
    with torch.no_grad():
        logits = network.eval()(data.pixels.float() / 255)
    assert found["jaccard"] == pytest.approx(jaccard(logits > 0, data.labels).double().mean().item())
    assert found["loss"] == pytest.approx(segmentation_loss(logits, data.labels.float()).item(), rel=1e-5)


def test_a_network_that_diverges_ends_its_run(tmp_path):
    (record,) = do("unet", tmp_path, ["none"], learning_rate="1e9")
    rows = record.rows
    assert len(rows) == 1
    assert rows[0]["diverged"]
    assert rows[0]["train_loss"] is None or not math.isfinite(rows[0]["train_loss"])
