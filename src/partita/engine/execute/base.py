"""What every executor does alike: bind a rule to its problem, know the rates and the work of a phase."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from partita.core.device import put
from partita.core.parts import LocalRule, Phase, Program
from partita.core.types import ClientState, Group, RoundContext, Upload, Work
from partita.data import FederatedData
from partita.engine.execute.plan import count_steps
from partita.engine.execute.problem import ModelProblem


class Executor(Protocol):
    """Runs a local rule for the clients of a group; returns stacks in their order."""

    @property
    def name(self) -> str: ...

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]: ...

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Prepare what these clients will do next, while a device is at work."""
        ...


class Runner(Executor, Protocol):
    """An executor on data that may be exchanged."""

    @property
    def bound(self) -> BoundProblem: ...

    def on(self, data: FederatedData) -> Runner:
        """The same on other samples."""
        ...


@dataclass(frozen=True, eq=False)
class BoundProblem:
    """A problem, the data it is solved on, and the rules bound to it so far."""

    problem: ModelProblem
    data: FederatedData
    rules: dict[str, LocalRule] = field(default_factory=dict)

    def bind(self, program: Program) -> LocalRule:
        """The rule for this problem; the same object every time, so that captured steps can be reused."""
        if program.name not in self.rules:
            self.rules[program.name] = program.build(self.problem)
        return self.rules[program.name]

    def on(self, data: FederatedData) -> BoundProblem:
        """The same problem and rules on other samples."""
        return replace(self, data=data)

    def rates(self, phase: Phase, context: RoundContext) -> tuple[tuple[Tensor, ...], bool]:
        """The phase's learning rates in this round, and whether they have a row for each client.

        0-d (or rows of) float64: they take the type of what they multiply.
        """
        device, since = self.data.x.device, context.stage_round
        rounds = [since] if isinstance(since, int) else since.tolist()
        values = [[rate(t, context.stage_rounds) for t in rounds] for rate in phase.lr]
        rows = any(v != own[0] for own in values for v in own)
        if rows:
            return tuple([put(np.array(own, dtype=np.float64), device) for own in values]), True
        return tuple([torch.full((), own[0], dtype=torch.float64, device=device) for own in values]), False


def work_of(phase: Phase, context: RoundContext) -> Work:
    """What this phase asks for."""
    return context.work if phase.work is None else phase.work(context)


def client_steps(rule: LocalRule, clients: np.ndarray, data: FederatedData, context: RoundContext) -> int:
    """Steps that these clients take in all phases of a rule."""
    total = 0
    for phase in rule.phases:
        work = work_of(phase, context)
        n = data.ranges(work.split)[clients, 1]
        total += int(count_steps(n, clients, work).sum())
    return total
