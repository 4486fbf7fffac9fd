"""Does `warmup=True` help? ResNet-20 on CIFAR-10 and the paper's MLP on Fashion-MNIST, with it and without.

    python benchmarks/warmup.py resnet20 --data DIR --epochs 3 --seeds 0 1 --out warmup-resnet20.json
    python benchmarks/warmup.py mlp --data DIR --epochs 5 --seeds 0 1 2 3 4 --out warmup-mlp.json

DIR holds CIFAR-10's binary files (data_batch_1.bin and so on), or Fashion-MNIST's (train-images-idx3-ubyte.gz and so
on), which Debian's package dataset-fashion-mnist puts into /usr/share/datasets/fashion-mnist. Rates, decay factors and
L2 are the paper's; the rate falls to zero over the epochs, as there are few. ResNet-20: bfloat16, channels last.
"""

import argparse
import gzip
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.experiments.mlp import mlp
from onlinenorm.experiments.resnet import resnet20
from onlinenorm.machine import describe, git_commit, versions
from onlinenorm.torch import OnlineNorm1d, OnlineNorm2d

RECIPES = {
    "resnet20": {
        "batch": 128,
        "rate": 0.1,
        "momentum": 0.9,
        "l2": 2e-4,
        "alpha_fwd": 1023 / 1024,
        "alpha_bwd": 127 / 128,
    },
    "mlp": {"batch": 32, "rate": 0.04, "momentum": 0.0, "l2": 1e-4, "alpha_fwd": 0.999, "alpha_bwd": 0.99},
}
Images = tuple[Tensor, Tensor]


def cifar10(folder: Path) -> tuple[Images, Images]:
    def read(name: str) -> Images:
        rows = np.fromfile(folder / name, dtype=np.uint8).reshape(-1, 3073)
        return torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy()), torch.from_numpy(
            rows[:, 0].astype(np.int64)
        )

    parts = [read(f"data_batch_{i}.bin") for i in range(1, 6)]
    return (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])), read("test_batch.bin")


def fashion_mnist(folder: Path) -> tuple[Images, Images]:
    def read(name: str) -> Images:
        x, y = (
            gzip.decompress((folder / f"{name}-{kind}-ubyte.gz").read_bytes())
            for kind in ("images-idx3", "labels-idx1")
        )
        images, labels = np.frombuffer(x, np.uint8, offset=16), np.frombuffer(y, np.uint8, offset=8)
        return torch.from_numpy(images.reshape(-1, 784).copy()), torch.from_numpy(labels.astype(np.int64))

    return read("train"), read("t10k")


def augmented(x: Tensor) -> Tensor:
    """Shift by up to four pixels and mirror, a batch at a time."""
    dy, dx = torch.randint(9, (2,)).tolist()
    x = F.pad(x, (4, 4, 4, 4))[:, :, dy : dy + 32, dx : dx + 32]
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x, x.flip(3))


def run(name: str, data: tuple[Images, Images], warmup: bool, seed: int, epochs: int) -> dict[str, object]:
    recipe = RECIPES[name]
    torch.manual_seed(seed)
    kind = OnlineNorm2d if name == "resnet20" else OnlineNorm1d
    settings = {"alpha_fwd": recipe["alpha_fwd"], "alpha_bwd": recipe["alpha_bwd"], "warmup": warmup}
    model: nn.Module = (resnet20 if name == "resnet20" else mlp)(lambda channels: kind(channels, **settings))
    model = model.to(memory_format=torch.channels_last)
    (x, y), (test_x, test_y) = data
    mean, std = x.float().mean(), x.float().std()

    def prepared(images: Tensor) -> Tensor:
        return (images.float() - mean) / std

    steps = len(x) // recipe["batch"]
    sgd = torch.optim.SGD(model.parameters(), recipe["rate"], recipe["momentum"], weight_decay=recipe["l2"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, epochs * steps)
    losses, accuracies, start = [], [], time.time()
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(x)).split(recipe["batch"])[:steps]:
            images = prepared(x[batch])
            if name == "resnet20":
                images = augmented(images).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "resnet20"):
                loss = F.cross_entropy(model(images), y[batch])
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            schedule.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            guesses = torch.cat([model(prepared(part)).argmax(1) for part in test_x.split(500)])
        accuracies.append(round(100 * (guesses == test_y).float().mean().item(), 2))
    result = {"warmup": warmup, "seed": seed, "accuracy": accuracies, "seconds": round(time.time() - start)}
    result["loss_of_first_100_steps"] = round(float(np.mean(losses[:100])), 4)
    result["loss_of_first_epoch"] = round(float(np.mean(losses[:steps])), 4)
    print(result, flush=True)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=RECIPES)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    data = (cifar10 if given.network == "resnet20" else fashion_mnist)(given.data)
    runs = [run(given.network, data, warmup, seed, given.epochs) for seed in given.seeds for warmup in (False, True)]
    report = {"recipe": RECIPES[given.network], "epochs": given.epochs, "runs": runs, "commit": git_commit()}
    report |= {"machine": describe(), "versions": versions()}
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
