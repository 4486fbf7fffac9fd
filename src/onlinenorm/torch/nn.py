"""`RNN`, `LSTM` and their cells as in `torch.nn`, with a normaliser inside: `norm="online"`, `"layer"` or None.

What such a layer gives to its nonlinearities is normalised first, once a time step: the sum of the input's part, the
state's part and the biases. This is where Ba et al. (2016, section 3.1) have layer normalisation, and where the
experiments of the paper have Online Normalization (appendix A.4):

    RNN     h <- tanh(norm(a))                           a = W_ih x + b_ih + W_hh h + b_hh

    LSTM    i, f, g, o = norm_i(a_i), norm_f(a_f), norm_g(a_g), norm_o(a_o)
            c <- sigmoid(f) c + sigmoid(i) tanh(g)       h <- sigmoid(o) tanh(c)

Each gate of the LSTM has a normaliser of its own, so that layer scaling divides each by a root mean square of its own.
The memory cell c has none: normalisation would pull towards zero what it is there to keep.

Online Normalization takes the samples of all time steps as one stream: step by step, and within a step in the order of
the batch; the backward goes through the steps from the last to the first. A call on L steps of N sequences moves the
streams on by L N samples, so the decays should be nearer to 1 than elsewhere. The paper has alpha_fwd = 16383/16384
and alpha_bwd = 127/128 for its RNN, 8191/8192 and 31/32 for its LSTM.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.torch.layers import OnlineNorm1d

__all__ = ["LSTM", "RNN", "LSTMCell", "RNNCell"]

Norm = Literal["online", "layer"] | None
Nonlinearity = Literal["tanh", "relu"]
_NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}

_State = tuple[Tensor, ...]  # (h,) of an RNN, (h, c) of an LSTM


class _Normalised(nn.Module):
    """What a normaliser adds to a layer or a cell of `torch.nn`."""

    norm: nn.Module | None
    hidden_size: int
    bias: bool

    _gates: tuple[str, ...]  # in the order of their rows in weights and biases; empty: the rows are the state's
    _states = 1

    def _make_norm(self, norm: Norm, settings: dict[str, Any], like: dict[str, Any]) -> None:
        if norm not in ("online", "layer", None):
            raise ValueError(f'norm must be "online", "layer" or None, got {norm!r}')
        if norm is None:
            if settings:
                raise TypeError(f"norm=None takes no settings, got {', '.join(settings)}")
            self.norm = None
            return
        kind = OnlineNorm1d if norm == "online" else nn.LayerNorm
        make = partial(kind, self.hidden_size, **settings, **like)
        self.norm = nn.ModuleDict({gate: make() for gate in self._gates}) if self._gates else make()

    def reset_parameters(self) -> None:
        """Draw weights and biases as `torch.nn` does, uniform within 1 / sqrt(hidden_size). The normaliser's stay."""
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -(self.hidden_size**-0.5), self.hidden_size**-0.5)

    def _step(self, at_t: Tensor, weight: Tensor, state: _State) -> _State:
        """Take a state of (N, hidden_size) one step on.

        Args:
            at_t: the input's part of the sum, (N, hidden_size), or (gates, N, hidden_size).
            weight: what the state is multiplied by, (hidden_size, hidden_size), or (gates, hidden_size, hidden_size).
            state: h, or h and c.
        """
        raise NotImplementedError

    def _parts(self, x: Tensor, suffix: str) -> tuple[Tensor, Tensor]:
        """The input's part of the sum for every step of x (L, N, input_size), and the weight, as `_step` takes them."""
        bias = None
        if self.bias:
            bias = getattr(self, f"bias_ih{suffix}") + getattr(self, f"bias_hh{suffix}")
        inputs = F.linear(x, getattr(self, f"weight_ih{suffix}"), bias)  # one multiplication for all steps
        weight: Tensor = getattr(self, f"weight_hh{suffix}").t()
        if not self._gates:
            return inputs, weight
        inputs, weight = (t.view(*t.shape[:-1], len(self._gates), self.hidden_size) for t in (inputs, weight))
        return inputs.movedim(-2, -3), weight.movedim(-2, -3)

    def _checked_state(self, x: Tensor, hx: _State | None, batch: tuple[int, ...]) -> _State:
        shape = (*batch, self.hidden_size)
        if hx is None:
            return tuple(x.new_zeros(shape) for _ in range(self._states))
        if len(hx) != self._states:
            raise RuntimeError(f"{type(self).__name__}: Expected hx to be a tuple of h and c, got {len(hx)} tensors")
        for h in hx:
            if h.shape != shape:
                raise RuntimeError(f"{type(self).__name__}: Expected hidden size {shape}, got {tuple(h.shape)}")
        return hx


class _Elman(_Normalised):
    nonlinearity: str
    _gates = ()

    def _step(self, at_t: Tensor, weight: Tensor, state: _State) -> _State:
        assert self.norm is not None
        a = self.norm(torch.addmm(at_t, state[0], weight))
        return (_NONLINEARITIES[self.nonlinearity](a),)


class _FourGates(_Normalised):
    norm: nn.ModuleDict | None
    _gates = ("i", "f", "g", "o")
    _states = 2

    def _step(self, at_t: Tensor, weight: Tensor, state: _State) -> _State:
        assert self.norm is not None
        h, c = state
        a = torch.baddbmm(at_t, h.expand(len(self._gates), -1, -1), weight)  # a contiguous tensor for each gate
        i, f, g, o = (norm(part) for norm, part in zip(self.norm.values(), a.unbind(0), strict=True))
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


def _over_time(layer: "RNN | LSTM", x: Tensor, hx: _State | None) -> tuple[Tensor, _State]:
    """What a layer does: its steps over x, (L, N, input_size) or (L, input_size)."""
    kind = type(layer).__name__
    if not isinstance(x, Tensor):
        raise TypeError(f"{kind}: Expected input to be a tensor, got {type(x).__name__}")
    if x.dim() not in (2, 3):
        raise ValueError(f"{kind}: Expected input to be 2D or 3D, got {x.dim()}D instead")
    batched = x.dim() == 3
    time = 1 if batched and layer.batch_first else 0
    x = x.movedim(time, 0) if batched else x.unsqueeze(1)
    layer.check_input(x, None)
    if len(x) == 0:
        raise RuntimeError(f"{kind}: Expected sequence length to be larger than 0")
    state = layer._checked_state(x, hx, (1, x.shape[1]) if batched else (1,))
    if batched:
        state = tuple(h.squeeze(0) for h in state)
    inputs, weight = layer._parts(x, "_l0")
    outputs = []
    for at_t in inputs.unbind(0):
        state = layer._step(at_t, weight, state)
        outputs.append(state[0])
    if batched:
        return torch.stack(outputs, time), tuple(h.unsqueeze(0) for h in state)
    return torch.cat(outputs), state


def _once(cell: "RNNCell | LSTMCell", x: Tensor, hx: _State | None) -> _State:
    """What a cell does: one step, for x of (N, input_size) or (input_size,)."""
    kind = type(cell).__name__
    if x.dim() not in (1, 2):
        raise ValueError(f"{kind}: Expected input to be 1D or 2D, got {x.dim()}D instead")
    if x.shape[-1] != cell.input_size:
        raise RuntimeError(f"{kind}: Expected input of {cell.input_size} features, got {x.shape[-1]}")
    state = cell._checked_state(x, hx, tuple(x.shape[:-1]))
    if x.dim() == 2:
        return cell._step(*cell._parts(x, ""), state)
    state = cell._step(*cell._parts(x.unsqueeze(0), ""), tuple(h.unsqueeze(0) for h in state))
    return tuple(h.squeeze(0) for h in state)


class RNN(_Elman, nn.RNN):
    """`torch.nn.RNN` of one layer and one direction, with a normaliser: h <- tanh(norm(W_ih x + b_ih + W_hh h + b_hh)).

    Inputs, outputs, parameters and their names are those of `torch.nn.RNN`; `norm` is the normaliser. Sequences are
    tensors: padding would enter the statistics of Online Normalization like any other sample.

    Args:
        input_size: features of the input.
        hidden_size: features of the state.
        nonlinearity: "tanh" or "relu".
        bias: whether there are `bias_ih_l0` and `bias_hh_l0`.
        batch_first: whether a batch of sequences is (N, L, *) in place of (L, N, *).
        norm: "online" for `OnlineNorm1d`, "layer" for `nn.LayerNorm`, None for what `torch.nn.RNN` does.
        device, dtype: of the parameters.
        settings: further arguments of the normaliser, such as `alpha_fwd`, `alpha_bwd` and `guard` of `OnlineNorm1d`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        nonlinearity: Nonlinearity = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        norm: Norm = "online",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        like = {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, 1, nonlinearity, bias, batch_first, **like)
        self._make_norm(norm, settings, like)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Go over sequences from the state hx, by default zero: the state after every step, and the last one again."""
        if self.norm is None:
            return super().forward(input, hx)
        output, (h,) = _over_time(self, input, None if hx is None else (hx,))
        return output, h


class LSTM(_FourGates, nn.LSTM):
    """`torch.nn.LSTM` of one layer and one direction, with a normaliser for each gate and none for the memory cell.

    Inputs, outputs, parameters and their names are those of `torch.nn.LSTM`; `norm` holds the normalisers of the gates
    "i", "f", "g" and "o". Sequences are tensors, see `RNN`.

    Args:
        input_size: features of the input.
        hidden_size: features of the state and of the memory cell.
        bias: whether there are `bias_ih_l0` and `bias_hh_l0`.
        batch_first: whether a batch of sequences is (N, L, *) in place of (L, N, *).
        norm: "online" for `OnlineNorm1d`, "layer" for `nn.LayerNorm`, None for what `torch.nn.LSTM` does.
        device, dtype: of the parameters.
        settings: further arguments of the normalisers, such as `alpha_fwd`, `alpha_bwd` and `guard` of `OnlineNorm1d`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        batch_first: bool = False,
        norm: Norm = "online",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        like = {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, 1, bias, batch_first, **like)
        self._make_norm(norm, settings, like)

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Go over sequences from the state hx, h and c, by default zero: h after every step, and the last state."""
        if self.norm is None:
            return super().forward(input, hx)
        output, (h, c) = _over_time(self, input, hx)
        return output, (h, c)


class RNNCell(_Elman, nn.RNNCell):
    """One step of `RNN`: `torch.nn.RNNCell` with a normaliser, the module `norm`. See `RNN` for the arguments."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        nonlinearity: Nonlinearity = "tanh",
        norm: Norm = "online",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        if nonlinearity not in _NONLINEARITIES:
            raise ValueError(f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'.")
        like = {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, nonlinearity, **like)
        self._make_norm(norm, settings, like)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Take the state hx, by default zero, one step on."""
        if self.norm is None:
            return super().forward(input, hx)
        (h,) = _once(self, input, None if hx is None else (hx,))
        return h


class LSTMCell(_FourGates, nn.LSTMCell):
    """One step of `LSTM`: `torch.nn.LSTMCell` with normalisers, in the module `norm`. See `LSTM` for the arguments."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        norm: Norm = "online",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        like = {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, **like)
        self._make_norm(norm, settings, like)

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Take the state hx, h and c, by default zero, one step on."""
        if self.norm is None:
            return super().forward(input, hx)
        h, c = _once(self, input, hx)
        return h, c
