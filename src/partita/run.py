"""The result of a run: models, scores, who gained and who lost."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from partita import check, tree
from partita.federation import Federation, split_tensors
from partita.store import Store, checkpoint, open_store
from partita.store.files import copy_folder, read_jsonl, write_json, write_jsonl
from partita.types import ClientState, Tensors
from partita.watch import CLIENT_COLUMNS, Watch, mean_score


class Summary(dict[str, Any]):
    """summary.json as a dictionary; printed, it is a table for people."""

    def __str__(self) -> str:
        test, hurt, metric = self["test"], self["hurt"], self["metric"]
        lines = [
            f"{self['algorithm']}: {self['clients']} clients, {self['rounds']} rounds, seed {self['seed']}"
        ]
        names = {"local": "each alone", "global": "one global model", "personal": "personal models"}
        lines += [f"  {names[k]:18} {metric} {_number(test[k])}" for k in names]
        for key, other in (("vs_global", "the global model"), ("vs_local", "training alone")):
            if hurt[key] is not None:
                lines.append(f"  {hurt[key]} of {self['scored']} clients do worse than with {other}")
        if self["excluded"]:
            lines.append(f"  excluded for unusable uploads: {', '.join(self['excluded'])}")
        speed = self["client_steps_per_second"]
        lines.append(
            f"  {self['seconds']:.1f} s, {speed:,.0f} client steps per second, "
            f"{_bytes(self['bytes_up'])} up, {_bytes(self['bytes_down'])} down"
        )
        return "\n".join(lines)


class Client:
    """One client after a run: its tensors and its model."""

    def __init__(self, run: Run, number: int) -> None:
        self._run, self.number, self.name = run, number, run.clients[number]["client"]
        state = tree.row(run.store.load([number]), 0)
        self.personal: Tensors = state.personal
        self.memory: Tensors = state.memory

    def model(self) -> nn.Module:
        """The model that this client is evaluated with, ready to use."""
        return self._run.filled(self._run.personalized(self.number))

    def __repr__(self) -> str:
        return f"Client({self.name!r}, personal={list(self.personal)}, memory={list(self.memory)})"


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """What `federate` returns and `partita.load` reads.

    `shared` are the server's tensors, `metrics` the rows of metrics.jsonl, `clients` those of clients.csv.
    """

    shared: Tensors
    metrics: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    base: Tensors
    store: Store
    module: nn.Module | None
    personalized: Callable[[int], Tensors]
    facts: Summary
    write: Callable[[Path], None]

    @classmethod
    def of(cls, run: Federation, watch: Watch, references: Mapping[str, Run]) -> Run:
        """The result of a finished run; also writes clients.csv and summary.json."""
        scores = _scores(run, watch, references)
        clients, summary = _client_rows(run, scores), _summary(run, watch, scores)

        def write(folder: Path) -> None:
            if run.folder is not None:
                copy_folder(run.folder, folder)
                return
            write_json(folder / "config.json", watch.config())
            write_jsonl(folder / "metrics.jsonl", watch.rows)
            watch.write_results(folder, clients, summary)
            checkpoint.write(folder / "checkpoint", run.server.version, watch.tensors(), watch.state())

        if run.folder is not None:
            watch.write_results(run.folder, clients, summary)
        return cls(
            run.server.shared,
            watch.rows,
            clients,
            run.base,
            run.store,
            run.model,
            run.personal_model,
            summary,
            write,
        )

    @property
    def names(self) -> list[str]:
        """The clients' names, in order."""
        return [row["client"] for row in self.clients]

    def client(self, number: int) -> Client:
        """A client by its number, 0 to clients − 1."""
        return Client(self, check.integer("client", number, low=0, high=len(self.clients) - 1))

    def model(self) -> nn.Module:
        """The server's model; where a part of it is personal, that part is as at the start."""
        return self.filled({**self.base, **self.shared})

    def filled(self, tensors: Tensors) -> nn.Module:
        """A copy of the model with these tensors."""
        if self.module is None:
            raise ValueError(
                "model=None: expected partita.load(folder, model=...) with the model that was trained"
            )
        model = copy.deepcopy(self.module)
        there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in tensors.items():
                there[name].copy_(value)
        return model.eval()

    def scores(self, model: str = "personal") -> np.ndarray:
        """The test score of every client, in order, under its 'local', 'global' or 'personal' model."""
        check.choice("model", model, ("local", "global", "personal"))
        return np.array([np.nan if r[model] is None else r[model] for r in self.clients])

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger score is a better one."""
        return bool(self.facts["higher_is_better"])

    def summary(self) -> Summary:
        """Scores of local-only, global and personal models, and how many clients were hurt."""
        return self.facts

    def save(self, folder: str | Path) -> None:
        """The run as a folder like that of `out=`; `partita.load` reads it."""
        target = Path(folder)
        if (target / "config.json").exists():
            raise check.fail("folder", str(folder), "a new folder: this one holds a run already")
        target.mkdir(parents=True, exist_ok=True)
        self.write(target)

    def __repr__(self) -> str:
        return f"Run of {self.facts}"


def load(folder: str | Path, model: nn.Module | None = None) -> Run:
    """A finished run from its folder. `model` (as it was trained) is needed for `client(i).model()` only."""
    folder = Path(folder)
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        raise check.fail(
            "folder", str(folder), "the folder of a finished run (it has no summary.json)"
        ) from None
    found = checkpoint.read(folder / "checkpoint")
    if found is None:
        raise check.fail("folder", str(folder), "the folder of a run (it has no checkpoint)")
    parts = split_tensors(found.tensors)
    rows = _read_clients(folder / "clients.csv")
    template = ClientState(parts["personal"], parts["memory"])
    states = folder / "checkpoint" / f"clients-{found.state['stage']}"
    store = open_store(template, len(rows), kind="disk" if states.exists() else "memory", folder=states)
    store.restore(parts["store"])
    shared, base = parts["shared"], parts["base"]

    def personalized(number: int) -> Tensors:
        return {**base, **shared, **tree.row(store.load([number]).personal, 0)}

    def write(target: Path) -> None:
        copy_folder(folder, target)

    metrics = read_jsonl(folder / "metrics.jsonl")
    return Run(shared, metrics, rows, base, store, model, personalized, Summary(summary), write)


def _read_clients(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as f:
        rows: list[dict[str, Any]] = list(csv.DictReader(f))
    kinds = {"n_train": int, "n_test": int, "capacity": float, "byzantine": int}
    for row in rows:
        for column in CLIENT_COLUMNS[1:]:
            row[column] = kinds.get(column, float)(row[column]) if row[column] != "" else None
    return rows


def _scores(run: Federation, watch: Watch, references: Mapping[str, Run]) -> dict[str, np.ndarray | None]:
    """Every client's score alone, under the global and under its personal model, as far as they exist."""
    everyone = watch.global_scores
    if everyone is None and run.has_global:  # resumed after its last evaluation
        everyone = run.scores("global")
    personal = watch.personal_scores
    if personal is None:
        personal = run.scores("personal") if run.has_personal else everyone
    if everyone is None and "global" in references:
        everyone = references["global"].scores("global")
    alone = None
    if "local" in references:
        alone = np.full(run.data.clients, np.nan)
        trained = references["local"].store.touched  # a client that had no turn has no model of its own
        alone[trained] = references["local"].scores("personal")[trained]
    if alone is None and run.alone:
        alone = personal
    return {"local": alone, "global": everyone, "personal": personal}


def _client_rows(run: Federation, scores: Mapping[str, np.ndarray | None]) -> list[dict[str, Any]]:
    def score(kind: str, i: int) -> float | None:
        found = scores[kind]
        return None if found is None or np.isnan(found[i]) else float(found[i])

    return [
        {
            "client": name,
            "n_train": int(run.data.train[i, 1]),
            "n_test": int(run.data.test[i, 1]),
            "capacity": 1.0,
            "byzantine": 0,
            **{kind: score(kind, i) for kind in ("local", "global", "personal")},
        }
        for i, name in enumerate(run.data.names)
    ]


def _summary(run: Federation, watch: Watch, scores: Mapping[str, np.ndarray | None]) -> Summary:
    weight = run.data.test[:, 1]
    counters = watch.counters
    seconds = counters["training_seconds"]
    better = 1.0 if run.findings.metric.higher_is_better else -1.0
    return Summary(
        algorithm=run.given.name,
        seed=run.settings.seed,
        rounds=run.rounds,
        clients=run.data.clients,
        scored=int((weight > 0).sum()),
        metric=run.findings.metric.name,
        higher_is_better=run.findings.metric.higher_is_better,
        test={kind: mean_score(found, weight) for kind, found in scores.items()},
        hurt={f"vs_{kind}": _hurt(scores["personal"], scores[kind], better) for kind in ("global", "local")},
        seconds=round(watch.elapsed, 3),
        client_steps_per_second=round(counters["client_steps"] / seconds, 1) if seconds else 0.0,
        bytes_up=int(counters["bytes_up"]),
        bytes_down=int(counters["bytes_down"]),
        excluded=[run.data.names[c] for c in sorted(watch.excluded)],
    )


def _hurt(personal: np.ndarray | None, other: np.ndarray | None, better: float) -> int | None:
    """How many clients score worse with their personal model."""
    if personal is None or other is None:
        return None
    both = ~(np.isnan(personal) | np.isnan(other))
    return int((better * personal[both] < better * other[both]).sum())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
