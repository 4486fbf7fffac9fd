"""The demo's page."""

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor

from onlinenorm.experiments.charts import STYLE as CHART_STYLE
from onlinenorm.experiments.charts import Axis, Line, line_chart
from onlinenorm.experiments.document import document, dot
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


def chart(result: dict[str, Any], key: str, title: str, log: bool = False) -> str:
    """One figure of the history against epochs, with a curve for each normaliser."""
    lines = [
        Line(
            NORMALIZERS[run["name"]].label,
            NORMALIZERS[run["name"]].colour,
            [(h["epoch"], h[key]) for h in run["history"] if h[key] is not None],
        )
        for run in result["normalizers"]
    ]
    return line_chart(title, lines, Axis("epochs", "whole"), Axis("", "log" if log else "linear"), "{:.3f}")


# The page

STYLE = """
.key span { display: inline-block; width: .8em; height: .8em; margin-right: .45em; border: 1px solid var(--faint) }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: .75rem 0;
  font-size: .9rem }
.gallery { display: grid; grid-template-columns: repeat(var(--columns), 1fr); gap: .4rem; max-width: 52rem }
.gallery img { display: block; width: 100%; image-rendering: pixelated; border-radius: .2rem }
.gallery .head { font-size: clamp(.62rem, 2.4vw, .95rem); font-weight: 600; align-self: end }
.gallery figcaption { font-size: clamp(.62rem, 2.4vw, .85rem) }
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
    body = f"""<h1>One U-Net, {_count(len(result["normalizers"]))}, batch size {config["batch_size"]}</h1>
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
{_settings(result)}"""
    return document("Online Normalization: demo", body, CHART_STYLE + STYLE)


def _count(normalizers: int) -> str:
    words = {1: "one normaliser", 2: "two normalisers", 3: "three normalisers"}
    return words.get(normalizers, f"{normalizers} normalisers")


def _table(result: dict[str, Any]) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in COLUMNS)
    body = ""
    for run, row in zip(result["normalizers"], rows(result), strict=True):
        cells = "".join(f"<td{' class=best' * cell.best}>{escape(cell.text)}</td>" for cell in row[1:])
        body += f"<tr><td>{dot(NORMALIZERS[run['name']].colour)}{escape(row[0].text)}</td>{cells}</tr>"
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
