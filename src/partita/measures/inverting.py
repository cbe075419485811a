"""The server at work: gradient inversion of one client's upload, as a rule that runs for many at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.core import check, draws, tree
from partita.core.parts import Algorithm, LocalRule, Phase, Problem, Watched
from partita.core.types import Batch, ClientState, Download, Tensors, Upload, Work
from partita.measures.probe import probed
from partita.measures.sent import made, sent, unseen
from partita.privacy.inversion import cosine_distance, labels_of, squared_distance, total_variation

FIRST, SECOND, TINY = 0.9, 0.999, 1e-8  # of Adam
DECAYS = (3 / 8, 5 / 8, 7 / 8)  # of the iterations: then the step size falls to a tenth


class Attack(NamedTuple):
    """The server at work on one client.

    model, target  where gradients are taken, and what they are to match
    x, first, second, match, step  dummies of each start, the moments of Adam, D, how many steps were taken
    labels         those that the server takes the dummies to have
    real, own      the samples that the client has trained on and their labels, for the count of what was
                   found; one row more, which holds what has no place
    n              how many there are, of which the server knows
    public         samples that the server has
    inner, given   the client's own work, which is done again to see which samples are behind the upload
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
    inner: Any
    given: tuple[Download, ClientState]


@dataclass(frozen=True)
class Inversion:
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
    knows_personal: bool

    def client(self, problem: Problem, algorithm: Algorithm) -> LocalRule:
        """Return the attack on one client: collect what it has trained on, infer labels, then search."""
        rule = algorithm.local(problem)
        phases = [_replayed(rule, phase) for phase in rule.phases]
        once, often = (Work(steps=n, batch=1, shuffle=False) for n in (1, self.iterations))
        phases += [
            Phase(self._label(problem), work=lambda now: once),  # noqa: ARG005
            Phase(self._step(problem), work=lambda now: often),  # noqa: ARG005
        ]
        return LocalRule(self._start(problem, rule), tuple(phases), _finish)

    def _start(self, problem: Problem, rule: LocalRule) -> Callable[[Download, ClientState], Attack]:
        most = self.samples

        def start(download: Download, state: ClientState) -> Attack:
            public, received = probed(download)
            seen, received = sent(download), unseen(received)
            personal = state.personal if self.knows_personal else problem.initial
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
            return Attack(
                model={**personal, **download.shared},
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
                inner=rule.start(received, state),
                given=(received, state),
            )

        return start

    def _label(self, problem: Problem) -> Callable[[Attack, Batch, Any], Attack]:
        bias = problem.trainable[-1]

        def label(a: Attack, batch: Batch, lr: Any) -> Attack:  # noqa: ARG001
            if self.labels == "known":
                return a._replace(labels=a.own[:-1])
            # of samples that are all called class 0, the gradient is p̄ − (1, 0, ..., 0)
            zero = torch.zeros(len(a.public), dtype=torch.int64, device=a.public.device)
            known = batch._replace(x=a.public, y=zero, mask=None, piece=None)
            likely = problem.smooth_grad(a.model, known, (bias,))[bias]
            likely = likely + (torch.arange(len(likely), device=likely.device) == 0)
            return a._replace(labels=labels_of(a.target[bias], likely, a.n, self.samples))

        return label

    def _step(self, problem: Problem) -> Callable[[Attack, Batch, Any], Attack]:
        def step(a: Attack, batch: Batch, lr: Any) -> Attack:  # noqa: ARG001
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

    def distance(self, problem: Problem, a: Attack, batch: Batch) -> Callable[[Tensor], Tensor]:
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
        if not any(watched.like.payload):
            return  # nothing leaves a client
        if not any(k in watched.like.delta for k in watched.problem.trainable):
            reason = f"clients of {name} send no part of the model, and what else they send is not attacked"
            raise check.fail(field, name, "a method such as partita.fedavg(lr=0.1)", reason)
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


def _replayed(rule: LocalRule, phase: Phase) -> Phase:
    """Return a phase of the client's work that also remembers the samples of steps that move what is sent."""

    def step(a: Attack, batch: Any, lr: Any) -> Attack:
        inner = phase.step(a.inner, batch, lr)
        before, after = (rule.finish(c, *a.given)[0].delta for c in (a.inner, inner))
        moved = torch.stack([(after[k] != v).any() for k, v in before.items()]).any()
        for one in (batch,) if isinstance(batch, Batch) else batch:
            a = _remembered(a, one, moved)
        return a._replace(inner=inner)

    ends = phase.until
    return phase._replace(step=step, until=None if ends is None else lambda a: ends(a.inner))


def _remembered(a: Attack, batch: Batch, moved: Tensor) -> Attack:
    """Add the samples of a batch, each once."""
    x, y, most = batch.x, batch.y, len(a.labels)
    assert isinstance(x, Tensor)
    places = torch.arange(most, device=x.device)
    same = (x.flatten(1)[:, None] == a.real[:-1].flatten(1)).all(-1) & (y[:, None] == a.own[:-1])
    new = moved & ~(same & (places < a.n)).any(1)
    new = new if batch.mask is None else new & (batch.mask > 0)
    place = torch.where(new, a.n + new.cumsum(0) - 1, most).clamp(max=most)
    where = place.reshape(-1, *(1,) * (x.dim() - 1)).expand(x.shape)
    return a._replace(
        real=a.real.scatter(0, where, x.to(a.real.dtype)),
        own=a.own.scatter(0, place, y),
        n=(a.n + new.sum()).clamp(max=most),
    )


def _finish(a: Attack, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
    public, _ = probed(download)
    best = torch.nan_to_num(a.match, nan=torch.inf).argmin()
    found = {"x": a.x[best], "real": a.real[:-1], "labels": a.labels, "own": a.own[:-1], "count": a.n}
    found |= {"guess": public.mean(0), "peak": public.max() - public.min(), "match": a.match[best]}
    return Upload({}, metrics=found), ClientState({}, {})
