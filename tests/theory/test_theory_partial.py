"""Theorems 3 and 11 of FedAlt and FedSim, on the iterates of real runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import partita as pt
from partita.data.quadratic import Quadratic
from partita.theory import coupling, fedalt_bound, fedalt_eta, fedsim_bound, fedsim_eta, partial_lr
from support import each

N, ROUNDS = 6, 12
ETA = {"fedalt": fedalt_eta, "fedsim": fedsim_eta}
BOUND = {"fedalt": fedalt_bound, "fedsim": fedsim_bound}


def problem() -> Quadratic:
    return pt.data.quadratic(clients=N, kind="overpersonalized", n=30, d_theta=4, d_w=3, seed=1)


def constants(quadratic: Quadratic) -> tuple[tuple[float, float], float]:
    """(L_u, L_v) and χ, from the second derivatives of every client."""
    x = [quadratic.data.client(i)[0] for i in range(N)]
    a, b = ([rows[:, part] for rows in x] for part in (slice(0, 4), slice(4, None)))
    l_u, l_v = (max(float(torch.linalg.matrix_norm(m.T @ m, 2)) for m in part) for part in (a, b))
    cross = max(float(torch.linalg.matrix_norm(u.T @ v, 2)) for u, v in zip(a, b))
    return (l_u, l_v), coupling((l_u, l_v), cross)


def test_the_constants_of_a_quadratic_are_known() -> None:
    quadratic = problem()
    known, (smoothness, chi) = quadratic.constants, constants(quadratic)
    assert (known.L_theta, known.L_w) == pytest.approx(smoothness, rel=1e-10)
    assert coupling((known.L_theta, known.L_w), known.L_cross) == pytest.approx(chi, rel=1e-10)


def iterates(quadratic: Quadratic, method: str, rounds: int, cohort: int, steps: int, lr: Any) -> list[Any]:
    """(u^t, V^t) for t = 0 ... T−1: the runs of t rounds, which have the same draws."""
    model = quadratic.model()
    points: list[Any] = [(model.theta.detach(), model.w.detach().expand(N, -1))]
    rule = getattr(pt, method)("w", lr[0], lr[1], weighting="uniform")
    for t in range(1, rounds):
        run = pt.federate(
            model,
            quadratic.data,
            rule,
            rounds=t,
            cohort=cohort,
            steps=steps,
            loss=quadratic.loss,
            metric="loss",
            executor="vmap",
            evaluate_every=rounds,
            baselines=False,
            progress=False,
        )
        own = torch.stack([run.personalized(i)["w"] for i in range(N)])
        points.append((run.shared["theta"], own))
    return points


def gradients(quadratic: Quadratic, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, float]:
    """∇_u F_i of every client, ∇_v F_i, and F."""
    x = [quadratic.data.client(i) for i in range(N)]
    left = [rows @ torch.cat([u, v[i]]) - y for i, (rows, y) in enumerate(x)]
    slopes = torch.stack([rows.T @ r for (rows, _), r in zip(x, left)])
    return slopes[:, :4], slopes[:, 4:], sum(0.5 * float(r.square().sum()) for r in left) / N


@each(
    ("method", "cohort", "steps", "far"),
    [("fedalt", 6, 1, 80), ("fedalt", 2, 3, 400), ("fedsim", 6, 1, 17), ("fedsim", 2, 3, 33)],
)
def test_the_bound_holds_on_iterates_and_is_not_far(method: str, cohort: int, steps: int, far: float) -> None:
    quadratic = problem()
    smoothness, chi = constants(quadratic)
    assert 0 < chi <= 1 + 1e-12
    counted = {"steps": steps} if method == "fedsim" else {}
    eta = ETA[method](chi, clients=N, cohort=cohort, **counted)
    lr = partial_lr(eta, smoothness, (steps, steps))
    points = iterates(quadratic, method, ROUNDS, cohort, steps, lr)
    total, delta = 0.0, 0.0
    for u, v in points:
        g_u, g_v, _ = gradients(quadratic, u, v)
        mean = g_u.mean(0)
        delta = max(delta, float((g_u - mean).square().sum(1).mean()))
        total += float(mean.square().sum()) / smoothness[0]
        total += cohort / N * float(g_v.square().sum(1).mean()) / smoothness[1]
    gap = gradients(quadratic, *points[0])[2]  # every client can fit its data: F* = 0
    known = {"rounds": ROUNDS, "eta": eta, "smoothness": smoothness, "chi": chi}
    known |= {"clients": N, "cohort": cohort, "steps": steps if counted else (steps, steps)}
    bound = BOUND[method](gap, **known, diversity=delta)
    assert bound / far < total / ROUNDS < bound


def test_the_first_term_is_nearly_reached() -> None:
    """v alone, along one direction of curvature L: Σ L v² is ΔF₀/η · 2/(2 − η)."""
    eta, chi = fedsim_eta(0.0, clients=1, cohort=1, steps=1), 0.0
    t = torch.arange(2000, dtype=torch.float64)
    total = float(((1 - eta) ** (2 * t)).sum())  # with L = v₀ = 1
    known = {"rounds": 1, "smoothness": (1.0, 1.0), "chi": chi, "clients": 1, "cohort": 1}
    assert 0.9 < total / (fedsim_bound(0.5, eta=eta, **known) / 8) < 1.1
    eta = fedalt_eta(0.0, clients=1, cohort=1)
    total = float(((1 - eta) ** (2 * t)).sum())
    assert 0.9 < total / (fedalt_bound(0.5, eta=eta, **known) / 32) < 1.1


def test_step_sizes_by_hand() -> None:
    assert coupling((4.0, 9.0), 3.0) == 0.5
    assert partial_lr(0.5, (2.0, 4.0), (5, 1)) == (0.05, 0.125)
    assert fedalt_eta(0.0, clients=10, cohort=1) == 1 / 24
    assert fedalt_eta(1.0, clients=10, cohort=1) == 1 / (128 * 9)
    assert fedalt_eta(3.0, clients=10, cohort=10) == pytest.approx(1 / 24)
    assert fedalt_eta(6.0, clients=10, cohort=10) == pytest.approx(1 / 48)  # √(1/(64 · 36))
    assert fedalt_eta(0.0, clients=10, cohort=10, rho=1.0) == 1 / 48
    assert fedsim_eta(1.0, clients=10, cohort=5, steps=1) == 1 / 24
    assert fedsim_eta(1.0, clients=100, cohort=1, steps=2) == pytest.approx((1 / (19600 * 0.5 * 2)) ** 0.5)


def test_every_term_by_hand() -> None:
    known: dict[str, Any] = {"rounds": 10, "smoothness": (2.0, 4.0), "chi": 0.5, "clients": 8, "cohort": 2}
    eta = 0.01
    base = fedalt_bound(1.0, eta=eta, steps=(5, 2), **known)
    assert base == pytest.approx(32 / (eta * 10))
    more = fedalt_bound(1.0, eta=eta, steps=(5, 2), **known, noise=(3.0, 5.0), diversity=7.0)
    s1 = (3 + 6 * 7 * 0.75) / (2 * 2) + 4 * 5 * (0.25 + 0.25 * 0.75) / 4
    s2 = 8 * (3 + 14) * 0.8 / 2 + 4 * 5 * 0.25 * 0.5 / 4 + 0.25 * 5 / 4
    assert more - base == pytest.approx(32 * (eta * s1 + eta**2 * s2))
    base = fedsim_bound(1.0, eta=eta, steps=5, **known)
    assert base == pytest.approx(8 / (eta * 10))
    more = fedsim_bound(1.0, eta=eta, steps=5, **known, noise=(3.0, 5.0), diversity=7.0)
    s1 = 3 / 4 + 5 * 0.25 / 4 + 6 * 7 * 0.75 / 4
    s2 = 0.8 * (24 * 7 / 2 + 4 * 3 / 2 + 4 * 5 / 4)
    assert more - base == pytest.approx(8 * 1.25 * (eta * s1 + eta**2 * s2))


@each(
    ("call", "field"),
    [
        (lambda: coupling((0.0, 1.0), 1.0), "smoothness"),
        (lambda: coupling(1.0, 1.0), "smoothness"),  # type: ignore[arg-type]
        (lambda: fedalt_eta(1.0, clients=3, cohort=4), "cohort"),
        (lambda: fedsim_eta(-1.0, clients=3, cohort=3, steps=1), "chi"),
        (lambda: partial_lr(0.1, (1.0, 1.0), (0, 1)), "steps"),
        (
            lambda: fedalt_bound(1.0, rounds=5, eta=0.5, smoothness=(1.0, 1.0), chi=0.1, clients=3, cohort=3),
            "eta",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, field: str) -> None:
    with pytest.raises(pt.Refused) as error:
        call()
    assert error.value.field == field
