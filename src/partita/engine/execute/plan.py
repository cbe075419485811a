"""What clients do in a phase: how many steps, at which rates, and which samples each step sees.

A pass over a client's n samples is a new random order, cut into ⌈n/batch⌉ batches, the last one possibly
short. The order is a function of (seed, round, phase, client, pass), computed for all clients at once by
sorting random bits; nothing depends on who else is in the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core import draws
from partita.core.asks import COUNTS
from partita.core.device import put
from partita.core.parts import LocalRule, Phase, Program, Rate, StepRate
from partita.core.types import Cohort, RoundContext, Work
from partita.data import FederatedData
from partita.engine.execute.informed import informed
from partita.engine.model.problem import ModelProblem

NUMBERED_PASSES = 1 << 23  # that fit beside 40 random bits


@dataclass(frozen=True, eq=False)
class BoundProblem:
    """A problem, the data it is solved on, and the rules bound to it so far.

    `counted` are the data whose training labels are counted, where those that it is solved on are others.
    """

    problem: ModelProblem
    data: FederatedData
    rules: dict[str, LocalRule] = field(default_factory=dict)
    counted: FederatedData | None = None

    def bind(self, program: Program) -> LocalRule:
        """Return the rule for this problem: the same object every time, so that captured steps are reused."""
        if program.name not in self.rules:
            rule, keeps = program.build(self.problem), program.trains or program.keeps
            self.rules[program.name] = informed(rule, self.problem.asks, keeps)
        return self.rules[program.name]

    def on(self, data: FederatedData, counted: FederatedData | None = None) -> BoundProblem:
        """Return this problem with its rules, bound to other samples; `counted` are those of the clients."""
        return replace(self, data=data, counted=counted)

    def starts(self, clients: np.ndarray, context: RoundContext) -> tuple[Tensor, Tensor | None]:
        """Return for each client the key of what is random when it begins, and the counts of its classes."""
        counts = None
        if COUNTS in self.problem.asks:
            assert self.problem.layout is not None
            counts = class_counts(self.counted or self.data, clients, self.problem.layout.classes)
        return start_keys(clients, context, self.data.device), counts

    def rates(self, phase: Phase, plan: Plan, context: RoundContext) -> tuple[tuple[Tensor, ...], bool]:
        """Return the phase's learning rates in this round, and whether they have a row for each client.

        They are float64, and take the type of what they multiply: 0-d, or with a row for each client. Where a
        rate goes by step, they have one more axis at the end, the steps.
        """
        device = self.data.device
        values, rows = self.rate_values(phase, plan, context)
        if values and values[0].ndim == 0:
            return tuple(
                [torch.full((), float(v), dtype=torch.float64, device=device) for v in values]
            ), False
        return tuple([put(v, device) for v in values]), rows

    def rate_values(self, phase: Phase, plan: Plan, context: RoundContext) -> tuple[list[np.ndarray], bool]:
        """Return what `rates` does, on the host."""
        at = context.stage_round
        rounds = [at] if isinstance(at, int) else at.tolist()
        if any(isinstance(rate, StepRate) for rate in phase.lr):
            tables = _by_step(phase.lr, rounds, context.stage_rounds, plan)
            return tables, tables[0].ndim == 2
        rates = [[rate(t, context.stage_rounds) for t in rounds] for rate in phase.lr]
        rows = any(value != values[0] for values in rates for value in values)
        return [np.array(values if rows else values[0], dtype=np.float64) for values in rates], rows

    def work(self, phase: Phase, clients: np.ndarray, context: RoundContext) -> tuple[Work, np.ndarray]:
        """Return how much this phase asks for, and how many samples each of these clients has for it."""
        work = work_of(phase, context)
        return work, self.data.ranges(work.split)[clients, 1]

    def by_work(self, program: Program, clients: np.ndarray, context: RoundContext) -> np.ndarray:
        """Return the places of these clients, those with the most steps first."""
        phases = self.bind(program).phases
        if not phases:
            return np.arange(len(clients))
        work, n = self.work(phases[0], clients, context)
        return np.argsort(-count_steps(n, clients, work, context), kind="stable")


def _by_step(rates: Sequence[Rate], rounds: list[int], total: int, plan: Plan) -> list[np.ndarray]:
    """Return for each rate its values in each step: of each client, or once where all have the same."""
    length, clients = plan.size.shape[1], len(plan.planned)
    each = list(zip(rounds if len(rounds) == clients else rounds * clients, plan.planned.tolist()))
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(each))}
    tables = [np.zeros((len(kinds), length)) for _ in rates]
    for rate, table in zip(rates, tables):
        for (t, steps), i in kinds.items():
            count = min(steps, length)
            if isinstance(rate, StepRate):
                table[i, :count] = [rate.at(t, total, step, steps) for step in range(count)]
            else:
                table[i, :count] = rate(t, total)
    if len(kinds) == 1:
        return [table[0] for table in tables]
    return [table[[kinds[kind] for kind in each]] for table in tables]


def work_of(phase: Phase, context: RoundContext) -> Work:
    """Return how much this phase asks for."""
    work = context.work if phase.work is None else phase.work(context)
    if phase.accumulate == 1 or work.batch is None:
        return work
    return replace(work, batch=work.batch * phase.accumulate, piece=work.batch)


def client_steps(rule: LocalRule, clients: np.ndarray, data: FederatedData, context: RoundContext) -> int:
    """Return how many steps these clients take in all phases of a rule."""
    return worked(rule, clients, data, context)[0]


def worked(
    rule: LocalRule, clients: np.ndarray, data: FederatedData, context: RoundContext
) -> tuple[int, np.ndarray]:
    """Return how many steps these clients take in all phases of a rule, and how often each of them passes
    over its training samples."""
    total, epochs = 0, np.zeros(len(clients))
    for phase in rule.phases:
        work = work_of(phase, context)
        n = data.ranges(work.split)[clients, 1]
        steps = count_steps(n, clients, work, context)
        total += int(steps.sum())
        if work.split == "train":
            epochs += steps / np.maximum(_batches(n, work), 1)
    return total, epochs


def most_steps(rule: LocalRule, data: FederatedData, context: RoundContext) -> int:
    """Return the most steps that any client takes in any phase of a rule."""
    clients, most = np.arange(data.clients), 0
    for phase in rule.phases:
        work = work_of(phase, context)
        n = data.ranges(work.split)[:, 1]
        most = max(most, int(count_steps(n, clients, work, context).max(initial=0)))
    return most


def most_seen(
    phases: Sequence[Phase], clients: np.ndarray, data: FederatedData, context: RoundContext
) -> int:
    """Return the most samples that any of these clients sees in some phases, as far as they may differ."""
    seen = np.zeros(len(clients), dtype=np.int64)
    for phase in phases:
        work = work_of(phase, context)
        n = data.ranges(work.split)[clients, 1]
        steps = count_steps(n, clients, work, context)
        seen = np.maximum(seen, n) if work.batch is None else seen + steps * phase.batches * work.batch
    return int(np.minimum(seen, data.train[clients, 1]).max(initial=0))


def rounds_left(context: RoundContext) -> int:
    """Return how many rounds of the stage are left, by the client that is furthest behind."""
    at = context.stage_round
    return context.stage_rounds - (at if isinstance(at, int) else int(at.min()))


class Plan(NamedTuple):
    """For clients × steps: rows of the data, how many of them are real, and the keys of the forward pass."""

    rows: Tensor  # [clients, steps, batch]
    real: Tensor  # [clients, steps, batch], false where a short batch is padded
    size: np.ndarray  # [clients, steps], 0 after a client's last step
    steps: np.ndarray  # [clients]
    keys: Tensor  # [clients, steps]
    planned: np.ndarray  # [clients], the steps that stragglers would take, too, with all of their progress
    whole: bool = False  # every step sees the same rows: all of them
    piece: int | None = None  # rows that pass through the model at a time; None: all of a step


def start_keys(clients: np.ndarray, context: RoundContext, device: torch.device) -> Tensor:
    """Return for each client the key of what is random when it begins."""
    return put(draws.keys(context.seed, "start", _round(context), numbers(clients, context)), device)


def numbers(clients: np.ndarray, context: RoundContext) -> np.ndarray:
    """Return the numbers that these clients have in their own runs: what draws depend on."""
    return clients if context.number is None else context.number


def class_counts(data: FederatedData, clients: np.ndarray, classes: int) -> Tensor:
    """Return how many training samples of each class these clients have, labels that are none left out."""
    starts, lengths = data.train[clients].T
    rows = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    owners = np.repeat(np.arange(len(clients)), lengths)
    labels = data.y.index_select(0, put(rows, data.y.device)).long().unsqueeze(1).flatten(1)
    real = (labels >= 0) & (labels < classes)
    place = (put(owners, labels.device)[:, None] * classes + labels)[real]
    counts = torch.bincount(place, minlength=len(clients) * classes)
    return counts.reshape(len(clients), classes).to(data.device, torch.float64)


def plans(
    data: FederatedData, clients: np.ndarray, phase: Phase, number: int, context: RoundContext
) -> list[Plan]:
    """Return a plan for each of the batches that a step of this phase sees."""
    work = work_of(phase, context)
    return [draw(data, clients, work, number + (j << 16), context) for j in range(phase.batches)]


def count_steps(n: np.ndarray, clients: np.ndarray, work: Work, context: RoundContext) -> np.ndarray:
    """Return how many steps each client takes; one without data takes none.

    A straggler with progress u does 1 + ⌊u (E − 1)⌋ of E passes, or of E steps where the work is in steps or
    a single pass.
    """
    if isinstance(work.steps, int) and context.progress is None:
        return np.where(n > 0, work.steps, 0)
    if isinstance(work.steps, tuple):
        own = numbers(clients, context).tolist()
        amount = np.array([work.steps[c] for c in own], dtype=np.int64)  # there may be many more
    else:
        amount = np.full(len(n), work.steps if work.steps is not None else work.epochs or 1)
    each = _batches(n, work) if work.steps is None else np.ones_like(n)
    if context.progress is not None:
        amount, each = np.where(amount == 1, each, amount), np.where(amount == 1, 1, each)
        amount = np.minimum(amount, 1 + np.floor(context.progress.numpy() * (amount - 1)).astype(np.int64))
    return np.where(n > 0, amount * each, 0)


def draw(data: FederatedData, clients: np.ndarray, work: Work, phase: int, context: RoundContext) -> Plan:
    """Return the plan of one phase for these clients, where the samples are kept.

    Numbers for each client or step are worked out on the host, those for each sample on the device.
    """
    device = data.home  # of the samples: they are read there
    start, n = data.ranges(work.split)[clients].T
    steps = count_steps(n, clients, work, context)
    planned = count_steps(n, clients, work, context._replace(progress=None))
    length, width = int(steps.max(initial=0)), int(np.minimum(n, work.batch or n).max(initial=0))
    per_pass = np.maximum(_batches(n, work), 1)
    which = np.arange(length)
    epoch, offset = which // per_pass[:, None], (which % per_pass[:, None]) * (work.batch or 0)
    size = np.minimum(n[:, None] - offset, work.batch or n[:, None])
    size = np.where(which < steps[:, None], size, 0)

    key = draws.keys(context.seed, "batches", _round(context), phase, numbers(clients, context))
    keys = draws.fold(draws.fold(key, -1)[:, None], which)
    column, shape = torch.arange(width, device=device), (len(clients), length, width)
    short = bool((size < width).any())
    real = column < _on(size, device) if short else column.new_ones((), dtype=torch.bool).expand(shape)
    if work.shuffle and work.batch is not None:
        passes = np.where(steps > 0, -(-steps // per_pass), 0)
        order, first = _orders(key, n, passes, device)
        place = _on(offset + _first_of(first, passes, epoch), device) + column
        place = order[torch.where(real, place, 0) if short else place] + _on(start[:, None], device)
    else:
        place = _on(offset + start[:, None], device) + column
    index = torch.where(real, place, 0) if short else place
    whole = work.batch is None
    return Plan(index, real, size, steps, put(keys, data.device), planned, whole, work.piece)


def _round(context: RoundContext) -> int | np.ndarray:
    """Return the round of all clients, or of each of them, on the host."""
    return context.round if isinstance(context.round, int) else np.asarray(context.round)


def _on(x: np.ndarray, device: torch.device) -> Tensor:
    """Return numbers for clients × steps on the device, with an axis for samples."""
    return put(x, device)[:, :, None]


def _batches(n: np.ndarray, work: Work) -> np.ndarray:
    return -(-n // work.batch) if work.batch else np.minimum(n, 1)


def _orders(
    key: np.ndarray, n: np.ndarray, passes: np.ndarray, device: torch.device
) -> tuple[Tensor, np.ndarray]:
    """Return a random order of range(n_i) for each pass of each client, joined, and where each begins."""
    lengths = np.repeat(n, passes)
    first = np.concatenate([[0], np.cumsum(lengths)])
    total = int(first[-1])
    if total == 0:
        return torch.zeros(1, dtype=torch.int64, device=device), first
    owner = np.repeat(np.arange(len(n)), passes)
    number = np.arange(len(lengths)) - np.repeat(np.cumsum(passes) - passes, passes)
    of_pass = np.stack([lengths, first[:-1], draws.fold(key[owner], number)])
    lengths_, first_, keys = put(of_pass, device)
    segment = torch.repeat_interleave(lengths_, output_size=total)
    place = torch.arange(total, device=device) - first_[segment]
    random = (draws.fold(keys[segment], place) >> 24) & ((1 << 40) - 1)
    if len(lengths) < NUMBERED_PASSES:  # sorting (pass, random bits) as one number orders every pass at once
        return place[torch.argsort((segment << 40) | random, stable=True)], first
    by_bits = torch.argsort(random, stable=True)
    return place[by_bits[torch.argsort(segment[by_bits], stable=True)]], first


def _first_of(first: np.ndarray, passes: np.ndarray, epoch: np.ndarray) -> np.ndarray:
    """Return where the order of each step's pass begins."""
    before = (np.cumsum(passes) - passes)[:, None]
    begin: np.ndarray = first[np.minimum(before + epoch, len(first) - 1)]
    return begin


def progress_of(cohort: Cohort) -> Tensor | None:
    """Return how much of its work each client of a cohort does; None: all of them all of it."""
    if not any(group.progress for group in cohort.groups):
        return None
    progress = torch.ones(len(cohort.clients), dtype=torch.float64)
    for group in cohort.groups:
        if group.progress:
            progress[list(group.positions)] = torch.tensor(group.progress, dtype=torch.float64)
    return progress
