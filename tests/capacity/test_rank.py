"""Adapters of different ranks: the first rows of A and columns of B, averaged over those who train them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt
from capacity.weak import KINDS, digits
from partita.capacity import rank
from support import each

Tensors = dict[str, Tensor]
FULL, RANKS, LR, STEPS, ROUNDS = 4, {"strong": 4, "weak": 1}, 0.5, 2, 3
executors = each("executor", ["loop", "vmap"])


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = pt.models.add_adapters(pt.models.mlp(64, 16, 10), "lora", rank=FULL, alpha=6.0, where="*")
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1)
    return pt.models.freeze(model, but="adapter")


def federate(model: nn.Module, method: Any, **options: Any) -> pt.Run:
    settings = {"rounds": ROUNDS, "steps": STEPS, "batch": None, "baselines": False, "executor": "loop"}
    return pt.federate(model, digits(), method, **{**settings, **options})


def zeroed(model: nn.Module, tensors: Tensors, r: int) -> tuple[nn.Module, Tensors]:
    """Plainly: the model of the full rank with zeros behind the first r, and a mask of what is held."""
    model, held = copy.deepcopy(model), {}
    for name, value in tensors.items():
        held[name] = torch.zeros_like(value)
        held[name][(slice(None), slice(0, r)) if "lora_B" in name else (slice(0, r),)] = 1.0
        model.get_parameter(name).data.copy_(value * held[name])
    return model, held


def plainly(model: nn.Module, personal: str = "nothing") -> tuple[Tensors, list[Tensors]]:
    """FedAvg, or with a personal factor: masked gradients, and a mean over those who hold a coordinate."""
    data = digits()
    server = {k: p.detach().clone() for k, p in model.named_parameters() if p.requires_grad}
    own = [dict(server) for _ in KINDS]
    for _ in range(ROUNDS):
        total, weight = ({k: torch.zeros_like(v) for k, v in server.items()} for _ in range(2))
        for client, kind in enumerate(KINDS):
            start = {k: own[client][k] if personal in k else v for k, v in server.items()}
            narrow, held = zeroed(model, start, RANKS[kind])
            x, y = data.client(client, "train")
            for _ in range(STEPS):
                narrow.zero_grad()
                F.cross_entropy(narrow(x), y).backward()
                for k, mask in held.items():
                    p = narrow.get_parameter(k)
                    p.data -= LR * mask * p.grad  # type: ignore[operator]
            for k, mask in held.items():
                ended = narrow.get_parameter(k).detach()
                own[client][k] = torch.where(mask > 0, ended, start[k])
                total[k] += len(y) * mask * ended
                weight[k] += len(y) * mask
        server = {
            k: v if personal in k else torch.where(weight[k] > 0, total[k] / weight[k].clamp(min=1), v)
            for k, v in server.items()
        }
    return {k: v for k, v in server.items() if personal not in k}, own


@executors
def test_each_rank_is_averaged_over_those_who_hold_it(executor: str) -> None:
    model = adapted()
    run = federate(model, pt.fedavg(lr=LR), executor=executor, capacity=rank(RANKS, KINDS))
    expected, _ = plainly(model)
    for name, value in run.shared.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@executors
def test_a_personal_factor_of_any_rank(executor: str) -> None:
    model = adapted()
    method = pt.fedsim(personal="*lora_B*", lr=LR)
    run = federate(model, method, executor=executor, capacity=rank(RANKS, KINDS))
    expected, own = plainly(model, "lora_B")
    for name, value in run.shared.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    for client, kind in enumerate(KINDS):
        found = run.client(client).model().state_dict()
        for name, value in own[client].items():
            part = (value if "lora_B" in name else expected[name]).movedim(1 if "lora_B" in name else 0, 0)
            part = part[: RANKS[kind]].movedim(0, 1 if "lora_B" in name else 0)
            torch.testing.assert_close(found[name], part, rtol=1e-4, atol=1e-5)


def test_a_weak_model_is_the_whole_one_with_zeros_and_shares_its_base() -> None:
    model, x = adapted(), digits().client(0)[0][:3]
    strong, weak = (share.model for share in rank(RANKS).shares(model, x, 1))
    assert strong is model
    tensors = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(weak(x), zeroed(model, tensors, 1)[0](x))
    base = "output.linear.weight"
    assert weak.get_parameter(base).data_ptr() == model.get_parameter(base).data_ptr()
    assert weak.get_submodule("output.linear.adapter.lora_A").out_features == 1


def test_what_a_weak_client_sends_and_how_it_is_scored() -> None:
    run = federate(adapted(), pt.fedavg(lr=LR), capacity=rank(RANKS, KINDS))
    whole = federate(adapted(), pt.fedavg(lr=LR))
    strong, weak = KINDS.count("strong"), KINDS.count("weak")
    share = (strong + weak / FULL) / len(KINDS)
    assert run.summary()["bytes_up"] == share * whole.summary()["bytes_up"]
    assert [row["class"] for row in run.clients] == list(KINDS)
    assert run.client(1).model().get_parameter("output.linear.adapter.lora_A.weight").shape[0] == 1


@each(
    ("make", "words"),
    [
        (lambda: federate(pt.models.mlp(64, 10), pt.fedavg(lr=LR), capacity=rank(RANKS)), "has none"),
        (
            lambda: federate(adapted(), pt.fedavg(lr=LR), capacity=rank({"a": 5})),
            r"ranks\['a'\]=5.*at most 4",
        ),
        (lambda: rank({"weak": 0}), r"capacity ranks\['weak'\]=0"),
        (lambda: rank({"weak": 0.5}), r"capacity ranks\['weak'\]=0.5"),
        (lambda: rank({}), "capacity ranks="),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
