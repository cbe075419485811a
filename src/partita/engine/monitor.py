"""What a run measures and tells while it goes on: counters, rows of metrics, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from partita.core import check
from partita.core.types import Upload
from partita.engine.callbacks import Callback, Event
from partita.engine.description import configuration, describe
from partita.engine.divergence import advice, divergence, who
from partita.engine.evaluate import mean_score, measures, scores
from partita.engine.execute.plan import client_steps
from partita.engine.folder import RunFolder
from partita.engine.loop import Round
from partita.engine.record import Record
from partita.engine.setup import Setup
from partita.engine.stage import Choices, Stage
from partita.engine.state import State, has_global
from partita.engine.stopping import Stop
from partita.engine.store.files import plain


class Monitor:
    """Follows one run: it is called before the first round, after every round and at the end.

    reference  for methods without a global model, the score of the global baseline by round and time
    """

    def __init__(self, setup: Setup, name: str, callbacks: Sequence[Callback], folder: RunFolder) -> None:
        self.setup, self.name, self.callbacks, self.folder = setup, name, callbacks, folder
        self.reference: Callable[[int, float], float | None] = lambda version, time: None  # noqa: ARG005
        self.personal_scores: np.ndarray | None = None
        self._train_loss: float | None = None  # of the last round
        self._choices_written = 0
        self._stop: Stop | None = None  # of a callback

    # ---- what the loop calls

    def start(self, state: State) -> None:
        """Tell that the run begins, or goes on; a resumed run has its earlier rows back already."""
        state.counters.start()
        self.folder.write_rows(state.counters.rows)
        self.write_config(state.executor_choices)
        config = {**plain(self.config(state.executor_choices)), "out": self.folder.name}
        for callback in self.callbacks:
            callback.start(self.name, state.server.version, self.setup.rounds)
            callback.config(self.name, config)
        if self.setup.alone and self.setup.plans[0].cohort is None:  # else a round costs what its cohort does
            self.note(f"all {self.setup.data.clients:,} clients in each round")

    def note(self, text: str) -> None:
        """Tell what takes a while now."""
        for callback in self.callbacks:
            callback.note(self.name, text)

    def after(self, stage: Stage, state: State, done: Round) -> None:
        """Count a round, evaluate and write a checkpoint when it is time, and tell."""
        with state.timer("metrics"):
            self._count(stage, state, done)
        last_of_stage = state.schedule.done(state.server)
        evaluated = last_of_stage or self._evaluation_due(state, done.cohort.time)
        if evaluated:
            self._evaluate(stage, state, done)
        self._tell(state, done)
        if self._stop is not None:
            last = last_of_stage and stage.number == len(self.setup.plans) - 1
            state.ended, last_of_stage = "" if last else self._stop.reason, True
            if not evaluated:
                self._evaluate(stage, state, done)
        if last_of_stage and has_global(stage, state) and self.setup.settings.train_scores:
            state.counters.global_train_scores = scores(stage, state, "global", "train")
        if len(state.executor_choices) > self._choices_written:
            self.write_config(state.executor_choices)
        if self.folder.path is not None and self.folder.checkpoint_due(state.server.version):
            self.folder.checkpoint(stage, state)

    def end(self, stage: Stage, state: State) -> None:
        """Write the last checkpoint, and tell that the run is over."""
        self.folder.checkpoint(stage, state)
        self.write_config(state.executor_choices)
        for callback in self.callbacks:
            callback.end(self.name)

    def tell_summary(self, record: Record) -> None:
        """Tell the summary, once the files are there."""
        for callback in self.callbacks:
            callback.summary(self.name, plain(record.facts))

    # ---- config.json

    def config(self, choices: Choices) -> dict[str, Any]:
        """Everything needed to run it again."""
        return configuration(self.setup, self.name, choices)

    def write_config(self, choices: Choices) -> None:
        """Write config.json, again whenever something was decided."""
        self._choices_written = len(choices)
        if self.folder.path is not None:
            self.folder.write_config(self.config(choices))

    # ---- rows of metrics

    def _evaluation_due(self, state: State, time: float) -> bool:
        """Whether so many rounds, or, for a number that is not whole, so much virtual time has passed."""
        every, until = self.setup.settings.evaluate_every, state.schedule.until
        version, rows = state.server.version, state.counters.rows
        if every is None and version % max(1, self.setup.rounds // 10) == 0:
            return True
        if isinstance(every, int):
            return version % every == 0
        step = until / 10 if every is None and until is not None else every
        before = rows[-1]["time"] if rows else 0.0
        return step is not None and time // step > before // step

    def _evaluate(self, stage: Stage, state: State, done: Round) -> None:
        """Add a row of metrics, and tell it."""
        with state.timer("evaluation"):
            row = self._row(stage, state, done)
        state.counters.rows.append(row)
        state.counters.loss_sum = state.counters.loss_weight = 0.0
        self.folder.append_row(row)
        self._call(lambda callback: callback.evaluation(self.name, row))

    def _row(self, stage: Stage, state: State, done: Round) -> dict[str, Any]:
        """Return a row of metrics: scores under the clients' own and under the global model, measures."""
        counters, names, weight = state.counters, self.setup.data.names, self.setup.test_weight
        version, time = state.server.version, done.cohort.time
        if has_global(stage, state):
            counters.global_scores = scores(stage, state, "global")
        own = scores(stage, state, "personal") if stage.has_personal else counters.global_scores
        self.personal_scores = own
        everyone = mean_score(counters.global_scores, weight)
        row: dict[str, Any] = {
            "round": version,
            "time": time,
            "seconds": round(counters.elapsed, 3),
            "train_loss": counters.loss_sum / counters.loss_weight if counters.loss_weight else None,
            "test.global": self.reference(version, time) if counters.global_scores is None else everyone,
            "test.personal": mean_score(own, weight),
            **counters.clock.next_row(self.setup.data.clients),
            "excluded": [names[c] for c in sorted(counters.excluded)],
            "bytes_up": counters.bytes_up,
            "bytes_down": counters.bytes_down,
        }
        if done.notes:
            row["aggregation"] = {k: v.tolist() for k, v in done.notes.items()}
        if self.setup.settings.measures:
            usable = [not rejection for rejection in done.rejections]
            row["measures"] = measures(stage, state, done.cohort, done.uploads, usable)
        return row

    # ---- counters

    def _count(self, stage: Stage, state: State, done: Round) -> None:
        counters, honest, cohort = state.counters, self.setup.honest, done.cohort
        counters.bytes_up += done.bytes_up
        counters.bytes_down += cohort.bytes_down
        counters.training_seconds += done.seconds
        clients = np.asarray(cohort.clients, dtype=np.int64)
        counters.client_steps += client_steps(stage.rule, clients, self.setup.data, state.context(stage))
        counters.clock.count(cohort, done.rejections.count(""))
        diverged_before = self.diverged(state)
        for client, rejection in zip(cohort.clients, done.rejections):
            if rejection:
                counters.excluded.count(client, state.server.version, rejection)
        arrived = [i for i, c in enumerate(cohort.clients) if honest[c]]
        counters.uploads += len(arrived)
        usable = [i for i in arrived if not done.rejections[i]]
        self._count_loss(state, cohort.clients, done.uploads, usable)
        if not diverged_before and self.diverged(state):  # who looks on need not wait for the end
            told = self.divergence(state)
            check.warn(f"{self.name}: {who(told)} {advice(told)}")

    def _count_loss(self, state: State, clients: Sequence[int], uploads: Upload, usable: list[int]) -> None:
        if "loss" not in uploads.metrics:
            return
        steps, loss = (uploads.metrics[k].tolist() for k in ("steps", "loss"))  # on the host already
        weight = self.setup.data.train[list(clients), 1].tolist()
        counted = [i for i in usable if steps[i] > 0]  # without a step, no loss
        total, weighted = sum([weight[i] for i in counted]), sum([loss[i] * weight[i] for i in counted])
        self._train_loss = weighted / total if total else None
        state.counters.loss_sum += weighted
        state.counters.loss_weight += total

    def diverged(self, state: State) -> list[int]:
        """The honest clients whose uploads were set aside."""
        return [c for c in state.counters.excluded if self.setup.honest[c]]

    def divergence(
        self, state: State, finite: bool = True, baselines: Mapping[str, Any] | None = None
    ) -> Any:
        """What is to be told of honest clients that diverged; see `partita.engine.divergence`."""
        return divergence(
            {c: state.counters.excluded[c] for c in self.diverged(state)},
            clients=int(self.setup.honest.sum()),
            uploads=state.counters.uploads,
            finite=finite,
            algorithm=describe(self.setup.algorithm),
            baselines=baselines or {},
        )

    def _tell(self, state: State, done: Round) -> None:
        if not self.callbacks:
            return
        names, rejected = self.setup.data.names, zip(done.cohort.clients, done.rejections)
        event = Event(
            self.name,
            state.server.version,
            self.setup.rounds,
            self._train_loss,
            tuple(names[c] for c, rejection in rejected if rejection),
            {**state.timer.seconds},
            len(self.diverged(state)),
            state.counters.clock.abandoned,
        )
        self._call(lambda callback: callback.round(event))

    def _call(self, tell: Callable[[Callback], None]) -> None:
        """Tell all callbacks, and remember if one of them ends the run."""
        for callback in self.callbacks:
            try:
                tell(callback)
            except Stop as stop:
                self._stop = self._stop or stop
