"""A training run that can be killed at any moment, and ends bit for bit as if it had never been killed.

    python resume.py run.pt     # kill -9 it, start it again, as often as you like

It learns to tell made images apart, saves a checkpoint every few steps, and goes on from the last one that it finds.
At the end it prints a digest of everything that it holds.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from onlinenorm.torch import OnlineNorm2d

BATCH = 8
STEPS_PER_EPOCH = 30
STEPS = 6 * STEPS_PER_EPOCH
STEPS_PER_CHECKPOINT = 10
CLASSES = 5


def make_data(samples):
    """Images with a pattern for each class, under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, 12, 12, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return patterns[labels] + torch.randn(samples, 3, 12, 12, generator=generator), labels


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        OnlineNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        OnlineNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32, CLASSES),
    )


def augment(images):
    flipped = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(flipped, images.flip(3), images)


def save(checkpoint, path):
    """Write beside, force to the disk, rename: at every moment the path holds a whole checkpoint, old or new."""
    beside = path.with_suffix(".tmp")
    with open(beside, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def digest(value):
    """A short name of a checkpoint's content, every bit of every tensor in it."""
    hasher = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
            hasher.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                hasher.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            hasher.update(repr(value).encode())

    add(value)
    return hasher.hexdigest()[:16]


def main(path):
    images, labels = make_data(BATCH * STEPS_PER_EPOCH)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)
    done = 0
    if path.exists():
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["random"])
        done = checkpoint["done"]
    print(f"process {os.getpid()} goes on after step {done}", flush=True)

    model.train()
    for step in range(done, STEPS):
        epoch, batch = divmod(step, STEPS_PER_EPOCH)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))  # known from the step alone
        chosen = order[batch * BATCH : (batch + 1) * BATCH]
        loss = cross_entropy(model(augment(images[chosen])), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        done = step + 1
        if done % STEPS_PER_CHECKPOINT == 0:
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "random": torch.get_rng_state(),
                "done": done,
            }
            save(checkpoint, path)
            print(f"step {done}: loss {loss.item():.3f}, saved", flush=True)
    print("digest", digest(torch.load(path)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
