"""Several processes that can be killed at any moment, and end bit for bit as if none had ever been killed.

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 elastic.py run.pt

Kill any of the processes that it names (kill -9). torchrun then starts all of them again, and they go on from the last
checkpoint. It holds the weights once, and the streams and random numbers of every process.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from resume import BATCH, STEPS, STEPS_PER_CHECKPOINT, STEPS_PER_EPOCH, augment, digest, make_data, make_model, save
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from onlinenorm.torch import keep_streams_apart, sync_every


def main(path):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = make_data(BATCH * world_size * STEPS_PER_EPOCH)
    torch.manual_seed(rank)
    model = keep_streams_apart(make_model())
    # Without find_unused_parameters, the first step after a start adds the gradients up in an order of its own.
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)
    done = 0
    if path.exists():
        checkpoint = torch.load(path)
        own = checkpoint["processes"][rank]
        model.load_state_dict({**checkpoint["model"], **own["streams"]})
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(own["random"])
        done = checkpoint["done"]
    sync_every(optimizer, model, 15, done=done)
    print(f"process {os.getpid()} is number {rank} and goes on after step {done}", flush=True)

    for step in range(done, STEPS):
        epoch, batch = divmod(step, STEPS_PER_EPOCH)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))  # the same everywhere
        chosen = order[rank::world_size][batch * BATCH : (batch + 1) * BATCH]
        loss = cross_entropy(parallel(augment(images[chosen])), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        done = step + 1
        if done % STEPS_PER_CHECKPOINT == 0:
            own = {"streams": dict(model.named_buffers()), "random": torch.get_rng_state()}
            processes = [None] * world_size if rank == 0 else None
            dist.gather_object(own, processes)
            if rank == 0:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "processes": processes,
                    "done": done,
                }
                save(checkpoint, path)
                print(f"step {done}: loss {loss.item():.3f}, saved", flush=True)
    if rank == 0:
        print("digest", digest(torch.load(path)), flush=True)
    dist.destroy_process_group()
    time.sleep(1)  # PyTorch 2.13 aborts a process that ends while gloo's threads still hold tensors


if __name__ == "__main__":
    main(Path(sys.argv[1]))
