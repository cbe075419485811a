"""Aggregation over those who hold a parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from definitions import combine

from partita import aggregate as agg
from partita.aggregate.holders import over_holders

KEY = torch.tensor(3)
RULES = [agg.mean(), agg.coordinate_median(), agg.krum(1), agg.nnm(1, agg.trimmed_mean(1))]
each = pytest.mark.parametrize("rule", RULES, ids=lambda a: a.name)


def deltas() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 3), "b": (3,), "c": (), "d": (2, 2)}
    return {k: torch.randn(8, *s, generator=g) for k, s in shapes.items()}


WEIGHT = torch.tensor([1.0, 2, 1, 0, 3, 1, 1, 2], dtype=torch.float64)


@each
def test_all_hold_everything(rule) -> None:
    x = deltas()
    expected = rule.combine(x, WEIGHT, KEY)
    full = {k: torch.ones(d.shape, dtype=torch.bool) for k, d in x.items()}
    for holders in ({}, {"a": torch.ones(8, dtype=torch.bool)}, full):
        got = over_holders(rule, x, WEIGHT, KEY, holders)
        assert list(got.delta) == list(x)
        assert all(torch.equal(got.delta[k], expected.delta[k]) for k in x)
        assert got.notes.keys() == expected.notes.keys()


@each
def test_a_tensor_that_some_hold(rule) -> None:
    x, some = deltas(), torch.tensor([1, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    got = over_holders(rule, x, WEIGHT, KEY, {"a": some, "d": some}).delta
    theirs = rule.combine({k: x[k][some] for k in ("a", "d")}, WEIGHT[some], KEY).delta
    others = rule.combine({k: x[k] for k in ("b", "c")}, WEIGHT, KEY).delta
    for k, v in (theirs | others).items():
        torch.testing.assert_close(got[k], v)


@each
def test_a_part_that_some_hold(rule) -> None:
    """Narrow models hold the first rows and columns."""
    x = deltas()
    held = torch.zeros(8, 4, 3, dtype=torch.bool)
    held[:, :2, :2] = True
    held[[0, 2, 5, 6]] = True
    wide = torch.tensor([0, 2, 5, 6])
    got = over_holders(rule, {"a": x["a"]}, WEIGHT, KEY, {"a": held}).delta["a"]
    inner = rule.combine({"x": x["a"][:, :2, :2]}, WEIGHT, KEY).delta["x"]
    torch.testing.assert_close(got[:2, :2], inner)
    outer = ~held[1]
    torch.testing.assert_close(
        got[outer], rule.combine({"x": x["a"][wide][:, outer]}, WEIGHT[wide], KEY).delta["x"]
    )


@each
def test_nobody_holds_it(rule) -> None:
    x = deltas()
    part = torch.ones(8, 3, dtype=torch.bool)
    part[:, 1] = False
    nobody = torch.zeros(8, dtype=torch.bool)
    got = over_holders(rule, x, WEIGHT, KEY, {"a": nobody, "b": part, "c": nobody}).delta
    assert not got["a"].any()
    assert got["c"] == 0
    assert (got["b"] == 0).tolist() == [False, True, False]
    assert over_holders(rule, {}, WEIGHT, KEY, {}).delta == {}


def test_coordinate_by_coordinate() -> None:
    """Every coordinate with its own holders, more clients than fit in a word."""
    rng = np.random.default_rng(0)
    x, held = rng.normal(size=(70, 40)), rng.random((70, 40)) < 0.5
    held[:, 1] = held[:, 0]
    held[:, 2] = held[:, 0]
    held[69, 2] = ~held[69, 0]
    weight = torch.ones(70, dtype=torch.float64)
    stack = {"x": torch.as_tensor(x)}
    got = over_holders(agg.coordinate_median(), stack, weight, KEY, {"x": torch.as_tensor(held)}).delta["x"]
    expected = [np.median(x[h, c]) for c, h in enumerate(held.T)]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_groups_are_one_vector_across_names() -> None:
    x, some = deltas(), torch.tensor([1, 1, 0, 1, 1, 0, 1, 1], dtype=torch.bool)
    ones = torch.ones(8, dtype=torch.float64)
    done = over_holders(agg.krum(1), x, ones, KEY, {"a": some, "d": some})
    alone = combine(agg.krum(1), {"a": x["a"][some], "d": x["d"][some]})
    assert done.notes["group0.chosen"] == some.nonzero()[alone.notes["chosen"]]
    assert set(done.notes) == {"group0.f", "group0.chosen", "group1.f", "group1.chosen"}
