"""The clients of several runs as those of one: their data, draws and rates, what they receive and keep.

Client c of run m is client offset_m + c of all. It has the draws of (seed_m, round, c), the samples of its
run and the rates of its method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from partita.core import tree
from partita.core.device import put
from partita.core.parts import Algorithm, LocalRule, Phase, Problem, Program, StepRate
from partita.core.types import ClientState, Download, Group, RoundContext, Tensors, Upload
from partita.data import FederatedData, columns
from partita.data.population import Numbered
from partita.engine.execute.plan import BoundProblem, Plan
from partita.engine.execute.stack import flatten, unflatten
from partita.engine.lockstep.numbers import PREFIX, remade, with_numbers
from partita.engine.model.problem import ModelProblem


class Call(NamedTuple):
    """What a run asks of its executor."""

    program: Program
    clients: np.ndarray
    group: Group
    states: ClientState
    context: RoundContext


class OfItsRun(dict[str, Tensor]):
    """Tensors that each run has of its own, where a rule of several runs cannot look at them."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise LookupError("the rule looks at the model that its stage began with, and each run has another")

    __getitem__ = get = items = keys = values = __iter__ = __contains__ = _refuse


@dataclass(frozen=True, eq=False)
class JointProblem(BoundProblem):
    """A problem on the data of several runs.

    members    the problem of each run, on its own data
    algorithm  the method of the first run, and `differing` the names of numbers that are others in other runs
    rules_of   the programs of each run, by name
    places     the program and the number of each phase, by its identity
    """

    members: Sequence[BoundProblem] = ()
    algorithm: Algorithm | None = None
    differing: tuple[str, ...] = ()
    rules_of: dict[str, list[Program]] = field(default_factory=dict)
    places: dict[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Sequence[BoundProblem], problem: ModelProblem, data: FederatedData) -> JointProblem:
        """Bind a problem to the data of all: with as many clients as each has, and what all began with."""
        first, *others = [member.problem.initial for member in members]
        initial = first if all(_same(first, other) for other in others) else OfItsRun()
        problem = replace(problem, clients=members[0].problem.clients, initial=initial)
        return cls(problem, data, members=members)

    def bind(self, program: Program) -> Any:
        """Return the rule for all runs."""
        if self.differing and program.trains:
            program = program._replace(build=self._with_numbers(program))
        rule = super().bind(program)
        for number, phase in enumerate(rule.phases):
            self.places[id(phase)] = program.name, number
        return rule

    def _with_numbers(self, program: Program) -> Callable[[Problem], LocalRule]:
        """Return how the rule is made that has the numbers of each client's run."""
        algorithm = self.algorithm
        assert algorithm is not None

        def build(problem: Problem) -> LocalRule:
            return with_numbers(program.build(problem), lambda given: remade(algorithm, given).local(problem))

        return build

    def rate_values(self, phase: Phase, plan: Plan, context: RoundContext) -> tuple[list[np.ndarray], bool]:
        """Return the rates that each client has in its own run, on the host."""
        if context.run is None:
            return super().rate_values(phase, plan, context)
        name, number = self.places[id(phase)]
        n, steps = len(context.run), plan.size.shape[1]
        present, row = np.unique(context.run, return_inverse=True)
        runs = present.tolist()
        phases = [self.members[run].bind(self.rules_of[name][run]).phases[number] for run in runs]
        by_step = [any(isinstance(rate, StepRate) for rate in own.lr) for own in phases]
        if isinstance(at := context.stage_round, int) and not any(by_step):  # a number for each run
            rates = np.array([[rate(at, context.stage_rounds) for rate in own.lr] for own in phases]).T
            if all((own == own[0]).all() for own in rates):
                return [own[0] for own in rates], False
            return [own[row] for own in rates], True
        each: list[tuple[np.ndarray, list[np.ndarray]]] = []
        for run, own, has_steps in zip(runs, phases, by_step):
            rows = np.flatnonzero(context.run == run)
            part = plan._replace(size=plan.size[rows], planned=plan.planned[rows])
            values, by_client = self.members[run].rate_values(own, part, _now(context, rows))
            if any(by_step) and not has_steps:  # the same in all steps, where those of other runs go by step
                values = [np.repeat(v[..., None], steps, -1) for v in values]
            if not by_client:
                values = [np.broadcast_to(v, (len(rows), *v.shape)) for v in values]
            each.append((rows, values))
        joined = []
        for column in zip(*[values for _, values in each]):
            whole = np.zeros((n, *column[0].shape[1:]))
            for (rows, _), values in zip(each, column):
                whole[rows] = values
            joined.append(whole)
        if all((values == values[:1]).all() for values in joined):
            return [values[0] for values in joined], False
        return joined, True


def _now(context: RoundContext, rows: np.ndarray) -> RoundContext:
    """Return the moment of some clients of one run."""
    context = context.of(rows)
    at = context.stage_round
    if isinstance(at, Tensor) and bool((at == at[0]).all()):
        context = context._replace(stage_round=int(at[0]))
    return context


def _same(a: Tensors, b: Tensors) -> bool:
    return all(a[k] is b[k] or torch.equal(a[k], b[k]) for k in a)


def joined_data(parts: Sequence[FederatedData]) -> FederatedData | None:
    """Return the data of several runs as those of one; None where they are no plain tensors in memory.

    What all runs share is kept once.
    """
    first = parts[0]
    if all(first.same_memory(part) for part in parts):
        data, starts = first, [0] * len(parts)
    else:
        plain = all(isinstance(c, Tensor) for part in parts for c in columns.listed(part.x))
        if not plain or any(part.elsewhere or part.lengths is not None or part.mask for part in parts):
            return None
        stacks = [torch.cat(same) for same in zip(*[columns.listed(part.x) for part in parts])]
        y = torch.cat([part.y for part in parts])
        data = replace(first, x=columns.rebuilt(first.x, stacks), y=y)
        starts = np.cumsum([0, *[part.rows for part in parts[:-1]]]).tolist()
    ranges: Any = {
        split: np.concatenate([p.ranges(split) + np.array([start, 0]) for p, start in zip(parts, starts)])
        for split in ("train", "validation", "test")
    }
    total = sum(part.clients for part in parts)
    names: Any = {"names": Numbered(total), "source": {}, "scaling": {}}
    return replace(data, **ranges, **names)


def alike(a: FederatedData, b: FederatedData) -> bool:
    """Return whether samples of both can be rows of one batch."""
    x, y = columns.listed(a.x), columns.listed(b.x)
    kinds = [(type(c), c.dtype, columns.sample_shape(c)) for c in (*x, a.y)]
    return kinds == [(type(c), c.dtype, columns.sample_shape(c)) for c in (*y, b.y)]


def joined(
    calls: Sequence[Call],
    runs: Sequence[int],
    offsets: Sequence[int],
    numbers: Sequence[Mapping[str, float]],
) -> Call:
    """Return what several runs ask as one question; each client has the numbers of its run."""
    sizes = [len(call.clients) for call in calls]
    device = next(
        (x.device for x in tree.leaves(calls[0].group.download[:2]) if isinstance(x, Tensor)), "cpu"
    )
    context = joined_context([call.context for call in calls], [call.clients for call in calls], runs)
    clients = np.concatenate([call.clients + offset for call, offset in zip(calls, offsets)])
    return Call(
        calls[0].program,
        clients,
        _numbered(_joined_group([call.group for call in calls], sizes, device), sizes, numbers, device),
        tree.cat([call.states for call in calls]),
        context,
    )


def joined_context(
    contexts: Sequence[RoundContext], clients: Sequence[np.ndarray], runs: Sequence[int]
) -> RoundContext:
    """Return the moments of several runs as one; each client has the seed and the round of its run."""
    sizes = [len(some) for some in clients]
    return contexts[0]._replace(
        seed=np.repeat(np.array([context.seed for context in contexts], dtype=np.int64), sizes),
        round=_times([c.round for c in contexts], sizes),
        stage_round=_times([c.stage_round for c in contexts], sizes),
        progress=_progress(contexts, sizes),
        run=np.repeat(np.array(runs), sizes),
        number=np.concatenate(clients),
    )


def _times(values: Sequence[int | Tensor], sizes: Sequence[int]) -> int | Tensor:
    if all(isinstance(v, int) for v in values) and len(set(values)) == 1:
        return values[0]
    return torch.cat([v if isinstance(v, Tensor) else torch.full((n,), v) for v, n in zip(values, sizes)])


def _progress(contexts: Sequence[RoundContext], sizes: Sequence[int]) -> Tensor | None:
    if all(context.progress is None for context in contexts):
        return None
    pairs = zip(contexts, sizes)
    whole = [torch.ones(n, dtype=torch.float64) if c.progress is None else c.progress for c, n in pairs]
    return torch.cat(whole)


def _joined_group(groups: Sequence[Group], sizes: Sequence[int], device: torch.device | str) -> Group:
    received = [group.download[:2] for group in groups]
    positions = tuple(range(sum(sizes)))
    download = Download(*received[0], groups[0].download.version)
    common = all(a is b for other in received for a, b in zip(tree.leaves(received[0]), tree.leaves(other)))
    if common and not any(group.stacked for group in groups):
        return Group(positions, download)
    if any(group.stacked for group in groups):
        rows = [r if g.stacked else tree.expand(r, n) for r, g, n in zip(received, groups, sizes)]
        shared, extra = tree.cat(rows)
    else:
        owner = put(np.repeat(np.arange(len(groups)), sizes), device)
        shared, extra = tree.map_tensors(lambda x: x.index_select(0, owner), tree.stack(received))
    return Group(positions, download._replace(shared=shared, extra=extra), stacked=True)


def _numbered(
    group: Group, sizes: Sequence[int], numbers: Sequence[Mapping[str, float]], device: torch.device | str
) -> Group:
    """Return the group whose clients receive the numbers of their runs."""
    if not numbers[0]:
        return group
    each = {
        PREFIX + name: put(np.repeat([float(own[name]) for own in numbers], sizes), device)
        for name in numbers[0]
    }
    download, n = group.download, len(group.positions)
    shared, extra = download[:2] if group.stacked else tree.expand(download[:2], n)
    return group._replace(download=download._replace(shared=shared, extra={**extra, **each}), stacked=True)


def apart(result: tuple[Upload, ClientState], sizes: Sequence[int]) -> Iterator[tuple[Upload, ClientState]]:
    """Yield what the clients of each run have computed."""
    leaves: list[Any] = []
    spec = flatten(result, leaves)
    columns = [torch.split(x, list(sizes)) if isinstance(x, Tensor) else [x] * len(sizes) for x in leaves]
    for own in zip(*columns):
        yield unflatten(spec, iter(own))
