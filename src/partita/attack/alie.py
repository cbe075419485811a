"""A little is enough: Baruch et al. (2019).

    Δ_i ← μ − z σ,   z = Φ⁻¹((n − m − s) / (n − m)),   s = ⌊n/2 + 1⌋ − m

μ and σ are the mean and the deviation of the honest deltas, coordinate by coordinate. Of n clients m are
Byzantine: z is the largest shift for which s honest clients are still further away than they are.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated

from torch import Tensor

from partita.attack.base import attack, by_tensor, crowd, everyone_sends, honest
from partita.core.options import Option
from partita.core.parts import Attack
from partita.core.types import Upload

LARGEST_SHIFT = 3.0


@attack
def alie(
    z: Annotated[
        float | None, Option("z, the shift in deviations (None: the paper's formula)", low=0)
    ] = None,
) -> Attack:
    """All Byzantine clients send the honest mean shifted by a few deviations, within the others' spread.

    Use it against medians and trimmed means: nothing it sends is an outlier.
    """

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        good, bad = map(len, crowd(uploads, byzantine))
        shift = _largest(good + bad, bad) if z is None else z
        sent = by_tensor(honest(uploads, byzantine), lambda x: x.mean(0) - shift * x.std(0, correction=0))
        return everyone_sends(uploads, byzantine, sent)

    return Attack("alie", forge, None, {"z": z})


def _largest(n: int, m: int) -> float:
    """Return the paper's z, at most 3; 3 where they are a majority and need nobody's support."""
    supporters = n // 2 + 1 - m
    if supporters <= 0:
        return LARGEST_SHIFT
    share = (n - m - supporters) / (n - m)
    return min(LARGEST_SHIFT, max(0.0, NormalDist().inv_cdf(share))) if share > 0 else 0.0
