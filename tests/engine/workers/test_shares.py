"""A cohort is cut into shares of equal work, by nothing but what is computed; a share adds up as a cohort."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import torch

import partita as pt
from partita.core.parts import LocalRule, Phase, Program
from partita.core.types import RoundContext, Work
from partita.engine.cohorts import RunningSum
from partita.engine.workers.share import cut


def places(sizes: list[int], classes: list[int], shares: int, work: Work) -> list[np.ndarray]:
    n = np.array(sizes)
    data: Any = SimpleNamespace(ranges=lambda split: np.stack([np.zeros_like(n), n], 1))  # noqa: ARG005
    rule = LocalRule(lambda *_: None, (Phase(lambda *_: None),), lambda *_: None)  # type: ignore[arg-type,return-value]
    bound: Any = SimpleNamespace(bind=lambda program: rule, data=data)  # noqa: ARG005
    context = RoundContext(0, 0, 0, 0, 1, work)
    program = Program("training", lambda problem: rule)  # noqa: ARG005
    return cut(bound, program, np.arange(len(n)), context, np.array(classes), shares)


clients = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 2)), min_size=1, max_size=40)


@hypothesis.given(clients, st.integers(1, 9), st.sampled_from([Work(epochs=1, batch=8), Work(steps=3)]))
def test_every_client_is_in_one_share(some: list[tuple[int, int]], shares: int, work: Work) -> None:
    sizes, classes = [n for n, _ in some], [k for _, k in some]
    found = places(sizes, classes, shares, work)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(some)))
    assert len(found) == min(shares, len(some))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert all(np.array_equal(rows, np.sort(rows)) for rows in found)
    again = places(sizes, classes, shares, work)
    assert all(np.array_equal(a, b) for a, b in zip(found, again))
    for kind in set(classes):  # each share has its part of every class of devices
        counts = [int((np.array(classes)[rows] == kind).sum()) for rows in found]
        assert max(counts) - min(counts) <= 2


def test_shares_have_equal_work() -> None:
    sizes = [100, 1, 90, 2, 80, 3, 70, 4]
    loads = [sum(sizes[i] for i in rows) for rows in places(sizes, [0] * 8, 2, Work(epochs=1, batch=1))]
    assert max(loads) < 1.1 * min(loads)


def test_more_shares_than_clients() -> None:
    assert [rows.tolist() for rows in places([5, 5], [0, 0], 8, Work(epochs=1))] == [[0], [1]]


def test_shares_in_one_process_are_those_of_workers() -> None:
    """Without workers, `shares` computes what workers would: see test_worker_runs for the other half."""
    data = pt.data.digits(clients=6, seed=0)
    plain, cut_in_three = (
        pt.federate(
            pt.models.mlp(64, 8, 10, seed=0), data, pt.fedavg(lr=0.1), rounds=1, batch=8, seed=0,
            executor="vmap", device="cpu", baselines=False, shares=shares,
        )
        for shares in (None, 3)
    )  # fmt: skip
    for name, value in plain.shared.items():
        assert (value - cut_in_three.shared[name]).abs().max() <= 1e-6
    assert plain.config["settings"]["shares"] is None
    assert cut_in_three.config["executor"]["workers"]["shares"] == 3
    assert cut_in_three.summary()["bytes_up"] == plain.summary()["bytes_up"]


def part(weight: float, value: float, kind: torch.dtype = torch.float32) -> pt.Upload:
    delta = {"w": torch.full((2,), value).to(kind), "n": torch.tensor(int(value))}
    return pt.Upload(delta, torch.tensor(weight), {"e": torch.ones(1)}, {"s": torch.full((1,), value)})


def test_a_running_sum_is_the_weighted_mean_in_any_order() -> None:
    parts = [part(3.0, 1.0), None, part(1.0, 5.0), part(0.0, 100.0), part(4.0, 2.0)]
    found = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 3, 1, 0], [1, 0, 4, 3, 2]):
        total = RunningSum(torch.device("cpu"))
        for number in order:
            total.add(number, parts[number])
        result = total.result()
        assert result is not None
        found.append(result)
    assert torch.allclose(found[0].delta["w"], torch.full((2,), (3 + 5 + 8) / 8))
    assert found[0].delta["n"] == 2  # whole, as counters are
    assert (found[0].weight, found[0].extra["e"], found[0].sums["s"]) == (8.0, 4.0, 108.0)
    for other in found[1:]:
        assert torch.equal(other.delta["w"], found[0].delta["w"])


def test_a_running_sum_of_nothing_and_of_no_weight() -> None:
    total = RunningSum(torch.device("cpu"))
    total.add(0, None)
    assert total.result() is None
    total.add(1, part(0.0, 3.0))
    total.add(2, part(0.0, 5.0))
    result = total.result()
    assert result is not None
    assert torch.equal(result.delta["w"], torch.zeros(2))


def test_a_running_sum_of_half_precision_does_not_overflow() -> None:
    total = RunningSum(torch.device("cpu"))
    for number in range(3):
        total.add(number, part(1e5, 8.0, torch.float16))
    result = total.result()
    assert result is not None
    assert result.delta["w"].dtype == torch.float16
    assert torch.equal(result.delta["w"], torch.full((2,), 8.0, dtype=torch.float16))
