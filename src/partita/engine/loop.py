"""The loop: one round, on one screen. Nothing else knows the order of things."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from partita.core import draws, tree
from partita.core.types import ClientState, Cohort, Group, RoundContext, ServerState, Tensors, Upload
from partita.engine.cohorts import (
    as_one_group,
    chunks_of,
    discounted,
    merged,
    rebased,
    refuse_twice,
)
from partita.engine.execute.plan import progress_of
from partita.engine.lockstep.member import Following
from partita.engine.look import kept
from partita.engine.pending import Trained
from partita.engine.screen import screen
from partita.engine.stage import Stage
from partita.engine.state import State
from partita.engine.store import MemoryStore
from partita.engine.workers.share import Assignment

WORK_AHEAD = ("cuda",)  # devices that work while the host goes on
ANSWER_BYTES = 4  # of a client that is asked for its loss


class Round(NamedTuple):
    """What happened in a round.

    uploads     what the clients of the cohort sent
    rejections  for each of them, why its upload was set aside ('': it was not)
    bytes_up    bytes that they uploaded
    notes       what the aggregator says
    abandoned   whether the server took no step, for want of usable uploads
    """

    cohort: Cohort
    uploads: Upload
    rejections: list[str]
    bytes_up: int
    notes: Tensors
    seconds: float
    abandoned: bool


class Chunk(NamedTuple):
    """What a chunk of a cohort sent, and the states that wait until it is known whether the round counts.

    Where deltas are added up as they come, `sum` is what those of the chunk were combined to.
    """

    uploads: Upload
    rejections: list[str]
    bytes_up: int
    states: tuple[list[int], ClientState] | None = None
    sum: Upload | None = None


NOBODY = Chunk(Upload({}), [], 0)


def one_round(stage: Stage, state: State) -> Round:
    """Let a cohort train, and the server act on what it sends."""
    begin = state.timer.clock()
    stage.release(state.server)  # what the last round computed is used up
    with state.timer("cohort"):  # who reports now, and what each had downloaded
        cohort = stage.channel.downloaded(state.schedule.next(state.server))
    if len(set(cohort.clients)) < len(cohort.clients):
        refuse_twice(cohort, stage.setup.data.names)
    if cohort.late:
        state.pending.drop(cohort.late)
    _read_ahead(stage, state, cohort)
    in_shares = _sums_come_back(stage, state, cohort)
    adds_up = in_shares or (stage.adds_up and len(cohort.clients) > stage.limits.deltas_in_memory)
    train = _train_shares if in_shares else _train_chunk
    chunks = [
        train(stage, state, chunk, cohort.quorum, number if adds_up else None)
        for number, chunk in enumerate(_chunks(stage, cohort, adds_up and not in_shares))
    ] or [NOBODY]
    uploads, rejections = tree.cat([c.uploads for c in chunks]), [r for c in chunks for r in c.rejections]
    if stage.setup.settings.attack is not None:
        with state.timer("screening"):  # Byzantine clients act; what is unusable is set aside with its reason
            uploads, rejections = screen(uploads, rejections, _forged(stage, state, cohort, uploads))
    usable = _rows(_discounted(stage, state, cohort, uploads), rejections)
    combined = None
    if rejections.count("") >= max(1, cohort.quorum):  # else the round is abandoned: only the version goes on
        sums = [c.sum for c in chunks if c.sum is not None]
        combined = merged(sums) if adds_up else _aggregate(stage, state, usable)
        for states in [c.states for c in chunks if c.states is not None]:
            state.save(*states)
    if combined is None and stage.releases is not None:
        combined = stage.releases.nothing()  # what is released must not tell whether anybody came
    state.server, notes = _server_step(stage, state, usable, combined)
    bytes_up = sum([c.bytes_up for c in chunks]) + ANSWER_BYTES * cohort.asked
    seconds, abandoned = state.timer.clock() - begin, combined is None
    return Round(cohort, uploads, rejections, bytes_up, notes, seconds, abandoned)


def _chunks(stage: Stage, cohort: Cohort, adds_up: bool = False) -> Iterable[Cohort]:
    """Cut a cohort into chunks that fit: one, unless states, or deltas that add up, are many or large."""
    limits = stage.limits
    most = min(limits.clients_per_block, limits.deltas_in_memory) if adds_up else limits.clients_per_block
    if len(cohort.clients) > most:
        return chunks_of(cohort, most)
    return [cohort] if cohort.clients else []


def _train_chunk(stage: Stage, state: State, cohort: Cohort, quorum: int, chunk: int | None) -> Chunk:
    """Train some clients at once; where they are a numbered `chunk`, keep only the sum of their deltas.

    With a quorum, their new states wait until all have trained: too many uploads may yet be set aside.
    """
    uploads, states, rejections = _arriving(stage, state, cohort)
    bytes_up = stage.bytes_sent(uploads)
    result = _keep(stage, state, cohort, quorum, Chunk(uploads, rejections, bytes_up), states)
    if chunk is None:
        return result
    usable = _rows(_discounted(stage, state, cohort, uploads), rejections)
    kept = uploads._replace(delta={}, extra={}, sums={})
    result = result._replace(uploads=kept, sum=_aggregate(stage, state, usable, chunk))
    stage.release((state.server, result))
    return result


def _keep(
    stage: Stage, state: State, cohort: Cohort, quorum: int, chunk: Chunk, states: ClientState
) -> Chunk:
    """Save the new states of clients whose uploads are usable; with a quorum, let them wait."""
    if not stage.keeps_state:
        return chunk
    clients = [c for c, rejection in zip(cohort.clients, chunk.rejections) if not rejection]
    states = _rows(states, chunk.rejections)
    if quorum > 1:
        return chunk._replace(states=(clients, tree.to(states, stage.limits.store_device)))
    state.save(clients, states)
    return chunk


def _sums_come_back(stage: Stage, state: State, cohort: Cohort) -> bool:
    """Return whether workers add up what the clients of their shares send: nobody needs a single delta."""
    if stage.spread is None or not stage.adds_up or any(cohort.staleness) or state.pending:
        return False
    return state.schedule.discount(0) == 1.0 and not state.schedule.in_flight().clients


def _train_shares(stage: Stage, state: State, cohort: Cohort, quorum: int, chunk: int | None) -> Chunk:
    """Train some clients in shares, of each of which only the sum of the deltas comes back."""
    assert stage.spread is not None
    group, context = _received(stage, state, cohort)
    assignment = Assignment(np.asarray(cohort.clients), group, state.load(stage, cohort.clients), context)
    with state.timer("steps"):
        found = stage.spread.summed(stage, assignment, _aggregation_key(stage, state, chunk))
    uploads, states, rejections = found.trained
    result = Chunk(uploads, rejections, found.bytes_up, sum=found.sum)
    return _keep(stage, state, cohort, quorum, result, states)


def _arriving(stage: Stage, state: State, cohort: Cohort) -> Trained:
    """Return what these clients send now; whoever is in flight trains with those who have not yet."""
    pending = state.pending
    if any(client not in pending for client in cohort.clients):
        in_flight = stage.channel.downloaded(state.schedule.in_flight())
        if not pending and not in_flight.clients:  # synchronous: nobody else is at work
            return _trained(stage, state, cohort)
        for chunk in _chunks(stage, pending.untrained(cohort, in_flight)):
            pending.add(chunk.clients, _trained(stage, state, chunk))
            stage.release(state.server)
    arriving = pending.take(cohort.clients)
    return arriving._replace(uploads=_with_sender(stage, arriving.uploads, cohort.clients))


def _trained(stage: Stage, state: State, cohort: Cohort) -> Trained:
    """Train these clients, and find out whose result is unusable."""
    uploads, states = execute(stage, state, cohort)
    with state.timer("screening"):
        look = stage.look(uploads, states)
    _prefetch(stage, state, cohort)
    with state.timer("steps"):  # a device may still be at work on them
        seen = look.read()
    with state.timer("screening"):
        n = len(cohort.clients)
        rejections = [""] * n if seen.sound else tree.examined(uploads, kept(uploads, states), n)
    return Trained(uploads._replace(metrics=seen.metrics), states, rejections)


def execute(stage: Stage, state: State, cohort: Cohort) -> tuple[Upload, ClientState]:
    """Run the method's local rule for every client of the cohort, as one batch."""
    group, context = _received(stage, state, cohort)
    states = state.load(stage, cohort.clients)
    stage.expect(lambda: _following(stage, state, cohort))
    with state.timer("steps"):
        training, clients = stage.programs["training"], np.asarray(cohort.clients)
        uploads, states = stage.executor(training, clients, group, states, context)
    if uploads.client is None:  # else the executor has told already
        uploads = _with_sender(stage, uploads, cohort.clients)
    return uploads, states


def _received(stage: Stage, state: State, cohort: Cohort) -> tuple[Group, RoundContext]:
    """Return the clients of a cohort as one group, and when they received what."""
    contexts = [state.context(stage, group) for group in cohort.groups]
    group, context = (
        (cohort.groups[0], contexts[0]) if len(contexts) == 1 else as_one_group(cohort.groups, contexts)
    )
    return group, context._replace(progress=progress_of(cohort))


def _with_sender(stage: Stage, uploads: Upload, clients: Sequence[int]) -> Upload:
    return tree.with_sender(uploads, clients, stage.setup.data.train[:, 1], stage.setup.settings.device)


def _upcoming(state: State) -> Sequence[int]:
    """Return who comes after this cohort, as far as the schedule can tell; a user's may not."""
    upcoming = getattr(state.schedule, "upcoming", None)
    return () if upcoming is None else upcoming(state.server)


def _read_ahead(stage: Stage, state: State, cohort: Cohort) -> None:
    """Fetch the states of those who come next from the disk while these train; theirs will be new ones."""
    if stage.keeps_state and not isinstance(state.store, MemoryStore):
        with state.timer("states"):
            here = set(cohort.clients)
            state.store.prefetch([c for c in _upcoming(state) if c not in here])


def _prefetch(stage: Stage, state: State, cohort: Cohort) -> None:
    """Draw the next cohort's samples while a GPU works on this one; in lockstep, that is done for all."""
    following = None if stage.in_lockstep else _following(stage, state, cohort)
    if following is not None:
        with state.timer("steps"):
            stage.executor.prefetch(stage.programs["training"], *following)


def _following(stage: Stage, state: State, cohort: Cohort) -> Following | None:
    """Return who trains after this cohort, and when, where it pays to draw their samples now.

    Nobody knows their stragglers yet. Samples that are kept elsewhere are read, and sent, at the same time.
    """
    version = state.server.version + 1
    last = version >= state.stage_start + (stage.plan.rounds or 0)
    straggling = any(group.progress for group in cohort.groups)
    data = stage.setup.data
    incomplete = straggling or cohort.late or cohort.lost  # the next one may be so, too
    if last or incomplete or (data.device.type not in WORK_AHEAD and not data.elsewhere):
        return None
    with state.timer("cohort"):
        upcoming = np.asarray(_upcoming(state), dtype=np.int64)
    if not len(upcoming):
        return None
    return upcoming, state.context(stage)._replace(round=version, stage_round=version - state.stage_start)


def _forged(stage: Stage, state: State, cohort: Cohort, uploads: Upload) -> dict[int, Any]:
    """Return what the Byzantine clients of a cohort send in place of what they computed, by position."""
    setup, attack = stage.setup, stage.setup.settings.attack
    positions = tuple(i for i, client in enumerate(cohort.clients) if not setup.honest[client])
    if attack is None or attack.forge is None or not positions:
        return {}
    key = draws.key(setup.settings.seed, "attack", state.server.version, device=setup.settings.device)
    sent = setup.devices.forge(attack.forge)(uploads, positions, key)
    return {i: sent[i] for i in positions if i in sent}  # nobody else's


def _discounted(stage: Stage, state: State, cohort: Cohort, uploads: Upload) -> Upload:
    """Scale each delta by how much its age lets it count; count statistics from where they are now.

    A method that mixes counts everything so.
    """
    if any(cohort.staleness):
        names = list(uploads.delta) if stage.algorithm.mixes else stage.problem.buffers
        uploads = rebased(uploads, cohort.groups, state.server.shared, names)
    factors = {age: state.schedule.discount(age) for age in set(cohort.staleness)}
    if all(factor == 1.0 for factor in factors.values()):
        return uploads
    return discounted(uploads, [factors[age] for age in cohort.staleness])


def _rows(stacks: Any, rejections: Sequence[str]) -> Any:
    """Return the rows that were not set aside."""
    if not any(rejections):
        return stacks
    return tree.rows(stacks, [i for i, rejection in enumerate(rejections) if not rejection])


def _aggregate(stage: Stage, state: State, uploads: Upload, chunk: int | None = None) -> Upload | None:
    """Combine all that were accepted, if any was; each chunk of a cohort has draws of its own."""
    if uploads.weight is None or not len(uploads.weight):
        return None
    with state.timer("aggregation"):
        accepted = stage.channel.accepted(uploads, state.server.extra)
        return stage.aggregate(accepted, _aggregation_key(stage, state, chunk))


def _aggregation_key(stage: Stage, state: State, chunk: int | None) -> Tensor:
    settings = stage.setup.settings
    key = draws.key(settings.seed, "aggregation", state.server.version, device=settings.device)
    return key if chunk is None else draws.branch(key, "part", chunk)


def _server_step(
    stage: Stage, state: State, uploads: Upload, combined: Upload | None
) -> tuple[ServerState, Tensors]:
    """Let the server act on what was accepted; without any upload only the version goes on."""
    server, devices = state.server, stage.setup.devices
    if combined is None:
        return server._replace(version=server.version + 1), {}
    if sent := stage.upload_like.delta:  # fine-tuning sends nothing: the server's model stays
        state.server_is_complete = set(stage.setup.names) <= set(sent)
    with state.timer("server"):
        moved = stage.server_rule.step(server, combined)
        all_moved = devices.alike or stage.releases is not None  # noise moves what nobody holds, too
        return moved if all_moved else devices.settled(server, moved, uploads), combined.metrics
