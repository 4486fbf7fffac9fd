"""What a sweep found, as a map: a table for the terminal, a page with a chart."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from onlinenorm.experiments.charts import STYLE, Axis, Line, heat_map, line_chart
from onlinenorm.experiments.document import document
from onlinenorm.experiments.experiment import Metric
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import Best, number
from onlinenorm.experiments.sweep.grid import Grid

Point = tuple[float, ...]  # a value of each grid
BEST, PAPER = "*", "†"  # marks in tables


@dataclass(frozen=True)
class Map:
    """The metric over one grid or two.

    Attributes:
        title: of table and page.
        norm: the normaliser.
        metric: what was measured.
        grids: the first runs along, the second up.
        found: what was measured at each point.
        pruned: points that have no number, as their runs were ended early.
        paper: the paper's choice for each grid's setting.
    """

    title: str
    norm: str
    metric: Metric
    grids: tuple[Grid, ...]
    found: Mapping[Point, Best]
    pruned: frozenset[Point]
    paper: Point

    @property
    def best(self) -> Point:
        """Where the median over the seeds is best."""
        sign = 1 if self.metric.best == "highest" else -1
        return max(self.found, key=lambda point: sign * self.found[point].median)

    @property
    def nearest(self) -> Point | None:
        """The point nearest to the paper's choice; None where that lies outside."""
        values = [grid.nearest(value) for grid, value in zip(self.grids, self.paper, strict=True)]
        return None if None in values else tuple(value for value in values if value is not None)

    def sentences(self) -> list[str]:
        """The best, and the paper's choice."""
        if not self.found:
            return []
        form = self.metric.form
        best = f"{BEST} Best {self.metric.label}: {self.found[self.best].describe(form)} at {self._where(self.best)}."
        choice = f"{PAPER} The paper's choice is {self._where(self.paper)}"
        if self.nearest is None:
            return [best, f"{choice}, outside this map."]
        found = self.found.get(self.nearest)
        near = "" if self.nearest == self.paper else f"; nearest here is {self._where(self.nearest)}"
        return [best, f"{choice}{near}: {found.describe(form) if found else 'no number yet'}."]

    def show(self, console: Console) -> None:
        """As a table, which is never narrower than its numbers, and in words."""
        axes = " ".join(f"{grid.label} {arrow}" for grid, arrow in zip(self.grids, "→↑", strict=False))
        console.print(f"{self.title}; {axes}", highlight=False, soft_wrap=True)
        table = self._table()
        console.width = max(
            console.width, Measurement.get(console, console.options.update(max_width=1000), table).maximum
        )
        console.print(table)
        for sentence in self.sentences():
            console.print(sentence, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        along, *up = self.grids
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("", justify="right")
        for value in along.values:
            table.add_column(f"{along.place(value):g}", justify="right")
        if not up:
            table.add_row("", *(self._cell((value,)) for value in along.values))
        for height in reversed(up[0].values) if up else ():
            table.add_row(f"{up[0].place(height):g}", *(self._cell((value, height)) for value in along.values))
        return table

    def page(self) -> str:
        """A file that needs nothing beside itself."""
        note = "Framed: the best, and the paper's choice or the nearest to it. ×: diverged." if self.grids[1:] else ""
        body = [f"<h1>{escape(self.title)}</h1>", *(f"<p>{escape(sentence)}</p>" for sentence in self.sentences())]
        body += [f'<div class="charts">{self._chart()}</div>', f'<p class="faint">{escape(note)}</p>']
        return document(self.title, "\n".join(body), STYLE)

    def _chart(self) -> str:
        places = {point: self._places(point) for point in self.found}
        along, *up = self.grids
        if up:
            return heat_map(
                self.metric.label,
                {(at[0], at[1]): self.found[point].median for point, at in places.items()},
                along.label,
                up[0].label,
                self._form(),
                highest=self.metric.best == "highest",
                marked=[(at[0], at[1]) for point, at in places.items() if point in (self.best, self.nearest)],
            )
        found = sorted((at[0], self.found[point]) for point, at in places.items())
        normalizer = NORMALIZERS[self.norm]
        line = Line(
            normalizer.label,
            normalizer.colour,
            [(x, best.median) for x, best in found],
            [(x, min(best.values), max(best.values)) for x, best in found],
        )
        positive = all(along.place(value) > 0 for value in along.values)
        x = Axis(along.label, "two" if along.is_decay else "log" if positive else "linear")
        return line_chart(self.metric.label, [line], x, Axis(self.metric.label), self.metric.form)

    def _form(self) -> str:
        """Three digits, for which even a map of 13 columns has room."""
        known = [abs(best.median) for best in self.found.values() if math.isfinite(best.median)]
        return f"{{:.{max(0, 2 - math.floor(math.log10(max([*known, 0.1]))))}f}}"

    def _cell(self, point: Point) -> Text:
        found = self.found.get(point)
        text = number(found.median, self.metric.form) if found else "pruned" if point in self.pruned else "–"
        if found and point == self.best:
            return Text(f"{BEST}{text}", style="bold")
        return Text(f"{PAPER}{text}" if point == self.nearest else text)

    def _places(self, point: Point) -> Sequence[float]:
        return [grid.place(value) for grid, value in zip(self.grids, point, strict=True)]

    def _where(self, point: Point) -> str:
        places = zip(self.grids, self._places(point), strict=True)
        return ", ".join(f"{grid.label} {place:g}" for grid, place in places)
