"""What the activation inside the layer saves: training steps of ResNet-20, fused and not, alternating.

python benchmarks/fused_activation.py --out fused-activation.json
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from onlinenorm.bench.allocator import keep_mapped
from onlinenorm.bench.cases import MODES
from onlinenorm.bench.measure import race, ratio
from onlinenorm.bench.peers import layout
from onlinenorm.bench.steps import Step
from onlinenorm.experiments.memory import count_saved
from onlinenorm.experiments.resnet import Block, resnet20
from onlinenorm.machine import describe, git_commit, versions
from onlinenorm.torch import OnlineNorm2d, OnlineNormAct2d

ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU}


def network(act: str, fused: bool) -> nn.Module:
    """ResNet-20 with this activation behind the stem's normaliser and behind each block's first."""

    def pair(channels: int) -> tuple[nn.Module, nn.Module]:
        if fused:
            return OnlineNormAct2d(channels, act=act), nn.Identity()
        return OnlineNorm2d(channels), ACTIVATIONS[act]()

    torch.manual_seed(0)
    model = resnet20(OnlineNorm2d)
    model[1], model[2] = pair(16)
    for block in model:
        if isinstance(block, Block):
            block.norm1, block.act1 = pair(block.norm1.num_features)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    keep_mapped(1 << 30)
    rows = []
    for mode in (MODES["float32"], MODES["bfloat16-cl"]):
        for act in ACTIVATIONS:
            for batch in (1, 8, 128):
                torch.manual_seed(0)
                x = torch.randn(batch, 3, 32, 32).contiguous(memory_format=layout(mode, 4))
                target = torch.randint(10, (batch,))
                nets = {
                    kind: network(act, kind == "fused").to(memory_format=layout(mode, 4)) for kind in ("plain", "fused")
                }
                steps = [Step(kind, net, x, target, mode) for kind, net in nets.items()]
                times = race(steps, given.rounds, lambda: None)
                kept = {kind: count_saved(net, x)[1] for kind, net in nets.items()}
                row = {"mode": mode.name, "act": act, "batch": batch, "bytes": kept["fused"] / kept["plain"]}
                row["time"] = ratio(times["fused"].times, times["plain"].times)
                rows.append(row)
                took, spread = row["time"]["median"], (row["time"]["q3"] - row["time"]["q1"]) / 2
                print(f"{mode.name:12}{act:5} batch {batch:3}: time {took:.3f} ±{spread:.3f}, bytes {row['bytes']:.3f}")
    report = {"rows": rows, "commit": git_commit(), "machine": describe(), "versions": versions()}
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
