"""What a run leaves on disk, and that it goes on bit for bit after a kill -9."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import TOY, do, request

from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Experiment, Job, changed
from onlinenorm.experiments.files import write_whole
from onlinenorm.experiments.runs import Record, read_record

HERE = Path(__file__).parent


def kill_at(out: Path, moment: str) -> None:
    """Do the toy's runs in a process of their own, which kill -9 ends at epoch.batch."""
    child = os.fork()
    if child == 0:
        os.environ["KILL_AT"] = moment
        do(out, request())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"was not killed: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def numbers(record: Record) -> object:
    """Whatever must not depend on how often a run was killed."""
    checkpoint = torch.load(record.directory / "checkpoint.pt", weights_only=True)
    return record.settings, record.rows, {k: v.tolist() for k, v in checkpoint["model"].items()}


def test_a_run_leaves_its_record(tmp_path: Path) -> None:
    online, none = do(tmp_path, request())
    assert online.directory == tmp_path / "toy" / "smoke" / "online-seed0"
    assert online.finished
    assert [row["epoch"] for row in online.rows] == [1, 2, 3, 4]
    assert set(online.rows[0]) == {"epoch", "train_loss", "error"}
    assert online.settings == {"norm": "online", "seed": 0, "precision": "32", "epochs": 4, "learning_rate": 0.1,
                               "widths": [8]}  # fmt: skip
    assert online.versions["torch"] == torch.__version__
    assert online.seconds > 0
    assert 0 <= online.waiting < 1
    assert {"cpu", "threads", "device", "processes"} <= set(online.machine)
    assert none.rows != online.rows
    content = json.loads((online.directory / "run.json").read_text())
    assert content["format"] == 1
    assert content["command"].startswith("onlinenorm")
    assert list(online.directory.glob("events.out.tfevents.*")), "no TensorBoard events"


def test_tensorboard_reads_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (record,) = do(tmp_path, request("online"))
    events = EventAccumulator(str(record.directory))
    events.Reload()
    assert [e.step for e in events.Scalars("error")] == [1, 2, 3, 4]
    assert [e.value for e in events.Scalars("error")] == pytest.approx([row["error"] for row in record.rows])


@pytest.mark.parametrize("moment", ["1.0", "1.5", "3.2", "4.5"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, moment: str) -> None:
    undisturbed = do(tmp_path / "undisturbed", request())
    kill_at(tmp_path / "killed", moment)
    left = read_record(tmp_path / "killed" / "toy" / "smoke" / "online-seed0")
    assert left.status == "running"
    assert len(left.rows) == int(moment[0]) - 1

    resumed = do(tmp_path / "killed", request(), resume=True)
    for found, expected in zip(resumed, undisturbed, strict=True):
        assert found.finished
        assert numbers(found) == numbers(expected), f"{expected.label} is not the run that was never killed"


def test_nothing_is_overwritten_without_resume(tmp_path: Path) -> None:
    before = do(tmp_path, request("none", seeds=(1,)))
    with pytest.raises(ExperimentError, match=r"none-seed1 was finished before\. --resume to use it"):
        do(tmp_path, request("none", seeds=(0, 1)))
    assert not (tmp_path / "toy" / "smoke" / "none-seed0").exists(), "a run began though another was in the way"
    again = do(tmp_path, request("none", seeds=(0, 1)), resume=True)
    assert again[1] == before[0], "a finished run was done again"
    assert again[0].finished


def test_changed_settings_have_a_directory_of_their_own(tmp_path: Path) -> None:
    usual = do(tmp_path, request("none"))
    other = do(tmp_path, request("none", epochs="2", widths="16,4"))
    assert other[0].label == "none-epochs=2-widths=16,4-seed0"
    assert len(other[0].rows) == 2
    assert usual[0].directory != other[0].directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "format 99.*reads format 1"),
        ({"versions": {"onlinenorm": "0.0.1"}}, "by onlinenorm 0.0.1; this is"),
        ({"settings": {"norm": "none", "seed": 0, "epochs": 9}}, "other settings.*epochs=9"),
        ({"rows": None, "surprise": 1}, "not a run's record"),
    ],
)
def test_a_foreign_directory_is_left_alone(tmp_path: Path, change: dict[str, object], message: str) -> None:
    (record,) = do(tmp_path, request("none"))
    path = record.directory / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = path.read_text()
    with pytest.raises(ExperimentError, match=message):
        do(tmp_path, request("none"), resume=True)
    assert path.read_text() == before


def test_a_broken_record_or_checkpoint_is_named(tmp_path: Path) -> None:
    (record,) = do(tmp_path, request("none"))
    path = record.directory / "run.json"
    text = path.read_text()
    path.write_text(text[:40])
    with pytest.raises(ExperimentError, match=r"run\.json is not a run's record"):
        do(tmp_path, request("none"), resume=True)
    path.write_text(text.replace('"finished"', '"running"'))
    (record.directory / "checkpoint.pt").write_bytes(b"PK\3\4 cut off")
    with pytest.raises(ExperimentError, match=r"checkpoint\.pt cannot be read"):
        do(tmp_path, request("none"), resume=True)


def test_two_processes_cannot_share_a_run(tmp_path: Path) -> None:
    script = f"""
import dataclasses, time, toy
def wait(run):
    print("in", flush=True)
    time.sleep(60)
toy.TOY = dataclasses.replace(toy.TOY, train=wait)
toy.do(toy.Path({str(tmp_path)!r}), toy.request("none"))
"""
    first = subprocess.Popen([sys.executable, "-c", script], cwd=HERE, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "in\n"
        with pytest.raises(ExperimentError, match="Another process is working in"):
            do(tmp_path, request("none"), resume=True)
    finally:
        first.kill()
        first.wait()
    (record,) = do(tmp_path, request("none"), resume=True)  # the system let go of the dead one's lock
    assert record.finished


def test_a_full_disk_is_named_and_the_last_checkpoint_kept(tmp_path: Path) -> None:
    (record,) = do(tmp_path, request("none", epochs="2"))
    checkpoint = record.directory / "checkpoint.pt"
    before = checkpoint.read_bytes()

    def small_disk() -> None:  # the nearest to a full disk that needs no privileges: no file may grow past this
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, len(before) // 2))

    code = (
        "from pathlib import Path; from onlinenorm.experiments.files import write_whole\n"
        f"write_whole(Path({str(checkpoint)!r}), b'x' * {len(before)})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=small_disk, capture_output=True, text=True, check=False
    )
    assert "Cannot write" in done.stderr
    assert "What was there is kept" in done.stderr
    assert checkpoint.read_bytes() == before
    assert not list(record.directory.glob("*.part"))


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "toy").write_text("a file")
    with pytest.raises(ExperimentError, match="Cannot write into"):
        do(tmp_path, request("none"))
    with pytest.raises(ExperimentError, match="Cannot write"):
        write_whole(tmp_path / "toy" / "file", "text")


def test_diverged_training_ends_early_and_says_so(tmp_path: Path) -> None:
    (record,) = do(tmp_path, request("none", learning_rate="1e30"))
    assert record.finished
    assert record.rows[-1]["diverged"] is True
    assert record.rows[-1]["train_loss"] is None, "JSON has no NaN"
    assert len(record.rows) < 4


def test_analyses_checkpoint_after_every_value(tmp_path: Path) -> None:
    seen = []

    def train(run: object) -> None:
        for size in run.each("batch_size", (2, 4, 8)):  # type: ignore[attr-defined]
            seen.append(size)
            if len(seen) == 2:
                raise KeyboardInterrupt
            run.log(angle=float(torch.rand(())))  # type: ignore[attr-defined]

    experiment: Experiment = dataclasses.replace(TOY, train=train, x="batch_size")
    asked = dataclasses.replace(request("none"), on=experiment)
    from rich.console import Console

    from onlinenorm.experiments import reproduce

    def go(out: Path, resume: bool) -> Record:
        return reproduce.run_all(experiment, asked, out, "cpu", None, resume, Console(quiet=True))[0]

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "a", False)
    interrupted = go(tmp_path / "a", True)
    assert seen == [2, 4, 4, 8]
    seen[:] = [0, 0]
    assert go(tmp_path / "b", False).rows == interrupted.rows
    assert [row["batch_size"] for row in interrupted.rows] == [2, 4, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": "3"}, "no setting 'epoch' here.*epochs, learning_rate"),
        ({"epochs": "many"}, "epochs='many'"),
        ({"learning_rate": "1/0"}, "learning_rate"),
    ],
)
def test_bad_changes_are_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        changed(TOY.settings("smoke", "none"), change)


def test_fractions_are_understood() -> None:
    assert changed(TOY.settings("smoke", "none"), {"learning_rate": "127/128"}).learning_rate == 127 / 128


def test_labels_tell_runs_apart() -> None:
    labels = {
        Job(name, TOY, "smoke", dataclasses.replace(TOY.settings("smoke", "online"), **change)).label
        for name in ("toy", "other")
        for change in ({}, {"seed": 1}, {"epochs": 2}, {"precision": "bf16"}, {"norm": "none"})
    }
    assert len(labels) == 10
    assert "toy-online-precision=bf16-seed0" in labels
