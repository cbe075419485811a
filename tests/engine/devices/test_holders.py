"""Aggregation over those who hold a tensor, or a part of it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from partita import aggregate as agg
from partita.core.parts import Aggregator
from partita.core.types import Upload
from partita.engine.devices.holders import Aggregate, held_by, over_holders
from support import each

KEY = torch.tensor(3)
RULES = [agg.mean(), agg.coordinate_median(), agg.krum(1), agg.nnm(1, agg.trimmed_mean(1))]
for_each_rule = each("rule", RULES, ids=lambda a: a.name)
WHOLE = {"a": (4, 3), "b": (3,), "c": (), "d": (2, 2)}
NARROW = {"a": (2, 2), "b": (2,), "c": (), "d": (2, 1)}
LAST = {"c": (), "d": (2, 2)}
KINDS = [0, 1, 2, 1, 0, 2, 1, 0]  # of eight clients: 0 whole, 1 narrow, 2 last blocks only
WEIGHT = torch.tensor([1.0, 2, 1, 4, 3, 1, 1, 2], dtype=torch.float64)


def deltas(shapes: dict[str, tuple[int, ...]] = WHOLE) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {k: torch.randn(8, *s, generator=g) for k, s in shapes.items()}


def sent(
    delta: dict[str, Tensor],
    sums: dict[str, Tensor] | None = None,
    clients: list[int] | None = None,
    extra: dict[str, Tensor] | None = None,
) -> Upload:
    """What these clients send (None: all), whoever holds it."""
    rows = torch.arange(8) if clients is None else torch.tensor(clients)
    return Upload(
        {k: v[rows] for k, v in delta.items()},
        weight=WEIGHT[rows],
        extra={k: v[rows] for k, v in (extra or {}).items()},
        sums={k: v[rows] for k, v in (sums or {}).items()},
        client=rows,
    )


def by(rule: Aggregator) -> Aggregate:
    """A method's aggregation by this rule alone; of what else is sent, ten times the sum."""

    def aggregate(uploads: Upload, key: Tensor) -> Upload:
        assert uploads.weight is not None
        delta, notes = rule.combine(uploads.delta, uploads.weight, key)
        extra, sums = ({k: 10 * v.sum(0) for k, v in x.items()} for x in (uploads.extra, uploads.sums))
        return Upload(delta, uploads.weight.sum(), extra, sums, notes)

    return aggregate


def holders(name: str, place: tuple[int, ...], classes: list[dict[str, tuple[int, ...]]]) -> frozenset[int]:
    """Plainly: the classes that have this number of this tensor."""
    return frozenset(
        i for i, c in enumerate(classes) if name in c and all(p < n for p, n in zip(place, c[name]))
    )


@each(
    "classes",
    [[WHOLE], [WHOLE, NARROW], [NARROW, LAST], [WHOLE, NARROW, LAST], [LAST], [{}, WHOLE], [NARROW, NARROW]],
)
def test_who_holds_what(classes) -> None:
    """Every number of every tensor is once in what is held, with the classes that hold it."""
    found = {}
    for part in held_by(WHOLE, classes):
        for name, where in part.columns.items():
            flat = range(int(np.prod(WHOLE[name]))) if where is None else where.tolist()
            for i in flat:
                assert (name, i) not in found
                found[name, i] = part.classes
    expected = {
        (name, i): holders(name, place, classes)
        for name, shape in WHOLE.items()
        for i, place in enumerate(product(*map(range, shape)))
    }
    assert found == expected


def test_the_same_holders_are_one_part() -> None:
    """Robust rules look at all that the same clients send as at one vector."""
    parts = held_by(WHOLE, [WHOLE, LAST])
    assert [(part.classes, list(part.columns)) for part in parts] == [
        (frozenset({0}), ["a", "b"]),
        (frozenset({0, 1}), ["c", "d"]),
    ]
    assert all(where is None for part in parts for where in part.columns.values())


@for_each_rule
def test_all_hold_everything(rule) -> None:
    x = deltas()
    expected = by(rule)(sent(x), KEY)
    got = over_holders(by(rule), held_by(WHOLE, [WHOLE, WHOLE]), [0, 1] * 4)(sent(x), KEY)
    assert list(got.delta) == list(x)
    assert all(torch.equal(got.delta[k], expected.delta[k]) for k in x)
    assert got.metrics.keys() == expected.metrics.keys()
    assert got.weight == WEIGHT.sum()


@for_each_rule
def test_coordinate_by_coordinate_over_its_holders(rule) -> None:
    """Each part of the model by the rule on those who hold it alone, whatever the others have there."""
    x, classes = deltas(), [WHOLE, NARROW, LAST]
    got = over_holders(by(rule), held_by(WHOLE, classes), KINDS)(sent(x), KEY).delta
    groups: dict[frozenset[int], list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in WHOLE.items():
        for place in product(*map(range, shape)):
            groups.setdefault(holders(name, place, classes), []).append((name, place))
    assert len(groups) == 4
    for who, places in groups.items():
        rows = [i for i, kind in enumerate(KINDS) if kind in who]
        stack = torch.stack([x[name][rows][(slice(None), *place)] for name, place in places], 1)
        expected = rule.combine({"x": stack}, WEIGHT[rows], KEY).delta["x"]
        for value, (name, place) in zip(expected, places):
            torch.testing.assert_close(got[name][place], value)


def test_the_mean_in_numpy() -> None:
    """Δ[c] = Σ_{i holds c} n_i Δ_i[c] / Σ_{i holds c} n_i."""
    x = deltas()
    got = over_holders(by(agg.mean()), held_by(WHOLE, [WHOLE, NARROW, LAST]), KINDS)(sent(x), KEY).delta
    n, kinds = WEIGHT.numpy(), np.array(KINDS)
    for name, shape in WHOLE.items():
        for place in product(*map(range, shape)):
            there = np.isin(kinds, list(holders(name, place, [WHOLE, NARROW, LAST])))
            values = x[name].double().numpy()[(slice(None), *place)]
            expected = (n * values)[there].sum() / n[there].sum()
            assert got[name][place].item() == pytest.approx(expected, abs=1e-6)


@for_each_rule
def test_what_nobody_in_the_cohort_holds(rule) -> None:
    """A tensor of the strong is not there; of one of which the narrow have a part, the rest is zero."""
    x, held = deltas(), held_by(WHOLE, [WHOLE, NARROW, LAST])
    last = over_holders(by(rule), held, KINDS)(sent(x, clients=[2, 5]), KEY)
    assert set(last.delta) == {"c", "d"}
    narrow = over_holders(by(rule), held, KINDS)(sent(x, clients=[1, 3, 6, 2]), KEY)
    assert (narrow.delta["a"] != 0).tolist() == [[True, True, False]] * 2 + [[False] * 3] * 2
    assert (narrow.delta["b"] != 0).tolist() == [True, True, False]
    assert narrow.delta["d"].all()
    assert not over_holders(by(rule), held_by(WHOLE, [{}]), [0] * 8)(sent(x), KEY).delta


def test_sums() -> None:
    """Over holders as well, zero where there are none; what is no tensor of the model is everybody's.

    The server divides by all eight clients: what three hold is scaled, so that it is divided by three.
    """
    x, held = deltas(), held_by(WHOLE, [WHOLE, NARROW, LAST])
    sums = {"a": deltas()["a"] + 1, "d": deltas()["d"] + 1, "count": torch.arange(8.0)}
    combine = over_holders(by(agg.mean()), held, KINDS)
    got = combine(sent(x, sums), KEY).sums
    torch.testing.assert_close(got["a"][3, 2], 10 * 8 / 3 * sums["a"][[0, 4, 7], 3, 2].sum())
    torch.testing.assert_close(got["a"][0, 0], 10 * 8 / 6 * sums["a"][[0, 1, 3, 4, 6, 7], 0, 0].sum())
    torch.testing.assert_close(got["d"][:, 0], 10 * sums["d"][:, :, 0].sum(0))
    assert got["count"] == 280
    weak = combine(sent(x, sums, clients=[2, 5]), KEY).sums
    assert not weak["a"].any()
    assert weak["a"].shape == (4, 3)
    assert weak["count"] == 70


def test_extras_are_everybodys_whatever_their_names() -> None:
    extra = {"a": torch.arange(8.0), "key": torch.ones(8)}
    got = over_holders(by(agg.mean()), held_by(WHOLE, [WHOLE, NARROW, LAST]), KINDS)(
        sent(deltas(), extra=extra), KEY
    )
    assert got.extra == {"a": 280, "key": 80}
    assert not got.sums
    assert got.delta.keys() == WHOLE.keys()


def test_each_part_has_notes_of_its_own() -> None:
    """Krum may choose another client for what only some hold."""
    x, kinds = deltas(), [0, 0, 1, 0, 0, 1, 0, 0]
    got = over_holders(by(agg.krum(1)), held_by(WHOLE, [WHOLE, LAST]), kinds)(sent(x), KEY)
    strong = torch.tensor([0, 1, 3, 4, 6, 7])
    alone = agg.krum(1).combine({k: x[k][strong] for k in ("a", "b")}, WEIGHT[strong], KEY)
    assert set(got.metrics) == {"part0.f", "part0.chosen", "part1.f", "part1.chosen"}
    assert torch.equal(got.delta["a"], x["a"][strong[alone.notes["chosen"]]])
    assert torch.equal(got.metrics["part0.chosen"], strong[alone.notes["chosen"]])  # places in the cohort
    everyone = agg.krum(1).combine({k: x[k] for k in ("c", "d")}, WEIGHT, KEY)
    assert torch.equal(got.delta["d"], x["d"][everyone.notes["chosen"]])
    assert everyone.notes["chosen"] != strong[alone.notes["chosen"]]
