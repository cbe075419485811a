"""What a run measures, writes and tells: metrics, checkpoints, the files of its output folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partita.core import check
from partita.core.parts import Algorithm
from partita.core.types import Cohort, Tensors, Upload
from partita.engine import snapshot
from partita.engine.callbacks import Callback, Event
from partita.engine.description import describe, versions
from partita.engine.divergence import Tally, advice, divergence, who
from partita.engine.federation import Federation
from partita.engine.measuring import measured
from partita.engine.record import CLIENT_COLUMNS, Record
from partita.engine.store import checkpoint
from partita.engine.store.checkpoint import Checkpoint
from partita.engine.store.files import append_jsonl, plain, write_csv, write_json, write_jsonl
from partita.engine.timing import ClientCounters, Timing

CHECKPOINT_SECONDS = 30.0
SCORES, TRAIN_SCORES, TURNS = "scores/global", "scores/global_train", "turns/"
COUNTERS = (
    "uploads",  # of honest clients
    "bytes_up",
    "bytes_down",
    "client_steps",
    "training_seconds",
    "elapsed",
    "loss_sum",
    "loss_weight",
)


class Watch:
    """Follows one run. The loop calls it after every round."""

    def __init__(self, run: Federation, what: str, callbacks: Sequence[Callback]) -> None:
        self.run, self.what, self.callbacks = run, what, callbacks
        # for methods without a global model: the score of the global baseline by round
        self.reference: Callable[[int, float], float | None] = lambda version, time: None  # noqa: ARG005
        self.rows: list[dict[str, Any]] = []
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.excluded = Tally()  # whose uploads were set aside
        self.diverged: set[int] = set()  # the honest ones among them
        self.notes: dict[str, Any] = {}  # of the last aggregation
        self.timing = Timing(ClientCounters(run.data.clients))
        self.global_scores: np.ndarray | None = None
        self.global_train_scores: np.ndarray | None = None
        self.personal_scores: np.ndarray | None = None
        self.loss: float | None = None
        run.listener = self.note
        self.known_picks = 0
        self.threads = torch.get_num_threads()
        self.saved_at, self.saved_round, self.begin = time.monotonic(), -1, time.perf_counter()

    # ---- the loop's calls

    def start(self) -> None:
        """Before the first round; a resumed run has its earlier rows back already."""
        self.begin = time.perf_counter() - self.counters["elapsed"]
        if self.folder:
            write_jsonl(self.folder / "metrics.jsonl", self.rows)
            self.write_config()
        for callback in self.callbacks:
            callback.start(self.what, self.run.server.version, self.run.rounds)
            callback.config(self.what, {**plain(self.config()), "out": self.folder and str(self.folder)})
        if self.run.alone and self.run.stages[0].cohort is None:  # other rounds cost what their cohort costs
            self.note(f"all {self.run.data.clients:,} clients in each round")

    def note(self, text: str) -> None:
        """Something takes a while."""
        for callback in self.callbacks:
            callback.note(self.what, text)

    def after(
        self, cohort: Cohort, uploads: Upload, why: Sequence[str], sent: int, notes: Tensors, seconds: float
    ) -> None:
        """After a round: count, evaluate and checkpoint when it is time, tell.

        why    for each client of the cohort, why its upload was set aside ('': it was not)
        sent   bytes that the clients uploaded
        notes  what the aggregator says
        """
        run, version = self.run, self.run.server.version
        usable = [not w for w in why]
        with run.phases("metrics"):
            self.counters["bytes_up"] += sent
            self._count(cohort, uploads, why, seconds)
        self.notes = {k: v.tolist() for k, v in notes.items()}
        last_of_stage = run.schedule.done(run.server)
        if last_of_stage or self._evaluation_due(version, cohort.time):
            with run.phases("evaluation"):
                self.evaluate(cohort, uploads, usable)
        if last_of_stage and run.has_global and run.settings.train_scores:
            self.global_train_scores = run.scores("global", "train")
        self._tell(cohort, usable)
        if len(run.picks) > self.known_picks:
            self.write_config()
        if self._checkpoint_due(version):
            self.checkpoint()

    def evaluate(self, cohort: Cohort, uploads: Upload, usable: Sequence[bool]) -> None:
        """A row of metrics: every client's score under its own and under the global model; measures."""
        run, version = self.run, self.run.server.version
        weight = run.test_weight
        if run.has_global:
            self.global_scores = run.scores("global")
        self.personal_scores = run.scores("personal") if run.has_personal else self.global_scores
        row: dict[str, Any] = {
            "round": version,
            "time": cohort.time,
            "seconds": round(self.elapsed, 3),
            "train_loss": self._train_loss(),
            "test.global": self._global(version, cohort.time, weight),
            "test.personal": mean_score(self.personal_scores, weight),
            **self.timing.next_row(run.data.clients),
            "excluded": [run.data.names[c] for c in sorted(self.excluded)],
            "bytes_up": int(self.counters["bytes_up"]),
            "bytes_down": int(self.counters["bytes_down"]),
        }
        if self.notes:
            row["aggregation"] = self.notes
        if run.measures:
            row["measures"] = measured(run, cohort, uploads, usable)
        self.rows.append(row)
        self.counters["loss_sum"] = self.counters["loss_weight"] = 0.0
        if self.folder:
            append_jsonl(self.folder / "metrics.jsonl", row)
        for callback in self.callbacks:
            callback.evaluation(self.what, row)

    def end(self) -> None:
        """After the last round."""
        self.checkpoint()
        self.write_config()
        for callback in self.callbacks:
            callback.end(self.what)

    # ---- checkpoints

    @property
    def progress(self) -> tuple[int, int]:
        """The rounds that are done, and all of them."""
        return self.run.server.version, self.run.rounds

    @property
    def over(self) -> bool:
        """Whether no round is left."""
        return self.run.stage + 1 == len(self.run.stages) and self.run.schedule.done(self.run.server)

    @property
    def folder(self) -> Path | None:
        """The run's output folder, if it has one."""
        return self.run.folder

    def checkpoint(self) -> None:
        """The whole run on disk, or nothing of it."""
        version = self.run.server.version
        if self.folder is None or version == self.saved_round or self.run.settings.checkpoint_every == 0:
            return
        with self.run.phases("files"):
            checkpoint.write(self.folder / "checkpoint", version, self.tensors(), self.state())
            self.run.store.committed()
        self.saved_at, self.saved_round = time.monotonic(), version

    def restore(self, found: Checkpoint) -> None:
        """Go on where a checkpoint was."""
        facts = found.state
        snapshot.restore(self.run, found.tensors, facts)
        self.rows = facts["rows"]
        self.counters = facts["counters"]
        self.excluded = Tally.of(facts["excluded"])
        self.diverged = {c for c in self.excluded if self.run.honest[c]}
        turns = {k: found.tensors[TURNS + k] for k in ("clients", *vars(self.timing.turns))}
        self.timing = Timing.of(facts["timing"], self.timing.turns)
        self.timing.turns.restore(turns)
        scores, on_train = (found.tensors.get(name) for name in (SCORES, TRAIN_SCORES))
        self.global_scores = None if scores is None else scores.numpy()
        self.global_train_scores = None if on_train is None else on_train.numpy()
        self.saved_round = found.round

    def tensors(self) -> Tensors:
        """The tensors of a checkpoint; also the global model's scores, for stages that have no such model."""
        tensors = snapshot.tensors(self.run)
        tensors |= {f"{TURNS}{k}": v for k, v in self.timing.turns.tensors().items()}
        if self.global_scores is not None:
            tensors[SCORES] = torch.from_numpy(self.global_scores)
        if self.global_train_scores is not None:
            tensors[TRAIN_SCORES] = torch.from_numpy(self.global_train_scores)
        return tensors

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors."""
        return {
            **snapshot.facts(self.run),
            "rows": self.rows,
            "counters": {**self.counters, "elapsed": self.elapsed},
            "excluded": self.excluded,
            "timing": self.timing.facts(),
        }

    def _evaluation_due(self, version: int, time: float) -> bool:
        """Every so many rounds, or, for a number that is not whole, every so much virtual time."""
        every, until = self.run.settings.evaluate_every, self.run.schedule.until
        if every is None and version % max(1, self.run.rounds // 10) == 0:
            return True
        if isinstance(every, int):
            return version % every == 0
        step = until / 10 if every is None and until is not None else every
        before = self.rows[-1]["time"] if self.rows else 0.0
        return step is not None and time // step > before // step

    def _checkpoint_due(self, version: int) -> bool:
        every = self.run.settings.checkpoint_every
        return version % every == 0 if every else time.monotonic() - self.saved_at > CHECKPOINT_SECONDS

    # ---- numbers

    def _count(self, cohort: Cohort, uploads: Upload, why: Sequence[str], seconds: float) -> None:
        self.counters["bytes_down"] += cohort.bytes_down
        self.counters["training_seconds"] += seconds
        self.counters["client_steps"] += self.run.work_done(cohort)
        self.timing.count(cohort, sum(not reason for reason in why))
        honest, known = self.run.honest, len(self.diverged)
        for client, reason in zip(cohort.clients, why):
            if reason:
                self.excluded.count(client, self.run.server.version, reason)
                self.diverged |= {client} if honest[client] else set()
        arrived = [i for i, c in enumerate(cohort.clients) if honest[c]]
        self.counters["uploads"] += len(arrived)
        self._count_loss(cohort.clients, uploads, [i for i in arrived if not why[i]])
        if self.diverged and not known:
            self._warn()

    def divergence(self, finite: bool = True, baselines: Mapping[str, Any] | None = None) -> Any:
        """What is to be told of honest clients that diverged; see `partita.engine.divergence`."""
        return divergence(
            {c: times for c, times in self.excluded.items() if c in self.diverged},
            clients=int(self.run.honest.sum()),
            uploads=int(self.counters["uploads"]),
            finite=finite,
            algorithm=describe(self.run.given),
            baselines=baselines or {},
        )

    def _warn(self) -> None:
        """Once, in the round in which it begins: who looks on need not wait for the end."""
        found = self.divergence()
        check.warn(f"{self.what}: {who(found)} {advice(found)}")

    def _count_loss(self, clients: Sequence[int], uploads: Upload, keep: list[int]) -> None:
        if "loss" not in uploads.metrics:
            return
        steps, loss = (uploads.metrics[k].tolist() for k in ("steps", "loss"))  # on the host already
        weight = self.run.data.train[list(clients), 1].tolist()
        counted = [i for i in keep if steps[i] > 0]  # without a step, no loss
        total, sum_ = sum([weight[i] for i in counted]), sum([loss[i] * weight[i] for i in counted])
        self.loss = sum_ / total if total else None
        self.counters["loss_sum"] += sum_
        self.counters["loss_weight"] += total

    @property
    def elapsed(self) -> float:
        """Seconds of computing, over all resumptions."""
        return time.perf_counter() - self.begin

    def _train_loss(self) -> float | None:
        total = self.counters["loss_weight"]
        return self.counters["loss_sum"] / total if total else None

    def _global(self, version: int, time: float, weight: np.ndarray) -> float | None:
        if self.global_scores is not None:
            return mean_score(self.global_scores, weight)
        return self.reference(version, time)

    def _tell(self, cohort: Cohort, usable: Sequence[bool]) -> None:
        if not self.callbacks:
            return
        named = tuple(self.run.data.names[c] for c, good in zip(cohort.clients, usable) if not good)
        run = self.run
        event = Event(
            self.what,
            run.server.version,
            run.rounds,
            self.loss,
            named,
            {**run.phases.seconds},
            len(self.diverged),
            self.timing.abandoned,
        )
        for callback in self.callbacks:
            callback.round(event)

    # ---- files

    def config(self) -> dict[str, Any]:
        """Everything needed to run it again."""
        run = self.run
        return {
            "what": self.what,
            "algorithm": describe(run.given),
            "settings": describe(run.settings.recorded),
            "schedule": _one(describe(run.schedules)),
            "attack": describe(run.attack),
            "capacity": describe(run.devices.capacity),
            "measures": describe(run.measures),
            "loss": run.profile.loss.name,
            "metric": run.profile.metric.name,
            "model": {
                "class": type(run.model).__name__,
                "tensors": {k: list(v.shape) for k, v in run.base.items()},
                "initial": run.origin.initial,
                "fixed": run.origin.fixed,
            },
            "code": run.origin.code,
            "partition": _one([_part(run, stage.algorithm) for stage in run.stages]),
            "data": {
                "clients": run.data.clients,
                "fingerprint": run.fingerprint,
                "source": run.data.source,
            },
            "trial": run.origin.trial,
            "executor": {
                "requested": describe(run.settings.executor),
                "picks": run.picks,
                "threads": self.threads,
            },
            "versions": versions(),
        }

    def write_config(self) -> None:
        """config.json, again whenever something was decided."""
        self.known_picks = len(self.run.picks)
        if self.folder:
            write_json(self.folder / "config.json", self.config())

    def write_results(self, folder: Path, found: Record) -> None:
        """clients.csv and summary.json."""
        cells = found.table.values(CLIENT_COLUMNS, finite=True)
        write_csv(folder / "clients.csv", cells, CLIENT_COLUMNS)
        write_json(folder / "summary.json", found.facts)

    def tell_summary(self, found: Record) -> None:
        """To everyone who listens, once the files are there."""
        for callback in self.callbacks:
            callback.summary(self.what, plain(found.facts))


def _part(run: Federation, algorithm: Algorithm) -> dict[str, Any]:
    """Which tensors a method leaves with the clients, and how many numbers are shared and personal."""
    partition = run.partition_of(algorithm)
    shared, personal = (sum(run.base[k].numel() for k in names) for names in partition)
    return {"personal": partition.personal, "parameters": {"shared": shared, "personal": personal}}


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def mean_score(scores: np.ndarray | None, weight: np.ndarray) -> float | None:
    """The mean over all test samples of all clients; None when there is no such model or no test sample."""
    if scores is None or weight.sum() == 0:
        return None
    there = (weight > 0) & ~np.isnan(scores)
    total = weight[there].sum()
    return float((scores[there] * weight[there]).sum() / total) if total else None
