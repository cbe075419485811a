"""The quadratic problems of FFGG (Mishchenko et al. 2023, Example 1, section 5.1 and appendix E).

    f_m(θ, w) = ½‖H_m θ − b_m‖² + ½‖A_m θ + B_m w − y_m‖²      θ shared, w personal
    w_m*(θ)   = argmin_w f_m(θ, w)
    F_m(θ)    = ∇₁f_m(θ, w_m*(θ)) = J_m θ − c_m,   J_m = H_mᵀH_m + A_mᵀ(I − B_m B_m†)A_m

A client's samples are the rows [H | 0] → b and [A | B] → y. Only their Gram matrix matters, so they can be
replaced without loss: with the columns in the order w, θ, target, their QR factorization is

        ⎡R_w  C   u⎤
    R = ⎢ 0  R_θ  v⎥ ,   f_m(θ, w) = ½‖R_w w + Cθ − u‖² + ½‖R_θ θ − v‖² + ½ρ²
        ⎣ 0   0   ρ⎦

which has d_θ + d_w + 1 rows however many there were, and shows all that the theory asks for: the first term
vanishes at w_m*(θ) = R_w⁻¹(u − Cθ), the second is the rest, so F_m(θ) = R_θᵀ(R_θ θ − v) and J_m = R_θᵀR_θ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita import models
from partita.core import check, draws
from partita.core.inputs import single
from partita.data.federated import FederatedData
from partita.models.quadratic import ThetaW

Loss = Callable[[Tensor, Tensor], Tensor]
FITS = 1e-8  # a residual of so much of the targets is none
KINDS = ("uniform", "heterogeneous", "overpersonalized", "disagreeing")


def quadratic(
    clients: int = 32,
    *,
    kind: str = "uniform",
    n: int = 10000,
    d_theta: int = 100,
    d_w: int = 50,
    zeta: float | None = None,
    iota: float = 1e-3,
    compress: bool = True,
    seed: int = 0,
) -> Quadratic:
    """Return least squares with a shared θ and a personal w: data, model, loss, constants of the theory.

    `kind` says what a client's targets are, given its matrices:

    kind              b, y                                          the paper
    uniform           U[0, 1]ⁿ                                      section 5.1
    heterogeneous     b = Hb₁ + ιb₂, y = Ay₁ + By₂ + ιy₃, all own   appendix E.1; needs `zeta`
    overpersonalized  b = Hθ*, y = Aθ* + Bw*, one θ*, own w*        appendix E.3: F_m(θ*) = 0 for all m
    disagreeing       the same with an own θ* for each client       none: what happens without Assumption 2

    `zeta=None`: every client draws its own H, A ~ U[0, 1]/d_θ and B ~ U[0, 1]/d_w, of n rows. With a number,
    they are drawn once for all, and each client adds ζ·N/‖N‖₂ with normal N. `compress=False` keeps all 2n
    rows of each client instead of d_θ + d_w + 1 that have the same sum of squares.

    >>> problem = quadratic(clients=32, kind="heterogeneous", zeta=20, n=1000)
    >>> problem.constants.gamma_theta, problem.constants.gamma_w
    """
    check.integer("clients", clients, low=1)
    check.choice("kind", kind, KINDS)
    check.integer("d_theta", d_theta, low=1)
    check.integer("d_w", d_w, low=1)
    check.integer("n", n, low=d_theta + d_w)  # fewer rows leave directions in which w* is not unique
    if zeta is not None:
        check.number("zeta", zeta, low=0)
    elif kind == "heterogeneous":
        raise check.fail("zeta", zeta, "a number from 0 for kind='heterogeneous'")
    check.number("iota", iota, low=0)
    check.integer("seed", seed, low=0)
    shapes = (n, d_theta, d_w)
    rows: list[Tensor] = []
    factors: list[Tensor] = []
    bounds: list[float] = []
    with _one_thread():
        base = None if zeta is None else _uniform(shapes, draws.generator(seed, "quadratic-matrices"))
        common = _normal(draws.generator(seed, "quadratic-targets"), d_theta)
        for m in range(clients):  # one at a time: a client of the paper has 24 MB of rows, its factor 0.2 MB
            rng = draws.generator(seed, "quadratic-matrices", m)
            matrices = _uniform(shapes, rng) if base is None else _moved(base, zeta or 0.0, rng)
            b, y = _targets(kind, matrices, common, iota, draws.generator(seed, "quadratic-targets", m))
            full = _rows(matrices, b, y)
            factor = torch.linalg.qr(full, mode="r").R
            rows.append(factor if compress else full)
            factors.append(factor)
            bounds.append(_bound(matrices, factor))
        stacked = torch.stack(factors)
        constants = _constants(stacked, d_w, max(bounds))
    source = {"name": "quadratic", "clients": clients, "kind": kind, "n": n, "d_theta": d_theta, "d_w": d_w}
    source |= {"zeta": zeta, "iota": iota, "compress": compress, "seed": seed}
    return Quadratic(_data(rows, d_w, source), constants, d_theta, d_w, stacked, tuple(bounds))


@dataclass(frozen=True, eq=False, repr=False)
class Quadratic:
    """A quadratic problem: what a run needs, and what its outcome is compared with.

    run = pt.federate(problem.model(), problem.data, ..., loss=problem.loss, metric="loss")
    problem.F(run.shared["theta"]).mean(0).norm()      ‖F(θ)‖, with the exact w*(θ) of every client

    A test sample is a training sample, so that metric="loss" shows f_m itself. All in float64.
    """

    data: FederatedData
    constants: Constants
    d_theta: int
    d_w: int
    factor: Tensor = field(repr=False)  # R of each client, columns in the order w, θ, target
    bounds: tuple[float, ...] = field(repr=False)  # L of each client

    def model(self, seed: int = 0) -> ThetaW:
        """Return the model with its start: entries of θ and w from N(0, 1)."""
        return models.quadratic(self.d_theta, self.d_w, seed=seed)

    @property
    def loss(self) -> Loss:
        """f_m as a mean over a batch: (rows / 2) · mean (output − target)²; unbiased on part of the rows."""
        half = float(self.data.sizes()[0]) / 2

        def half_squares(output: Tensor, target: Tensor) -> Tensor:
            return half * (output - target).square().mean()

        return half_squares

    def f(self, theta: Tensor, w: Tensor) -> Tensor:
        """Return f_m(θ, w) of each client, [M]; θ and w are one for all or one for each."""
        return 0.5 * self._residual(theta, w).square().sum(1)

    def gradient(self, theta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return ∇₁f_m and ∇₂f_m of each client, [M, d_θ] and [M, d_w]."""
        slopes = torch.einsum("mrj,mr->mj", self.factor[:, :, :-1], self._residual(theta, w))
        return slopes[:, self.d_w :], slopes[:, : self.d_w]

    def w_star(self, theta: Tensor) -> Tensor:
        """Return argmin_w f_m(θ, w) = R_w⁻¹(u − Cθ) of each client, [M, d_w]."""
        personal = slice(0, self.d_w)
        target = self.factor[:, personal, -1] - _times(
            self.factor[:, personal, self.d_w : -1], self._all(theta)
        )
        return _solve(self.factor[:, personal, personal], target.unsqueeze(-1), upper=True).squeeze(-1)

    def F(self, theta: Tensor) -> Tensor:
        """Return F_m(θ) = ∇₁f_m(θ, w_m*(θ)) = R_θᵀ(R_θ θ − v) of each client, [M, d_θ]."""
        factor, target = self._shared()
        return torch.einsum("mrj,mr->mj", factor, _times(factor, self._all(theta)) - target)

    @property
    def theta_star(self) -> Tensor:
        """The θ at which the mean of F_m is zero: a least squares problem in all R_θ together."""
        factor, target = self._shared()
        solution: Tensor = torch.linalg.lstsq(factor.flatten(0, 1), target.reshape(-1, 1)).solution
        return solution.squeeze(-1)

    def constants_of(self, clients: Sequence[int]) -> Constants:
        """Return the constants over some of the clients, such as the honest ones of Theorem 8."""
        last = self.data.clients - 1
        chosen = [check.integer("clients", m, low=0, high=last) for m in clients]
        if not chosen:
            raise check.fail("clients", clients, f"at least one of 0 to {last}")
        with _one_thread():
            return _constants(self.factor[chosen], self.d_w, max(self.bounds[m] for m in chosen))

    def rho(self, batch: int | None = None) -> float:
        """Return ρ of Assumption 6, E‖g_m‖² ≤ ρ‖F_m‖², for gradients g_m over a random batch of so many rows.

        w is w_m*(θ), as `ffgg(..., exact(), gradient="batch")` has it. With r = K(θ − θ*) the residuals of
        the N rows x_j, one row alone sends N x_j r_j, and b of them without replacement

            E‖g‖² = ‖F‖² + (N − b)/(b (N − 1)) (E‖N x_j r_j‖² − ‖F‖²)

        It is infinite where a client cannot fit all of its rows: g_m then varies where F_m is zero.
        """
        rows = int(self.data.sizes()[0])
        b = rows if batch is None else min(check.integer("batch", batch, low=1), rows)
        if b == rows:
            return 1.0
        left = self.factor[:, -1, -1].abs() > FITS * torch.linalg.vector_norm(self.factor[:, :, -1], dim=1)
        if left.any():
            return math.inf
        one = max(map(self._rho_of_a_row, range(self.data.clients)))
        return 1 + (rows - b) / (b * (rows - 1)) * (one - 1)

    def _rho_of_a_row(self, client: int) -> float:
        x = single(self.data.client(client)[0], "a quadratic problem")
        theta, w = x[:, : self.d_theta], x[:, self.d_theta :]
        residual = theta - w @ torch.linalg.lstsq(w, theta).solution  # K
        squares = len(x) * residual.mT @ (theta.square().sum(1, keepdim=True) * residual)
        inverse = torch.linalg.inv(residual.mT @ residual)  # of J
        return _top(inverse @ squares @ inverse)

    def __repr__(self) -> str:
        named = ("kind", "zeta", "n", "d_theta", "d_w", "seed")
        title = ", ".join(f"{k}={self.data.source[k]!r}" for k in named)
        constants = ", ".join(f"{k} {v:.4g}" for k, v in asdict(self.constants).items())
        return f"Quadratic problem ({title})\n{self.data!r}\n  {constants}"

    def _shared(self) -> tuple[Tensor, Tensor]:
        """Return R_θ and v of each client."""
        part = slice(self.d_w, self.d_w + self.d_theta)
        return self.factor[:, part, part], self.factor[:, part, -1]

    def _residual(self, theta: Tensor, w: Tensor) -> Tensor:
        point = torch.cat([self._all(w), self._all(theta)], dim=1)
        return _times(self.factor[:, :, :-1], point) - self.factor[:, :, -1]

    def _all(self, values: Tensor) -> Tensor:
        """Return one row for each client, in float64 and beside the factors."""
        rows = torch.as_tensor(values, dtype=torch.float64, device=self.factor.device).detach()
        return rows.expand(len(self.factor), rows.shape[-1])


@dataclass(frozen=True)
class Constants:
    """What the theorems ask for, over all clients m. Each is an eigenvalue or a norm, none an estimate.

    L        2 max(‖HᵀH‖, ‖Aᵀ(I − BB†)A‖), with which Example 1 proves Assumption 1
    ell      max λ(J_m): the smallest constant with which it holds, as J_m is symmetric; L/2 ≤ ell ≤ L
    mu       min λ(J_m): every F_m is mu-strongly monotone (Assumption 7)
    ell_mean, mu_mean   the same of the mean of J_m
    ell_sim  similarity (20), if Assumption 2 holds: max λ of J̄^(−½) (mean J_m² − J̄²) J̄^(−½)
    L_w, mu_w   extreme λ(BᵀB): smoothness and strong convexity in w
    L_theta  smoothness of f_m in θ alone: max λ(HᵀH + AᵀA)
    L_f      smoothness of f_m in (θ, w)
    L_cross  ‖∇²₁₂f_m‖ = ‖AᵀB‖: how much ∇₁f_m changes with w
    slope    ‖∂w_m*/∂θ‖ = ‖B†A‖, which is A of Assumption 4
    """

    L: float
    ell: float
    mu: float
    ell_mean: float
    mu_mean: float
    ell_sim: float
    L_w: float
    mu_w: float
    L_theta: float
    L_f: float
    L_cross: float
    slope: float

    @property
    def gamma_theta(self) -> float:
        """1/ell, the largest step that Theorem 1 allows: its condition is 1/L for any L of Assumption 1."""
        return 1 / self.ell

    @property
    def gamma_theta_example(self) -> float:
        """1/L with the bound of Example 1, up to twice as small."""
        return 1 / self.L

    @property
    def gamma_w(self) -> float:
        """1/L_w, the step of gradient descent in w (Theorem 6)."""
        return 1 / self.L_w


class _Matrices(NamedTuple):
    """One client's H, A [n, d_θ] and B [n, d_w]."""

    H: Tensor
    A: Tensor
    B: Tensor


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sum in one order: more threads would change last digits, thus the data's fingerprint and the steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _uniform(shapes: tuple[int, int, int], rng: np.random.Generator) -> _Matrices:
    """Draw the matrices of section 5.1: uniform on [0, 1], divided by the number of columns."""
    n, d_theta, d_w = shapes
    H, A, B = (torch.from_numpy(rng.random((n, d)) / d) for d in (d_theta, d_theta, d_w))
    return _Matrices(H, A, B)


def _moved(base: _Matrices, zeta: float, rng: np.random.Generator) -> _Matrices:
    """Return, as in appendix E.1, X + ζ N/‖N‖₂ for each matrix."""
    moved = []
    for matrix in base:
        noise = _normal(rng, *matrix.shape)
        moved.append(matrix + zeta / math.sqrt(_top(noise.mT @ noise)) * noise)
    return _Matrices(*moved)


def _targets(
    kind: str, matrices: _Matrices, common: Tensor, iota: float, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return b and y of one client."""
    H, A, B = matrices
    n, d_theta = H.shape
    if kind == "uniform":
        b, y = torch.from_numpy(rng.random((2, n)))
        return b, y
    theta_m, w = _normal(rng, d_theta), _normal(rng, B.shape[1])
    if kind == "heterogeneous":
        other, noise = _normal(rng, d_theta), iota * _normal(rng, 2, n)
        return H @ other + noise[0], A @ theta_m + B @ w + noise[1]
    theta = common if kind == "overpersonalized" else theta_m
    return H @ theta, A @ theta + B @ w


def _normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape))


def _rows(matrices: _Matrices, b: Tensor, y: Tensor) -> Tensor:
    """Return [0 | H | b] over [B | A | y]: w before θ, for the factorization at the top of the file."""
    above = torch.cat([torch.zeros_like(matrices.B), matrices.H, b.unsqueeze(1)], dim=1)
    return torch.cat([above, torch.cat([matrices.B, matrices.A, y.unsqueeze(1)], dim=1)])


def _data(rows: list[Tensor], d_w: int, source: dict[str, object]) -> FederatedData:
    """Return all clients' rows in the order θ, w that the model reads, each for training and for testing."""
    flat, length = torch.cat(rows), len(rows[0])
    x = torch.cat([flat[:, d_w:-1], flat[:, :d_w]], dim=1)
    ranges = np.array([(m * length, length) for m in range(len(rows))])
    return FederatedData.make(x, flat[:, -1].clone(), ranges, ranges, source=source)


def _bound(matrices: _Matrices, factor: Tensor) -> float:
    """Return 2 max(‖HᵀH‖, ‖Aᵀ(I − BB†)A‖) of Example 1, the latter being what HᵀH leaves of J."""
    d_w = matrices.B.shape[1]
    shared, smooth = factor[d_w:-1, d_w:-1], matrices.H.mT @ matrices.H
    return 2 * max(_top(smooth), _top(shared.mT @ shared - smooth))


def _constants(factor: Tensor, d_w: int, bound: float) -> Constants:
    of_w, shared, features = factor[:, :d_w, :d_w], factor[:, d_w:-1, d_w:-1], factor[:, :, :-1]
    mixed, of_theta = factor[:, :d_w, d_w:-1], factor[:, :, d_w:-1]
    jacobian = shared.mT @ shared
    mean = jacobian.mean(0)
    each, whole, personal = (torch.linalg.eigvalsh(g) for g in (jacobian, mean, of_w.mT @ of_w))
    return Constants(
        L=bound,
        ell=float(each.max()),
        mu=float(each.min()),
        ell_mean=float(whole.max()),
        mu_mean=float(whole.min()),
        ell_sim=_similarity(jacobian, mean),
        L_w=float(personal.max()),
        mu_w=float(personal.min()),
        L_theta=float(torch.linalg.eigvalsh(of_theta.mT @ of_theta).max()),
        L_f=float(torch.linalg.eigvalsh(features.mT @ features).max()),
        L_cross=_norm(of_w.mT @ mixed),
        slope=_norm(_solve(of_w, mixed, upper=True)),
    )


def _similarity(jacobian: Tensor, mean: Tensor) -> float:
    """Return the smallest ℓ with mean_m ‖J_m e‖² − ‖J̄e‖² ≤ ℓ eᵀJ̄e for all e, where e = θ − θ*."""
    apart = jacobian - mean
    root = torch.linalg.cholesky(mean)  # of J̄ = GGᵀ: the eigenvalues of G⁻¹XG⁻ᵀ are those of J̄^(−½)XJ̄^(−½)
    whole = _solve(root, _solve(root, (apart @ apart).mean(0)).mT)
    return max(0.0, float(torch.linalg.eigvalsh((whole + whole.mT) / 2)[-1]))


def _norm(matrices: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrices, ord=2).max())


def _top(symmetric: Tensor) -> float:
    return float(torch.linalg.eigvalsh(symmetric)[-1])


def _solve(triangular: Tensor, target: Tensor, upper: bool = False) -> Tensor:
    solved: Tensor = torch.linalg.solve_triangular(triangular, target, upper=upper)
    return solved


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Multiply the matrix of each client with its vector."""
    return torch.einsum("mrj,mj->mr", matrices, vectors)
