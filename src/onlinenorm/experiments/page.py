"""The demo's page: one HTML file that needs nothing else, on any screen, light or dark."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor

from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.shapes import CLASSES

COLUMNS = ("Normaliser", "Jaccard", "Loss", "ms a step", "Memory", "Epochs")
# Pale, so that none is taken for a normaliser's, and distinct for colour-blind readers.
CLASS_COLOURS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#44bb99", "#bbcc33")


@dataclass(frozen=True)
class Samples:
    """Held-out images to show (n, 1, H, W), their masks (n, 6, H, W), and each normaliser's masks."""

    images: Tensor
    masks: Tensor
    predictions: dict[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """One entry of the table; `best` if no other normaliser does better."""

    text: str
    best: bool = False


# Words and numbers, also for the terminal


def caption(config: dict[str, Any]) -> str:
    """What was trained, in one line."""
    return (
        f"U-Net of width {config['width']}, {config['train_images']} images of {config['size']} × "
        f"{config['size']}, batch size {config['batch_size']}, {config['epochs']} "
        f"epoch{'s' * (config['epochs'] > 1)}, seed {config['seed']}"
    )


def headline(result: dict[str, Any]) -> str:
    """What happened, in one or two sentences."""
    done = [run for run in result["normalizers"] if run["jaccard"] is not None]
    stopped = "Stopped before all epochs were done. " if result["status"] == "stopped" else ""
    if not done:
        return stopped + "No epoch was finished, so there is nothing to compare."
    ranking = sorted(done, key=lambda run: -run["jaccard"])
    scores = ", ".join(f"{run['label']} {run['jaccard']:.3f}" for run in ranking)
    return f"{stopped}Jaccard similarity on {result['config']['held_out_images']} held-out images: {scores}."


def rows(result: dict[str, Any]) -> list[list[Cell]]:
    """The table's rows, in the order of the runs."""
    runs = result["normalizers"]
    columns = [
        [Cell(run["label"]) for run in runs],
        _column([run["jaccard"] for run in runs], "{:.3f}", best=max),
        _column([run["loss"] for run in runs], "{:.4f}", best=min),
        _column([run["ms_per_step"] for run in runs], "{:.1f}", best=min),
        _column([run["activation_bytes"] / 2**20 for run in runs], "{:.1f} MiB", best=min),
        [Cell(f"{run['epochs']} of {result['config']['epochs']}") for run in runs],
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _column(values: Sequence[float | None], form: str, best: Any) -> list[Cell]:
    texts = ["–" if value is None else form.format(value) for value in values]
    known = [value for value in values if value is not None]
    first = form.format(best(known)) if known else None
    ranked = len(set(texts)) > 1  # where all are equal, none is best
    return [Cell(text, ranked and text == first) for text in texts]


# Pictures


def png(pixels: Tensor) -> str:
    """An (H, W, 3) uint8 image as a data address."""
    height, width, _ = pixels.shape
    no_filter = torch.zeros(height, 1, dtype=torch.uint8)
    lines = torch.cat([no_filter, pixels.reshape(height, -1)], dim=1).numpy().tobytes()

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, red green blue
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def colour_masks(masks: Tensor, truth: Tensor) -> Tensor:
    """Masks (6, H, W) as a picture on black; pixels where they differ from the truth are white."""
    colours = torch.tensor([list(bytes.fromhex(colour[1:])) for colour in CLASS_COLOURS], dtype=torch.uint8)
    picture = torch.zeros(*masks.shape[1:], 3, dtype=torch.uint8)
    for mask, colour in zip(masks, colours, strict=True):
        picture[mask] = colour
    picture[(masks != truth).any(dim=0)] = 255
    return picture


def _gray(image: Tensor) -> Tensor:
    return (255 * image[0]).to(torch.uint8).unsqueeze(-1).expand(-1, -1, 3)


def _picture(pixels: Tensor, words: str) -> str:
    return f'<img src="{png(pixels)}" alt="{escape(words)}">'


def _gallery(result: dict[str, Any], samples: Samples) -> str:
    runs = [run for run in result["normalizers"] if run["name"] in samples.predictions]
    heads = ["Input", "Truth", *(run["label"] for run in runs)]
    cells = [f'<div class="head">{escape(head)}</div>' for head in heads]
    for i, (image, truth) in enumerate(zip(samples.images, samples.masks, strict=True), 1):
        cells.append(_picture(_gray(image), f"Held-out image {i}"))
        cells.append(_picture(colour_masks(truth, truth), f"True masks of image {i}"))
        for run in runs:
            predicted = samples.predictions[run["name"]][i - 1]
            wrong = int((predicted != truth).any(dim=0).sum())
            picture = _picture(colour_masks(predicted, truth), f"{run['label']}'s masks of image {i}")
            cells.append(f"<figure>{picture}<figcaption>{wrong} wrong</figcaption></figure>")
    key = "".join(
        f'<li><span style="background:{colour}"></span>{name}</li>'
        for name, colour in zip((*CLASSES, "wrong pixel"), (*CLASS_COLOURS, "#ffffff"), strict=True)
    )
    return (
        f'<div class="gallery" style="--columns:{len(heads)}">{"".join(cells)}</div>'
        f'<ul class="key">{key}</ul>'
        '<p class="faint">Every image holds one of each shape, and they may overlap. A pixel is wrong if any '
        "of its six labels is.</p>"
    )


# Charts

WIDTH, HEIGHT = 380, 270
LEFT, RIGHT, TOP, BOTTOM = 40, 98, 10, 40  # margins; the curves' names stand in the right one


def chart(result: dict[str, Any], key: str, title: str, log: bool = False) -> str:
    """One figure of the history against epochs: an SVG with a curve for each normaliser, named at its end."""
    curves = {
        run["name"]: [(h["epoch"], h[key]) for h in run["history"] if h[key] is not None]
        for run in result["normalizers"]
    }
    curves = {name: points for name, points in curves.items() if points}
    values = [value for points in curves.values() for _, value in points]
    if not values:
        return f"<figure><figcaption>{title}</figcaption><p>Not a number, in every epoch.</p></figure>"
    ticks = _log_ticks(values) if log else _ticks(values)
    scale: Callable[[float], float] = math.log if log else float
    bottom, top = scale(ticks[0]), scale(ticks[-1])
    epochs: int = result["config"]["epochs"]

    def x(epoch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (epoch - 1) / max(epochs - 1, 1)

    def y(value: float) -> float:
        share: float = (scale(value) - bottom) / (top - bottom)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = []
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        place = f'x="{LEFT - 6}" y="{y(tick) + 4:.1f}"'
        parts.append(f'<text class="tick" {place} text-anchor="end">{tick:g}</text>')
    for tick in _epoch_ticks(epochs):
        place = f'x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 17}"'
        parts.append(f'<text class="tick" {place} text-anchor="middle">{tick}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">epochs</text>')

    heights = _spread([y(points[-1][1]) for points in curves.values()], gap=16)
    for (name, points), height in zip(curves.items(), heights, strict=True):
        normalizer = NORMALIZERS[name]
        line = "L".join(f"{x(epoch):.1f} {y(value):.1f}" for epoch, value in points)
        end_x, end_y = x(points[-1][0]), y(points[-1][1])
        parts.append(f'<g style="--colour:{normalizer.colour}"><path class="curve" d="M{line}"/>')
        parts.extend(
            f'<circle cx="{x(epoch):.1f}" cy="{y(value):.1f}" r="2.5">'
            f"<title>{normalizer.label}, epoch {epoch}: {value:.4f}</title></circle>"
            for epoch, value in points
        )
        parts.append(f'<path class="lead" d="M{end_x + 3:.1f} {end_y:.1f}L{end_x + 10:.1f} {height:.1f}"/>')
        parts.append(f'<text x="{end_x + 12:.1f}" y="{height + 4:.1f}">{normalizer.label}</text></g>')
    ends = ", ".join(f"{NORMALIZERS[name].label} {points[-1][1]:.3f}" for name, points in curves.items())
    open_svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}; last: {ends}">'
    return f"<figure><figcaption>{title}</figcaption>{open_svg}{''.join(parts)}</svg></figure>"


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, four to eight, that enclose the values."""
    span = max(values) - min(values) or 0.1
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= 6)
    first, last = math.floor(min(values) / step), math.ceil(max(values) / step)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def _log_ticks(values: Sequence[float]) -> list[float]:
    """The 1, 2, 5, 10, ... that enclose the values."""
    low, high = min(values), max(values)
    grid = [m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5)]
    first = max(i for i, tick in enumerate(grid) if tick <= low or i == 0)
    last = min(i for i, tick in enumerate(grid) if tick > high or i == len(grid) - 1)
    return [float(f"{tick:.6g}") for tick in grid[first : last + 1]]


def _epoch_ticks(epochs: int) -> list[int]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, epochs) if epochs / s <= 8)
    return [1, *(e for e in range(step, epochs + 1, step) if e > 1)]


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move labels apart until neighbours are `gap` away, around where they want to be."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [heights[i] for i in order]
    for _ in range(100):
        for i in range(len(placed) - 1):
            lack = gap - (placed[i + 1] - placed[i])
            if lack > 1e-3:
                placed[i] -= lack / 2
                placed[i + 1] += lack / 2
    return [placed[order.index(i)] for i in range(len(heights))]


# The page

STYLE = """
:root { color-scheme: light dark;
  --paper: #fff; --ink: #1c2024; --faint: #5d666f; --line: #d9dee3; --card: #f5f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e8eaed; --faint: #a0a9b2; --line: #363d44; --card: #1d2125 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; text-wrap: balance }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p { margin: .5rem 0; max-width: 44rem } .faint, figcaption { color: var(--faint); font-size: .9rem }
.headline { font-size: 1.1rem }
figure { margin: 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem }
.charts figure { background: var(--card); border-radius: .5rem; padding: .75rem }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; fill: var(--ink) }
svg .tick { fill: var(--faint); font-size: 12px } svg .grid { stroke: var(--line) }
svg .curve { fill: none; stroke: var(--colour); stroke-width: 2.2; stroke-linejoin: round }
svg .lead { stroke: var(--colour) } svg circle { fill: var(--colour) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
th { color: var(--faint); font-weight: 600 } td.best { font-weight: 700 }
.dot, .key span { display: inline-block; width: .8em; height: .8em; margin-right: .45em }
.dot { border-radius: 50% }
.gallery { display: grid; grid-template-columns: repeat(var(--columns), 1fr); gap: .4rem; max-width: 52rem }
.gallery img { display: block; width: 100%; image-rendering: pixelated; border-radius: .2rem }
.gallery .head { font-size: clamp(.62rem, 2.4vw, .95rem); font-weight: 600; align-self: end }
.gallery figcaption { font-size: clamp(.62rem, 2.4vw, .85rem) }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: .75rem 0;
  font-size: .9rem } .key span { border: 1px solid var(--faint) }
dl { display: grid; grid-template-columns: auto 1fr; gap: .15rem 1rem; font-size: .9rem; margin: .5rem 0 }
dt { color: var(--faint) } dd { margin: 0 }
@media (max-width: 30rem) { th, td { padding: .35rem .2rem; font-size: .76rem } }
"""


def render(result: dict[str, Any], samples: Samples) -> str:
    """The whole page."""
    config = result["config"]
    finished = any(run["history"] for run in result["normalizers"])
    charts = "<p>No epoch was finished, so there are no curves.</p>"
    if finished:
        charts = (
            '<div class="charts">'
            + chart(result, "jaccard", "Jaccard similarity, held-out images (higher is better)")
            + chart(result, "loss", "Loss, held-out images (lower is better)", log=True)
            + "</div>"
        )
    gallery = f"<h2>Predicted masks</h2>{_gallery(result, samples)}" if finished else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Online Normalization: demo</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<h1>One U-Net, {_count(len(result["normalizers"]))}, batch size {config["batch_size"]}</h1>
<p class="headline">{escape(headline(result))}</p>
<p class="faint">{escape(caption(config))}. Same images, same order, same initial weights and same learning
rate for each. This is one seed: how much of a difference is chance, other seeds tell (<code>--seed</code>).</p>
<h2>Learning curves</h2>
{charts}
<h2>In numbers</h2>
{_table(result)}
<p class="faint">Jaccard: intersection over union of an image's masks, mean over the held-out images. Loss:
half binary cross entropy, half Dice. A step: forward, backward and update of one batch, median. Memory: what
that autograd keeps for the backward of a step, without parameters. Best in bold.</p>
{gallery}
<h2>Settings</h2>
{_settings(result)}
</body>
</html>
"""


def _count(normalizers: int) -> str:
    words = {1: "one normaliser", 2: "two normalisers", 3: "three normalisers"}
    return words.get(normalizers, f"{normalizers} normalisers")


def _table(result: dict[str, Any]) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in COLUMNS)
    body = ""
    for run, row in zip(result["normalizers"], rows(result), strict=True):
        dot = f'<span class="dot" style="background:{NORMALIZERS[run["name"]].colour}"></span>'
        cells = "".join(f"<td{' class=best' * cell.best}>{escape(cell.text)}</td>" for cell in row[1:])
        body += f"<tr><td>{dot}{escape(row[0].text)}</td>{cells}</tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _settings(result: dict[str, Any]) -> str:
    config, versions = result["config"], result["versions"]
    entries = {run["label"]: run["settings"] for run in result["normalizers"]}
    entries["Optimiser"] = (
        f"SGD, learning rate {config['learning_rate']:g} (a tenth of it for the last three eighths), "
        f"momentum {config['momentum']:g}, L2 {config['weight_decay']:g}"
    )
    widths = f"{config['width']} to {8 * config['width']}"
    entries["Network"] = f"U-Net, widths {widths}, a normaliser before every ReLU"
    entries["Threads"] = str(config["threads"])
    entries["Versions"] = ", ".join(f"{name} {versions[name]}" for name in ("onlinenorm", "torch", "python"))
    entries["Machine"] = versions["machine"]
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items()) + "</dl>"
