"""Deltas that are added up part by part, so that memory does not grow with the cohort."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita import aggregate
from partita.algorithms.base import aggregate_with
from partita.core.types import Cohort, Upload
from partita.engine import cohorts
from support import each

CLIENTS, FEATURES = 7, 5
MEAN = aggregate_with(aggregate.mean(), "samples")


def data() -> pt.data.FederatedData:
    g = torch.Generator().manual_seed(0)
    sizes = np.array([3, 9, 4, 6, 1, 5, 8])
    start = np.cumsum(sizes) - sizes
    x = torch.randn(int(sizes.sum()), FEATURES, generator=g)
    y = torch.randint(0, 3, (len(x),), generator=g)
    return pt.data.FederatedData.make(x, y, np.stack([start, sizes], axis=1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def run(method, memory, **options) -> pt.Run:
    common = {"rounds": 3, "epochs": 1, "batch": 4, "norm": "global", "baselines": False, "executor": "loop"}
    return pt.federate(model(), data(), method, memory=memory, **{**common, **options})


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """How many parts each round was merged of."""
    found: list[int] = []
    merge = cohorts.merged

    def merged(parts):
        found.append(len(parts))
        return merge(parts)

    monkeypatch.setattr(sys.modules["partita.engine.loop"], "merged", merged)
    return found


METHODS = {
    "samples": pt.fedavg(lr=0.1, momentum=0.9),
    "uniform": pt.fedavg(lr=0.1, weighting="uniform"),
    "scaffold": pt.scaffold(lr=0.1),
    "fedalt": pt.fedalt(personal="output", lr=0.1),
    "server": pt.fedavg(lr=0.1, server=pt.optim.adam(0.1)),
}


@each("method", METHODS.values(), ids=list(METHODS))
def test_same_as_all_at_once(method, sizes) -> None:
    """Little memory: two clients at a time."""
    sizes.clear()  # of the method before
    whole = run(method, "1GiB")
    assert not sizes
    some = run(method, "5KiB")
    assert len(sizes) == 3
    assert min(sizes) > 2
    for k, v in whole.shared.items():
        torch.testing.assert_close(some.shared[k], v, rtol=1e-5, atol=1e-6, msg=k)
    for i in range(CLIENTS):
        for k, v in whole.client(i).personal.items():
            torch.testing.assert_close(some.client(i).personal[k], v, rtol=1e-5, atol=1e-6, msg=k)
    last, other = whole.metrics[-1], some.metrics[-1]
    assert last["bytes_up"] == other["bytes_up"]
    assert last["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)


@each(
    ("method", "options"),
    [
        (pt.fedavg(lr=0.1, aggregate=aggregate.trimmed_mean(1)), {}),
        (pt.scaffold(lr=0.1, weighting="samples"), {}),
        (replace(pt.fedavg(lr=0.1), aggregate=aggregate_with(aggregate.trimmed_mean(1), "samples")), {}),
        (replace(pt.fedavg(lr=0.1), aggregate=lambda problem: MEAN(problem)), {}),
        (pt.fedavg(lr=0.1), {"attack": pt.attack.sign_flip(), "byzantine": [0]}),
    ],
    ids=["robust", "scaffold by samples", "replaced", "of one's own", "attack"],
)
def test_kept_where_single_deltas_are_looked_at(method, options, sizes) -> None:
    """The same bits as with much memory, then."""
    whole, some = (run(method, memory, **options) for memory in ("1GiB", "5KiB"))
    assert not sizes
    assert all(torch.equal(some.shared[k], v) for k, v in whole.shared.items())


def test_a_client_that_is_not_finite(sizes) -> None:
    """It is set aside in its part, which counts for the others alone; a part of nobody counts for nothing."""
    source, line = data(), nn.Linear(FEATURES, 3)
    for client in (0, 1, 4):  # a whole part, and one of another
        start, n = source.train[client]
        source.x[start : start + n] = torch.nan
    whole, some = (
        pt.federate(
            line, source, pt.fedavg(lr=0.1), rounds=2, batch=4, baselines=False,
            executor="loop", memory=memory, seed=1,
        )
        for memory in ("1GiB", "600B")
    )  # fmt: skip
    assert sizes
    assert max(sizes) < CLIENTS
    assert whole.summary()["excluded"] == some.summary()["excluded"] != []
    for k, v in whole.shared.items():
        torch.testing.assert_close(some.shared[k], v, rtol=1e-5, atol=1e-6)


def _beside(x: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"c": torch.tensor(x)}, {"a": torch.tensor([10 * x])}


def test_weights() -> None:
    """Δ = Σ_p w_p Δ_p / Σ_p w_p, sums and extras add up, whole numbers stay whole; nobody gives nothing."""
    parts = [
        Upload({"a": torch.tensor([1.0]), "n": torch.tensor(3)}, torch.tensor(1.0), *_beside(2.0)),
        Upload({"a": torch.tensor([5.0]), "n": torch.tensor(8)}, torch.tensor(3.0), *_beside(1.0)),
    ]
    found = cohorts.merged(parts)
    assert found is not None
    assert found.weight == 4.0
    assert found.extra["c"] == 3.0
    assert found.sums["a"] == 30.0
    assert found.delta["a"].tolist() == [4.0]
    assert found.delta["n"].tolist() == 7
    assert cohorts.merged([]) is None
    assert cohorts.merged(parts[:1]) is parts[0]


def test_parts_are_of_one_size() -> None:
    """So that a step need not be recorded for a rest."""
    cohort = Cohort(tuple(range(100)), (), (0,) * 100, 0.0)
    assert [len(part.clients) for part in cohorts.chunks_of(cohort, 97)] == [50, 50]
    assert [len(part.clients) for part in cohorts.chunks_of(cohort, 40)] == [34, 34, 32]
    assert [len(part.clients) for part in cohorts.chunks_of(cohort, 100)] == [100]


def test_each_part_of_a_cohort_has_draws_of_its_own(sizes) -> None:
    """A mean that adds noise, say, may not add the same noise to every part."""
    keys = []

    def combine(deltas, weight, key):
        keys.append(int(key))
        return aggregate.mean().combine(deltas, weight, key)

    run(pt.fedavg(lr=0.1, aggregate=pt.Aggregator("watched", combine, {}, linear=True)), "5KiB")
    assert sizes
    assert len(set(keys)) == len(keys) > len(sizes)
