"""The processes that do a sweep's runs."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from onlinenorm.experiments.errors import Busy, ExperimentError
from onlinenorm.experiments.experiment import Job
from onlinenorm.experiments.runs import Row, find_earlier, make_fabric, run_job
from onlinenorm.experiments.sweep.claims import Claim, Claims, Lost, Shared, running, shown, storage_errors

if TYPE_CHECKING:
    from lightning_fabric import Fabric

PAUSE = 1.0  # seconds between two looks at what others do


@dataclass(frozen=True)
class Work:
    """What every worker is told.

    Attributes:
        jobs: the runs, by label.
        varied: the settings that make each run unlike the others, by label.
        shared: how the runs are shared.
        out: where their directories are.
        device: to run on.
        folder: where the data is.
    """

    jobs: Mapping[str, Job]
    varied: Mapping[str, Mapping[str, float]]
    shared: Shared
    out: Path
    device: str
    folder: Path | None


def do(work: Work, process: str) -> None:
    """Do runs until all are done, by this process or by others."""
    import optuna

    claims = work.shared.open()
    job = next(iter(work.jobs.values()))
    fabric = make_fabric(work.device, job.settings.precision)
    data = cache(lambda: job.base.load(job.settings, work.folder))
    while True:
        trials = claims.trials()
        claims.free_stale(trials)
        done = claims.done(trials)
        held = {trial.user_attrs["run"] for trial in running(trials)}
        left = [label for label in work.jobs if label not in done]
        if not left:
            return
        free = [label for label in left if label not in held]
        if not free:
            time.sleep(PAUSE)
            continue
        label = random.choice(free)  # so that processes seldom want the same
        claim = claims.claim(label, work.varied[label], process)
        if claim is not None:
            with suppress(Lost, optuna.TrialPruned), claim:
                _do_run(work.jobs[label], claim, work.out, fabric, data)


def _do_run(job: Job, claim: Claim, out: Path, fabric: "Fabric", data: Callable[[], Any]) -> None:
    record = find_earlier(job, out, resume=True)
    for row in record.rows if record else ():
        claim.report(row)
    while record is None or not record.finished:
        try:
            record = run_job(job, out, fabric, data(), _Reporting(claim))
        except Busy:  # by another sweep, or by a process that was taken for dead
            claim.check()
            time.sleep(PAUSE)
    claim.finish(record.rows)


class _Reporting:
    """A display that tells other processes."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    def begin(self, title: str, key: str, done: int, total: int) -> None:
        """A run begins."""

    def batches(self, position: int, count: int) -> None:
        """Batches follow."""

    def advance(self) -> None:
        """A batch is done."""

    def row(self, row: Row) -> None:
        """Metrics were logged."""
        self._claim.report(row)
        self._claim.end_if_behind()


class Workers:
    """Processes on this machine; those still at work when this context ends are stopped."""

    def __init__(self, count: int, work: Work, claims: Claims) -> None:
        self._claims = claims
        self._workers: dict[str, tuple[BaseProcess, Connection]] = {}  # those not known to have ended
        self._interrupted = False
        spawn = multiprocessing.get_context("spawn")
        gpus, threads = _gpus(work.device), max(1, cores() // count)
        for i in range(count):
            name = uuid4().hex
            listen, say = spawn.Pipe(duplex=False)
            gpu = gpus[i % len(gpus)] if len(gpus) > 1 else None
            process = spawn.Process(target=_main, args=(work, name, threads, gpu, say))
            self._workers[name] = (process, listen)

    def __enter__(self) -> "Workers":
        self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the workers inherit
        for process, _ in self._workers.values():
            process.start()
        signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process, _ in self._workers.values():
            process.terminate()
        for name, (process, _) in self._workers.items():
            process.join()
            self._claims.free(name)
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True  # an exception here and now could leave the storage locked

    @property
    def at_work(self) -> bool:
        """Whether any has not ended."""
        return bool(self._workers)

    def wait(self) -> list[str]:
        """Pause; returns what went wrong meanwhile, in words.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        wait([process.sentinel for process, _ in self._workers.values()], timeout=PAUSE)
        wrong = []
        for name, (process, listen) in list(self._workers.items()):
            if process.exitcode is not None:
                del self._workers[name]
                if process.exitcode:
                    self._claims.free(name)
                    wrong.append(_why(process.exitcode, listen))
        return wrong


def default_count(device: str) -> int:
    """One worker for each GPU; without any, for each core."""
    accelerators = torch.accelerator.device_count() if device != "cpu" else 0
    return accelerators or cores()


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus(device: str) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls them."""
    if device == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def _why(code: int, listen: Connection) -> str:
    with suppress(EOFError):
        if listen.poll():
            return str(listen.recv())
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return f"A worker {how}. Its run is free for others."


def _main(work: Work, name: str, threads: int, gpu: str | None, say: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when CUDA is first used
    torch.set_num_threads(threads)
    url = work.shared.url
    sys.argv = [argument.replace(url, shown(url)) for argument in sys.argv]  # records have the command, not passwords
    try:
        with storage_errors(url):
            do(work, name)
    except ExperimentError as error:
        say.send(str(error))
        sys.exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
