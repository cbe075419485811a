"""Quadratic problems: the compressed data are the whole data, and the constants are what they are called.

Everything is compared with brute force on the rows as they were drawn (`compress=False`).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad

import partita as pt
from partita.data import Quadratic, quadratic
from partita.data.quadratic import KINDS
from support import each

M, N, D, W = 3, 12, 5, 2


def small(kind: str = "uniform", **changed: Any) -> Quadratic:
    zeta = {"zeta": 2.0} if kind == "heterogeneous" else {}
    return quadratic(**{"clients": M, "kind": kind, "n": N, "d_theta": D, "d_w": W, **zeta, **changed})


def matrices(problem: Quadratic, m: int) -> tuple[Tensor, ...]:
    """H, b, A, B, y of a client that was not compressed."""
    x, y = problem.data.client(m)
    return x[:N, :D], y[:N], x[N:, :D], x[N:, D:], y[N:]


def point(seed: int = 0, *lead: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*lead, d, dtype=torch.float64, generator=g) for d in (D, W))  # type: ignore[return-value]


def values(problem: Quadratic, theta: Tensor, w: Tensor) -> Tensor:
    """f_m by its definition."""
    found = []
    for m in range(problem.data.clients):
        H, b, A, B, y = matrices(problem, m)
        found.append(0.5 * (H @ theta - b).square().sum() + 0.5 * (A @ theta + B @ w - y).square().sum())
    return torch.stack(found)


def jacobian(problem: Quadratic, m: int) -> Tensor:
    H, _, A, B, _ = matrices(problem, m)
    return H.T @ H + A.T @ (torch.eye(N, dtype=torch.float64) - B @ torch.linalg.pinv(B)) @ A


def close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64),
        torch.as_tensor(want, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


# ---- the data


@each("kind", KINDS)
def test_the_compressed_data_have_the_same_losses_and_gradients(kind: str) -> None:
    whole, part = small(kind, compress=False), small(kind)
    assert set(whole.data.sizes()) == {2 * N}
    assert set(part.data.sizes()) == {D + W + 1}
    theta, w = point()
    wanted = values(whole, theta, w)
    for problem in (whole, part):
        close(problem.f(theta, w), wanted)
        for m in range(M):
            x, y = problem.data.client(m)
            slopes = grad(lambda p: problem.loss(functional_call(problem.model(), p, (x,)), y))(  # noqa: B023
                {"theta": theta, "w": w}
            )
            H, b, A, B, t = matrices(whole, m)
            rest = A @ theta + B @ w - t
            close(
                problem.loss(functional_call(problem.model(), {"theta": theta, "w": w}, (x,)), y), wanted[m]
            )
            close(slopes["theta"], H.T @ (H @ theta - b) + A.T @ rest)
            close(slopes["w"], B.T @ rest)
            close(problem.gradient(theta, w)[0][m], slopes["theta"])
            close(problem.gradient(theta, w)[1][m], slopes["w"])
    assert whole.constants == part.constants


def test_the_data_are_float64_and_every_row_is_for_training_and_testing() -> None:
    data = small().data
    assert data.x.dtype == data.y.dtype == torch.float64
    assert np.array_equal(data.train, data.test)
    assert data.source["kind"] == "uniform"


def test_section_5_1() -> None:
    """Uniform on [0, 1] over the number of columns, vectors on [0, 1], and nobody shares a draw."""
    problem = small(compress=False)
    for m in range(M):
        H, b, A, B, y = matrices(problem, m)
        for matrix, scale in ((H, D), (A, D), (B, W), (b, 1), (y, 1)):
            assert 0 <= float(matrix.min()) < 0.4 / scale < 0.6 / scale < float(matrix.max()) <= 1 / scale
        assert not problem.data.client(m)[0][:N, D:].any()
    assert not torch.equal(matrices(problem, 0)[0], matrices(problem, 1)[0])


def test_appendix_e_1() -> None:
    """What clients do not share has the spectral norm ζ, and ζ alone scales it."""
    near, far = (small("heterogeneous", zeta=z, compress=False) for z in (2.0, 6.0))
    same = small("heterogeneous", zeta=0.0, compress=False)
    for m in range(M):
        for base, a, b in zip(*(matrices(p, m) for p in (same, near, far))):
            if base.dim() == 2:
                close(torch.linalg.matrix_norm(a - base, 2), 2.0)
                close(b - base, 3 * (a - base))
    assert torch.equal(matrices(same, 0)[0], matrices(same, 1)[0])


def test_iota_is_what_keeps_clients_from_fitting_their_data() -> None:
    def least(iota: float) -> float:
        problem = small("heterogeneous", iota=iota, compress=False)
        _, _, A, B, t = matrices(problem, 0)
        full = torch.cat([A, B], dim=1)
        return float((full @ torch.linalg.pinv(full) @ t - t).norm())

    assert least(0.0) < 1e-10
    assert least(0.5) == pytest.approx(500 * least(1e-3), rel=1e-6)


def test_kinds_share_matrices_and_seeds_do_not() -> None:
    a, b, c = small(compress=False), small("disagreeing", compress=False), small(compress=False, seed=1)
    assert torch.equal(a.data.x, b.data.x)
    assert not torch.equal(a.data.x, c.data.x)
    assert small().data.fingerprint() == small().data.fingerprint()


def test_the_number_of_threads_is_restored_and_changes_nothing() -> None:
    before, wanted = torch.get_num_threads(), small(n=400, d_theta=40)
    try:
        torch.set_num_threads(2)
        again = small(n=400, d_theta=40)
        assert again.data.fingerprint() == wanted.data.fingerprint()
        assert again.constants == wanted.constants
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---- the operator


@each("kind", KINDS)
def test_w_star_is_the_minimum_and_f_the_gradient_there(kind: str) -> None:
    problem = small(kind)
    theta, _ = point()
    best = problem.w_star(theta)
    shared, own = problem.gradient(theta, best)
    close(own, torch.zeros(M, W))
    close(problem.F(theta), shared)
    whole = small(kind, compress=False)
    for m in range(M):
        _, _, A, B, y = matrices(whole, m)
        close(best[m], torch.linalg.pinv(B) @ (y - A @ theta))
        close(problem.F(theta)[m] - problem.F(0 * theta)[m], jacobian(whole, m) @ theta)
    close(problem.F(problem.theta_star).mean(0), torch.zeros(D))


def test_theta_may_be_one_for_each_client() -> None:
    problem = small()
    thetas, ws = point(0, M)
    for m in range(M):
        close(problem.F(thetas)[m], problem.F(thetas[m])[m])
        close(problem.f(thetas, ws)[m], problem.f(thetas[m], ws[m])[m])


@pytest.mark.parametrize("zeta", [None, 3.0])
def test_an_overpersonalized_problem_fits_every_client(zeta: float | None) -> None:
    """Assumption 2: at one θ* all F_m vanish, and with the own w* all f_m do."""
    problem = small("overpersonalized", zeta=zeta)
    theta = problem.theta_star
    close(problem.F(theta), torch.zeros(M, D))
    close(problem.f(theta, problem.w_star(theta)), torch.zeros(M))
    assert float((problem.w_star(theta)[0] - problem.w_star(theta)[1]).norm()) > 0.1


def test_clients_that_disagree_vanish_only_in_the_mean() -> None:
    problem = small("disagreeing")
    theta = problem.theta_star
    assert bool((problem.F(theta).norm(dim=1) > 1e-3).all())
    close(problem.F(theta).mean(0), torch.zeros(D))


# ---- the constants


@pytest.mark.parametrize("kind", ["uniform", "heterogeneous"])
def test_constants_by_brute_force(kind: str) -> None:
    problem = small(kind, compress=False)
    c = problem.constants
    top, all_j, curvature, whole, cross, slopes, alone = 0.0, [], [], [], [], [], []
    for m in range(M):
        H, _, A, B, _ = matrices(problem, m)
        left = A.T @ (torch.eye(N, dtype=torch.float64) - B @ torch.linalg.pinv(B)) @ A
        top = max(top, *(float(torch.linalg.matrix_norm(g, 2)) for g in (H.T @ H, left)))
        all_j.append(jacobian(problem, m))
        curvature.append(torch.linalg.eigvalsh(B.T @ B))
        cross.append(torch.linalg.matrix_norm(A.T @ B, 2))
        slopes.append(torch.linalg.matrix_norm(torch.linalg.pinv(B) @ A, 2))
        whole.append(torch.linalg.matrix_norm(problem.data.client(m)[0], 2) ** 2)
        alone.append(torch.linalg.matrix_norm(H.T @ H + A.T @ A, 2))
    eigen = torch.stack([torch.linalg.eigvalsh(j) for j in all_j])
    mean = torch.linalg.eigvalsh(torch.stack(all_j).mean(0))
    wanted = {
        "L": 2 * top,
        "ell": eigen.max(),
        "mu": eigen.min(),
        "ell_mean": mean.max(),
        "mu_mean": mean.min(),
        "L_w": torch.stack(curvature).max(),
        "mu_w": torch.stack(curvature).min(),
        "L_theta": torch.stack(alone).max(),
        "L_f": torch.stack(whole).max(),
        "L_cross": torch.stack(cross).max(),
        "slope": torch.stack(slopes).max(),
    }
    for name, value in wanted.items():
        close(getattr(c, name), float(value))
    assert c.L / 2 <= c.ell <= c.L
    assert c.mu <= c.mu_mean <= c.ell_mean <= c.ell
    assert set(wanted) | {"ell_sim"} == {f.name for f in dataclasses.fields(c)}


def test_cocoercivity_and_monotonicity() -> None:
    """On random pairs, with d = F_m(a) − F_m(b): ⟨d, a − b⟩ ≥ ‖d‖²/ell and ≥ mu ‖a − b‖²."""
    problem = small("heterogeneous")
    c = problem.constants
    for seed in range(50):
        a, b = point(seed)[0], point(1000 + seed)[0]
        change = problem.F(a) - problem.F(b)
        product = change @ (a - b)
        assert bool((product >= change.square().sum(1) / c.ell * (1 - 1e-12)).all())
        assert bool((product >= c.mu * (a - b).square().sum() * (1 - 1e-12)).all())


def test_ell_is_attained() -> None:
    """No smaller constant would do: the top eigenvector of one client reaches it."""
    problem = small(compress=False)
    tight = max(
        float((j @ v).square().sum() / (v @ j @ v))
        for j in (jacobian(problem, m) for m in range(M))
        for v in torch.linalg.eigh(j).eigenvectors.T
    )
    close(tight, problem.constants.ell)


def test_similarity() -> None:
    """(20) holds on random points, and ell_sim is the smallest constant for which it does."""
    problem = small("overpersonalized")
    c = problem.constants
    ratios = []
    for seed in range(300):
        theta = problem.theta_star + point(seed)[0]
        each, mean = problem.F(theta), problem.F(theta).mean(0)
        spread = each.square().sum(1).mean() - mean.square().sum()
        ratios.append(float(spread / (mean @ (theta - problem.theta_star))))
    assert 0.1 * c.ell_sim < max(ratios) <= c.ell_sim * (1 + 1e-9)
    assert c.ell_sim <= c.ell
    # the same from the definition, as a generalized eigenvalue
    whole = small("overpersonalized", compress=False)
    j = torch.stack([jacobian(whole, m) for m in range(M)])
    apart = (j @ j).mean(0) - j.mean(0) @ j.mean(0)
    close(torch.linalg.eigvals(torch.linalg.solve(j.mean(0), apart)).real.max(), c.ell_sim, 1e-8)


def test_step_sizes() -> None:
    c = small().constants
    assert c.gamma_theta == 1 / c.ell
    assert c.gamma_theta_example == 1 / c.L
    assert c.gamma_w == 1 / c.L_w
    assert small(clients=1).constants.ell_sim == pytest.approx(0, abs=1e-12)


def test_constants_of_some_clients() -> None:
    """Those of a problem that has no others, and a client's draws do not depend on the others."""
    problem, fewer = small("heterogeneous"), small("heterogeneous", clients=2)
    for name, value in dataclasses.asdict(problem.constants_of([0, 1])).items():
        close(value, getattr(fewer.constants, name))
    assert problem.constants_of(range(M)) == problem.constants
    with pytest.raises(
        ValueError, match=re.escape(f"clients={M}: expected a whole number from 0 up to {M - 1}")
    ):
        problem.constants_of([0, M])
    with pytest.raises(ValueError, match="at least one of 0 to"):
        problem.constants_of([])


@pytest.mark.parametrize("compress", [False, True])
def test_rho_is_attained_by_the_worst_client(compress: bool) -> None:
    """Over all batches of two rows: the mean of ‖g‖² is at most ρ‖F_m‖², and somewhere nearly as much."""
    problem = small("overpersonalized", compress=compress)
    rho, most = problem.rho(2), 0.0
    rows = int(problem.data.sizes()[0])
    pairs = torch.combinations(torch.arange(rows))
    rng = torch.Generator().manual_seed(0)
    for m in range(M):
        x, y = problem.data.client(m)
        for _ in range(40):
            theta = problem.theta_star + torch.randn(D, generator=rng, dtype=torch.float64)
            w = problem.w_star(theta)[m]
            g = rows * x[:, :D] * (x @ torch.cat([theta, w]) - y)[:, None]
            close(g.mean(0), problem.F(theta)[m], 1e-8)
            squares = ((g[pairs[:, 0]] + g[pairs[:, 1]]) / 2).square().sum(1).mean()
            most = max(most, float(squares / g.mean(0).square().sum()))
    assert 1 < rho / 4 < most <= rho
    assert problem.rho() == problem.rho(10**6) == 1.0
    assert small("uniform").rho(2) == float("inf")


def test_theorem_1() -> None:
    """min_r ‖F(θ^r)‖² ≤ L‖θ⁰ − θ*‖²/(γ R) on actual iterates with exact solutions, with either step."""
    problem = small("overpersonalized")
    for constant in (problem.constants.ell, problem.constants.L):
        theta = start = point()[0]
        least = float("inf")
        for r in range(1, 60):
            least = min(least, float(problem.F(theta).mean(0).square().sum()))
            assert least <= constant**2 * float((start - problem.theta_star).square().sum()) / r
            theta = theta - problem.F(theta).mean(0) / constant


# ---- a run


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_run_does_gradient_descent_on_f(executor: str) -> None:
    """One full-batch step of every client is a step on the sum of squares; the metric is f_m."""
    problem = small("heterogeneous")
    model, lr = problem.model(seed=3), 1 / problem.constants.L_f
    run = pt.federate(
        model,
        problem.data,
        pt.fedavg(lr=lr),
        rounds=1,
        steps=1,
        loss=problem.loss,
        metric="loss",
        evaluate_every=1,
        executor=executor,
    )
    shared, own = problem.gradient(model.theta.detach(), model.w.detach())
    close(run.shared["theta"], model.theta.detach() - lr * shared.mean(0), 1e-9)
    close(run.shared["w"], model.w.detach() - lr * own.mean(0), 1e-9)
    f = problem.f(run.shared["theta"], run.shared["w"])
    close([c["global"] for c in run.clients], f)


def test_repr_says_what_it_is() -> None:
    text = repr(small("heterogeneous"))
    assert "kind='heterogeneous', zeta=2.0" in text
    assert "ell_sim" in text
    assert small().loss.__name__ == "half_squares"


# ---- what is refused


@each(
    ("options", "message"),
    [
        ({"clients": 0}, "clients=0: expected a whole number from 1"),
        ({"kind": "heterogenous"}, "kind='heterogenous': expected one of 'uniform', 'heterogeneous'"),
        ({"kind": "heterogenous"}, "did you mean 'heterogeneous'?"),
        ({"n": D + W - 1}, f"n={D + W - 1}: expected a whole number from {D + W}"),
        ({"d_theta": 0}, "d_theta=0: expected a whole number from 1"),
        ({"d_w": True}, "d_w=True: expected a whole number from 1"),
        ({"zeta": -1}, "zeta=-1: expected a number from 0"),
        ({"zeta": float("nan")}, "zeta=nan: expected a number from 0"),
        (
            {"kind": "heterogeneous", "zeta": None},
            "zeta=None: expected a number from 0 for kind='heterogeneous'",
        ),
        ({"iota": "small"}, "iota='small': expected a number from 0"),
        ({"seed": -1}, "seed=-1: expected a whole number from 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        small(**{"kind": "uniform", **options})
