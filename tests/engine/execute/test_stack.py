"""Stacks of clients: what is common stays common until somebody changes it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from partita.engine.execute.stack import Stack, join, lift


class Pair(NamedTuple):
    a: Tensor
    rest: dict[str, Tensor | None]


def rows(n: int, *shape: int) -> Tensor:
    return torch.arange(n * max(1, torch.Size(shape).numel()), dtype=torch.float32).view(n, *shape)


def same(a, b) -> bool:
    return bool(torch.equal(a, b))


def test_of_and_full_keep_the_structure() -> None:
    tree = Pair(rows(3, 2), {"x": rows(3), "none": None})
    full = Stack.of(tree, 3, rows=True).full()
    assert isinstance(full, Pair)
    assert full.rest["none"] is None
    assert same(full.a, tree.a)
    common = Stack.of(tree, 5, rows=False).full()
    assert common.a.shape == (5, 3, 2)
    assert same(common.a[4], tree.a)


def test_between_and_take_move_rows_only() -> None:
    u = torch.ones(2)
    stack = join([Stack([rows(4), u], [True, False], Stack.of([u, u], 4, True).spec, 4)])
    cut = stack.between(1, 3)
    assert cut.n == 2
    assert cut.leaves[0].tolist() == [1.0, 2.0]
    assert cut.leaves[1] is u
    turned = stack.take(torch.tensor([3, 0]))
    assert turned.n == 2
    assert turned.leaves[0].tolist() == [3.0, 0.0]
    assert turned.leaves[1] is u


def test_lift_is_the_function_for_every_client() -> None:
    def fn(w, batch):
        return {"w": w["u"] * 2 + batch[0].sum(), "n": batch[1] + 1}

    w = {"u": rows(3, 2)}
    batch = (rows(3, 4), rows(3))
    got = lift(fn, Stack.of(w, 3, True), Stack.of(batch, 3, True)).full()
    for i in range(3):
        alone = fn({"u": w["u"][i]}, (batch[0][i], batch[1][i]))
        assert same(got["w"][i], alone["w"])
        assert same(got["n"][i], alone["n"])


def test_what_passes_through_stays_common() -> None:
    u, v = torch.ones(2), rows(3, 2)

    def fn(c, b):
        return {"u": c["u"], "v": c["v"] + b, "touched": c["u"] + 0, "new": torch.zeros(())}

    out = lift(fn, Stack.of({"u": u, "v": v[0]}, 3, False), Stack.of(v, 3, True))
    by_name = dict(zip(("u", "v", "touched", "new"), zip(out.leaves, out.has_rows)))
    assert by_name["u"][0] is u
    assert not by_name["u"][1]
    assert by_name["v"][1]
    assert by_name["v"][0].shape == (3, 2)
    full = out.full()
    assert full["u"].shape == full["touched"].shape == (3, 2)
    assert full["new"].shape == (3,)
    again = lift(fn, Stack.of({"u": u, "v": v[0]}, 3, False), Stack.of(v, 3, True))
    assert again.leaves[0] is u


def test_lift_without_rows_calls_once() -> None:
    calls = []

    def fn(c):
        calls.append(1)
        return {"x": c["x"] * 2}

    out = lift(fn, Stack.of({"x": torch.ones(2)}, 4, False))
    assert calls == [1]
    assert out.has_rows == [False]
    assert out.n == 4
    assert out.full()["x"].shape == (4, 2)


def test_lift_keeps_none_and_numbers() -> None:
    out = lift(lambda c: (c[0] + 1, None, 3), Stack.of((rows(2),), 2, True))
    assert out.full()[1:] == (None, 3)
    assert out.full()[0].tolist() == [1.0, 2.0]


def test_lift_differentiates_per_client() -> None:
    def fn(w, x):
        return torch.func.grad(lambda p: ((p * x) ** 2).sum())(w)

    w, x = torch.tensor([1.0, 2.0]), rows(3, 2) + 1
    got = lift(fn, Stack.of(w, 3, False), Stack.of(x, 3, True)).full()
    assert torch.allclose(got, 2 * w * x**2)


def test_join_restores_the_cut() -> None:
    stack = Stack.of({"a": rows(5, 2), "b": rows(5)}, 5, True)
    back = join([stack.between(0, 2), stack.between(2, 2), stack.between(2, 5)])
    assert back.n == 5
    assert same(back.full()["a"], rows(5, 2))
    assert same(back.full()["b"], rows(5))


def test_join_keeps_common_leaves_common() -> None:
    u = torch.ones(2)
    spec = Stack.of({"a": u, "u": u}, 1, True).spec
    parts = [Stack([rows(n), u], [True, False], spec, n) for n in (2, 3)]
    back = join(parts)
    assert back.has_rows == [True, False]
    assert back.leaves[1] is u
    assert back.full()["u"].shape == (5, 2)


def test_join_of_clients_that_moved_and_clients_that_did_not() -> None:
    """A client without steps still has the common value when the others have their own."""
    u = torch.tensor([7.0, 8.0])
    whole = Stack.of({"u": u, "k": u[0]}, 5, False)
    moved = lift(lambda c, b: {**c, "u": c["u"] + b}, whole.between(0, 3), Stack.of(rows(3), 3, True))
    back = join([moved, whole.between(3, 5)])
    assert back.n == 5
    assert back.has_rows == [True, False]
    full = back.full()["u"]
    assert full.tolist() == [[7, 8], [8, 9], [9, 10], [7, 8], [7, 8]]


@pytest.mark.parametrize("first", [0, 1])
def test_join_with_nobody(first: int) -> None:
    some, nobody = Stack.of((rows(2),), 2, True), Stack.of((rows(0),), 0, True)
    parts = [some, nobody] if first == 0 else [nobody, some]
    assert same(join(parts).full()[0], rows(2))
