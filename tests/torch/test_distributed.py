"""Several processes under a real torchrun: merged streams, DistributedDataParallel, fully_shard, killed processes."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_checks import CHECKS
from torch import nn

from onlinenorm.torch import OnlineNorm, keep_streams_apart, sync_every, sync_statistics

ROOT = Path(__file__).parents[2]


class Torchrun:
    """A torchrun of some processes, and what they have printed so far."""

    def __init__(self, folder, processes, *arguments, restarts=0, **environment):
        self.lines = []
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(f"--nproc-per-node={processes}", f"--max-restarts={restarts}"),
                *map(str, arguments),
            ],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """End it and its processes, if they have not ended by themselves."""
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()

    @property
    def output(self):
        return "".join(self.lines)

    def wait_for(self, pattern, seconds=100):
        """Wait until the pattern is printed, and return its match."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.output)):
            waits = time.monotonic() < end and self.process.poll() is None
            assert waits, f"no {pattern!r} in:\n{self.output}"
            time.sleep(0.005)
        return match

    def result(self, seconds=200):
        """Wait for its end, and return its exit status."""
        status = self.process.wait(seconds)
        self.reader.join(10)
        return status


# ---- the checks of distributed_checks.py


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """By number of processes: the files that a run of all checks has left, and what it has printed."""
    done = {}

    def run(processes):
        if processes not in done:
            folder = tmp_path_factory.mktemp("checks")
            with Torchrun(folder, processes, Path(__file__).with_name("distributed_checks.py"), folder) as torchrun:
                torchrun.result()
            done[processes] = {path.name for path in folder.iterdir()}, torchrun.output
        return done[processes]

    return run


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_check(name, processes, finished):
    passed, output = finished(processes)
    missing = [rank for rank in range(processes) if f"{name}.{rank}" not in passed]
    assert not missing, f"{name} failed, or was not reached, on processes {missing}:\n{output[-6000:]}"


# gloo lets go of a tensor a moment after the collective; PyTorch 2.13 aborts a process that ends in that moment
# ("terminate called without an active exception").
LINGER = "import time; time.sleep(1)"


def test_the_page_runs_on_two_processes(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    program = tmp_path / "page.py"
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    program.write_text("\n".join([*blocks, LINGER]), encoding="utf-8")
    with Torchrun(tmp_path, 2, program) as torchrun:
        assert torchrun.result() == 0, torchrun.output


# ---- without other processes


def test_without_a_process_group():
    layer = OnlineNorm(3)
    with pytest.raises(RuntimeError, match=r"no process group.*init_process_group\(\) before.*torchrun"):
        sync_statistics(layer)
    with pytest.raises(RuntimeError, match="no process group"):
        sync_every(torch.optim.SGD(layer.parameters()), layer, 1)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("steps", [0, -1, 1.5, None])
def test_steps_that_make_no_sense(steps, alone):
    layer = OnlineNorm(3)
    optimizer = torch.optim.SGD(layer.parameters())
    with pytest.raises(ValueError, match=f"steps must be an integer of at least 1, got {steps}"):
        sync_every(optimizer, layer, steps)
    with pytest.raises(ValueError, match="done must be an integer of at least 0, got -1"):
        sync_every(optimizer, layer, 1, done=-1)
    assert not optimizer._optimizer_step_post_hooks


def test_a_model_without_layers(alone):
    model = nn.Sequential(nn.Linear(2, 2))
    for call in (sync_statistics, keep_streams_apart, lambda m: sync_every(torch.optim.SGD(m.parameters()), m, 1)):
        with pytest.raises(ValueError, match="Sequential has no OnlineNorm layers"):
            call(model)


def test_one_process_merges_with_itself(alone):
    layer = OnlineNorm(3)
    layer(torch.randn(5, 3, 7) * 1e-3 + 1e3).sum().backward()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    sync_statistics(layer)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_kept_apart_under_every_name():
    """A layer may stand in several places, and DistributedDataParallel may see it under any of the names."""
    layer = OnlineNorm(2)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer), "c": nn.BatchNorm1d(2)})
    keep_streams_apart(keep_streams_apart(model))
    names = {"running_mean", "running_var", "control_y", "control_1", "num_samples_tracked"}
    expected = {f"{place}.{name}" for place in ("a", "b.0") for name in names}
    assert model._ddp_params_and_buffers_to_ignore == expected


# ---- killed processes


def elastic(folder, processes, **environment):
    script = ROOT / "examples" / "torch" / "elastic.py"
    share = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see docs/distributed.md
    return Torchrun(folder, processes, script, "run.pt", restarts=3, **share, **environment)


def final_digest(torchrun):
    status = torchrun.result()
    assert status == 0, torchrun.output
    return re.search(r"digest (\w+)", torchrun.output)[1]


def test_a_killed_process_changes_nothing(tmp_path):
    """With 3 processes the sum of their gradients depends on its order, so also that has to be the same again."""
    (tmp_path / "never").mkdir()
    with elastic(tmp_path / "never", 3) as torchrun:
        expected = final_digest(torchrun)
    (tmp_path / "killed").mkdir()
    with elastic(tmp_path / "killed", 3) as torchrun:
        for step, rank in ((40, 0), (100, random.choice([1, 2]))):
            torchrun.wait_for(rf"step {step}:")
            pid = re.findall(rf"process (\d+) is number {rank} ", torchrun.output)[-1]
            time.sleep(random.uniform(0, 0.1))
            os.kill(int(pid), signal.SIGKILL)
        assert final_digest(torchrun) == expected, torchrun.output
    starts = [int(step) for step in re.findall(r"goes on after step (\d+)", torchrun.output)]
    assert starts[:3] == [0] * 3
    assert len(set(starts[3:6])) == 1
    assert starts[3] >= 40
    assert len(set(starts[6:])) == 1
    assert starts[6] >= 100
    assert len(starts) == 9
