"""PersA-FL's Theorems 1 to 3 and their lemmas, on the iterates of real runs and on single curvatures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.core.parts import Algorithm
from partita.theory import (
    fedasync_objective,
    persafl_bound,
    persafl_lr,
    persafl_maml_objective,
    persafl_me_objective,
    persafl_rounds,
)
from partita.theory.persafl import Objective
from support import each

N, D, Q, TAU, C = 8, 3, 2, 1, 0.01  # clients, dimensions, local steps, staleness, curvature of all f_i


class Point(nn.Module):
    """Its parameters, less the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.full((D,), 3.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.at - x


def loss(output: Tensor, target: Tensor) -> Tensor:
    """f_i(w) = (c/2) ‖w − a_i‖²: all samples of a client are its a_i."""
    return 0.5 * C * (output - target).square().sum(-1).mean()


def squares(a: np.ndarray, method: Algorithm, rounds: int) -> np.ndarray:
    """Return ‖w^t − ā‖² for every tenth t < T of an asynchronous run whose uploads are 0 or 1 step old."""
    rows = np.repeat(a, 2, axis=0)
    data = pt.data.from_arrays(rows, np.zeros_like(rows), np.repeat(np.arange(N), 2), test=0.5, validation=0)
    run = pt.federate(
        Point(),
        data,
        method,
        loss=loss,
        metric="loss",
        rounds=rounds,
        steps=Q,
        schedule=pt.schedule.asynchronous(concurrency=TAU + 1),
        evaluate_every=10,
        baselines=False,
        progress=False,
        executor="loop",
    )
    assert run.summary()["clock"]["staleness"]["max"] == TAU
    least = 0.5 * C * ((a - a.mean(0)) ** 2).sum(1).mean()
    found = [2 / C * (row["test.global"] - least) for row in run.metrics if row["round"] < rounds]
    return np.array([((3.0 - a.mean(0)) ** 2).sum(), *found])


def optima(spread: float) -> np.ndarray:
    return spread * np.random.default_rng(0).normal(size=(N, D))


def far(a: np.ndarray) -> float:
    """γ_g², the same at all points."""
    return float(((C * (a - a.mean(0))) ** 2).sum(1).mean())


@each("spread", [0.0, 0.5, 3.0])
def test_the_bound_of_fedasync_holds_on_iterates(spread: float) -> None:
    a = optima(spread)
    objective = fedasync_objective(C, heterogeneity=far(a))
    rounds = persafl_rounds(objective, Q, TAU)
    assert rounds == math.ceil(160 * C * 9 * 8)
    found = squares(a, pt.fedasync(persafl_lr(C, Q, rounds)), rounds)
    gap = 0.5 * C * ((3.0 - a) ** 2).sum(1).mean()  # of f(w⁰) above the least of any f_i, which is 0
    bound = persafl_bound(gap, objective, rounds=rounds, steps=Q, staleness=TAU)
    assert C**2 * found.mean() < bound
    if spread == 0.0:  # of a quadratic Σ_t η Q ‖∇f‖² is nearly f(w⁰): a fourth of the first term
        assert C**2 * found.mean() > bound / 5


@each("spread", [0.0, 0.5])
def test_the_bound_of_maml_holds_on_iterates(spread: float) -> None:
    a, alpha, rounds = optima(spread), 20.0, 80
    longest = C * max(np.linalg.norm(3.0 - a, axis=1).max(), np.linalg.norm(a[:, None] - a, axis=2).max())
    objective = persafl_maml_objective(C, alpha, longest, heterogeneity=far(a))
    method = pt.persafl_maml(persafl_lr(objective.smoothness, Q, rounds), alpha)
    curvature = C * (1 - alpha * C) ** 2
    gap = 0.5 * curvature * ((3.0 - a) ** 2).sum(1).mean()
    bound = persafl_bound(gap, objective, rounds=rounds, steps=Q, staleness=TAU)
    assert curvature**2 * squares(a, method, rounds).mean() < bound


@each("spread", [0.0, 0.5])
def test_the_bound_of_envelopes_holds_on_iterates(spread: float) -> None:
    a, lam = optima(spread), 8 * C
    objective = persafl_me_objective(C, lam, heterogeneity=far(a))
    rounds = persafl_rounds(objective, Q, TAU)
    assert rounds == math.ceil(288 * 8 / 7 * C * 9 * 8)
    eta = persafl_lr(objective.smoothness, Q, rounds)
    method = pt.persafl_me(eta, lam, inner_lr=1 / (lam + C), inner_steps=1)  # the minimizer, in one step
    curvature = lam * C / (lam + C)
    gap = 0.5 * curvature * ((3.0 - a) ** 2).sum(1).mean()
    bound = persafl_bound(gap, objective, rounds=rounds, steps=Q, staleness=TAU)
    found = curvature**2 * squares(a, method, rounds).mean()
    assert found < bound
    if spread == 0.0:
        assert found > bound / 6


def test_smoothness_is_that_of_the_most_negative_curvature() -> None:
    """f(w) = −(L/2) w² has MAML's objective −(L/2) (1 + αL)² w² and the envelope −(1/2) λL/(λ − L) w²."""
    smooth, alpha, lam, w = 0.7, 0.9, 6.0, torch.tensor(1.3, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return -smooth / 2 * x**2

    second = torch.func.grad(torch.func.grad(lambda x: f(x - alpha * torch.func.grad(f)(x))))(w)
    assert persafl_maml_objective(smooth, alpha, 1.0).smoothness == pytest.approx(-float(second))

    def envelope(x: Tensor) -> Tensor:
        theta = lam * x / (lam - smooth)  # where −Lθ + λ (θ − x) = 0
        return f(theta) + lam / 2 * (theta - x) ** 2

    second = torch.func.grad(torch.func.grad(envelope))(w)
    assert persafl_me_objective(smooth, lam).smoothness == pytest.approx(-float(second))


def test_the_bias_of_envelopes_is_reached() -> None:
    """By f(θ) = −(L/2) θ², where h has its least curvature: ∇h(θ̃) = ν and ∇h(θ̂) = 0."""
    smooth, lam, nu, w = 0.7, 6.0, 0.01, 1.3
    found, exact = (np.roots([lam - smooth, -lam * w - slope]).item() for slope in (nu, 0.0))
    bias = abs(lam * (w - found) - lam * (w - exact))
    assert persafl_me_objective(smooth, lam, nu).bias == pytest.approx(bias)


def test_constants_are_those_of_the_lemmas() -> None:
    """By hand: αL = 1/2, b = 2, σ_g² = 4, σ_h² = 1, γ_g² = 1, γ_h² = 2, G = 3, ρ = 1, α = 1/4, L = 2."""
    found = persafl_maml_objective(
        2.0,
        0.25,
        3.0,
        sample_noise=4.0,
        heterogeneity=1.0,
        batch=2,
        hessian_lipschitz=1.0,
        hessian_noise=1.0,
        hessian_heterogeneity=2.0,
    )
    noise = 3 * 2.25 * 4 * 0.625 + 3 / 16 * 9 * 1 / 2 + 3 / 16 * 4 * 1 / 2 * 0.625
    assert found == pytest.approx(
        (2 * 2.25 + 0.75, noise, 12 * 2.25 * 1.25 + 12 / 16 * 9 * 2, 0.75 * math.sqrt(2), 4.5, "persafl_maml")
    )
    third = 20 * 3 * 5.25 * (4.5**2 + noise) * 5 / 400
    rest = 4 * math.sqrt(5.25) / 20 * 7 + 8 * math.sqrt(5.25) / 20 * (noise + found.heterogeneity)
    assert persafl_bound(7.0, found, rounds=400, steps=3, staleness=2) == pytest.approx(
        rest + third + 4 * 3 * 9 / 8
    )
    me = persafl_me_objective(1.0, 8.0, 0.5, noise=2.0, heterogeneity=3.0)
    assert me == pytest.approx((8 / 7, 128 / 49 * 2.25, 16 * 64 * 3 / 16, 4 / 7, 0.0, "persafl_me"))
    both = me.noise + me.heterogeneity
    assert persafl_bound(0.0, me, rounds=10**6, steps=1, staleness=1) == pytest.approx(
        8 * math.sqrt(8 / 7) / 1000 * both + 144 * 8 / 7 * 2 * 2 * both / 1e6 + 4 * 16 / 49
    )


def test_without_personalization_the_objectives_are_alike() -> None:
    assert persafl_maml_objective(2.0, 0.0, 1.0).smoothness == 2.0
    assert persafl_me_objective(2.0, 1e12).smoothness == pytest.approx(2.0)
    assert persafl_lr(4.0, 5, 100) == 1 / (5 * 20)


PLAIN: dict[str, Any] = {
    "gap": 1.0,
    "objective": Objective(1.0, 0.0, 0.0),
    "rounds": 10**5,
    "steps": 1,
    "staleness": 0,
}


@each(
    ("call", "start"),
    [
        (lambda: persafl_lr(0.0, 1, 1), "smoothness=0.0: expected a number above 0"),
        (lambda: persafl_me_objective(1.0, 6.9), "lam=6.9: expected a number from 7"),
        (lambda: persafl_maml_objective(1.0, -0.1, 1.0), "alpha=-0.1: expected a number from 0"),
        (lambda: fedasync_objective(1.0, -1.0), "noise=-1.0: expected a number from 0"),
        (
            lambda: persafl_bound(**{**PLAIN, "rounds": 1279}),
            "rounds=1279: expected a whole number from 12",
        ),
        (lambda: persafl_bound(**{**PLAIN, "gap": -1.0}), "gap=-1.0: expected a number from 0"),
        (lambda: persafl_rounds(PLAIN["objective"], 1, -1), "staleness=-1: expected a whole number from 0"),
    ],
)
def test_refusals(call: Any, start: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(start)
