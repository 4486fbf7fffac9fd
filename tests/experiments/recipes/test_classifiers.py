"""`mlp` and `cifar10`: that they learn, that their settings are the paper's, and that the normaliser matters."""

from dataclasses import asdict

import pytest
from smoke import do

from onlinenorm.experiments.recipes import cifar, mlp


def test_an_mlp_learns_better_with_onlinenorm_than_with_none(tmp_path):
    online, none = do("mlp", tmp_path, ("online", "none"), epochs="4")
    best = {record.settings["norm"]: max(row["accuracy"] for row in record.rows) for record in (online, none)}
    assert best["online"] > 85, "it does not learn the made images"
    assert best["online"] > best["none"] + 15
    assert online.rows[-1]["train_loss"] < none.rows[-1]["train_loss"]


@pytest.mark.parametrize("norm", mlp.EXPERIMENT.allowed)
def test_every_normaliser_trains_the_mlp(tmp_path, norm):
    (record,) = do("mlp", tmp_path, (norm,), epochs="2", images="500", learning_rate="0.02")
    first, last = record.rows
    assert last["train_loss"] < first["train_loss"]


@pytest.mark.parametrize("norm", ["online", "batch"])
def test_resnet_learns(tmp_path, norm):
    (record,) = do("cifar10", tmp_path, (norm,), epochs="4", images="320", drop_after="3", learning_rate="0.05")
    losses = [row["train_loss"] for row in record.rows]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("norm", cifar.CIFAR100.allowed)
def test_every_normaliser_runs_in_a_resnet(tmp_path, norm):
    (record,) = do("cifar100", tmp_path, (norm,), epochs="1", images="64")
    assert record.rows[0]["train_loss"] is not None


def test_the_paper_s_settings():
    for name, decays in (("cifar10", (1023 / 1024, 127 / 128)), ("cifar100", (511 / 512, 15 / 16))):
        expected = {
            "epochs": 250, "batch_size": 128, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 2e-4,
            "drop_after": (100, 150, 200), "alpha_fwd": decays[0], "alpha_bwd": decays[1], "groups": 8,
        }  # fmt: skip
        assert expected.items() <= asdict(cifar.settings(name, "paper", "online")).items()
    expected = {
        "epochs": 10, "batch_size": 32, "learning_rate": 0.04, "momentum": 0, "weight_decay": 1e-4,
        "alpha_fwd": 0.999, "alpha_bwd": 0.99, "images": 60_000,
    }  # fmt: skip
    assert expected.items() <= asdict(mlp.settings("paper", "online")).items()
