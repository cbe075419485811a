"""Additive and horizontally split models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softmax

import partita as pt
from partita import models
from small import data as small_data
from support import each


def test_a_sum_of_two_models() -> None:
    shared, own, x = models.mlp(6, 5, 4, seed=1), models.logistic(6, 4, seed=2), torch.randn(3, 6)
    both = models.additive(shared, own)
    torch.testing.assert_close(both(x), shared(x) + own(x))
    names = {n.split(".")[0] for n, _ in both.named_parameters()}
    assert names == {"shared", "personal"}
    own.output.linear.weight.data.zero_()
    torch.testing.assert_close(both(x), shared(x) + models.logistic(6, 4, seed=2)(x))  # it holds copies


def test_a_mixture_of_probabilities() -> None:
    """Its cross entropy is that of θ h + (1 − θ) h_i, section 2 of the paper."""
    shared, own = models.mlp(6, 5, 4, seed=1), models.logistic(6, 4, seed=2)
    x, y = torch.randn(3, 6), torch.tensor([0, 3, 1])
    both = models.additive(shared, own, mix="probabilities")
    both.weight.data.fill_(0.7)
    theta = torch.sigmoid(torch.tensor(0.7))
    mixed = theta * softmax(shared(x), -1) + (1 - theta) * softmax(own(x), -1)
    torch.testing.assert_close(cross_entropy(both(x), y), -mixed[range(3), y].log().mean())
    cross_entropy(both(x), y).backward()
    assert both.weight.grad.abs() > 0


@each(
    ("make", "layer", "x"),
    [
        (lambda: models.mlp(6, 5, 4), "hidden1.linear", torch.randn(3, 6)),
        (lambda: models.resnet18(4, width=0.125), "block1.conv1", torch.randn(2, 16, 16)),
        (
            lambda: nn.Sequential(nn.Conv1d(2, 6, 3), nn.Flatten(), nn.Linear(18, 2)),
            "0",
            torch.randn(2, 2, 5),
        ),
    ],
)
def test_a_split_layer_computes_the_same(make: Any, layer: str, x: torch.Tensor) -> None:
    model = make()
    divided = models.split_units(model, layer, 2)
    torch.testing.assert_close(divided(x), model(x))
    whole, parts = model.get_submodule(layer).weight, divided.get_submodule(layer)
    assert torch.equal(torch.cat([parts.shared.weight, parts.personal.weight]), whole)
    assert parts.personal.weight.shape[0] == 2
    assert repr(parts.personal) != repr(parts.shared)  # the layers know their sizes


def test_private_inputs_reach_the_personal_units_alone() -> None:
    """Figure 1c: each part has its own chunk of the input."""
    model = models.mlp(6, 5, 4)
    divided = models.split_units(model, "hidden1.linear", 0.4, inputs=2)
    layer, x = divided.hidden1.linear, torch.randn(3, 6)
    assert layer.shared.weight.shape == (3, 4)
    assert layer.personal.weight.shape == (2, 2)
    whole = model.hidden1.linear.weight
    torch.testing.assert_close(layer(x)[:, 3:], x[:, 4:] @ whole[3:, 4:].T + layer.personal.bias)
    other = x.clone()
    other[:, 4:] += 1
    torch.testing.assert_close(layer(other)[:, :3], layer(x)[:, :3])


@each(
    ("make", "personal"),
    [
        (lambda: models.additive(models.mlp(4, 5, 2), models.logistic(4, 2)), "personal.*"),
        (lambda: models.split_units(models.mlp(4, 5, 2), "hidden1.linear", 2, inputs=2), "*.personal.*"),
    ],
)
def test_clients_keep_the_personal_part_and_stacked_equals_alone(make: Any, personal: str) -> None:
    runs = [
        pt.federate(
            make(),
            small_data(),
            pt.fedalt(personal, lr=0.1),
            rounds=2,
            steps=3,
            batch=4,
            executor=executor,
            baselines=False,
            progress=False,
        )
        for executor in ("loop", "vmap")
    ]
    assert all("personal" not in name.split(".") for name in runs[0].shared)
    for client in (0, 1):
        for name, value in runs[0].personalized(client).items():
            torch.testing.assert_close(runs[1].personalized(client)[name], value)
    own = [runs[0].client(i).personal for i in (0, 1)]
    assert all("personal" in name.split(".") for name in own[0])
    assert any(not torch.equal(own[0][k], own[1][k]) for k in own[0])


@each(
    ("call", "field"),
    [
        (lambda: models.additive(models.mlp(5, 4, 3), "mlp"), "personal"),
        (lambda: models.additive(models.mlp(5, 4, 3), models.mlp(5, 3), mix="mean"), "mix"),
        (lambda: models.additive(models.mlp(5, 4, 3), models.mlp(5, 2))(torch.ones(1, 5)), "personal"),
        (lambda: models.split_units(models.mlp(5, 4, 3), "hidden", 1), "layer"),
        (lambda: models.split_units(nn.Linear(3, 2), "", 1), "layer"),
        (lambda: models.split_units(models.transformer(7, width=8), "head.project", 1), "layer"),
        (lambda: models.split_units(models.mlp(5, 4, 3), "hidden1.linear", 4), "personal"),
        (lambda: models.split_units(models.mlp(5, 4, 3), "hidden1.linear", 0.01), "personal"),
        (lambda: models.split_units(models.mlp(5, 4, 3), "hidden1.linear", 1, inputs=5), "inputs"),
        (lambda: models.split_units(models.mlp(5, 4, 3), "hidden1.linear", 1).at_width(0.5), "width"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, field: str) -> None:
    with pytest.raises(pt.Refused) as error:
        call()
    assert error.value.field == field
