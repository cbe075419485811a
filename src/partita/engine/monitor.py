"""What a run measures and tells while it goes on: counters, rows of metrics, callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from partita.core import check
from partita.core.types import Cohort, Upload
from partita.engine.account import account
from partita.engine.callbacks import Callback, Event
from partita.engine.counters import Ending
from partita.engine.description import configuration, describe
from partita.engine.divergence import advice, divergence, who
from partita.engine.evaluate import mean_score, scored
from partita.engine.execute.plan import progress_of, worked
from partita.engine.folder import RunFolder
from partita.engine.loop import Round
from partita.engine.measuring import measures
from partita.engine.record import Record
from partita.engine.samples import Scored
from partita.engine.setup import Setup
from partita.engine.stage import Choices, Stage
from partita.engine.state import State, has_global
from partita.engine.stopping import Stop
from partita.engine.store import MemoryStore
from partita.engine.store.files import plain

LOG = logging.getLogger("partita")

SCORES = tuple(f"{split}.{of}" for split in ("validation", "test") for of in ("global", "personal", "loss"))


class Monitor:
    """Follows one run: it is called before the first round, after every round and at the end.

    reference  for methods without a global model, the score of the global baseline by round and time
    """

    def __init__(self, setup: Setup, name: str, callbacks: Sequence[Callback], folder: RunFolder) -> None:
        self.setup, self.name, self.callbacks, self.folder = setup, name, callbacks, folder
        self.reference: Callable[[int, float], float | None] = lambda version, time: None  # noqa: ARG005
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
        if text:
            LOG.info("%s: %s", self.name, text)
        for callback in self.callbacks:
            callback.note(self.name, text)

    def after(self, stage: Stage, state: State, done: Round) -> None:
        """Count a round, evaluate and write a checkpoint when it is time, and tell."""
        with state.timer("metrics"):
            self._count(stage, state, done)
        if stage.releases is not None and self.setup.elsewhere is not None:
            self.folder.keep_release(stage, state)  # what clients send is not the same again
        self._finish(stage, state, done)

    def go_on(self, stage: Stage, state: State) -> None:
        """Finish the round of a resumed run whose release nobody was told of."""
        if self.folder.within_a_round:
            nobody = Cohort((), (), (), state.schedule.time)
            self._finish(stage, state, Round(nobody, Upload({}), [], 0, {}, 0.0, False))

    def _finish(self, stage: Stage, state: State, done: Round) -> None:
        """Evaluate and write a checkpoint when it is time, and tell."""
        evaluated = state.is_over(stage) or self._evaluation_due(state, done.cohort.time)
        if evaluated:
            self._evaluate(stage, state, done)
        self._tell(state, done)
        if self._stop is not None:
            last = state.is_over(stage) and stage.number == len(self.setup.plans) - 1
            state.ended = "" if last else self._stop.reason
            if not evaluated:
                self._evaluate(stage, state, done)
        if state.is_over(stage) or self._stop is not None:
            self._end_stage(stage, state)
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
        evaluations = 100 if self.setup.settings.until else 10
        if every is None and version % max(1, self.setup.rounds // evaluations) == 0:
            return True
        if isinstance(every, int):
            return version % every == 0
        step = until / 10 if every is None and until is not None else every
        before = rows[-1]["time"] if rows else 0.0
        return step is not None and time // step > before // step

    def _evaluate(self, stage: Stage, state: State, done: Round) -> None:
        """Add a row of metrics, remember the state if it is the best so far, and tell."""
        with state.timer("evaluation"):
            row = self._row(stage, state, done)
        score, loss = (row[f"{self.setup.watched}.{of}"] for of in ("personal", "loss"))
        higher, version = self.setup.profile.metric.higher_is_better, state.server.version
        if state.convergence.see(version, score, loss, higher) and self._keeps_best(stage, state):
            state.keep_best()
        state.counters.rows.append(row)
        state.counters.loss_sum = state.counters.loss_weight = 0.0
        self.folder.append_row(row)
        self._call(lambda callback: callback.evaluation(self.name, row))

    def _row(self, stage: Stage, state: State, done: Round) -> dict[str, Any]:
        """Return a row of metrics: scores under the clients' own and under the global model, measures.

        They are of the validation samples, where there are such: test samples are for the end.
        """
        counters, names, split = state.counters, self.setup.data.names, self.setup.watched
        version, time = state.server.version, done.cohort.time
        if has_global(stage, state):
            counters.global_scored = {split: scored(stage, state, "global", split)}
        everyone = counters.global_scored.get(split)
        own = scored(stage, state, "personal", split) if stage.has_personal else everyone
        together = self.reference(version, time) if everyone is None else self._mean(everyone, split)
        row: dict[str, Any] = {
            "round": version,
            "time": time,
            "seconds": round(counters.elapsed, 3),
            "train_loss": counters.loss_sum / counters.loss_weight if counters.loss_weight else None,
            **dict.fromkeys(SCORES),
            f"{split}.global": together,
            f"{split}.personal": self._mean(own, split),
            f"{split}.loss": None if own is None else mean_score(own.loss, self.setup.weight(split)),
            **counters.clock.next_row(self.setup.data.clients),
            "excluded": [names[c] for c in sorted(counters.excluded)],
            "bytes_up": counters.bytes_up,
            "bytes_down": counters.bytes_down,
        }
        if figures := account(stage, state):
            row["privacy"] = figures
        if counters.share_unsolved is not None:
            row["unsolved"] = counters.share_unsolved
        if done.notes:
            row["aggregation"] = {k: v.tolist() for k, v in done.notes.items()}
        if self.setup.settings.measures:
            usable = [not rejection for rejection in done.rejections]
            row["measures"] = measures(stage, state, done.cohort, done.uploads, usable)
        return row

    def _mean(self, found: Scored | None, split: str) -> float | None:
        """Return the mean score over the samples of honest clients."""
        if found is None:
            return None
        return mean_score(found.scores[self.setup.profile.metric.name], self.setup.weight(split))

    def kept_best(self, stage: Stage, state: State) -> bool:
        """Return whether the models are those of the best round."""
        return self.setup.watched == "validation" and self._keeps_best(stage, state)

    def _keeps_best(self, stage: Stage, state: State) -> bool:
        """Return whether the best round is kept; by default only where all states fit into memory."""
        settings = self.setup.settings
        able = isinstance(state.store, MemoryStore)
        if settings.keep == "best" and not able:
            reason = "the states of the best round are kept in memory"
            raise check.fail("keep", "best", "'last', or store='memory'", reason)
        if settings.keep is not None:
            return settings.keep == "best"
        return settings.until is not None and able and stage.limits.states_fit

    def _end_stage(self, stage: Stage, state: State) -> None:
        """Go back to the best round, if that is kept, and score the global model while it is there."""
        converged = state.has_converged(stage)
        ending = Ending(
            stage.number, state.stage_start, state.server.version, stage.plan.rounds or 0, converged
        )
        earlier = [e for e in state.counters.endings if e.stage != stage.number]
        state.counters.endings = [*earlier, ending]
        state.restore_best()
        if has_global(stage, state):
            with state.timer("evaluation"):
                state.counters.global_scored = self.final(stage, state, "global")

    def final(self, stage: Stage, state: State, model: str) -> dict[str, Scored]:
        """Return how a model does at the end, by split; of test samples each one is kept."""
        wanted = {"validation": self.setup.watched == "validation", "train": self.setup.settings.train_scores}
        splits = [split for split, is_wanted in wanted.items() if is_wanted]
        return {s: scored(stage, state, model, s, every_sample=s == "test") for s in ("test", *splits)}

    # ---- counters

    def _count(self, stage: Stage, state: State, done: Round) -> None:
        counters, honest, cohort = state.counters, self.setup.honest, done.cohort
        counters.bytes_up += done.bytes_up
        counters.bytes_down += cohort.bytes_down
        counters.training_seconds += done.seconds
        clients = np.asarray(cohort.clients, dtype=np.int64)
        context = state.context(stage)._replace(progress=progress_of(cohort))
        steps, epochs = worked(stage.rule, clients, self.setup.data, context)
        counters.client_steps += steps
        counters.clock.count(cohort, done.abandoned)
        counters.clock.turns.epochs[clients] += epochs  # none of them is there twice
        diverged_before = self.diverged(state)
        usable = np.flatnonzero(honest[clients])
        counters.uploads += len(usable)
        if any(done.rejections):
            for client, rejection in zip(cohort.clients, done.rejections):
                if rejection:
                    counters.excluded.count(client, state.server.version, rejection)
            usable = usable[[not done.rejections[i] for i in usable]]
        self._count_steps(state, clients, done.uploads, usable)
        self._see(state, done)
        if not diverged_before and self.diverged(state):  # who looks on need not wait for the end
            told = self.divergence(state)
            check.warn(f"{self.name}: {who(told)} {advice(told)}")

    def _count_steps(self, state: State, clients: np.ndarray, uploads: Upload, usable: np.ndarray) -> None:
        if "loss" not in uploads.metrics:
            return
        steps, loss = (uploads.metrics[k].double().numpy() for k in ("steps", "loss"))  # on the host already
        counted = usable[steps[usable] > 0]  # without a step, no loss
        weight = self.setup.data.train[clients[counted], 1]
        total, weighted = int(weight.sum()), float(loss[counted] @ weight)
        self._train_loss = weighted / total if total else None
        state.counters.loss_sum += weighted
        state.counters.loss_weight += total
        if "unsolved" in uploads.metrics:
            missed = round(float(uploads.metrics["unsolved"].double().numpy()[counted].sum()))
            state.counters.unsolved += missed
            state.counters.solved += round(float(steps[counted].sum())) - missed

    def _see(self, state: State, done: Round) -> None:
        """Remember what clients whose uploads were used have told of their training loss."""
        used = np.array([not rejection for rejection in done.rejections], dtype=bool)
        clients = np.asarray(done.cohort.clients[: len(used)], dtype=np.int64)[used]
        loss, steps = (done.uploads.metrics.get(k) for k in ("loss", "steps"))
        told = np.full(len(clients), np.nan)
        if loss is not None and steps is not None and len(clients):
            told = np.where(steps.numpy()[used] > 0, loss.double().numpy()[used], np.nan)
        state.counters.clock.turns.see(clients, told, state.server.version)

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
            () if self.setup.crew is None else self.setup.crew.loads(),
            state.counters.rows[-1].get("privacy", {}) if state.counters.rows else {},
        )
        self._call(lambda callback: callback.round(event))

    def _call(self, tell: Callable[[Callback], None]) -> None:
        """Tell all callbacks, and remember if one of them ends the run."""
        for callback in self.callbacks:
            try:
                tell(callback)
            except Stop as stop:
                self._stop = self._stop or stop
