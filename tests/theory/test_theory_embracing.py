"""EmbracingFL's Theorem 1, on the iterates of real runs."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.theory import embracing_bound, embracing_floor, embracing_lr

M, D = 12, 3  # clients, coordinates of y and of z
CURVATURE = torch.tensor([1.0, 0.5, 2.0, 0.25, 1.0, 0.5], dtype=torch.float64)
SMOOTHNESS = (2.0, 1.0)


class Shift(nn.Module):
    """Adds its parameters to some of the coordinates."""

    def __init__(self, start: Tensor, at: int) -> None:
        super().__init__()
        self.shift, self.at = nn.Parameter(start), at

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.pad(self.shift, (self.at, 2 * D - self.at - D))


def model(y: float = 0.0, z: float = 0.0) -> nn.Sequential:
    first, second = (torch.full((D,), v, dtype=torch.float64) for v in (y, z))
    return nn.Sequential(Shift(first, 0), Shift(second, D))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """F_i(y, z) = ½ Σ_k c_k (x_k − a_ik)², the mean over samples that are all −a_i."""
    return 0.5 * (CURVATURE * (output - target).square()).sum(-1).mean()


def optima(seed: int, spread: float = 1.0) -> np.ndarray:
    return spread * np.random.default_rng(seed).normal(size=(M, 2 * D))


def run(
    a: np.ndarray, strong: list[int], start: nn.Module, lr: float, steps: int, rounds: int, every: int = 1
) -> list[float]:
    """Return ‖∇F(x_t)‖² for t = 0 and every so many rounds."""
    rows = np.repeat(-a, 4, axis=0)
    data = pt.data.from_arrays(rows, np.zeros_like(rows), np.repeat(np.arange(M), 4), test=0.25, validation=0)
    names = ["strong" if i in strong else "weak" for i in range(M)]
    found = pt.federate(
        start,
        data,
        pt.fedavg(lr, weighting="uniform"),
        capacity=pt.capacity.depth({"strong": 0, "weak": 1}, names) if len(strong) < M else None,
        loss=loss,
        metric="loss",
        rounds=rounds,
        steps=steps,
        evaluate_every=every,
        measures=[pt.measures.gradient_norm()],
        baselines=False,
        progress=False,
        executor="vmap",
    )
    x = torch.cat([p.detach() for p in start.parameters()])
    first = float((CURVATURE * (x - torch.from_numpy(a.mean(0)))).square().sum())
    return [first, *(row["measures"]["gradient_norm"]["total"] ** 2 for row in found.metrics)]


def gap(a: np.ndarray, start: nn.Module) -> float:
    x = torch.cat([p.detach() for p in start.parameters()]) - torch.from_numpy(a.mean(0))
    return 0.5 * float((CURVATURE * x.square()).sum())


def heterogeneity(a: np.ndarray) -> tuple[float, float]:
    """σ̄_y² and σ̄_z², the same at all points."""
    far = (CURVATURE.numpy() * (a - a.mean(0))) ** 2
    return float(far[:, :D].sum(1).mean()), float(far[:, D:].sum(1).mean())


def test_what_is_left_falls_with_the_strong_clients() -> None:
    """The floor on average over which clients are strong: below the bound, and not far."""
    a = optima(0)
    far = heterogeneity(a)[0]
    left = {}
    for strong in (2, 6):
        groups = np.random.default_rng(0).permutation(M).reshape(-1, strong).tolist()
        left[strong] = np.mean([run(a, group, model(), 0.5, 1, 30, every=30)[-1] for group in groups])
        # of a random choice without repetition it is 3/14 (m − s)/(m − 1) of the bound: 0.19 and 0.12
        assert 0.08 < left[strong] / embracing_floor(far, strong, M) < 0.4
    assert left[2] > 2 * left[6]


def test_the_bound_holds_on_iterates() -> None:
    a, start, steps, rounds = optima(1, 0.3), model(2.0, -1.0), 4, 10
    lr = embracing_lr(SMOOTHNESS, steps)
    for strong in (3, M):
        drawn = [np.random.default_rng(k).permutation(M)[:strong].tolist() for k in range(4)]
        found = np.mean([run(a, s, start, lr, steps, rounds)[:rounds] for s in drawn])
        bound = embracing_bound(
            gap(a, start),
            rounds=rounds,
            lr=lr,
            steps=steps,
            strong=strong,
            clients=M,
            smoothness=SMOOTHNESS,
            heterogeneity=heterogeneity(a),
        )
        assert found < bound


def test_the_first_term_is_nearly_reached() -> None:
    """Clients alike, one step of size 1/L along one direction of curvature L: Σ‖∇F‖² = 2L (F(x_0) − F*)."""
    a, start = np.zeros((M, 2 * D)), model(0.0, 0.0)
    with torch.no_grad():
        start[0].shift[2] = 3.0  # curvature 2
    lr = embracing_lr(SMOOTHNESS, 1)
    assert lr == 0.5
    norms = run(a, list(range(M)), start, lr, 1, 3)
    bound = embracing_bound(
        gap(a, start), rounds=3, lr=lr, steps=1, strong=M, clients=M, smoothness=SMOOTHNESS
    )
    assert norms[1] < 1e-20
    assert sum(norms[:3]) / 3 == pytest.approx(bound * 2 / (14 / 3))


def test_the_bound_term_by_term() -> None:
    """Equation (2) in fractions, with constants that tell the terms apart."""
    eta, tau, s, m, rounds = Fraction(1, 100), 3, 4, 10, 7
    l_y, l_z, gap_ = Fraction(5), Fraction(3), Fraction(11)
    sy, sz, hy, hz = Fraction(13), Fraction(17), Fraction(19), Fraction(23)
    expected = (
        14 * gap_ / (3 * rounds * eta * tau)
        + (7 * l_y * eta / (3 * s) + 16 * l_y**2 * eta**2 * (tau - 1) / 3) * sy
        + (Fraction(14, 3 * s) + 64 * l_y**2 * eta**2 * tau * (tau - 1) / 3) * hy
        + (7 * l_z * eta / (3 * m) + 8 * l_z**2 * eta**2 * (tau - 1) / 3) * sz
        + 32 * l_z**2 * eta**2 * tau * (tau - 1) / 3 * hz
    )
    found = embracing_bound(
        11.0,
        rounds=7,
        lr=0.01,
        steps=3,
        strong=4,
        clients=10,
        smoothness=(5.0, 3.0),
        noise=(13.0, 17.0),
        heterogeneity=(19.0, 23.0),
    )
    assert found == pytest.approx(float(expected), rel=1e-12)


def test_step_sizes() -> None:
    assert embracing_lr((4.0, 2.0), 1) == 0.25
    assert embracing_lr((1.0, 2.0), 10) == pytest.approx(1 / (4 * 2 * 90**0.5))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"lr": 0.3}, "lr=0.3: expected a number above 0 up to 0.25"),
        ({"strong": 5}, "strong=5: expected a whole number from 1 up to 4"),
        ({"smoothness": 2.0}, "smoothness=2.0: expected two numbers"),
        ({"smoothness": (0.0, 0.0)}, r"smoothness=\(0.0, 0.0\): expected at least one number above 0"),
        ({"heterogeneity": (-1.0, 0.0)}, "heterogeneity=-1.0: expected"),
    ],
)
def test_wrong_constants_are_refused(given: dict[str, Any], error: str) -> None:
    right: dict[str, Any] = {"rounds": 3, "lr": 0.25, "steps": 1, "strong": 2, "clients": 4}
    with pytest.raises(ValueError, match=error):
        embracing_bound(1.0, **{**right, "smoothness": (4.0, 1.0), **given})
