"""Learning rates over the rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import partita as pt
from partita import optim
from partita.core.types import RoundContext, Work
from partita.engine.execute.plan import draw
from partita.optim.rates import as_rate, size_of, until_the_end, with_size
from partita.schedule import delays, lognormal
from support import each


def values(rate, rounds: int) -> list[float]:
    return [rate(t, rounds) for t in range(rounds)]


def test_constant() -> None:
    assert values(optim.constant(0.3), 4) == [0.3] * 4
    assert optim.constant(0)(0, 1) == 0.0


def test_halving() -> None:
    assert values(optim.halving(0.8, every=2), 5) == [0.8, 0.8, 0.4, 0.4, 0.2]


def test_stepped() -> None:
    assert values(optim.stepped(1.0, at=[2, 3], factor=0.1), 5) == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    assert values(optim.stepped(1.0, at=[], factor=0.1), 2) == [1, 1]


def test_linear() -> None:
    assert values(optim.linear(1.0, warmup=0.0), 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    # 5 rounds of warm-up to η, then down to 0 at round 10
    assert values(optim.linear(1.0, warmup=0.5), 10) == pytest.approx(
        [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine() -> None:
    """That of torch, and of Hugging Face with a warm-up."""
    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([weight], 0.4), 8, eta_min=0.1)
    expected = []
    for _ in range(8):
        expected.append(theirs.get_last_lr()[0])
        theirs.optimizer.step()
        theirs.step()
    assert values(optim.cosine(0.4, warmup=0.0, final=0.25), 8) == pytest.approx(expected)
    warm = values(optim.cosine(1.0, warmup=0.5), 8)
    half = [0.5 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    assert warm == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5, *half])
    assert optim.cosine(1.0, warmup=0.0, final=0.25)(9, 8) == 0.25  # after the last round


@each("course", [optim.linear, optim.cosine])
@given(st.floats(1e-6, 10), st.floats(0, 1), st.integers(1, 60))
def test_a_course_rises_then_falls_and_never_vanishes(course, lr, warmup, rounds) -> None:
    found = values(course(lr, warmup), rounds)
    assert all(0 < v <= lr * (1 + 1e-9) for v in found)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)


def test_as_rate() -> None:
    rate = optim.halving(0.1, 3)
    assert as_rate(rate) is rate
    assert as_rate(2)(7, 9) == 2.0

    def own(t, rounds):
        return t / rounds

    assert as_rate(own)(1, 4) == 0.25


@each(
    ("make", "start"),
    [
        (lambda: optim.constant(-1), "lr=-1: expected a number from 0"),
        (lambda: optim.linear(0), "lr=0: expected a number above 0"),
        (lambda: optim.linear(0.1, warmup=1.5), "warmup=1.5: expected a number from 0 up to 1"),
        (lambda: optim.halving(0.1, every=0), "every=0: expected a whole number from 1"),
        (lambda: optim.halving(0.1, every=1.5), "every=1.5: expected a whole number from 1"),
        (lambda: optim.stepped(0.1, at=[-1]), "at=-1: expected a whole number from 0"),
        (lambda: optim.stepped(0.1, at="12"), "at='12': expected a list of whole numbers from 0"),
        (lambda: optim.stepped(0.1, at=3), "at=3: expected a list of whole numbers from 0"),
        (
            lambda: optim.linear(0.1, warmpu=1),
            "warmpu=1: linear has no such argument (did you",
        ),
        (lambda: optim.stepped(0.1, at=[1], factor=0), "factor=0: expected a number above 0"),
        (lambda: optim.cosine(0.1, final=1.5), "final=1.5: expected a number from 0 up to 1"),
        (lambda: optim.by_step(0.1), "rate=0.1: expected a rate such as partita.optim.cosine"),
        (lambda: optim.by_step(optim.linear), "rate=<class"),
        (lambda: optim.by_step(optim.by_step(optim.linear(1))), "rate=pt.optim.by_step(rate=pt.optim.linear"),
        (lambda: optim.within_round(lambda step: 0.1), "rate=<function"),  # noqa: ARG005
        (lambda: pt.fedavg(lr="fast"), "lr='fast': expected a number from 0"),
        (lambda: pt.fedavg(lr=None), "lr=None: expected a number from 0"),
        (lambda: pt.fedavg(lr=-0.1), "lr=-0.1: expected a number from 0"),
        (lambda: pt.fedavg(lr=float("inf")), "lr=inf: expected a number from 0"),
        (lambda: pt.fedavg(lr=True), "lr=True: expected a number from 0"),
        (lambda: pt.fedalt("output", lr=0.1, personal_lr="x"), "personal_lr='x': expected a number from 0"),
    ],
)
def test_refusals(make, start) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(start)


def data() -> pt.data.FederatedData:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 4, generator=g), torch.randint(0, 2, (20,), generator=g)
    return pt.data.from_arrays(x, y, [0] * 10 + [1] * 10)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_run_asks_for_the_round_of_the_stage(executor) -> None:
    asked = []

    def rate(t: int, rounds: int) -> float:
        asked.append((t, rounds))
        return 0.1

    method = pt.pipeline(pt.stage(pt.fedavg(lr=rate), rounds=3), pt.stage(pt.fedavg(lr=rate), rounds=2))
    pt.federate(pt.models.mlp(4, 2), data(), method, batch=4, executor=executor, baselines=False)
    assert list(dict.fromkeys(asked)) == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]


def test_a_rate_of_zero_changes_nothing_and_a_schedule_equals_its_rounds() -> None:
    model = pt.models.mlp(4, 2)
    common = {"batch": 4, "executor": "loop", "baselines": False}
    still = pt.federate(model, data(), pt.fedavg(lr=0), rounds=2, **common)
    assert all(torch.equal(still.shared[k], p) for k, p in model.named_parameters())
    halved = pt.federate(model, data(), pt.fedavg(lr=optim.halving(0.4, every=1)), rounds=2, **common)
    by_hand = pt.federate(
        model,
        data(),
        pt.pipeline(pt.stage(pt.fedavg(lr=0.4), rounds=1), pt.stage(pt.fedavg(lr=0.2), rounds=1)),
        **common,
    )
    assert all(torch.equal(halved.shared[k], by_hand.shared[k]) for k in halved.shared)


# ---- by step


def test_a_rate_by_step_goes_on_over_the_rounds() -> None:
    rate = optim.by_step(optim.linear(1.0, warmup=0.25))
    steps = [rate.at(t, 3, s, 4) for t in range(3) for s in range(4)]
    assert steps == values(optim.linear(1.0, warmup=0.25), 12)
    assert rate(1, 3) == optim.linear(1.0, warmup=0.25)(1, 3)  # rounds of one step
    again = optim.within_round(optim.linear(1.0, warmup=0.25))
    assert [again.at(t, 3, s, 4) for t in range(3) for s in range(4)] == values(again.rate, 4) * 3


def test_rates_that_are_made_of_others_still_go_by_step() -> None:
    rate = until_the_end(optim.by_step(optim.linear(1.0)))
    assert [rate.at(9, 2, s, 3) for s in range(3)] == [optim.linear(1.0)(3 + s, 6) for s in range(3)]
    assert until_the_end(optim.linear(1.0))(9, 2) == optim.linear(1.0)(1, 2)


def test_the_size_of_a_rate_is_found_and_changed_whatever_its_course() -> None:
    rate = optim.by_step(optim.cosine(0.1, warmup=0.3))
    assert size_of(rate) == 0.1
    assert with_size(rate, 0.2) == optim.by_step(optim.cosine(0.2, warmup=0.3))
    assert size_of(lambda t, rounds: 0.1) is None  # noqa: ARG005
    assert repr(rate) == "pt.optim.by_step(rate=pt.optim.cosine(lr=0.1, warmup=0.3))"


RUN = {"baselines": False, "progress": False, "seed": 5}


def ragged() -> pt.data.FederatedData:
    """Clients with 9, 1, 0, 14 and 5 samples: with batches of 4, so many steps differ."""
    g = torch.Generator().manual_seed(0)
    sizes = [9, 1, 0, 14, 5]
    x, y = torch.randn(29, 4, generator=g).double(), torch.randint(0, 2, (29,), generator=g)
    end = np.cumsum(sizes)
    ranges = np.stack([end - sizes, sizes], axis=1)
    return pt.data.FederatedData.make(x.numpy(), y.numpy(), ranges, ranges)


def network() -> torch.nn.Module:
    return pt.models.mlp(4, 3, 2, seed=1).double()


@pytest.mark.parametrize("executor", ["loop", "vmap", "graph"])
def test_every_client_takes_its_steps_at_its_own_rates(executor) -> None:
    """Against a loop in plain torch, on the batches that were drawn."""
    data, rate = ragged(), optim.cosine(0.5, warmup=0.2)
    run = pt.federate(
        network(), data, pt.local(optim.by_step(rate)), rounds=2, epochs=2, batch=4, executor=executor, **RUN
    )
    for i, n in enumerate(data.sizes()):
        model, work = network(), Work(epochs=2, batch=4)
        for t in range(2):
            drawn = draw(data, np.array([i]), work, 0, RoundContext(5, t, 0, t, 2, work))
            steps = int(drawn.steps[0])
            assert steps == 2 * -(-n // 4)
            for s in range(steps):
                x, y = data.gather(drawn.rows[0, s, : drawn.size[0, s]])
                loss = torch.nn.functional.cross_entropy(model(x), y)
                gradient = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for w, g in zip(model.parameters(), gradient):
                        w -= rate(t * steps + s, 2 * steps) * g
        for k, w in model.named_parameters():
            torch.testing.assert_close(run.client(i).personal[k], w.detach(), rtol=0, atol=1e-12)


SLOW = delays(compute=lognormal(1.0, sigma=1.0))


@pytest.mark.parametrize(
    "schedule",
    [
        pt.schedule.asynchronous(concurrency=3, buffer=2, delays=SLOW),
        pt.schedule.synchronous(stragglers=0.6, late="partial"),
    ],
    ids=["asynchronous", "stragglers"],
)
def test_stacked_equals_alone_under(schedule) -> None:
    method = pt.fedalt("output", optim.by_step(optim.cosine(0.4)), personal_lr=0.1)
    settings = {"rounds": 4, "epochs": 3, "batch": 4, "schedule": schedule, **RUN}
    loop, vmap, graph = (
        pt.federate(network(), ragged(), method, executor=e, **settings) for e in ("loop", "vmap", "graph")
    )
    for other in (vmap, graph):
        for k, w in loop.shared.items():
            torch.testing.assert_close(other.shared[k], w, rtol=0, atol=1e-12)


def test_a_straggler_takes_the_first_of_its_steps() -> None:
    asked = []

    def rate(step: int, steps: int) -> float:
        asked.append((step, steps))
        return 0.1

    schedule = pt.schedule.synchronous(stragglers=1.0, late="partial")
    method = pt.fedavg(optim.within_round(rate))
    pt.federate(network(), ragged(), method, rounds=3, steps=9, batch=4, schedule=schedule, **RUN)
    assert {steps for _, steps in asked} == {9}
    assert 0 < max(step for step, _ in asked) < 8  # nobody comes that far


def test_a_rate_by_step_that_depends_on_the_rounds_cannot_be_prolonged(tmp_path) -> None:
    settings = {"steps": 2, "batch": 4, "executor": "loop", "checkpoint_every": 1, "out": tmp_path / "run"}
    method = pt.fedavg(optim.by_step(optim.cosine(0.1)))
    pt.federate(network(), ragged(), method, rounds=2, **settings, **RUN)
    with pytest.raises(pt.Refused, match="the step size depends on the number of rounds"):
        pt.federate(network(), ragged(), method, rounds=3, resume=True, **settings, **RUN)
