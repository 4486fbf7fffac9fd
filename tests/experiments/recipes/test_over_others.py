"""The experiments over others: batch sizes, decay factors, seeds, and a network that goes on from another's weights."""

import dataclasses

import pytest
import torch
from smoke import do

from onlinenorm.experiments.experiment import Request
from onlinenorm.experiments.normalizers import build
from onlinenorm.experiments.recipes import batch_size, find, fine_tune, reproducibility
from onlinenorm.experiments.resnet import resnet20
from onlinenorm.experiments.runs import read_record
from onlinenorm.experiments.summary import summarize
from onlinenorm.hyperparameters import horizon_of, scale_hyperparameters
from onlinenorm.torch import OnlineNorm


def test_batch_size_trains_at_the_best_of_the_rates_it_tried(tmp_path):
    records = do("batch-size", tmp_path, ("online", "batch"), images="200", epochs="2")
    full = batch_size.full_runs(records)
    of = {(r.settings["norm"], r.settings["batch_size"]): r for r in full}
    assert set(of) == {("online", 1), ("online", 32), ("batch", 32)}, "BatchNorm has no statistics of one scalar"
    for (norm, size), record in of.items():
        tried = [r for r in records if r not in full and (r.settings["norm"], r.settings["batch_size"]) == (norm, size)]
        by_text = scale_hyperparameters(32, size, 0.04).learning_rate
        accuracy = {r.settings["learning_rate"] / by_text: max(row["accuracy"] for row in r.rows) for r in tried}
        assert sorted(accuracy) == pytest.approx([1, 4, 16])
        assert accuracy[record.settings["learning_rate"] / by_text] == max(accuracy.values())
    summary = summarize(find("batch-size"), records)
    assert [row[0] for row in summary.rows] == ["1", "32"]
    assert summary.rows[0][2] == "cannot run"


def test_the_decay_map_has_every_pair_of_horizons(tmp_path):
    records = do("decay-sweep", tmp_path, on="mlp", images="300", epochs="1")
    horizons = {tuple(round(horizon_of(r.settings[k])) for k in ("alpha_fwd", "alpha_bwd")) for r in records}
    assert horizons == {(a, b) for a in (2, 8192) for b in (2, 8192)}
    summary = summarize(find("decay-sweep"), records)
    assert summary.columns[1:] == ("2", "8192")
    assert [row[0] for row in summary.rows] == ["2", "8192"]
    best = max(max(row["accuracy"] for row in r.rows) for r in records)
    assert summary.note.startswith(f"Best: {best:.2f} at horizons")


def test_the_paper_s_map_has_twelve_horizons_each_way():
    request = Request("paper", ("online",), (0,), "32", find("cifar10"), {})
    jobs = list(find("decay-sweep").jobs(request))
    for decay in ("alpha_fwd", "alpha_bwd"):
        assert {round(horizon_of(getattr(job.settings, decay))) for job in jobs} == {2**k for k in range(1, 13)}
    assert len(jobs) == 12 * 12


def test_seeds_are_runs_of_the_experiments_themselves(tmp_path):
    earlier = do("mlp", tmp_path, ("online",), images="300", epochs="1")
    records = do("reproducibility", tmp_path, ("online", "none"), (0, 1, 2), resume=True, images="300", epochs="1")
    assert earlier[0] in records
    assert {(r.experiment, r.settings["norm"], r.settings["seed"]) for r in records} == {
        ("mlp", norm, seed) for norm in ("online", "none") for seed in (0, 1, 2)
    }
    assert len({str(r.rows) for r in records}) == 6, "two seeds gave the same run"
    rows = summarize(find("reproducibility"), records).rows
    for row, norm in zip(rows, ("online", "none"), strict=True):
        values = sorted(r.rows[0]["accuracy"] for r in records if r.settings["norm"] == norm)
        assert row[3] == f"{values[0]:.2f}"
        assert row[5] == f"{values[1]:.2f}"
        assert row[7] == f"{values[2]:.2f}"


def test_quartiles():
    assert reproducibility.quartiles([3.0]) == (3, 3, 3, 3, 3)
    assert reproducibility.quartiles([1, 2, 3, 4, 5]) == (1, 2, 3, 4, 5)


def test_fine_tuning_goes_on_from_the_trained_network(tmp_path):
    records = do("fine-tune", tmp_path, images="64")
    first, *tuned = records
    assert [r.settings["norm"] for r in tuned] == ["online", "batch", "frozen", "group"]
    assert all(r.settings["start"] == first.label and r.settings["batch_size"] == 2 for r in tuned)
    weights = torch.load(first.directory / "checkpoint.pt", weights_only=True)["model"]
    ended = {r.settings["norm"]: torch.load(r.directory / "checkpoint.pt", weights_only=True)["model"] for r in tuned}
    statistics = [name for name in weights if name.endswith("running_mean")]
    assert all(torch.equal(ended["frozen"][name], weights[name]) for name in statistics), "frozen statistics moved"
    assert not any(torch.equal(ended["batch"][name], weights[name]) for name in statistics)
    assert any(name.endswith("control_y") for name in ended["online"])
    assert not any(name.endswith("running_mean") for name in ended["group"])
    assert all((ended[norm]["0.weight"] - weights["0.weight"]).abs().max() > 0 for norm in ended), "nothing was learnt"
    assert read_record(first.directory).base == "cifar10"
    assert len(summarize(find("fine-tune"), records).rows) == 5


def test_what_becomes_of_batchnorm():
    s = fine_tune.settings("paper", "online")
    torch.manual_seed(0)
    original = build("batch", resnet20, alpha_fwd=0.9, alpha_bwd=0.9)
    x = torch.randn(4, 3, 32, 32)
    original(x)  # moves the statistics
    state = {name: value.clone() for name, value in original.state_dict().items()}
    expected = original.eval()(x)

    def adapted(norm):
        model = build("batch", resnet20, alpha_fwd=0.9, alpha_bwd=0.9)
        model.load_state_dict(state)
        return fine_tune.adapt(model, dataclasses.replace(s, norm=norm))

    assert torch.equal(adapted("batch").eval()(x), expected)
    assert torch.equal(adapted("frozen").train()(x), expected), "frozen must use the running statistics in training"
    online = adapted("online")
    layers = [m for m in online.modules() if isinstance(m, OnlineNorm)]
    assert len(layers) == 19
    assert layers[0].alpha_fwd == s.alpha_fwd
    assert torch.equal(layers[0].running_mean.float(), state["1.running_mean"])
    groups = [m for m in adapted("group").modules() if isinstance(m, torch.nn.GroupNorm)]
    assert len(groups) == 19
