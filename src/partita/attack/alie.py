"""A little is enough: Baruch et al. (2019).

    Δ_i ← μ − z σ,   z = Φ⁻¹((n − m − s) / (n − m)),   s = ⌊n/2 + 1⌋ − m

μ and σ are the mean and the deviation of the honest deltas, coordinate by coordinate, of n clients of whom m
lie: z is the largest shift for which s honest clients are still further away than the liars.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated

from torch import Tensor

from partita.attack.base import attack, by_tensor, everyone_sends, honest
from partita.options import Option
from partita.types import Attack, Upload


@attack
def alie(
    z: Annotated[
        float | None, Option("z, the shift in deviations (None: the paper's formula)", low=0)
    ] = None,
) -> Attack:
    """All liars send the honest mean shifted by a few deviations, hidden in the spread of the others.

    Use it against medians and trimmed means: nothing it sends is an outlier.
    """

    def forge(uploads: Upload, liars: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        others = honest(uploads, liars)
        n = len(uploads.weight) if uploads.weight is not None else len(liars)
        shift = _largest(n, len(liars)) if z is None else z
        sent = by_tensor(others, lambda x: x.mean(0) - shift * x.std(0, correction=0))
        return everyone_sends(uploads, liars, sent)

    return Attack("alie", forge, None, {"z": z})


def _largest(n: int, m: int) -> float:
    """The paper's z; 0 where the liars have a majority, and never more than 3."""
    supporters = n // 2 + 1 - m
    if n <= m or supporters <= 0:
        return 0.0
    share = (n - m - supporters) / (n - m)
    return min(3.0, max(0.0, NormalDist().inv_cdf(share))) if 0 < share < 1 else 0.0
