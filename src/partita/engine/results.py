"""From a finished run to its figures: every client's scores, who was hurt, what it cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from partita.capacity.client_memory import client_memory
from partita.core import tree
from partita.core.types import Tensors
from partita.data import FederatedData
from partita.engine.account import account
from partita.engine.chance import Chance, changes, intervals, no_changes
from partita.engine.chance import of as chance_of
from partita.engine.counters import Ending
from partita.engine.evaluate import mean_score
from partita.engine.monitor import Monitor
from partita.engine.newcomers import arrival_table, arrive, usual_effort
from partita.engine.record import CLIENT_COLUMNS, MODELS, SUFFIXES, Record, Summary
from partita.engine.samples import Samples, Scored
from partita.engine.setup import Setup
from partita.engine.significance import Changes, Rise, rising
from partita.engine.stage import Stage
from partita.engine.state import State
from partita.engine.table import Column, Table
from partita.engine.unusual_clients import MOST_CLIENTS, UnusualClients, unusual_clients

Columns = dict[str, np.ndarray | None]
LABELS = 1 << 16
"""Labels that are counted at once."""
SAMPLES_BYTES = 1 << 28
"""Of what is kept of all test samples: larger ones are not kept."""
Results = dict[str, dict[str, Scored]]
"""How each model does, by split."""


def figures(stage: Stage, state: State, monitor: Monitor, references: Mapping[str, Record]) -> Record:
    """Return everything about a finished run that can be written down as numbers."""
    results = _results(stage, state, monitor)
    columns, samples = _columns(stage, state, results, references), _samples(stage, results, references)
    if stage.setup.profile.metric.needs_rows:
        monitor.note("resampling test samples")
    found = _chance(stage, results, samples, columns)
    chances = {name: column for each in found.values() for name, column in each.columns.items()}
    unusual = _unusual(stage.setup)
    rows = _client_rows(stage, state, {**columns, **chances}, unusual.columns)
    summary = _summary(stage, state, columns)
    summary["chance"] = {f"vs_{kind}": each.facts for kind, each in found.items()}
    summary["intervals"] = _intervals(stage, columns)
    summary["unusual"] = unusual.sentences
    others = {kind: other.facts.get("diverged") for kind, other in references.items()}
    summary["diverged"] = monitor.divergence(state, _finite(state.server.shared), others)
    summary["classes"] = _classes(stage, rows, columns)
    summary["training"] = _training(stage, state, monitor)
    summary["baselines"] = {kind: other.facts.get("training") for kind, other in references.items()}
    _note_test(state, summary, monitor)
    config, newcomers = monitor.config(state.executor_choices), _newcomers(stage, state, references)
    record = Record(state.counters.rows, rows, config, summary, samples=samples, newcomers=newcomers)
    summary["hurt"] = _hurt(record)
    summary["choice"] = record.choice() if results.get("personal") is not results.get("global") else None
    summary["newcomers"] = None
    if stage.setup.newcomers is not None:
        came = Record([], newcomers, config, summary)
        weight = newcomers.numbers("n_test")
        summary["newcomers"] = {
            "clients": len(newcomers),
            "scored": _scored(weight, newcomers.numbers("personal")),
            "test": {kind: mean_score(newcomers.numbers(kind), weight) for kind in MODELS},
            "hurt": _hurt(came),
        }
    return record


def _scored(weight: np.ndarray, personal: np.ndarray | None) -> int:
    """Count the clients with test samples and, where there are personal models, a score that is defined."""
    there = weight > 0
    return int((there if personal is None else there & np.isfinite(personal)).sum())


def _hurt(record: Record) -> dict[str, int | None]:
    return {f"vs_{kind}": record.hurt(kind) for kind in ("global", "local")}


def _newcomers(stage: Stage, state: State, references: Mapping[str, Record]) -> Table:
    """Let the clients come that were held out, and return a row for each."""
    data = stage.setup.newcomers
    if data is None:
        return Table(0, {})
    others = {
        kind: references[kind].newcomers.numbers(model)
        for kind, model in (("local", "personal"), ("global", "global"))
        if kind in references and len(references[kind].newcomers) == data.clients
    }
    return arrival_table(arrive(stage, state, data, usual_effort(stage, state)), **others)


def _results(stage: Stage, state: State, monitor: Monitor) -> Results:
    """Return how the global and the personal models of the run itself do."""
    results: Results = {}
    if state.counters.global_scored:
        results["global"] = state.counters.global_scored
    if stage.has_personal:
        results["personal"] = monitor.final(stage, state, "personal")
    elif "global" in results:
        results["personal"] = results["global"]
    if stage.setup.alone and "personal" in results:
        results["local"] = results["personal"]
    return results


def _columns(stage: Stage, state: State, results: Results, references: Mapping[str, Record]) -> Columns:
    """Return the scores of every client, by the name of their column in clients.csv.

    Where a run has no model of a kind, they are those of the run it is compared with.
    """
    setup, columns = stage.setup, dict[str, np.ndarray | None]()
    for model in MODELS:
        splits = results.get(model)
        for split, suffix in SUFFIXES.items():
            for metric in setup.profile.metrics:
                first = metric is setup.profile.metric
                if not first and split != "test":
                    continue
                name = f"{model}{suffix}" if first else f"{model}.{metric.name}"
                if splits is None and model in references:
                    columns[name] = references[model].column(name)
                else:
                    found = None if splits is None else splits.get(split)
                    columns[name] = None if found is None else found.scores[metric.name]
    if setup.alone:  # a client that had no turn has no model of its own
        untouched = np.ones(setup.data.clients, dtype=bool)
        untouched[state.store.touched] = False
        for name in [k for k, v in columns.items() if k.startswith("local") and v is not None]:
            columns[name] = np.where(untouched, np.nan, columns[name])  # type: ignore[arg-type]
    return columns


def _unusual(setup: Setup) -> UnusualClients:
    """Return whose inputs or labels are unlike those of the others; of very many clients, nobody's."""
    data = setup.clean_data
    if data.clients > MOST_CLIENTS or setup.elsewhere is not None:
        return UnusualClients({}, {})
    return unusual_clients(data, _label_counts(data))


def _chance(stage: Stage, results: Results, samples: Samples | None, columns: Columns) -> dict[str, Chance]:
    """Return what is chance among the changes from the global and the local to the personal models."""
    setup, found = stage.setup, {}
    for kind in ("global", "local") if samples is not None else ():
        assert samples is not None
        same = kind in results and results.get("personal") is results[kind]
        scores = columns[kind]
        if same and scores is not None:
            changed: Changes | None = no_changes(samples, scores)
        else:
            changed = changes(setup.profile.metric, samples, "personal", kind, setup.settings.seed)
        if changed is not None:
            found[kind] = chance_of(changed, setup.honest, same, kind, setup.data.names)
    return found


def _intervals(stage: Stage, columns: Columns) -> dict[str, Any]:
    setup = stage.setup
    return intervals({kind: columns[kind] for kind in MODELS}, setup.test_weight, setup.profile.metric)


def _training(stage: Stage, state: State, monitor: Monitor) -> dict[str, Any]:
    """Say how long the run has trained, how it ended, and of which round its models are.

    Stages of one round, such as fine-tuning, have as many epochs as they are given: they neither rise nor
    converge.
    """
    setup, counters = stage.setup, state.counters
    epochs = counters.clock.turns.epochs[setup.honest & (setup.data.train[:, 1] > 0)]
    version, best = state.server.version, state.convergence.round
    endings = [ending for ending in counters.endings if ending.planned > 1]
    rises = [_rise(stage, state, e) for e in endings if not e.converged]
    known = [rise.rising for rise in rises]
    gains = [rise.gain_per_doubling for rise in rises if np.isfinite(rise.gain_per_doubling)]
    return {
        "rounds": version,
        "ended": "converged" if endings and not rises else "rounds",
        "rising": True if True in known else None if None in known or not endings else False,
        "gain": float(max(gains)) if gains else None,
        "model_of_round": best if best >= 0 and monitor.kept_best(stage, state) else version,
        "epochs": {
            "mean": float(epochs.mean()) if len(epochs) else None,
            "min": float(epochs.min()) if len(epochs) else None,
            "max": float(epochs.max()) if len(epochs) else None,
        },
    }


def _rise(stage: Stage, state: State, ending: Ending) -> Rise:
    """Return whether the scores of a stage still improve at its end."""
    setup = stage.setup
    rows = [row for row in state.counters.rows if ending.first < row["round"] <= ending.last]
    scores = [row[f"{setup.watched}.personal"] for row in rows]
    curve = [score for score in scores if score is not None]
    return rising(curve, higher_is_better=setup.profile.metric.higher_is_better)


def _note_test(state: State, summary: Summary, monitor: Monitor) -> None:
    """Write the test scores into the row of the round that the models are of, and into no other.

    A run that goes on has such a row from where it had ended before.
    """
    final = summary["training"]["model_of_round"]
    if monitor.setup.watched == "validation":
        for earlier in (r for r in state.counters.rows if r["round"] != final):
            earlier.update(dict.fromkeys(("test.global", "test.personal", "test.loss")))
    row = next((r for r in state.counters.rows if r["round"] == final), None)
    if row is None:
        return
    row["test.personal"] = summary["test"]["personal"]
    if row["test.global"] is None:
        row["test.global"] = summary["test"]["global"]
    monitor.folder.write_rows(state.counters.rows)


def _samples(stage: Stage, results: Results, references: Mapping[str, Record]) -> Samples | None:
    """Return what is kept of every test sample, under each model; None where that would take too much."""
    data = stage.setup.data
    rows = {model: splits["test"].rows for model, splits in results.items() if "test" in splits}
    for model in MODELS:
        theirs = references[model].samples if model in references else None
        if model not in rows and theirs is not None and model in theirs.rows:
            rows[model] = theirs.rows[model]
    if tree.nbytes(rows) > SAMPLES_BYTES or stage.setup.elsewhere is not None:
        return None
    starts, sizes = data.test.T
    index = torch.from_numpy(np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes))
    targets = data.y.index_select(0, index.to(data.y.device)).cpu()
    return Samples(data.test[:, 1].copy(), targets, rows)


def _client_rows(stage: Stage, state: State, scores: Columns, unusual: Mapping[str, np.ndarray]) -> Table:
    data = stage.setup.data
    columns: dict[str, Column] = {
        "client": data.names,
        "n_train": data.train[:, 1],
        "n_validation": data.validation[:, 1],
        "n_test": data.test[:, 1],
        **stage.setup.devices.columns(_batch(stage)),
        "byzantine": (~stage.setup.honest).astype(np.int8),
        **dict.fromkeys(CLIENT_COLUMNS[CLIENT_COLUMNS.index("local") : CLIENT_COLUMNS.index("distance")]),
        **scores,
        "distance": _distances(stage, state),
        "label_shift": None if stage.setup.elsewhere is not None else _label_shift(stage.setup.clean_data),
        **dict.fromkeys(("input_z", "label_z")),
        **unusual,
        **state.counters.clock.turns.columns(),
        "newcomer": None if stage.setup.newcomers is None else np.zeros(data.clients, dtype=np.int8),
    }
    return Table(data.clients, columns)


def _batch(stage: Stage) -> int:
    """The largest batch of the last stage."""
    return stage.setup.plans[-1].batch or int(stage.setup.data.train[:, 1].max())


def _distances(stage: Stage, state: State) -> np.ndarray | None:
    """Return ‖v_i − v̄‖ of each client that has trained a personal part v_i; v̄ is their mean."""
    touched, trainable = state.store.touched, stage.problem.trainable
    names = [k for k in stage.partition.personal if k in trainable]  # no counters or statistics
    here = stage.setup.elsewhere is None
    if not names or not stage.keeps_state or not len(touched) or not here:
        return None
    total: Tensors = {}
    for block in stage.blocks(touched):
        parts = tree.pick(state.load(stage, block).personal, names)
        sums = {k: v.sum(0, dtype=torch.float64) for k, v in parts.items()}
        total = {k: total[k] + v for k, v in sums.items()} if total else sums
    distances = np.full(stage.setup.data.clients, np.nan)
    for block in stage.blocks(touched):
        parts = tree.pick(state.load(stage, block).personal, names)
        squares = [_squares(v - total[k] / len(touched)) for k, v in parts.items()]
        distances[block] = torch.stack(squares).sum(0).sqrt().cpu().numpy()
    return distances


def _squares(stack: torch.Tensor) -> torch.Tensor:
    """‖·‖² of each row, which is lost: a block of clients is large."""
    return stack.reshape(len(stack), -1).square_().sum(1)


def _classes_of(y: torch.Tensor, most: int = 1000) -> int:
    """Return how many classes there are; 0 where targets are no labels of at most so many."""
    if y.is_floating_point() or y.dim() > 1 or not len(y) or int(y.max()) >= most or int(y.min()) < 0:
        return 0
    return int(y.max()) + 1


def _label_shift(data: FederatedData) -> np.ndarray | None:
    """Total variation ½ Σ_c |p_i(c) − p(c)| between a client's training labels and everyone's."""
    y, classes = data.y, _classes_of(data.y)  # as they are, whatever Byzantine clients pretend
    if not classes:
        return None
    labels = y.cpu().numpy()
    sizes = data.train[:, 1]
    blocks = _blocks(sizes, max(1, LABELS // classes))
    everyone = sum((_counted(labels, data.train[b], classes).sum(0) for b in blocks), np.zeros(classes))
    everyone /= everyone.sum()
    shift = np.full(data.clients, np.nan)
    for b in blocks:
        shares = _counted(labels, data.train[b], classes) / np.maximum(sizes[b], 1)[:, None]
        shift[b] = np.where(sizes[b] > 0, np.abs(shares - everyone).sum(1) / 2, np.nan)
    return shift


def _label_counts(data: FederatedData) -> np.ndarray | None:
    """Return how often each client has each label; None where there are no labels, or too many to hold."""
    classes = _classes_of(data.y)
    if not classes or classes * data.clients > 1 << 24:
        return None
    labels, blocks = data.y.cpu().numpy(), _blocks(data.train[:, 1], max(1, LABELS // classes))
    return np.concatenate([_counted(labels, data.train[block], classes) for block in blocks])


def _blocks(sizes: np.ndarray, most: int) -> list[slice]:
    """Clients one after another, at most so many, and not many more than LABELS samples of them at once."""
    number = np.maximum(np.arange(len(sizes)) // most, (np.cumsum(sizes) - sizes) // LABELS)
    number = np.cumsum(np.diff(number, prepend=number[:1]) > 0)
    ends = np.searchsorted(number, np.arange(number[-1] + 1), side="right").tolist()
    return [slice(a, b) for a, b in zip([0, *ends], ends)]


def _counted(labels: np.ndarray, ranges: np.ndarray, classes: int) -> np.ndarray:
    """How often each client has each label in its range of rows, a row for each client."""
    starts, sizes = ranges.T
    owner = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(owner)) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    found = np.bincount(owner * classes + labels[place], minlength=len(sizes) * classes)
    return found.reshape(len(sizes), classes)


def _summary(stage: Stage, state: State, scores: Columns) -> Summary:
    setup, counters, version = stage.setup, state.counters, state.server.version
    weight, metric, names = setup.test_weight, setup.profile.metric, setup.data.names
    held_out = setup.weight("validation")
    shared, personal = (tree.pick(state.initial, part) for part in stage.partition)
    seconds, excluded = counters.training_seconds, sorted(counters.excluded)
    return Summary(
        algorithm=setup.algorithm.name,
        seed=setup.settings.seed,
        rounds=version,
        ended={"reason": state.ended, "of": setup.rounds} if state.ended else None,
        clients=setup.data.clients,
        deployed=setup.elsewhere is not None,
        scored=_scored(weight, scores["personal"]),
        metric=metric.name,
        higher_is_better=metric.higher_is_better,
        test={kind: mean_score(scores[kind], weight) for kind in MODELS},
        validation={kind: mean_score(scores[f"{kind}_validation"], held_out) for kind in MODELS},
        metrics=_metrics(setup, scores),
        undefined=_undefined(setup, scores),
        majority=majority(setup),
        hurt={},  # counted by the record
        seconds=round(counters.elapsed, 3),
        client_steps_per_second=round(counters.client_steps / seconds, 1) if seconds else 0.0,
        phases={k: round(v, 3) for k, v in state.timer.seconds.items()},
        bytes_up=counters.bytes_up,
        bytes_down=counters.bytes_down,
        clock=counters.clock.summary(setup.data.clients, version),
        excluded=[names[c] for c in excluded],
        excluded_why={names[c]: counters.excluded[c].why for c in excluded},
        byzantine=_byzantine(setup, excluded, scores),
        parameters={"shared": _count(shared), "personal": _count(personal)},
        personal_part={
            "names": list(personal),
            "parameters": _count(personal),
            "of": _count(state.initial),
        },
        client_memory=client_memory(tree.nbytes(shared), tree.nbytes(personal), setup.profile.sample_bytes),
        peak_memory=_peak_memory(setup.settings.device),
        privacy=account(stage, state) or None,
    )


def _metrics(setup: Setup, scores: Columns) -> dict[str, Any]:
    """Return the mean test scores by every metric of the run, the first of which decides."""
    means = {}
    for metric in setup.profile.metrics:
        suffix = "" if metric is setup.profile.metric else f".{metric.name}"
        values = {kind: mean_score(scores[f"{kind}{suffix}"], setup.test_weight) for kind in MODELS}
        means[metric.name] = {"higher_is_better": metric.higher_is_better, "test": values}
    return means


def _undefined(setup: Setup, scores: Columns) -> dict[str, list[str]]:
    """Return the names of the honest clients with test samples for which a metric is undefined."""
    undefined, there = {}, setup.test_weight > 0
    for metric in setup.profile.metrics:
        suffix = "" if metric is setup.profile.metric else f".{metric.name}"
        columns = [scores[f"{kind}{suffix}"] for kind in MODELS]
        nowhere = [np.isnan(c) for c in columns if c is not None and not np.isnan(c).all()]
        clients = np.flatnonzero(there & np.logical_or.reduce(nowhere)).tolist() if nowhere else []
        if clients:
            undefined[metric.name] = [setup.data.names[c] for c in clients]
    return undefined


def majority(setup: Setup) -> dict[str, float] | None:
    """Return the accuracy of predicting the most frequent class: everyone's, or each client's own.

    The classes are counted on training samples; None for targets that are no classes.
    """
    data = setup.clean_data
    y = data.y
    classes = _classes_of(y) if setup.elsewhere is None else 0
    if not classes or not setup.test_weight.any():
        return None
    labels, right = y.cpu().numpy(), np.zeros((2, data.clients))
    counts = np.zeros(classes)
    for block in _blocks(data.train[:, 1], max(1, LABELS // classes)):
        counts += _counted(labels, data.train[block], classes).sum(0)
    for block in _blocks(data.train[:, 1] + data.test[:, 1], max(1, LABELS // classes)):
        own, there = (_counted(labels, ranges[block], classes) for ranges in (data.train, data.test))
        guess = np.where(own.any(1), own.argmax(1), counts.argmax())
        right[:, block] = there[:, counts.argmax()], there[np.arange(len(there)), guess]
    share = right[:, setup.honest].sum(1) / setup.test_weight.sum()
    return {"everyone": float(share[0]), "own": float(share[1])}


def _classes(stage: Stage, rows: Table, scores: Columns) -> dict[str, Any] | None:
    """Describe each class of devices: its size, what it holds and sends, its delays, its scores."""
    setup, devices = stage.setup, stage.setup.devices
    if devices.capacity is None:
        return None
    memory, classes = devices.memory(_batch(stage)), {}
    for kind in devices.used:
        mine = devices.class_of == kind
        delays = rows.numbers("delay")[mine]
        delays = delays[~np.isnan(delays)].tolist()
        size, share = memory[kind]
        weight = np.where(mine, setup.test_weight, 0)
        classes[devices.shares[kind].name] = {
            "clients": int(mine.sum()),
            "capacity": round(share, 6),
            "memory": size,
            "parameters": devices.parameters(kind),
            "bytes_down": stage.bytes_down[kind],
            "bytes_up": stage.bytes_up[kind],
            "reports": int(rows.numbers("reports")[mine].sum()),
            "delay": sum(delays) / len(delays) if delays else None,
            "test": {model: mean_score(scores[model], weight) for model in MODELS},
        }
    return classes


def _finite(tensors: Tensors) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors.values())


def _count(tensors: Tensors) -> int:
    return sum(t.numel() for t in tensors.values())


def _byzantine(setup: Setup, excluded: Sequence[int], scores: Columns) -> dict[str, Any] | None:
    """Describe the Byzantine clients: how many, their attack, the models on their data, who was set aside."""
    attack = setup.settings.attack
    if attack is None:
        return None
    weight = np.where(setup.honest, 0, setup.data.test[:, 1])
    return {
        "clients": len(setup.settings.byzantine_clients),
        "attack": attack.name,
        "test": {kind: mean_score(scores[kind], weight) for kind in MODELS},
        "excluded": [setup.data.names[c] for c in excluded if not setup.honest[c]],
    }


def _peak_memory(device: str) -> int:
    """The most that this process has held: on the GPU by tensors, on the CPU in all."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # not on this system
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
