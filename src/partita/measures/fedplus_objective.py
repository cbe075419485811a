"""What Fed+ minimizes: Kundu et al., *Robustness and Personalization in Federated Learning* (2022).

    H_σ = (1/N) Σ_k [f_k(w_k) + Ψ(θ_k) + (σ/2)‖w_k − (w̃ + θ_k)‖²],   θ_k = prox_{Ψ/σ}(w_k − w̃)     (3)
    Σ_k ‖∇F_k‖²,   ∇F_k = ∇f_k(w_k) + σ (w_k − w̃ − θ_k)                                           (10), (17)

Where the server aggregates the last models of all clients, w̃ is the argmin and H_σ is F_σ(W) of Equation 16,
which never increases under the conditions of Theorem 1. Otherwise H_σ is an upper bound of it.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from partita.algorithms.fedplus import Psi
from partita.algorithms.psi import valued
from partita.core import tree
from partita.core.options import Option, checked
from partita.core.parts import Algorithm, LocalRule, Measure, Phase, Problem
from partita.core.types import Batch, ClientState, Download, Tensors, Upload, Work


class _Point(NamedTuple):
    params: Tensors
    pull: Tensors  # w_k − w̃ − θ_k
    charge: Tensor  # Ψ(θ_k)/σ + ½‖w_k − w̃ − θ_k‖²
    objective: Tensor
    gradient: Tensor
    steps: Tensor


@checked("measure ")
def fedplus_objective(
    psi: Psi, sigma: Annotated[float, Option("σ, as that of the method", low=0, example=0.1)]
) -> Measure:
    """What Fed+ minimizes, and the sum of its clients' squared gradients, on all training samples at once.

    Use it to see whether a run of Fed+ has converged, and how far another method is from its minimum.
    """
    value = valued(psi)

    def client(problem: Problem, algorithm: Algorithm) -> LocalRule:  # noqa: ARG001
        def start(download: Download, state: ClientState) -> _Point:
            w, center = {**download.shared, **state.personal}, download.shared
            x = {k: w[k] - center[k] for k in problem.trainable if k in center}
            zero = torch.zeros((), dtype=torch.float64, device=next(iter(w.values())).device)
            if not x:  # clients alone share nothing
                return _Point(w, {}, zero, zero, zero, zero)
            theta = psi.prox(x)
            pull = tree.sub(x, theta)
            charge = (value(theta) + tree.norm(pull) ** 2 / 2).double()
            return _Point(w, pull, charge, zero, zero, zero)

        def step(point: _Point, batch: Batch, lr: tuple[Tensor, ...]) -> _Point:  # noqa: ARG001
            loss, g, _ = problem.grad(point.params, batch, wrt=problem.trainable)
            g = {k: v + sigma * point.pull[k] if k in point.pull else v for k, v in g.items()}
            square = tree.norm({k: v.double() for k, v in g.items()}) ** 2
            objective = loss.double() + sigma * point.charge
            return point._replace(objective=objective, gradient=square, steps=point.steps + 1)

        def finish(point: _Point, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
            sums = {"objective": point.objective, "gradient": point.gradient, "steps": point.steps}
            return Upload({}, metrics=sums), ClientState({}, {})

        return LocalRule(start, (Phase(step, work=lambda now: Work(steps=1)),), finish)  # noqa: ARG005

    def summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
        with_data = float(uploads.metrics["steps"].sum())
        objective, gradient = (float(uploads.metrics[k].sum()) for k in ("objective", "gradient"))
        return {"objective": objective / with_data, "gradient": gradient} if with_data else {}

    return Measure("fedplus_objective", client, summarize, {"psi": psi, "sigma": sigma}, own=True)
