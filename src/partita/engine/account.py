"""What is released over a run, and what that amounts to by the account of its transforms, such as an ε.

A round of a stage whose clients send something is a release; so is one in which nobody has come. What a
client sends in a stage that is over, or in a round that was computed again after an interruption, is counted
once: the noise of a release depends on the seed, the round and nothing else, and so it is the same release.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from partita.core import check, draws, tree
from partita.core.parts import Algorithm, Taken, Transform
from partita.core.types import Download, Partition, Tensors, Upload
from partita.engine.channel import told
from partita.engine.execute.task import Task
from partita.engine.model.problem import ModelProblem
from partita.engine.record import number as known
from partita.engine.record import read_json

if TYPE_CHECKING:
    from partita.engine.setup import Setup
    from partita.engine.stage import Stage
    from partita.engine.state import State


def upload_like(
    algorithm: Algorithm, problem: ModelProblem, initial: Tensors, partition: Partition, device: str
) -> Upload:
    """Return what a client sends that has taken no step."""
    shared = tree.pick(initial, partition.shared)
    extra = algorithm.server(problem).init(shared).extra
    download = Download(shared, extra, 0, draws.key(0, "start", 0, device=device))
    state = algorithm.init_client(initial, partition)
    rule = algorithm.local(replace(problem, owns_gradients=False))
    return rule.finish(rule.start(download, state), download, state)[0]


# ---- before the first round


def settled(setup: Setup) -> Setup:
    """Return the run whose transforms are calibrated for what it plans; refuse what they cannot stand for."""
    if not setup.settings.uploads:
        return setup
    setup = replace(setup, sending=tuple(i for i in range(len(setup.plans)) if _sends(setup, i)))
    if not setup.sending:  # nothing leaves a client
        return replace(setup, uploads=())
    for number in setup.sending:
        _check_memory(setup, number)
    releasing = [t for t in setup.uploads if t.release is not None]
    if releasing:
        _check_releases(setup, releasing[0])
    plan, before = _planned(setup), _noise_before(setup)
    bound = (t if t.bind is None else t.bind(plan._replace(noise=n)) for t, n in zip(setup.uploads, before))
    return replace(setup, uploads=tuple(bound))


def _noise_before(setup: Setup) -> list[float | None]:
    """Return the noise with which each transform has acted so far, where a run goes on in its folder.

    A run that was made longer (`Run.extend`) goes on with the noise that was found for its first rounds.
    """
    file = None if setup.settings.folder is None else setup.settings.folder / "config.json"
    saved = read_json(file).get("uploads") if setup.settings.resume and file and file.is_file() else None
    if not isinstance(saved, list) or len(saved) != len(setup.uploads):
        return [None] * len(setup.uploads)
    return [known(entry.get("noise")) if isinstance(entry, dict) else None for entry in saved]


def _sends(setup: Setup, number: int) -> bool:
    """Return whether the clients of a stage send anything."""
    algorithm = setup.plans[number].algorithm
    partition = setup.partition_of(algorithm)
    task = Task(setup.model, setup.data, partition, setup.profile, setup.initial, method_loss=algorithm.loss)
    like = upload_like(algorithm, task.alone, setup.initial, partition, setup.settings.device)
    return any(like.payload)


def _check_memory(setup: Setup, number: int) -> None:
    """Refuse compression with feedback where clients remember nothing between rounds."""
    plan = setup.plans[number]
    name = next((t.name for t in setup.uploads if t.feedback), "")
    if not name or (plan.state == "keep" and plan.algorithm.stateful):
        return
    forgets = f"{plan.algorithm.name} keeps no state" if plan.state == "keep" else "state='reset' forgets"
    reason = f"clients add what {name} has lost to what they send next, and {forgets}"
    raise check.fail("uploads", name, f"{name}(..., feedback=False)", reason)


def _check_releases(setup: Setup, transform: Transform) -> None:
    """Refuse what would release more than the sums that a transform is made for."""
    name, settings = transform.name, setup.settings
    if settings.norm == "static" and setup.profile.buffers:
        reason = f"{name} does not cover statistics that are measured over all clients"
        raise check.fail("norm", settings.norm, "'personal', or a model with GroupNorm or LayerNorm", reason)
    if settings.norm == "personal" and setup.profile.buffers and settings.baselines is True:
        reason = f"{name} does not cover statistics, which clients of the global baseline share"
        raise check.fail("baselines", True, "False, or a model with GroupNorm or LayerNorm", reason)
    for schedule in setup.schedules:
        choice = getattr(schedule, "choose", None)
        if choice is not None:
            reason = f"{name} does not cover who is chosen by what clients have told"
            raise check.fail("choose", choice, "None: cohorts by chance", reason)
        check_quorum(name, getattr(schedule, "quorum", 1))


def check_quorum(name: str, quorum: int | float) -> None:
    """Refuse a quorum, or a share, that one client may decide."""
    if not (isinstance(quorum, int) and quorum <= 1):
        reason = f"{name}: whether a round counts would depend on a single client"
        raise check.fail("quorum", quorum, "1", reason)


def _planned(setup: Setup) -> Taken:
    """Return what will have been released by the end of the run."""
    return _taken(setup, {i: setup.plans[i].rounds or 0 for i in setup.sending}, None)


# ---- while it goes on


def account(stage: Stage, state: State) -> dict[str, float]:
    """Return what the transforms of a run say of all that has been released so far."""
    setup, version = stage.setup, state.server.version
    accounts = [t.account for t in setup.uploads if t.account is not None]
    if not accounts or not setup.sending:
        return {}
    rounds = {e.stage: e.last - e.first for e in state.counters.endings}
    rounds[stage.number] = version - state.stage_start
    turns = int(state.counters.clock.turns.reports.max(initial=0))
    taken = _taken(setup, {i: rounds.get(i, 0) for i in setup.sending}, turns)
    figures = {name: value for of in accounts for name, value in of(taken).items()}
    return figures | {name: float(x) for name, x in _public(stage, state).items() if not x.dim()}


def _public(stage: Stage, state: State) -> Tensors:
    """Return what the transform that releases tells clients, such as the clip of this round."""
    return {} if stage.releases is None else told(stage.releases.number, state.server.extra)


def _taken(setup: Setup, rounds: dict[int, int], turns: int | None) -> Taken:
    """Return what so many rounds of each stage release; `turns` is the most of a client, where it is known.

    Where stages differ, the largest rate holds for all of them. What is correlated between releases begins
    anew with each stage, so that only the rests within stages count.
    """
    clients, numbers = setup.data.clients, setup.sending
    parts = [_participation(setup, i, setup.plans[i].rounds or 0) for i in numbers]
    now = [_participation(setup, i, rounds[i]) for i in numbers]
    rates = [rate for rate, _, _ in parts]
    known = [most for _, most, _ in now]
    bound = None if any(most is None for most in known) else sum(most or 0 for most in known)
    ends = [most for _, most, _ in parts]
    rests = [rest for _, _, rest in parts]
    apart = None if any(rest is None for rest in rests) else min((rest or 1 for rest in rests), default=None)
    found = [n for n in (bound, turns, sum(rounds.values())) if n is not None]
    return Taken(
        releases=sum(rounds.values()),
        planned=sum(setup.plans[i].rounds or 0 for i in numbers),
        rate=None if any(rate is None for rate in rates) else max((r or 0.0 for r in rates), default=None),
        turns=min(found),
        most_turns=None if any(most is None for most in ends) else sum(most or 0 for most in ends),
        apart=apart,
        clients=clients,
        cohort=min((float(setup.reporting(i).sum()) for i in numbers), default=0.0),
    )


def _participation(setup: Setup, number: int, rounds: int) -> tuple[float | None, int | None, int | None]:
    """Return what a stage's schedule promises of so many rounds: chance, most turns, rounds between two."""
    clients = setup.data.clients
    promise = getattr(setup.schedules[number], "participation", None)
    if promise is None:  # a user's schedule: anyone may come each time
        return None, rounds, None
    found: tuple[float | None, int | None, int | None] = promise(
        clients, setup.plans[number].cohort or clients, rounds, first=number == 0
    )
    return found
