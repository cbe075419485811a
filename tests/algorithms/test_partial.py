"""The pull of the personal part to where it began: for whom v⁰ is what, beside `test_every_algorithm`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import partita as pt
from support import each

MU, LR, STEPS = 0.7, 0.2, 3
HEAD = ("output.linear.weight", "output.linear.bias")


def samples(seed: int = 0) -> pt.data.FederatedData:
    """Four clients of 8 samples, all of them for training and for testing."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 4, generator=g, dtype=torch.float64)
    y = (x[torch.arange(32), torch.arange(32) // 8] > 0).long()
    ranges = [(8 * i, 8) for i in range(4)]
    return pt.data.FederatedData.make(x, y, ranges, ranges)


def model(**head: Tensor) -> pt.models.Blocks:
    made = pt.models.mlp(4, 6, 2, seed=1).double()
    made.load_state_dict(head, strict=False)
    return made


def federate(algorithm: pt.Algorithm, *, start: Any = None, **changed: Any) -> pt.Run:
    given = {"steps": STEPS, "executor": "vmap", "baselines": False, "progress": False, **changed}
    return pt.federate(start or model(), samples(), algorithm, **given)


def first() -> dict[str, Tensor]:
    return {k: v.detach() for k, v in model().named_parameters()}


def distance(tensors: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    return float(sum((tensors[k] - start[k]).square().sum() for k in HEAD)) ** 0.5


@each("method", [pt.fedalt, pt.fedsim])
def test_a_newcomer_is_pulled_to_the_same_place(method: Any) -> None:
    """It finds what fine-tuning finds from the trained u with the v that the run began with."""
    run, other = federate(method("output", LR, personal_l2=MU), rounds=3), samples(1)
    own = run.personalize(other, rounds=2)
    begun = model(**run.shared)
    tuned = pt.federate(
        begun, other, pt.finetune("output", LR, MU), rounds=2, steps=STEPS, executor="vmap", baselines=False
    )
    for i in range(4):
        for k in HEAD:
            torch.testing.assert_close(own.client(i).personal[k], tuned.client(i).personal[k])


def test_the_last_stage_pulls_to_where_the_one_before_began() -> None:
    """With ημ = 1 a step forgets where it began: v ends at v⁰ − η∇f, and not near the v of stage (b)."""
    train = pt.stage(pt.fedalt("output", LR), rounds=20)
    last = [pt.stage(pt.finetune("output", LR, mu), rounds=1, steps=1) for mu in (1 / LR, 0.0)]
    pulled, free = (federate(pt.pipeline(train, stage)) for stage in last)
    for i in range(4):
        near, far = (distance(run.client(i).personal, first()) for run in (pulled, free))
        assert near < 0.2 * far


def test_after_a_global_stage_it_is_what_that_has_trained() -> None:
    """fedavg moves v⁰: a pull of ημ = 1 then stays near its head, and not near the first one."""
    tied = pt.stage(pt.fedalt("output", 0.0, LR, personal_l2=1 / LR), rounds=2)
    head = federate(pt.fedavg(LR), rounds=30).shared
    own = federate(pt.pipeline(pt.stage(pt.fedavg(LR), rounds=30), tied)).client(0).personal
    assert distance(own, head) < 0.5 * distance(own, first())


@each(
    "devices", [pt.capacity.width({"strong": 1.0, "weak": 0.5}), pt.capacity.depth({"strong": 0, "weak": 1})]
)
@pytest.mark.filterwarnings("ignore:capacity")
def test_a_weak_device_is_pulled_to_its_part_of_it(devices: Any) -> None:
    """With a pull that no gradient can move, everyone keeps the v⁰ that its device holds."""
    tied = pt.fedalt("output", LR, personal_lr=1e-6, personal_l2=1e6)
    runs = [federate(tied, rounds=2, capacity=devices, executor=e) for e in ("loop", "vmap")]
    for i in range(4):
        own, other = (run.client(i).personal for run in runs)
        for k, value in own.items():
            torch.testing.assert_close(other[k], value)
            held = first()[k][tuple(slice(0, n) for n in value.shape)]
            torch.testing.assert_close(value, held, rtol=0, atol=1e-5)


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(pt.Refused) as error:
        pt.fedalt("output", 0.1, personal_l2=-1.0)
    assert error.value.field == "personal_l2"
