"""Lies in the statistics of normalization layers only: what a robust aggregator makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.core.parts import Aggregator, Algorithm, Attack
from partita.core.types import Tensors, Upload
from support import each

CLIENTS, BYZANTINE, LR = 8, (1, 6), 0.1
MEAN, VAR, COUNT = "1.running_mean", "1.running_var", "1.num_batches_tracked"
ROBUST: dict[str, Callable[[], Aggregator]] = {
    "geometric_median": pt.aggregate.geometric_median,
    "centered_clipping": lambda: pt.aggregate.centered_clipping(1.0),
    "krum": lambda: pt.aggregate.krum(2),
    "multi_krum": lambda: pt.aggregate.multi_krum(2, 3),
    "smoothed_coordinate_median": lambda: pt.aggregate.smoothed_coordinate_median(0.1),
    "smoothed_geometric_median": lambda: pt.aggregate.smoothed_geometric_median(0.1),
}
LIES: dict[str, tuple[str, float | int]] = {
    "a variance far above": (VAR, -1e6),
    "a variance far below": (VAR, 1e6),
    "a mean far away": (MEAN, 1e6),
    "a counter far above": (COUNT, -(2**62)),
    "a counter far below": (COUNT, 2**62),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def data() -> pt.data.FederatedData:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(CLIENTS), 12)
    y = rng.integers(0, 3, len(owner))
    x = (rng.normal(size=(3, 4))[y] + rng.normal(size=(len(y), 4))).astype(np.float32)
    return pt.data.from_arrays(x, y, owner, test=0.25)


def dishonest(name: str, by: float, seen: list[Tensors]) -> Attack:
    """Honest but for one tensor; a delta is subtracted, so that `by` is taken from what the server has."""

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        others = [i for i in range(len(uploads.delta[VAR])) if i not in byzantine]
        seen.append({k: uploads.delta[k][others] for k in (MEAN, VAR, COUNT)})
        sent = {}
        for i in byzantine:
            own = {k: v[i] for k, v in uploads.delta.items()}
            sent[i] = Upload({**own, name: own[name] + by}, sums={k: v[i] for k, v in uploads.sums.items()})
        return sent

    return Attack("dishonest", forge, None, {})


def federate(method: Any, **settings: Any) -> pt.Run:
    given = {
        "rounds": 1,
        "steps": 3,
        "batch": 4,
        "executor": "loop",
        "norm": "global",
        "baselines": False,
        "progress": False,
    }
    return pt.federate(model(), data(), method, **{**given, **settings})


@each(
    ("aggregate", "lie"),
    [(aggregate, lie) for aggregate in ROBUST for lie in LIES],
    slow=lambda aggregate, lie: aggregate != "geometric_median" and lie != "a variance far below",
)
def test_statistics_stay_where_honest_ones_are(aggregate: str, lie: str) -> None:
    assert_honest(pt.fedavg(LR, aggregate=ROBUST[aggregate]()), *LIES[lie])


@pytest.mark.parametrize("lie", ["a variance far below", "a counter far below"])
def test_whatever_else_the_server_does(lie: str) -> None:
    """With its own optimizer, with control variates beside the deltas, layer by layer."""
    rule = pt.aggregate.geometric_median()
    layers = pt.aggregate.layerwise({"0.*": pt.aggregate.mean(), "*": rule})
    assert_honest(pt.fedadam(LR, 0.01, aggregate=rule), *LIES[lie])
    assert_honest(pt.scaffold(LR, aggregate=rule), *LIES[lie])
    assert_honest(pt.fedavg(LR, aggregate=layers), *LIES[lie])


def assert_honest(rule: Algorithm, name: str, by: float) -> None:
    """All statistics are within those of the honest clients, after one round and after three."""
    for rounds in (1, 3):
        seen: list[Tensors] = []
        run = federate(rule, rounds=rounds, byzantine=BYZANTINE, attack=dishonest(name, by, seen))
        start = model().state_dict()
        if rounds > 1:
            start = federate(
                rule, rounds=rounds - 1, byzantine=BYZANTINE, attack=dishonest(name, by, [])
            ).shared
        assert len(seen) == rounds
        assert run.summary()["excluded"] == []
        assert (run.shared[VAR] > 0).all()
        for k, deltas in seen[-1].items():
            honest = start[k] - deltas
            low, high = honest.min(0).values, honest.max(0).values
            slack = 0.0 if k == COUNT else 1e-5
            assert (run.shared[k] >= low - slack).all(), k
            assert (run.shared[k] <= high + slack).all(), k
        assert run.shared[COUNT] == 3 * rounds
        assert all(torch.isfinite(v).all() for v in run.shared.values())


@each("aggregate", ROBUST)
def test_a_lie_about_statistics_does_not_touch_the_parameters(aggregate: str) -> None:
    """The rule sees the parameters alone: in the first round they are those of an honest run."""
    rule = pt.fedavg(LR, aggregate=ROBUST[aggregate]())
    honest, lied = (federate(rule, byzantine=BYZANTINE, attack=dishonest(VAR, by, [])) for by in (0.0, -1e6))
    for k in honest.shared:
        if k not in (MEAN, VAR, COUNT):
            assert torch.equal(honest.shared[k], lied.shared[k]), k


@pytest.mark.parametrize("over", ["cohort", "all"])
def test_fed_plus(over: str) -> None:
    rule = pt.fedplus(pt.psi.geomed(0.1), LR, 0.2, over=over)
    run = federate(rule, rounds=3, byzantine=BYZANTINE, attack=dishonest(VAR, 1e6, []))
    assert (run.shared[VAR] > 0).all()
    assert (run.shared[VAR] < 100).all()


def test_a_mean_averages_them() -> None:
    """It bears no Byzantine client, and statistics are averaged as ever."""
    run = federate(pt.fedavg(LR), byzantine=BYZANTINE, attack=dishonest(VAR, -1e6, []))
    assert (run.shared[VAR] > 1e5).all()
