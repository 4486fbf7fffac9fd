"""Sweeps: their grids, that processes share runs without doing one twice or losing one, and the map."""

import fcntl
import io
import itertools
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path

import lightning_fabric  # noqa: F401  so that forked processes have it already
import optuna
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from swept import SWEPT
from typer.testing import CliRunner

from onlinenorm.experiments import recipes
from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Experiment
from onlinenorm.experiments.paper import Best
from onlinenorm.experiments.runs import read_record
from onlinenorm.experiments.sweep import claims as claims_module
from onlinenorm.experiments.sweep import sweep, workers
from onlinenorm.experiments.sweep.claims import Claims, Lost, Shared, shown
from onlinenorm.experiments.sweep.grid import Grid, doubling, paper_grids, parse_grid
from onlinenorm.experiments.sweep.map import Map
from onlinenorm.experiments.sweep.plan import Sweep, plan_sweep
from onlinenorm.hyperparameters import horizon_of

HERE = Path(__file__).parent
FORK = multiprocessing.get_context("fork")
POINTS = 4 * 3  # of the paper's grid for `swept`

app = typer.Typer()
app.command()(sweep)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.EXPERIMENTS, "swept", SWEPT)


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ledger"
    path.touch()
    monkeypatch.setenv("LEDGER", str(path))
    return path


def epochs_done(ledger: Path) -> Counter[str]:
    """How often each epoch of each run was begun."""
    return Counter(line.partition(" ")[2] for line in ledger.read_text().splitlines())


def plan(*grids: str, step: int = 1, seeds: tuple[int, ...] = (0,), **changes: str) -> Sweep:
    return plan_sweep(SWEPT, "smoke", "online", changes, "32", grids, step, seeds)


def work(asked: Sweep, tmp_path: Path, prune: bool = False, out: str = "runs") -> workers.Work:
    jobs = {job.label: job for _, its in asked.points() for job in its}
    varied = {label: asked.varied(job) for label, job in jobs.items()}
    shared = Shared(f"sqlite:///{tmp_path / 'study.db'}", "study", asked.metric, asked.about(), prune)
    return workers.Work(jobs, varied, shared, tmp_path / out, "cpu", None)


def results(told: workers.Work) -> dict[str, float]:
    claims = told.shared.open()
    return {run: trial.value for run, trial in claims.done(claims.trials()).items()}


def fork(function: Callable[[], object]) -> ForkProcess:
    process = FORK.Process(target=function)
    process.start()
    return process


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


# Grids


@given(low=st.floats(1e-6, 1e6), factor=st.floats(1, 1e4), step=st.integers(1, 5))
def test_doubling_goes_from_low_to_high(low: float, factor: float, step: int) -> None:
    high = low * factor
    values = doubling(low, high, step)
    assert values[0] == low
    assert all(b / a == 2**step for a, b in itertools.pairwise(values))
    assert values[-1] <= high * (1 + 1e-6) < values[-1] * 2**step * (1 + 1e-5)


def test_the_papers_grid_of_the_mlp() -> None:
    for grid in paper_grids(recipes.find("mlp"), step=1):
        assert [horizon_of(alpha) for alpha in grid.values] == [2**i for i in range(1, 14)]
        written = parse_grid(f"{grid.name}=1/2..8191/8192", SWEPT.settings("smoke", "online"), 1)
        assert written == grid


@pytest.mark.parametrize(
    ("text", "step", "values"),
    [
        ("rate=0.01..0.16", 2, [0.01, 0.04, 0.16]),
        ("rate=0.3,0.1,0.3", 1, [0.1, 0.3]),
        ("epochs=1..8", 1, [1, 2, 4, 8]),
        ("alpha_fwd=0.9..0.99", 1, [0.9, 0.95, 0.975, 0.9875]),
        ("alpha_fwd=0.9,1/2", 1, [0.5, 0.9]),
    ],
)
def test_grids_of_the_users_own(text: str, step: int, values: list[float]) -> None:
    grid = parse_grid(text, SWEPT.settings("smoke", "online"), step)
    assert grid.values == pytest.approx(values)
    assert {type(value) for value in grid.values} == {type(values[0])}


def test_nearest_is_by_the_ratio_of_horizons() -> None:
    grid = Grid("alpha_fwd", (1 / 2, 127 / 128, 1023 / 1024))
    assert grid.nearest(0.999) == 1023 / 1024
    assert grid.nearest(1 - 1 / 300) == 127 / 128
    assert grid.nearest(0.9999) is None
    assert Grid("momentum", (0.0, 0.5, 0.9)).nearest(0.6) == 0.5


@pytest.mark.parametrize("experiment", [e for e in recipes.EXPERIMENTS.values() if e.metric and not e.plan])
def test_workers_can_be_told_of_every_experiment(experiment: Experiment) -> None:
    assert pickle.loads(pickle.dumps(experiment)).name == experiment.name


# What is asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["mlp", "--grid", "rate"], "NAME=FROM..TO or NAME=VALUE,VALUE is wanted"),
        (["swept", "--grid", "pace=1..2"], "no setting 'pace' here. There are: epochs, alpha_fwd"),
        (["swept", "--grid", "name=1,2"], "name=1 is not a number"),
        (["swept", "--grid", "rate=1..x"], "rate='x': could not convert"),
        (["swept", "--grid", "rate=4..1"], "must start above 0 and go up, and not from 4 to 1"),
        (["swept", "--grid", "alpha_fwd=1/2..1"], "decay is 1.0: it must be at least 0 and below 1"),
        (["swept", "--grid", "rate=1,2", "--set", "rate=3"], "--set rate=3 makes no sense"),
        (["swept", "--grid", "rate=1", "--grid", "rate=2"], "one setting or two, not over rate, rate"),
        (["swept", "--norm", "batch"], "--norm batch: Allowed: online, none"),
        (["decay-sweep"], "decay-sweep has no single run .* Sweep one that it is over: cifar10, mlp"),
        (["swept", "--storage", "nowhere"], "storage nowhere cannot be used: Could not parse"),
        (["swept", "--storage", "redis://localhost"], "storage redis://localhost cannot be used: Can't load plugin"),
        (["swept", "--storage", "sqlite:////no/such/place.db"], "unable to open database file"),
        (["swept", "--out", "/dev/null"], "Cannot write into /dev/null/sweep-swept/cpu: Not a directory"),
    ],
)
def test_what_makes_no_sense_is_said(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, options)
    assert ran.exit_code == 1
    assert re.search(message, ran.stderr), ran.stderr


def test_a_sweep_takes_no_part_in_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--workers in place of torchrun" in CliRunner().invoke(app, ["swept"]).stderr


def test_passwords_are_not_shown() -> None:
    url = "postgresql://me:secret@localhost/study"
    assert shown(url) == "postgresql://me:***@localhost/study"
    with pytest.raises(ExperimentError, match="storage postgresql://me:") as raised:
        Shared(url, "study", plan().metric, {}, prune=False).open()
    assert "secret" not in str(raised.value)


def test_sweeps_that_differ_are_kept_apart(tmp_path: Path) -> None:
    asked = plan()
    assert asked.label == "online-over-alpha_fwd-alpha_bwd"
    assert plan(epochs="2").label == "online-epochs=2-over-alpha_fwd-alpha_bwd"
    assert plan("rate=1,2", alpha_fwd="1/2").label == "online-alpha_fwd=0.5-over-rate"
    assert plan(seeds=(3, 4)).label == plan(step=2).label == asked.label  # these add to the same map

    shared = work(asked, tmp_path).shared
    shared.open()
    shared.open()
    with pytest.raises(ExperimentError, match=r"was made with epochs 3 instead of 5\. Use another storage"):
        replace(shared, about={**shared.about, "epochs": 5}).open()
    with pytest.raises(ExperimentError, match=r"was made with onlinenorm .* instead of 99"):
        replace(shared, about={**shared.about, "onlinenorm": "99"}).open()


# Claims


@pytest.fixture
def claims(tmp_path: Path) -> Claims:
    return work(plan(), tmp_path).shared.open()


def test_a_run_is_held_by_one_process_until_it_is_done(claims: Claims) -> None:
    held = claims.claim("a", {"rate": 0.5}, "first")
    assert held is not None
    with held:
        assert claims.claim("a", {"rate": 0.5}, "second") is None
        other = claims.claim("b", {"rate": 1.5}, "second")
        assert other is not None
        with other, pytest.raises(ZeroDivisionError):
            _ = 1 / 0
        held.finish([{"epoch": 1, "score": 2.0}, {"epoch": 2, "score": 1.0}])
    assert claims.claim("a", {"rate": 0.5}, "second") is None
    assert {run: trial.value for run, trial in claims.done(claims.trials()).items()} == {"a": 2.0}
    freed = claims.claim("b", {"rate": 1.5}, "first")
    assert freed is not None, "a run whose process ended with an error is lost"


def test_a_run_that_was_never_a_number_has_the_worst_value(claims: Claims) -> None:
    held = claims.claim("a", {}, "first")
    assert held is not None
    with held:
        held.finish([{"epoch": 1, "score": None}])
    assert claims.done(claims.trials())["a"].value == -math.inf


def test_the_silent_lose_their_runs_and_the_living_keep_them(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "BEAT", 0.05)
    monkeypatch.setattr(claims_module, "GRACE", 1.0)
    living, silent = claims.claim("a", {}, "first"), claims.claim("b", {}, "second")
    assert living is not None
    assert silent is not None
    with living:

        def freed() -> bool:
            claims.free_stale(claims.trials())
            return "b" not in {trial.user_attrs["run"] for trial in claims_module.running(claims.trials())}

        wait_for(freed, "a silent process to lose its run", seconds=20)
        living.report({"epoch": 1, "score": 1.0})
        with pytest.raises(Lost):
            silent.report({"epoch": 1, "score": 1.0})
        assert claims.claim("a", {}, "third") is None
        assert claims.claim("b", {}, "third") is not None


def test_a_process_that_was_taken_for_dead_learns_of_it(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "BEAT", 0.05)
    suspended = claims.claim("a", {}, "first")
    assert suspended is not None
    with suspended:
        claims.free("first")
        again = claims.claim("a", {}, "second")
        assert again is not None
        wait_for(lambda: suspended._lost, "the sign of life that fails", seconds=20)
        with pytest.raises(Lost):
            suspended.check()
        with again:
            again.finish([{"epoch": 1, "score": 5.0}])
    assert claims.done(claims.trials())["a"].value == 5.0, "the process that had lost the run spoilt its result"


# Work


def test_processes_on_one_storage_do_every_run_once(tmp_path: Path, ledger: Path) -> None:
    """Four at once, from making the tables on: two that share directories, two with their own."""
    asked = plan()
    told = [work(asked, tmp_path, out=out) for out in ("runs", "runs", "there", "elsewhere")]
    processes = [fork(lambda w=w, i=i: workers.do(w, f"process {i}")) for i, w in enumerate(told)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    done = epochs_done(ledger)
    assert len(done) == POINTS * 3
    assert set(done.values()) == {1}, "runs were done more than once"
    assert results(told[0]).keys() == told[0].jobs.keys()
    assert not claims_module.running(told[0].shared.open().trials())


@pytest.mark.parametrize("out", ["runs", "elsewhere"])
def test_what_a_process_held_when_killed_is_done_by_another(
    out: str, tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "BEAT", 0.1)
    monkeypatch.setattr(claims_module, "GRACE", 1.5)
    monkeypatch.setattr(workers, "PAUSE", 0.1)
    monkeypatch.setenv("SECONDS_AN_EPOCH", "0.2")
    asked = plan(step=2)
    told = work(asked, tmp_path)
    told.shared.open()
    victim = fork(lambda: workers.do(told, "victim"))
    wait_for(lambda: " 2\n" in ledger.read_text(), "a run's second epoch")
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    interrupted = ledger.read_text().splitlines()[-1].split()[1]

    workers.do(work(asked, tmp_path, out=out), "heir")
    done = epochs_done(ledger)
    assert len(done) == 4 * 3, "a run was lost"
    again = {key for key, times in done.items() if times > 1}
    begun = {f"{interrupted} 2"} if out == "runs" else {f"{interrupted} 1", f"{interrupted} 2"}
    assert again == begun, "the killed run did not go on from its checkpoint, or another one was repeated"
    assert results(told).keys() == told.jobs.keys()


def test_finished_runs_are_used_where_the_study_is_new(tmp_path: Path, ledger: Path) -> None:
    told = work(plan(step=2), tmp_path)
    workers.do(told, "one")
    before = results(told)
    (tmp_path / "study.db").unlink()
    ledger.write_text("")
    workers.do(told, "one")
    assert results(told) == before
    assert ledger.read_text() == ""


def test_a_run_whose_directory_another_sweep_works_in_is_waited_for(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PAUSE", 0.1)
    told = work(plan("rate=0.1"), tmp_path)
    directory = told.out / "sweep-swept/smoke/swept-online-seed0"
    directory.mkdir(parents=True)
    held = FORK.Event()
    process = fork(lambda: held.wait(60) and workers.do(told, "patient"))  # forked first: it must not inherit the lock
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held.set()
        claims = told.shared.open()
        wait_for(lambda: bool(claims_module.running(claims.trials())), "a claim")
        time.sleep(0.5)
        assert ledger.read_text() == ""
        assert process.is_alive()
    process.join()
    assert process.exitcode == 0
    assert results(told) == {"swept-online-seed0": pytest.approx(3 - math.log2(4 / (1 / 0.3)))}


def test_pruning_ends_what_falls_behind_if_asked(tmp_path: Path, ledger: Path) -> None:
    random.seed(0)  # the runs' order
    asked = plan(epochs="5")
    pruning = work(asked, tmp_path, prune=True)
    workers.do(pruning, "one")
    trials = pruning.shared.open().trials()
    assert {trial.user_attrs["run"] for trial in trials} == pruning.jobs.keys()
    assert {trial.state.name for trial in trials} == {"COMPLETE", "PRUNED"}
    assert len(epochs_done(ledger)) < 5 * POINTS, "pruned runs went on"

    through = work(asked, tmp_path)
    workers.do(through, "one")
    assert results(through).keys() == through.jobs.keys()
    assert len(epochs_done(ledger)) == 5 * POINTS, "without --prune, pruned runs are to be finished"


def test_each_worker_gets_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    assert workers._gpus("auto") == ["2", "GPU-5"]
    assert workers._gpus("cpu") == []


# The map


def drawn(*grids: Grid, paper: tuple[float, ...], **further: object) -> Map:
    found = {point: Best(1, (sum(point),)) for point in itertools.product(*(grid.values for grid in grids))}
    return replace(Map("A <title>", "online", SWEPT.metric, grids, found, frozenset(), paper), **further)


def shown_table(drawn: Map, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    drawn.show(console)
    return console.file.getvalue()


TWO = (Grid("alpha_fwd", (0.5, 0.75)), Grid("alpha_bwd", (0.5, 0.875)))


def test_the_table_has_every_number_and_marks_two() -> None:
    rows = shown_table(drawn(*TWO, paper=(0.5, 0.5))).splitlines()
    assert rows[0] == "A <title>; forward horizon → backward horizon ↑"
    assert [row.split() for row in rows[1:4]] == [["2", "4"], ["8", "1.38", "*1.62"], ["2", "†1.00", "1.25"]]
    assert rows[4] == "* Best score: 1.62 (1 run) at forward horizon 4, backward horizon 8."
    assert rows[5] == "† The paper's choice is forward horizon 2, backward horizon 2: 1.00 (1 run)."


def test_the_table_says_what_has_no_number() -> None:
    points = list(itertools.product(*(grid.values for grid in TWO)))
    found = {points[0]: Best(1, (-math.inf,)), points[1]: Best(1, (3.0,))}
    some = drawn(*TWO, paper=(0.999, 0.5), found=found, pruned=frozenset([points[2]]))
    rows = shown_table(some).splitlines()
    assert [row.split() for row in rows[2:4]] == [["8", "*3.00", "–"], ["2", "diverged", "pruned"]]
    assert rows[5].endswith("forward horizon 1000, backward horizon 2, outside this map.")


def test_a_wide_table_loses_no_number_on_a_narrow_terminal() -> None:
    wide = tuple(1 - 2.0**-i for i in range(1, 14))
    text = shown_table(drawn(Grid("alpha_fwd", wide), Grid("alpha_bwd", wide), paper=(0.999, 0.99)), width=40)
    assert "…" not in text
    assert len(re.findall(r"\d\.\d\d\b", text)) == 13 * 13 + 2


@pytest.mark.parametrize("grids", [TWO, TWO[:1], (Grid("rate", (0.0, 0.1)),), (Grid("rate", (0.01, 0.1)),)])
def test_the_page_needs_nothing_else(grids: tuple[Grid, ...]) -> None:
    page = drawn(*grids, paper=tuple(grid.values[0] for grid in grids)).page()
    assert "A &lt;title&gt;" in page
    assert "Best score" in page
    assert page.count("<svg") >= 1
    assert not re.search(r"<(script|link(?! rel=\"icon\" href=\"data:)|img)", page)
    if len(grids) == 2:
        assert page.count('class="mark"') == 2
        for number in ("1.00", "1.25", "1.38", "1.62"):
            assert f">{number}<" in page


# The command


@pytest.fixture
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need not import everything anew."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORK)


@pytest.mark.usefixtures("_quickly")
def test_the_command_goes_on_when_a_worker_is_killed_and_draws_the_map(
    tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECONDS_AN_EPOCH", "0.1")

    def kill_one() -> None:
        wait_for(lambda: len(ledger.read_text().splitlines()) > 3, "workers to begin")
        os.kill(int(ledger.read_text().split()[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    out = tmp_path / "out"
    ran = CliRunner().invoke(app, ["swept", "--scale", "smoke", "--workers", "2", "--out", str(out)])
    killer.join()
    assert ran.exit_code == 0, ran.stderr
    done = epochs_done(ledger)
    assert len(done) == POINTS * 3
    assert sum(done.values()) <= POINTS * 3 + 1, "more was repeated than the epoch that was interrupted"
    assert f"{POINTS} of {POINTS}: swept-online" in ran.output
    assert "* Best score: 3.00 (1 run) at forward horizon 8, backward horizon 4." in ran.output
    assert "† The paper's choice is forward horizon 8, backward horizon 3.33333; nearest here" in ran.output
    page = out / "sweep-swept/smoke/online-over-alpha_fwd-alpha_bwd.html"
    assert f"Map: {page}" in ran.output
    assert "pruned" not in ran.output
    assert ran.stderr == "A worker was killed by signal 9. Its run is free for others.\n"
    assert "×" in page.read_text(), "the run that diverged is not shown"
    record = read_record(page.parent / "swept-online-alpha_fwd=0.5-alpha_bwd=0.75-seed0")
    assert record.finished
    assert (record.experiment, record.base) == ("sweep-swept", "swept")


def test_two_commands_share_a_storage_and_one_survives_the_other(tmp_path: Path, ledger: Path) -> None:
    shared = ("swept", "--scale", "smoke", "--workers", "1", "--storage", f"sqlite:///{tmp_path / 'shared.db'}")
    victim = start(*shared, "--out", "here", directory=tmp_path)
    heir = start(*shared, "--out", "there", directory=tmp_path)
    wait_for(lambda: all((tmp_path / out / "sweep-swept").exists() for out in ("here", "there")), "both to begin")
    wait_for(lambda: len({line.split()[0] for line in ledger.read_text().splitlines()}) == 2, "both to work")
    victim.kill()
    victim.communicate()
    output, error = heir.communicate(timeout=120)
    assert heir.returncode == 0, error
    done = epochs_done(ledger)
    assert len(done) == POINTS * 3
    repeated = {key.split()[0] for key, times in done.items() if times > 1}
    assert len(repeated) <= 1, "more than the run that was interrupted was done again"
    assert "* Best score: 3.00" in output

    before = ledger.read_text()
    again = CliRunner().invoke(app, [*shared, "--out", str(tmp_path / "here")])
    assert again.exit_code == 0, again.stderr
    assert "* Best score: 3.00" in again.output
    assert ledger.read_text() == before, "what was done was done again"


@pytest.mark.usefixtures("_quickly")
def test_an_error_in_a_run_ends_the_command_with_its_message(tmp_path: Path) -> None:
    directory = tmp_path / "out/sweep-swept/smoke/swept-online-alpha_fwd=0.5-seed0"
    directory.mkdir(parents=True)
    (directory / "checkpoint.pt").write_text("not a checkpoint")
    out = str(tmp_path / "out")
    ran = CliRunner().invoke(
        app, ["swept", "--scale", "smoke", "--grid", "alpha_fwd=1/2,7/8", "--workers", "1", "--out", out]
    )
    assert ran.exit_code == 1
    assert ran.stderr.count(f"{directory / 'checkpoint.pt'} cannot be read") == 1, ran.stderr
    assert "of 2 runs are left. The same command goes on." in ran.stderr


def test_ctrl_c_stops_the_workers_and_frees_their_runs(tmp_path: Path, ledger: Path) -> None:
    command = start("swept", "--scale", "smoke", "--workers", "2", "--out", "out", directory=tmp_path)
    wait_for(lambda: len(ledger.read_text().splitlines()) > 3, "workers to begin")
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does
    _, error = command.communicate(timeout=60)
    assert command.returncode == 130
    assert error == "Stopped by Ctrl-C. The same command goes on.\n"
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'out/sweep-swept/study.db'}")
    assert not claims_module.running(study.get_trials())
    begun = ledger.read_text()
    time.sleep(1)
    assert ledger.read_text() == begun, "a worker is still at work"


def start(*options: str, directory: Path) -> subprocess.Popen[str]:
    """The command, in a process group of its own, with quick signs of life."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "swept.py"), *options],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1", "SECONDS_AN_EPOCH": "0.2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
