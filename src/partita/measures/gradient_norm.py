"""How much is left to learn for the shared part: Mishchenko et al., *Partially Personalized Federated
Learning: Breaking the Curse of Data Heterogeneity* (2023), section 4.3.

    F_m(θ) = ∇₁f_m(θ, w_m*(θ)),   w_m*(θ) = argmin_w f_m(θ, w)

`total` is ‖mean_m F_m(θ)‖, what moves θ; `mean` is the mean of the clients' ‖F_m(θ)‖. Where all of them are
near zero, the personal part alone fits every client: personalize less.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.algorithms.ffgg import Measured, ffgg
from partita.algorithms.local.solvers import Solver, gd
from partita.algorithms.partition import Personal, check_personal
from partita.core import tree
from partita.core.options import Option, checked
from partita.core.parts import Algorithm, LocalRule, Measure, Problem
from partita.core.types import ClientState, Download, Upload


@checked("measure ")
def gradient_norm(
    personal: Annotated[
        Personal | None,
        Option(
            "the part w (None: the method's personal part)", allowed="as for a method", check=check_personal
        ),
    ] = None,
    solver: Annotated[
        Solver | None,
        Option(
            "how w is solved for (None: 20 gradient steps of size 0.1)",
            allowed="a solver such as partita.gd(10, 0.1)",
        ),
    ] = None,
) -> Measure:
    """‖F_m(θ)‖, the gradient that is left for the shared part once every client has solved for its own part.

    Use it to judge a split of the model, and as the error on problems where the solution is known to be zero.
    """
    rule = ffgg("none" if personal is None else personal, 1.0, solver or gd(20, 0.1), start="model")

    def client(problem: Problem, algorithm: Algorithm) -> LocalRule:  # noqa: ARG001
        start, phases, _ = rule.local(problem)
        return LocalRule(start, phases, _finish)

    options = {"personal": personal, "solver": solver}
    return Measure("gradient_norm", client, _summarize, options, personal=personal, reduce=_sum)


def _finish(carry: Measured, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
    """Send the gradient itself; statistics of normalization layers have none."""
    norm = tree.norm({k: v.double() for k, v in carry.gradient.items()})
    metrics = {"norm": norm.to(carry.steps.device), "steps": carry.steps}
    return Upload(carry.gradient, metrics=metrics), state


def _sum(uploads: Upload) -> Upload:
    """Sum the gradients of these clients: one for each would not fit into memory."""
    total = {k: v.sum(0, keepdim=True, dtype=torch.float64) for k, v in uploads.delta.items()}
    return uploads._replace(delta=total)


def _summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
    norms = uploads.metrics["norm"]
    total = tree.norm({k: v.sum(0) / len(norms) for k, v in uploads.delta.items()})
    return {"total": float(total), "mean": float(norms.mean())}
