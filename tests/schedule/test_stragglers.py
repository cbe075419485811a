"""Stragglers, drawn anew in each round: their partial work counts, or they are dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita.core.types import Cohort, RoundContext, ServerState, Work
from partita.engine.cohorts import chunks_of
from partita.engine.execute.plan import count_steps, progress_of
from partita.schedule import StageSpec

DATA = pt.data.digits(clients=10, partition=pt.data.power_law(1.0, minimum=20), seed=0)
MODEL = pt.models.mlp(64, 8, 10)
EPOCHS, BATCH = 5, 16
COMMON: dict[str, Any] = {"batch": BATCH, "baselines": False, "progress": False, "seed": 3}


def partial(share: float = 0.9) -> Any:
    return pt.schedule.synchronous(stragglers=share, late="partial")


def cohorts(schedule: Any, rounds: int, cohort: int = 10, clients: int = 10) -> list[Cohort]:
    """Who reports in each round of a run with seed 3."""
    spec = StageSpec(clients, cohort, 0, rounds, 3, 0.0, lambda _: 1)
    running = schedule.begin(spec)
    return [running.next(ServerState({"w": torch.zeros(1)}, {}, {}, version)) for version in range(rounds)]


def passes(cohort: Cohort, epochs: int) -> dict[int, int]:
    """1 + ⌊u (E − 1)⌋ by client: the definition, once more."""
    (group,) = cohort.groups
    return {cohort.clients[i]: 1 + int(u * (epochs - 1)) for i, u in zip(group.positions, group.progress)}


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one.shared[k], v) for k, v in other.shared.items())


def test_nine_of_ten_are_others_in_each_round() -> None:
    """Exactly nine of a cohort of ten; everyone is one at times; each number of passes is equally likely."""
    slow, counts = Counter[int](), Counter[int]()
    for cohort in cohorts(partial(), 400, clients=30):
        stragglers = {c: e for c, e in passes(cohort, 21).items() if e < 21}
        assert len(cohort.clients) == 10
        assert len(stragglers) == 9
        slow.update(stragglers.keys())
        counts.update(stragglers.values())
    assert len(slow) == 30
    assert sorted(counts) == list(range(1, 21))
    assert max(counts.values()) < 1.4 * min(counts.values())  # 180 each on average
    assert [sum(u < 1 for u in c.groups[0].progress) for c in cohorts(partial(0.3), 3)] == [3, 3, 3]


def test_dropped_are_the_same_who_would_do_partial_work() -> None:
    drop = pt.schedule.synchronous(stragglers=0.9)
    for kept, dropped in zip(cohorts(partial(), 20), cohorts(drop, 20)):
        stragglers = {c for c, e in passes(kept, 21).items() if e < 21}
        assert set(dropped.late) == stragglers
        assert set(dropped.clients) == set(kept.clients) - stragglers
        assert not dropped.groups[0].progress


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_partial_work_is_fewer_passes(executor: str) -> None:
    """A round with stragglers is one in which each client is told its number of steps."""
    (cohort,) = cohorts(partial(), 1)
    batches = -(-DATA.sizes() // BATCH)
    steps = tuple(int(passes(cohort, EPOCHS)[c] * batches[c]) for c in range(10))
    assert len(set(steps)) > 3
    common = {**COMMON, "rounds": 1, "executor": executor}
    run = pt.federate(MODEL, DATA, pt.fedprox(lr=0.1), schedule=partial(), epochs=EPOCHS, **common)
    assert same(run, pt.federate(MODEL, DATA, pt.fedprox(lr=0.1), steps=steps, **common))
    counted = run.table.numbers("epochs")
    assert counted.tolist() == [passes(cohort, EPOCHS)[c] for c in range(10)]


def test_stacked_equals_alone_and_resumed_equals_straight(tmp_path) -> None:
    method, common = pt.fedavg_plus(lr=0.1), {**COMMON, "epochs": 3, "schedule": partial(0.5), "cohort": 6}
    alone = pt.federate(MODEL, DATA, method, rounds=4, executor="loop", **common)
    stacked = pt.federate(MODEL, DATA, method, rounds=4, executor="vmap", **common)
    for name, value in alone.shared.items():
        torch.testing.assert_close(stacked.shared[name], value, rtol=1e-4, atol=1e-6)
    pt.federate(MODEL, DATA, method, rounds=2, executor="loop", out=tmp_path, **common)
    resumed = pt.federate(MODEL, DATA, method, rounds=4, executor="loop", out=tmp_path, resume=True, **common)
    assert same(resumed, alone)


@pytest.mark.filterwarnings("ignore:client .* never had a turn")
def test_a_dropped_client_goes_back_to_what_it_was() -> None:
    """Its personal part is as it was, and the server's model is that of the one client that is done."""
    drop = pt.schedule.synchronous(stragglers=0.9)
    (cohort,) = cohorts(drop, 1)
    (done,) = cohort.clients
    run = pt.federate(
        MODEL, DATA, pt.fedavg_plus(lr=0.1), rounds=1, epochs=2, schedule=drop, executor="loop", **COMMON
    )
    own = run.client(done).personal
    for name, value in run.shared.items():
        torch.testing.assert_close(own[name], value)
    first = dict(MODEL.named_parameters())
    for c in set(range(10)) - {done}:
        assert all(torch.equal(v, first[k]) for k, v in run.client(c).personal.items())
    assert run.table.numbers("late").tolist() == [float(c != done) for c in range(10)]


def test_chunks_keep_each_client_s_progress() -> None:
    (cohort,) = cohorts(partial(), 1)
    whole = progress_of(cohort)
    assert whole is not None
    assert whole.tolist() == [cohort.groups[0].progress[i] for i in np.argsort(cohort.groups[0].positions)]
    rows = [progress_of(chunk) for chunk in chunks_of(cohort, 4)]
    assert torch.cat([r for r in rows if r is not None]).tolist() == whole.tolist()
    context = RoundContext(0, 0, 0, 0, 1, Work(epochs=EPOCHS), whole)
    n, clients = np.full(10, 32), np.arange(10)
    steps = count_steps(n, clients, Work(epochs=EPOCHS, batch=BATCH), context)
    assert (
        steps[[7, 2]].tolist()
        == count_steps(n[:2], clients[[7, 2]], Work(epochs=EPOCHS, batch=BATCH), context.of([7, 2])).tolist()
    )
    for nothing, work in ((0, Work(steps=0)), (1, Work(steps=1)), (1, Work(epochs=1, batch=32))):
        assert count_steps(n, clients, work, context).tolist() == [nothing] * 10


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_partial_work_of_a_single_pass_is_fewer_steps(executor: str) -> None:
    (cohort,) = cohorts(partial(), 1)
    batches = -(-DATA.sizes() // 4)
    steps = tuple(passes(cohort, int(batches[c]))[c] for c in range(10))
    assert sum(a < b for a, b in zip(steps, batches)) == 9
    common = {**COMMON, "rounds": 1, "executor": executor, "batch": 4}
    run = pt.federate(MODEL, DATA, pt.fedprox(lr=0.1), schedule=partial(), epochs=1, **common)
    assert same(run, pt.federate(MODEL, DATA, pt.fedprox(lr=0.1), steps=steps, **common))


def test_one_step_has_no_part() -> None:
    common = {**COMMON, "rounds": 1, "schedule": partial()}
    for work in ({"steps": 1}, {"epochs": 1, "batch": None}):
        with pytest.warns(UserWarning, match="stragglers do as much as the others; use more steps"):
            pt.federate(MODEL, DATA, pt.fedprox(lr=0.1), **{**common, **work})


@pytest.mark.filterwarnings("ignore:client .* never had a turn")
def test_rounds_without_anyone_name_the_stragglers() -> None:
    everyone = pt.schedule.synchronous(stragglers=1.0)
    with pytest.warns(UserWarning, match="all 2 rounds were abandoned, .* use fewer stragglers"):
        pt.federate(MODEL, DATA, pt.fedprox(lr=0.1), rounds=2, steps=1, schedule=everyone, **COMMON)


def test_refusals() -> None:
    delays = pt.schedule.delays(upload=1.0)
    for options, field in (
        ({"stragglers": 1.5}, "stragglers"),
        ({"late": "partial"}, "late"),
        ({"late": "apply", "stragglers": 0.5}, "late"),
        ({"stragglers": 0.5, "deadline": 2.0, "delays": delays}, "deadline"),
        ({"stragglers": 0.5, "late": "partial", "staleness": "polynomial"}, "staleness"),
    ):
        with pytest.raises(pt.Refused) as refused:
            pt.schedule.synchronous(**options)
        assert refused.value.field == field
