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

from partita import tree
from partita.algorithms.ffgg import ffgg
from partita.local.solvers import Solver, gd
from partita.options import Option, checked
from partita.partition import Personal, check_personal
from partita.types import Algorithm, LocalRule, Measure, Problem, Upload


def _personal(field: str, value: Personal) -> Personal:  # noqa: ARG001
    check_personal(value)
    return value


@checked("measure ")
def gradient_norm(
    personal: Annotated[
        Personal | None,
        Option("the part w (None: the method's personal part)", allowed="as for a method", check=_personal),
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
        return rule.local(problem)  # a step of size 1 uploads the gradient itself

    def summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
        rows = {k: v.double() for k, v in uploads.delta.items() if v.is_floating_point()}
        total = float(tree.norm({k: v.mean(0) for k, v in rows.items()}))
        squares = [v.reshape(len(v), -1).square().sum(1) for v in rows.values()]
        mean = float(torch.stack(squares).sum(0).sqrt().mean()) if squares else 0.0
        return {"total": total, "mean": mean}

    options = {"personal": personal, "solver": solver}
    return Measure("gradient_norm", client, summarize, options, personal=personal)
