"""What passes no transform is set aside or refused: attacks, bad numbers, what cannot work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import partita as pt
from engine.passing import (
    CHAINS,
    CLIENTS,
    T,
    data,
    federate,
    remembered,
)
from partita.core import check
from partita.core.types import Message, Tensors, Upload
from partita.engine import channel
from reference import plain_compress as plain
from support import Stop, each

# ---- attacks and screening


def test_byzantine_clients_skip_the_clients_side() -> None:
    """What they send is dense: the simulated server takes whatever arrives."""
    seen: list[Tensors] = []

    def forge(uploads, positions, key):  # noqa: ARG001
        seen.append(uploads.delta)
        ones = {k: torch.ones_like(v[0]) for k, v in uploads.delta.items()}
        return {i: Upload(ones, uploads.weight[i]) for i in positions}

    attack = pt.attack.sign_flip()._replace(forge=forge)
    run = federate(uploads=CHAINS["topk"], attack=attack, byzantine=[0], cohort=None, rounds=1)
    n = sum(v.numel() for v in run.shared.values())
    for client in range(CLIENTS):
        assert sum(int((v[client] != 0).sum()) for v in seen[0].values()) <= plain.count(0.1, n)
    dense = federate(attack=attack, byzantine=[0], cohort=None, rounds=1)
    assert not run.summary()["excluded"]
    assert not dense.summary()["excluded"]
    moved = sum(int((run.shared[k] != v).sum()) for k, v in run.base.items())
    assert moved > 0.99 * n


def test_a_client_that_is_not_finite_is_set_aside() -> None:
    samples = data()
    x = samples.x.clone()
    start, size = samples.train[2].tolist()
    x[start : start + size] = 1e200
    bad = replace(samples, x=x)
    for uploads in CHAINS.values():
        run = federate(samples=bad, uploads=uploads, cohort=None, rounds=2)
        assert run.summary()["excluded"] == [bad.names[2]]
        assert all(v.isfinite().all() for v in [*run.shared.values(), *remembered(run).values()])


# ---- refusals


@each(
    ("settings", "field"),
    [
        ({"uploads": "topk"}, "uploads"),
        ({"uploads": [T.topk]}, "uploads"),
        ({"uploads": [T.quantize(8), T.topk(0.1)]}, "uploads[1]"),
        ({"uploads": [T.topk(0.1), T.quantize(1)]}, "uploads[1]"),
        ({"uploads": [T.topk(0.1), T.quantize(4)]}, "uploads[1]"),
        ({"uploads": [T.low_rank(2), T.quantize(2)]}, "uploads[1]"),
        ({"uploads": [T.topk(0.5), T.randk(0.1, unbiased=True)]}, "uploads[1]"),
        ({"uploads": [T.randk(0.5, unbiased=True), T.topk(0.1)]}, "uploads[0]"),
        ({"uploads": [T.topk(0.1)], "state": "reset"}, "uploads"),
        ({"uploads": [T.topk(0.1)], "algorithm": pt.fedproto(lr=0.1)}, "uploads[0]"),
        ({"uploads": [T.topk(0.1)], "measures": [pt.measures.aggregation_change()]}, "measures"),
        ({"downloads": [T.topk(0.1)]}, "downloads[0]"),
        ({"downloads": [T.quantize(8)]}, "downloads[0]"),
        ({"downloads": [T.low_rank(2, feedback=False)]}, "downloads[0]"),
        ({"downloads": [T.quantize(8, stochastic=False), T.half()]}, "downloads[1]"),
        (
            {
                "downloads": [T.quantize(8, stochastic=False)],
                "capacity": pt.capacity.depth({"strong": 0, "weak": 1}),
            },
            "downloads[0]",
        ),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(check.Refused) as caught:
        federate(**settings)
    assert caught.value.field == field


def test_a_later_stage_is_refused_before_the_first_one_trains() -> None:
    method = pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=1), pt.stage(pt.fedproto(lr=0.1), rounds=1))
    with pytest.raises(check.Refused) as caught:
        federate(method, [T.topk(0.1)], rounds=None, callbacks=[Stop(1, AssertionError)])
    assert caught.value.field == "uploads[0]"


def test_what_clients_keep_grows_where_a_compressor_expands() -> None:
    """Why it is refused: e ← (x + e) − C(x + e) with topk and one bit, and within bounds with eight."""
    g = torch.Generator().manual_seed(0)
    kept = {}
    for bits in (1, 8):
        way, lost = channel.Way([T.topk(0.05), T.quantize(bits)]), {"delta.w": torch.zeros(1000)}
        for t in range(30):
            x = {"delta.w": torch.randn(1000, generator=g)}
            _, lost = way(Message(x, {}), [{}, {}], pt.draws.key(0, "test", t), lost)
        kept[bits] = float(lost["delta.w"].norm()) / 1000**0.5
    assert kept[8] < 10
    assert kept[1] > 1000
