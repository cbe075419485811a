"""Federated LoRA by composition, each variant beside a loop over tensors that was written for it alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt
from support import each

Tensors = dict[str, Tensor]
SIZES = (5, 9, 14, 8)
INPUTS, CLASSES, RANK, ALPHA, LR, STEPS, ROUNDS = 6, 3, 4, 8.0, 0.3, 3, 4
executors = each("executor", ["loop", "vmap"])


def samples() -> pt.data.FederatedData:
    draw = np.random.default_rng(0)
    n, client = sum(SIZES), np.repeat(np.arange(len(SIZES)), SIZES)
    x = draw.normal(size=(n, INPUTS)).astype(np.float32)
    test = np.concatenate([np.arange(size) < 2 for size in SIZES])
    return pt.data.from_arrays(x, draw.integers(0, CLASSES, n), client, test=test, validation=0)


class Base(nn.Module):
    """A layer that LoRA adapts, and a bias that may be trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, CLASSES, bias=False)
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.bias


def adapted(trained: str | list[str] = "adapter") -> nn.Module:
    torch.manual_seed(0)
    model = pt.models.add_adapters(Base(), "lora", rank=RANK, alpha=ALPHA, where="layer")
    model.get_parameter(B).data.normal_(0, 0.3)  # as if trained before, so that A has a gradient at once
    return pt.models.freeze(model, but=trained)


A, B, BIAS = "layer.adapter.lora_A.weight", "layer.adapter.lora_B.weight", "bias"


def federate(model: nn.Module, method: Any, executor: str, **options: Any) -> pt.Run:
    """Full batches: nothing is random."""
    settings = {"rounds": ROUNDS, "steps": STEPS, "batch": None, "baselines": False, "progress": False}
    return pt.federate(model, samples(), method, executor=executor, **{**settings, **options})


# ---- plainly


def loss(tensors: Tensors, weight: Tensor, client: int) -> Tensor:
    x, y = samples().client(client, "train")
    low_rank = tensors[B] @ tensors[A]
    return F.cross_entropy(x @ (weight + ALPHA / RANK * low_rank).T + tensors[BIAS], y)


def descend(
    tensors: Tensors, weight: Tensor, client: int, names: Sequence[str], pull: Callable[[str, Tensor], Any]
) -> Tensors:
    """STEPS steps on the named tensors; `pull` is what is added to their gradients."""
    for _ in range(STEPS):
        leaves = {k: v.clone().requires_grad_(k in names) for k, v in tensors.items()}
        loss(leaves, weight, client).backward()
        tensors = {
            k: v - LR * (leaves[k].grad + pull(k, v)) if k in names else v  # type: ignore[operator]
            for k, v in tensors.items()
        }
    return tensors


def plainly(
    phases: Sequence[Sequence[str]], personal: Sequence[str], model: nn.Module, lam: float | None = None
) -> tuple[Tensors, list[Tensors]]:
    """Return the server's tensors and each client's, after all rounds.

    phases    what is trained in a round, one after another
    personal  what stays with the client
    lam       Ditto: beside that, each client has adapters of its own, pulled to the received ones
    """
    start = {k: model.get_parameter(k).detach().clone() for k in (A, B, BIAS)}
    weight = model.get_parameter("layer.weight").detach()
    train = [size - 2 for size in SIZES]
    server, own = dict(start), [dict(start) for _ in SIZES]
    for _ in range(ROUNDS):
        ended = []
        for client in range(len(SIZES)):
            tensors = {k: own[client][k] if k in personal else server[k] for k in start}
            for names in phases:
                tensors = descend(tensors, weight, client, names, lambda *_: 0.0)
            ended.append(tensors)
            if lam is None:
                own[client] = tensors
            else:
                received = dict(server)
                own[client] = descend(
                    own[client], weight, client, phases[0], lambda k, v, r=received: lam * (v - r[k])
                )
        server = {k: sum(n * e[k] for n, e in zip(train, ended)) / sum(train) for k in start}  # type: ignore[misc]
    shared = {k: v for k, v in server.items() if k not in personal}
    return shared, [{**o, **(shared if lam is None else {})} for o in own]


def agree(run: pt.Run, model: nn.Module, expected: tuple[Tensors, list[Tensors]], trained: list[str]) -> None:
    shared, own = expected
    assert run.shared.keys() == {k for k in shared if k in trained}
    for name, value in run.shared.items():
        torch.testing.assert_close(value, shared[name], rtol=1e-4, atol=1e-5)
    for client, tensors in enumerate(own):
        found = run.client(client).model().state_dict()
        for name, value in tensors.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["layer.weight"], model.get_parameter("layer.weight").detach())


# ---- the variants


@executors
def test_shared_adapters(executor: str) -> None:
    model = adapted()
    run = federate(model, pt.fedavg(lr=LR), executor)
    agree(run, model, plainly([(A, B)], (), model), [A, B])


@executors
def test_fedsa_shares_one_factor(executor: str) -> None:
    model = adapted()
    run = federate(model, pt.fedsim(personal="*lora_B*", lr=LR), executor)
    agree(run, model, plainly([(A, B)], (B,), model), [A, B])


@executors
def test_ffa_trains_one_factor(executor: str) -> None:
    model = pt.models.freeze(adapted(), "*lora_A*")
    run = federate(model, pt.fedavg(lr=LR), executor)
    agree(run, model, plainly([(B,)], (), model), [B])
    both = federate(adapted(), pt.fedavg(lr=LR), executor)
    sent, sent_by_both = (r.summary()["bytes_up"] for r in (run, both))
    assert sent * (INPUTS + CLASSES) == sent_by_both * CLASSES  # nothing frozen is sent


@executors
def test_personal_adapters_beside_a_shared_part(executor: str) -> None:
    model = adapted(["adapter", "bias"])
    run = federate(model, pt.fedalt(personal="adapter", lr=LR), executor)
    agree(run, model, plainly([(A, B), (BIAS,)], (A, B), model), [A, B, BIAS])


@executors
def test_ditto_has_two_adapters(executor: str) -> None:
    model = adapted()
    run = federate(model, pt.ditto(lr=LR, lam=0.5), executor)
    agree(run, model, plainly([(A, B)], (), model, lam=0.5), [A, B])


@each("frozen, exact", [(None, False), ("*lora_A*", True), ("*lora_B*", True)])
def test_the_mean_of_products_is_the_product_of_means_only_if_one_factor_is_frozen(
    frozen: str | None, exact: bool
) -> None:
    model = adapted() if frozen is None else pt.models.freeze(adapted(), frozen)
    together, alone = (federate(model, m, "loop", rounds=1) for m in (pt.fedavg(lr=LR), pt.local(lr=LR)))
    train = [size - 2 for size in SIZES]
    models = [alone.client(i).model().state_dict() for i in range(len(SIZES))]
    mean = sum(n * m[B] @ m[A] for n, m in zip(train, models)) / sum(train)
    averaged = together.model().state_dict()
    error = float((averaged[B] @ averaged[A] - mean).norm() / mean.norm())
    assert error < 1e-6 if exact else error > 1e-3


def test_adapters_that_are_everything_cannot_be_a_part() -> None:
    with pytest.raises(ValueError, match=r"one factor of LoRA: '\*lora_B\*'"):
        federate(adapted(), pt.fedalt(personal="adapter", lr=LR), "loop")
    with pytest.raises(ValueError, match=r"add_adapters or peft\.get_peft_model"):
        federate(Base(), pt.fedalt(personal="adapter", lr=LR), "loop")
