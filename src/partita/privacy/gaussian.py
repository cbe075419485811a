"""Differential privacy of clients by Poisson sampling.

McMahan et al., *Learning Differentially Private Recurrent Language Models* (2018); the clip by a quantile:
Andrew et al., *Differentially Private Learning with Adaptive Clipping* (2021).

    cohort  each client by a chance q of its own
    client  x_i ← x_i min(1, C/|x_i|)
    server  Δ = (Σ_i x_i + N(0, z² C² I)) / m                           m: clients that come on average

Who is there in a round is hidden among those who might have been, so that many rounds cost little.
"""

from __future__ import annotations

from typing import Annotated

from partita.core import check
from partita.core.options import Option, Range, checked
from partita.core.parts import Taken, Transform
from partita.privacy.accounting import DELTA
from partita.privacy.mechanism import Mechanism

EPSILON = 8.0
Epsilon = Annotated[
    float | None,
    Option(
        "ε, what all releases of the run together may amount to; the noise is found (None: 8, or what "
        "`noise` comes to)",
        low=0,
        open_low=True,
    ),
]
Noise = Annotated[
    float | None,
    Option(
        "z, the standard deviation of the noise in units of the clip, in place of epsilon",
        low=0,
        open_low=True,
    ),
]
Clip = Annotated[
    float,
    Option(
        "C, the length that a client's whole upload may have (with quantile=: at first)",
        low=0,
        open_low=True,
        search=Range(0.03, 10, log=True),
    ),
]
Rounds = Annotated[
    int | None,
    Option("the releases for which the noise of an epsilon is found (None: those of the run)", low=1),
]
Quantile = Annotated[
    float | None,
    Option(
        "γ, the share of uploads that are to be no longer than the clip, which follows them (None: it stays)",
        low=0,
        high=1,
    ),
]
ClipRate = Annotated[
    float, Option("η, the step with which the clip follows a quantile", low=0, open_low=True)
]
Cap = Annotated[
    int | None,
    Option(
        "the samples for which a client counts at most, where clients count by samples (None: the largest "
        "client's number, which then must be no secret)",
        low=1,
    ),
]


@checked("privacy ")
def gaussian(
    epsilon: Epsilon = None,
    noise: Noise = None,
    delta: Annotated[float, DELTA] = 1e-5,
    clip: Clip = 1.0,
    quantile: Quantile = None,
    clip_lr: ClipRate = 0.2,
    cap: Cap = None,
    rounds: Rounds = None,
) -> Transform:
    """Uploads are clipped, and their sum has Gaussian noise that is new in each round.

    Use it where the server can draw cohorts by chance: without a schedule of its own, a run does so
    (`schedule.synchronous("poisson")`). Only what leaves a client has noise: a personal part has none.
    """
    epsilon = target(epsilon, noise)
    options = {
        "epsilon": epsilon,
        "noise": noise,
        "delta": delta,
        "clip": clip,
        "quantile": quantile,
        "clip_lr": clip_lr,
        "cap": cap,
        "rounds": rounds,
    }
    return Mechanism(
        name="gaussian",
        options=options,
        clip=clip,
        noise=noise,
        epsilon=epsilon,
        delta=delta,
        releases=rounds,
        quantile=quantile,
        clip_lr=clip_lr,
        cap=cap,
        order="poisson",
        bands=_new_each_time,
        diagonals=lambda bands: (1.0,),  # noqa: ARG005
    ).transform()


def target(epsilon: float | None, noise: float | None) -> float | None:
    """Return the ε for which noise is found, if it is not given; refuse a mechanism that was given both."""
    if epsilon is not None and noise is not None:
        raise check.fail("privacy epsilon", epsilon, f"None with noise={noise:g}, or no noise=")
    return EPSILON if epsilon is None and noise is None else epsilon


def _new_each_time(plan: Taken) -> int:  # noqa: ARG001
    return 1
