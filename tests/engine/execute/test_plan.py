"""Who sees which samples when: checked against plain loops over lists."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.types import RoundContext, Work
from partita.data import FederatedData
from partita.engine.execute.plan import Plan, count_steps, draw

MOMENT = RoundContext(seed=5, round=3, stage=0, stage_round=3, stage_rounds=9, work=Work(epochs=1))


def federated(sizes: list[int], test_sizes: list[int] | None = None) -> FederatedData:
    """Clients of these sizes whose rows lie apart, with rows of nobody before and between."""
    train, test, at = [], [], 2
    for n, t in zip(sizes, test_sizes or sizes):
        train.append((at, n))
        test.append((at + n, t))
        at += n + t + 1
    rows = torch.arange(at, dtype=torch.float32)
    return FederatedData.make(rows[:, None], rows, train, test)


def batches(plan: Plan, i: int) -> list[list[int]]:
    """The rows that client i sees, step by step."""
    return [plan.rows[i, s][plan.real[i, s]].tolist() for s in range(int(plan.steps[i]))]


def expected_sizes(n: int, batch: int | None, steps: int) -> list[int]:
    """The sizes of the first batches of pass after pass."""
    width = batch or n
    once = [min(width, n - at) for at in range(0, n, width)] if n else []
    return list(itertools.islice(itertools.cycle(once), steps)) if once else []


def expected_steps(n: int, batch: int | None, steps: int | None, epochs: int | None) -> int:
    if n == 0:
        return 0
    return steps if steps is not None else (epochs or 1) * len(range(0, n, batch or n))


@st.composite
def cases(d):
    sizes = d(st.lists(st.integers(0, 13), min_size=1, max_size=6).filter(any))
    batch = d(st.none() | st.integers(1, 15))
    kind = d(st.sampled_from(["steps", "each", "epochs"]))
    if kind == "epochs":
        return sizes, Work(epochs=d(st.integers(1, 3)), batch=batch)
    if kind == "steps":
        return sizes, Work(steps=d(st.integers(1, 9)), batch=batch)
    each = d(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    return sizes, Work(steps=tuple(each), batch=batch)


@settings(max_examples=150, deadline=None)
@given(cases(), st.booleans(), st.integers(0, 2**32))
def test_every_pass_visits_every_sample_once(case, shuffle, seed) -> None:
    sizes, work = case
    work = replace(work, shuffle=shuffle)
    data = federated(sizes)
    plan = draw(data, np.arange(len(sizes)), work, 0, MOMENT._replace(seed=seed))
    for i, n in enumerate(sizes):
        own = work.steps[i] if isinstance(work.steps, tuple) else work.steps
        steps = expected_steps(n, work.batch, own, work.epochs)
        assert plan.steps[i] == steps
        seen = batches(plan, i)
        assert [len(b) for b in seen] == expected_sizes(n, work.batch, steps)
        assert plan.size[i].tolist() == [len(b) for b in seen] + [0] * (plan.size.shape[1] - steps)
        start = int(data.train[i, 0])
        rows = [r for b in seen for r in b]
        while rows:  # whole passes, then the beginning of one
            now, rows = rows[:n], rows[n:]
            assert len(set(now)) == len(now)
            assert set(now) <= set(range(start, start + n))
            if not shuffle or work.batch is None:
                assert now == list(range(start, start + len(now)))
    assert bool((plan.real.sum(2).numpy() == plan.size).all())


@settings(max_examples=60, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_who_else_is_in_it(case, random) -> None:
    sizes, work = case
    data = federated(sizes)
    everyone = draw(data, np.arange(len(sizes)), work, 1, MOMENT)
    order = list(range(len(sizes)))
    random.shuffle(order)
    cut = random.randint(1, len(order))
    for some in (order[:cut], order[cut:], *([c] for c in order)):
        if not some:
            continue
        plan = draw(data, np.array(some), work, 1, MOMENT)
        for i, c in enumerate(some):
            steps = int(everyone.steps[c])
            assert plan.steps[i] == steps
            assert batches(plan, i) == batches(everyone, c)
            assert torch.equal(plan.keys[i, :steps], everyone.keys[c, :steps])


def test_short_last_batch() -> None:
    plan = draw(federated([7]), np.array([0]), Work(epochs=2, batch=3), 0, MOMENT)
    assert plan.size.tolist() == [[3, 3, 1, 3, 3, 1]]
    assert plan.rows.shape == (1, 6, 3)
    assert plan.real[0, 2].tolist() == [True, False, False]


def test_full_batch_takes_the_rows_in_order() -> None:
    data = federated([3, 5])
    plan = draw(data, np.arange(2), Work(steps=2), 0, MOMENT)
    assert batches(plan, 0) == [[2, 3, 4]] * 2
    assert batches(plan, 1) == [list(range(9, 14))] * 2


def test_a_batch_larger_than_the_data_is_the_data() -> None:
    data = federated([3, 5])
    plan = draw(data, np.arange(2), Work(epochs=2, batch=50), 0, MOMENT)
    assert plan.rows.shape == (2, 2, 5)
    assert [sorted(b) for b in batches(plan, 0)] == [[2, 3, 4]] * 2


def test_empty_clients_take_no_steps() -> None:
    data = federated([0, 4, 0])
    for work in (Work(steps=3, batch=2), Work(epochs=2), Work(steps=(5, 1, 2)), Work(steps=4)):
        plan = draw(data, np.arange(3), work, 0, MOMENT)
        assert plan.steps[0] == plan.steps[2] == 0
        assert not plan.real[0].any()
        assert not plan.real[2].any()
    only = draw(data, np.array([2, 0]), Work(steps=3, batch=2), 0, MOMENT)
    assert only.rows.shape[:2] == (2, 0)
    assert only.size.shape == (2, 0)


def test_steps_of_each_client_go_by_its_number() -> None:
    data = federated([4, 4, 4])
    work = Work(steps=(3, 0, 5), batch=2)
    assert draw(data, np.array([2, 0, 1]), work, 0, MOMENT).steps.tolist() == [5, 3, 0]
    assert count_steps(np.array([4, 4]), np.array([2, 1]), work, MOMENT).tolist() == [5, 0]


def test_test_split() -> None:
    data = federated([4, 4], [3, 0])
    plan = draw(data, np.arange(2), Work(epochs=1, batch=2, split="test", shuffle=False), 0, MOMENT)
    assert batches(plan, 0) == [[6, 7], [8]]
    assert batches(plan, 1) == []


@pytest.mark.parametrize("change", [{"seed": 6}, {"round": 4}])
def test_orders_and_keys_change_with_the_moment(change) -> None:
    data = federated([12, 12])
    work = Work(epochs=2, batch=4)
    a = draw(data, np.arange(2), work, 0, MOMENT)
    b = draw(data, np.arange(2), work, 0, MOMENT._replace(**change))
    assert batches(a, 0) != batches(b, 0)
    assert not (a.keys == b.keys).any()


def test_orders_and_keys_change_with_phase_client_pass_and_step() -> None:
    data = federated([12, 12])
    work = Work(epochs=2, batch=4)
    a, b = (draw(data, np.arange(2), work, phase, MOMENT) for phase in (0, 1))
    orders = [
        list(itertools.chain(*batches(p, i)[e : e + 3])) for p in (a, b) for i in (0, 1) for e in (0, 3)
    ]
    relative = {tuple(r - min(o) for r in o) for o in orders}
    assert len(relative) == 8
    keys = torch.cat([a.keys.flatten(), b.keys.flatten()])
    assert len(keys.unique()) == len(keys)


def test_the_rest_of_the_moment_changes_nothing() -> None:
    """Draws are a function of seed, round, phase and client; rates are what knows the stage."""
    data, work = federated([9]), Work(epochs=1, batch=2)
    other = MOMENT._replace(stage=2, stage_round=0, stage_rounds=1, work=Work(steps=1))
    a, b = (draw(data, np.array([0]), work, 0, m) for m in (MOMENT, other))
    assert torch.equal(a.rows, b.rows)
    assert torch.equal(a.keys, b.keys)


def test_all_orders_are_equally_likely() -> None:
    data = federated([3] * 600)
    plan = draw(data, np.arange(600), Work(epochs=10, batch=3), 0, MOMENT)
    starts = data.train[:, 0]
    found = Counter(tuple(r - starts[i] for r in b) for i in range(600) for b in batches(plan, i))
    assert sum(found.values()) == 6000
    assert len(found) == 6
    assert sum((c - 1000) ** 2 / 1000 for c in found.values()) < 30  # chi-square with 5 degrees: 1 in 50,000
