"""Clients that are done before their last step stay as they are; when all are done nothing is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import partita as pt
from partita.core.parts import LocalRule, Phase, Problem
from partita.core.types import Batch, ClientState, Download, Upload
from partita.data import FederatedData
from partita.engine.model.problem import ModelProblem

EXECUTORS = ("loop", "vmap", "graph")
ROWS = (9, 6, 12, 3)


def samples() -> FederatedData:
    """Clients of different sizes, with gradients of different lengths."""
    rng = np.random.default_rng(0)
    scale = np.repeat([0.1, 1.0, 3.0, 0.5], ROWS)
    x = rng.normal(size=(sum(ROWS), 5)) * scale[:, None]
    ends = np.cumsum(ROWS)
    ranges = np.stack([ends - ROWS, ROWS], axis=1)
    return FederatedData.make(x, rng.integers(0, 3, sum(ROWS)), ranges, ranges)


def federate(method: Any, executor: str, **settings: Any) -> pt.Run:
    model = pt.models.mlp(5, 4, 3, seed=1).double()
    fixed = {"rounds": 2, "steps": (3, 2, 1, 2), "seed": 0, "evaluate_every": 2}
    fixed |= {"baselines": False, "progress": False, "schedule": pt.schedule.synchronous()}
    return pt.federate(model, samples(), method, executor=executor, **{**fixed, **settings})


def models(run: pt.Run) -> dict[str, Tensor]:
    found = {f"shared {k}": v for k, v in run.shared.items()}
    return found | {f"{i} {k}": v for i in range(len(ROWS)) for k, v in run.personalized(i).items()}


def assert_alike(runs: list[pt.Run]) -> None:
    first, *others = map(models, runs)
    for other in others:
        for k, v in first.items():
            torch.testing.assert_close(other[k], v, rtol=0, atol=1e-12, msg=lambda m, k=k: f"{k}: {m}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a problem is asked for gradients and Hessian-vector products."""
    counts = {"grad": 0, "hvp": 0}
    for name in counts:
        plain = getattr(ModelProblem, name)

        def counted(self: Any, *args: Any, plain: Any = plain, name: str = name, **more: Any) -> Any:
            counts[name] += 1
            return plain(self, *args, **more)

        monkeypatch.setattr(ModelProblem, name, counted)
    return counts


def gradients(method: pt.Algorithm, executor: str, calls: dict[str, int]) -> int:
    """How many a run of one round computes, but for those that try whether the model can be stacked."""
    calls["grad"] = 0
    federate(pt.fedavg(0.1), executor, rounds=1, steps=1)
    tried, calls["grad"] = calls["grad"] - (len(ROWS) if executor == "loop" else 1), 0
    federate(method, executor, rounds=1)
    return calls["grad"] - tried


# ---- a phase


def halving(problem: Problem, steps: int = 50) -> LocalRule:
    """Halve a number until it is below 1; the number of a client is that of its samples."""

    def start(download: Download, state: ClientState) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        zero = next(iter(download.shared.values())).new_zeros(())
        return zero, zero

    def count(carry: tuple[Tensor, Tensor], batch: Batch, lr: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        size = len(batch.y) if batch.mask is None else batch.mask.sum()
        return carry[0] + size, carry[1]

    def halve(carry: tuple[Tensor, Tensor], batch: Batch, lr: Any) -> tuple[Tensor, Tensor]:
        problem.grad(dict(SHARED), batch, wrt=())
        return carry[0] / 2, carry[1] + lr[0]

    def finish(carry: tuple[Tensor, Tensor], download: Download, state: ClientState) -> Any:
        delta = {k: torch.zeros_like(v) for k, v in download.shared.items()}
        return Upload(delta, metrics={"loss": carry[0], "steps": carry[1]}), state

    once = Phase(count, work=lambda now: pt.Work(epochs=1))  # noqa: ARG005
    halves = Phase(
        halve,
        (lambda t, rounds: 1.0,),  # noqa: ARG005
        lambda now: pt.Work(steps=steps),  # noqa: ARG005
        until=lambda carry: carry[0] < 1,
    )
    return LocalRule(start, (once, halves), finish)


SHARED = {k: v.detach() for k, v in pt.models.mlp(5, 4, 3, seed=1).double().named_parameters()}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_client_stays_as_it_was_when_it_finished(executor: str, calls: dict[str, int]) -> None:
    common = pt.fedavg(0.1)
    method = pt.Algorithm(
        "halving", common.partition, common.init_client, halving, common.aggregate, common.server,
        common.personalize,
    )  # fmt: skip
    run = federate(method, executor, rounds=1)
    halved = [n / 2 ** (int(np.log2(n)) + 1) for n in ROWS]
    assert run.metrics[-1]["train_loss"] == pytest.approx(np.average(halved, weights=ROWS))
    steps = [int(np.log2(n)) + 1 for n in ROWS]
    expected = {"loop": sum(steps), "vmap": max(steps)}
    if executor in expected:  # what is recorded runs to the end
        assert gradients(method, executor, calls) == expected[executor]


# ---- conjugate gradients


def test_conjugate_gradients_end_when_everyone_has_converged(calls: dict[str, int]) -> None:
    runs, products = [], {}
    problem = pt.data.quadratic(clients=4, kind="uniform", n=40, d_theta=3, d_w=5)
    for executor in EXECUTORS:
        calls["hvp"] = 0
        method = pt.ffgg("w", problem.constants.gamma_theta, pt.cg(40), start="model")
        run = pt.federate(
            problem.model(),
            problem.data,
            method,
            rounds=1,
            loss=problem.loss,
            metric="loss",
            executor=executor,
            evaluate_every=1,
            baselines=False,
            progress=False,
        )
        products[executor] = calls["hvp"]
        runs.append({**run.shared, **{f"{i}": run.personalized(i)["w"] for i in range(4)}})
    for other in runs[1:]:
        for k, v in runs[0].items():
            torch.testing.assert_close(other[k], v, rtol=0, atol=1e-9)
    assert (
        0 < products["vmap"] < 3 * 15
    )  # to train, to evaluate, for the models above: 5 iterations, or few more
    assert products["loop"] < 4 * 3 * 15


# ---- steps inside of a step


def me(nu: float | None, steps: int | None = 6) -> pt.Algorithm:
    return pt.persafl_me(0.1, lam=2.0, inner_lr=0.1, inner_steps=steps, nu=nu)


@pytest.mark.parametrize("nu", [0.3, pytest.param(0.1, marks=pytest.mark.slow)])
def test_some_are_done_before_others(nu: float) -> None:
    assert_alike([federate(me(nu), executor) for executor in EXECUTORS])
    plain = models(federate(me(None), "loop"))
    assert any(not torch.equal(v, plain[k]) for k, v in models(federate(me(nu), "loop")).items())


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_nothing_is_computed_when_everyone_is_done(executor: str, calls: dict[str, int]) -> None:
    most, some, least = (gradients(me(nu), executor, calls) for nu in (1e-9, 0.3, 1e9))
    # steps, one to evaluate the last round, and one for what is kept of every sample
    outer = (3 + 2 + 1 + 2) + 2 * len(ROWS) if executor == "loop" else 3 + 2
    assert least == outer
    assert most == 6 * outer
    assert least < some < most
