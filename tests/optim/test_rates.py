"""Learning rates over the rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import partita as pt
from partita import optim
from partita.optim.rates import as_rate
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


@given(st.floats(1e-6, 10), st.floats(0, 1), st.integers(1, 60))
def test_linear_rises_then_falls_and_never_vanishes(lr, warmup, rounds) -> None:
    found = values(optim.linear(lr, warmup), rounds)
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
