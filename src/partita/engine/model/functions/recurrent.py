"""Recurrent layers of torch in operations that can be stacked over clients: a product of matrices per step.

LSTM:  i, f, g, o = W x_t + b + U h + c,   c ← σ(f) c + σ(i) tanh(g),   h ← σ(o) tanh(c)
GRU:   r, z, n = W x_t + b,  r', z', n' = U h + c,   m = tanh(n + σ(r + r') n'),   h ← (1 − z) m + z h
RNN:   h ← tanh(W x_t + b + U h + c), or relu
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor

if TYPE_CHECKING:
    from partita.engine.model.functions import Functions

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]
"""(what the input adds to the gates, what the last state adds to them, the last state) -> the new state."""


def _lstm(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    i, f, g, o = (inputs + recurrent).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    (r, z, n), (r_, z_, n_) = inputs.chunk(3, -1), recurrent.chunk(3, -1)
    z = torch.sigmoid(z + z_)
    m = torch.tanh(n + torch.sigmoid(r + r_) * n_)
    return ((1 - z) * m + z * state[0],)


def _layer(cell: Cell) -> Callable[..., Any]:
    """Return the form of a function that runs all layers of a recurrent module over a sequence."""

    def form(
        mode: Functions,
        func: Any,  # noqa: ARG001
        input: Tensor,
        state: State | Tensor,
        params: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: float = 0.0,
        train: bool = False,
        bidirectional: bool = False,
        batch_first: bool | None = None,
    ) -> Any:
        width, directions = 4 if has_biases is True else 2, 2 if bidirectional else 1
        packed = batch_first is None  # then the arguments are others
        if packed or len(params) != width * directions * num_layers:  # or states are projected
            return NotImplemented
        if not mode.apart(input, *params) and not (dropout and train):
            return NotImplemented
        states = state if isinstance(state, tuple | list) else (state,)
        x = input.transpose(0, 1) if batch_first else input
        last: list[State] = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                place = layer * directions + direction
                weights = params[place * width : (place + 1) * width]
                output, after = _read(
                    cell, x.flip(0) if direction else x, [s[place] for s in states], weights
                )
                outputs.append(output.flip(0) if direction else output)
                last.append(after)
            x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
            if dropout and train and layer < num_layers - 1:
                with mode:
                    x = F.dropout(x, dropout)
        return (x.transpose(0, 1) if batch_first else x, *[torch.stack(parts) for parts in zip(*last)])

    return form


def _cell(cell: Cell) -> Callable[..., Any]:
    """Return the form of a function that takes one step of a sequence."""

    def form(
        mode: Functions,
        func: Any,  # noqa: ARG001
        input: Tensor,
        state: State | Tensor,
        w: Tensor,
        u: Tensor,
        b: Tensor | None = None,
        c: Tensor | None = None,
    ) -> Any:
        if not mode.apart(input, w, u):
            return NotImplemented
        states = tuple(state) if isinstance(state, tuple | list) else (state,)
        after = cell(F.linear(input, w, b), F.linear(states[0], u, c), states)
        return after if len(after) > 1 else after[0]

    return form


def _read(cell: Cell, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, State]:
    """Return all outputs of one direction of one layer, [T, B, H], and its last state."""
    (w, u), (b, c) = weights[:2], weights[2:] if len(weights) == 4 else (None, None)
    now: State = tuple(state)
    outputs = []
    for inputs in F.linear(x, w, b).unbind(0):
        now = cell(inputs, F.linear(now[0], u, c), now)
        outputs.append(now[0])
    return torch.stack(outputs), now


def _plain(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda inputs, recurrent, state: (activation(inputs + recurrent),)  # noqa: ARG005


FORMS: dict[Any, Callable[..., Any]] = {
    _VF.lstm: _layer(_lstm),
    _VF.gru: _layer(_gru),
    _VF.rnn_tanh: _layer(_plain(torch.tanh)),
    _VF.rnn_relu: _layer(_plain(torch.relu)),
    _VF.lstm_cell: _cell(_lstm),
    _VF.gru_cell: _cell(_gru),
    _VF.rnn_tanh_cell: _cell(_plain(torch.tanh)),
    _VF.rnn_relu_cell: _cell(_plain(torch.relu)),
}
