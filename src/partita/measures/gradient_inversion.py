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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core import check, draws, tree
from partita.core.options import Option, checked
from partita.core.parts import Algorithm, LocalRule, Measure, Phase, Probe, Problem, Watched
from partita.core.types import Batch, ClientState, Download, Tensors, Upload, Work
from partita.measures.probe import SAMPLES, described, probed, samples_or_count
from partita.measures.sent import made, sent
from partita.privacy.inversion import (
    cosine_distance,
    labels_of,
    matched_errors,
    squared_distance,
    total_variation,
)

FIRST, SECOND, TINY = 0.9, 0.999, 1e-8  # of Adam
DECAYS = (3 / 8, 5 / 8, 7 / 8)  # of the iterations: then the step size falls to a tenth
RECOVERED = 0.1  # of the error of a guess: a sample with less counts as recovered


class _Attack(NamedTuple):
    """The server at work on one client.

    model, target  where gradients are taken, and what they are to match
    x, first, second, match, step  dummies of each start, the moments of Adam, D, how many steps were taken
    labels         those that the server takes the dummies to have
    real, own      the samples that the client has trained on and their labels, for the count of what was
                   found; one row more, which holds what has no place
    n              how many there are, of which the server knows
    public         samples that the server has
    """

    model: Tensors
    target: Tensors
    x: Tensor
    first: Tensor
    second: Tensor
    match: Tensor
    step: Tensor
    labels: Tensor
    real: Tensor
    own: Tensor
    n: Tensor
    public: Tensor


@checked("measure ")
def gradient_inversion(
    samples: Annotated[
        int, Option("of how many samples an upload may be made; more are refused before any work", low=1)
    ] = 1,
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
    attack = _Server(
        samples, labels, sees, match, tv, iterations, starts, rate, lr or 1.0, steps, skips_zeros
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
        own=knows_personal,
        probe=Probe(public, ()),
        of_upload=True,
        most=clients,
        fits=attack.fits,
    )


@dataclass(frozen=True)
class _Server:
    """The attack with its options; see `gradient_inversion`."""

    samples: int
    labels: str
    sees: str
    match: str
    tv: float
    iterations: int
    starts: int
    rate: float
    lr: float
    steps: int
    skips_zeros: bool

    def client(self, problem: Problem, algorithm: Algorithm) -> LocalRule:
        """Return the attack on one client: collect what it has trained on, infer labels, then search."""
        phases = [p._replace(step=_collect, lr=(), until=None) for p in algorithm.local(problem).phases]
        once, often = (Work(steps=n, batch=1, shuffle=False) for n in (1, self.iterations))
        phases += [
            Phase(self._label(problem), work=lambda now: once),  # noqa: ARG005
            Phase(self._step(problem), work=lambda now: often),  # noqa: ARG005
        ]
        return LocalRule(self._start(problem), tuple(phases), _finish)

    def _start(self, problem: Problem) -> Callable[[Download, ClientState], _Attack]:
        most = self.samples

        def start(download: Download, state: ClientState) -> _Attack:
            public, _ = probed(download)
            seen = sent(download)
            if self.sees == "release":
                now = made(download)
                seen = {k: download.shared[k] - now[k] for k in seen}
            target = {k: seen[k] / self.lr for k in problem.trainable if k in seen}
            assert download.key is not None
            shape = public.shape[1:]
            noise = draws.normal(
                draws.places(draws.branch(download.key, "inversion"), (self.starts, most, *shape))
            )
            x = public.mean(0) + public.std() * noise.to(public.dtype)
            zero = torch.zeros((), dtype=x.dtype, device=x.device)
            none = torch.zeros(most + 1, dtype=torch.int64, device=x.device)
            return _Attack(
                model={**state.personal, **download.shared},
                target=target,
                x=_within(x, public),
                first=torch.zeros_like(x),
                second=torch.zeros_like(x),
                match=zero.repeat(self.starts),
                step=zero,
                labels=none[:-1],
                real=torch.zeros((most + 1, *shape), dtype=x.dtype, device=x.device),
                own=none,
                n=none[0],
                public=public,
            )

        return start

    def _label(self, problem: Problem) -> Callable[[_Attack, Batch, Any], _Attack]:
        bias = problem.trainable[-1]

        def label(a: _Attack, batch: Batch, lr: Any) -> _Attack:  # noqa: ARG001
            if self.labels == "known":
                return a._replace(labels=a.own[:-1])
            # of samples that are all called class 0, the gradient is p̄ − (1, 0, ..., 0)
            zero = torch.zeros(len(a.public), dtype=torch.int64, device=a.public.device)
            known = batch._replace(x=a.public, y=zero, mask=None, piece=None)
            likely = problem.smooth_grad(a.model, known, (bias,))[bias]
            likely = likely + (torch.arange(len(likely), device=likely.device) == 0)
            return a._replace(labels=labels_of(a.target[bias], likely, a.n, self.samples))

        return label

    def _step(self, problem: Problem) -> Callable[[_Attack, Batch, Any], _Attack]:
        def step(a: _Attack, batch: Batch, lr: Any) -> _Attack:  # noqa: ARG001
            each = torch.func.grad_and_value(self.distance(problem, a, batch))
            g, match = map(torch.stack, zip(*[each(a.x[i]) for i in range(self.starts)]))
            g = torch.where(torch.isfinite(g), g, 0.0)
            t = a.step + 1
            first, second = FIRST * a.first + (1 - FIRST) * g, SECOND * a.second + (1 - SECOND) * g * g
            direction = first / (1 - FIRST**t) / ((second / (1 - SECOND**t)).sqrt() + TINY)
            passed = sum((t > share * self.iterations).to(t) for share in DECAYS)
            x = a.x - self.rate * 0.1**passed * a.public.std() * direction
            return a._replace(x=_within(x, a.public), first=first, second=second, match=match, step=t)

        return step

    def distance(self, problem: Problem, a: _Attack, batch: Batch) -> Callable[[Tensor], Tensor]:
        """Return D + a TV as a function of the dummies."""
        names = tuple(a.target)
        mask = (torch.arange(self.samples, device=a.x.device) < a.n).to(a.x.dtype)
        counts = {k: (v != 0).to(v.dtype) for k, v in a.target.items() if self.skips_zeros}

        def of(x: Tensor) -> Tensor:
            dummies = batch._replace(x=x, y=a.labels, mask=mask, piece=None)
            total, u = tree.zeros_like(a.target), a.model
            for _ in range(self.steps):
                g = problem.smooth_grad(u, dummies, names)
                total = {k: total[k] + g[k] for k in names}
                u = {**u, **{k: u[k] - self.lr * g[k] for k in names}}
            total = {k: v * counts[k] if k in counts else v for k, v in total.items()}
            apart = cosine_distance if self.match == "cosine" else squared_distance
            found = apart(total, a.target)
            return found + self.tv * total_variation(x) if self.tv else found

        return of

    # ---- before any work

    def fits(self, watched: Watched) -> None:
        """Refuse what cannot be attacked, or would look safer than it is."""
        name, x, y = watched.algorithm.name, watched.x, watched.y
        field = "measure gradient_inversion"
        if not watched.alike:
            raise check.fail(field, name, "a run without capacity=", "devices hold a part of the model")
        sending = [k for k in watched.problem.trainable if k in watched.like.delta]
        if not sending:
            raise check.fail(field, name, "a method whose clients send a part of the model")
        if watched.like.sums:
            reason = f"clients of {name} send more than the delta, and steps are not along the gradient alone"
            raise check.fail(field, name, "a method such as partita.fedavg(lr=0.1)", reason)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise check.fail(field, "inputs", "one input of real numbers: tokens cannot be searched so")
        if y.is_floating_point() or y.dim() != 1:
            raise check.fail(field, "targets", "a class for each sample")
        if self.tv and x.dim() < 3:
            reason = f"samples of shape {list(x.shape[1:])} have no neighbours"
            raise check.fail(f"{field} tv", self.tv, "0, or data of images", reason)
        if watched.seen > self.samples:
            reason = f"an upload may be made of {watched.seen} samples"
            allowed = f"at least {watched.seen}, or less local work (steps=1 with a small batch)"
            raise check.fail(f"{field} samples", self.samples, allowed, reason)
        if self.labels == "inferred":
            self._refuse_labels(watched, field)
        self._try(watched, field)

    def _refuse_labels(self, watched: Watched, field: str) -> None:
        """Refuse to infer labels where the last bias does not tell them: by its gradient on a sample."""
        bias = watched.problem.trainable[-1]
        told = bias in watched.like.delta and watched.params[bias].dim() == 1
        if told:
            batch = Batch(
                watched.x, watched.y, None, torch.zeros((), dtype=torch.int64, device=watched.y.device)
            )
            g = watched.problem.grad(watched.params, batch, (bias,))[1][bias]
            told = int(g.argmin()) == int(watched.y[0]) and int((g < 0).sum()) == 1
        if not told:
            reason = f"{bias} is not sent, or is no bias of classes"
            raise check.fail(f"{field} labels", "inferred", "'known'", reason)

    def _try(self, watched: Watched, field: str) -> None:
        """Refuse a model whose gradients have no gradients."""
        key = torch.zeros((), dtype=torch.int64, device=watched.y.device)
        assert isinstance(watched.x, Tensor)

        def of(x: Tensor) -> Tensor:
            names = tuple(k for k in watched.problem.trainable if k in watched.like.delta)
            g = watched.problem.smooth_grad(watched.params, Batch(x, watched.y, None, key), names)
            return squared_distance(g, {k: torch.ones_like(v) for k, v in g.items()})

        try:
            torch.func.grad(of)(watched.x)
        except Exception as error:  # any module may fail in its own way
            reason = f"gradients of this model cannot be differentiated: {check.reason(error)}"
            raise check.fail(field, "model", "another model", reason) from error


def _within(x: Tensor, public: Tensor) -> Tensor:
    """Return x with no value beyond those of public samples."""
    return torch.clamp(x, public.min(), public.max())


# ---- what the client has trained on


def _collect(a: _Attack, batch: Any, lr: Any) -> _Attack:  # noqa: ARG001
    """Remember the samples of a batch, or of several, each once."""
    for one in (batch,) if isinstance(batch, Batch) else batch:
        a = _remembered(a, one)
    return a


def _remembered(a: _Attack, batch: Batch) -> _Attack:
    x, y, most = batch.x, batch.y, len(a.labels)
    assert isinstance(x, Tensor)
    places = torch.arange(most, device=x.device)
    same = (x.flatten(1)[:, None] == a.real[:-1].flatten(1)).all(-1) & (y[:, None] == a.own[:-1])
    new = ~(same & (places < a.n)).any(1)
    new = new if batch.mask is None else new & (batch.mask > 0)
    place = torch.where(new, a.n + new.cumsum(0) - 1, most).clamp(max=most)
    where = place.reshape(-1, *(1,) * (x.dim() - 1)).expand(x.shape)
    return a._replace(
        real=a.real.scatter(0, where, x.to(a.real.dtype)),
        own=a.own.scatter(0, place, y),
        n=(a.n + new.sum()).clamp(max=most),
    )


# ---- what comes of it


def _finish(a: _Attack, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
    public, _ = probed(download)
    best = torch.nan_to_num(a.match, nan=torch.inf).argmin()
    found = {"x": a.x[best], "real": a.real[:-1], "labels": a.labels, "own": a.own[:-1], "count": a.n}
    found |= {"guess": public.mean(0), "peak": public.max() - public.min(), "match": a.match[best]}
    return Upload({}, metrics=found), ClientState({}, {})


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
