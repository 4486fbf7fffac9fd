"""One run of an experiment: what it leaves on disk, and how it goes on after having been killed.

A run's directory is OUT/EXPERIMENT/SCALE/LABEL. In it are

    run.json          settings, seed, command, commit, versions, machine, metrics by epoch, time
    checkpoint.pt     all that the next epoch depends on, replaced after each
    events.out....    the metrics for TensorBoard

The checkpoint is the truth: a run that goes on takes its metrics from there. Random numbers are drawn anew in every
epoch from the seed and the epoch's number, so no generator's state need be kept.
"""

import io
import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor, nn

import onlinenorm
from onlinenorm import machine
from onlinenorm.experiments.errors import Busy, ExperimentError
from onlinenorm.experiments.experiment import Job, Precision, Scale
from onlinenorm.experiments.files import write_whole
from onlinenorm.torch import OnlineNorm, keep_streams_apart, sync_statistics

if TYPE_CHECKING:
    from lightning_fabric import Fabric

FORMAT = 1  # of run.json
S = TypeVar("S")
T = TypeVar("T")
Row = dict[str, Any]


class Part(TypedDict):
    """Which of so many processes this is."""

    rank: int
    world: int


@dataclass(frozen=True)
class Record:
    """What run.json says."""

    directory: Path
    experiment: str
    base: str  # the experiment whose recipe it followed
    scale: Scale
    label: str
    status: str  # "running" until it is "finished"
    command: str
    commit: str | None
    versions: dict[str, str]
    machine: dict[str, Any]
    settings: dict[str, Any]
    started: str
    seconds: float
    waiting: float  # the share of the time that training waited for data
    rows: list[Row] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it was done to its end."""
        return self.status == "finished"

    def write(self) -> None:
        """Write run.json, whole or not at all."""
        content = {"format": FORMAT, **asdict(self)}
        del content["directory"]
        write_whole(self.directory / "run.json", json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_record(directory: Path) -> Record:
    """What run.json in a run's directory says."""
    path = directory / "run.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format")
        if found != FORMAT:
            version = content.get("versions", {}).get("onlinenorm", "unknown")
            raise ExperimentError(
                f"{path} was written by onlinenorm {version} in format {found}; this is onlinenorm "
                f"{onlinenorm.__version__}, which reads format {FORMAT}. Use that version, or another --out."
            )
        return Record(directory=directory, **content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExperimentError(f"{path} is not a run's record: {error}. Move it away, or use another --out.") from error


class Display(Protocol):
    """Where a run says how it is doing."""

    def begin(self, title: str, key: str, done: int, total: int) -> None:
        """A run begins, or goes on: of so many epochs (or whatever `key` says) some are done."""

    def batches(self, position: int, count: int) -> None:
        """So many batches follow; how many, or 0 where that is not known."""

    def advance(self) -> None:
        """A batch is done."""

    def row(self, row: Row) -> None:
        """Metrics were logged."""


class Run(Generic[S]):
    """One run, as its recipe sees it.

    Attributes:
        settings: everything that decides its numbers.
        data: what the experiment's `load` returned.
        fabric: Lightning Fabric: device, precision, processes.
        part: this process's part of the data, as arguments for a function that makes batches.
        rows: the metrics so far.
    """

    def __init__(self, job: Job, directory: Path, fabric: "Fabric", data: Any, display: Display) -> None:
        self.settings: S = job.settings
        self.data = data
        self.fabric = fabric
        self.part = Part(rank=fabric.global_rank, world=fabric.world_size)
        self.rows: list[Row] = []
        self._job = job
        self._display = display
        self._directory = directory
        self._stateful: dict[str, Any] = {}
        self._losses: list[Tensor] = []
        self._seconds = self._waited = 0.0  # of the epochs done, in earlier processes too
        self._began = time.perf_counter()
        self._index: Row = {}
        self._position = 0
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._events: Any = None

    # For recipes

    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Move model and optimiser to the device, and have them kept in checkpoints.

        Under several processes each has its own streams of statistics; `epochs` merges them after each epoch.
        """
        if self.fabric.world_size > 1 and _has_online_norm(model):
            keep_streams_apart(model)
        if self.fabric.device.type == "cpu" and _faster_with_channels_last(model, self._job.settings.precision):
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model, optimizer = self.fabric.setup(model, optimizer)
        self._stateful = {"model": model, "optimizer": optimizer}
        return model, optimizer

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs still to do, from 1 on; a checkpoint is kept after each.

        Training that has diverged (a loss, observed, that is not a finite number) ends after that epoch.
        """
        return self.each("epoch", range(1, count + 1))

    def each(self, key: str, values: Sequence[T]) -> Iterator[T]:
        """The values still to do, in order; rows that are logged meanwhile carry the value under `key`.

        A checkpoint is kept after each, so that a run that was killed goes on with the first that was not finished.
        """
        done = self._restore()
        self._display.begin(f"{self._job.name} {self._job.label}", key, done, len(values))
        for position, value in enumerate(values[done:], done + 1):
            if self.rows and self.rows[-1].get("diverged"):
                break
            torch.manual_seed(self._seed(position))
            self._index, self._position, self._began = {key: value}, position, time.perf_counter()
            yield value
            self._save()

    def batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Batches, on the run's device, with a progress bar; the time spent waiting for them is counted."""
        self._display.batches(self._position, len(batches) if isinstance(batches, Sized) else 0)
        source = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - began
            yield self.fabric.to_device(batch)
            self._display.advance()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[nn.Module]:
        """The network as it is to be judged: no gradients, and the same statistics on all processes.

        It is not wrapped in DistributedDataParallel, whose forward is a meeting of all processes: here, one of them may
        have a batch more than another.
        """
        self._agree(model)
        model.eval()
        network: nn.Module = model.module  # type: ignore[assignment]
        with torch.no_grad(), self.fabric.autocast():
            yield network

    def observe(self, loss: Tensor) -> None:
        """Take a training loss into the epoch's mean."""
        self._losses.append(loss.detach())

    def log(self, **values: float | str | list[float]) -> None:
        """Note one row of metrics: those of this epoch, or of whatever else the experiment is indexed by."""
        row: Row = {**self._index}
        if self._losses:
            losses = torch.stack(self._losses).double()
            row["train_loss"] = self.mean(losses.sum().item(), len(losses))
            if not math.isfinite(row["train_loss"]):
                row["diverged"] = True
            self._losses = []
        row |= values
        self.rows.append({key: _plain(value) for key, value in row.items()})
        self._display.row(self.rows[-1])

    def mean(self, total: float, count: float) -> float:
        """total / count, both summed over the processes."""
        if self.fabric.world_size > 1:
            sums = torch.tensor([total, count], dtype=torch.float64, device=self.fabric.device)
            torch.distributed.all_reduce(sums)
            total, count = sums.tolist()
        return total / count

    def beside(self, label: str) -> Path:
        """The directory of another run of the same experiment, done before."""
        return self._directory.parent / label

    # For the command

    def do(self) -> None:
        """Follow the recipe. run.json says that it runs, and in the end that it finished."""
        torch.manual_seed(self._seed(0))
        if not self.fabric.is_global_zero:
            self._job.base.train(self)
            return
        with _only_one(self._directory):
            if not (self._directory / "run.json").exists():
                self._record("running").write()
            self._job.base.train(self)
            if not self._position:  # nothing to go on with, and so not timed yet
                self._seconds = time.perf_counter() - self._began
            self._record("finished").write()
        if self._events is not None:
            self._events.close()

    def _seed(self, position: int) -> int:
        """Of the random numbers drawn for an epoch; 0 stands for what comes before the first."""
        return int(self._job.settings.seed) * 1_000_003 + position

    def _record(self, status: str) -> Record:
        return Record(
            directory=self._directory,
            experiment=self._job.name,
            base=self._job.base.name,
            scale=self._job.scale,
            label=self._job.label,
            status=status,
            command=shlex.join(["onlinenorm", *sys.argv[1:]]),
            commit=machine.git_commit(),
            versions=machine.versions(),
            machine={**machine.describe(), "device": str(self.fabric.device), "processes": self.fabric.world_size},
            settings=asdict(self.settings),  # type: ignore[call-overload]
            started=self._started,
            seconds=round(self._seconds, 3),
            waiting=round(self._waited / self._seconds, 4) if self._seconds else 0.0,
            rows=self.rows,
        )

    def _restore(self) -> int:
        path = self._directory / "checkpoint.pt"
        if not path.exists():
            return 0
        try:
            kept = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ExperimentError(f"{path} cannot be read: {error}. Move the run's directory away.") from error
        for name, thing in self._stateful.items():
            thing.load_state_dict(kept[name])
        self.rows = kept["rows"]
        self._seconds, self._waited, self._started = kept["seconds"], kept["waited"], kept["started"]
        done: int = kept["done"]
        return done

    def _save(self) -> None:
        if "model" in self._stateful:
            self._agree(self._stateful["model"])
        self._seconds += time.perf_counter() - self._began
        if not self.fabric.is_global_zero:
            return
        kept = {name: thing.state_dict() for name, thing in self._stateful.items()}
        kept |= {"done": self._position, "rows": self.rows, "started": self._started}
        kept |= {"seconds": self._seconds, "waited": self._waited}
        content = io.BytesIO()
        torch.save(kept, content)
        self._tell_tensorboard()
        write_whole(self._directory / "checkpoint.pt", content.getvalue())
        self._record("running").write()

    def _agree(self, model: nn.Module) -> None:
        """Have the same statistics on all processes, which are those that a checkpoint keeps.

        OnlineNorm's streams are merged; everything else is process 0's, as DistributedDataParallel has it.
        """
        if self.fabric.world_size > 1:
            if _has_online_norm(model):
                sync_statistics(model)
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def _tell_tensorboard(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._events is None:  # what an earlier process wrote of this epoch and later ones is void
            self._events = SummaryWriter(str(self._directory), purge_step=self._position)
        for key, value in (self.rows[-1] if self.rows else {}).items():
            if isinstance(value, (int, float)) and key not in self._index:
                self._events.add_scalar(key, value, self._position)
        self._events.flush()


def make_fabric(device: str, precision: Precision) -> "Fabric":
    """Lightning Fabric for this process and, under torchrun, its fellows."""
    from lightning_fabric import Fabric

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces what was asked for
    try:
        fabric = Fabric(
            accelerator=device,
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
            strategy="ddp" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else "auto",
            precision="bf16-mixed" if precision == "bf16" else "32-true",
        )
        fabric.launch()
    except (ValueError, RuntimeError) as error:
        raise ExperimentError(f"--device {device} cannot be used: {error}") from error
    return fabric


def run_job(job: Job, out: Path, fabric: "Fabric", data: Any, display: Display) -> Record:
    """Do a run, or what is left of it; returns its record."""
    directory = out / job.name / job.scale / job.label
    run: Run[Any] = Run(job, directory, fabric, data, display)
    run.do()
    fabric.barrier()
    return read_record(directory)


def find_earlier(job: Job, out: Path, resume: bool) -> Record | None:
    """The record of an earlier run of a job, if there is one that may be gone on with.

    Raises:
        ExperimentError: there is one that must be left alone.
    """
    directory = out / job.name / job.scale / job.label
    if not (directory / "run.json").exists():
        return None
    record = read_record(directory)
    done = "finished" if record.finished else "begun"
    if record.versions["onlinenorm"] != onlinenorm.__version__:
        raise ExperimentError(
            f"{directory} was {done} by onlinenorm {record.versions['onlinenorm']}; this is {onlinenorm.__version__}, "
            "whose numbers may differ. Use that version, or another --out."
        )
    wanted = json.loads(json.dumps(asdict(job.settings)))
    unlike = [key for key in wanted | record.settings if wanted.get(key) != record.settings.get(key)]
    if unlike:
        was = ", ".join(f"{key}={record.settings.get(key)}" for key in unlike)
        raise ExperimentError(f"{directory} was {done} with other settings ({was}). Use another --out.")
    if not resume:
        advice = "use it" if record.finished else "go on with it"
        raise ExperimentError(f"{directory} was {done} before. --resume to {advice}, or another --out to leave it.")
    return record


def _has_online_norm(model: nn.Module) -> bool:
    return any(isinstance(module, OnlineNorm) for module in model.modules())


def _faster_with_channels_last(model: nn.Module, precision: Precision) -> bool:
    """Whether a network trains faster on a CPU with its images' channels last in memory.

    On two cores, a step of the experiments' U-Net takes 0.6 to 0.8 of the time so, and one of ResNet-20 0.8 to 0.9, in
    either precision. Not with PyTorch's GroupNorm in bfloat16, though: with that it takes twice the time.
    """

    def has(kind: type[nn.Module]) -> bool:
        return any(isinstance(module, kind) for module in model.modules())

    return has(nn.Conv2d) and not (has(nn.GroupNorm) and precision == "bf16")


def _plain(value: Any) -> Any:
    """As JSON has it: there is no infinity and no NaN."""
    if isinstance(value, Tensor):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Hold a run's directory; the system lets go of it when the process ends, however it ends."""
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ExperimentError(f"Cannot write into {directory}: {error.strerror}. Choose another --out.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(f"Another process is working in {directory}. Wait for it, or use another --out.") from None
    else:
        yield
    finally:
        os.close(lock)
