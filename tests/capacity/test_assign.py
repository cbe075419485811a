"""Which client is in which class of devices, and what is refused before any work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita as pt
from capacity.weak import KINDS, convs, digits, federate, mlp
from partita.capacity import depth, fjord, width
from partita.capacity.assign import assigned

CLASSES = ("strong", "moderate", "weak")


# ---- who is what


def counts(assign: Any, clients: int, seed: int = 0) -> list[int]:
    found = Counter(assigned(assign, CLASSES, clients, seed))
    return [found[i] for i in range(3)]


def test_numbers_and_shares() -> None:
    assert counts({"strong": 2, "moderate": 3, "weak": 7}, 12) == [2, 3, 7]
    assert counts({"weak": 12}, 12) == [0, 0, 12]
    assert counts({"strong": 0.25, "weak": 0.75}, 12) == [3, 0, 9]
    assert counts({"strong": 1.0}, 12) == [12, 0, 0]
    assert counts({"strong": 0.1, "moderate": 0.2, "weak": 0.7}, 128) == [13, 26, 89]  # 12.8, 25.6, 89.6
    assert counts({"strong": 1 / 3, "moderate": 1 / 3, "weak": 1 / 3}, 10) == [4, 3, 3]
    assert counts(None, 12) == [4, 4, 4]
    assert counts({"strong": 1}, 1) == [1, 0, 0]


def test_which_of_them_depends_on_the_seed_alone() -> None:
    half = {"strong": 0.5, "weak": 0.5}
    first = assigned(half, CLASSES, 40, 0)
    assert first == assigned(half, CLASSES, 40, 0)
    assert first != assigned(half, CLASSES, 40, 1)
    assert first != sorted(first)  # in no order
    assert Counter(first) == Counter(assigned(half, CLASSES, 40, 1))


def test_one_by_one() -> None:
    names = ["weak", "strong", "weak", "moderate"]
    assert assigned(names, CLASSES, 4, 0) == [2, 0, 2, 1]
    assert assigned(tuple(names), CLASSES, 4, 7) == [2, 0, 2, 1]
    assert assigned(lambda i: CLASSES[i % 3], CLASSES, 5, 0) == [0, 1, 2, 0, 1]


def test_a_run_says_who_was_what() -> None:
    run = federate(mlp(), digits(), pt.fedavg(lr=0.1), capacity=depth({"strong": 0, "weak": 1}, KINDS))
    assert [row["class"] for row in run.clients] == list(KINDS)
    drawn = {}
    for seed in range(3):
        capacity = depth({"strong": 0, "weak": 1}, {"strong": 2, "weak": 4})
        run = federate(mlp(), digits(), pt.fedavg(lr=0.1), capacity=capacity, seed=seed)
        drawn[seed] = [row["class"] for row in run.clients]
        assert Counter(drawn[seed]) == {"strong": 2, "weak": 4}
    assert len({tuple(names) for names in drawn.values()}) > 1


# ---- what is refused


def refused(
    match: str, capacity: Any, model: nn.Module | None = None, method: Any = None, **options: Any
) -> None:
    with pytest.raises(ValueError, match=match):
        federate(model or mlp(), digits(), method or pt.fedavg(lr=0.1), capacity=capacity, **options)


def two(assign: Any = KINDS, **options: Any) -> Any:
    return depth({"strong": 0, "weak": 1}, assign, **options)


def test_assignments_that_do_not_fit() -> None:
    known = r"expected one of 'strong', 'weak'"
    refused(rf"^assign='week': {known}.*did you mean 'weak'", two({"strong": 2, "week": 4}))
    refused(rf"^assign='tiny': {known}", two(["tiny"] * 6))
    refused(rf"^assign='client 0': {known}", two(lambda i: f"client {i}"))
    wrong = r": expected numbers of clients, 6 in all, or shares, 1 in all"
    refused(r"^assign={'strong': 2, 'weak': 3}" + wrong, two({"strong": 2, "weak": 3}))
    refused(r"^assign={'strong': 0.5, 'weak': 0.4}" + wrong, two({"strong": 0.5, "weak": 0.4}))
    refused(r"^assign={'strong': 2.5, 'weak': 3.5}" + wrong, two({"strong": 2.5, "weak": 3.5}))
    refused(r"^assign='5 classes': expected one for each of the 6 clients", two(["weak"] * 5))
    refused(r"^assign='7 classes': expected one for each of the 6 clients", two(["weak"] * 7))


@pytest.mark.parametrize("make", [lambda a: depth({"weak": 1}, a), lambda a: width({"weak": 0.5}, a)])
def test_what_can_never_assign(make) -> None:
    for wrong in (3, "weak", {}, [1, 2], 0.5):
        with pytest.raises(
            ValueError, match=r"capacity assign=.*: expected how many clients are in each class"
        ):
            make(wrong)
    for wrong in (-1, float("nan"), "many", None):
        with pytest.raises(ValueError, match=r"capacity assign\['weak'\]="):
            make({"weak": wrong})


def test_cuts_that_do_not_fit() -> None:
    for cuts in ({}, 3, ["weak"]):
        with pytest.raises(ValueError, match=r"capacity cuts=.*: expected blocks that each class leaves out"):
            depth(cuts)
    for cut in (-1, 1.5, "two", None):
        with pytest.raises(ValueError, match=r"capacity cuts\['weak'\]=.*: expected a whole number from 0"):
            depth({"weak": cut})
    text = r"expected fewer than the 3 blocks of the model \(hidden1, hidden2, output, ...\)"
    refused(rf"^capacity cuts\['weak'\]=3: {text}", depth({"weak": 3}))
    with pytest.raises(ValueError, match=r"^capacity cuts='33 classes': expected at most 32$"):
        depth({f"class{i}": i for i in range(33)})
    ends = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softplus())
    refused(
        r"^capacity cuts\['weak'\]=2: expected a cut that leaves parameters to train",
        depth({"weak": 2}),
        ends,
    )
    for pieces in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"capacity pieces=.*: expected a whole number from 1"):
            depth({"weak": 1}, pieces=pieces)
    for blocks in ("first", [], [1, 2], 3):
        with pytest.raises(ValueError, match=r"capacity blocks=.*: expected names of modules, in order"):
            depth({"weak": 1}, blocks=blocks)
    with pytest.raises(ValueError, match=r"capacity record='tape': expected one of 'memory', 'disk'"):
        depth({"weak": 1}, record="tape")


def test_what_is_no_capacity() -> None:
    for wrong in (3, {"strong": 0, "weak": 1}, "depth", depth):
        refused(r"^capacity=.*: expected partita.capacity.depth\(...\), width\(...\) or fjord\(...\)", wrong)


class Residual(nn.Module):
    """Not a sequence: the input joins again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        found: Tensor = self.last(x + torch.relu(self.first(x)))
        return found


class Turned(nn.Module):
    """A sequence that is no nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(16, 10), nn.Sequential(nn.Flatten(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x))
        return found


def test_a_model_that_is_no_sequence() -> None:
    refused(
        r"^blocks=None: expected the names of the submodules that the model applies .* 'first', 'last'",
        two(),
        Residual(),
    )
    refused(
        r"^blocks=\('first', 'last'\): expected submodules that the model applies one after another",
        two(blocks=["first", "last"]),
        Residual(),
    )
    refused(r"^blocks=None: expected the names .* Submodules of Turned: 'last', 'first'", two(), Turned())
    run = federate(Turned(), digits(), pt.fedavg(lr=0.1), capacity=two(blocks=["first", "last"]))
    up = 4 * (16 * 10 + 10)
    assert run.metrics[-1]["bytes_up"] == 6 * up + 2 * 4 * (64 * 16 + 16)


def test_a_personal_part_that_weak_devices_do_not_hold() -> None:
    text = r"clients of the class 'weak' do not train .* give a part that all devices train"
    refused(rf"^personal='hidden1.linear.bias': {text}", two(), method=pt.fedalt("input", lr=0.1))
    refused(rf"^personal='hidden1.linear.bias': {text}", two(), method=pt.fedsim("*.bias", lr=0.1))
    kept = text.replace("train: clients", "train: stem.norm.bias is personal then, and clients")
    refused(rf"^norm='personal': {kept}", two(), convs(), norm="personal")
    stages = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=1), pt.stage(pt.fedalt("input", lr=0.1), rounds=1)
    )
    refused(rf"^personal='hidden1.linear.bias': {text}", two(), method=stages)
    # nobody weak is there, or its width is what is smaller: nothing to refuse
    federate(mlp(), digits(), pt.fedalt("input", lr=0.1), capacity=two(["strong"] * 6))
    federate(mlp(), digits(), pt.fedalt("input", lr=0.1), capacity=width({"strong": 1.0, "weak": 0.5}, KINDS))


def test_a_method_that_needs_whole_models() -> None:
    plus = pt.fedplus(pt.psi.avg(0.1), lr=0.1, sigma=0.1, over="all")
    for capacity in (
        two(),
        width({"strong": 1.0, "weak": 0.5}, KINDS),
        fjord({"strong": 1.0, "weak": 0.5}, KINDS),
    ):
        refused(
            rf"^capacity='{capacity.name}': expected devices that hold the whole model for fedplus: with "
            "over='all' the server keeps every client's last whole model",
            capacity,
            method=plus,
        )
    federate(mlp(), digits(), plus, capacity=two(["strong"] * 6))
    federate(mlp(), digits(), pt.fedplus(pt.psi.avg(0.1), lr=0.1, sigma=0.1), capacity=two())


def test_records_on_disk_are_for_the_cpu(monkeypatch) -> None:
    """Asked before any work: a run on a GPU keeps its records there."""
    from partita.engine.devices.devices import Devices

    check = Devices.check

    def on_gpu(self: Any, plans: Any, splits: Any, settings: Any, has_buffers: bool) -> None:
        check(self, plans, splits, replace(settings, device="cuda"), has_buffers)

    monkeypatch.setattr(Devices, "check", on_gpu)
    refused(r"^capacity record='disk': records are on the GPU; give 'memory'", two(record="disk"))


def test_nobody_trains_the_first_blocks() -> None:
    with pytest.warns(
        UserWarning,
        match="^capacity: no client holds all of hidden1.linear.weight and others, which is not trained",
    ) as told:
        run = federate(mlp(), digits(), pt.fedavg(lr=0.1), capacity=two(["weak"] * 6))
    assert told[0].filename == federate.__code__.co_filename  # where the run was asked for
    assert torch.equal(run.shared["hidden1.linear.weight"], mlp().hidden1.linear.weight)
    assert not torch.equal(run.shared["hidden2.linear.weight"], mlp().hidden2.linear.weight)
