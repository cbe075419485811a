"""The masked loss of HeteroFL: Diao et al. (2021), section 3.

    z_k ← 0   for every class k that the client has no training sample of;   ℓ(z, y) = −log softmax(z)_y

Clients with few classes do not push down the logits of the others. In training, a label says whose it is:

    label + K (client + 1)      of K outputs; a label below K is anybody's, and nothing is masked
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.capacity.blocks import still
from partita.core import check
from partita.core.criterion import Criterion
from partita.data.federated import FederatedData


def outputs_of(model: nn.Module, x: Tensor, loss: Criterion, y: Tensor) -> int:
    """Return K of a classifier; refuse other models."""
    with torch.no_grad():
        output = still(model)(x.clone())
    if loss.name != "cross_entropy" or output.dim() != 2 or y.dim() != 1 or y.is_floating_point():
        allowed = "False, or a model with an output for each class and the loss 'cross_entropy'"
        raise check.fail("capacity mask", True, allowed, f"the loss is {loss.name!r}")
    return int(output.shape[1])


def owned(data: FederatedData, outputs: int) -> tuple[FederatedData, Tensor]:
    """Return data whose training labels say whose they are, and the classes that each client has."""
    starts, lengths = data.train.T
    client = np.repeat(np.arange(data.clients), lengths)
    rows = np.arange(len(client)) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    if len(np.unique(rows)) < len(rows):
        raise check.fail("capacity mask", True, "False where clients share samples: a label has one owner")
    whose, place = (torch.from_numpy(x).to(data.y.device) for x in (client, rows))
    labels = data.y[place].long()
    classes = torch.zeros(data.clients, outputs, dtype=torch.bool, device=data.y.device)
    classes[whose[labels >= 0], labels[labels >= 0]] = True
    y = data.y.long().index_copy(0, place, torch.where(labels < 0, labels, labels + outputs * (whose + 1)))
    return replace(data, y=y), classes.to(data.device)


def masked(loss: Criterion, classes: Tensor) -> Criterion:
    """Return the loss without the classes that the owner of a label does not have."""
    outputs = classes.shape[1]

    def of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def value(output: Tensor, target: Tensor, **given: Any) -> Tensor:
            owner = target.div(outputs, rounding_mode="floor") - 1
            has = classes[owner.clamp(min=0)] | (owner < 0)[:, None]
            label = torch.where(target < 0, target, target % outputs)
            return function(torch.where(has, output, 0.0), label, **given)

        return value

    weight = None if loss.weight is None else of(loss.weight)
    return loss._replace(mean=of(loss.mean), each=of(loss.each), weight=weight)
