"""A schedule chooses: what the server knows is put together, and the choice is asked for clients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws
from partita.core.types import ServerState
from partita.schedule.base import StageSpec
from partita.schedule.choice import Choice, chosen_by
from partita.schedule.clock import Clock, Event
from partita.schedule.known import Known, Losses
from partita.schedule.presence import idle_clients

MOST_QUESTIONS = 8
"""How often a server asks for losses in one round, if whoever it chooses by them has left meanwhile."""


def chosen(
    choice: Choice, spec: StageSpec, clock: Clock, version: int, count: int, draw: int, ask: Losses
) -> list[int]:
    """Return so many idle and available clients, or fewer: the draw of this number.

    `version` is the server's, and `ask` asks clients for the loss of its model. That takes time, in which
    some may leave: if all who were chosen have left, others who are there now are asked.
    """
    if spec.facts is None:
        raise check.fail("choose", choice, "a schedule without choose= where nobody trains")
    rng = draws.generator(spec.seed, "choice", draw)
    for _ in range(MOST_QUESTIONS):
        candidates = clock.there(idle_clients(spec.clients, clock.busy))
        if not len(candidates):
            break
        known = Known(version, clock.now, candidates, *spec.facts(), ask)
        stayed: list[int] = clock.there(np.array(chosen_by(choice, known, count, rng))).tolist()
        if stayed:
            return stayed
    return []


def wait_for_answers(
    clock: Clock, server: ServerState, clients: Sequence[int], steps: Sequence[int], informed: Collection[int]
) -> None:
    """Let clients download the server's model and evaluate it, for so many steps; wait for all answers.

    An answer is a number, which takes no time to send. Who is `informed` has the model already.
    """
    event, longest = Event(server.version).number, 0.0
    for client, n in zip(clients, steps):
        download, compute, _ = clock.delays.parts(clock.seed, event, client, n)
        longest = max(longest, (0.0 if client in informed else download) + compute)
    downloads = [client for client in clients if client not in informed]
    clock.asked += len(clients)
    clock.traffic += clock.download_bytes((server.shared, server.extra), downloads)
    clock.wait(clock.now + longest)


def nobody_waits(clients: NDArray[np.int64], samples: int | None) -> NDArray[np.float64]:
    """Refuse a question where the server cannot wait for answers."""
    question = f"{len(clients)} clients, {samples or 'all'} samples"
    allowed = "synchronous(), whose server can wait for answers"
    raise check.fail("known.ask", question, allowed)
