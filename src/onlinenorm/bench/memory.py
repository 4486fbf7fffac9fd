"""What a layer keeps for its backward, and how much memory a pass needs at its peak."""

import json
import os
import tempfile
from pathlib import Path
from typing import TypedDict

from torch.profiler import ProfilerActivity, profile, record_function

from onlinenorm.bench.peers import Normaliser
from onlinenorm.experiments.memory import count_saved

_MARK = "onlinenorm.bench: forward done"


class Memory(TypedDict):
    """Bytes."""

    saved: int  # all tensors saved for the backward, the input among them; each storage once
    saved_beside_parameters: int  # those that are neither parameter nor buffer of the layer
    held: int  # allocated by the forward and still there after it: the output, and what is kept beside the input
    peak: int  # the most that forward and backward together had allocated at any time


def measure_memory(layer: Normaliser) -> Memory:
    """Count one pass of the layer."""
    with layer.context():
        saved, beside = count_saved(layer.module, layer.x)
        held, peak = count_allocated(layer)
    return Memory(saved=saved, saved_beside_parameters=beside, held=held, peak=peak)


def count_allocated(layer: Normaliser) -> tuple[int, int]:
    """Bytes held after the forward, and at the peak of forward and backward, beyond those held before.

    PyTorch's profiler reports every allocation and release of the CPU allocator; this adds them up. Scratch memory
    that a kernel takes from the C library directly is not seen.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    layer.run(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        y = layer.module(layer.x)
        with record_function(_MARK):
            pass
        y.backward(layer.grad)
    del y
    layer.clear()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]

    forward_done = next(event["ts"] for event in events if event.get("name") == _MARK)
    held = now = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: float(e["ts"])):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
        if event["ts"] < forward_done:
            held = now
    return held, peak
