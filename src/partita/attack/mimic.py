"""Mimic: Karimireddy et al., *Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing* (2022).

    Δ_i ← Δ_{j*},   j* = argmax_j |⟨z, Δ_j⟩|,   z = the direction in which the honest Δ_j differ most

Nothing is an outlier: one honest client is counted many times, and the others' data count less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita import tree
from partita.attack.base import attack, everyone_sends, gram, honest
from partita.types import Attack, Upload


@attack
def mimic() -> Attack:
    """All liars copy the honest client that differs most from the others.

    Use it where clients' data differ: robust aggregators then drop the others as outliers.
    """

    def forge(uploads: Upload, liars: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        others = honest(uploads, liars)
        _, vectors = torch.linalg.eigh(gram(others))
        # the largest eigenvector of the Gram matrix holds the projections on z
        chosen = int(vectors[:, -1].abs().argmax())
        return everyone_sends(uploads, liars, tree.row(others, chosen))

    return Attack("mimic", forge, None, {})
