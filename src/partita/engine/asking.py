"""What a schedule that chooses may know: facts about clients, and their loss when they are asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partita.algorithms.local.evaluation import evaluation, global_model
from partita.core import check, draws
from partita.core.metrics import mean_of
from partita.core.parts import Program
from partita.core.types import ClientState, Download, Group
from partita.engine.counters import ClientCounters
from partita.engine.stage import Stage, evaluation_name
from partita.schedule.known import Answers, Facts

if TYPE_CHECKING:
    from partita.engine.state import State

Clients = NDArray[np.int64]


def facts_of(samples: NDArray[np.int64], turns: ClientCounters) -> Facts:
    """Return what the server knows of each client by now: arrays that nobody else writes to."""
    loss = np.where(turns.seen > 0, turns.loss, np.nan)
    return Facts(samples.copy(), loss, turns.seen.copy(), turns.reports + turns.late + turns.lost)


@dataclass
class Questions:
    """Asks clients for the loss of the server's model, or of their own where the server has only a part.

    The last answers are kept: a schedule that looks ahead asks twice.
    """

    stage: Stage
    state: State
    last: tuple[tuple[int, bytes, int | None], Answers] | None = field(default=None, repr=False)

    def __call__(self, clients: Clients, samples: int | None) -> Answers:
        """Return the losses of these clients on their training samples, or on so many drawn ones of each."""
        if self.stage.setup.settings.norm == "static" and self.stage.problem.tracked:
            reason = "norm='static' measures statistics of the model only for evaluations"
            raise check.fail("choose", check.MISSING, "losses='last', or another norm=", reason)
        question = (self.state.server.version, clients.tobytes(), samples)
        if self.last is None or self.last[0] != question:
            with self.state.timer("evaluation"):
                loss = np.concatenate([self._losses(b, samples) for b in self.stage.blocks(clients)])
            self.last = question, Answers(loss, self._steps(clients, samples))
        return self.last[1]

    def _losses(self, clients: Clients, samples: int | None) -> NDArray[np.float64]:
        stage, state = self.stage, self.state
        whole = stage.is_global and state.server_is_complete
        name = evaluation_name("global" if whole else "personal", "train")
        program, executor, context = stage.programs[name], stage.executor, state.context(stage)
        if samples is not None:  # workers do not know this program, so it runs here
            rule = evaluation(global_model if whole else stage.personalize, "train", drawn=samples)
            program = Program(f"{name}, {samples} drawn samples", rule, whole_model=whole)
            executor = stage.in_this_process.executor
            context = context._replace(seed=int(draws.key(context.own_seed, "question")))
        server = state.server
        group = Group(tuple(range(len(clients))), Download(server.shared, server.extra, server.version))
        states = ClientState({}, {}) if whole else state.load(stage, clients)
        found = executor(program, clients, group, states, context)[0].metrics
        total, weight = (found[k].double().cpu().numpy() for k in ("loss", "loss_weight"))
        return mean_of(total, weight)

    def _steps(self, clients: Clients, samples: int | None) -> NDArray[np.int64]:
        """Return how many local steps see as many samples: an evaluation takes no longer."""
        n = self.stage.setup.data.train[clients, 1]
        n = n if samples is None else np.minimum(n, samples)
        batch = self.stage.plan.batch
        steps: NDArray[np.int64] = np.minimum(n, 1) if batch is None else -(-n // batch)
        return steps
