"""The results as tables for the terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onlinenorm.bench.goals import Verdict
from onlinenorm.bench.results import Result, memory_over_batch, time_over


def print_machine(console: Console, machine: dict[str, Any], versions: dict[str, str]) -> None:
    """Where this was measured."""
    caches = ", ".join(f"{level} {size >> 10:,} KiB" for level, size in machine["caches"].items())
    console.print(
        f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['threads']} threads, "
        f"{caches or 'caches unknown'}\nonlinenorm {versions['onlinenorm']}, torch {versions['torch']}",
        style="dim", highlight=False,
    )  # fmt: skip


def print_results(console: Console, results: Sequence[Result]) -> None:
    """One table for each kind of case and mode."""
    for kind, mode in dict.fromkeys((r["kind"], r["mode"]) for r in results):
        some = [r for r in results if (r["kind"], r["mode"]) == (kind, mode)]
        what = "a training step" if kind == "step" else "forward + backward"
        table = _table(f"{mode}: time of {what} ÷ each peer's")
        table.add_column("network" if kind == "step" else "shape", no_wrap=True)
        columns = {header: cell for header, cell in _COLUMNS.items() if any(map(cell, some))}
        for header in columns:
            table.add_column(header, justify="right", no_wrap=True)
        for r in some:
            table.add_row(r["name"], *(cell(r) for cell in columns.values()))
        console.print(table)
        console.print()


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """The goals that concern what was measured."""
    table = _table("Goals")
    for header in ("ratio", "mode"):
        table.add_column(header)
    for header in ("", "now", "goal"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for v in verdicts:
        if v["reached"] is not None:
            table.add_row(
                v["title"],
                v["mode"],
                v["statistic"] if v["cases"] > 1 else "",
                _plain(v["mean"] if v["statistic"] == "mean" else v["worst"]),
                _plain(v["goal"]),
                "[green]reached[/]" if v["reached"] else "[red]not reached[/]",
            )
    if table.row_count:
        console.print(table)
    measured = {v["title"] for v in verdicts if v["reached"] is not None}
    missing = dict.fromkeys(v["title"] for v in verdicts if v["title"] not in measured)
    if missing:
        console.print(f"Not among the cases measured: {'; '.join(missing)}", style="dim", highlight=False)


def _batch(r: Result) -> str:
    if "batch" not in r["peers"]:
        return ""
    ratio = r["peers"]["batch"]["online_over_it"]["total"]
    return f"{_shaded(ratio['median'])} ±{(ratio['q3'] - ratio['q1']) / 2:.2f}"


def _default_allocator(r: Result) -> str:
    return _shaded(r["default_allocator"]["total"]["median"]) if r["default_allocator"] else ""


_COLUMNS: dict[str, Callable[[Result], str]] = {
    "batch": _batch,
    "default\nmalloc": _default_allocator,
    "group": lambda r: _shaded(time_over(r, "group")),
    "inst.": lambda r: _shaded(time_over(r, "instance")),
    "layer": lambda r: _shaded(time_over(r, "layer")),
    "port.": lambda r: _shaded(time_over(r, "portable")),
    "floor": lambda r: _plain(time_over(r, "floor")),
    "bytes\nkept": lambda r: _plain(memory_over_batch(r, "saved")),
    "bytes\npeak": lambda r: _plain(memory_over_batch(r, "peak")),
}


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _shaded(value: float | None) -> str:
    return "" if value is None else f"[{'green' if value <= 1 else 'red'}]{value:.2f}[/]"
