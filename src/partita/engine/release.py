"""Releases: the server learns sums over a cohort, once in each round, and nothing else.

    total = Σ_i (w_i / w_max) Δ_i ,  Σ_i of `sums` ,  Σ_i of `extra`          each client counts for at most 1
    Δ     = release(total) / E[Σ_i w_i / w_max]

The divisor is a constant, whoever comes: what one client changes is bounded by the length of its upload, and
neither the divisor nor an empty cohort tells who was there. It counts those who report by the chances that
the schedule declares, of cohorts, stragglers and dropout; who misses a deadline, or is away, is not known
before, and counts as if it had reported. Where a coordinate is held by some devices only,
its divisor counts those. A sum over workers, or over chunks of a cohort, is the sum of theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from partita.core import check, draws
from partita.core.parts import Algorithm, Problem, Release, ServerRule, Transform
from partita.core.secret import Secret
from partita.core.types import Message, ServerState, Tensors, Upload
from partita.engine.channel import OWN, Channel, message_of, own_name, told, without_own
from partita.engine.devices.devices import Devices
from partita.engine.execute.cuda.replayed import Replayed

if TYPE_CHECKING:
    from partita.engine.setup import Setup

PARTS = ("delta", "extra", "sums")

TRIED = (1.0, 0.5, 0.25, 0.75, 0.3, 0.9, 0.6, 0.4)
"""Weights of the made-up uploads that show how a method adds up what it is sent."""
LONG = 100.0
"""How much longer than the others the first of them is: what sets outliers aside takes no mean."""


def counts_by_samples(algorithm: Algorithm, problem: Problem, like: Upload, why: str) -> bool:
    """Return whether a method's clients count by samples, or each alike; refuse one that does not add up.

    What it makes of some random uploads, one of them much longer, must be the mean of their deltas and the
    sums of the rest.
    """
    weight = torch.tensor(TRIED, dtype=torch.float64, device=_device(like))
    stacks = [{k: _random(number, k, v) for k, v in part.items()} for number, part in enumerate(like.payload)]
    uploads = Upload(stacks[0], weight, stacks[1], stacks[2], client=torch.arange(len(TRIED)))
    reason = f"{why}: {algorithm.name} with these options does not send its server sums"
    allowed = "a method and an aggregator that take the mean"
    if algorithm.options.get("weighting") == "samples" and any(like.sums):  # sums of all, means by samples
        allowed += ", such as this one with weighting='uniform'"
    refused = check.fail("uploads", algorithm.name, allowed, reason)
    try:
        combined = algorithm.aggregate(problem)(uploads, draws.key(0, "trial", device=weight.device))
    except Exception as error:  # an aggregator that needs more clients, or anything else
        raise refused from error
    for by_samples in (True, False):
        counted = weight if by_samples else torch.ones_like(weight)
        means = {k: _weighted(v, counted) / counted.sum() for k, v in stacks[0].items()}
        beside = [{k: v.double().sum(0) for k, v in stack.items()} for stack in stacks[1:]]
        if all(map(_alike, combined.payload, (means, *beside))):
            return by_samples
    raise refused


def _random(number: int, name: str, like: Tensor) -> Tensor:
    shape = (len(TRIED), *like.shape)
    key = draws.branch(draws.key(number, "trial", device=like.device), name)
    stack = draws.normal(draws.places(key, shape))
    stack[0] *= LONG
    return stack.to(like.dtype)


def _weighted(stack: Tensor, weight: Tensor) -> Tensor:
    total: Tensor = torch.tensordot(weight, stack.double(), 1)
    return total


def _alike(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        torch.allclose(found[k].double(), expected[k], rtol=1e-2, atol=1e-3) for k in found
    )


def _device(like: Upload) -> torch.device:
    return next((x.device for part in like.payload for x in part.values()), torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class Counts:
    """How much clients count in a sum, and what is expected of a round.

    most      w_max, where clients count by samples (None: each counts for 1)
    expected  what those who report in a round count together on average, and how many `clients` they are
    held      what of it holds a coordinate, by name, where not all hold all of a tensor
    members   the share of all clients that holds a coordinate, by name, where not all hold all of a tensor
    """

    most: float | None
    expected: float
    clients: float
    held: Tensors
    members: Tensors

    @classmethod
    def of(
        cls, samples: np.ndarray, chances: np.ndarray, by_samples: bool, cap: float | None, devices: Devices
    ) -> Counts:
        """Return the counts of clients with so many samples, each of whom reports with this chance.

        Where less than one reports on average, sums are divided as if one did.
        """
        few = chances.sum() < 1
        chances = (chances + 1e-9) / (chances + 1e-9).sum() if few else chances
        most = float(cap or samples.max(initial=1)) if by_samples else None
        counted = (samples > 0).astype(np.float64) if most is None else np.minimum(samples, most) / most
        held: Tensors = {}
        members: Tensors = {}
        for region in () if devices.alike else devices.regions:
            holds = np.isin(devices.class_of, list(region.classes))
            values = (chances * counted)[holds].sum(), holds.mean()
            for name, columns in region.columns.items():
                for found, value in zip((held, members), values):
                    whole = found.setdefault(name, torch.zeros(devices.full[name]).reshape(-1))
                    whole[slice(None) if columns is None else columns.cpu()] = float(value)
        shaped = [{k: v.reshape(devices.full[k]) for k, v in found.items()} for found in (held, members)]
        return cls(most, float((chances * counted).sum()), float(chances.sum()), *shaped)


@dataclass(frozen=True, eq=False)
class Releases:
    """What one of the transforms releases of a stage's uploads.

    transform  the one that releases, and `number` its place among them
    like       what a client sends that holds the whole model
    seed       of the run, or the secret of its server
    counts     how much clients count
    purpose    what its draws are for: those of a baseline are others than those of the run
    """

    transform: Transform
    number: int
    like: Upload
    seed: int
    counts: Counts
    purpose: str = "release"
    replayed: Replayed = field(default_factory=lambda: Replayed("what a server releases"))

    def totals(self, uploads: Upload, key: Tensor) -> Upload:  # noqa: ARG002 (an aggregation has one)
        """Return the sums over stacked uploads, all in `extra`, which adds up over parts of a cohort."""
        assert uploads.weight is not None
        most = self.counts.most
        counted = (uploads.weight > 0).double() if most is None else uploads.weight / most
        sums: Tensors = {}
        for part, stacks in zip(PARTS, uploads.payload):
            weight = counted if part == "delta" else torch.ones_like(counted)
            for name, stack in stacks.items():
                sums[f"{part}.{name}"] = _summed(weight.to(stack), stack)
        return Upload({}, counted.sum(), sums)

    def nothing(self) -> Upload:
        """Return the sums over nobody: they are released, too."""
        pairs = [(f"{p}.{k}", v) for p, like in zip(PARTS, self.like.payload) for k, v in like.items()]
        return Upload({}, torch.zeros((), dtype=torch.float64), {k: torch.zeros_like(v) for k, v in pairs})

    def step(self, rule: ServerRule, server: ServerState, upload: Upload) -> ServerState:
        """Release the sums of a round, and let the method's own server act on what that leaves."""
        key = draws.key(self.seed, self.purpose, server.version, self.number, device=_device(self.like))
        if isinstance(self.seed, Secret):  # the host draws
            return self._step(rule, server, upload, key)
        stepped: ServerState = self.replayed.function(self._step, rule, server, upload, key)
        return stepped

    def _step(self, rule: ServerRule, server: ServerState, upload: Upload, key: Tensor) -> ServerState:
        total, sent = self._of_method(upload)
        release = Release(
            total=total,
            sent=sent,
            public=told(self.number, server.extra),
            secret=told(self.number, server.opt),
            key=key,
            normal=functools.partial(self._normal, key, server.version),
            expected=self.counts.expected,
            clients=self.counts.clients,
        )
        assert self.transform.release is not None
        total, public, secret = self.transform.release(release)
        delta = {k: _over(v, self.counts.held.get(k), self.counts.expected) for k, v in total.delta.items()}
        sums = {k: _over(v, self.counts.members.get(k), 1.0) for k, v in total.sums.items()}
        weight = torch.tensor(self.counts.expected, dtype=torch.float64)
        after = rule.step(_without(server), Upload(delta, weight, total.extra, sums))
        extra = {**_kept(server.extra), **{own_name(self.number, k): v for k, v in public.items()}}
        opt = {**_kept(server.opt), **{own_name(self.number, k): v for k, v in secret.items()}}
        return after._replace(extra={**after.extra, **extra}, opt={**after.opt, **opt})

    def _normal(self, key: Tensor, version: int, name: str, shape: Sequence[int]) -> Tensor:
        """Return standard normal numbers of this release."""
        if isinstance(self.seed, Secret):
            drawn = self.seed.normal64(f"{self.purpose} {name}", (version, self.number), shape)
            return drawn.to(key.device)
        return draws.normal64(draws.places(draws.branch(key, name), shape))

    def _of_method(self, upload: Upload) -> tuple[Upload, Tensors]:
        """Return the sums of what the method sends, and those of what the transform has added."""
        parts = [
            {k.removeprefix(f"{part}."): v for k, v in upload.extra.items() if k.startswith(f"{part}.")}
            for part in PARTS
        ]
        delta, extra, sums = parts
        return Upload(delta, upload.weight, without_own(extra), sums), told(self.number, extra)


def _summed(weight: Tensor, stack: Tensor) -> Tensor:
    """Return Σ_i w_i x_i, in which no x_i is longer than it was.

    A product of matrices may round its factors to 10 bits (TF32), and so an upload to beyond the clip.
    """
    rows = stack.reshape(len(stack), -1)
    exact = stack.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
    total = weight[None] @ rows if exact else (weight[:, None] * rows).sum(0)
    return total.reshape(stack.shape[1:])


def serving(
    rule: ServerRule, transforms: Sequence[Transform], like: Upload, releases: Releases | None
) -> ServerRule:
    """Return the server's rule, which also keeps what transforms tell clients and what they remember."""
    begun = {i: t.begin(like) for i, t in enumerate(transforms) if t.begin is not None}
    if not begun and releases is None:
        return rule

    def init(shared: Tensors) -> ServerState:
        server = rule.init(shared)
        extra = {own_name(i, k): v for i, (public, _) in begun.items() for k, v in public.items()}
        opt = {own_name(i, k): v for i, (_, secret) in begun.items() for k, v in secret.items()}
        return server._replace(extra={**server.extra, **extra}, opt={**server.opt, **opt})

    def step(server: ServerState, upload: Upload) -> ServerState:
        if releases is not None:
            return releases.step(rule, server, upload)
        after = rule.step(_without(server), upload)
        extra, opt = {**after.extra, **_kept(server.extra)}, {**after.opt, **_kept(server.opt)}
        return after._replace(extra=extra, opt=opt)

    return rule._replace(init=init, step=step)


def _over(total: Tensor, by_place: Tensor | None, everywhere: float) -> Tensor:
    """Return a sum over its divisor; of what no device holds nothing is said."""
    if by_place is None:
        return total / everywhere
    by_place = by_place.to(total)
    return torch.where(by_place > 0, total / by_place.clamp(min=torch.finfo(total.dtype).tiny), 0.0)


def _without(server: ServerState) -> ServerState:
    """Return what the method itself keeps at the server."""
    return server._replace(extra=without_own(server.extra), opt=without_own(server.opt))


def _kept(tensors: Tensors) -> Tensors:
    return {k: v for k, v in tensors.items() if k.startswith(OWN)}


def releases_of(
    setup: Setup, number: int, algorithm: Algorithm, problem: Problem, channel: Channel
) -> Releases | None:
    """Return what is released of the sums in a stage; None where no transform releases."""
    found = [(i, t) for i, t in enumerate(channel.uploads.transforms) if t.release is not None]
    if not found:
        return None
    place, transform = found[0]
    if algorithm.mixes:
        reason = f"{transform.name}: {algorithm.name} counts models, of which no bound is known"
        raise check.fail("uploads", algorithm.name, "a method whose clients send differences", reason)
    own = channel.like._replace(extra=without_own(channel.like.extra))
    _check_covered(transform, algorithm, message_of(own, channel.statistics))
    by_samples = counts_by_samples(algorithm, problem, own, transform.for_sums or transform.name)
    samples, chances = setup.data.train[:, 1], setup.reporting(number)
    counts = Counts.of(samples, chances, by_samples, transform.weight_cap, setup.devices)
    purpose = f"release of {setup.baseline}" if setup.baseline else "release"
    return Releases(transform, place, channel.like, setup.noise_seed, counts, purpose)


def _check_covered(transform: Transform, algorithm: Algorithm, message: Message) -> None:
    """Refuse a method that sends more than directions: of the rest no bound is known."""
    if statistics := [path for path in message.rest if not path.startswith("extra.")]:
        name = statistics[0].partition(".")[2]
        reason = f"{transform.name} does not cover {name}, which clients send with the model"
        raise check.fail("norm", "global", "'personal', or a model with GroupNorm or LayerNorm", reason)
    if message.rest:
        names = ", ".join(path.partition(".")[2] for path in message.rest)
        reason = f"{transform.name} does not cover {names}, which clients of {algorithm.name} send as well"
        raise check.fail("uploads", algorithm.name, "a method that sends changes of the model alone", reason)
