"""Killed at any moment and resumed, a training run ends bit for bit as if it had never been killed."""

import copy
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "torch" / "resume.py"

# Runs the script, and kills it at one moment of its third save.
KILLED_WHILE_SAVING = """
import io, os, runpy, signal, sys, torch

moment, *sys.argv = sys.argv[1:]
write, saves = torch.save, 0

def reached(now):
    if saves == 3 and now == moment:
        os.kill(os.getpid(), signal.SIGKILL)

def save(checkpoint, file):
    global saves
    saves += 1
    whole = io.BytesIO()
    write(checkpoint, whole)
    half = len(whole.getvalue()) // 2
    file.write(whole.getvalue()[:half])
    file.flush()
    reached("half written")
    file.write(whole.getvalue()[half:])

def killed_around(call):
    def hook(*arguments):
        reached("before " + call.__name__)
        call(*arguments)
        reached("after " + call.__name__)
    return hook

torch.save, os.fsync, os.replace = save, killed_around(os.fsync), killed_around(os.replace)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(folder, *before):
    return subprocess.Popen(
        [sys.executable, *before, str(SCRIPT), "run.pt"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def final_digest(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output.split("digest ")[1].strip()


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    return final_digest(start(tmp_path_factory.mktemp("never_killed")))


def test_killed_at_random_moments(never_killed, tmp_path):
    moments, killed = [], 0
    for _ in range(4):
        process = start(tmp_path)
        first = process.stdout.readline()
        assert "goes on after step" in first, first + process.stdout.read()
        moments.append(random.uniform(0, 0.4))
        time.sleep(moments[-1])
        process.kill()
        process.communicate(timeout=60)
        killed += process.returncode == -signal.SIGKILL
    assert killed > 0, f"the run was over before it was killed {moments} s after its start"
    assert final_digest(start(tmp_path)) == never_killed, f"killed {moments} s after its start"


def test_killed_while_a_checkpoint_is_written(never_killed, tmp_path):
    for moment in ("half written", "before fsync", "after fsync", "before replace", "after replace"):
        process = start(tmp_path, "-c", KILLED_WHILE_SAVING, moment)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, output
    assert final_digest(start(tmp_path)) == never_killed


@pytest.fixture(scope="module")
def script():
    """The example as a module, with a short run."""
    specification = importlib.util.spec_from_file_location("resume_example", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.STEPS = 30
    return module


@pytest.fixture(scope="module")
def checkpoints(script, tmp_path_factory):
    """All that a run has saved, by step."""
    saved, save = {}, script.save

    def keep(checkpoint, path):
        saved[checkpoint["done"]] = copy.deepcopy(checkpoint)
        save(checkpoint, path)

    script.save = keep
    script.main(tmp_path_factory.mktemp("checkpoints") / "run.pt")
    script.save = save
    return saved


PARTS = [("model", "running_mean"), ("model", "running_var"), ("model", "control_y"), ("model", "control_1")]
PARTS += [("model", "weight"), ("optimizer", ""), ("scheduler", ""), ("random", "")]


@pytest.mark.parametrize(("part", "name"), [(None, None), *PARTS])
def test_every_part_of_a_checkpoint_matters(part, name, script, checkpoints, tmp_path):
    """With any part from an older checkpoint the end is another one; so a part that is not restored would show."""
    mixed = copy.deepcopy(checkpoints[20])
    if part == "model":
        mixed["model"].update({key: t for key, t in checkpoints[10]["model"].items() if key.endswith(name)})
    elif part is not None:
        mixed[part] = checkpoints[10][part]
    script.save(mixed, tmp_path / "run.pt")
    resumed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "save", lambda checkpoint, path: resumed.append(script.digest(checkpoint)))
        script.main(tmp_path / "run.pt")
    assert (resumed == [script.digest(checkpoints[30])]) == (part is None)


def test_the_digest_sees_the_last_bit(script, checkpoints):
    for name, value in checkpoints[30]["model"].items():
        changed = copy.deepcopy(checkpoints[30])
        changed["model"][name] = value.clone()
        changed["model"][name].view(-1).view(dtype=torch.uint8)[0] ^= 1
        assert script.digest(changed) != script.digest(checkpoints[30]), name
