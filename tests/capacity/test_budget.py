"""Cuts and pieces from the memory of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import partita as pt
from capacity.weak import KINDS, assert_close, digits, everything, federate, mlp
from partita.capacity import depth, fit, memory, pieces
from support import each

IMAGES = torch.zeros(3, 1, 28, 28)


def weak_of(held: pt.Capacity, model: nn.Module, x: torch.Tensor, batch: int) -> Any:
    return next(share for share in held.shares(model, x, batch) if share.name == "weak")


@each("budget", ["27MB", "30MB", 27_000_000, "52MB", "60MB"])
def test_cut_and_pieces_are_those_of_the_memory(budget: int | str) -> None:
    model = pt.models.leaf_cnn()
    cut = fit(model, budget, (1, 28, 28), batch=32)
    weak = weak_of(depth(budget={"weak": budget}), model, IMAGES, 32)
    assert weak.model.get_submodule("output") is model.output
    assert [piece._names for piece in weak.pieces] == [*pieces(model, cut, budget, (1, 28, 28), batch=32)]
    trained = {k.split(".")[0] for k, _ in weak.model.named_parameters()}
    assert trained == {row.name for row in memory(model, (1, 28, 28)).rows[cut:]}


def test_a_larger_batch_leaves_less_to_train() -> None:
    model = pt.models.resnet20(10, width=0.25)
    held = depth(budget={"weak": "4MB"})
    sizes = [
        sum(p.numel() for p in weak_of(held, model, torch.zeros(2, 3, 32, 32), n).model.parameters())
        for n in (1, 4, 32)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2]


def test_what_is_reported_fits_the_budget() -> None:
    need = memory(mlp(), (64,), batch=8).needed(1)
    held = depth(assign=KINDS, budget={"weak": need})
    run = federate(mlp(), digits(), pt.fedavg(lr=0.1), capacity=held)
    found = {name: row["memory"] for name, row in run.summary()["classes"].items()}
    assert found["weak"] == need < found["strong"]


def test_memory_is_the_larger_of_training_and_passing() -> None:
    """EmbracingFL's weak FEMNIST device trains in 1.0 MB what it needs 26 MB to get to."""
    data = pt.data.FederatedData.make(torch.zeros(8, 1, 28, 28), torch.zeros(8).long(), [(0, 6)], [(6, 2)])
    run = federate(
        pt.models.leaf_cnn(), data, pt.fedavg(lr=0.1), capacity=depth({"weak": 3}, ["weak"]), steps=1
    )
    (row,) = run.summary()["classes"].values()
    assert 25.6e6 < row["memory"] < 27e6
    assert row["capacity"] == pytest.approx(0.02, abs=0.005)


def test_the_same_run_as_with_the_cut() -> None:
    need = memory(mlp(), (64,), batch=8).needed(1)
    runs = [
        federate(mlp(), digits(), pt.fedavg(lr=0.2), capacity=held, executor=executor)
        for held in (depth({"strong": 0, "weak": 1}, KINDS), depth(assign=KINDS, budget={"weak": need}))
        for executor in ("loop", "vmap")
    ]
    for other in runs[1:]:
        assert_close(everything(runs[0]), everything(other))


def test_pieces_by_bytes() -> None:
    model = pt.models.resnet20(10, width=0.25)
    x = torch.zeros(2, 3, 32, 32)
    small, large = (weak_of(depth({"weak": 7}, pieces=b), model, x, 8).pieces for b in ("264kB", "100MB"))
    assert len(large) == 1
    assert len(small) > 1
    assert [piece._names for piece in small] == [*pieces(model, 7, "264kB", (3, 32, 32), batch=8)]


@each(
    ("given", "sizes"),
    [(None, [1, 1, 1, 1, 5]), (100, [1, 1, 1, 1, 5]), ("100MB", [1, 1, 1, 1, 5]), (2, [1, 1, 1, 1, 2, 2, 1])],
)
def test_pieces_stay_within_the_budget(given: int | str | None, sizes: list[int]) -> None:
    """The smaller of both limits counts, whether pieces are given in blocks or in bytes."""
    model = pt.models.resnet20(10, width=0.25)
    budget = memory(model, (3, 32, 32), batch=8).needed(9)
    weak = weak_of(depth(budget={"weak": budget}, pieces=given), model, torch.zeros(2, 3, 32, 32), 8)
    assert [len(piece._names) for piece in weak.pieces] == sizes


def test_smaller_pieces_than_the_budget_allows() -> None:
    model = pt.models.resnet20(10, width=0.25)
    budget = memory(model, (3, 32, 32), batch=8).needed(7)  # all seven at a time
    weak = weak_of(depth(budget={"weak": budget}, pieces="264kB"), model, torch.zeros(2, 3, 32, 32), 8)
    assert [piece._names for piece in weak.pieces] == [*pieces(model, 7, "264kB", (3, 32, 32), batch=8)]


@each(
    "given, field",
    [
        ({"cuts": {"weak": 1}, "budget": {"weak": "1MB"}}, "capacity budget"),
        ({"budget": {"weak": "lots"}}, "capacity budget"),
        ({"budget": {}}, "capacity budget"),
        ({"budget": "1MB"}, "capacity budget"),
        ({"cuts": {"weak": 1}, "pieces": "some"}, "capacity pieces"),
        ({"cuts": {"weak": 1}, "pieces": 0}, "capacity pieces"),
    ],
)
def test_what_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        depth(**given)


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"capacity budget\['weak'\]='1MB': .*frozen block 'dense1'"):
        depth(budget={"weak": "1MB"}).shares(pt.models.leaf_cnn(), IMAGES, 1)
