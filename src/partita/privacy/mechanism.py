"""Clipping at the client, noise on the sum: what the mechanisms of this folder have in common.

    client   x_i ← x_i min(1, C/|x_i|)                     |x_i| over the whole upload, deltas and sums alike
    server   the same again: a client may send what it likes
             Σ_i x_i ← Σ_i x_i + z_Δ C n_t ,   n_t = (ξ_t − Σ_{j=1}^{b−1} c_j n_{t−j}) / c_0 ,   ξ_t ~ N(0, I)

`c` are the diagonals of a banded lower triangular matrix with columns of length 1; c = (1) is noise that is
new each time. With a `quantile` γ the clip follows the lengths of uploads (Andrew et al., 2021):

    client   b_i = 1[|x_i| ≤ C] − γ                         of whoever reports; nothing of who stays away
    server   C ← C exp(−η (Σ_i b_i + N(0, σ_b²)) / m) ,   z_Δ = (z⁻² − (h/σ_b)²)^(−1/2) ,   h = max(γ, 1 − γ)

so that lengths and sums together cost as much as sums with noise z alone: one client changes Σ_i b_i by h at
most. m is how many clients report on average, as far as that is known before, which says nothing of who did.
Where all m report, this is the paper's C exp(−η (β − γ)). Where fewer do, the clip moves more slowly, towards
the same quantile: a share β = 1/2 + Σ_i (b_i − 1/2)/m would count each who is away as one half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.core import check
from partita.core.parts import Release, Taken, Transform
from partita.core.types import Message, Tensors, Upload
from partita.privacy.accounting import epsilon, noise_for
from partita.transforms.base import unused

BELOW = "below"
"""What a client adds to its upload: whether that was no longer than the clip, less the quantile."""
OF_A_LENGTH = 1e-14
"""The rounding of a length in double precision, as a share of it."""
SHARE_OF_CLIENTS = 20
"""The noise of how many uploads are below the clip is a 20th of those who come, as in the paper, or 2hz."""


@dataclass(frozen=True)
class Mechanism:
    """Clipping and noise, as a transform of uploads.

    name      of the mechanism, and `options` those that it was asked for
    clip      C, at first
    noise     z, in units of the clip (None: it is found from `epsilon`)
    epsilon   what all releases together may amount to, with probability 1 − `delta`
    releases  for how many of them the noise is found (None: those of the run)
    quantile  γ, the share of uploads that are to be below the clip (None: it stays as it is)
    clip_lr   η
    cap       the samples for which a client counts at most
    order     in which clients come, where the run has no schedule
    bands     b from the plan of a run; more than one needs clients that rest so long
    diagonals c by b
    """

    name: str
    options: Mapping[str, object]
    clip: float
    noise: float | None
    epsilon: float | None
    delta: float
    releases: int | None
    quantile: float | None
    clip_lr: float
    cap: int | None
    order: str
    bands: Callable[[Taken], int]
    diagonals: Callable[[int], tuple[float, ...]]

    def transform(self) -> Transform:
        """Return the transform before it is known what a run plans."""
        return self._as_transform(None)

    def _bound(self, plan: Taken) -> Transform:
        """Return the transform of a run with this plan: the noise is found, and the bands are chosen."""
        if plan.clients * self.delta > 1:
            check.warn(
                f"privacy delta={self.delta:g}: with {plan.clients} clients it allows that one of them is "
                f"exposed altogether; take less than {1 / plan.clients:.1g}"
            )
        noise = self.noise if self.noise is not None else self._found(plan)
        if plan.noise is not None and self.noise is None and plan.noise != noise:
            check.warn(
                f"privacy epsilon={self.epsilon:g}: the run goes on with the noise of {plan.noise:.3g} clips "
                f"that was found for another number of rounds; it would take {noise:.3g} to keep ε"
            )
            noise = plan.noise
        most = 0.0 if self.quantile is None else max(self.quantile, 1 - self.quantile)
        below_noise = max(plan.cohort / SHARE_OF_CLIENTS, 2 * most * noise)
        return replace(self, noise=noise)._as_transform(
            Bound(noise, below_noise, most, self.diagonals(self.bands(plan)))
        )

    def _found(self, plan: Taken) -> float:
        """Return the noise with which the releases of a run amount to ε."""
        assert self.epsilon is not None
        planned = plan.releases if plan.planned is None else plan.planned
        if self.releases is not None and planned > self.releases:
            allowed = f"at least {planned}, the releases of the run"
            raise check.fail("privacy rounds", self.releases, allowed)
        asked = planned if self.releases is None else self.releases
        if plan.rate is not None and len(self.diagonals(self.bands(plan))) == 1:
            return noise_for(self.epsilon, asked, rate=plan.rate, delta=self.delta)
        most, apart = plan.most_turns, plan.apart or 1
        turns = asked if most is None else min(asked, most + -(-(asked - planned) // apart))
        return noise_for(self.epsilon, turns, delta=self.delta)

    def _as_transform(self, bound: Bound | None) -> Transform:
        noise = {} if bound is None else {"noise": bound.noise, "bands": len(bound.diagonals)}
        return Transform(
            self.name,
            {**self.options, **noise},
            encode=self._encode,
            accept=self._accept,
            release=lambda release: self._release(release, bound),
            begin=lambda like: self._begin(like, bound),
            order=self.order,
            for_sums=f"{self.name} adds noise to a sum",
            weight_cap=self.cap,
            bind=self._bound,
            account=None if bound is None else lambda taken: self._account(taken, bound),
        )

    # ---- at the client

    def _encode(self, message: Message, public: Tensors, key: Tensor) -> Message:  # noqa: ARG002
        numbers, below = clipped(message.numbers, public["clip"])
        if self.quantile is None:
            return Message(numbers, message.rest)
        return Message(numbers, {**message.rest, unused(message, BELOW): below.float() - self.quantile})

    # ---- at the server

    def _accept(self, message: Message, public: Tensors) -> Message:
        numbers, _ = clipped(message.numbers, public["clip"])
        if self.quantile is None:
            return Message(numbers, message.rest)
        low, high = -self.quantile, 1 - self.quantile
        rest = {k: v.clamp(low, high) if k.startswith(BELOW) else v for k, v in message.rest.items()}
        return Message(numbers, rest)

    def _begin(self, like: Upload, bound: Bound | None) -> tuple[Tensors, Tensors]:
        """Return the clip, which clients know, and noise that is yet to be taken back, which they do not."""
        device = next((x.device for part in like.payload for x in part.values()), torch.device("cpu"))
        lags = range(1, len(bound.diagonals) if bound else 1)
        secret = {f"{i}.{path}": torch.zeros_like(x) for i in lags for path, x in released(like).items()}
        return {"clip": torch.tensor(self.clip, dtype=torch.float64, device=device)}, secret

    def _release(self, release: Release, bound: Bound | None) -> tuple[Upload, Tensors, Tensors]:
        assert bound is not None, "a run binds its transforms before it releases anything"
        clip, c = release.public["clip"], bound.diagonals
        scale = bound.noise_of_sums * clip
        noisy: Tensors = {}
        secret: Tensors = {}
        for path, total in released(release.total).items():
            noise = release.normal(path, total.shape)
            for lag in range(1, len(c)):
                noise = noise - c[lag] * release.secret[f"{lag}.{path}"]
            noise = noise / c[0]
            noisy[path] = (total + scale * noise).to(total.dtype)
            before = noise.to(total.dtype)
            for lag in range(1, len(c)):
                secret[f"{lag}.{path}"], before = before, release.secret[f"{lag}.{path}"]
        delta, sums = ({k: noisy[f"{part}.{k}"] for k in tensors} for part, tensors in _parts(release.total))
        blurred = release.total._replace(delta=delta, sums=sums)
        new_clip = clip if self.quantile is None else self._moved(clip, release, bound)
        return blurred, {"clip": new_clip}, secret

    def _moved(self, clip: Tensor, release: Release, bound: Bound) -> Tensor:
        """C ← C exp(−η (Σ_i b_i + N(0, σ_b²)) / m)"""
        (below,) = [v for k, v in release.sent.items() if k.startswith(BELOW)]
        noise = release.normal(BELOW, ())
        excess = (below + bound.below_noise * noise) / release.clients
        moved: Tensor = clip * torch.exp(-self.clip_lr * excess)
        return moved

    def _account(self, taken: Taken, bound: Bound) -> dict[str, float]:
        """Return (ε, δ) of what has been released: by chance where it is known, else by turns."""
        if taken.rate is not None and len(bound.diagonals) == 1:
            spent = epsilon(bound.noise, taken.releases, rate=taken.rate, delta=self.delta)
        else:
            spent = epsilon(bound.noise, taken.turns, delta=self.delta)
        return {"epsilon": spent, "delta": self.delta, "noise": bound.noise}


@dataclass(frozen=True)
class Bound:
    """What a run has settled: z, σ_b, h (0 without a quantile), and the diagonals c."""

    noise: float
    below_noise: float
    most_below: float
    diagonals: tuple[float, ...]

    @property
    def noise_of_sums(self) -> float:
        """z_Δ = (z⁻² − (h/σ_b)²)^(−1/2): more noise in sums pays for how many are below the clip."""
        if not self.most_below:
            return self.noise
        return float((self.noise**-2 - (self.most_below / self.below_noise) ** 2) ** -0.5)


def clipped(numbers: Tensors, clip: Tensor) -> tuple[Tensors, Tensor]:
    """x ← x min(1, C/|x|), and whether |x| ≤ C. What is not finite stays so, and is screened.

    The factor is a rounding smaller than that, so that what is clipped is within the clip in any type, and
    stays as it is where it is clipped again.
    """
    if not numbers:
        return numbers, torch.ones((), dtype=torch.bool, device=clip.device)
    squares = [torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in numbers.values()]
    length = torch.stack(squares).sum().sqrt()
    below = length <= clip
    # a length of infinity or NaN has no factor: NaN would be the honest one for a client that sent it
    factor = (clip / length.clamp(min=clip)).where(length.isfinite(), torch.nan)
    types = {x.dtype for x in numbers.values()}
    smaller = {t: factor * (1 - max(torch.finfo(t).eps, OF_A_LENGTH)) for t in types}
    by_type = {t: torch.where(below, 1.0, smaller[t]).to(t) for t in types}
    return {k: x * by_type[x.dtype] for k, x in numbers.items()}, below


def _parts(upload: Upload) -> tuple[tuple[str, Tensors], ...]:
    return ("delta", upload.delta), ("sums", upload.sums)


def released(upload: Upload) -> Tensors:
    """Return what has noise added to it, by path."""
    return {f"{part}.{k}": x for part, tensors in _parts(upload) for k, x in tensors.items()}
