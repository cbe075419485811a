"""MOON.

    client:  SGD on f_i(w) + μ · mean of ℓ_con,   from w = w^t
             ℓ_con = −log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) )
    server:  the mean

z are the features of a sample, z_glob those of the same sample by the model as it was received, z_prev those
by the model that the client ended its last round with (before its first one: the model that the stage began
with); sim is the cosine. Features are what the last layer takes, of which the paper's projection head is a
part of the model. Where a sequence has features and a label at each of its positions, ℓ_con is their mean,
without the positions that do not count (−100, such as padding). Sequences of different lengths with one label
need features that are pooled over their positions: others are refused, since padding would count. μ = 0 is
fedavg, bit for bit; so is the first round, in which z_glob = z_prev, but for roundings.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Unpack

import torch.nn.functional as F
from torch import Tensor

from partita.algorithms.base import Common, Lr, compose, method, settings
from partita.algorithms.local.sgd import together
from partita.core.criterion import by_position, by_sample
from partita.core.options import Option, Range
from partita.core.parts import Algorithm
from partita.core.terms import with_term
from partita.optim.rates import as_rate


@method(
    paper="MOON: Li, He & Song, Model-Contrastive Federated Learning (2021), Algorithm 1",
    use="Use it for deep models of images whose clients have different classes and come back often.",
)
def moon(
    lr: Lr,
    mu: Annotated[
        float,
        Option("μ, the weight of the contrast", low=0, search=Range(0.1, 10.0, log=True)),
    ] = 1.0,
    tau: Annotated[
        float,
        Option("τ, the temperature", low=0, open_low=True, search=Range(0.1, 1.0, log=True)),
    ] = 0.5,
    **options: Unpack[Common],
) -> Algorithm:
    """One global model; features are drawn to those of the global model, away from the client's last ones."""
    common, eta = settings(options), as_rate(lr)

    def contrast(
        features: Tensor, target: Tensor, received_features: Tensor, previous_features: Tensor
    ) -> Tensor:
        # −log(e^a / (e^a + e^b)) = log(1 + e^{b − a}),  a = sim(z, z_glob)/τ,  b = sim(z, z_prev)/τ
        a, b = (
            F.cosine_similarity(features, z, dim=-1) / tau for z in (received_features, previous_features)
        )
        each = F.softplus(b - a)
        return mu * (by_position(each, target) if each.shape == target.shape else by_sample(each))

    return compose(
        lambda problem: together(problem, eta, common.optimizer),
        common,
        loss=partial(with_term, term=contrast) if mu else None,
    )
