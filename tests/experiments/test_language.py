"""The language model, and how a text becomes its batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from onlinenorm.experiments.language import LanguageModel, detached, drawn_lengths, pieces, side_by_side
from onlinenorm.torch import OnlineNorm

CELLS = ("rnn", "lstm")
NORMS = ("online", "layer", "none")


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_decoder_shares_the_embedding_s_weight(cell, norm):
    model = LanguageModel(50, 8, cell, norm).eval()
    gates = 4 if cell == "lstm" else 1
    normalisers = 0 if norm == "none" else gates
    expected = 50 * 8 + 50 + gates * (2 * 8 * 8 + 2 * 8) + normalisers * 2 * 8
    assert sum(p.numel() for p in model.parameters()) == expected
    assert sum(isinstance(m, OnlineNorm) for m in model.modules()) == (normalisers if norm == "online" else 0)
    words = torch.randint(50, (6, 3))
    logits, _ = model(words)
    output, _ = model.recurrent(model.embedding(words))
    assert torch.allclose(logits, F.linear(output, model.embedding.weight, model.bias))
    assert logits.shape == (6, 3, 50)


@pytest.mark.parametrize("cell", CELLS)
def test_every_normaliser_starts_from_the_same_weights(cell):
    models = []
    for norm in NORMS:
        torch.manual_seed(0)
        models.append(dict(LanguageModel(50, 8, cell, norm).named_parameters()))
    for name, parameter in models[2].items():
        assert all(torch.equal(other[name], parameter) for other in models), name
    embedding, bias = models[0]["embedding.weight"], models[0]["bias"]
    assert 0.09 < embedding.abs().max() <= 0.1, "words' vectors start uniform within 0.1"
    assert not bias.any()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_state_goes_on_from_piece_to_piece_and_its_gradient_does_not(cell, norm):
    torch.manual_seed(0)
    model = LanguageModel(50, 8, cell, norm).eval()
    words = torch.randint(50, (9, 3))
    whole, _ = model(words)
    hidden, logits = None, []
    for piece in words.split((4, 3, 2)):
        out, hidden = model(piece, hidden)
        hidden = detached(hidden)
        assert not any(h.requires_grad for h in (hidden if cell == "lstm" else [hidden]))
        logits.append(out)
    assert torch.allclose(torch.cat(logits), whole, atol=1e-6), "the model forgets at the end of a piece"


@given(
    words=st.integers(2, 60), streams=st.integers(1, 7), world=st.integers(1, 3), longest=st.integers(1, 9),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_every_word_is_read_once_and_every_next_one_asked_for(words, streams, world, longest, seed):
    """By the processes together, but for the words that do not fill a row."""
    text = torch.arange(words)
    length = words // streams
    if length < 2:
        return
    torch.manual_seed(seed)
    lengths = drawn_lengths(length - 1, longest)
    assert sum(lengths) == length - 1
    assert all(1 <= n <= longest for n in lengths)
    expected = torch.arange(streams * length).view(streams, length).T
    for cut in (lengths, longest):
        for rank in range(world):
            read = pieces(side_by_side(text, streams, rank, world), cut)
            given_words, asked_for = torch.cat([x for x, _ in read]), torch.cat([y for _, y in read])
            assert torch.equal(given_words, expected[:-1, rank::world])
            assert torch.equal(asked_for, expected[1:, rank::world])


def test_lengths_are_uniform():
    torch.manual_seed(0)
    lengths = torch.tensor(drawn_lengths(200_000, 8)[:-1])
    shares = lengths.bincount(minlength=9)[1:] / len(lengths)
    assert torch.allclose(shares, torch.full((8,), 1 / 8), atol=0.01), shares
