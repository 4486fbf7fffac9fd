"""The demo, end to end on tiny images, and its parts."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from pages import Page
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from onlinenorm.cli import app
from onlinenorm.experiments.demo import (
    SETTINGS,
    CtrlC,
    Recipe,
    activation_bytes,
    make_data,
    start_run,
    summarize,
    train,
    write,
)
from onlinenorm.experiments.shapes import CLASSES, make_shapes
from onlinenorm.experiments.unet import UNet
from onlinenorm.torch import OnlineNorm2d

TINY = ("--images", "8", "--size", "32", "--threads", "1")
RECIPE = Recipe(tuple(SETTINGS), epochs=1, batch_size=2, size=32, train_images=4, seed=0, threads=1)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_demo(*options: str):
    return CliRunner().invoke(app, ["demo", *options])


# The command


def test_end_to_end(tmp_path):
    ran = run_demo("--epochs", "2", "--seed", "3", "--out", str(tmp_path / "new" / "demo"), *TINY)
    assert ran.exit_code == 0, ran.output
    out = tmp_path / "new" / "demo"
    assert sorted(p.name for p in out.iterdir()) == ["index.html", "result.json"]

    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["config"]["seed"] == 3
    assert {"onlinenorm", "torch", "python"} <= set(result["versions"])
    assert [run["name"] for run in result["normalizers"]] == list(SETTINGS)
    for run in result["normalizers"]:
        assert run["status"] == "finished"
        assert [h["step"] for h in run["history"]] == [4, 8]
        assert run["steps"] == 8
        assert 0 <= run["jaccard"] <= 1
        assert run["jaccard"] == run["history"][-1]["jaccard"]
        assert run["ms_per_step"] > 0
        assert run["activation_bytes"] > 2**16

    html = Page(out / "index.html")
    assert html.tags.count("svg") == 2
    assert html.tags.count("img") == 3 * (2 + len(SETTINGS))
    assert all(address.startswith("data:") for address in html.addresses)
    for run in result["normalizers"]:
        assert run["label"] in ran.output
        assert f"{run['label']} {run['jaccard']:.3f}" in html.text
        assert f"{run['activation_bytes'] / 2**20:.1f} MiB" in html.text


def test_same_seed_same_numbers_whatever_runs_beside(tmp_path):
    both = run_demo("--epochs", "1", "--norm", "online,batch", "--out", str(tmp_path / "a"), *TINY)
    one = run_demo("--epochs", "1", "--norm", "batch", "--out", str(tmp_path / "b"), *TINY)
    assert both.exit_code == one.exit_code == 0
    a, b = (json.loads((tmp_path / name / "result.json").read_text())["normalizers"] for name in "ab")
    assert [run["name"] for run in a] == ["online", "batch"]
    assert a[1]["history"] == b[0]["history"]


def test_earlier_results_are_replaced_and_strangers_kept(tmp_path):
    for name in ("result.json", "index.html", "mine.txt"):
        (tmp_path / name).write_text("old")
    assert run_demo("--epochs", "1", "--norm", "batch", "--out", str(tmp_path), *TINY).exit_code == 0
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "finished"
    assert (tmp_path / "mine.txt").read_text() == "old"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--norm", "layer"), ("--norm", "'layer'", "batch, group, online")),
        (("--norm", "batch,batch"), ("--norm", "more than once")),
        (("--norm", ""), ("--norm", "''", "batch, group, online")),
        (("--epochs", "0"), ("--epochs", "0 is too small", "at least 1")),
        (("--batch-size", "-1"), ("--batch-size", "-1 is too small", "at least 1")),
        (("--images", "0"), ("--images", "0 is too small", "at least 1")),
        (("--batch-size", "9", "--images", "8"), ("--batch-size", "9 is more", "at most 8")),
        (("--size", "100"), ("--size", "100", "multiple of 8", "32 to 256")),
        (("--size", "24"), ("--size", "24", "32 to 256")),
        (("--threads", "0"), ("--threads", "0 is too small", "at least 1")),
        (("--seed", "-1"), ("--seed", "-1 is too small", "at least 0")),
    ],
)
def test_wrong_option(tmp_path, options, said):
    ran = run_demo(*options, "--out", str(tmp_path / "demo"))
    assert ran.exit_code == 2
    message = " ".join(ran.output.replace("│", " ").split())
    for words in said:
        assert words in message
    assert not (tmp_path / "demo").exists()


def test_out_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("mine")
    for out in (tmp_path / "taken", tmp_path / "taken" / "demo"):
        ran = run_demo("--out", str(out))
        assert ran.exit_code == 2
        assert "--out" in ran.output
        assert "directory" in ran.output
    assert (tmp_path / "taken").read_text() == "mine"


def test_help_names_every_option():
    shown = run_demo("--help").output
    for option in ("--out", "--norm", "--epochs", "--batch-size", "--images", "--size", "--seed", "--threads"):
        assert option in shown


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_keeps_what_is_done(tmp_path):
    command = [sys.executable, "-m", "onlinenorm", "demo", "--epochs", "100000", "--out", str(tmp_path), *TINY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert any(line.startswith("epoch 1 of") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1, errors
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "stopped"
    assert all(run["epochs"] == len(run["history"]) >= 1 for run in result["normalizers"])
    assert "Stopped before all epochs" in Page(tmp_path / "index.html").text


# Its parts


def test_stopped_before_the_first_epoch(tmp_path):
    data, stop = make_data(RECIPE), CtrlC()
    runs = [start_run(name, RECIPE, data) for name in RECIPE.normalizers]
    stop(signal.SIGINT, None)
    train(RECIPE, data, runs, stop, Console(quiet=True))
    result = summarize(RECIPE, runs)
    write(tmp_path, result, data, runs)
    assert result["status"] == "stopped"
    assert "No epoch was finished" in Page(tmp_path / "index.html").text
    assert json.loads((tmp_path / "result.json").read_text())["normalizers"][0]["jaccard"] is None


def test_not_a_number_is_reported(tmp_path):
    recipe = replace(RECIPE, epochs=2)
    data = make_data(recipe)
    runs = [start_run("batch", recipe, data)]
    runs[0].model.head.weight.data.fill_(torch.nan)
    train(recipe, data, runs, CtrlC(), Console(quiet=True))
    write(tmp_path, summarize(recipe, runs), data, runs)
    run = json.loads((tmp_path / "result.json").read_text())["normalizers"][0]
    assert run["loss"] is None
    assert run["jaccard"] == 0
    Page(tmp_path / "index.html")


def test_same_initial_weights():
    data = make_data(RECIPE)
    first, *others = (start_run(name, RECIPE, data).model for name in SETTINGS)
    for other in others:
        for a, b in zip(first.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_activation_bytes_grow_with_the_batch_and_leave_the_model_alone():
    images, masks = make_shapes(4, 32, seed=0)
    model = UNet(8, nn.BatchNorm2d)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    two, four = (activation_bytes(model, images[:n], masks[:n]) for n in (2, 4))
    assert four == pytest.approx(2 * two, rel=0.01)
    assert two > 2 * 8 * 32 * 32 * 4 * 4  # at full resolution alone: four convolutions' outputs
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_shapes():
    images, masks = make_shapes(50, 64, seed=0, zoom=2)
    assert images.shape == (50, 1, 64, 64)
    assert masks.shape == (50, len(CLASSES), 64, 64)
    assert set(images.unique().tolist()) == {0, 1}
    assert masks.any(dim=(2, 3)).all()

    mesh = CLASSES.index("mesh square")
    solid = masks[:, [i for i in range(len(CLASSES)) if i != mesh]].any(dim=1)
    seen = images[:, 0] > 0
    assert (seen | ~solid).all()
    assert (~seen | solid | masks[:, mesh]).all()
    alone = masks[:, mesh] & ~solid
    assert 0.2 < (seen & alone).sum() / alone.sum() < 0.3  # every second pixel of every second row

    hole = masks[:, CLASSES.index("ring")].sum() / masks[:, CLASSES.index("filled circle")].sum()
    assert hole == pytest.approx((1 - 0.7**2) * (0.7 / 0.5) ** 2, rel=0.15)


def test_shapes_depend_on_the_seed_alone():
    first, again, other = (make_shapes(3, 32, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_zoom_makes_shapes_larger():
    small, large = (make_shapes(50, 96, seed=0, zoom=zoom)[1].float().mean(dim=(0, 2, 3)) for zoom in (1, 2))
    assert (large > 1.8 * small).all()


def test_unet_keeps_the_size():
    assert UNet(8, OnlineNorm2d)(torch.zeros(2, 1, 40, 64)).shape == (2, len(CLASSES), 40, 64)
