"""The report's page: each table and figure of the paper beside what was measured."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from html import escape

import onlinenorm
from onlinenorm.experiments.charts import STYLE as CHART_STYLE
from onlinenorm.experiments.document import document, dot
from onlinenorm.experiments.experiment import SCALES, Experiment, Scale, Summary
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import FIGURES, MEMORY, REPORTED
from onlinenorm.experiments.recipes import EXPERIMENTS
from onlinenorm.experiments.report.collect import DECAYS, Collection, Comparison
from onlinenorm.experiments.report.figures import draw
from onlinenorm.experiments.report.findings import finding
from onlinenorm.experiments.report.training import best_decays, reproducibility
from onlinenorm.experiments.runs import Record
from onlinenorm.experiments.summary import compare, summarize

STYLE = """
body { max-width: 70rem }
section { border-top: 1px solid var(--line); margin-top: 2.5rem } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem }
.charts > aside { align-self: start }
aside h4 { margin: 0 0 .25rem; font-size: .9rem } aside p { margin: .25rem 0; font-size: .9rem }
th.words, td.words { white-space: normal; text-align: left } td.words { min-width: 9rem }
.scroll { margin-top: .75rem } @media (min-width: 40rem) { th, td { padding: .35rem .55rem } }
pre, code { font-size: .85rem } code { overflow-wrap: anywhere }
pre { overflow-x: auto; background: var(--card); border-radius: .5rem; padding: .5rem .75rem }
dl.source { grid-template-columns: auto minmax(0, 1fr); color: var(--faint); font-size: .8rem }
.warning { border-left: .25rem solid #d55e00; padding-left: .75rem; overflow-wrap: anywhere }
a { color: inherit } summary { cursor: pointer }
@media (max-width: 40rem) {
  td.words { min-width: 0 } .contents td, table:not(.map) :is(th, td):not(:first-child) { white-space: normal } }
"""
SHOWN = 8  # unfinished runs
MANY = 6  # columns, more than which a phone shows by scrolling the table
SCALE = {
    "paper": "The paper's scale",
    "cpu": "Reduced to two processor cores",
    "smoke": "Smoke test: seconds, on made data; its numbers mean nothing",
}


@dataclass(frozen=True)
class Section:
    """What the page says of one experiment, and what its table of contents does."""

    experiment: Experiment
    body: str
    runs: int
    result: str


def render(collection: Collection) -> tuple[str, list[str]]:
    """The whole page, and warnings."""
    warnings = list(collection.left_out)
    sections = [_section(experiment, collection, warnings) for experiment in EXPERIMENTS.values()]
    notes = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    warned = f'<div class="warning"><p>Left out:</p><ul>{notes}</ul></div>' if warnings else ""
    body = f"""<h1>Online Normalization: the paper's experiments, reproduced</h1>
<p>Each figure stands beside what the paper's shows, each number beside the paper's. "Best" is as in the paper: the
metric on the epoch at which the median over the runs is best. A verdict says whether that median lies between the
lowest and the highest of the paper's runs; where a run is reduced, only the order of the normalisers is compared.</p>
{warned}
{_contents(sections)}
{"".join(section.body for section in sections)}
<p class="faint">Written by onlinenorm {onlinenorm.__version__}. Curves are medians over the runs, bands reach from the
lowest to the highest; where an axis would hide the end of training, the beginning is cut off. In box plots a box holds
the middle half of the runs, and the thin line below it reaches over the paper's.</p>"""
    return document("Online Normalization: report", body, CHART_STYLE + STYLE), warnings


# Sections


def _section(experiment: Experiment, collection: Collection, warnings: list[str]) -> Section:
    name = experiment.name
    if name == "reproducibility":
        parts, results = _all_spreads(experiment, collection, warnings)
        runs = 0
    else:
        comparisons = collection.comparisons[name]
        parts, results = [], []
        for comparison in comparisons:
            part, result = _comparison(comparison, warnings)
            parts.append(part)
            results.append(result)
        runs = sum(len(comparison.finished) for comparison in comparisons)
    body = "".join(parts) or _not_run(experiment)
    if name == DECAYS and collection.elsewhere:
        body += (
            f"<p>Sweeps over other settings have their maps in {escape(', '.join(map(str, collection.elsewhere)))}.</p>"
        )
    result = next(filter(None, results), "not finished" if parts else "not run")
    heading = (
        f"<h2>{escape(experiment.title)}</h2><p>{escape(experiment.shows[:1].upper() + experiment.shows[1:])}.</p>"
    )
    return Section(experiment, f'<section id="{name}">{heading}{body}</section>', runs, result)


def _comparison(comparison: Comparison, warnings: list[str]) -> tuple[str, str]:
    """A scale's figures and tables, and its result in words."""
    over = f", {comparison.base.title}" if comparison.experiment.on else ""
    changed = f", with {comparison.changes}" if comparison.changes else ""
    heading = f"{SCALE[comparison.scale]}{over}{changed}"
    body, result = "", ""
    if comparison.finished:
        try:
            figures, tables = draw(comparison), _tables(comparison)
            found = finding(comparison, tables[0])
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # rows unlike the recipe's
            warnings.append(f"{comparison.experiment.name}, {heading}: {type(error).__name__} {error}.")
            body = "<p>These runs could not be put together.</p>"
        else:
            body = _beside(figures, comparison.experiment) + "".join(map(_table, tables)) + _source(comparison.finished)
            result = f"{comparison.scale}: {found}" if comparison.scale != "smoke" else "smoke test only"
    body += _unfinished(comparison.unfinished)
    return _titled(comparison.scale, heading, body), result


def _all_spreads(experiment: Experiment, collection: Collection, warnings: list[str]) -> tuple[list[str], list[str]]:
    """Box plots of every experiment that has several runs, scale by scale; and the results in words."""
    parts, results = [], []
    for scale in SCALES:
        several = [
            comparison
            for found in collection.comparisons.values()
            for comparison in found
            if comparison.scale == scale and not comparison.changes and comparison.experiment.name in REPORTED
            if len(comparison.finished) > len({record.settings["norm"] for record in comparison.finished})
        ]
        if several:
            records = [record for comparison in several for record in comparison.finished]
            figures = [reproducibility(comparison.experiment, comparison.finished) for comparison in several]
            body = _beside(figures, experiment) + _table(summarize(experiment, records)) + _source(records)
            parts.append(_titled(scale, SCALE[scale], body))
            results.append(f"{scale}: {len(records)} runs of {', '.join(c.experiment.name for c in several)}")
    return parts, results


def _titled(scale: Scale, heading: str, body: str) -> str:
    if scale == "smoke":
        return f"<details><summary>{escape(heading)}</summary>{body}</details>"
    return f"<h3>{escape(heading)}</h3>{body}"


def _not_run(experiment: Experiment) -> str:
    times = ", ".join(f"{scale} {time}" for scale, time in experiment.time.items())
    table = ""
    if experiment.name == "memory":
        numbers = ((name, *map(str, astuple(needed))) for name, needed in MEMORY.items())
        table = _table(Summary(("Network", "OnlineNorm", "BatchNorm, 32", "BatchNorm, 128"), tuple(numbers)))
    for key, reported in REPORTED.get(experiment.name, {}).items():
        rows = tuple((NORMALIZERS[norm].label, str(number)) for norm, number in reported.items())
        table += _table(Summary(("Normaliser", f"Best {key}, the paper"), rows))
    return (
        f"<p>Not run. Expected time: {escape(times)}.</p><pre>onlinenorm reproduce {experiment.name}</pre>"
        f"{_beside([], experiment)}{table}"
    )


# Their parts


def _beside(figures: Sequence[str], experiment: Experiment) -> str:
    """Figures, and beside them what the paper's shows."""
    theirs = FIGURES.get(experiment.name)
    words = "<p>The paper has no such figure.</p>"
    if theirs:
        words = f"<h4>The paper's {escape(theirs.where.replace('Fig', 'fig').replace('Tab', 'tab'))}</h4>"
        words += f"<p><em>{escape(theirs.caption)}</em></p><p>{escape(theirs.shows)}</p>"
    return f'<div class="charts">{"".join(figures)}<aside>{words}</aside></div>'


def _tables(comparison: Comparison) -> list[Summary]:
    experiment, records = comparison.experiment, comparison.finished
    if experiment.name == DECAYS:  # the map has every number
        return [Summary((), (), best_decays(comparison))]
    if experiment.summary is not None:
        return [experiment.summary(records)]
    return [compare(replace(experiment, metric=m), records) for m in (experiment.metric, *experiment.also) if m]


def _table(summary: Summary) -> str:
    colours = {normalizer.label: normalizer.colour for normalizer in NORMALIZERS.values()}
    head = "".join(f'<th scope="col"{_words(column)}>{escape(column)}</th>' for column in summary.columns)
    body = ""
    for first, *others in summary.rows:
        mark = dot(colours[first]) if first in colours else ""
        cells = "".join(
            f"<td{_words(column)}>{escape(cell)}</td>" for column, cell in zip(summary.columns[1:], others, strict=True)
        )
        body += f"<tr><td>{mark}{escape(first)}</td>{cells}</tr>"
    wide = ' class="map"' if len(summary.columns) > MANY else ""
    note = f'<p class="faint">{escape(summary.note)}</p>' if summary.note else ""
    if not body:
        return note
    table = f"<table{wide}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>{note}'


def _words(column: str) -> str:
    return ' class="words"' if column == "Verdict" else ""


def _contents(sections: Sequence[Section]) -> str:
    rows = "".join(
        f'<tr><td><a href="#{section.experiment.name}">{escape(section.experiment.title)}</a></td>'
        f'<td>{section.runs or ""}</td><td class="words">{escape(section.result)}</td></tr>'
        for section in sections
    )
    head = '<th scope="col">Experiment</th><th scope="col">Runs</th><th scope="col" class="words">Result</th>'
    return f'<table class="contents"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _source(records: Sequence[Record]) -> str:
    """Where the numbers of a figure come from."""
    seconds = sum(record.seconds for record in records)
    waited = sum(record.seconds * record.waiting for record in records) / (seconds or 1)
    entries = {
        "Command": "<br>".join(f"<code>{escape(command)}</code>" for command in _unique(r.command for r in records)),
        "Seeds": _ranges(sorted({record.settings["seed"] for record in records})),
        "Commit": escape(", ".join(_unique(_short_commit(record.commit) for record in records))),
        "Machine": escape("; ".join(_unique(map(_machine, records)))),
        "Time": f"{_duration(seconds)} for {len(records)} run{'s' * (len(records) > 1)}, {waited:.1%} waiting for data",
    }
    items = "".join(f"<dt>{key}</dt><dd>{text}</dd>" for key, text in entries.items())
    return f'<dl class="source">{items}</dl>'


def _unfinished(records: Sequence[Record]) -> str:
    if not records:
        return ""
    items = "".join(
        f"<li>{escape(record.label)}: {len(record.rows)} {escape(EXPERIMENTS[record.base].x)}"
        f"{'s' * (len(record.rows) != 1)} done, <code>{escape(record.command)} --resume</code></li>"
        for record in records[:SHOWN]
    )
    if len(records) > SHOWN:
        items += f"<li>and {len(records) - SHOWN} more</li>"
    return f"<p>Not finished, and left out above:</p><ul>{items}</ul>"


def _machine(record: Record) -> str:
    machine = record.machine
    parts = [machine.get("cpu"), f"{machine.get('usable_cores')} cores", f"device {machine.get('device')}"]
    processes = machine.get("processes", 1)
    if processes != 1:
        parts.append(f"{processes} processes")
    return ", ".join(str(part) for part in parts)


def _short_commit(commit: str | None) -> str:
    if commit is None:
        return "of an installed package"
    number, dirty, _ = commit.partition("-dirty")
    return number[:10] + (" with changes" if dirty else "")


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _ranges(numbers: Sequence[int]) -> str:
    """Whole numbers in words, as in 0 to 4, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
