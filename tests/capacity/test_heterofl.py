"""HeteroFL: the scaler and the masked loss, against a client that is written out from the paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from capacity.weak import KINDS, Tensors, assert_close, convs, digits, everything, federate, mlp, rounds
from partita.capacity import heterofl, width
from partita.core.parts import Capacity
from partita.data import FederatedData
from support import each

RATES = {"strong": 1.0, "weak": 0.5}


def few_classes() -> FederatedData:
    """Clients that have the digits i and i + 1, and i + 2 in one of their test samples."""
    data = digits()
    order, train = [], []
    for client, n in enumerate((6, 5, 6, 6, 4, 6)):
        some = [torch.nonzero(data.y == digit).flatten()[client * 8 :][:n] for digit in (client, client + 1)]
        train.append((sum(map(len, order)), 2 * n))
        order += [*some, torch.nonzero(data.y == client + 2).flatten()[:1]]
    rows = torch.cat(order)
    return FederatedData.make(data.x[rows], data.y[rows], train, [(a + n, 1) for a, n in train])


def plain_step(x: Tensor, y: Tensor, w: Tensors, rate: float, mask: bool, lr: float) -> Tensors:
    """One step of SGD on the slices of an mlp: scaler after every hidden layer, logits of 0."""
    half = [int(rate * n) for n in (32, 16)]
    held = {
        "hidden1.linear.weight": w["hidden1.linear.weight"][: half[0]],
        "hidden1.linear.bias": w["hidden1.linear.bias"][: half[0]],
        "hidden2.linear.weight": w["hidden2.linear.weight"][: half[1], : half[0]],
        "hidden2.linear.bias": w["hidden2.linear.bias"][: half[1]],
        "output.linear.weight": w["output.linear.weight"][:, : half[1]],
        "output.linear.bias": w["output.linear.bias"],
    }
    held = {k: v.clone().requires_grad_() for k, v in held.items()}
    a = x.flatten(1)
    for name in ("hidden1", "hidden2"):
        a = torch.relu((a @ held[f"{name}.linear.weight"].T + held[f"{name}.linear.bias"]) / rate)
    logits = a @ held["output.linear.weight"].T + held["output.linear.bias"]
    if mask:
        absent = [k for k in range(10) if k not in y.tolist()]
        logits = logits.clone()
        logits[:, absent] = 0
    nn.functional.cross_entropy(logits, y).backward()
    return {k: lr * v.grad for k, v in held.items()}


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_client_as_the_paper_writes_it(executor: str) -> None:
    """Each takes one step on all of its samples, so that they are what decides its classes."""
    data = few_classes()
    held = heterofl(RATES, KINDS)
    (round,), _ = rounds(mlp(), data, pt.fedavg(lr=0.3), capacity=held, steps=1, batch=12, executor=executor)
    for client, kind in enumerate(KINDS):
        expected = plain_step(*data.client(client), round.before, RATES[kind], mask=True, lr=0.3)
        for name, delta in expected.items():
            sent = round.upload(client)[name]
            torch.testing.assert_close(sent[tuple(slice(0, n) for n in delta.shape)], delta)


@each("held", [width(RATES, KINDS, scale=True), width(RATES, KINDS, mask=True), heterofl(RATES, KINDS)])
def test_stacked_as_alone(held: Capacity) -> None:
    runs = [
        federate(
            convs(),
            few_classes(),
            pt.fedavg(lr=0.1),
            capacity=held,
            rounds=2,
            norm="static",
            executor=executor,
        )
        for executor in ("loop", "vmap")
    ]
    assert_close(*map(everything, runs))


def test_each_option_is_a_difference() -> None:
    shared = []
    for options in ({}, {"scale": True}, {"mask": True}, {"scale": True, "mask": True}):
        run = federate(mlp(), few_classes(), pt.fedavg(lr=0.3), capacity=width(RATES, KINDS, **options))
        shared.append(torch.cat([v.flatten() for v in run.shared.values()]))
    for i, one in enumerate(shared):
        assert all(not torch.allclose(one, other) for other in shared[:i])
    whole = federate(mlp(), few_classes(), pt.fedavg(lr=0.3), capacity=heterofl(RATES, KINDS))
    torch.testing.assert_close(torch.cat([v.flatten() for v in whole.shared.values()]), shared[3])


def test_a_client_with_all_classes_masks_nothing() -> None:
    data = few_classes()
    data = replace(data, train=np.array([[0, len(data.y)]] + [[0, 0]] * 5))  # all digits but 8 and 9
    seven = pt.models.mlp(64, 32, 16, 8)
    runs = [
        federate(seven, data, pt.fedavg(lr=0.3), capacity=width({"one": 1.0}, mask=mask))
        for mask in (True, False)
    ]
    assert_close(*map(everything, runs))


def test_scores_are_those_of_all_classes() -> None:
    """The mask and the scaler are for training: a weak client's model is judged as it is."""
    data, held = few_classes(), heterofl(RATES, KINDS)
    run = federate(mlp(), data, pt.fedalt("output", lr=0.1), rounds=2, capacity=held)
    for i in range(len(KINDS)):
        x, y = data.client(i, "test")
        with torch.no_grad():
            score = (run.client(i).model().eval()(x).argmax(1) == y).float().mean().item()
        assert score == pytest.approx(run.clients[i]["personal"], abs=1e-6)


def test_errors() -> None:
    x, y = torch.randn(12, 3), torch.randn(12)
    numbers = FederatedData.make(x, y, [(0, 4), (6, 4)], [(4, 2), (10, 2)])
    settings: dict[str, Any] = {"capacity": heterofl({"strong": 1.0, "weak": 0.5})}
    with pytest.raises(ValueError, match=r"capacity mask=True: .*the loss is 'mse'"):
        federate(pt.models.mlp(3, 4, 1), numbers, pt.fedavg(lr=0.1), **settings)
    shared = FederatedData.make(digits().x, digits().y, [(0, 20), (10, 20)], [(40, 2), (42, 2)])
    with pytest.raises(ValueError, match="a label has one owner"):
        federate(mlp(), shared, pt.fedavg(lr=0.1), **settings)


def test_a_model_that_build_keeps_is_scaled_once() -> None:
    """And stays as it was: its numbers are not replaced, and it has no scaler."""
    kept: dict[float, nn.Module] = {}

    def build(rate: float) -> nn.Module:
        return kept.setdefault(rate, mlp().at_width(rate))

    held = heterofl(RATES, KINDS, build=build)
    first, again = (
        federate(mlp(), few_classes(), pt.fedavg(lr=0.3), capacity=held, rounds=2) for _ in range(2)
    )
    for name, value in first.shared.items():
        assert torch.equal(again.shared[name], value)
    assert not any(m._forward_hooks for m in kept[0.5].modules())


class HeadFirst(nn.Module):
    """A model that registers its head before what it is applied to."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, 10)
        self.body = nn.Linear(64, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x.flatten(1))))


def test_the_layer_that_a_sample_meets_last_is_not_scaled() -> None:
    held = heterofl(RATES, KINDS, build=lambda rate: HeadFirst(int(rate * 8)))
    _, weak = held.shares(HeadFirst(8), torch.zeros(1, 64))
    scaled = {name for name, m in weak.model.named_modules() if m._forward_hooks}
    assert scaled == {"body"}
