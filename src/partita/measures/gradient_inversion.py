"""Gradient inversion: what the server can reconstruct of a client's samples from what it has sent.

    min_x  D(Σ_s g_s(x), Δ_i) + a TV(x),   g_s(x) = ∇f(u_s; x),   u_{s+1} = u_s − η g_s(x),   u_0 = u^t

D is 1 − ⟨g, Δ⟩ / (‖g‖ ‖Δ‖) (Geiping et al., *Inverting Gradients: How Easy Is It to Break Privacy in
Federated Learning?*, 2020) or ‖g − Δ/η‖² / ‖Δ/η‖² (Zhu et al., *Deep Leakage from Gradients*, 2019). The
minimum is sought by Adam from noise. Labels are inferred from the gradient of the last bias first, which
is negative where a class is there (Zhao et al., *iDLG: Improved Deep Leakage from Gradients*, 2020).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated

import numpy as np
from torch import Tensor

from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Measure, Probe
from partita.core.types import Upload
from partita.measures.inverting import Inversion
from partita.measures.probe import SAMPLES, described, samples_or_count
from partita.privacy.inversion import matched_errors

RECOVERED = 0.1  # of the error of a guess: a sample with less counts as recovered


@checked("measure ")
def gradient_inversion(
    samples: Annotated[
        int,
        Option("of how many samples an upload may be made at most; a run with more is refused", low=1),
    ] = 4,
    clients: Annotated[int, Option("how many clients of a cohort are attacked", low=1)] = 4,
    labels: Annotated[
        str,
        Option(
            "whether the server has 'known' the labels, or infers them from the last layer ('inferred')",
            choices=("inferred", "known"),
        ),
    ] = "inferred",
    sees: Annotated[
        str,
        Option(
            "what is attacked: the 'upload' of each client, as the server sees it, or the 'release': how the "
            "server's model has moved, as other clients see it",
            choices=("upload", "release"),
        ),
    ] = "upload",
    match: Annotated[str, Option("D, which distance is minimized", choices=("cosine", "squared"))] = "cosine",
    tv: Annotated[float, Option("a, the weight of the total variation of images", low=0)] = 0.0,
    iterations: Annotated[int, Option("steps of the attack", low=1)] = 300,
    starts: Annotated[
        int, Option("searches from different noise; the one that matches best counts", low=1)
    ] = 2,
    rate: Annotated[
        float, Option("the attack's first step size, in deviations of public samples", low=0, open_low=True)
    ] = 0.1,
    lr: Annotated[
        float | None,
        Option("η of the clients, which the server knows (None: not needed)", low=0, open_low=True),
    ] = None,
    steps: Annotated[
        int, Option("local steps that the server follows, each on all samples; more than one need lr", low=1)
    ] = 1,
    knows_personal: Annotated[
        bool, Option("whether the server also knows the client's personal part; else it takes the first one")
    ] = False,
    skips_zeros: Annotated[
        bool, Option("whether entries that arrive as zero say nothing, as after top-k or random-k")
    ] = False,
    public: Annotated[
        int | Tensor | np.ndarray,
        Option(
            "samples that no client trains on and the server has: an array, or how many of the test samples",
            low=2,
            allowed=SAMPLES,
            check=samples_or_count,
        ),
    ] = 32,
) -> Measure:
    """What an honest but curious server reconstructs of a client's samples from its upload alone.

    `error` is the mean squared error of what it finds over that of a guess that does not look, the mean of
    public samples: 0 is the sample itself, and from 1 on it has learned nothing. It is an attack, not a
    bound: a better one finds more.

    Use it to see what clipping, compression or a personal part hide, and what they do not.
    """
    if lr is None and (match == "squared" or steps > 1):
        which = "match='squared'" if match == "squared" else f"steps={steps}"
        raise check.fail("measure lr", lr, "the step size of the clients", f"{which} compares lengths")
    attack = Inversion(
        samples,
        labels,
        sees,
        match,
        tv,
        iterations,
        starts,
        rate,
        lr or 1.0,
        steps,
        skips_zeros,
        knows_personal,
    )
    options = {
        "samples": samples,
        "clients": clients,
        "labels": labels,
        "sees": sees,
        "match": match,
        "tv": tv,
        "iterations": iterations,
        "starts": starts,
        "rate": rate,
        "lr": lr,
        "steps": steps,
        "knows_personal": knows_personal,
        "skips_zeros": skips_zeros,
        "public": described(public),
    }
    return Measure(
        "gradient_inversion",
        attack.client,
        _summarize,
        options,
        own=True,
        probe=Probe(public, ()),
        of_upload=True,
        most=clients,
        fits=attack.fits,
    )


def _summarize(uploads: Upload, samples: Tensor) -> dict[str, float | list[float]]:  # noqa: ARG001
    found = {k: v.detach().cpu().numpy() for k, v in uploads.metrics.items()}
    errors, guesses, right = [], [], 0
    for i, count in enumerate(found["count"].tolist()):
        real, guess = found["real"][i][:count], found["guess"][i]
        errors.append(matched_errors(found["x"][i][:count], real))
        guesses.append(((real - guess) ** 2).reshape(count, -1).mean(1, dtype=np.float64))
        labels, own = (Counter(found[k][i][:count].tolist()) for k in ("labels", "own"))
        right += (labels & own).total()
    error, guess = np.concatenate(errors), np.concatenate(guesses)
    if not len(error):
        return {}
    peak = float(found["peak"].mean())
    mse, of_guess = float(error.mean()), float(guess.mean())
    values = {"error": mse / of_guess if of_guess else float("nan"), "mse": mse, "guess": of_guess}
    values["psnr"] = 10 * math.log10(peak**2 / max(mse, 1e-12 * peak**2)) if peak else float("nan")
    values["recovered"] = float((error < RECOVERED * guess).mean())
    return {**values, "labels": right / len(error), "match": float(found["match"].mean())}
