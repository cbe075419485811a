"""Asynchronous runs: the synchronous twin, a plain event loop, batches ahead, recovery, combinations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from algorithms.test_every_algorithm import (
    CASES,
    DOUBLE,
    SEED,
    Case,
    Stop,
    assert_close,
    assert_same_bits,
    federate,
    make,
    most_methods,
    rows,
    tensors,
)
from partita.core import draws
from partita.core.parts import Algorithm
from partita.core.types import RoundContext, Work
from partita.engine.execute.plan import draw
from partita.engine.pending import PendingUploads, Trained
from reference import plain
from support import each

S = pt.schedule
N = DOUBLE.clients
RANDOM = S.delays(download=S.exponential(1.0), upload=S.scaled(S.uniform(0.5, 1.5), S.uniform(4, 6)))


# ---- concurrency = buffer = everyone and equal delays: synchronous rounds


@most_methods
def test_the_synchronous_twin(case: Case) -> None:
    algorithm = make(case.name, case.options)
    schedule = S.asynchronous(concurrency=N, buffer=N, delays=S.delays(download=1.0, upload=2.5))
    several = [s.algorithm for s in algorithm.stages if s.rounds]  # the others are one round of everyone
    if any(a.synchronous_only for a in several or [algorithm]):
        with pytest.raises(ValueError, match="synchronous\\(\\) for"):
            federate(algorithm, cohort=None, schedule=schedule)
        return
    stages = tuple(replace(s, cohort=None) for s in algorithm.stages)
    algorithm = replace(algorithm, stages=stages)
    twin = federate(algorithm, DOUBLE, cohort=None, schedule=schedule)
    synchronous = federate(algorithm, DOUBLE, cohort=None, schedule=S.synchronous())
    assert_same_bits(tensors(twin), tensors(synchronous))
    assert rows(twin, "time") == rows(synchronous, "time")


@pytest.mark.parametrize("name", ["fedavg", "fedalt", "ffgg"])
def test_synchronous_rounds_of_a_part_of_the_clients(name: str) -> None:
    """Also with fewer clients at a time, down to one: the same clients are drawn."""
    algorithm = make(name, CASES[name].options)
    for some in (1, 3):
        twin = federate(algorithm, cohort=some, schedule=S.asynchronous(buffer=some))
        assert_same_bits(tensors(twin), tensors(federate(algorithm, cohort=some)))


# ---- a plain event loop


def textbook(
    method: Callable[..., plain.World], options: dict[str, Any], steps: int, asked: Any, rounds: int
) -> tuple[plain.Params, list[float], list[int]]:
    """Events one by one; each client trains when its upload arrives, on the model that it had downloaded."""
    work = Work(steps=steps, batch=4)
    x, y, start = DOUBLE.x.numpy(), DOUBLE.y.numpy(), start_model()
    models, personal = [start], {}
    flights: list[tuple[float, int, int, int]] = []  # end, number, client, version
    buffer: list[tuple[int, int]] = []
    now, number, fills, times, ages = 0.0, 0, 0, [], []

    def given(client: int, version: int) -> plain.Given:
        at = RoundContext(SEED, version, 0, version, rounds, work)

        def batches(i: int, phase: int, count: int | None) -> list[np.ndarray]:
            own = work if count is None else replace(work, steps=count)
            plan = draw(DOUBLE, np.array([i]), own, phase, at)
            return [plan.rows[0, k, : plan.size[0, k]].numpy() for k in range(plan.steps[0])]

        return plain.Given(x, y, DOUBLE.sizes(), [client], batches, version, rounds, True)

    while len(models) <= rounds:
        if not flights or min(flights)[0] > now:
            held = {c for _, _, c, _ in flights} | {c for c, _ in buffer}
            for _ in range(asked.concurrency - len(flights)):
                idle = sorted(set(range(N)) - held)
                if not idle:
                    break
                first = len(flights) == 0 and fills == 0 and asked.concurrency == N
                pick = 0 if first else int(draws.number(SEED, "cohort", fills) * len(idle))
                client, version, number = idle[pick], len(models) - 1, number + 1
                held.add(client)
                length = asked.delays.length(SEED, version, client, steps)
                flights.append((now + length, number, client, version))
            fills += 1
        flight = min(flights)
        flights.remove(flight)
        now = flight[0]
        buffer.append((flight[2], flight[3]))
        if len(buffer) < asked.buffer:
            continue
        total: plain.Params = {k: np.zeros_like(v) for k, v in start.items()}
        weight = sum(float(DOUBLE.sizes()[c]) for c, _ in buffer)
        for client, version in buffer:
            age = len(models) - 1 - version
            ages.append(age)
            mine = {client: personal[client]} if client in personal else {}
            world = method(plain.World(models[version], mine, {}), given(client, version), **options)
            personal |= world.personal
            scale = (1 + age) ** -0.5 * float(DOUBLE.sizes()[client]) / max(weight, 1.0)
            total = {k: v + scale * (models[version][k] - world.model[k]) for k, v in total.items()}
        models.append({k: models[-1][k] - total[k] for k in total})
        buffer.clear()
        times.append(now)
    return models[-1], times, ages


def start_model() -> plain.Params:
    model = pt.models.mlp(6, 5, 4, seed=1).double()
    return {k: v.detach().numpy() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("executor", ["vmap", "loop", pytest.param("graph", marks=pytest.mark.slow)])
@each("buffer", [1, 3])
@each("name", ["fedavg", "fedalt"])
def test_a_plain_event_loop_agrees(name: str, buffer: int, executor: str) -> None:
    """With everyone at work, so that who comes next is no matter of chance."""
    options = {"lr": 0.3} if name == "fedavg" else {"lr": 0.3, "personal": "output"}
    asked = S.asynchronous(concurrency=N, buffer=buffer, staleness="sqrt", delays=RANDOM)
    run = federate(
        make(name, options),
        DOUBLE,
        rounds=25,
        cohort=None,
        steps=3,
        batch=4,
        schedule=asked,
        executor=executor,
    )
    model, times, ages = textbook(getattr(plain, name), options, 3, asked, 25)
    shared = {k: torch.from_numpy(v) for k, v in model.items() if k in run.shared}
    assert_close(dict(run.shared), shared, atol=1e-9)
    assert [row["time"] for row in run.metrics] == pytest.approx(times)
    assert run.summary()["clock"]["staleness"]["mean"] == pytest.approx(np.mean(ages))
    assert max(ages) > 0


# ---- batches ahead of time


def test_training_ahead_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if everyone had trained alone, at the moment of its arrival."""
    schedule = S.asynchronous(concurrency=4, buffer=2, delays=RANDOM)
    algorithm = pt.fedalt("output", lr=pt.optim.linear(0.3), momentum=0.5)
    sizes: list[int] = []
    add = PendingUploads.add

    def count(self: PendingUploads, clients: Sequence[int], trained: Trained) -> None:
        sizes.append(len(clients))
        add(self, clients, trained)

    monkeypatch.setattr(PendingUploads, "add", count)
    common = {"rounds": 20, "cohort": 4, "steps": 3, "batch": 4, "schedule": schedule}
    batched = federate(algorithm, DOUBLE, **common)
    assert max(sizes) > 2
    untrained = PendingUploads.untrained
    monkeypatch.setattr(PendingUploads, "untrained", lambda self, cohort, _: untrained(self, cohort))
    alone = federate(algorithm, DOUBLE, **common)
    assert_close(tensors(batched), tensors(alone), atol=1e-10)


def test_rates_are_those_of_the_model_that_was_received() -> None:
    """A rate over the rounds belongs to the download, alone or stacked with clients of other versions."""
    schedule = S.asynchronous(concurrency=N, delays=RANDOM)
    algorithm = pt.fedavg(lr=pt.optim.linear(0.5, 0.3))
    common = {"rounds": 20, "cohort": None, "steps": 2, "batch": 4, "schedule": schedule}
    loop, vmap = (federate(algorithm, DOUBLE, executor=e, **common) for e in ("loop", "vmap"))
    assert_close(tensors(loop), tensors(vmap), atol=1e-10)
    constant = federate(pt.fedavg(lr=0.5), DOUBLE, **common)
    assert not torch.equal(constant.shared[plain.W1], vmap.shared[plain.W1])


# ---- everything together, and recovery


HARD: dict[str, Any] = {
    "rounds": 12,
    "cohort": 5,
    "steps": 2,
    "batch": 4,
    "checkpoint_every": 1,
    "attack": pt.attack.sign_flip(),
    "byzantine": [1],
    "schedule": S.asynchronous(
        concurrency=5,
        buffer=3,
        staleness="inverse",
        delays=S.delays(
            download=S.lognormal(1.0), upload=S.gamma(2.0), compute=0.1, speed=S.classes([(0.5, 1), (0.5, 8)])
        ),
        max_staleness=3,
    ),
}


def robust() -> Algorithm:
    return pt.fedalt("output", lr=0.2, aggregate=pt.aggregate.nnm(1, pt.aggregate.coordinate_median()))


@pytest.mark.parametrize("after", [1, 2, 5, 11])
@pytest.mark.parametrize("how", ["error", "ctrl-c"])
def test_asynchronous_partial_robust_attacked_and_resumed(tmp_path: Path, how: str, after: int) -> None:
    straight = federate(robust(), **HARD)
    stop = Stop("fedalt", how, after)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        federate(robust(), **HARD, out=tmp_path, report=False, callbacks=[stop])
    resumed = federate(robust(), **HARD, out=tmp_path, report=False, resume=True)
    assert_same_bits(tensors(resumed), tensors(straight))
    assert rows(resumed) == rows(straight)
    assert resumed.summary()["clock"] == straight.summary()["clock"]
    same = ("reports", "delay", "late", "lost", "personal")
    assert [[c[k] for k in same] for c in resumed.clients] == [[c[k] for k in same] for c in straight.clients]


@pytest.mark.parametrize("after", [2, 4])
@pytest.mark.parametrize(
    ("aggregate", "attack"),
    [("geometric_median", "sign_flip"), ("centered_clipping", "sign_flip"), ("mean", "gaussian")],
)
def test_the_order_of_names_survives_a_resume(
    tmp_path: Path, aggregate: str, attack: str, after: int
) -> None:
    """What sums over all names, or draws by their places, rounds and draws as if nothing had happened."""
    combine = (
        pt.aggregate.centered_clipping(1.0) if "clip" in aggregate else getattr(pt.aggregate, aggregate)()
    )
    algorithm = pt.fedavg(lr=0.2, aggregate=combine)
    settings = HARD | {"attack": getattr(pt.attack, attack)(), "rounds": 8}
    straight = federate(algorithm, DOUBLE, **settings)
    with pytest.raises(RuntimeError):
        federate(algorithm, DOUBLE, **settings, out=tmp_path, callbacks=[Stop("fedavg", "error", after)])
    resumed = federate(algorithm, DOUBLE, **settings, out=tmp_path, resume=True)
    assert_same_bits(tensors(resumed), tensors(straight))


def test_statistics_stay_what_they_are_under_staleness() -> None:
    """Running variances are means of clients' variances, however many stale ones arrive: never negative."""
    torch.manual_seed(0)
    x, y = 0.1 * torch.randn(200, 6), torch.randint(0, 4, (200,))
    data = pt.data.from_arrays(x, y, torch.arange(200) % 20, test=0.2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4))
    for buffer, staleness in ((1, None), (3, "sqrt")):
        run = pt.federate(
            model,
            data,
            pt.fedavg(lr=0.05),
            rounds=60,
            steps=3,
            batch=4,
            norm="global",
            schedule=S.asynchronous(15, buffer, staleness, RANDOM),
            baselines=False,
        )
        variance = run.shared["1.running_var"]
        assert (variance > 0).all()
        assert (variance < 1).all()
        assert run.shared["1.num_batches_tracked"] > 0


def test_a_function_of_the_staleness_counts_from_zero_on_and_is_checked() -> None:
    start = federate(
        pt.fedavg(lr=0.2), DOUBLE, rounds=1, cohort=1, schedule=S.asynchronous(staleness=lambda _: 0.0)
    )
    model = start_model()
    assert all(np.array_equal(v.numpy(), model[k]) for k, v in start.shared.items())
    for wrong in (float("nan"), -1.0, "much"):
        with pytest.raises(ValueError, match=r"staleness\(\d\)="):
            federate(pt.fedavg(lr=0.2), DOUBLE, schedule=S.asynchronous(staleness=lambda _, w=wrong: w))


def test_what_is_sent_is_counted_even_if_it_never_comes_back() -> None:
    slow = S.delays(upload=[1.0, *[9.0] * (N - 1)])
    schedule = S.synchronous(delays=slow, deadline=2.0)
    one = federate(pt.fedavg(lr=0.1), DOUBLE, rounds=3, cohort=None, schedule=schedule)
    all_ = federate(pt.fedavg(lr=0.1), DOUBLE, rounds=3, cohort=None)
    assert one.summary()["clock"]["late"] == 3 * (N - 1)
    assert one.summary()["bytes_down"] == all_.summary()["bytes_down"]
    assert one.summary()["bytes_up"] == all_.summary()["bytes_up"] // N


def test_the_global_baseline_is_shown_at_every_time() -> None:
    data = pt.data.digits(clients=6, seed=0)
    run = pt.federate(
        pt.models.mlp(64, 10, 10),
        data,
        pt.fedalt("output", lr=0.1),
        rounds=200,
        steps=2,
        batch=8,
        schedule=S.asynchronous(delays=S.delays(compute=S.exponential(0.3)), until=8.0),
        evaluate_every=1.0,
    )
    assert (
        sum(row["validation.global"] is None for row in run.metrics) <= 1
    )  # before the baseline's first evaluation


def test_about_ten_evaluations_by_rounds_or_by_time() -> None:
    schedule = S.asynchronous(delays=RANDOM, until=1e6)
    run = federate(pt.fedavg(lr=0.1), rounds=50, schedule=schedule, evaluate_every=None)
    assert len(run.metrics) == 10
    schedule = S.asynchronous(delays=RANDOM, until=40.0)
    run = federate(pt.fedavg(lr=0.1), rounds=10**6, schedule=schedule, evaluate_every=None)
    assert 9 <= len(run.metrics) <= 11


def test_a_robust_buffer_resists_what_the_mean_does_not() -> None:
    """Asynchronous, partial, with a Byzantine client in every third buffer."""
    data = pt.data.digits(clients=12, partition=pt.data.label_skew(classes=5), seed=0)
    found = {}
    for name, aggregate in {"mean": pt.aggregate.mean(), "median": pt.aggregate.coordinate_median()}.items():
        found[name] = pt.federate(
            pt.models.mlp(64, 16, 10),
            data,
            pt.fedalt("output", lr=0.2, aggregate=aggregate),
            rounds=40,
            steps=8,
            batch=16,
            attack=pt.attack.sign_flip(scale=20.0),
            byzantine=[0, 5, 7],
            schedule=S.asynchronous(concurrency=10, buffer=6, staleness="sqrt", delays=RANDOM),
            baselines=False,
            executor="vmap",
        ).summary()["test"]["personal"]
    assert found["median"] > 0.75
    assert found["median"] > found["mean"] + 0.2


def test_a_client_that_sends_nonsense_is_set_aside_when_it_arrives() -> None:
    """It trained in a batch with others, long before."""
    data = broken()
    run = federate(
        pt.fedavg(lr=0.2), data, rounds=15, cohort=4, schedule=S.asynchronous(delays=RANDOM), evaluate_every=1
    )
    assert run.summary()["excluded"] == [data.names[0]]
    first = next(row["round"] for row in run.metrics if row["excluded"])
    assert first > 1
    assert all(torch.isfinite(v).all() for v in run.shared.values())


def broken() -> pt.data.FederatedData:
    x = DOUBLE.x.clone()
    begin, n = DOUBLE.train[0]
    x[begin : begin + n] = 1e200
    return pt.data.FederatedData.make(x, DOUBLE.y, DOUBLE.train, DOUBLE.test)


# ---- what cannot be


def test_methods_that_need_everyone_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"l2gd.*coin"):
        federate(pt.l2gd(lr=0.1, lam=1.0, p=0.5), schedule=S.asynchronous())


def test_a_buffer_that_can_never_be_full_is_refused() -> None:
    with pytest.raises(ValueError, match=f"buffer={N + 1}"):
        federate(pt.fedavg(0.1), schedule=S.asynchronous(buffer=N + 1))
    with pytest.raises(ValueError, match="buffer=4"):
        federate(pt.fedavg(0.1), cohort=3, schedule=S.asynchronous(buffer=4, order="same"))


def test_a_stage_of_its_own_schedule() -> None:
    """Arrivals, then synchronous rounds on the same clock, then one round of everyone."""
    schedule = S.asynchronous(concurrency=3, delays=RANDOM)
    algorithm = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.2), rounds=6, schedule=schedule),
        pt.stage(pt.fedalt("output", lr=0.2), rounds=2, schedule=S.synchronous(delays=RANDOM)),
        pt.stage(pt.finetune("output", lr=0.2), epochs=1),
    )
    run = federate(algorithm, cohort=3)
    times = [row["time"] for row in run.metrics]
    assert len(times) == 9
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert [row["round"] for row in run.metrics if row["staleness"]][-1] <= 6
    assert len(run.config["schedule"]) == 3
    assert sum(c["reports"] for c in run.clients) == 6 + 2 * 3 + N


def test_a_method_that_is_asynchronous_is_so_by_default() -> None:
    data = pt.data.digits(clients=6, seed=0)
    common: dict[str, Any] = {"rounds": 6, "cohort": 4, "steps": 1, "batch": 8, "baselines": False}
    run = pt.federate(pt.models.mlp(64, 10), data, pt.fedbuff(lr=0.1, buffer=2), **common)
    assert run.config["schedule"]["name"] == "asynchronous"
    assert (run.config["schedule"]["buffer"], run.config["schedule"]["staleness"]) == (2, "sqrt")
    assert sum(c["reports"] for c in run.clients) == 12
    schedule = S.asynchronous(buffer=3)
    run = pt.federate(pt.models.mlp(64, 10), data, pt.fedbuff(lr=0.1, buffer=2), schedule=schedule, **common)
    assert (run.config["schedule"]["buffer"], run.config["schedule"]["staleness"]) == (3, "sqrt")
    one = pt.federate(pt.models.mlp(64, 10), data, pt.fedasync(lr=0.1), **common)
    assert sum(c["reports"] for c in one.clients) == 6


def test_baselines_under_the_same_clock() -> None:
    data = pt.data.digits(clients=6, seed=0)
    run = pt.federate(
        pt.models.mlp(64, 8, 10),
        data,
        pt.fedalt("output", lr=0.1),
        rounds=60,
        steps=2,
        batch=8,
        schedule=S.asynchronous(delays=RANDOM, until=30.0),
    )
    test = run.summary()["test"]
    assert all(test[k] is not None for k in ("local", "global", "personal"))
    assert run.summary()["clock"]["time"] <= 30.0
    assert run.summary()["rounds"] < 60
