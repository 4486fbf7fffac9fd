"""The command `onlinenorm reproduce`: what it says, what it refuses, and that processes share the work."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onlinenorm.cli import app
from onlinenorm.experiments.experiment import Job
from onlinenorm.experiments.recipes import EXPERIMENTS
from onlinenorm.experiments.runs import read_record
from onlinenorm.experiments.summary import summarize

ASKED = [
    "two-elements", "gradient-bias", "activation-growth", "weight-equilibrium", "cifar10", "cifar100", "imagenet",
    "unet", "mlp", "rnn", "lstm", "memory", "decay-sweep", "reproducibility", "batch-size", "fine-tune",
]  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)], catch_exceptions=False)


def test_every_experiment_is_listed_with_its_data_and_time() -> None:
    assert list(EXPERIMENTS) == ASKED
    result = run("--list")
    assert result.exit_code == 0
    for experiment in EXPERIMENTS.values():
        assert re.search(rf"\b{experiment.name}\b", result.output)
        assert experiment.data
        assert set(experiment.time) == set(experiment.runs) == {"paper", "cpu", "smoke"}


@pytest.mark.parametrize("name", ASKED)
def test_settings_name_directories_that_tell_runs_apart(name: str) -> None:
    experiment = EXPERIMENTS[name]
    for scale in ("paper", "cpu", "smoke"):
        labels = [Job(name, experiment, scale, experiment.settings(scale, norm)).label for norm in experiment.norms]
        assert len(set(labels)) == len(labels)
        assert not any(set(label) & set("/\\: ") for label in labels)


def test_the_table_compares_with_the_paper(tmp_path: Path) -> None:
    result = run("mlp", "--scale", "smoke", "--set", "epochs=1", "--norm", "online,none", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "OnlineNorm" in result.output
    records = [read_record(path.parent) for path in sorted(tmp_path.glob("mlp/smoke/*/run.json"))]
    assert [record.label for record in records] == ["none-epochs=1-seed0", "online-epochs=1-seed0"]
    assert "Paper" not in summarize(EXPERIMENTS["mlp"], records).columns, "made data stand beside the paper's numbers"

    whole = [
        dataclasses.replace(
            record,
            scale="cpu",
            settings={**record.settings, **dataclasses.asdict(EXPERIMENTS["mlp"].settings("paper", norm)), "seed": 3},
            rows=[{"epoch": 1, "accuracy": accuracy, "loss": 0.3}],
        )
        for record, norm, accuracy in zip(records, ("none", "online"), (80.0, 88.85), strict=True)
    ]
    summary = summarize(EXPERIMENTS["mlp"], whole)
    assert summary.columns[-2:] == ("Paper", "Verdict")
    assert summary.rows[0][-1] == "5.5 below the paper's range (worse)"
    assert summary.rows[1][-2:] == ("88.9 (86.2 to 89.9, 400 runs)", "inside the paper's range")
    assert "the paper's order" in summary.note.lower()
    reduced = summarize(
        EXPERIMENTS["mlp"], [dataclasses.replace(r, settings=r.settings | {"epochs": 2}) for r in whole]
    )
    assert "Verdict" not in reduced.columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], r"no experiment 'nothing'\. There are: two-elements, "),
        (["mlp", "--norm", "batch,norm"], r"--norm norm: Allowed: online, batch"),
        (["mlp", "--norm", "batch,batch"], r"--norm batch: given more than once"),
        (["mlp", "--scale", "huge"], r"--scale huge: Allowed: paper, cpu, smoke"),
        (["mlp", "--precision", "16"], r"--precision 16: Allowed: 32, bf16"),
        (["mlp", "--on", "cifar10"], r"--on cifar10: This experiment has no such choice"),
        (["batch-size", "--on", "rnn"], r"--on rnn: Allowed: mlp, cifar10"),
        (["mlp", "--set", "epochs"], r"--set epochs: NAME=VALUE is wanted"),
        (["mlp", "--set", "epoch=3"], r"no setting 'epoch' here\. There are: data, images, epochs"),
        (["mlp", "--device", "abacus"], r"--device abacus cannot be used"),
        (["mlp", "--scale", "cpu", "--data", "/nowhere"], r"/nowhere"),
    ],
)
def test_bad_options_are_named_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(*arguments, "--out", tmp_path / "runs")
    assert result.exit_code == 1, result.output
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.rglob("run.json"))


def start(tmp_path: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    command = [sys.executable, *launcher, "-m", "onlinenorm", "reproduce", *arguments, "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def heed_ctrl_c() -> None:  # a test run in the background of a shell would hand on that it is ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_ctrl_c)


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, "mlp", "--scale", "smoke", "--norm", "online", "--set", "epochs=500")
    record = tmp_path / "mlp" / "smoke" / "online-epochs=500-seed0" / "run.json"
    began = time.monotonic()
    while not (record.exists() and json.loads(record.read_text())["rows"]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - began < 300, "no epoch was done"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 130, errors
    assert "The same command with --resume" in errors
    assert "Traceback" not in errors
    assert json.loads(record.read_text())["status"] == "running"


def test_two_processes_do_the_same_run(tmp_path: Path) -> None:
    """Without a normaliser across samples it makes no difference who computes which half of a batch."""
    arguments = ("mlp", "--scale", "smoke", "--norm", "layer", "--set", "epochs=2")
    alone = start(tmp_path / "alone", *arguments)
    _, errors = alone.communicate(timeout=300)
    assert alone.returncode == 0, errors
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    together = start(tmp_path / "together", *arguments, launcher=launcher)
    output, errors = together.communicate(timeout=400)
    assert together.returncode == 0, errors
    assert output.count("epoch 2 of 2") == 1, "each process reports"
    one, two = (
        read_record(tmp_path / which / "mlp" / "smoke" / "layer-epochs=2-seed0") for which in ("alone", "together")
    )
    assert two.machine["processes"] == 2
    for a, b in zip(one.rows, two.rows, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-3)
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=2)
