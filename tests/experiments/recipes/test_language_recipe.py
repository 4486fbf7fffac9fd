"""`rnn` and `lstm` on a made text: what they learn of it, and by how much sooner with Online Normalization."""

from dataclasses import asdict

import pytest
from smoke import do

from onlinenorm.experiments.data.made import PERPLEXITY, made_text
from onlinenorm.experiments.recipes import language


@pytest.mark.parametrize(("name", "early"), [("rnn", 2), ("lstm", 1)])
def test_the_text_is_learnt_and_sooner_with_onlinenorm_than_with_none(tmp_path, name, early):
    """At the same learning rate. At first any word may follow; in the end the three that can."""
    online, none = ([row["perplexity"] for row in run.rows] for run in do(name, tmp_path, ("online", "none")))
    words = len(made_text().vocabulary)
    assert PERPLEXITY < min(online) < 1.5 * PERPLEXITY, f"of {words} equally frequent words: {online}"
    assert none[0] > 0.9 * words, none
    assert online[early - 1] < none[early - 1] / 2, f"after {early} epochs: online {online}, none {none}"


@pytest.mark.parametrize("name", ["rnn", "lstm"])
def test_layer_normalisation_trains_it_too(tmp_path, name):
    (record,) = do(name, tmp_path, ("layer",), epochs="2")
    first, second = (row["perplexity"] for row in record.rows)
    assert second < first


def test_the_paper_s_settings():
    decays = {"rnn": (40, 16383 / 16384, 127 / 128), "lstm": (25, 8191 / 8192, 31 / 32)}
    rates = {"rnn": {"online": 1.7, "layer": 0.95, "none": 0.5}, "lstm": {"online": 6.5, "layer": 3.25, "none": 3.5}}
    for name, (epochs, alpha_fwd, alpha_bwd) in decays.items():
        for norm, rate in rates[name].items():
            expected = {
                "data": "penn-treebank", "cell": name, "size": 200, "epochs": epochs, "batch_size": 20, "longest": 128,
                "learning_rate": rate, "weight_decay": 1e-6, "clip": 1, "alpha_fwd": alpha_fwd, "alpha_bwd": alpha_bwd,
            }  # fmt: skip
            assert expected.items() <= asdict(language.settings(name, "paper", norm)).items()
