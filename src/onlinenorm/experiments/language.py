"""The paper's language model (appendix A.4): words in, the logits of the next ones out, by one recurrent layer.

Text is cut as PyTorch's word language model example cuts it: into so many streams of equal length, side by side, each
of which is read from its beginning to its end. A piece of all streams is a batch; the state goes on from one to the
next, without its gradient.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.torch.nn import LSTM, RNN

Cell = Literal["rnn", "lstm"]
Hidden = Tensor | tuple[Tensor, Tensor]  # of an RNN, or of an LSTM
INITIAL_RANGE = 0.1  # of the words' vectors


class LanguageModel(nn.Module):
    """Embedding, one recurrent layer, and a decoder that shares the embedding's weight (Press and Wolf, 2017).

    Words' vectors start uniform within 0.1 and the decoder's bias at zero, as in PyTorch's example, which the authors'
    code follows; the recurrent layer starts as PyTorch's do. The initial weights are the same for each normaliser.

    Args:
        vocabulary: how many words there are.
        size: of a word's vector and of the state.
        cell: "rnn" or "lstm".
        norm: "online", "layer" or "none", see `onlinenorm.torch.nn`.
        settings: of the normaliser.
    """

    def __init__(
        self, vocabulary: int, size: int = 200, cell: Cell = "rnn", norm: str = "online", **settings: Any
    ) -> None:
        super().__init__()
        layer = {"rnn": RNN, "lstm": LSTM}[cell]
        self.embedding = nn.Embedding(vocabulary, size)
        self.recurrent = layer(size, size, norm=None if norm == "none" else norm, **settings)
        self.bias = nn.Parameter(self.embedding.weight.new_zeros(vocabulary))
        nn.init.uniform_(self.embedding.weight, -INITIAL_RANGE, INITIAL_RANGE)

    def forward(self, words: Tensor, hidden: Hidden | None = None) -> tuple[Tensor, Hidden]:
        """Logits (L, N, vocabulary) of the words that follow on each of `words` (L, N), and the state after them."""
        output, hidden = self.recurrent(self.embedding(words), hidden)
        return F.linear(output, self.embedding.weight, self.bias), hidden


def detached(hidden: Hidden) -> Hidden:
    """The state, without its gradient."""
    return hidden.detach() if isinstance(hidden, Tensor) else (hidden[0].detach(), hidden[1].detach())


def side_by_side(words: Tensor, streams: int, rank: int = 0, world: int = 1) -> Tensor:
    """A text as streams of equal length, (L, streams); what does not fill a last row is left out.

    Args:
        words: the text.
        streams: how many.
        rank: of this process, which gets every world-th stream.
        world: how many processes there are.
    """
    length = len(words) // streams
    return words[: length * streams].view(streams, length)[rank::world].t().contiguous()


def drawn_lengths(total: int, longest: int) -> list[int]:
    """Lengths that add up to `total`, uniform in [1, longest] but for the last; from PyTorch's global generator."""
    drawn = torch.randint(1, longest + 1, (total,))
    lengths: list[int] = drawn[drawn.cumsum(0) < total].tolist()
    return [*lengths, total - sum(lengths)]


def pieces(streams: Tensor, lengths: int | list[int]) -> list[tuple[Tensor, Tensor]]:
    """Streams cut into pieces: words, and the words that follow on them, (length, N) each.

    Args:
        streams: (L, N). The last words only follow.
        lengths: of the pieces, L - 1 in all, or one for all pieces but the last.
    """
    return list(zip(torch.split(streams[:-1], lengths), torch.split(streams[1:], lengths), strict=True))
