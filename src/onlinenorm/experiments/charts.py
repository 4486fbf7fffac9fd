"""Charts as SVG, in one style for all pages: each curve named where it ends, in its normaliser's colour.

They are drawn by hand, so that a page needs nothing beside itself and its charts follow the reader's colours and
width. Every function gives the text of a <figure>. `STYLE` is their part of a page's style sheet; it builds on the
variables of `document.STYLE`.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

STYLE = """
figure { margin: 0 } figcaption { color: var(--faint); font-size: .9rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem }
.charts > * { background: var(--card); border-radius: .5rem; padding: .75rem; min-width: 0 }
figure > svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; fill: var(--ink) }
svg .tick { fill: var(--faint); font-size: 12px } svg .grid { stroke: var(--line) }
svg .in { --shown: var(--colour) }
@media (prefers-color-scheme: dark) { svg .in { --shown: color-mix(in srgb, var(--colour), white 30%) } }
svg .curve { fill: none; stroke: var(--shown); stroke-width: 2.2; stroke-linejoin: round }
svg .dashed { stroke-dasharray: 6 4 } svg .band { fill: var(--shown); fill-opacity: .15 }
svg .lead { stroke: var(--shown) } svg circle { fill: var(--shown) }
svg .box { fill: var(--shown); fill-opacity: .25; stroke: var(--shown); stroke-width: 1.5 }
svg .reference { stroke: var(--faint); stroke-width: 1.5; fill: none }
svg .facet { stroke: var(--faint); stroke-width: .4; stroke-linejoin: round }
svg .cell { font-size: 10px; text-anchor: middle } svg .mark { fill: none; stroke: #d55e00; stroke-width: 2.5 }
"""

WIDTH, HEIGHT = 380, 270
TOP, BOTTOM = 10, 40
DOTS = 40  # longer curves are drawn without a dot at each point
ROW = 40  # of a box chart
PALE, DEEP = (238, 245, 252), (8, 64, 129)  # of heat maps and surfaces: told apart by lightness alone
FACETS = 20  # of a surface, along each side

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """One of a chart's axes.

    Attributes:
        label: what is measured along it.
        scale: "whole" is linear with ticks at whole numbers, "two" logarithmic with ticks at powers of two.
        limits: the range shown, where that is not all values.
    """

    label: str
    scale: Literal["linear", "whole", "log", "two"] = "linear"
    limits: tuple[float, float] | None = None

    def along(self, value: float) -> float:
        """How far along the axis a value is, in some unit; not finite if it has no place there."""
        if self.scale in ("linear", "whole"):
            return value
        return math.log(value) if value > 0 else -math.inf

    def text(self, tick: float) -> str:
        """A tick in figures."""
        if self.scale == "log" and not 1e-3 < tick < 1e4 and f"{tick:e}".startswith("1.000000"):
            return "10" + f"{round(math.log10(tick))}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"{tick:g}"

    def ticks(self, values: Sequence[float]) -> list[float]:
        """Round numbers over the values."""
        return {"linear": ticks, "whole": whole_ticks, "log": log_ticks, "two": two_ticks}[self.scale](values)


@dataclass(frozen=True)
class Line:
    """A curve: its name, its colour, its points, and the spread around it as (x, low, high)."""

    label: str
    colour: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Box:
    """A row of a box chart: its name, its colour, its values, and what the paper has: low, median, high."""

    label: str
    colour: str
    values: Sequence[float]
    reference: tuple[float, float, float] | None = None


# Charts


def line_chart(title: str, lines: Sequence[Line], x: Axis, y: Axis, form: str = "{:.4g}") -> str:
    """Curves over x, each named at its end; points that have no place, such as infinity, are left out."""
    drawn = [(line, [p for p in line.points if _placed(p, x, y)]) for line in lines]
    drawn = [(line, points) for line, points in drawn if points]
    if not drawn:
        return empty(title)
    shown = [value for line, points in drawn for value in (*(v for _, v in points), *_edges(line, y))]
    y_ticks = y.ticks(y.limits or shown)
    x_ticks = x.ticks([p for _, points in drawn for p, _ in points])
    if y.limits:
        y_ticks = [tick for tick in y_ticks if y.limits[0] <= tick <= y.limits[1]]
    left = 12 + max(_width(y.text(tick)) for tick in y_ticks)
    right = WIDTH - 14 - max(_width(line.label) for line, _ in drawn)
    at_x = _place(x, (x_ticks[0], x_ticks[-1]), left, right)
    at_y = _place(y, y.limits or (y_ticks[0], y_ticks[-1]), HEIGHT - BOTTOM, TOP)

    parts = [_grid(y, y_ticks, at_y, left, right), _scale(x, x_ticks, at_x, (left + right) / 2, HEIGHT)]
    if cut := y.limits is not None or any(line.band for line, _ in drawn):  # by a nested <svg>
        sides = f"{right + 3:.1f} {HEIGHT - BOTTOM - TOP + 6}".split()
        place = f'y="{TOP - 3}" width="{sides[0]}" height="{sides[1]}"'
        parts.append(f'<svg {place} viewBox="0 {TOP - 3} {sides[0]} {sides[1]}">')
    for line, points in drawn:
        parts.append(_group(line.colour) + _band(line, at_x, at_y))
        path = "L".join(f"{at_x(a):.1f} {at_y(b):.1f}" for a, b in points)
        parts.append(f'<path class="curve{" dashed" * line.dashed}" d="M{path}"/>')
        if len(points) <= DOTS:
            parts.extend(
                f'<circle cx="{at_x(a):.1f}" cy="{at_y(b):.1f}" r="2.5">'
                f"<title>{escape(line.label)}, {escape(x.label)} {a:g}: {form.format(b)}</title></circle>"
                for a, b in points
            )
        parts.append("</g>")
    parts.append("</svg>" * cut)
    ends = [(at_x(points[-1][0]), min(max(at_y(points[-1][1]), TOP), HEIGHT - BOTTOM)) for _, points in drawn]
    heights = spread([b for _, b in ends], gap=16, limits=(TOP, HEIGHT - BOTTOM))
    for (line, _), (a, b), height in zip(drawn, ends, heights, strict=True):
        parts.append(
            f'{_group(line.colour)}<path class="lead" d="M{a + 3:.1f} {b:.1f}L{right + 10:.1f} {height:.1f}"/>'
        )
        parts.append(f'<text x="{right + 12:.1f}" y="{height + 4:.1f}">{escape(line.label)}</text></g>')
    last = ", ".join(f"{line.label} {form.format(points[-1][1])}" for line, points in drawn)
    return _figure(title, f"{title}; last: {last}", HEIGHT, parts)


def box_chart(title: str, boxes: Sequence[Box], axis: Axis, form: str = "{:.4g}") -> str:
    """A row for each: all values, the box of the middle half and the median; below, thin, what the paper reports."""
    shown = [sorted(v for v in box.values if math.isfinite(axis.along(v))) for box in boxes]
    references = [v for box in boxes for v in box.reference or () if math.isfinite(axis.along(v))]
    every = [v for values in shown for v in values] + references
    if not every:
        return empty(title)
    marks = axis.ticks(axis.limits or every)
    left = 8 + max(_width(box.label) for box in boxes)
    height = TOP + ROW * len(boxes) + BOTTOM
    at = _place(axis, axis.limits or (marks[0], marks[-1]), left + 6, WIDTH - 14)
    parts = [f'<path class="grid" d="M{at(tick):.1f} {TOP}V{height - BOTTOM}"/>' for tick in marks]
    parts.append(_scale(axis, marks, at, (left + WIDTH) / 2, height))
    for i, (box, values) in enumerate(zip(boxes, shown, strict=True)):
        middle = TOP + ROW * (i + 0.4)
        lost = len(box.values) - len(values)
        parts.append(f'<text x="{left:.1f}" y="{middle + 4:.1f}" text-anchor="end">{escape(box.label)}</text>')
        parts.append(_group(box.colour))
        if len(values) > 1:
            low, half, high = statistics.quantiles(values, n=4, method="inclusive")
            parts.append(f'<path class="lead" d="M{at(values[0]):.1f} {middle:.1f}H{at(values[-1]):.1f}"/>')
            sides = f'width="{at(high) - at(low):.1f}" height="16"'
            parts.append(
                f'<rect class="box" x="{at(low):.1f}" y="{middle - 8:.1f}" {sides}/>'
                f'<path class="curve" d="M{at(half):.1f} {middle - 8:.1f}v16"/>'
            )
        parts.extend(
            f'<circle cx="{at(value):.1f}" cy="{middle:.1f}" r="2.5"><title>{form.format(value)}</title></circle>'
            for value in values
        )
        parts.append("</g>")
        if lost:
            parts.append(f'<text class="tick" x="{left + 8:.1f}" y="{middle + 20:.1f}">{lost} diverged</text>')
        if box.reference:
            low, half, high = map(at, box.reference)
            below = middle + 14
            parts.append(
                f'<path class="reference" d="M{low:.1f} {below:.1f}H{high:.1f}M{half:.1f} {below - 4:.1f}v8"/>'
            )
    medians = ", ".join(
        f"{box.label} {form.format(statistics.median(v))}" for box, v in zip(boxes, shown, strict=True) if v
    )
    return _figure(title, f"{title}; medians: {medians}", height, parts)


def heat_map(
    title: str,
    cells: Mapping[Point, float],
    x: str,
    y: str,
    form: str,
    highest: bool = True,
    marked: Sequence[Point] = (),
) -> str:
    """Cells with their numbers over two logarithmic grids, deeper where better; some may be marked with a frame.

    The worst fifth shares the palest colour: few failures would leave the others too alike to tell apart.
    """
    known = sorted(value for value in cells.values() if math.isfinite(value))
    if not known:
        return empty(title)
    worst, best = (known[len(known) // 5], known[-1]) if highest else (known[-1 - len(known) // 5], known[0])
    columns, rows = sorted({a for a, _ in cells}), sorted({b for _, b in cells})
    left, top = 56, 4
    width, height = (WIDTH - left - 4) / len(columns), 22
    bottom = top + height * len(rows)

    def corner(a: float, b: float) -> Point:
        return left + width * columns.index(a), bottom - height * (rows.index(b) + 1)

    parts = []
    for (a, b), value in cells.items():
        share = min(max((value - worst) / (best - worst), 0), 1) if best != worst and math.isfinite(value) else 0.0
        u, v = corner(a, b)
        text = form.format(value) if math.isfinite(value) else "×"
        parts.append(
            f'<rect x="{u:.1f}" y="{v:.1f}" width="{width:.1f}" height="{height}" fill="{_shade(share)}">'
            f"<title>{escape(x)} {a:g}, {escape(y)} {b:g}: {text}</title></rect>"
            f'<text class="cell" x="{u + width / 2:.1f}" y="{v + 15:.1f}" fill="{"#fff" if share > 0.5 else "#000"}" '
            f'pointer-events="none">{text}</text>'
        )
    for a, b in marked:
        if (a, b) in cells:
            u, v = corner(a, b)
            parts.append(f'<rect class="mark" x="{u:.1f}" y="{v:.1f}" width="{width:.1f}" height="{height}"/>')
    for a in columns:
        place = f'x="{left + width * (columns.index(a) + 0.5):.1f}" y="{bottom + 14:.1f}"'
        parts.append(f'<text class="tick cell" {place}>{_horizon(a)}</text>')
    for b in rows:
        place = f'x="{left - 5}" y="{bottom - height * (rows.index(b) + 0.5) + 4:.1f}"'
        parts.append(f'<text class="tick" {place} text-anchor="end">{_horizon(b)}</text>')
    middle = (top + bottom) / 2
    parts.append(
        f'<text class="tick" x="{(left + WIDTH) / 2}" y="{bottom + 30:.1f}" text-anchor="middle">{escape(x)}</text>'
    )
    turn = f'transform="rotate(-90 10 {middle:.1f})"'
    parts.append(f'<text class="tick" x="10" y="{middle:.1f}" text-anchor="middle" {turn}>{escape(y)}</text>')
    return _figure(title, f"{title}; best {form.format(best)}", bottom + 36, parts)


def surface(title: str, heights: Mapping[Point, float], x: str, y: str, limits: Point, form: str = "{:.3g}") -> str:
    """Heights over a grid, deeper where higher; x grows to the back, y to the front.

    Args:
        title: of the figure.
        heights: at each (x, y).
        x: name of the first axis.
        y: name of the second.
        limits: the lowest and the highest that would fit, so that surfaces can be compared.
        form: of numbers.
    """
    columns, rows = (sorted(set(values)) for values in zip(*heights, strict=True))
    columns, rows = (sorted({*values[:: math.ceil(len(values) / FACETS)], values[-1]}) for values in (columns, rows))
    columns.reverse()
    across, down = (size / max(len(columns) + len(rows) - 2, 1) for size in (300, 150))
    low, high = limits

    def share(i: int, j: int) -> float:
        return (heights[columns[i], rows[j]] - low) / ((high - low) or 1)

    def place(i: int, j: int, raised: float) -> Point:
        return WIDTH / 2 + across * (j - i), TOP + 110 + down * (i + j) - 100 * raised

    parts = []
    for i, j in sorted(itertools.product(range(len(columns) - 1), range(len(rows) - 1)), key=sum):
        corners = {corner: share(*corner) for corner in ((i, j), (i + 1, j), (i + 1, j + 1), (i, j + 1))}
        path = "L".join(f"{u:.1f} {v:.1f}" for u, v in (place(*at, raised) for at, raised in corners.items()))
        parts.append(f'<path class="facet" fill="{_shade(statistics.fmean(corners.values()))}" d="M{path}Z"/>')
    front = place(len(columns) - 1, len(rows) - 1, 0)
    for corner, turn, label in (
        (place(len(columns) - 1, 0, 0), 26.6, f"{_signed(rows[0])}  {y}  {_signed(rows[-1])}"),
        (place(0, len(rows) - 1, 0), -26.6, f"{_signed(columns[-1])}  {x}  {_signed(columns[0])}"),
    ):
        u, v = (corner[0] + front[0]) / 2, (corner[1] + front[1]) / 2 + 18
        turned = f'text-anchor="middle" transform="rotate({turn} {u:.1f} {v:.1f})"'
        parts.append(f'<text class="tick" x="{u:.1f}" y="{v:.1f}" {turned}>{escape(label)}</text>')
    lowest, highest = (form.format(value).replace("-", "−") for value in (min(heights.values()), max(heights.values())))
    parts.append(f'<text class="tick" x="0" y="{TOP + 4}">{lowest} to {highest}</text>')
    return _figure(title, f"{title}; from {lowest} to {highest}", front[1] + 24, parts)


def empty(title: str) -> str:
    """What stands in a chart's place where no value is a number."""
    return f"<figure><figcaption>{escape(title)}</figcaption><p>No number to draw.</p></figure>"


# Their parts


def _placed(point: Point, x: Axis, y: Axis) -> bool:
    return math.isfinite(x.along(point[0])) and math.isfinite(y.along(point[1]))


def _edges(line: Line, y: Axis) -> list[float]:
    return [edge for _, low, high in line.band for edge in (low, high) if math.isfinite(y.along(edge))]


def _place(axis: Axis, limits: Point, start: float, end: float) -> Callable[[float], float]:
    low, high = map(axis.along, limits)

    def place(value: float) -> float:
        share = (axis.along(value) - low) / ((high - low) or 1)
        return start + (end - start) * min(max(share, -2), 3)  # infinity is far enough outside

    return place


def _band(line: Line, at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    if not line.band:
        return ""
    lows = [f"{at_x(a):.1f} {at_y(low):.1f}" for a, low, _ in line.band]
    highs = [f"{at_x(a):.1f} {at_y(high):.1f}" for a, _, high in line.band]
    return f'<path class="band" d="M{"L".join(lows + highs[::-1])}Z"/>'


def _grid(axis: Axis, marks: Sequence[float], at: Callable[[float], float], left: float, right: float) -> str:
    return "".join(
        f'<path class="grid" d="M{left:.1f} {at(tick):.1f}H{right:.1f}"/>'
        f'<text class="tick" x="{left - 6:.1f}" y="{at(tick) + 4:.1f}" text-anchor="end">{axis.text(tick)}</text>'
        for tick in marks
    )


def _scale(axis: Axis, marks: Sequence[float], at: Callable[[float], float], middle: float, height: float) -> str:
    texts = [(at(tick), height - BOTTOM + 17, axis.text(tick)) for tick in marks]
    texts.append((middle, height - 5, escape(axis.label)))
    return "".join(f'<text class="tick" x="{a:.1f}" y="{b:.1f}" text-anchor="middle">{t}</text>' for a, b, t in texts)


def _group(colour: str) -> str:
    return f'<g class="in" style="--colour:{escape(colour)}">'


def _figure(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    open_svg = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(description)}">'
    return f"<figure><figcaption>{escape(title)}</figcaption>{open_svg}{''.join(parts)}</svg></figure>"


def _shade(share: float) -> str:
    return "rgb({},{},{})".format(*(round(p + (d - p) * share) for p, d in zip(PALE, DEEP, strict=True)))


def _signed(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def _horizon(value: float) -> str:
    return f"{value / 1024:g}k" if value and value % 1024 == 0 else f"{value:g}"


def _width(text: str) -> float:
    """About how wide a text is in the chart's font, or a little less than that."""
    wide = sum(letter in "mwMW" for letter in text)
    narrow = sum(letter in "ijlrtfI.,: ()-" for letter in text)
    capital = sum(letter.isupper() for letter in text)
    return 8 * len(text) + 4.5 * wide - 3.4 * narrow + 1.5 * capital


# Ticks


def ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, four to eight, that enclose the values."""
    span, size = max(values) - min(values), max(map(abs, values))
    if span <= 1e-9 * max(size, 1e-30):
        span = 0.1 * (size if size > 1e-30 else 1)
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= 6)
    first, last = math.floor(min(values) / step), math.ceil(max(values) / step)
    return [float(f"{i * step:.10g}") for i in range(first, max(last, first + 1) + 1)]


def log_ticks(values: Sequence[float]) -> list[float]:
    """The 1, 2, 5, 10, ... that enclose the values; over many decades some powers of ten, over less than one more."""
    if max(values) < 5 * min(values) and (round_ones := ticks(values))[0] > 0:
        return round_ones
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    if high - low > 3:
        step = math.ceil((high - low) / 7)
        return [float(f"1e{exponent}") for exponent in range(low, high + step, step)]
    grid = [float(f"{m}e{exponent}") for exponent in range(low - 1, high + 2) for m in (1, 2, 5)]
    first = max(i for i, tick in enumerate(grid) if tick <= min(values))
    last = min(i for i, tick in enumerate(grid) if tick > max(values))
    return grid[first : last + 1]


def two_ticks(values: Sequence[float]) -> list[float]:
    """Powers of two that enclose the values, at most nine."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    high = max(high, low + 1)
    step = math.ceil((high - low) / 8)
    return [2.0**exponent for exponent in range(low, high + step, step)]


def whole_ticks(values: Sequence[float]) -> list[float]:
    """The first and the last value, and round whole numbers between them."""
    first, last = min(values), max(values)
    step = next(m * 10**e for e in itertools.count() for m in (1, 2, 5) if (last - first) / (m * 10**e) <= 6)
    between = range(math.ceil(first / step) * step, math.floor(last), step)
    return sorted({first, *(float(tick) for tick in between if first + step / 2 < tick < last - step / 2), last})


def spread(heights: Sequence[float], gap: float, limits: Point = (-math.inf, math.inf)) -> list[float]:
    """Move labels apart until neighbours are `gap` away, around where they want to be but within the limits."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [heights[i] for i in order]
    for _ in range(100):
        for i in range(len(placed) - 1):
            lack = gap - (placed[i + 1] - placed[i])
            if lack > 1e-3:
                placed[i] -= lack / 2
                placed[i + 1] += lack / 2
    low, high = limits
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], high)
        high = placed[i] - gap
    for i in range(len(placed)):
        placed[i] = max(placed[i], low)
        low = placed[i] + gap
    return [placed[order.index(i)] for i in range(len(heights))]
