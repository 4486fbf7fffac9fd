"""What the terminal shows while experiments run: a bar on a terminal, a line for each epoch elsewhere."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from onlinenorm.experiments.runs import Row

SHOWN = 4  # metrics, at most


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        batches = (task.speed or 0) * task.fields["batches"]  # the task counts in epochs
        return Text(f"{batches:.3g} batches/s" if batches else "", no_wrap=True)


class TerminalDisplay:
    """Shows one run at a time. Use it as a context."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[where]}", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[metrics]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            _Speed(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._key, self._total, self._step = "", 0, 1.0

    def __enter__(self) -> "TerminalDisplay":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, title: str, key: str, done: int, total: int) -> None:
        """A run begins, or goes on: of so many epochs (or whatever `key` says) some are done."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._title, self._key, self._total = title, key.replace("_", " "), total
        self._task = self._progress.add_task(title, total=total, completed=done, where="", metrics="", batches=0)
        if done:
            self._console.print(f"{title}: goes on after {self._key} {done} of {total}", highlight=False)

    def batches(self, position: int, count: int) -> None:
        """So many batches follow; how many, or 0 where that is not known."""
        if self._task is not None:
            self._step = 1 / count if count else 0.0
            where = f"{self._key} {position}/{self._total}"
            self._progress.update(self._task, completed=position - 1, where=where, batches=count)

    def advance(self) -> None:
        """A batch is done."""
        if self._task is not None:
            self._progress.advance(self._task, self._step)

    def row(self, row: Row) -> None:
        """Metrics were logged."""
        metrics = {key: value for key, value in row.items() if isinstance(value, float)}
        text = "diverged  " * row.get("diverged", False) + "  ".join(
            f"{key.replace('_', ' ')} {value:.4g}" for key, value in list(metrics.items())[:SHOWN]
        )
        if self._task is not None:
            self._progress.update(self._task, metrics=text)
        if not self._console.is_terminal:
            where = f"{self._key} {row.get(self._key.replace(' ', '_'), '')} of {self._total}: " if self._key else ""
            self._console.print(f"{getattr(self, '_title', '')}: {where}{text}", highlight=False, soft_wrap=True)
