"""How much faster a folded ResNet-20 is than the one that it was folded from: alternating rounds, median ratios.

python examples/torch/fold_speed.py
"""

import statistics
import time

import torch

from onlinenorm.experiments.resnet import resnet20
from onlinenorm.torch import OnlineNorm2d, fold

ROUNDS = 31


def seconds(model, x):
    start = time.perf_counter()
    model(x)
    return time.perf_counter() - start


def ratio(model, folded, x):
    """Median over the rounds of the folded model's time over the other's."""
    found = []
    for number in range(ROUNDS + 3):  # the first ones warm up
        first, second = (model, folded) if number % 2 else (folded, model)
        times = {first: seconds(first, x), second: seconds(second, x)}
        found.append(times[folded] / times[model])
    return statistics.median(found[3:])


@torch.inference_mode()
def main():
    for guard in (None, "clamp", "layer_scaling"):
        model = resnet20(lambda channels, guard=guard: OnlineNorm2d(channels, guard=guard)).eval()
        folded = fold(model, report=None)
        for batch in (1, 8, 32):
            for name, format_ in (("contiguous", torch.contiguous_format), ("channels last", torch.channels_last)):
                model, folded = model.to(memory_format=format_), folded.to(memory_format=format_)
                x = torch.randn(batch, 3, 32, 32).to(memory_format=format_)
                print(f"guard {guard!s:13}  batch {batch:2}  {name:13}  {ratio(model, folded, x):.2f} of the time")


if __name__ == "__main__":
    main()
