"""Which of a client's training samples are held out for validation."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws

SHARE = 0.1  # of each client's training samples, where nothing else is said

Mask = NDArray[np.bool_]


def fraction(field: str, value: Any) -> float:
    """Return the share of samples that a split gets, from 0 to below 1."""
    share = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
    if not 0 <= share < 1:
        raise check.fail(field, value, "a fraction below 1 and not negative, or a boolean for each row")
    return share


def validated(y: NDArray[Any], share: float, seed: int, client: int) -> Mask:
    """Return which of a client's training samples, with targets y, are for validation: share·n, rounded.

    A client with fewer than 0.5/share samples has none. Where targets are classes, the draw is stratified:
    each class is held out in proportion to its size, with a draw where that is no whole number, so that over
    many clients validation has the classes of the test part, however rare. The only sample that a client has
    of a class may be held out, too: else many rare classes would be in no validation part at all.
    """
    mask = np.zeros(len(y), dtype=np.bool_)
    count = min(int(share * len(y) + 0.5), len(y) - 1)
    if count <= 0:
        return mask
    rng = draws.generator(seed, "validation-split", client)
    order = rng.permutation(len(y))
    if y.ndim == 1 and y.dtype.kind in "iu":
        classes = np.unique(y)
        rank = rng.permutation(len(classes))[np.searchsorted(classes, y[order])]
        order = order[np.argsort(rank, kind="stable")]
        # Equal steps along the samples sorted by class: of n_c samples n_c/step, rounded up or down.
        steps = (rng.random() + np.arange(count)) * (len(y) / count)
        order = order[np.minimum(steps.astype(np.int64), len(y) - 1)]
    mask[order[:count]] = True
    return mask
