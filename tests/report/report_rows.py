"""Records as a run would leave them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partita.engine.record import MODELS, Record, Summary

Row = dict[str, Any]


def record(
    clients: Sequence[Row],
    metrics: Sequence[Row] = (),
    config: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """The figures of a run that never ran."""
    return Record(list(metrics), list(clients), dict(config or {}), Summary(facts or {}))


def client(name: str, personal: Any, other: Any = None, alone: Any = None, **more: Any) -> Row:
    """One row of clients.csv."""
    row = {"client": name, "n_train": 20, "n_test": 10, "capacity": 1.0, "byzantine": 0}
    return {**row, "local": alone, "global": other, "personal": personal, **more}


def fake(*clients: Row, seed: int = 0, **facts: Any) -> Record:
    """A run of these clients, with the mean scores over their test samples."""
    honest = [row for row in clients if not row.get("byzantine")]
    test = {model: weighted(honest, model) for model in MODELS}
    scored = sum(isinstance(row.get("personal"), float) and np.isfinite(row["personal"]) for row in honest)
    known = {"metric": "accuracy", "higher_is_better": True, "seed": seed, "test": test, "scored": scored}
    return record(clients, facts={**known, **facts})


def weighted(rows: Sequence[Row], model: str) -> float | None:
    """The mean over all test samples of the clients that have a score."""
    pairs = [(row[model], row["n_test"]) for row in rows if row.get(model) is not None and row.get("n_test")]
    pairs = [(x, n) for x, n in pairs if np.isfinite(x)]
    return sum(x * n for x, n in pairs) / sum(n for _, n in pairs) if pairs else None


def example(
    method: str = "fedalt", seed: int = 0, clients: int = 40, gain: float = 0.06, train: bool = False
) -> Record:
    """A whole run as `federate` would leave it, with clients of every kind; no training behind it."""
    draw = np.random.default_rng([seed, clients])
    n_train = np.maximum(1, draw.lognormal(3.5, 1.0, clients)).astype(int)
    n_test = draw.integers(6, 40, clients)
    rows = []
    for i in range(clients):
        base = np.clip(draw.normal([0.82, 0.84], 0.08), 0, 1)
        own = np.clip(base[1] + draw.normal(gain, 0.06 + 0.2 / np.sqrt(n_train[i])), 0, 1)
        answers = [float(round(x * n_test[i]) / n_test[i]) for x in (*base, own)]
        more = {"label_shift": float(draw.beta(3, 4)), "distance": float(draw.lognormal(0, 0.5))}
        if train:
            more |= {"global_train": 0.85, "personal_train": float(draw.uniform(0.84, 1.0))}
        sizes = {"n_train": int(n_train[i]), "n_test": int(n_test[i])}
        rows.append(client(f"client {i}", answers[2], answers[1], answers[0], **sizes, **more))
    scores = {
        kind: float(np.average([row[kind] for row in rows], weights=n_test))
        for kind in ("local", "global", "personal")
    }
    facts = {
        "algorithm": method,
        "seed": seed,
        "rounds": 50,
        "clients": clients,
        "scored": clients,
        "metric": "accuracy",
        "higher_is_better": True,
        "test": scores,
        "seconds": 83.2,
        "client_steps_per_second": 5310.4,
        "bytes_up": 20_000_000,
        "bytes_down": 2.1e7,
        "excluded": ["client 3"],
        "peak_memory": 512_000_000,
        "client_memory": 3_400_000,
        "parameters": {"shared": 4160, "personal": 650},
    }
    return record(rows, curve(scores, seed), config(method), facts)


def curve(scores: dict[str, float], seed: int) -> list[Row]:
    """Rows of metrics.jsonl that end at these scores."""
    draw = np.random.default_rng(seed)
    rows = []
    for at in range(5, 51, 5):
        part = 1 - np.exp(-at / 8) + draw.normal(0, 0.01)
        row = {"round": at, "time": float(at), "seconds": at * 1.5, "train_loss": float(2 * np.exp(-at / 15))}
        row |= {f"test.{kind}": float(scores[kind] * part) for kind in ("global", "personal")}
        rows.append({**row, "staleness": 0.0, "excluded": [], "bytes_up": at, "bytes_down": at})
    return rows


def config(method: str) -> dict[str, Any]:
    """A config.json."""
    return {
        "what": method,
        "algorithm": {"name": method, "personal": "output", "lr": 0.1, "momentum": None},
        "settings": {"rounds": 50, "cohort": 20, "seed": 0, "baselines": True},
        "model": {"class": "Blocks", "tensors": {"hidden.weight": [64, 64], "output.bias": [10]}},
        "data": {"clients": 40, "source": {"name": "digits"}},
        "executor": {
            "requested": "auto",
            "picks": {"training": {"picked": "vmap", "why": "2 ms, loop 9 ms"}},
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
    }


def attacked(method: str = "fedalt", gain: float = 0.06) -> Record:
    """The same with ten Byzantine clients among forty."""
    run = example(method, gain=gain)
    for row in run.clients[::4]:
        row |= {"client": f"byzantine {row['client']}", "byzantine": 1, "personal": 0.01}
    run.facts.update(
        {
            "byzantine": {"clients": 10, "attack": "sign_flip", "test": {"personal": 0.1}},
            "scored": 30,
        }
    )
    run.config["attack"] = {"name": "sign_flip", "scale": 2.0}
    run.config["settings"]["byzantine"] = list(range(0, 40, 4))
    return run


def timed(
    method: str = "fedalt", seed: int = 0, pace: float = 2.0, stale: bool = True, **clock: Any
) -> Record:
    """The same on a virtual clock: a step takes `pace` units; asynchronous if `stale`."""
    run = example(method, seed)
    draw = np.random.default_rng([seed, int(10 * pace)])
    for row in run.metrics:
        row |= {"time": pace * row["round"] * (1 + 0.01 * seed), "active": 0.8 if stale else 0.2}
        row |= {"staleness": 3.0 if stale else 0.0, "late": 1, "lost": 2}
    for i, row in enumerate(run.clients):
        row |= {"reports": 40 - i, "delay": 1.0 + i / 10, "late": 0, "lost": i % 2}
    ages = [[age, int(100 / (1 + age)) + 1] for age in range(60)] if stale else [[0, 500]]
    counts = [[2 ** (b / 4), 2 ** ((b + 1) / 4), int(draw.integers(1, 30))] for b in range(-6, 14)]
    run.facts["clock"] = {
        "time": run.metrics[-1]["time"],
        "updates_per_time": 1 / pace,
        "active": 0.8 if stale else 0.2,
        "staleness": {"mean": 3.0 * stale, "max": ages[-1][0], "counts": ages},
        "delay": {"mean": 2.5, "max": 11.0, "counts": counts},
        "late": 1,
        "lost": 2,
        **clock,
    }
    run.config["schedule"] = {"name": "asynchronous" if stale else "synchronous", "delays": None}
    return run


def measured(method: str = "fedalt", seed: int = 0) -> Record:
    """The same with all measures and an aggregator that iterates."""
    run = example(method, seed)
    draw = np.random.default_rng(seed)
    for row in run.metrics:
        at, lam = row["round"], [i / 10 for i in range(11)]
        row["measures"] = {
            "gradient_norm": {"total": float(np.exp(-at / 5)), "mean": float(0.5 + draw.random())},
            "aggregation_change": {"mean": float(2 + draw.random()), "std": 0.4},
            "line_loss": {"loss": [0.5 + (x - 0.4) ** 2 + 0.01 * seed for x in lam], "lambda": lam},
        }
        row["aggregation"] = {"iterations": int(draw.integers(4, 9)), "f": 2}
    return run
