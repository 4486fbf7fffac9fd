"""Real processes: forks, data-loader workers, threads."""

import multiprocessing
import threading

import pytest
import torch
from helpers import assert_same_state, layer_and_reference, state_of, step
from torch.utils.data import DataLoader, Dataset

SHAPE = (16, 64, 20, 20)  # large enough for several threads


def made(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def test_a_forked_child_after_the_pool_has_run():
    """The child of a fork has no pool threads; an engine that waited for them would hang here."""
    layer, _ = layer_and_reference(SHAPE[1])
    z, grad_x = step(layer, *made())
    ours, theirs = multiprocessing.Pipe()
    # A plain torch operator with several threads hangs in such a child; only the layer's own calls are under test.
    child = multiprocessing.get_context("fork").Process(target=engine_in_child, args=(theirs,))
    child.start()
    assert ours.poll(60), "the forked child hangs"
    got_z, got_grad = ours.recv()
    child.join(10)
    assert child.exitcode == 0
    assert torch.equal(torch.from_numpy(got_z), z)
    assert torch.equal(torch.from_numpy(got_grad), grad_x)


def engine_in_child(connection):
    from onlinenorm.torch import native
    from onlinenorm.torch.settings import Settings

    x, grad = made_in_parent
    layer, _ = layer_in_parent
    settings = Settings(layer.alpha_fwd, layer.alpha_bwd, layer.eps, layer.guard, layer.guard_eps, layer.clamp_value)
    z, replay = native.forward(
        settings, True, x, layer.weight, layer.bias, layer.running_mean, layer.running_var, None, True
    )
    grads = native.backward(
        settings, True, x, grad, layer.weight, layer.bias, layer.control_y, layer.control_1, replay, (True, True, True)
    )
    connection.send((z.numpy(), grads[0].numpy()))


made_in_parent = made()
layer_in_parent = layer_and_reference(SHAPE[1])


class Normalised(Dataset):
    """A data set that runs a model, as preprocessing sometimes does."""

    def __init__(self, layer):
        self.layer = layer.eval()

    def __len__(self):
        return 6

    def __getitem__(self, index):
        with torch.no_grad():
            return self.layer(made(index)[0])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(context):
    layer, _ = layer_and_reference(SHAPE[1])
    step(layer, *made())
    data = Normalised(layer)
    expected = [data[i] for i in range(len(data))]
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context, timeout=100)
    for got, wanted in zip(loader, expected, strict=True):
        assert torch.equal(got, wanted)


def test_threads_that_train_at_the_same_time():
    """Python threads, each with a model of its own, share the engine but not its scratch."""
    expected = {}
    for seed in range(4):
        layer, _ = layer_and_reference(SHAPE[1], seed=seed)
        for _ in range(5):
            step(layer, *made(seed))
        expected[seed] = state_of(layer)
    got = {}

    def train(seed):
        layer, _ = layer_and_reference(SHAPE[1], seed=seed)
        for _ in range(5):
            step(layer, *made(seed))
        got[seed] = state_of(layer)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert_same_state(expected[seed], got[seed])
