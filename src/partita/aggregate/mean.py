"""The mean: McMahan et al., *Communication-Efficient Learning of Deep Networks* (2017).

    Δ = Σ_i w_i Δ_i / Σ_i w_i

Zero when nobody has weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.core.options import checked
from partita.core.parts import Aggregator, Combined
from partita.core.types import Tensors


@checked("aggregate ")
def mean() -> Aggregator:
    """The mean of the deltas, by the clients' weights.

    Use it unless clients may be faulty: a single one can move it anywhere.
    """

    def combine(deltas: Tensors, weight: Tensor, key: Tensor) -> Combined:  # noqa: ARG001
        # an asynchronous server meets one at a time; on a GPU, to look at its weight would be to wait
        if len(weight) == 1 and not weight.is_cuda and weight[0] > 0:
            return Combined({k: d[0] for k, d in deltas.items()})
        weight = weight.to(_exact(weight.dtype))
        share = weight / weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)
        shares = {kind: share.to(_exact(kind))[None] for kind in {d.dtype for d in deltas.values()}}
        return Combined({k: _combine(shares[d.dtype], d) for k, d in deltas.items()})

    return Aggregator("mean", combine, {}, linear=True)


def _exact(kind: torch.dtype) -> torch.dtype:
    return kind if kind.is_floating_point else torch.float64


def _combine(share: Tensor, delta: Tensor) -> Tensor:
    rows = delta.flatten(1) if delta.dim() > 1 else delta[:, None]
    mean = torch.mm(share, rows.to(share.dtype)).view(delta.shape[1:])
    # counters, such as BatchNorm's number of batches, stay whole
    return mean if delta.is_floating_point() else mean.round().to(delta.dtype)
