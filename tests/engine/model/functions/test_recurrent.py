"""Recurrent layers taken apart equal torch's own: outputs, states and gradients, alone and stacked."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from partita.engine.model.functions import Functions
from support import each

CLIENTS, B, T, IN, HIDDEN = 2, 3, 4, 5, 6
Params = dict[str, Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Layer(nn.Module):
    """A recurrent layer whose states count, too."""

    def __init__(self, kind: type[nn.RNNBase], state: bool = False, **options) -> None:
        super().__init__()
        self.rnn, self.state = kind(IN, HIDDEN, **options), state

    def forward(self, x: Tensor) -> Tensor:
        given = None
        if self.state:
            places = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
            h = x.new_ones(places, x.shape[0 if self.rnn.batch_first else 1], HIDDEN) * 0.3
            given = (h, 2 * h) if isinstance(self.rnn, nn.LSTM) else h
        output, last = self.rnn(x, given)
        last = torch.cat(last, -1) if isinstance(last, tuple) else last
        return torch.cat([output.flatten(), last.flatten()])


KINDS = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu"}),
}
SHAPES = {
    "plain": {},
    "samples first": {"batch_first": True},
    "deep": {"num_layers": 3, "bidirectional": True},
    "no bias": {"bias": False, "num_layers": 2, "batch_first": True},
    "with a state": {"state": True, "num_layers": 2, "bidirectional": True},
}
CASES = {f"{k}, {s}": (KINDS[k], SHAPES[s]) for k, s in itertools.product(KINDS, SHAPES)}


def stacked(module: nn.Module, x: Tensor, keys: Tensor) -> tuple[Tensor, Params, Params]:
    """Return outputs, gradients of their squares, and parameters of clients with weights of their own."""
    params = {k: drawn(CLIENTS, *p.shape, seed=i) * 0.4 for i, (k, p) in enumerate(module.named_parameters())}

    def one(params: Params, x: Tensor, key: Tensor):
        def value(params: Params) -> tuple[Tensor, Tensor]:
            result = functional_call(module, params, (x,))
            return result.square().sum(), result

        with Functions(key):
            return grad(value, has_aux=True)(params)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule")
        gradient, result = vmap(one, randomness="different")(params, x, keys)
    return result, gradient, params


def alone(module: nn.Module, params: Params, x: Tensor) -> tuple[Tensor, Params]:
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    result = functional_call(module, leaves, (x,))
    return result, dict(zip(leaves, torch.autograd.grad(result.square().sum(), list(leaves.values()))))


def row(params: Params, i: int) -> Params:
    return {k: v[i] for k, v in params.items()}


@each(("kind", "options"), CASES.values(), ids=CASES)
def test_stacked_is_torchs_own(kind, options) -> None:
    module = Layer(kind[0], **kind[1], **options).double()
    x = drawn(CLIENTS, B, T, IN, seed=20)
    result, gradient, params = stacked(module, x, torch.arange(CLIENTS))
    for i in range(CLIENTS):
        expected, reference = alone(module, row(params, i), x[i])
        torch.testing.assert_close(result[i], expected, rtol=1e-11, atol=1e-12)
        for name, g in reference.items():
            torch.testing.assert_close(gradient[name][i], g, rtol=1e-9, atol=1e-11)


@each("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_is_that_of_the_key(kind) -> None:
    module = Layer(kind, num_layers=2, dropout=0.5, batch_first=True).double()
    x, keys = drawn(CLIENTS, B, T, IN, seed=20), torch.arange(CLIENTS)
    result, gradient, params = stacked(module, x, keys)
    before = torch.get_rng_state()
    for i in range(CLIENTS):
        with Functions(keys[i]) as mode:
            expected, reference = alone(module, row(params, i), x[i])
        assert mode.used
        torch.testing.assert_close(result[i], expected, rtol=1e-11, atol=1e-12)
        for name, g in reference.items():
            torch.testing.assert_close(gradient[name][i], g, rtol=1e-9, atol=1e-11)
    assert torch.equal(torch.get_rng_state(), before)
    dry = functional_call(module.eval(), row(params, 0), (x[0],))
    assert not torch.allclose(dry, result[0])


class Steps(nn.Module):
    """A cell, called for each step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return torch.cat(state, -1) if isinstance(state, tuple) else state


CELLS = {
    "LSTM": lambda: nn.LSTMCell(IN, HIDDEN),
    "LSTM, no bias": lambda: nn.LSTMCell(IN, HIDDEN, bias=False),
    "GRU": lambda: nn.GRUCell(IN, HIDDEN),
    "RNN": lambda: nn.RNNCell(IN, HIDDEN),
    "RNN, relu": lambda: nn.RNNCell(IN, HIDDEN, nonlinearity="relu"),
}


@each("make", CELLS.values(), ids=CELLS)
def test_cells(make) -> None:
    module = Steps(make()).double()
    x = drawn(CLIENTS, B, T, IN, seed=20)
    result, gradient, params = stacked(module, x, torch.arange(CLIENTS))
    for i in range(CLIENTS):
        expected, reference = alone(module, row(params, i), x[i])
        torch.testing.assert_close(result[i], expected, rtol=1e-11, atol=1e-12)
        for name, g in reference.items():
            torch.testing.assert_close(gradient[name][i], g, rtol=1e-9, atol=1e-11)


def test_alone_it_is_torchs_own_to_the_bit() -> None:
    module = Layer(nn.LSTM, num_layers=2)
    x = drawn(T, B, IN).float()
    with Functions(torch.tensor(0)) as mode:
        result = module(x)
    assert mode.used
    assert torch.equal(result, module(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(IN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([T, 2, 1][: len(x)])
        return self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1]


def test_packed_sequences_are_torchs_own_alone_and_fail_in_a_stack() -> None:
    module, x = Packed().double(), drawn(CLIENTS, B, T, IN)
    with Functions(torch.tensor(0)):
        result = module(x[0])
    assert torch.equal(result, module(x[0]))
    with pytest.raises((RuntimeError, UserWarning)):
        stacked(module, x, torch.arange(CLIENTS))


def test_projected_states_are_left_to_torch() -> None:
    module, x = Layer(nn.LSTM, proj_size=2).double(), drawn(CLIENTS, T, B, IN)
    result, _, params = stacked(module, x, torch.arange(CLIENTS))
    for i in range(CLIENTS):
        torch.testing.assert_close(result[i], alone(module, row(params, i), x[i])[0])
