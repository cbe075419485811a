"""Who is chosen among the clients that are idle and available, by what the server knows of them.

    by_size           P(i is chosen) = min(1, c n_i)      with c so that the cohort has its size; n_i: samples
    by_loss           P(i is chosen) = min(1, c F_i^a)    F_i: the loss that client i last reported
    power_of_choice   draw d candidates by their samples n_i, and take those with the largest loss
    least_chosen      those who were chosen least often; among equals by chance

The mean of a cohort `by_size` in which clients count equally is an unbiased estimate of the mean over all
clients by samples; one by samples would count them twice. Choosing by loss is biased on purpose: to clients
for whom the model is bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from partita.core import check
from partita.core.options import Option, checked
from partita.schedule.known import Known

ALLOWED_CHOICE = "a choice such as partita.schedule.power_of_choice(d=20), or a function (known, count, rng)"
LOSSES = ("now", "last")


class Choice(Protocol):
    """A function that chooses clients: whatever is random in it comes from `rng`."""

    def __call__(
        self, known: Known, count: int, rng: np.random.Generator, /
    ) -> Sequence[int] | NDArray[np.int64]:
        """Return from 1 to `count` of `known.candidates`."""
        ...


def checked_choice(field: str, value: Any) -> Any:
    """Return a function that takes what is known, how many to choose and a generator of random numbers."""
    return check.takes(field, value, 3, ALLOWED_CHOICE)


@checked("by_size ")
@dataclass(frozen=True)
class BySize:
    """Choose clients in proportion to their training samples; clients without any are never chosen.

    Use it with `weighting="uniform"`: then the large clients count by being there, and each upload equally.
    """

    by_samples = True

    def __call__(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        clients = _with_samples(known)
        return clients[proportional(known.samples[clients], count, rng)]


@checked("by_loss ")
@dataclass(frozen=True)
class ByLoss:
    """Choose clients in proportion to the training loss that they last reported.

    Clients that were never chosen count like the largest loss, those that never succeeded to report like the
    mean.

    Use it to let clients train more often for whom the model is still bad.
    """

    power: Annotated[float, Option("the loss counts to this power: 0 is by chance", low=0, high=100)] = 1.0

    def __call__(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        clients = known.candidates
        largest = float(np.fmax.reduce(known.loss, initial=0.0)) or 1.0
        loss = np.maximum(last_losses(known, clients, new=largest), 0.0)
        weights = (loss / max(loss.max(), np.finfo(float).tiny)) ** self.power
        return clients[proportional(weights, count, rng)]


@checked("power_of_choice ")
@dataclass(frozen=True)
class PowerOfChoice:
    """Draw d candidates in proportion to their samples, and take those with the largest loss.

    Cho, Wang, Joshi: *Towards Understanding Biased Client Selection in Federated Learning* (2022). Its pow-d
    asks the candidates for their loss under the present model, its cpow-d for that of some drawn samples
    (`samples=`), and its rpow-d uses what each reported last (`losses="last"`), those first who never
    reported: it costs nothing, and may follow losses that are old. The paper counts the chosen ones equally:
    `weighting="uniform"`.

    Use it to converge in fewer rounds where clients differ in how hard their data are.
    """

    d: Annotated[int, Option("candidates that are drawn: from the cohort up to all", low=1, example=10)]
    losses: Annotated[
        str,
        Option(
            "what they answer when they are asked now, which costs a download and an evaluation; or what "
            "they have last reported while they trained",
            choices=LOSSES,
        ),
    ] = "now"
    samples: Annotated[
        int | None, Option("drawn samples of a candidate that it evaluates when asked (None: all)", low=1)
    ] = None
    by_samples = True

    def __post_init__(self) -> None:
        if self.samples is not None and self.losses == "last":
            raise check.fail(
                "power_of_choice samples", self.samples, "None with losses='last', where nobody is asked"
            )

    @property
    def asks(self) -> bool:
        """Whether candidates are asked, which only a synchronous server can wait for."""
        return self.losses == "now"

    def check(self, clients: int, cohort: int) -> None:
        check.integer("power_of_choice d", self.d, low=cohort, high=clients)

    def __call__(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        clients = _with_samples(known)
        share = np.maximum(known.samples[clients], 1) / np.maximum(known.samples[clients], 1).sum()
        drawn = rng.choice(clients, min(max(self.d, count), len(clients)), replace=False, p=share)
        loss = known.ask(drawn, self.samples) if self.asks else last_losses(known, drawn, new=np.inf)
        order = np.lexsort((rng.random(len(drawn)), -loss))  # ties by chance; who has left (NaN) comes last
        return drawn[order[:count]]


@checked("least_chosen ")
@dataclass(frozen=True)
class LeastChosen:
    """Choose those who were chosen least often so far; among equals by chance.

    Use it where clients are available now and then, and all shall take part about equally often.
    """

    def __call__(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        clients = known.candidates
        turns = known.chosen[clients] + rng.random(len(clients))  # among equals by chance
        return clients[np.argpartition(turns, count - 1)[:count]]


by_size, by_loss, power_of_choice, least_chosen = BySize, ByLoss, PowerOfChoice, LeastChosen


# ---- what choices have in common


def proportional(weights: NDArray[Any], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return `count` places, drawn so that place i is among them with probability min(1, c w_i).

    Madow's systematic sampling of a random order: u, u + 1, u + 2, ... on a line on which place i is as long
    as its probability. Who would have more than 1 is certain, and the others share what is left; where all
    that is left has weight 0, chance decides.
    """
    w = np.asarray(weights, dtype=np.float64)
    taken = np.zeros(len(w), dtype=bool)
    count = min(count, len(w))
    while (left := count - int(taken.sum())) > 0:
        rest = np.where(taken, 0.0, w)
        total = rest.sum()
        if not total > 0:
            others = np.flatnonzero(~taken)
            taken[rng.choice(others, left, replace=False)] = True
            break
        certain = ~taken & (rest * left >= total)
        if not certain.any():
            order = rng.permutation(np.flatnonzero(rest > 0))
            ends = np.cumsum(rest[order]) * (left / total)
            marks = rng.random() + np.arange(left)
            taken[order[np.minimum(np.searchsorted(ends, marks, side="right"), len(order) - 1)]] = True
            break
        taken |= certain
    return np.flatnonzero(taken)


def last_losses(known: Known, clients: NDArray[np.int64], new: float) -> NDArray[np.float64]:
    """Return the losses that clients last reported; `new` where one was never chosen.

    One that was chosen and whose upload never counted has the mean: else it would be chosen again and again.
    """
    if known.seen.any() and np.isnan(known.loss).all():
        reason = "the clients of this method report no training loss"
        raise check.fail("choose", check.MISSING, "a choice that needs none, such as by_size()", reason)
    loss = known.loss[clients]
    reported = known.loss[~np.isnan(known.loss)]
    failed = float(reported.mean()) if len(reported) else new
    return np.where(np.isnan(loss), np.where(known.chosen[clients] > 0, failed, new), loss)


def _with_samples(known: Known) -> NDArray[np.int64]:
    """Return the candidates that have samples; all where none has."""
    clients = known.candidates[known.samples[known.candidates] > 0]
    return clients if len(clients) else known.candidates


def chosen_by(choice: Choice, known: Known, count: int, rng: np.random.Generator) -> list[int]:
    """Return whom a choice has chosen; refuse what is no choice."""
    count = min(count, len(known.candidates))
    value = choice(known, count, rng)
    allowed = f"from 1 to {count} different client numbers, each one of known.candidates"
    try:
        chosen = np.asarray(value)
    except ValueError:  # lists of different lengths
        chosen = np.asarray(None)
    if chosen.ndim != 1 or (len(chosen) and not np.issubdtype(chosen.dtype, np.integer)):
        raise check.fail("choose", value, allowed, "the function returned no list of client numbers")
    if not 1 <= len(chosen) <= count:
        raise check.fail("choose", value, allowed, f"the function returned {len(chosen)} clients")
    if len(np.unique(chosen)) < len(chosen):
        raise check.fail("choose", value, allowed, "the function returned a client twice")
    wrong = chosen[~np.isin(chosen, known.candidates)]
    if len(wrong):
        reason = f"the function returned clients that are busy, away or none: {wrong[:5].tolist()}"
        raise check.fail("choose", value, allowed, reason)
    numbers: list[int] = chosen.tolist()
    return numbers
