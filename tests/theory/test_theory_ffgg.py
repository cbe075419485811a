"""FFGG: what its theorems promise, on the iterates of actual runs."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import partita as pt
from partita import theory
from partita.core.parts import Attack, Optimizer, Rates
from partita.core.types import ServerState, Tensors
from partita.data.quadratic import Quadratic
from support import each


def watched(seen: list[Tensor]) -> Optimizer:
    """Plain averaging that notes every θ."""
    plain = pt.optim.sgd()

    def update(shared: Tensors, delta: Tensors, opt: Tensors, lr: Rates) -> tuple[Tensors, Tensors]:
        seen.append(shared["theta"].clone())
        return plain.update(shared, delta, opt, lr)

    return plain._replace(update=update)


def iterates(
    problem: Quadratic, method: Any, rounds: int, model: Any = None, **settings: Any
) -> list[Tensor]:
    """θ⁰, θ¹, ..., of which the last is after all rounds."""
    seen: list[Tensor] = []
    run = pt.federate(
        model or problem.model(),
        problem.data,
        method(server=watched(seen)),
        rounds=rounds,
        loss=problem.loss,
        metric="loss",
        executor="vmap",
        evaluate_every=rounds,
        baselines=False,
        progress=False,
        **settings,
    )
    return [*seen, run.shared["theta"]]


def squares(x: Tensor) -> float:
    return x.square().sum().item()


# ---- Theorems 1 and 6


KINDS = ("uniform", "overpersonalized", "disagreeing")


@each(
    ("kind", "solver"),
    [(kind, solver) for kind in KINDS for solver in (pt.exact(), pt.cg(8))],
    slow=lambda kind, solver: kind == "uniform" or (kind, solver) == ("disagreeing", pt.cg(8)),
)
def test_theorem_1(kind: str, solver: Any) -> None:
    problem = pt.data.quadratic(clients=8, kind=kind, n=60, d_theta=8, d_w=4)
    L = problem.constants.ell
    gamma = theory.ffgg_lr(L)
    found = iterates(problem, lambda **o: pt.ffgg("w", gamma, solver, **o), rounds=25)
    least, r0 = torch.inf, (found[0] - problem.theta_star).norm().item()
    for R, theta in enumerate(found, start=1):
        least = min(least, squares(problem.F(theta).mean(0)))
        assert least <= theory.ffgg_bound(r0, rounds=R, lr=gamma, smoothness=L)
    assert least < 1e-2 * squares(problem.F(found[0]).mean(0))


def test_theorem_1_is_attained_in_its_first_round() -> None:
    """θ⁰ − θ* along the eigenvector of ℓ: ‖F(θ⁰)‖² = ℓ²r₀², which a smaller constant would not allow."""
    problem = pt.data.quadratic(clients=1, kind="overpersonalized", n=60, d_theta=8, d_w=4)
    L, away = problem.constants.ell, problem.theta_star
    jacobian = torch.stack([(problem.F(away + e) - problem.F(away))[0] for e in torch.eye(8).double()])
    vector = torch.linalg.eigh((jacobian + jacobian.T) / 2).eigenvectors[:, -1]
    bound = theory.ffgg_bound(3.0, rounds=1, lr=theory.ffgg_lr(L), smoothness=L)
    assert squares(problem.F(away + 3 * vector)) == pytest.approx(bound)


def test_theorem_6() -> None:
    """From w = 0 and near θ*: with its τ the bound for R rounds holds, with five steps it does not."""
    problem = pt.data.quadratic(clients=4, kind="overpersonalized", n=60, d_theta=4, d_w=2)
    c, R, r0 = problem.constants, 40, 1e-3
    model = problem.model()
    torch.nn.init.zeros_(model.w)
    model.theta.data.copy_(problem.theta_star + r0 / 2)  # four entries: ‖θ⁰ − θ*‖ = r₀
    L_w = max(c.L_w, c.L_cross)
    known = {"smoothness": c.ell, "personal_smoothness": L_w, "personal_convexity": c.mu_w}
    offset = problem.w_star(problem.theta_star).norm(dim=1).max().item()
    tau = theory.ffgg_steps(R, **known, slope=c.slope, offset=offset, distance=r0)
    gamma = theory.ffgg_lr(c.ell) / 2
    bound = theory.ffgg_bound(r0, rounds=R, lr=gamma, smoothness=c.ell, exact=False)

    def least(steps: int) -> float:
        solver = pt.gd(steps, 1 / L_w)
        found = iterates(problem, lambda **o: pt.ffgg("w", gamma, solver, start="model", **o), R, model=model)
        return min(squares(problem.F(theta).mean(0)) for theta in found[:R])

    assert least(tau) <= bound < least(5)


def test_the_steps_of_theorem_6() -> None:
    """By hand: L_w/μ_w = 5; a = 4 and b = 2, so that the terms are 2 log 40, 2 log(20/r₀), log(40/r₀²)."""
    known = {
        "smoothness": 1.0,
        "personal_smoothness": 1.0,
        "personal_convexity": 0.2,
        "slope": 2.0,
        "offset": 1.0,
    }
    assert theory.ffgg_steps(10, **known, distance=3.0) == math.ceil(5 * 2 * math.log(40))
    assert theory.ffgg_steps(10, **known, distance=0.1) == math.ceil(5 * 2 * math.log(200))
    few = {**known, "slope": 0.0, "offset": 2.0}  # b = 4: 2 log(8/r₀) against log(32/r₀²)
    assert theory.ffgg_steps(2, **few, distance=0.5) == math.ceil(5 * 2 * math.log(16))
    assert theory.ffgg_steps(1, **few, distance=0.5) == math.ceil(5 * math.log(64))
    assert theory.ffgg_steps(10, **{**known, "slope": 0.0, "offset": 0.0}, distance=1.0) == 1


# ---- Theorem 7


@pytest.mark.parametrize("concurrency", [4, 8])
def test_theorem_7(concurrency: int) -> None:
    problem = pt.data.quadratic(clients=8, kind="overpersonalized", n=60, d_theta=8, d_w=4)
    L, S = problem.constants.ell, pt.schedule
    delays = S.delays(compute=S.gamma(1.0), speed=S.lognormal(1.0, 1.0))
    schedule = S.asynchronous(concurrency, delays=delays)
    most = max(max(c.staleness) for c in schedule_turns(schedule, 8, 200)) + 1
    known = {"smoothness": L, "active": concurrency, "delay": most}
    gamma = theory.ffgg_async_lr(**known)
    found = iterates(
        problem, lambda **o: pt.ffgg_async("w", gamma, pt.exact(), **o), rounds=200, schedule=schedule
    )
    assert most > concurrency
    virtual = found[0] - gamma * problem.F(found[0])[at_start(schedule, 8)].sum(0)
    least, away = torch.inf, (virtual - problem.theta_star).norm().item()
    for R, theta in enumerate(found, start=1):
        least = min(least, squares(problem.F(theta).mean(0)))
        assert least <= theory.ffgg_async_bound(away, arrivals=R, lr=gamma, **known)
    assert least < 0.1 * squares(problem.F(found[0]).mean(0))


def test_the_step_of_theorem_7() -> None:
    """The proof's square root is over both: 1/(2L √(2Mτ)), more than the 1/(2L √(2M) τ) that is printed."""
    assert theory.ffgg_async_lr(0.5, 8, 9) == pytest.approx(1 / 12)
    assert theory.ffgg_async_bound(
        3.0, arrivals=6, lr=1 / 12, smoothness=0.5, active=8, delay=9
    ) == pytest.approx(18)


def schedule_turns(schedule: Any, clients: int, rounds: int) -> list[Any]:
    """The cohorts of a schedule, whatever is trained."""
    turns = begun(schedule, clients)
    return [turns.next(ServerState({}, {}, {}, version)) for version in range(rounds)]


def begun(schedule: Any, clients: int) -> Any:
    spec = pt.schedule.StageSpec(clients, clients, 0, 10**6, 0, 0.0, lambda _: 1)
    return schedule.of(pt.fedavg(0.1)).begin(spec)


def at_start(schedule: Any, clients: int) -> list[int]:
    """Who was at work before the first arrival."""
    turns = begun(schedule, clients)
    cohort = turns.next(ServerState({}, {}, {}, 0))
    return [*cohort.clients, *(f.client for f in turns.clock.flights)]


# ---- Theorem 8


LIES: dict[str, Attack | None] = {
    "honest": None,
    "sign_flip": pt.attack.sign_flip(),
    "ipm": pt.attack.ipm(),
    "gaussian": pt.attack.gaussian(),
}


@each("attack", [None, pt.attack.sign_flip()], ids=["honest", "sign_flip"])
def test_theorem_8(attack: Attack | None) -> None:
    check_theorem_8(attack)


@pytest.mark.slow
@each("attack", LIES.values(), ids=LIES)
@each("inner", ["coordinate_median", "geometric_median"])
def test_theorem_8_for_all_attacks(attack: Attack | None, inner: str) -> None:
    check_theorem_8(attack, inner)


def check_theorem_8(attack: Attack | None, inner: str = "coordinate_median") -> None:
    """‖θ^R − θ*‖² ≤ (1 − γμ/2)^R ‖θ⁰ − θ*‖², for every R, whatever a sixth of the clients send."""
    problem = pt.data.quadratic(clients=12, kind="overpersonalized", zeta=0.22, n=60, d_theta=4, d_w=3)
    byzantine = (1, 8)
    honest = problem.constants_of([m for m in range(12) if m not in byzantine])
    known = {
        "smoothness": honest.ell,
        "similarity": honest.ell_sim,
        "honest": 10,
        "c": theory.aggregator_constant(inner, 12, 2, bucket=2),
    }
    assert 2 / 12 <= theory.ffgg_robust_share(convexity=honest.mu, **known) < 2 / 11  # one more is too many
    gamma = theory.ffgg_robust_lr(byzantine=2, **known)
    rate = theory.ffgg_robust_rate(gamma, honest.mu)
    lies = {"attack": attack, "byzantine": byzantine} if attack else {}
    aggregate = pt.aggregate.bucketing(2, getattr(pt.aggregate, inner)())
    found = iterates(
        problem, lambda **o: pt.ffgg_robust("w", gamma, pt.exact(), aggregate=aggregate, **o), 80, **lies
    )
    away = [squares(theta - problem.theta_star) for theta in found]
    for R, distance in enumerate(away):
        assert distance <= rate**R * away[0] + 1e-24
    assert away[-1] < 0.5 * away[0]


@each(("printed", "holds"), [(1, True), (4, False)], ids=["share", "share as printed"])
def test_theorem_8_where_the_aggregate_errs_as_much_as_it_may(printed: int, holds: bool) -> None:
    """F_m(θ) = μθ + kθ_m e_m, and the aggregate is too small by √(cδσ²): Definition 2 allows that."""
    G, B, mu, k = 40, 8, 1.0, 4.0
    delta = B / (G + B)
    known = {"smoothness": mu + k, "similarity": (k**2 / G - k**2 / G**2) / (mu + k / G), "honest": G}
    most = theory.ffgg_robust_share(convexity=mu, c=1.0, **known)
    c = printed * most / delta  # so that δ is just the share with this c, or four times that
    gamma = theory.ffgg_robust_lr(byzantine=B, c=c, **known)
    theta = torch.ones(G).double()
    sent = mu * theta + k * torch.diag(theta)
    error = math.sqrt(c * delta * torch.pdist(sent).square().mean())
    after = theta - gamma * (sent.mean(0) - error * theta / theta.norm())
    assert (squares(after) <= theory.ffgg_robust_rate(gamma, mu) * squares(theta)) == holds


def test_theorem_8_with_gradients_over_one_row() -> None:
    """ρ = 19: the step (23) is 2.5 times smaller than with all rows, and θ comes near enough on average."""
    problem = pt.data.quadratic(clients=12, kind="overpersonalized", zeta=1.0, n=60, d_theta=4, d_w=3)
    c = problem.constants
    known = {"smoothness": c.ell, "similarity": c.ell_sim, "honest": 12, "byzantine": 0, "c": 1.0}
    gamma = theory.ffgg_robust_lr(rho=problem.rho(1), **known)
    assert gamma < theory.ffgg_robust_lr(**known) / 2
    seeds = [
        iterates(
            problem,
            lambda **o: pt.ffgg("w", gamma, pt.exact(), gradient="batch", **o),
            60,
            batch=1,
            seed=seed,
        )
        for seed in range(3)
    ]
    away = torch.tensor([[squares(theta - problem.theta_star) for theta in found] for found in seeds]).mean(0)
    rate = theory.ffgg_robust_rate(gamma, c.mu)
    assert (away <= away[0] * rate ** torch.arange(61)).all()
    assert away[-1] > 1e-3 * away[0]  # a gradient over one row is not one over all: that would be nearer
    assert not torch.equal(seeds[0][1], seeds[1][1])


def test_the_formulas_of_theorem_8() -> None:
    """By hand, with G = 5 and ρ = 2: S = (2 + ¼)·4 + 8 = 17."""
    known = {"smoothness": 8.0, "similarity": 4.0, "honest": 5, "c": 3.0, "rho": 2.0}
    assert theory.ffgg_robust_share(convexity=51.0, **known) == pytest.approx(1 / 8)
    assert theory.ffgg_robust_lr(byzantine=0, **known) == pytest.approx(1 / (4 * (12 / 5 + 8)))
    assert theory.ffgg_robust_lr(byzantine=1, **known) == pytest.approx(1 / (4 * (12 / 5 + 8 + 17)))
    exact = {**known, "rho": 1.0}
    assert theory.ffgg_robust_lr(byzantine=1, **exact) == pytest.approx(1 / (4 * (8 + 5)))
    alike = {**exact, "similarity": 0.0}
    assert theory.ffgg_robust_share(convexity=1.0, **alike) == math.inf
    assert theory.ffgg_robust_rate(0.5, 0.2) == pytest.approx(0.95)


# ---- c of an aggregator


@each(
    ("name", "clients", "byzantine", "bucket", "expected"),
    [
        ("coordinate_median", 12, 2, 2, (2 * 4 / 2) ** 2 * 8 / (2 * 2 * 10) * 6),
        ("geometric_median", 9, 2, 1, (2 * 7 / 5) ** 2 * 6 / (2 * 7) * 9 / 2),
        ("krum", 9, 2, 1, 2 * 7 * (2 * 5 / 6 + 1) / 3 * 6 / (2 * 7) * 9 / 2),
        ("krum", 20, 2, 2, 2 * 8 * (2 * 6 / 7 + 1) / 4 * 16 / (2 * 2 * 18) * 10),
    ],
)
def test_the_constant_of_an_aggregator(
    name: str, clients: int, byzantine: int, bucket: int, expected: float
) -> None:
    """By hand, and E‖x̂ − x̄‖² ≤ c δ σ² for vectors that pull as far as they can without standing out."""
    c = theory.aggregator_constant(name, clients, byzantine, bucket)
    assert c == pytest.approx(expected)
    inner = pt.aggregate.krum(byzantine) if name == "krum" else getattr(pt.aggregate, name)()
    rule = pt.aggregate.bucketing(bucket, inner)
    honest = torch.randn(clients - byzantine, 3, generator=torch.Generator().manual_seed(1)).double()
    mean, pairs = honest.mean(0), torch.pdist(honest).square().mean().item()
    for far in (0.5, 1.0, 2.0, 5.0, 1e3):
        lies = (mean + far * honest.std(0)).expand(byzantine, 3)
        stacked = {"x": torch.cat([lies, honest])}
        keys = [torch.tensor(k) for k in range(20 if bucket > 1 else 1)]
        errors = [
            squares(rule.combine(stacked, torch.ones(clients).double(), key).delta["x"] - mean)
            for key in keys
        ]
        assert sum(errors) / len(errors) <= c * byzantine / clients * pairs


@each(
    ("call", "message"),
    [
        (lambda: theory.ffgg_lr(0), "smoothness=0: expected a number above 0"),
        (
            lambda: theory.ffgg_bound(1.0, rounds=3, lr=0.6, smoothness=2.0),
            "lr=0.6: expected a number above 0 up to 0.5, for which the theorem holds",
        ),
        (
            lambda: theory.ffgg_bound(1.0, rounds=3, lr=0.3, smoothness=2.0, exact=False),
            "lr=0.3: expected a number above 0 up to 0.25, for which the theorem holds",
        ),
        (
            lambda: theory.ffgg_robust_lr(smoothness=1.0, similarity=2.0, honest=3, byzantine=1, c=1.0),
            "similarity=2.0: expected a number from 0 up to 1",
        ),
        (
            lambda: theory.ffgg_robust_rate(0.6, 0.5),
            "lr=0.6: expected a number above 0 up to 0.5, for which the theorem holds",
        ),
        (lambda: theory.ffgg_async_lr(1.0, 0, 3), "active=0: expected a whole number from 1"),
        (lambda: theory.aggregator_constant("mean", 12, 2), "aggregator='mean': expected one of"),
        (
            lambda: theory.aggregator_constant("krum", 12, 2, 5),
            "bucket=5: expected a divisor of the 12 clients",
        ),
        (
            lambda: theory.aggregator_constant("coordinate_median", 12, 3, 2),
            "byzantine=3: expected at most 2 for coordinate_median over 6 buckets",
        ),
        (
            lambda: theory.ffgg_robust_lr(smoothness=1.0, similarity=1.0, honest=3, byzantine=3, c=1.0),
            "byzantine=3: expected a whole number from 0 up to 2",
        ),
        (
            lambda: theory.ffgg_robust_share(convexity=1, smoothness=1, similarity=0, honest=1, c=1),
            "honest=1: expected a whole number from 2",
        ),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


# ---- what the theorems say of runs


def test_a_mean_does_not_survive_what_a_median_does() -> None:
    problem = pt.data.quadratic(clients=12, kind="overpersonalized", zeta=0.05, n=60, d_theta=4, d_w=3)
    gamma, lies = (
        problem.constants.gamma_theta / 4,
        {"attack": pt.attack.sign_flip(10.0), "byzantine": (1, 4, 8)},
    )
    away = {}
    for name in ("mean", "coordinate_median"):
        aggregate = getattr(pt.aggregate, name)()
        found = iterates(
            problem,
            lambda a=aggregate, **o: pt.ffgg_robust("w", gamma, pt.exact(), aggregate=a, **o),
            50,
            **lies,
        )
        away[name] = (found[-1] - problem.theta_star).norm() / (found[0] - problem.theta_star).norm()
    assert away["coordinate_median"] < 1 < away["mean"]


def test_more_local_steps_lower_the_floor() -> None:
    """A fresh w after τ steps is (1 − μ_w/L_w)^τ away from w*, and so θ stops as far from θ*."""
    problem = pt.data.quadratic(clients=8, kind="overpersonalized", n=60, d_theta=4, d_w=4)
    c, floors = problem.constants, []
    for steps in (3, 10, 40):
        found = iterates(
            problem, lambda t=steps, **o: pt.ffgg("w", c.gamma_theta, pt.gd(t, c.gamma_w), **o), 40
        )
        floors.append((found[-1] - problem.theta_star).norm().item())
    assert floors[0] > floors[1] > floors[2]
