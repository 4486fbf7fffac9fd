"""Measure all cases in this process, the default allocator's in a second one, and report."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from onlinenorm import machine
from onlinenorm.bench import allocator, table
from onlinenorm.bench.cases import LayerCase
from onlinenorm.bench.goals import Verdict, verdicts
from onlinenorm.bench.measure import race
from onlinenorm.bench.memory import Memory, measure_memory
from onlinenorm.bench.peers import Normaliser, best_floor, contestants
from onlinenorm.bench.results import Result, make_result
from onlinenorm.bench.steps import StepCase, step_contestants

SCHEMA = 1
BUSY = 0.3  # cores that others use, from which on they disturb
Case = LayerCase | StepCase


@dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    cases: Sequence[Case]
    peers: list[str]
    rounds: int
    threads: int
    allocator: str  # "both", "mapped" or "default"
    memory: bool
    json: Path | None
    again: list[str]  # the options that ask for the same cases once more


def run(settings: Settings) -> bool:
    """Measure, print the tables, write the JSON. False if the user interrupted; what was done is reported still."""
    torch.set_num_threads(settings.threads)
    if settings.allocator != "default":
        allocator.keep_mapped(_reserve(settings.cases))
    busy = machine.busy_cores()
    if busy > BUSY:
        print(f"Other work keeps {busy:.1f} cores busy: the ratios will say little.", file=sys.stderr)
    results: list[Result] = []
    finished = False
    try:
        measure(settings, results)
        if settings.allocator == "both" and "batch" in settings.peers:
            measure_default_allocator(settings, results)
        finished = True
    except KeyboardInterrupt:
        pass
    judged = verdicts(results, machine.last_level_cache())
    console = Console()
    table.print_machine(console, machine.describe(), machine.versions())
    table.print_results(console, results)
    table.print_verdicts(console, judged)
    if settings.json is not None:
        settings.json.write_text(json.dumps(report(settings, results, judged, finished, busy), indent=1) + "\n")
    return finished


def measure(settings: Settings, results: list[Result]) -> None:
    """Append each case's result to `results` as it is done, so that an interrupt loses only the case it hits."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(),
        console=Console(stderr=True), auto_refresh=False, transient=True,  # no thread beside what is timed
    ) as progress:  # fmt: skip
        bar = progress.add_task("", total=len(settings.cases) * settings.rounds)
        what = "default allocator: " if settings.allocator == "default" else ""
        for number, case in enumerate(settings.cases):
            progress.update(bar, completed=number * settings.rounds, description=f"{what}{case.name}, {case.mode.name}")
            results.append(_measure_case(case, settings, _ticker(progress, bar)))


def measure_default_allocator(settings: Settings, results: Sequence[Result]) -> None:
    """Run the command again in a process of its own, and add its ratios to the results of the same cases."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "default.json"
        options = ["--allocator", "default", "--peers", "batch", "--no-memory", "--json", str(file)]
        command = [sys.executable, "-m", "onlinenorm", "bench", *settings.again, *options]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        twins = {(r["name"], r["mode"]): r for r in json.loads(file.read_text())["results"]}
    for result in results:
        if batch := twins[result["name"], result["mode"]]["peers"].get("batch"):
            result["default_allocator"] = batch["online_over_it"]


def report(
    settings: Settings, results: Sequence[Result], judged: Sequence[Verdict], finished: bool, busy: float
) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "schema": SCHEMA,
        "command": shlex.join(sys.argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "finished": finished,
        "machine": machine.describe() | {"busy_cores_before": busy},
        "versions": machine.versions(),
        "commit": machine.git_commit(),
        "settings": {
            "peers": settings.peers,
            "rounds": settings.rounds,
            "threads": settings.threads,
            "allocator": settings.allocator,
        },
        "results": results,
        "goals": judged,
    }


def _measure_case(case: Case, settings: Settings, tick: Callable[[], None]) -> Result:
    if isinstance(case, StepCase):
        return make_result(case, race(step_contestants(case, settings.peers), settings.rounds, tick), {})
    peers = contestants(case, settings.peers, settings.threads)
    memory: dict[str, Memory] = {}
    if settings.memory:
        memory = {peer.name: measure_memory(peer) for peer in peers if isinstance(peer, Normaliser)}
    return make_result(case, best_floor(race(peers, settings.rounds, tick)), memory)


def _reserve(cases: Sequence[Case]) -> int:
    """Bytes to map beforehand: 16 of the largest tensors, but no more than a quarter of what is free."""
    largest = max((case.activation_bytes for case in cases if isinstance(case, LayerCase)), default=64 << 20)
    return min(16 * largest, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


def _ticker(progress: Progress, bar: TaskID) -> Callable[[], None]:
    drawn = time.monotonic()
    progress.refresh()

    def tick() -> None:
        nonlocal drawn
        progress.advance(bar)
        if time.monotonic() - drawn > 0.5:
            progress.refresh()
            drawn = time.monotonic()

    return tick
