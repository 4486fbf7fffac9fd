"""The ImageNet experiment, whole, on a small folder of made JPEGs: with 1 and 2 processes, killed and gone on with."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from smoke import do

from onlinenorm.experiments.recipes import imagenet
from onlinenorm.experiments.runs import Run, read_record

VALIDATION = 81  # images, of which two processes have unequally many, and not equally many batches
TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(out, norms, *options, launcher=()):
    """The command, in processes of its own."""
    command = ["-m", "onlinenorm", "reproduce", "imagenet", "--scale", "smoke", "--device", "cpu", "--norm", norms]
    return subprocess.Popen(
        [sys.executable, *launcher, *command, "--out", str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def records(out):
    return [read_record(path.parent) for path in sorted(Path(out).glob("imagenet/smoke/*/run.json"))]


def weights(record):
    return torch.load(record.directory / "checkpoint.pt", weights_only=True)["model"]


def assert_same_run(found, expected):
    assert found.finished
    assert found.rows == expected.rows
    for (name, a), b in zip(weights(found).items(), weights(expected).values(), strict=True):
        assert torch.equal(a, b), f"{name} is another's"


def test_it_learns_from_jpegs(tmp_path):
    (record,) = do("imagenet", tmp_path, ["online"])
    assert record.rows[-1]["train_loss"] < 0.5 * record.rows[0]["train_loss"]
    assert max(row["accuracy"] for row in record.rows) > 50, "four classes are guessed right every fourth time"
    assert 0 < record.waiting < 1


def test_no_normaliser_diverges_at_its_rate(tmp_path):
    for record in do("imagenet", tmp_path, epochs="1"):
        assert "diverged" not in record.rows[-1], record.label


def test_a_killed_run_goes_on_bit_for_bit_with_other_loader_workers(tmp_path, monkeypatch):
    short = {"epochs": "3", "drop_after": "2"}
    (whole,) = do("imagenet", tmp_path / "whole", ["online"], **short)

    def end_in_the_third_epoch(run, **values):
        if len(run.rows) == 2:
            raise KeyboardInterrupt
        log(run, **values)

    log = Run.log
    monkeypatch.setattr(imagenet, "loader_workers", lambda: 1)
    with monkeypatch.context() as patched:
        patched.setattr(Run, "log", end_in_the_third_epoch)
        with pytest.raises(KeyboardInterrupt):
            do("imagenet", tmp_path / "killed", ["online"], **short)
    monkeypatch.setattr(imagenet, "loader_workers", lambda: 0)
    (resumed,) = do("imagenet", tmp_path / "killed", ["online"], resume=True, **short)
    assert_same_run(resumed, whole)


def test_two_processes_train_on_the_same_batches_and_validate_every_image_once(tmp_path):
    """GroupNorm sees one image at a time, so that only rounding depends on the number of processes."""
    small = ("--set", "epochs=1", "--set", "learning_rate=0.0001")
    together = start(tmp_path / "together", "group,batch", *small, launcher=TOGETHER)
    (alone,) = do("imagenet", tmp_path / "alone", ["group"], epochs="1", learning_rate="0.0001")
    output = finished(together)
    assert output.count("epoch 1 of 1") == 2, "not one process reports, but each"
    batch, group = records(tmp_path / "together")
    assert group.machine["processes"] == 2
    for key in ("train_loss", "loss"):
        assert group.rows[0][key] == pytest.approx(alone.rows[0][key], rel=3e-4)
    assert group.rows[0]["accuracy"] == pytest.approx(alone.rows[0]["accuracy"], abs=100 / VALIDATION + 1e-9)
    for record in (batch, group):
        right = record.rows[0]["accuracy"] / 100 * VALIDATION
        assert right == pytest.approx(round(right), abs=1e-6), "the shares of 81 images are not counted as they are"


def test_two_processes_go_on_bit_for_bit_from_what_a_kill_leaves(tmp_path):
    short = ("--set", "epochs=3", "--set", "drop_after=2")
    whole = start(tmp_path / "whole", "online", *short, launcher=TOGETHER)
    assert any("epoch 2 of 3" in line for line in whole.stdout)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed", ignore=shutil.ignore_patterns("*.part"))
    finished(whole)
    (left,) = records(tmp_path / "killed")
    assert not left.finished
    output = finished(start(tmp_path / "killed", "online", *short, "--resume", launcher=TOGETHER))
    assert "goes on after epoch" in output
    assert_same_run(*records(tmp_path / "killed"), *records(tmp_path / "whole"))
