"""Fed+'s theory on least squares, where all of it can be computed: Kundu et al. (2022), sections 4.5 and 4.6.

f_k(w) = mean (xᵀw − y)² over client k's samples: ∇f_k(w) = H_k w − c_k. Full batches, η = 1/L_f, float64.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import partita as pt
from partita.algorithms.psi import Penalty
from reference import plain_fedplus as plain
from support import each

CLIENTS, DIM, SAMPLES, SIGMA, DELTA = 5, 3, 40, 0.5, 0.3
RNG = np.random.default_rng(7)
X = RNG.normal(size=(CLIENTS, SAMPLES, DIM))
GOALS = RNG.normal(size=(CLIENTS, DIM)) + np.array([[0.0], [0.0], [0.0], [0.0], [6.0]])  # one is an outlier
Y = np.einsum("ksd,kd->ks", X, GOALS) + 0.3 * RNG.normal(size=(CLIENTS, SAMPLES))
H = 2 / SAMPLES * np.einsum("ksd,kse->kde", X, X)
C = 2 / SAMPLES * np.einsum("ksd,ks->kd", X, Y)
L_F = float(np.linalg.eigvalsh(H).max())
DATA = pt.data.from_arrays(
    torch.from_numpy(X.reshape(-1, DIM)),
    torch.from_numpy(Y.reshape(-1)),
    np.repeat(np.arange(CLIENTS), SAMPLES),
    test=np.zeros(CLIENTS * SAMPLES, dtype=bool),
    validation=0,
)


class Kind(NamedTuple):
    """A penalty, its plain form, and Ψ/σ."""

    psi: Penalty
    plain: plain.Psi
    value: Callable[[np.ndarray], float]


EXACT = {"tolerance": 1e-13, "iterations": 100_000}
KINDS = {
    "avg": Kind(pt.psi.avg(DELTA), plain.avg(DELTA), lambda t: DELTA / 2 * (t**2).sum()),
    "geomed": Kind(pt.psi.geomed(DELTA, **EXACT), plain.geomed(DELTA), lambda t: DELTA * np.linalg.norm(t)),
    "comed": Kind(pt.psi.comed(DELTA, **EXACT), plain.comed(DELTA), lambda t: DELTA * np.abs(t).sum()),
}
every_kind = each("kind", KINDS)


class Line(nn.Module):
    """x ↦ wᵀx, from w = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class State(NamedTuple):
    """W^t, w̃^t."""

    own: np.ndarray
    center: np.ndarray


def run(psi: Penalty, rounds: int, **settings: Any) -> State:
    if not rounds:
        return State(np.zeros((CLIENTS, DIM)), np.zeros(DIM))
    over, solver = settings.pop("over", "cohort"), settings.pop("solver", None)
    method = pt.fedplus(psi, lr=pt.theory.fedplus_lr(L_F), sigma=SIGMA, over=over, solver=solver)
    fixed = {"loss": "mse", "executor": "vmap", "baselines": False, "progress": False, "seed": 1}
    found = pt.federate(
        Line(), DATA, method, rounds=rounds, **{"steps": 3, "evaluate_every": rounds, **fixed, **settings}
    )
    own = np.stack([found.client(k).personal["w"].numpy() for k in range(CLIENTS)])
    return State(own, found.shared["w"].numpy())


@functools.cache
def history(kind: str, cohort: int | None, steps: int | tuple[int, ...], rounds: int = 8) -> list[State]:
    """The state after every round: shorter runs are beginnings of longer ones."""
    psi = KINDS[kind].psi
    return [run(psi, t, cohort=cohort, steps=steps, over="all") for t in range(rounds + 1)]


# ---- the objectives


def f(k: int, w: np.ndarray) -> float:
    return float(((X[k] @ w - Y[k]) ** 2).mean())


def prox(kind: str, x: np.ndarray) -> np.ndarray:
    return KINDS[kind].plain.prox({"w": x})["w"]


def envelope(kind: str, x: np.ndarray) -> float:
    """min_θ Ψ(θ) + (σ/2)‖x − θ‖²."""
    theta = prox(kind, x)
    return SIGMA * (KINDS[kind].value(theta) + 0.5 * ((x - theta) ** 2).sum())


def charge(kind: str, own: np.ndarray, center: np.ndarray) -> float:
    return float(np.mean([envelope(kind, w - center) for w in own]))


def objective(kind: str, own: np.ndarray) -> float:
    """F_σ(W) = min over Θ and w̃ of H_σ(W, Θ, w̃), Equation 16; the minimum over w̃ by another solver."""

    def slope(center: np.ndarray) -> np.ndarray:
        return -SIGMA * np.mean([w - center - prox(kind, w - center) for w in own], axis=0)

    options = {"gtol": 1e-12, "ftol": 1e-16, "maxiter": 10_000}
    starts = (own.mean(0), np.median(own, axis=0))
    ends = [
        minimize(lambda c: charge(kind, own, c), s, jac=slope, method="L-BFGS-B", options=options)
        for s in starts
    ]
    return float(np.mean([f(k, w) for k, w in enumerate(own)]) + min(e.fun for e in ends))


def local_objective(kind: str, k: int, w: np.ndarray, at: State) -> float:
    """F_k(w; θ_k, w̃), Equation 10."""
    z = at.center + prox(kind, at.own[k] - at.center)
    return f(k, w) + SIGMA / 2 * float(((w - z) ** 2).sum())


def local_gradient(kind: str, k: int, at: State) -> np.ndarray:
    z = at.center + prox(kind, at.own[k] - at.center)
    return H[k] @ at.own[k] - C[k] + SIGMA * (at.own[k] - z)


# ---- Theorem 1 and Proposition 2

CONDITIONS = {"everyone": (None, 3), "two of five": (2, 3), "stragglers": (3, (1, 7, 2, 4, 1))}
every_condition = each(("cohort", "steps"), CONDITIONS.values(), ids=CONDITIONS)


@every_kind
@every_condition
def test_the_aggregate_is_the_argmin(kind: str, cohort: int | None, steps: Any) -> None:
    """Equation 14, on which the theorem rests: no w̃ charges the models of all clients less."""
    for own, center in history(kind, cohort, steps):
        best = objective(kind, own) - np.mean([f(k, w) for k, w in enumerate(own)])
        assert charge(kind, own, center) <= best + 1e-9


@every_kind
@every_condition
def test_the_objective_never_increases(kind: str, cohort: int | None, steps: Any) -> None:
    """Theorem 1: F_σ(W^t) decreases monotonically where the server aggregates the models of all."""
    values = [objective(kind, own) for own, _ in history(kind, cohort, steps)]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(values))
    assert values[-1] < 0.5 * values[0]


@every_kind
def test_the_aggregate_of_a_cohort_may_raise_the_objective(kind: str) -> None:
    """Theorem 1 rests on Equation 14, which is for the models of all and not for those of two of five."""
    psi = KINDS[kind].psi
    values = [objective(kind, run(psi, t, cohort=2, over="cohort").own) for t in range(7)]
    assert max(b - a for a, b in itertools.pairwise(values)) > 1e-4


@every_kind
@every_condition
def test_every_round_descends_enough(kind: str, cohort: int | None, steps: Any) -> None:
    """Proposition 2, Equation 15; who is absent keeps its model, bit for bit."""
    states = history(kind, cohort, steps)
    took_part = 0
    for before, after in itertools.pairwise(states):
        for k in range(CLIENTS):
            if np.array_equal(before.own[k], after.own[k]):
                continue
            took_part += 1
            bound = (local_gradient(kind, k, before) ** 2).sum() / (2 * (L_F + SIGMA))
            was = local_objective(kind, k, before.own[k], before)
            assert local_objective(kind, k, after.own[k], before) <= was - bound + 1e-10
    assert took_part == (len(states) - 1) * (cohort or CLIENTS)


@every_kind
@pytest.mark.parametrize("cohort", [None, 2])
def test_gradients_vanish(kind: str, cohort: int | None) -> None:
    """Equation 17. Here f_k is convex, so the limit is the minimum of F_σ."""
    end = run(KINDS[kind].psi, 70, cohort=cohort, over="all", steps=5)
    gradients = [local_gradient(kind, k, end) for k in range(CLIENTS)]
    assert np.abs(gradients).max() < 1e-5
    value = objective(kind, end.own)
    rng = np.random.default_rng(0)
    for size in (1e-3, 0.1, 1.0):
        for _ in range(5):
            assert objective(kind, end.own + size * rng.normal(size=end.own.shape)) >= value - 1e-8


# ---- Corollary 1: fixed points, of everyone and a long run

LONG = {"cohort": None, "rounds": 40, "steps": 8}
EYE = np.eye(DIM)


def inner(k: int, z: np.ndarray) -> np.ndarray:
    """argmin_w f_k(w) + (σ/2)‖w − z‖² = (H_k + σI)⁻¹ (c_k + σz)."""
    return np.linalg.solve(H[k] + SIGMA * EYE, C[k] + SIGMA * z)


def smooth_gradient(k: int, z: np.ndarray) -> np.ndarray:
    """∇f̂_k(z) = σ (z − argmin), the gradient of the Moreau envelope of Equation 18."""
    return SIGMA * (z - inner(k, z))


def test_a_penalty_of_nothing_ends_at_the_minima() -> None:
    """(a) Ψ = 0: w_k* = argmin f_k."""
    own, center = run(pt.psi.free(), **LONG)
    np.testing.assert_allclose(own, [np.linalg.solve(H[k], C[k]) for k in range(CLIENTS)], atol=1e-6)
    np.testing.assert_allclose(center, own.mean(0), atol=1e-12)


def test_no_difference_allowed_ends_where_fedprox_does() -> None:
    """(b) θ = 0: the mean of ∇f̂_k(w̃*) is zero, and w_k* = w̃* − ∇f̂_k(w̃*)/σ."""
    own, center = run(pt.psi.fixed(), **LONG)
    # Σ_k (w̃ − (H_k + σI)⁻¹(c_k + σw̃)) = 0 is linear in w̃
    shrink = [np.linalg.inv(H[k] + SIGMA * EYE) for k in range(CLIENTS)]
    left = sum(EYE - SIGMA * s for s in shrink)
    right = sum(s @ C[k] for k, s in enumerate(shrink))
    np.testing.assert_allclose(center, np.linalg.solve(left, right), atol=1e-6)
    slopes = np.array([smooth_gradient(k, center) for k in range(CLIENTS)])
    np.testing.assert_allclose(slopes.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(own, center - slopes / SIGMA, atol=1e-6)


def test_fedavg_plus_ends_between() -> None:
    """(c) w_k* = w̃* − (1+δ)/(σδ) ∇f̂_k((w_k* + δw̃*)/(1+δ)), and w̃* their mean."""
    own, center = run(pt.psi.avg(DELTA), **LONG)
    pull = SIGMA * DELTA / (1 + DELTA)  # the envelope of (σδ/2)‖·‖² is (pull/2)‖·‖²
    shrink = [np.linalg.inv(H[k] + pull * EYE) for k in range(CLIENTS)]
    expected = np.linalg.solve(
        EYE - pull * np.mean(shrink, axis=0), np.mean([s @ C[k] for k, s in enumerate(shrink)], axis=0)
    )
    np.testing.assert_allclose(center, expected, atol=1e-6)
    np.testing.assert_allclose(center, own.mean(0), atol=1e-12)
    for k in range(CLIENTS):
        z = (own[k] + DELTA * center) / (1 + DELTA)
        fixed = center - (1 + DELTA) / (SIGMA * DELTA) * smooth_gradient(k, z)
        np.testing.assert_allclose(own[k], fixed, atol=1e-6)


@every_kind
def test_fixed_points(kind: str) -> None:
    """Theorem 2, Equation 19: w_k* = z_k* − ∇f̂_k(z_k*)/σ, and the mean of ∇f̂_k(z_k*) is zero."""
    own, center = run(KINDS[kind].psi, **LONG)
    z = np.array([center + prox(kind, w - center) for w in own])
    slopes = np.array([smooth_gradient(k, z[k]) for k in range(CLIENTS)])
    np.testing.assert_allclose(own, z - slopes / SIGMA, atol=1e-6)
    np.testing.assert_allclose(slopes.mean(0), 0, atol=1e-6)


def test_an_outlier_moves_the_mean_but_not_the_median() -> None:
    """What the robust penalties are for: client 4 wants to be far away."""
    honest = np.array([np.linalg.solve(H[k], C[k]) for k in range(CLIENTS - 1)]).mean(0)
    apart = {k: np.linalg.norm(run(v.psi, 30, steps=10).center - honest) for k, v in KINDS.items()}
    assert apart["geomed"] < 0.5 * apart["avg"]
    assert apart["comed"] < 0.5 * apart["avg"]


# ---- the bounds of pt.theory


@every_kind
@every_condition
def test_a_round_lowers_the_objective_as_much_as_it_must(kind: str, cohort: int | None, steps: Any) -> None:
    """Equation 31, and with everyone in each round the bound of Theorem 1 for every number of rounds."""
    states = history(kind, cohort, steps)
    values = [objective(kind, own) for own, _ in states]
    sums = []
    for t, (before, after) in enumerate(itertools.pairwise(states)):
        took_part = [k for k in range(CLIENTS) if not np.array_equal(before.own[k], after.own[k])]
        lengths = [float(np.linalg.norm(local_gradient(kind, k, before))) for k in took_part]
        assert values[t] - values[t + 1] >= pt.theory.fedplus_descent(lengths, L_F, SIGMA, CLIENTS) - 1e-9
        sums.append(sum(n**2 for n in lengths))
        if cohort is None:
            gap = values[0] - values[-1]  # at most what is left to the minimum
            assert min(sums) <= pt.theory.fedplus_bound(gap, L_F, SIGMA, CLIENTS, t + 1) + 1e-9


def test_no_smaller_constant_would_do() -> None:
    """Where every f_k has curvature L_f in all directions, one step lowers F_k by just the bound."""
    for curvature in (0.5, 4.0):
        eta, w, goal, z = 1 / curvature, np.array([1.0, -2.0]), np.array([3.0, 0.5]), np.array([0.2, 0.1])

        def F(w: np.ndarray, curvature=curvature, goal=goal, z=z) -> float:
            return curvature / 2 * ((w - goal) ** 2).sum() + SIGMA / 2 * ((w - z) ** 2).sum()

        kappa = pt.theory.fedplus_kappa(eta, SIGMA)
        after = kappa * (w - eta * curvature * (w - goal)) + (1 - kappa) * z
        length = np.linalg.norm(curvature * (w - goal) + SIGMA * (w - z))
        assert F(w) - F(after) == pytest.approx(pt.theory.fedplus_descent(length, curvature, SIGMA))


def test_the_numbers_of_the_theory() -> None:
    assert pt.theory.fedplus_sigma(0.9, 0.02) == pytest.approx(1 / 0.18)
    assert pt.theory.fedplus_kappa(0.3, pt.theory.fedplus_sigma(0.95, 0.3)) == pytest.approx(0.95)
    assert pt.theory.fedplus_bound(2.0, 1.0, 0.5, 10, 6, participation=0.2) == pytest.approx(50.0)
    for length in (3, np.float32(3), torch.tensor(3.0), [3.0], np.array([3.0])):
        assert pt.theory.fedplus_descent(length, 1.0, 0.5) == pytest.approx(3.0)
    for wrong in (
        lambda: pt.theory.fedplus_lr(0.0),
        lambda: pt.theory.fedplus_sigma(1.1, 0.1),
        lambda: pt.theory.fedplus_bound(1.0, 1.0, 0.5, 10, 5, participation=0.0),
        lambda: pt.theory.fedplus_descent([-1.0], 1.0, 0.5),
        lambda: pt.theory.fedplus_descent(None, 1.0, 0.5),  # type: ignore[arg-type]
    ):
        with pytest.raises(pt.Refused):
            wrong()


# ---- the objective as a measure, and exact local work


@every_kind
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_the_measure_is_the_objective(kind: str, executor: str) -> None:
    measure = pt.measures.fedplus_objective(KINDS[kind].psi, SIGMA)
    rows = run_rows(KINDS[kind].psi, 5, measures=[measure], cohort=3, over="all", executor=executor)
    values = [row["measures"]["fedplus_objective"] for row in rows]
    assert [v["objective"] for v in values] == sorted([v["objective"] for v in values], reverse=True)
    end = run(KINDS[kind].psi, 5, cohort=3, over="all")
    assert values[-1]["objective"] == pytest.approx(objective(kind, end.own), abs=1e-9)
    squares = sum((local_gradient(kind, k, end) ** 2).sum() for k in range(CLIENTS))
    assert values[-1]["gradient"] == pytest.approx(squares)


def run_rows(psi: Penalty, rounds: int, over: str, **settings: Any) -> list[dict[str, Any]]:
    method = pt.fedplus(psi, lr=1 / L_F, sigma=SIGMA, over=over)
    fixed = {"loss": "mse", "baselines": False, "progress": False, "seed": 1, "steps": 3}
    return list(
        pt.federate(Line(), DATA, method, rounds=rounds, evaluate_every=1, **{**fixed, **settings}).metrics
    )


def test_a_penalty_without_a_value_has_no_objective() -> None:
    with pytest.raises(pt.Refused) as refused:
        pt.measures.fedplus_objective(pt.psi.penalty(lambda x: x), 0.1)
    assert refused.value.field == "psi"


@every_kind
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_exact_local_work_is_the_argmin(kind: str, executor: str) -> None:
    """Assumption 2: w_k = (H_k + σ)⁻¹ (c_k + σ z_k), z_k = w̃ + θ_k, in every round; cg does the same."""
    for solver in (pt.exact(), pt.cg(2 * DIM)):
        before = State(np.zeros((CLIENTS, DIM)), np.zeros(DIM))
        for rounds in (1, 2, 3):
            after = run(KINDS[kind].psi, rounds, solver=solver, executor=executor, steps=1)
            for k in range(CLIENTS):
                z = before.center + prox(kind, before.own[k] - before.center)
                best = np.linalg.solve(H[k] + SIGMA * EYE, C[k] + SIGMA * z)
                np.testing.assert_allclose(after.own[k], best, atol=1e-9)
            before = after


def test_a_pull_that_leaves_little_is_mentioned() -> None:
    with pytest.warns(UserWarning, match=r"is 0\.33, .* sigma=0\.11 makes it 0\.9"):
        pt.fedavg_plus(lr=1.0, sigma=2.0)
