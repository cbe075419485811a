"""Mimic: Karimireddy et al., *Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing* (2022).

    Δ_i ← Δ_{j*},   j* = argmax_j |⟨z, Δ_j − μ⟩|,   z = argmax_{‖z‖=1} Σ_j ⟨z, Δ_j − μ⟩²

μ is the mean of the honest Δ_j, and z the direction in which they differ most.

Nothing is an outlier: one honest client is counted many times, and the others' data count less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.attack.base import attack, everyone_sends, gram, honest
from partita.core import tree
from partita.core.parts import Attack
from partita.core.types import Upload


@attack
def mimic() -> Attack:
    """All Byzantine clients copy the honest client that differs most from the others.

    Use it where clients' data differ: robust aggregators then drop the others as outliers.
    """

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        others = honest(uploads, byzantine)
        return everyone_sends(uploads, byzantine, tree.row(others, _farthest(gram(others))))

    return Attack("mimic", forge, None, {})


def _farthest(products: Tensor) -> int:
    """Return the row with the largest projection on z; of equal ones the first, whatever the rounding."""
    if not len(products) or not bool(torch.isfinite(products).all()):
        return 0
    _, vectors = torch.linalg.eigh(products)
    away = vectors[:, -1].abs()  # the Gram matrix's largest eigenvector holds the projections, scaled
    return int((away >= away.max() * (1 - 1e-9)).nonzero()[0])
