"""The executor of a run among others: what all of them ask at once, one executor computes for all.

Questions go together where they are about the same program of the same method, on models of the same
tensors. Before several runs share a program, a client of each takes two steps of it, with the others and
alone: what differs stays apart, with the reason.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core import check, tree
from partita.core.parts import Algorithm, Program, ServerRule
from partita.core.types import ClientState, Group, RoundContext, ServerState, Upload
from partita.data import FederatedData
from partita.engine.execute import make_executor
from partita.engine.execute.base import Runner
from partita.engine.execute.graph import rounded_up
from partita.engine.execute.plan import BoundProblem, rounds_left
from partita.engine.execute.task import Task, memory_shared_by
from partita.engine.execute.vmap import Vmap
from partita.engine.lockstep.joint import (
    Call,
    JointProblem,
    alike,
    apart,
    joined,
    joined_context,
    joined_data,
)
from partita.engine.lockstep.meeting import Failure, Seat
from partita.engine.lockstep.numbers import numbers
from partita.engine.lockstep.paying import Paying
from partita.engine.lockstep.servers import AGGREGATION, SERVER, Act, Servers, each_alone
from partita.engine.look import Look, LookAtSome, looks_at

LOG = logging.getLogger("partita")

Following = tuple[np.ndarray, RoundContext]
"""Who trains in a round, and when."""
TRAINING = "training"
"""The program that most of the work is."""
STACKING = ("auto", "vmap", "graph", "compiled")
"""Executors that compute many clients as one batch."""
TRIAL_STEPS = 2
TOLERANCE = 1e-3  # of the largest entry, in a trial
HALF_TOLERANCE = 5e-2
SHARED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Bytes of downloaded models up to which an evaluation gives each client of all runs one of its own."""


@dataclass(frozen=True, eq=False)
class Member:
    """The executor of one run; `inner` is what it has when it is alone.

    seat         where it asks
    key          what runs have in common that can compute together
    algorithm    the method of the stage
    evaluations  the programs, beside training, that several runs may share
    plain        whether clients are evaluated with the models that they hold, without a further step
    looks        the look at what was computed last, where it is one of all runs
    expected     who trains in the round that follows the present one, where that is known
    """

    inner: Runner
    task: Task
    executor: Any
    seat: Seat
    key: str
    algorithm: Algorithm
    evaluations: frozenset[str]
    plain: bool
    looks: list[Any] = field(default_factory=list)
    expected: list[Callable[[], Following | None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of what it is alone."""
        return self.inner.name

    @property
    def bound(self) -> BoundProblem:
        """The run's own problem."""
        return self.inner.bound

    def on(self, data: FederatedData, counted: FederatedData | None = None) -> Runner:
        """Return the run's own executor on other data: others have not got them."""
        return self.inner.on(data, counted)

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Compute with those who ask for the same now."""
        if not len(clients) or not (program.trains or program.name in self.evaluations):
            return self.inner(program, clients, group, states, context)
        answer: Answer = self.seat.ask((self, Call(program, clients, group, states, context)))
        self.looks[:] = [answer.look]
        return answer.uploads, answer.states

    def look(self, uploads: Upload, states: ClientState) -> Look | LookAtSome:
        """Look at what was computed last; where all runs are looked at together, that look is on its way."""
        return (self.looks.pop() if self.looks else None) or Look(uploads, states)

    def aggregating(self, alone: Callable[[Upload, Tensor], Upload]) -> Callable[[Upload, Tensor], Upload]:
        """Return an aggregation that is asked for together with other runs."""

        def aggregate(uploads: Upload, key: Tensor) -> Upload:
            combined: Upload = self.seat.ask((self, Act(AGGREGATION, alone, uploads, key)))
            return combined

        return aggregate

    def serving(self, rule: ServerRule) -> ServerRule:
        """Return a server's rule whose steps are asked for together with other runs."""

        def step(server: ServerState, upload: Upload) -> ServerState:
            moved: ServerState = self.seat.ask((self, Act(SERVER, rule.step, server, upload)))
            return moved

        return rule._replace(step=step)

    def expect(self, following: Callable[[], Following | None]) -> None:
        """Learn how to find out who trains in the round that follows the present one."""
        self.expected[:] = [following]

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Do nothing: what comes next is drawn for all runs, by what they expect."""

    def release(self, kept: Any = ()) -> None:
        """Let the run's own executor use the memory of earlier results again."""
        self.inner.release(kept)


class Together:
    """Answers what runs ask at the same time: see `Meeting`."""

    def __init__(self) -> None:
        self._joints: dict[str, tuple[dict[int, Member], Joint | None]] = {}
        self._refused: dict[tuple[str, str], str] = {}
        self._told: set[tuple[str, str]] = set()

    def __call__(self, asked: dict[Seat, Any]) -> dict[Seat, Any]:
        """Answer what servers ask, if any does, so that their runs catch up with the others; else all.

        What goes together is answered at once, the rest one by one.
        """
        acts = {place: asking for place, asking in asked.items() if isinstance(asking[1], Act)}
        groups: dict[Any, list[tuple[Seat, Member, Any]]] = {}
        for place, (member, question) in (acts or asked).items():
            same = question.kind if acts else _kind(question)
            groups.setdefault((member.key, same), []).append((place, member, question))
        if not acts and len(groups) > 1:
            self._tell_why_apart([key for key, kind in groups if kind[0] == TRAINING])
        answers: dict[Seat, Any] = {}
        for group in groups.values():
            places, members, questions = zip(*group)
            begin = time.perf_counter()
            found = (self._acts if acts else self._answers)(members, questions)
            for place in places:
                place.share = (time.perf_counter() - begin) / len(places)
            answers.update(zip(places, found))
        return answers

    def _tell_why_apart(self, keys: Sequence[str]) -> None:
        """Say once of runs that train at the same time, in several groups, why they are not one batch."""
        for other in keys[1:]:
            if (keys[0], other) not in self._told:
                self._told.add((keys[0], other))
                found = difference(json.loads(keys[0]), json.loads(other)) or "tensors, rounds or steps"
                LOG.info("training of several runs apart: they differ in %s", found)

    def _acts(self, members: Sequence[Member], acts: Sequence[Act]) -> Sequence[Any]:
        """Answer what servers ask, together where clients already compute so, in the same training."""
        known, joint = self._joints.get(members[0].key, (dict[int, Member](), None))
        if joint is None or not _are_bound(members, known):
            return each_alone(acts)
        return joint.servers(acts)

    def _answers(self, members: Sequence[Member], calls: Sequence[Call]) -> Sequence[Any]:
        what = members[0].key, calls[0].program.name
        if len(members) > 1 and what not in self._refused and _pays(members, calls):
            try:
                if (joint := self._joint(members)) is not None and joint.pays(members, calls):
                    return joint(members, calls)
            except TooEarly:
                pass  # the next time may tell
            except Exception as error:  # a rule, or a model, that cannot be shared; too little memory
                self._refused[what] = check.named_reason(error)
                LOG.info("%s of %d runs apart: %s", what[1], len(members), self._refused[what])
        return [_alone(member, call) for member, call in zip(members, calls)]

    def _joint(self, members: Sequence[Member]) -> Joint | None:
        """Return the executor of these runs, or of more that they are among."""
        key = members[0].key
        known, joint = self._joints.get(key, (dict[int, Member](), None))
        if not _are_bound(members, known):
            present = {number: member for number, member in known.items() if not member.seat.ended}
            present |= {member.seat.number: member for member in members}
            # stages that all runs have left are not needed any more, and hold data of all runs
            self._joints = {k: v for k, v in self._joints.items() if not set(v[0]) <= set(present)}
            self._joints[key] = present, None
            joint = Joint.of(list(present.values()))
            self._joints[key] = present, joint
        return joint


def _are_bound(members: Sequence[Member], known: Mapping[int, Member]) -> bool:
    """Return whether these are known, and still in the training that they were known in."""
    found = [known.get(member.seat.number) for member in members]
    return all(other is not None and other.bound is member.bound for member, other in zip(members, found))


def difference(a: Any, b: Any, name: str = "") -> str:
    """Return where two descriptions first differ, such as 'settings.batch (8, 16)'; '' if they do not."""
    if isinstance(a, dict) and isinstance(b, dict):
        parts = [(k, a.get(k), b.get(k)) for k in sorted({**a, **b}, key=lambda k: (k != "name", k))]
        found = [difference(x, y, f"{name}.{k}" if name else k) for k, x, y in parts]
        return next(filter(None, found), "")
    return "" if a == b else f"{name} ({check.shortened(a)}, {check.shortened(b)})"


class Answer(NamedTuple):
    """What the clients of a run have computed, and the look at what those of all have."""

    uploads: Upload
    states: ClientState
    look: LookAtSome | None = None


class TooEarly(Exception):
    """Raised where a trial tells nothing: a client took no step, or one of size zero."""


def _alone(member: Member, call: Call) -> Any:
    try:
        return Answer(*member.inner(*call))
    except Exception as error:
        return Failure(error)


def _kind(call: Call) -> Any:
    """Return what questions have in common that go together."""
    context, download = call.context, call.group.download
    shapes = [
        (k, v.shape[int(rows) :], v.dtype)
        for part, rows in ((download[:2], call.group.stacked), (call.states, True))
        for tensors in part
        for k, v in tensors.items()
    ]
    now = context.stage, context.stage_rounds, context.work, context.pass_batch, bool(call.group.statistics)
    return call.program.name, now, tuple(shapes)


def _pays(members: Sequence[Member], calls: Sequence[Call]) -> bool:
    """Return whether the clients of all runs are not much more to hold than to look at run by run."""
    if calls[0].program.trains:
        return True
    received = sum(len(call.clients) * tree.nbytes(call.group.download[:2]) for call in calls)
    return received <= SHARED_BYTES.get(members[0].task.data.device.type, 0)


@dataclass(frozen=True, eq=False)
class Joint:
    """The executor of several runs."""

    runner: Runner
    numbers: tuple[int, ...]
    offsets: tuple[int, ...]
    differing: tuple[str, ...]
    rules_of: dict[str, list[Program]]
    choices: dict[str, dict[str, str]]
    servers: Servers
    measures: bool
    tried: set[str] = field(default_factory=set)
    paying: dict[str, Paying] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Sequence[Member]) -> Joint:
        """Make it for these runs; a LookupError says why their clients cannot be one batch."""
        tasks = [member.task for member in members]
        first = tasks[0]
        if _stack(members[0].inner) is None:
            raise LookupError("their clients are not stacked")
        if not all(alike(first.data, task.data) for task in tasks):
            raise LookupError("their samples have other types or shapes")
        own = {id(task.data.y): task.data.nbytes for task in tasks}
        if len(own) > 1 and (needed := sum(own.values())) > first.room:
            raise LookupError(f"the data of all are {needed:,} bytes, more than the {first.room:,} of memory")
        data = joined_data([task.data for task in tasks])
        if data is None:
            raise LookupError("their data are no plain tensors in memory, and not the same")
        bounds, method = [member.bound for member in members], members[0].algorithm
        given = [numbers(member.algorithm) for member in members]
        differing = tuple([name for name in given[0] if len({each[name] for each in given}) > 1])
        rules_of: dict[str, list[Program]] = {}

        def bind(problem: Any, on: FederatedData) -> JointProblem:
            joint = JointProblem.of(bounds, problem, on)
            return replace(joint, rules_of=rules_of, algorithm=method, differing=differing)

        counts = {min(rounded_up(n), len(members)) for n in range(1, len(members) + 1)}  # runs that are left
        task = replace(
            first,
            data=data,
            bind=bind,
            cohort_sizes={n * size for n in counts for size in first.cohort_sizes},
            stacks=True,
        )
        offsets = np.cumsum([0, *[task.data.clients for task in tasks[:-1]]]).tolist()
        with memory_shared_by(1):  # of all runs, which have a share each
            runner = make_executor(members[0].executor, task)
        servers = Servers([member.algorithm for member in members], runner.bound.problem)
        return cls(
            runner,
            tuple([member.seat.number for member in members]),
            tuple(offsets),
            differing,
            rules_of,
            task.choices,
            servers,
            measures=members[0].executor == "auto" and not torch.are_deterministic_algorithms_enabled(),
        )

    def pays(self, members: Sequence[Member], calls: Sequence[Call]) -> bool:
        """Return whether runs compute together, as far as anybody knows yet."""
        return not self._paying(members[0], calls[0]).apart_for_good

    def __call__(self, members: Sequence[Member], calls: Sequence[Call]) -> Sequence[Answer]:
        """Compute what some of the runs ask, as one batch."""
        program = calls[0].program
        places = [self.numbers.index(member.seat.number) for member in members]
        rules = self.rules_of.setdefault(program.name, [program] * len(self.numbers))
        for place, call in zip(places, calls):
            rules[place] = call.program
        if program.name not in self.tried:
            self._try(members, calls, places)
            self.tried.add(program.name)
        together, sizes = self._joined(members, calls, places), [len(call.clients) for call in calls]
        paying = self._paying(members[0], calls[0])
        seconds, (uploads, states) = paying.seconds(lambda: self.runner(*together))
        looks: Sequence[LookAtSome | None] = [None] * len(calls)
        if program.trains:  # nobody knows when all runs are done with it: its memory is not used again
            self.runner.release((uploads, states))
            uploads, looks = self._with_sender(uploads, together), looks_at(uploads, states, sizes)
            self._prefetch(program, members, places)
        for member in members:
            member.task.choices.update(self.choices)
        if program.trains:
            choices = [member.task.choices for member in members]
            left = rounds_left(calls[0].context)
            paying.see(seconds, len(calls), left, choices, lambda: members[0].inner(*calls[0]))
        return [Answer(*own, look) for own, look in zip(apart((uploads, states), sizes), looks)]

    def _prefetch(self, program: Program, members: Sequence[Member], places: Sequence[int]) -> None:
        """Draw the samples of the round that follows, while a GPU is at work on this one."""
        try:
            following = [member.expected.pop()() if member.expected else None for member in members]
        except Exception as error:  # of a user's schedule: the run itself will meet it
            LOG.info("nobody knows who trains next: %s", check.named_reason(error))
            return
        known = [pair for pair in following if pair is not None]
        if len(known) == len(members):
            clients, contexts = zip(*known)
            everyone = np.concatenate([some + self.offsets[place] for some, place in zip(clients, places)])
            self.runner.prefetch(program, everyone, joined_context(contexts, clients, places))

    def _paying(self, member: Member, call: Call) -> Paying:
        """Return what is known of whether it pays to train together; evaluations are together, unmeasured."""
        role, measures = _role(call), self.measures and call.program.trains
        if role not in self.paying:
            self.paying[role] = Paying(role, member.task.choices, measures=measures)
        return self.paying[role]

    def _with_sender(self, uploads: Upload, call: Call) -> Upload:
        """Add to what clients send how much they count, and what their runs call them."""
        data = self.runner.bound.data
        uploads = tree.with_sender(uploads, call.clients, data.train[:, 1], data.device)
        return uploads._replace(client=torch.from_numpy(call.context.number))

    def _joined(self, members: Sequence[Member], calls: Sequence[Call], places: Sequence[int]) -> Call:
        """Return what these runs ask as one question."""
        if self.differing and not calls[0].program.trains and not members[0].plain:
            raise LookupError("evaluations of a method whose numbers differ")
        named = self.differing if calls[0].program.trains else ()
        own = [{name: numbers(member.algorithm)[name] for name in named} for member in members]
        return joined(calls, places, [self.offsets[place] for place in places], own)

    def _try(self, members: Sequence[Member], calls: Sequence[Call], places: Sequence[int]) -> None:
        """Fail if a client of a run ends elsewhere with others than alone; so far if one has not moved."""
        heads = [_head(member, call) for member, call in zip(members, calls)]
        stack = _stack(self.runner)
        assert stack is not None
        together = list(apart(stack(*self._joined(members, heads, places)), [1] * len(heads)))
        half = members[0].task.half
        for member, head, found in zip(members, heads, together):
            alone = _stack(member.inner) or member.inner
            own = alone(*head)
            if not tree.close(found, own, HALF_TOLERANCE if half else TOLERANCE):
                raise ValueError("results of several runs differ from those of each alone")
            if head.program.trains and not _moved(own, head.states):
                raise TooEarly


def _stack(runner: Any) -> Vmap | None:
    """Return the executor that stacks clients and records nothing; None where they are not stacked."""
    for candidate in getattr(runner, "candidates", (runner,)):
        if isinstance(candidate, Vmap):
            return Vmap(candidate.bound, candidate.budget, candidate.model_bytes, candidate.sample_bytes)
    return None


def _role(call: Call) -> str:
    """Return what it is called that runs compute together."""
    return f"{call.program.name} of several runs, stage {call.context.stage}"


def _head(member: Member, call: Call) -> Call:
    """Return the question for the client with most training samples, and for few steps."""
    place = int(member.task.data.train[call.clients, 1].argmax())
    head = slice(place, place + 1)
    context = call.context.of(head)
    work = context.work
    if not isinstance(work.steps, tuple):
        context = context._replace(work=replace(work, steps=TRIAL_STEPS, epochs=None))
    group = call.group
    if group.stacked:
        shared, extra = tree.rows(group.download[:2], head)
        group = group._replace(download=group.download._replace(shared=shared, extra=extra))
    return Call(call.program, call.clients[head], group, tree.rows(call.states, head), context)


def _moved(result: tuple[Upload, ClientState], before: ClientState) -> bool:
    """Return whether a client has sent, or kept, anything that is not as it was."""
    upload, after = result
    sent = any(bool(x.any()) for tensors in upload.payload for x in tensors.values())
    pairs = zip(tree.leaves(before), tree.leaves(after))
    return sent or any(not torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def joins(executor: Any) -> bool:
    """Return whether an executor stacks clients, so that those of several runs can be one stack."""
    return isinstance(executor, str) and executor in STACKING
