"""Measures the executors on the first clients that come and keeps the fastest.

A stack must be clearly faster than clients on their own: it takes the memory of all of them at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from partita.core import tree
from partita.core.parts import Program
from partita.core.types import ClientState, Download, Group, RoundContext, Upload
from partita.data import FederatedData
from partita.engine.execute.base import Executor, Runner
from partita.engine.execute.graph import Graph
from partita.engine.execute.plan import BoundProblem, client_steps

TRIAL = 0.25  # seconds that a trial may take: the more clients, the more stacking gains
FEWEST, MOST = 8, 64  # clients of a trial
CLEARLY = 1.1  # so many times faster
SHORT = 5.0  # seconds of work, below which nothing is recorded


@dataclass(frozen=True, eq=False)
class Auto:
    """An executor that decides once for each program (training, an evaluation) of each stage.

    `choices` says what was decided and why; a resumed run starts with the choices of the run it goes on with.
    """

    candidates: tuple[Runner, ...]
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    name: str = "auto"
    label: str = ""  # of a class of devices: its choices are its own

    @property
    def bound(self) -> BoundProblem:
        """What the first of them works on."""
        return self.candidates[0].bound

    def on(self, data: FederatedData) -> Auto:
        """Return this executor bound to `data`."""
        return replace(self, candidates=tuple([e.on(data) for e in self.candidates]))

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Run by the executor that was picked for this program."""
        task = f"{self.label}{program.name}, stage {context.stage}"
        if task not in self.choices:
            if len(clients) < 2:
                return self.candidates[-1](program, clients, group, states, context)
            self.choices[task] = self._measure(program, clients, group, states, context)
        wanted = self.choices[task]["picked"]  # a resumed run may be on other cores than before
        picked = next((e for e in self.candidates if e.name == wanted), self.candidates[-1])
        return picked(program, clients, group, states, context)

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Whoever was picked may draw ahead."""
        picked = self.choices.get(f"{self.label}{program.name}, stage {context.stage}", {}).get("picked")
        for executor in self.candidates:
            if executor.name == picked:
                executor.prefetch(program, clients, context)

    def release(self) -> None:
        """Let those that train use the memory of earlier results again."""
        for executor in self.candidates:
            executor.release()

    def _measure(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> dict[str, str]:
        def trial(executor: Executor, count: int, steps: int) -> float:
            few = slice(0, count)
            short = context.of(few)._replace(work=replace(context.work, steps=steps, epochs=None))
            part = group._replace(download=_some(group, few))
            begin = time.perf_counter()
            executor(program, clients[few], part, tree.rows(states, few), short)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        tried = [e for e in self.candidates if not isinstance(e, Graph)]
        warm = {e.name: min(trial(e, 2, 1) for _ in range(2)) for e in tried}
        steps, each = 2, max(warm.values()) / 2
        count = min(len(clients), MOST, max(FEWEST, int(TRIAL / (steps * each))))
        turns = 3 if count * steps * each <= TRIAL else 2  # in turn: all of them see the load of the machine
        found = [[trial(e, count, steps) for e in tried] for _ in range(turns)]
        seconds = {e.name: min(times) for e, times in zip(tried, zip(*found))}
        shown = ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in seconds.items())
        best = min(seconds, key=lambda name: seconds[name] * (CLEARLY if name == "vmap" else 1.0))
        why = f"measured on {count} clients: {shown}"
        if seconds[best] > min(seconds.values()):
            why += f"; a stack must be {CLEARLY} times faster"
        graph = next((e for e in self.candidates if isinstance(e, Graph)), None)
        if graph is None or not program.trains:
            return {"picked": best, "why": why}
        work = client_steps(self.bound.bind(program), clients, self.bound.data, context)
        usual = seconds[best] * work / (count * steps)
        since = (
            context.stage_round if isinstance(context.stage_round, int) else int(context.stage_round.min())
        )
        if usual * (context.stage_rounds - since) < SHORT:
            return {"picked": best, "why": f"{why}; too little work for a graph"}
        recorded = [self._round(graph, program, clients, group, states, context) for _ in range(2)][-1]
        picked = graph.name if recorded < usual else best
        return {
            "picked": picked,
            "why": f"{why}; a round {usual * 1e3:.1f} ms, as a graph {recorded * 1e3:.1f}",
        }

    @staticmethod
    def _round(
        executor: Executor,
        program: Program,
        clients: np.ndarray,
        group: Group,
        states: ClientState,
        context: RoundContext,
    ) -> float:
        """Seconds of all clients' work, as it is."""
        begin = time.perf_counter()
        executor(program, clients, group, states, context)
        torch.cuda.synchronize()
        return time.perf_counter() - begin


def _some(group: Group, few: slice) -> Download:
    if not group.stacked:
        return group.download
    shared, extra = tree.rows(group.download[:2], few)
    return group.download._replace(shared=shared, extra=extra)
