"""Measures the executors on the first clients that come and keeps the fastest.

A stack must be clearly faster than clients on their own: it takes the memory of all of them at once. Where
steps of a CPU take long, and there are few, two clients must do: trials are work that nobody uses.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from partita.core import tree
from partita.core.parts import Program
from partita.core.types import ClientState, Group, RoundContext, Upload
from partita.data import FederatedData
from partita.engine.execute.base import Executor, Runner
from partita.engine.execute.graph import Graph
from partita.engine.execute.plan import BoundProblem, client_steps, rounds_left

TRIAL_SECONDS = 0.25  # that a trial may take: the more clients, the more stacking gains
TRIAL_CLIENTS = (8, 64)  # at least, and at most
TRIAL_STEPS = 2
STACK_SPEEDUP = 1.1  # that a stack must reach to be picked
CLEAR_SPEEDUP = 2.0  # of a stack of few clients, above which no more are tried
TRIAL_SHARE = 0.1  # of the work, above which slow trials are left at the first ones
RECORDING_SECONDS = 5.0  # of work, below which nothing is recorded


@dataclass(frozen=True, eq=False)
class Auto:
    """An executor that decides once for each program (training, an evaluation) of each stage.

    `choices` says what was decided and why; a resumed run starts with the choices of the run it goes on with.
    `label` stands before the names of the choices: each class of devices has its own.
    """

    candidates: tuple[Runner, ...]
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    name: str = "auto"
    label: str = ""

    @property
    def bound(self) -> BoundProblem:
        """The problem and the data of the first candidate."""
        return self.candidates[0].bound

    def on(self, data: FederatedData, counted: FederatedData | None = None) -> Auto:
        """Return this executor bound to `data`."""
        return replace(self, candidates=tuple([e.on(data, counted) for e in self.candidates]))

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Run a program by the executor that was picked for it."""
        role = self._role(program, context)
        if role not in self.choices:
            if len(clients) < 2:
                return self.candidates[-1](program, clients, group, states, context)
            self.choices[role] = self._measure(program, clients, group, states, context)
        name = self.choices[role]["picked"]  # a resumed run may be on other cores than before
        picked = next((e for e in self.candidates if e.name == name), self.candidates[-1])
        return picked(program, clients, group, states, context)

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Let the executor that was picked draw ahead."""
        name = self.choices.get(self._role(program, context), {}).get("picked")
        for executor in self.candidates:
            if executor.name == name:
                executor.prefetch(program, clients, context)

    def release(self, kept: Any = ()) -> None:
        """Let those that train use the memory of earlier results again."""
        for executor in self.candidates:
            executor.release(kept)

    def _role(self, program: Program, context: RoundContext) -> str:
        return f"{self.label}{program.name}, stage {context.stage}"

    def _measure(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> dict[str, str]:
        """Return the fastest executor and the reason: by short trials, a graph by whole rounds."""

        def trial(executor: Executor, count: int, steps: int) -> float:
            head = slice(0, count)
            download = group.download
            if group.stacked:
                shared, extra = tree.rows(download[:2], head)
                download = download._replace(shared=shared, extra=extra)
            work = replace(context.work, steps=steps, epochs=None)
            short = context.of(head)._replace(work=work, progress=None)
            part = group._replace(download=download)
            return _seconds(executor, program, clients[head], part, tree.rows(states, head), short)

        stepwise = [e for e in self.candidates if not isinstance(e, Graph)]
        count = 2
        fastest = [min(trial(e, count, 1) for _ in range(2)) for e in stepwise]
        client_trial = TRIAL_STEPS * max(fastest) / count  # seconds of one client, at most
        fewest, most = TRIAL_CLIENTS
        slow = len(stepwise) * 2 * fewest * client_trial  # seconds of trials of the fewest clients
        left = self._steps_left(program, clients, context) * min(fastest) / count  # seconds of the work
        if fewest * client_trial <= TRIAL_SECONDS or slow <= TRIAL_SHARE * left:
            count = min(len(clients), fewest)
            fastest = [trial(e, count, TRIAL_STEPS) for e in stepwise]
            if not _settled(stepwise, fastest):
                count = min(len(clients), most, max(fewest, int(TRIAL_SECONDS / client_trial)))
                repeats = 3 if count * client_trial <= TRIAL_SECONDS else 2
                # in turn: all of them see the load of the machine
                times = [[trial(e, count, TRIAL_STEPS) for e in stepwise] for _ in range(repeats)]
                fastest = [min(of_one) for of_one in zip(*times)]
        seconds = {e.name: x for e, x in zip(stepwise, fastest)}
        best = min(seconds, key=lambda name: seconds[name] * (STACK_SPEEDUP if name == "vmap" else 1.0))
        listed = ", ".join(f"{name} {x * 1e3:.1f} ms" for name, x in seconds.items())
        reason = f"measured on {count} clients: {listed}"
        if seconds[best] > min(seconds.values()):
            reason += f"; a stack must be {STACK_SPEEDUP} times faster"
        graph = next((e for e in self.candidates if isinstance(e, Graph)), None)
        if graph is None or not program.trains:
            return {"picked": best, "why": reason}
        work = client_steps(self.bound.bind(program), clients, self.bound.data, context)
        stepwise_round = seconds[best] * work / (count * TRIAL_STEPS)
        if stepwise_round * rounds_left(context) < RECORDING_SECONDS:
            return {"picked": best, "why": f"{reason}; too little work for a graph"}
        # the first round records
        graph_round = [_seconds(graph, program, clients, group, states, context) for _ in range(2)][-1]
        return {
            "picked": graph.name if graph_round < stepwise_round else best,
            "why": f"{reason}; a round {stepwise_round * 1e3:.1f} ms, as a graph {graph_round * 1e3:.1f}",
        }

    def _steps_left(self, program: Program, clients: np.ndarray, context: RoundContext) -> float:
        """Return how many client steps the trials are for.

        On a GPU there is no end of them: the host bounds a step there, and a stack of two tells little.
        """
        if self.bound.data.device.type != "cpu":
            return math.inf
        if not program.trains:
            return TRIAL_STEPS * len(clients)
        return client_steps(self.bound.bind(program), clients, self.bound.data, context) * rounds_left(
            context
        )


def _settled(executors: list[Runner], seconds: list[float]) -> bool:
    """Return whether few clients have told enough: a stack gains with more of them."""
    stack = [x for e, x in zip(executors, seconds) if e.name == "vmap"]
    others = [x for e, x in zip(executors, seconds) if e.name != "vmap"]
    return bool(stack and others) and CLEAR_SPEEDUP * stack[0] <= min(others)


def _seconds(
    executor: Executor,
    program: Program,
    clients: np.ndarray,
    group: Group,
    states: ClientState,
    context: RoundContext,
) -> float:
    """Return how long these clients' work takes."""
    begin = time.perf_counter()
    executor(program, clients, group, states, context)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
