"""What the normaliser costs a recurrent network: training steps of the paper's language models, alternating.

python benchmarks/recurrent.py --out recurrent.json
"""

import argparse
import json
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from onlinenorm.bench.allocator import keep_mapped
from onlinenorm.bench.measure import Times, medians, race, ratio
from onlinenorm.experiments.language import LanguageModel
from onlinenorm.machine import describe, git_commit, versions

VOCABULARY, SIZE, STREAMS, STEPS = 10_000, 200, 20, 64
NORMS = ("online", "layer", "none")
PARTS = ("layer", "training step")  # the recurrent layer's forward and backward; those of the model, and the update


class Contestant:
    """One normaliser in one of the two parts."""

    every = 1

    def __init__(self, cell: str, norm: str, part: str, words: Tensor, x: Tensor, grad: Tensor) -> None:
        torch.manual_seed(0)
        self.name = norm
        self.whole = part == "training step"
        self.model = LanguageModel(VOCABULARY, SIZE, cell, norm)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, weight_decay=1e-6)
        self.words, self.x, self.grad = words, x, grad

    def run(self, passes: int) -> Times:
        forward = backward = 0.0
        for _ in range(passes):
            self.optimizer.zero_grad()
            start = perf_counter()
            if self.whole:
                logits, _ = self.model(self.words[:-1])
                loss = F.cross_entropy(logits.flatten(0, 1), self.words[1:].flatten())
                middle = perf_counter()
                loss.backward()
                self.optimizer.step()
            else:
                output, _ = self.model.recurrent(self.x)
                middle = perf_counter()
                output.backward(self.grad)
            forward += middle - start
            backward += perf_counter() - middle
        return Times(forward / passes, backward / passes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    keep_mapped(1 << 30)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(VOCABULARY, (STEPS + 1, STREAMS), generator=generator)
    x, grad = (torch.randn(STEPS, STREAMS, SIZE, generator=generator) for _ in range(2))
    rows = []
    for threads in given.threads:
        torch.set_num_threads(threads)
        for cell in ("rnn", "lstm"):
            for part in PARTS:
                times = race(
                    [Contestant(cell, norm, part, words, x, grad) for norm in NORMS], given.rounds, lambda: None
                )
                row = {"cell": cell, "part": part, "threads": threads}
                row["ms"] = {norm: 1e3 * medians(times[norm].times)["total"] for norm in NORMS}
                row |= {f"over {norm}": ratio(times["online"].times, times[norm].times) for norm in NORMS[1:]}
                rows.append(row)
                took, none = row["over layer"], row["over none"]["median"]
                spread = (took["q3"] - took["q1"]) / 2
                layer = f"{took['median']:.2f} ±{spread:.2f}"
                print(f"{threads} threads, {cell:4} {part:13}: over layer {layer}, over none {none:.2f}")
    report = {"rows": rows, "commit": git_commit(), "machine": describe(), "versions": versions()}
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
