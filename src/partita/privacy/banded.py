"""Differential privacy of clients without sampling: banded matrix factorization.

Choquette-Choo et al., *(Amplified) Banded Matrix Factorization* (2023), with the square root of Kalinin &
Lampert, *Banded Square Root Matrix Factorization* (2024).

    releases  x_t + (C⁻¹ ξ)_t                              C: lower triangular, with diagonals c_0 … c_{b−1}
    c_j       = c_{j−1} (2j − 1)/(2j),  c_0 = 1, then divided by their length       (1 − x)^(−1/2) cut off
    account   k turns of a client, at least b releases apart: as k Gaussian releases with noise z

The server's model is a running sum of releases. The noise of one release is taken back, in part, by later
ones, so that the sum of many has less of it than the sum of as many independent ones. What a client sends in
turns less than b releases apart would add up in C x, which is why clients come in a fixed order.
"""

from __future__ import annotations

import math
from typing import Annotated

from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Taken, Transform
from partita.privacy.accounting import DELTA
from partita.privacy.gaussian import Cap, Clip, ClipRate, Epsilon, Noise, Quantile, Rounds, target
from partita.privacy.mechanism import Mechanism

MOST_BANDS = 16
"""Bands without being asked: the server keeps the noise of as many releases, each as large as the model."""


@checked("privacy ")
def banded(
    epsilon: Epsilon = None,
    noise: Noise = None,
    delta: Annotated[float, DELTA] = 1e-5,
    clip: Clip = 1.0,
    bands: Annotated[
        int | None,
        Option(
            "b, the releases over which noise is taken back (None: as long as clients rest, up to 16)", low=1
        ),
    ] = None,
    quantile: Quantile = None,
    clip_lr: ClipRate = 0.2,
    cap: Cap = None,
    rounds: Rounds = None,
) -> Transform:
    """Uploads are clipped, and the noise of their sum is taken back, in part, in later rounds.

    Use it where cohorts cannot be drawn by chance, or nobody would believe that they were: clients take part
    in a fixed order (`schedule.synchronous("cyclic")`, as without a schedule of its own).
    """
    epsilon = target(epsilon, noise)
    options = {
        "epsilon": epsilon,
        "noise": noise,
        "delta": delta,
        "clip": clip,
        "bands": bands,
        "quantile": quantile,
        "clip_lr": clip_lr,
        "cap": cap,
        "rounds": rounds,
    }

    def chosen(plan: Taken) -> int:
        rest = plan.apart or 1
        if bands is not None and bands > rest:
            reason = f"a client may come again after {rest} release{'s' * (rest > 1)}"
            allowed = (
                f"at most {rest}; schedule=partita.schedule.synchronous('cyclic') lets clients rest longest"
            )
            raise check.fail("privacy bands", bands, allowed, reason)
        return min(rest, MOST_BANDS) if bands is None else bands

    return Mechanism(
        name="banded",
        options=options,
        clip=clip,
        noise=noise,
        epsilon=epsilon,
        delta=delta,
        releases=rounds,
        quantile=quantile,
        clip_lr=clip_lr,
        cap=cap,
        order="cyclic",
        bands=chosen,
        diagonals=square_root,
    ).transform()


def square_root(bands: int) -> tuple[float, ...]:
    """c_j = c_{j−1} (2j − 1)/(2j), c_0 = 1, divided by the length of all of them."""
    c = [1.0]
    for j in range(1, bands):
        c.append(c[-1] * (2 * j - 1) / (2 * j))
    length = math.hypot(*c)
    return tuple(x / length for x in c)
