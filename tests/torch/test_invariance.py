"""Bit for bit: however a stream is cut into batches, whatever the threads, whatever the SIMD width."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import GUARDS, assert_same_state, channels_last, layer_and_reference, state_of, step
from hypothesis import given
from hypothesis import strategies as st

SHAPES = [(24, 64, 8, 8), (6, 3, 70, 70), (9, 20), (130, 300), (4, 130, 19, 19), (5, 16, 6, 6, 6), (3, 2, 300, 300)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def made(shape, dtype, last=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator) * 3 + 1).to(dtype)
    grad = torch.randn(shape, generator=generator).to(dtype)
    return (channels_last(x), channels_last(grad)) if last and len(shape) > 2 else (x, grad)


def assert_same_run(left, right, what):
    for name, a, b in zip(("z", "grad_x"), left[:2], right[:2], strict=True):
        assert torch.equal(a, b), f"{name} depends on {what}: {(a != b).sum()} of {a.numel()} scalars differ"
    assert_same_state(left[2], right[2])


def run(shape, guard, x, grad, sizes):
    layer, _ = layer_and_reference(shape[1], guard=guard)
    parts = [step(layer, *part) for part in zip(x.split(sizes), grad.split(sizes), strict=True)]
    z, grad_x = (torch.cat(part) for part in zip(*parts, strict=True))
    return z, grad_x, state_of(layer)


@given(data=st.data(), shape=st.sampled_from(SHAPES), guard=st.sampled_from(GUARDS), dtype=st.sampled_from(DTYPES))
def test_splits(data, shape, guard, dtype):
    x, grad = made(shape, dtype, last=data.draw(st.booleans(), "channels last"))
    sizes, left = [], shape[0]
    while left:
        sizes.append(data.draw(st.integers(1, left), "batch size"))
        left -= sizes[-1]
    assert_same_run(run(shape, guard, x, grad, shape[0]), run(shape, guard, x, grad, sizes), f"the split {sizes}")


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_batches_of_one(shape, guard):
    x, grad = made(shape, torch.float32)
    assert_same_run(run(shape, guard, x, grad, shape[0]), run(shape, guard, x, grad, 1), "the split into ones")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_threads(shape, guard, last):
    x, grad = made(shape, torch.float32, last)
    threads = torch.get_num_threads()
    runs, gradients = [], []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            layer, _ = layer_and_reference(shape[1], guard=guard)
            runs.append((*step(layer, x, grad), state_of(layer)))
            gradients.append((layer.weight.grad, layer.bias.grad))
    finally:
        torch.set_num_threads(threads)
    for other, (weight_grad, bias_grad) in zip(runs[1:], gradients[1:], strict=True):
        assert_same_run(runs[0], other, "the number of threads")
        assert torch.equal(weight_grad, gradients[0][0]), "weight.grad depends on the number of threads"
        assert torch.equal(bias_grad, gradients[0][1]), "bias.grad depends on the number of threads"


DIGEST = """
import hashlib, torch
from onlinenorm import _native
from test_invariance import DTYPES, GUARDS, SHAPES, made, run
digest = hashlib.sha256()
for shape in SHAPES:
    for guard in GUARDS:
        for dtype in DTYPES:
            for last in (False, True):
                z, grad_x, state = run(shape, guard, *made(shape, dtype, last), shape[0])
                for t in (z, grad_x, *state.values()):
                    digest.update(t.flatten().view(torch.uint8).numpy().tobytes())
print(_native.isa(), digest.hexdigest())
"""


def test_instruction_sets():
    results = {}
    for isa in ("baseline", "avx2", "avx512"):
        environment = {**os.environ, "ONLINENORM_ISA": isa, "PYTHONPATH": os.path.dirname(__file__)}
        out = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        used, digest = out.stdout.split()
        results[used] = digest
    assert "baseline" in results
    assert len(set(results.values())) == 1, f"the bits depend on the instruction set: {results}"
