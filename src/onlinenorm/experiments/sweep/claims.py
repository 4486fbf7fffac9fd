"""Runs shared among processes, on one machine or several, by way of an Optuna study in any storage that has a URL.

A process claims a run by adding a running trial that names it, and then looks: of several such trials the first holds
the run, and the others withdraw. Adding a trial is atomic, so no run is done twice. While a process holds a run it
counts up a number in the trial. Whoever sees that number stand still for long takes the process for dead and fails its
trial, and the run is free again.

Optuna has a sampler for grids and a heartbeat of its own. They do not do here: that sampler gives one point to two
processes at times, and never again a point whose trial failed; and a process killed before its first heartbeat would
hold its run for good.
"""

import math
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Metric
from onlinenorm.experiments.paper import best
from onlinenorm.experiments.runs import Row

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

BEAT = 10.0  # seconds between two signs of life
GRACE = 90.0  # seconds without one after which a process is taken for dead
ATTEMPTS = 20  # at making the tables, where other processes make them at the same time
WAIT = 60  # seconds for other processes to finish writing to a SQLite file


class Lost(Exception):
    """Other processes took this one for dead, as after the machine was suspended; its run is free for them."""


@dataclass(frozen=True)
class Shared:
    """What processes must know and agree on to share runs.

    Attributes:
        url: of the storage.
        name: of the study in it.
        metric: that the runs are judged by.
        about: all that the runs have in common, as JSON has it.
        prune: whether a run ends once it has fallen behind the others, and counts as done.
    """

    url: str
    name: str
    metric: Metric
    about: Mapping[str, Any]
    prune: bool

    def open(self) -> "Claims":
        """The study, made if it is not there.

        Raises:
            ExperimentError: the storage can't be used, or what is there is of other settings.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with storage_errors(self.url, ImportError, RuntimeError, ValueError, KeyError):
            study = optuna.create_study(
                study_name=self.name,
                storage=_storage(self.url),
                sampler=optuna.samplers.RandomSampler(),  # not asked for anything: claims say which run they are for
                pruner=optuna.pruners.MedianPruner() if self.prune else optuna.pruners.NopPruner(),
                direction="maximize" if self.metric.best == "highest" else "minimize",
                load_if_exists=True,
            )
            if "about" not in study.user_attrs:
                study.set_user_attr("about", self.about)
            there = study.user_attrs["about"]
        unlike = [key for key in {**self.about, **there} if self.about.get(key) != there.get(key)]
        if unlike:
            was = ", ".join(f"{key} {there.get(key)} instead of {self.about.get(key)}" for key in unlike)
            raise ExperimentError(f"{self.name} in {shown(self.url)} was made with {was}. Use another storage.")
        return Claims(self, study)


class Claims:
    """An open study, and what this process has seen of the others."""

    def __init__(self, shared: Shared, study: "Study") -> None:
        self.shared = shared
        self.study = study
        self._seen: dict[int, tuple[int, float]] = {}  # each trial's last sign of life, and when it was new

    def trials(self) -> "list[FrozenTrial]":
        """All claims ever made, as they are now."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if "run" in trial.user_attrs]

    def done(self, trials: "Sequence[FrozenTrial]") -> dict[str, "FrozenTrial"]:
        """The runs that were done to their end, or to where they were pruned if that counts."""
        states = ("COMPLETE", "PRUNED") if self.shared.prune else ("COMPLETE",)
        return {t.user_attrs["run"]: t for state in reversed(states) for t in trials if t.state.name == state}

    def claim(self, run: str, varied: Mapping[str, float], process: str) -> "Claim | None":
        """Take a run, unless another process was first.

        Args:
            run: its label.
            varied: its settings that vary, for whoever looks at the study.
            process: a name that no other process has.
        """
        import optuna
        from optuna.trial import TrialState, create_trial

        self.study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=dict(varied),
                distributions={name: _distribution(value) for name, value in varied.items()},
                user_attrs={"run": run, "process": process, "beat": 0},
            )
        )
        trials = self.trials()
        mine = next(t for t in running(trials) if t.user_attrs["process"] == process)
        earlier = [t for t in running(trials) if t.user_attrs["run"] == run and t.number < mine.number]
        if earlier or run in self.done(trials):
            self._fail(mine)
            return None
        return Claim(self, optuna.Trial(self.study, mine._trial_id))

    def free_stale(self, trials: "Sequence[FrozenTrial]") -> None:
        """Free the runs of processes that have given no sign of life for long."""
        now = time.monotonic()  # of this process alone: machines need not agree on the time
        for trial in running(trials):
            beat, since = self._seen.get(trial.number, (-1, now))
            if trial.user_attrs["beat"] != beat:
                self._seen[trial.number] = (trial.user_attrs["beat"], now)
            elif now - since > GRACE:
                self._fail(trial)

    def free(self, process: str) -> None:
        """Free the run of a process that is known to have ended."""
        for trial in running(self.trials()):
            if trial.user_attrs["process"] == process:
                self._fail(trial)

    def _fail(self, trial: "FrozenTrial") -> None:
        from optuna.trial import TrialState

        self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


class Claim:
    """A run that this process holds for as long as it uses this as a context."""

    def __init__(self, claims: Claims, trial: "Trial") -> None:
        self._study, self._metric, self._trial = claims.study, claims.shared.metric, trial
        self._reported: set[int] = set()
        self._lost = False
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> "Claim":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        import optuna
        from optuna.trial import TrialState

        self._left.set()
        self._thread.join()
        state = TrialState.PRUNED if isinstance(error, optuna.TrialPruned) else TrialState.FAIL
        self._study.tell(self._trial, state=state, skip_if_finished=True)  # as after `finish`

    def report(self, row: Row) -> None:
        """Note the metric of an epoch, if it is not known yet.

        Raises:
            Lost: the run is no longer this process's.
        """
        from optuna.exceptions import UpdateFinishedTrialError

        self.check()
        if self._metric.key in row and row["epoch"] not in self._reported:
            value, worst = row[self._metric.key], -math.inf if self._metric.best == "highest" else math.inf
            try:
                self._trial.report(worst if value is None else value, row["epoch"])
            except UpdateFinishedTrialError:
                raise Lost from None
            self._reported.add(row["epoch"])

    def check(self) -> None:
        """Make sure that the run is still this process's.

        Raises:
            Lost: it is not.
        """
        if self._lost:
            raise Lost

    def end_if_behind(self) -> None:
        """End a run that has fallen behind, where runs are pruned.

        Raises:
            optuna.TrialPruned: it has.
        """
        import optuna

        if self._trial.should_prune():
            raise optuna.TrialPruned

    def finish(self, rows: Sequence[Row]) -> None:
        """The run was done to its end, with these metrics."""
        for row in rows:
            self.report(row)
        self._study.tell(self._trial, best([rows], self._metric).median, skip_if_finished=True)

    def _live(self) -> None:
        from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError

        beat = 0
        while not self._left.wait(BEAT):
            beat += 1
            try:
                self._trial.set_user_attr("beat", beat)
            except UpdateFinishedTrialError:
                self._lost = True
                return
            except StorageInternalError:  # the next sign of life may get through
                pass


def running(trials: "Sequence[FrozenTrial]") -> "list[FrozenTrial]":
    """Those whose runs are being done."""
    return [trial for trial in trials if trial.state.name == "RUNNING"]


def curve(trial: "FrozenTrial", metric: Metric) -> list[Row]:
    """What was reported of a run, as rows."""
    return [{"epoch": epoch, metric.key: value} for epoch, value in sorted(trial.intermediate_values.items())]


def _distribution(value: float) -> "BaseDistribution":
    from optuna.distributions import FloatDistribution, IntDistribution

    if isinstance(value, int):
        return IntDistribution(min(0, value), max(1, value))
    return FloatDistribution(min(0.0, value), max(1.0, value))


# The storage


def _storage(url: str) -> "RDBStorage":
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import IntegrityError, SQLAlchemyError

    options: dict[str, Any] = {"pool_pre_ping": True}  # runs are long, and connections end meanwhile
    if url.startswith("sqlite"):
        options["connect_args"] = {"timeout": WAIT}
    for attempt in range(ATTEMPTS):
        try:
            return RDBStorage(url, options)
        except SQLAlchemyError as error:
            at_once = isinstance(error, IntegrityError) or "already exists" in str(error)
            if not at_once or attempt == ATTEMPTS - 1:
                raise
            time.sleep(random.random())
    raise AssertionError


@contextmanager
def storage_errors(url: str, *further: type[Exception]) -> Iterator[None]:
    """Say what is wrong with a storage in words for the user: where SQL fails, or with a further kind of error."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    kinds: tuple[type[Exception], ...] = (StorageInternalError, SQLAlchemyError, *further)
    try:
        yield
    except kinds as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause).strip().partition("\n")[0].rstrip(".")
        raise ExperimentError(
            f"The storage {shown(url)} cannot be used: {reason}. It must be a URL that Optuna can reach, such as "
            "sqlite:///sweep.db or postgresql+psycopg://user@host/database, whose driver is installed."
        ) from error


def shown(url: str) -> str:
    """A URL without its password."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string()
    except ArgumentError:
        return url
