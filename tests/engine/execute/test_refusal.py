"""A model that cannot be stacked is told why in a sentence, and which layer it is."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt
from support import each

Body = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A layer that does something of its own to [samples, 6]."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x))


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(Layer(body))])
        self.output = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def told(model: nn.Module) -> str:
    """Return why the clients of a model are not stacked."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(3), 8)
    x, y = rng.normal(size=(24, 6)).astype(np.float32), rng.integers(0, 3, 24)
    data = pt.data.from_arrays(x, y, client, test=0.2, validation=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pt.federate(
            model, data, pt.fedavg(lr=0.1), rounds=1, steps=1, batch=3, executor="vmap", baselines=False
        )
    (text,) = (str(w.message) for w in caught if "cannot be stacked" in str(w.message))
    return text.partition("Reason: ")[2]


def branching(h: Tensor) -> Tensor:
    return h if h.sum() > 0 else -h


def written(h: Tensor) -> Tensor:
    result = torch.zeros(len(h), 6)
    result[:, 0] = h[:, 0]
    return result + h


LAYER = r"in layer 'blocks\.1\.0' \(Layer\), "
CASES: dict[str, tuple[Body, str]] = {
    "control flow": (branching, LAYER + r"the values of a tensor decide what happens .*torch\.where"),
    "item": (lambda h: h * h.sum().item(), LAYER + "the values of a tensor decide"),
    "shape": (lambda h: h + h[h > 0].sum(), LAYER + r"the shape of a result depends .*\(boolean mask\)"),
    "nonzero": (lambda h: h + (h > 0).nonzero().sum(), LAYER + r"the shape .*\(aten::nonzero\)"),
    "selected": (lambda h: h + h.masked_select(h > 0).sum(), LAYER + r"the shape .*\(masked_select\)"),
    "no rule": (lambda h: h + torch.renorm(h, 2, 0, 1.0), LAYER + "aten::renorm cannot run for several"),
    "compared": (lambda h: h if torch.equal(h, h) else -h, LAYER + "aten::equal cannot run for several"),
    "backward": (lambda h: h.unfold(1, 6, 1)[:, 0], "in the backward pass, aten::unfold_backward cannot run"),
    "shared": (written, LAYER + r"values that differ by client are written .*x\.new_zeros"),
    "taken out": (lambda h: h + h.sum().tolist(), LAYER + r"values are taken out of their tensors"),
    "mixed": (
        lambda h: h - h.mean(0),
        r"its gradients differ .*the first output to differ is that of layer 'blocks\.1\.0' \(Layer\)",
    ),
}


@each(("body", "expected"), CASES.values(), ids=CASES)
def test_the_reason_names_the_layer(body, expected) -> None:
    reason = told(Net(body))
    assert re.match(expected, reason), reason
    assert "github" not in reason
    assert len(reason) < 300


def test_what_the_model_itself_does_is_said_to_be_its_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return branching(self.output(x))

    assert told(Own()).startswith("in the model (Own), the values of a tensor decide")


def test_an_error_of_another_kind_keeps_its_words() -> None:
    class Strict(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch._C._functorch.is_functorch_wrapped_tensor(x):
                raise TypeError("plain tensors only")
            return super().forward(x)

    assert (
        told(nn.Sequential(nn.Tanh(), Strict(6, 3))) == "in layer '1' (Strict), TypeError: plain tensors only"
    )


def test_a_layer_with_samples_on_the_second_axis_is_found() -> None:
    def second(h: Tensor) -> Tensor:
        h = h.view(-1, 2, 3).transpose(0, 1)
        return (F.relu(h) - h.mean(1, keepdim=True)).transpose(0, 1).flatten(1)

    assert "that of layer 'blocks.1.0' (Layer)" in told(Net(second))
