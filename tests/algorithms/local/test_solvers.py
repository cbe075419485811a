"""Solvers of w ≈ argmin_w f(θ, w) against closed forms, one client after another and stacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import cg as scipy_cg
from torch import Tensor, nn

import partita as pt
from partita.algorithms.local.fresh import fresh
from partita.algorithms.local.solvers import Solver, newton
from partita.core import draws
from partita.data import FederatedData
from support import each

both_executors = each("executor", ["loop", "vmap"])

D_THETA, D_W, ROWS = 3, 6, (20, 9, 31)


def problem(condition: float = 30.0, rank: int = D_W) -> FederatedData:
    """Least squares with rows [a | b] → y; bᵀb/rows has the given condition and rank."""
    rng = np.random.default_rng(0)
    xs, ys = [], []
    for n in ROWS:
        u, _ = np.linalg.qr(rng.normal(size=(n, D_W)))
        v, _ = np.linalg.qr(rng.normal(size=(D_W, D_W)))
        s = np.sqrt(np.geomspace(1, 1 / condition, D_W)) * (np.arange(D_W) < rank)
        xs.append(np.hstack([rng.normal(size=(n, D_THETA)), np.sqrt(n) * u * s @ v.T]))
        ys.append(rng.normal(size=n))
    ends = np.cumsum(ROWS)
    ranges = np.stack([ends - ROWS, ROWS], axis=1)
    return FederatedData.make(np.concatenate(xs), np.concatenate(ys), ranges, ranges)


def half_squares(output: Tensor, target: Tensor) -> Tensor:
    """So that the Hessian in w is bᵀb/rows."""
    return 0.5 * (output - target).square().mean()


MODEL = pt.models.quadratic(D_THETA, D_W, seed=3)
THETA, W0 = MODEL.theta.detach().numpy(), MODEL.w.detach().numpy()


def solved(solver: Solver, data: FederatedData, executor: str, **options: Any) -> np.ndarray:
    """w of every client from the model's own, with θ as it is."""
    work = {"steps": 4, **{k: options.pop(k) for k in ("batch", "steps") if k in options}}
    run = pt.federate(
        MODEL,
        data,
        pt.ffgg("w", 0.0, solver, start="model", **options),
        rounds=1,
        loss=half_squares,
        metric="loss",
        executor=executor,
        baselines=False,
        progress=False,
        **work,
    )
    assert torch.equal(run.shared["theta"], MODEL.theta)
    return np.stack([run.personalized(i)["w"].numpy() for i in range(data.clients)])


def quadratics(data: FederatedData) -> list[tuple[np.ndarray, np.ndarray]]:
    """H and ∇₂f(θ, w⁰) of each client."""
    found = []
    for i in range(data.clients):
        x, y = (t.numpy() for t in data.client(i))
        a, b = x[:, :D_THETA], x[:, D_THETA:]
        found.append((b.T @ b / len(y), b.T @ (a @ THETA + b @ W0 - y) / len(y)))
    return found


@both_executors
def test_gd_is_gradient_descent(executor: str) -> None:
    data = problem()
    found = solved(pt.gd(7, 0.4), data, executor)
    for w, (H, g) in zip(found, quadratics(data)):
        minimum = W0 - np.linalg.solve(H, g)
        contraction = np.linalg.matrix_power(np.eye(D_W) - 0.4 * H, 7)
        np.testing.assert_allclose(w, minimum + contraction @ (W0 - minimum), rtol=0, atol=1e-12)


@both_executors
def test_gd_takes_the_work_and_the_sgd_of_the_run(executor: str) -> None:
    data = problem()
    more = {"momentum": 0.5, "weight_decay": 0.1}
    found = solved(pt.gd(None, 0.4), data, executor, steps=5, **more)
    for w, (H, g) in zip(found, quadratics(data)):
        x, m = W0, np.zeros(D_W)
        for _ in range(5):
            m = 0.5 * m + g + H @ (x - W0) + 0.1 * x
            x = x - 0.4 * m
        np.testing.assert_allclose(w, x, rtol=0, atol=1e-12)


@both_executors
def test_epochs_are_passes_in_batches_of_the_run(executor: str) -> None:
    """As many steps as a client has batches, and on full batches one for each pass."""
    data = problem()
    assert pt.gd(epochs=3, lr=0.4) == pt.gd(None, 0.4, epochs=3)
    for w, other in zip(
        solved(pt.gd(epochs=3, lr=0.4), data, executor), solved(pt.gd(3, 0.4), data, executor)
    ):
        np.testing.assert_array_equal(w, other)
    small = {"batch": 4, "steps": 1}  # 20, 9 and 31 samples: 5, 3 and 8 batches
    passes = solved(pt.gd(epochs=2, lr=0.1), data, executor, **small)
    for i, steps in enumerate((10, 6, 16)):
        np.testing.assert_array_equal(passes[i], solved(pt.gd(steps, 0.1), data, executor, **small)[i])


def test_steps_or_epochs() -> None:
    with pytest.raises(ValueError, match="epochs=2: expected nothing beside steps=3"):
        pt.gd(3, 0.1, epochs=2)
    assert repr(pt.adam(epochs=2)).startswith("pt.adam(steps=None, lr=0.001, epochs=2, beta1")
    assert "epochs" not in repr(pt.gd(3, 0.1))


@both_executors
@pytest.mark.parametrize("options", [{}, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}])
def test_adam_is_that_of_torch(executor: str, options: dict[str, float]) -> None:
    data = problem()
    found = solved(pt.adam(9, 0.05, **options), data, executor)
    betas = (options.get("beta1", 0.9), options.get("beta2", 0.999))
    for w, (H, g) in zip(found, quadratics(data)):
        x = torch.tensor(W0.copy(), requires_grad=True)
        optimizer = torch.optim.Adam([x], lr=0.05, betas=betas, eps=options.get("eps", 1e-8))
        for _ in range(9):
            x.grad = torch.from_numpy(g + H @ (x.detach().numpy() - W0))
            optimizer.step()
        np.testing.assert_allclose(w, x.detach().numpy(), rtol=0, atol=1e-12)


@both_executors
@pytest.mark.parametrize("steps", [1, 3])
def test_cg_is_that_of_scipy(executor: str, steps: int) -> None:
    data = problem()
    found = solved(pt.cg(steps), data, executor, batch=4)  # which it does not mind
    for w, (H, g) in zip(found, quadratics(data)):
        d, _ = scipy_cg(H, -g, rtol=0, maxiter=steps)
        np.testing.assert_allclose(w, W0 + d, rtol=0, atol=1e-12)


@both_executors
@each("solver", [pt.cg(D_W), pt.cg(30), pt.exact()], ids=repr)
def test_the_solution(executor: str, solver: Solver) -> None:
    """After as many iterations as there are parameters; further ones do no harm."""
    data = problem()
    for w, (H, g) in zip(solved(solver, data, executor, batch=4), quadratics(data)):
        expected = W0 - np.linalg.solve(H, g)
        assert np.linalg.norm(w - expected) <= 1e-10 * np.linalg.norm(expected)


@both_executors
@each("solver", [pt.cg(4), pt.cg(20), pt.exact()], ids=repr)
def test_directions_that_do_not_matter_stay(executor: str, solver: Solver) -> None:
    data = problem(rank=4)
    for w, (H, g) in zip(solved(solver, data, executor), quadratics(data)):
        np.testing.assert_allclose(w, W0 - np.linalg.pinv(H, hermitian=True) @ g, rtol=0, atol=1e-10)


@both_executors
@each("solver", [pt.gd(3, 0.1), pt.adam(3, 0.1), pt.cg(3), pt.exact()], ids=repr)
def test_nothing_moves_at_the_minimum(executor: str, solver: Solver) -> None:
    data = problem()
    x = torch.where(torch.arange(D_THETA + D_W) < D_THETA, data.x, 0.0)  # w has no effect at all
    still = FederatedData.make(x, data.y, data.train, data.test)
    np.testing.assert_array_equal(solved(solver, still, executor), np.stack([W0] * len(ROWS)))


def test_no_step_where_the_loss_curves_downwards() -> None:
    H, g = torch.diag(torch.tensor([2.0, -1.0, 0.0])), torch.tensor([4.0, 4.0, 4.0])
    assert newton(H, g).tolist() == [2.0, 0.0, 0.0]


@both_executors
@pytest.mark.parametrize("solver", [pt.cg(3), pt.exact()], ids=repr)
def test_cg_ends_where_the_loss_curves_downwards(executor: str, solver: Solver) -> None:
    def hill(output: Tensor, target: Tensor) -> Tensor:
        return -0.5 * (output - target).square().mean()

    run = pt.federate(
        MODEL,
        problem(),
        pt.ffgg("w", 0.0, solver, start="model"),
        rounds=1,
        loss=hill,
        metric="loss",
        executor=executor,
        baselines=False,
    )
    assert all(torch.equal(run.personalized(i)["w"], MODEL.w) for i in range(len(ROWS)))


def test_what_is_no_number_stays_none() -> None:
    """The machinery sets such an upload aside; a solver must not stop the run."""
    for H in (torch.full((2, 2), torch.nan), torch.diag(torch.tensor([torch.inf, 1.0]))):
        assert newton(H, torch.ones(2)).isnan().all()
    assert newton(torch.eye(2), torch.tensor([torch.nan, 1.0])).isnan().all()


def test_a_large_part_is_refused_before_any_work() -> None:
    data = pt.data.digits(3)
    method = pt.ffgg("all", 0.1, pt.exact())
    with pytest.raises(ValueError, match=r"personal parameters=2410: expected .* up to 2000 .*exact\(\)"):
        pt.federate(pt.models.mlp(64, 32, 10), data, method, rounds=1)
    pipeline = pt.pipeline(pt.stage(pt.fedavg(0.1), rounds=1), pt.stage(method, rounds=1))
    with pytest.raises(ValueError, match="personal parameters=2410"):
        pt.federate(pt.models.mlp(64, 32, 10), data, pipeline)


class Noisy(nn.Module):
    """Dropout, statistics, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop = nn.Dropout(0.3)
        self.first = nn.Linear(D_THETA + D_W, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(self.drop(x)))).squeeze(-1)


@each("personal", ["last.*", "norm.*", ["norm.*", "last.*"]], ids=str)
@each("solver", [pt.gd(3, 0.1), pt.adam(3, 0.1), pt.cg(5), pt.exact()], ids=repr)
def test_models_with_dropout_and_statistics(personal: str | list[str], solver: Solver) -> None:
    found = {}
    for executor in ("loop", "vmap"):
        run = pt.federate(
            Noisy(),
            problem(),
            pt.ffgg(personal, 0.1, solver),
            rounds=2,
            executor=executor,
            norm="global",
            baselines=False,
        )
        found[executor] = {**run.shared, **run.personalized(1)}
    for name, value in found["loop"].items():
        torch.testing.assert_close(
            value, found["vmap"][name], rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}"
        )
        assert value.isfinite().all()


def test_all_iterations_of_cg_see_the_same_dropout() -> None:
    """With its mask fixed the loss is quadratic in the last layer: 5 parameters, 5 iterations."""
    w = []
    for solver in (pt.cg(5), pt.exact()):
        method = pt.ffgg("last.*", 0.0, solver)
        run = pt.federate(
            Noisy(), problem(), method, rounds=1, norm="global", executor="vmap", baselines=False
        )
        w.append(run.personalized(0)["last.weight"])
    torch.testing.assert_close(w[0], w[1], rtol=0, atol=1e-8)


# ---- where a client begins


def test_a_fresh_start_is_like_the_model() -> None:
    model = {
        "a": torch.randn(50, 40) * 3 + 1,
        "zero": torch.zeros(7),
        "one": torch.ones(7),
        "s": torch.ones(()),
    }
    drawn = fresh(model, ["a", "zero", "one", "s"], draws.key(0, "start", 1, 2))
    assert torch.equal(drawn["zero"], model["zero"])
    assert torch.equal(drawn["one"], model["one"])
    assert torch.equal(drawn["s"], model["s"])
    assert drawn["a"].mean().item() == pytest.approx(model["a"].mean().item(), abs=0.2)
    assert drawn["a"].std().item() == pytest.approx(3, abs=0.2)
    assert abs(torch.corrcoef(torch.stack([drawn["a"].flatten(), model["a"].flatten()]))[0, 1]) < 0.1


def test_a_fresh_start_depends_on_key_and_name_alone() -> None:
    model = {"a": torch.randn(30), "b": torch.randn(30)}
    key = draws.key(0, "start", 1, 2)
    both = fresh(model, ["a", "b"], key)
    assert torch.equal(both["b"], fresh(model, ["b"], key)["b"])
    assert not torch.equal(both["a"], fresh(model, ["a"], draws.key(0, "start", 2, 2))["a"])
    z = [(both[k] - model[k].mean()) / model[k].std(correction=0) for k in both]
    assert not torch.allclose(z[0], z[1])
