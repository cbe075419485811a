"""What a run leaves in figures: its settings, its metrics, a row for each client, a summary."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from partita.core import check
from partita.data.population import Numbered
from partita.engine.divergence import DIVERGED, sentences
from partita.engine.store.files import from_text, read_jsonl
from partita.engine.table import BLOCK, Table
from partita.engine.written import CONFIG, SUMMARY, check_form

CLIENT_COLUMNS = (
    "client",
    "n_train",
    "n_test",
    "class",
    "capacity",
    "memory",
    "byzantine",
    "local",
    "global",
    "personal",
    "global_train",
    "personal_train",
    "distance",
    "label_shift",
    "reports",
    "delay",
    "late",
    "lost",
)
MODELS = ("local", "global", "personal")
_COUNTS = ("n_train", "n_test", "memory", "byzantine", "reports", "late", "lost")
_KINDS: dict[str, Callable[[str], Any]] = {"class": from_text, **dict.fromkeys(_COUNTS, int)}


class Summary(dict[str, Any]):
    """summary.json as a dictionary; printed, it is a table for people."""

    def __str__(self) -> str:
        test, hurt, metric = self["test"], self["hurt"], self["metric"]
        told = sentences(self.get("diverged"))
        lines = [f"{DIVERGED} {told[0]}", *(f"  {words}" for words in told[1:])] if told else []
        lines.append(
            f"{self['algorithm']}: {self['clients']} clients, {self['rounds']} rounds, seed {self['seed']}"
        )
        names = {"local": "each alone", "global": "one global model", "personal": "personal models"}
        lines += [f"  {names[k]:18} {metric} {_number(test[k])}" for k in names]
        if part := personal_part(self):
            lines.append(f"  personal: {part}")
        for key, other in (("vs_global", "the global model"), ("vs_local", "training alone")):
            if hurt[key] is not None:
                lines.append(f"  {hurt[key]} of {self['scored']} clients do worse than with {other}")
        lines += [*self._clock(), *self.abandoned(), *self._classes()]
        if liars := self.get("byzantine"):
            lines.append(f"  {liars['clients']} clients lie ({liars['attack']}); scores are of the others")
        if self["excluded"]:
            lines.append(f"  excluded for unusable uploads: {self._excluded()}")
        speed = self["client_steps_per_second"]
        lines.append(
            f"  {self['seconds']:.1f} s, {speed:,.0f} client steps per second, "
            f"{human_bytes(self['bytes_up'])} up, {human_bytes(self['bytes_down'])} down"
        )
        return "\n".join(lines)

    def _clock(self) -> list[str]:
        """What virtual time says, where it says more than the number of rounds."""
        clock = self.get("clock")
        if not clock or not clock["time"] or clock["time"] == self["rounds"]:
            return []
        age = clock["staleness"]
        text = f"  virtual time {clock['time']:,.1f}: {clock['updates_per_time']:.3g} server steps per unit, "
        text += f"{clock['active']:.0%} of the clients at work"
        text += f", staleness {age['mean']:.1f} (at most {age['max']})" if age["max"] else ""
        counts = [f"{clock[k]} uploads {k}" for k in ("late", "lost") if clock[k]]
        return ["; ".join([text, *counts])]

    def abandoned(self) -> list[str]:
        """How many rounds the server took no step in, if there were any."""
        count = (self.get("clock") or {}).get("abandoned")
        return [f"  {count} of {self['rounds']} rounds abandoned: too few usable uploads"] if count else []

    def _classes(self) -> list[str]:
        """How each class of devices does."""
        found = []
        for name, facts in (self.get("classes") or {}).items():
            score = facts["test"]["personal"]
            text = f"  {name}: {facts['clients']} clients, {facts['capacity']:.0%} of the memory"
            found.append(f"{text}, {self['metric']} {_number(score)}")
        return found

    def _excluded(self, most: int = 5) -> str:
        """Who, and why."""
        why = self.get("excluded_why") or {}
        names = self["excluded"]
        shown = [f"{name} ({why[name]})" if name in why else name for name in names[:most]]
        return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True, eq=False, repr=False)
class Record:
    """The figures of a run.

    `metrics` are the rows of metrics.jsonl, `clients` those of clients.csv, `config` is config.json.
    """

    metrics: list[dict[str, Any]]
    clients: Sequence[dict[str, Any]]
    config: dict[str, Any]
    facts: Summary
    page: ClassVar[Callable[[Mapping[str, Sequence[Record]], Path], Path]]
    """Writes the report; set where the package is put together, since a run knows nothing of pages."""

    @property
    def table(self) -> Table:
        """The clients by columns."""
        if isinstance(self.clients, Table):
            return self.clients
        columns = dict.fromkeys(k for row in self.clients for k in row)
        return Table(len(self.clients), {k: [row.get(k) for row in self.clients] for k in columns})

    @property
    def names(self) -> list[str]:
        """The clients' names, in order."""
        return [name for (name,) in self.table.values(["client"])]

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger score is a better one."""
        return bool(self.facts["higher_is_better"])

    def scores(self, model: str = "personal", split: str = "test") -> np.ndarray:
        """The score of every client, in order, under its 'local', 'global' or 'personal' model.

        Scores on the 'train' part are there for runs with `train_scores=True`.
        """
        check.choice("model", model, MODELS)
        column = model if check.choice("split", split, ("test", "train")) == "test" else f"{model}_train"
        return self.table.numbers(column)

    def time_to(self, score: float, model: str = "personal") -> float | None:
        """The virtual time of the first evaluation that reached this score; None if none did."""
        check.number("score", score)
        key = f"test.{check.choice('model', model, ('global', 'personal'))}"
        sign = 1.0 if self.higher_is_better else -1.0
        there = (
            row["time"] for row in self.metrics if row[key] is not None and sign * row[key] >= sign * score
        )
        return next(there, None)

    def summary(self) -> Summary:
        """Scores of local-only, global and personal models, and how many clients were hurt."""
        return self.facts

    def report(self, path: str | Path = "report.html") -> Path:
        """The run as a page that opens offline: curves, who gained and who lost and why, cost, settings."""
        return Record.page({self.facts["algorithm"]: [self]}, Path(path))

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.facts}"


def personal_part(facts: Mapping[str, Any], most: int = 4) -> str:
    """What stays with clients: 'head.weight, head.bias (650 of 4,810 parameters, 13.5 %)'.

    Empty where nothing does, and for summaries that do not say.
    """
    part = facts.get("personal_part")
    if not isinstance(part, Mapping):
        return ""
    names, count, total = part.get("names"), part.get("parameters", 0), part.get("of", 0)
    if not names or not total:
        return ""
    if count == total:
        copy = (facts.get("parameters") or {}).get("shared") == total
        return f"{'a copy of everything' if copy else 'everything'} ({total:,} parameters)"
    shown = ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
    return f"{shown} ({count:,} of {total:,} parameters, {100 * count / total:.3g} %)"


def write_page(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """The report beside figures that are on disk already: without plotly, a warning and no page."""
    try:
        Record.page(runs, path)
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        check.warn(
            f"{path.name} was not written: plotly is not installed; later: partita report {path.parent}"
        )


def read(folder: str | Path) -> Record:
    """The figures of a finished run from its folder; needs no checkpoint."""
    folder = check.path("folder", folder)
    if not (folder / "summary.json").is_file():
        raise check.fail("folder", str(folder), "the folder of a finished run (it has no summary.json)")
    return Record(
        metrics=read_jsonl(folder / "metrics.jsonl"),
        clients=_read_clients(folder / "clients.csv"),
        config=_read_config(folder / "config.json"),
        facts=_read_summary(folder / "summary.json"),
    )


def _read_config(path: Path) -> dict[str, Any]:
    found = read_json(path)
    check_form(path, found, CONFIG)
    return found


def _read_summary(path: Path) -> Summary:
    found = Summary(read_json(path))
    check_form(path, found, SUMMARY)
    try:
        str(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise check.fail("file", str(path), f"a summary, as a run writes it ({error!r})") from None
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise check.fail("file", str(path), "a JSON object, as a run writes it") from None
    if not isinstance(found, dict):
        raise check.fail("file", str(path), "a JSON object, as a run writes it")
    return found


def _read_clients(path: Path) -> Table:
    """A table with numbers; a column that an older run did not write is empty."""
    try:
        with path.open(newline="", encoding="utf-8") as f:
            lines = csv.reader(f)
            header = next(lines, [])
            columns = _columns(path, header, filter(None, lines))
    except (OSError, UnicodeError, csv.Error) as error:
        raise check.fail("file", str(path), f"a table, as a run writes it ({error})") from None
    if not columns or not {"client", "n_train", "n_test"} <= set(header):
        raise check.fail("file", str(path), "the columns client, n_train, n_test, ..., as a run writes them")
    length, names = len(columns["client"]), columns["client"]
    if names == [*Numbered(length)]:
        columns["client"] = Numbered(length)
    return Table(length, {**columns, **dict.fromkeys(set(CLIENT_COLUMNS) - set(header))})


def _columns(path: Path, header: Sequence[str], lines: Iterator[list[str]]) -> dict[str, Any]:
    """What stands below each heading, block by block; nothing if there is no line."""
    found: dict[str, list[Any]] = {}
    while block := list(itertools.islice(lines, BLOCK)):
        for name, cells in zip(header, itertools.zip_longest(*block, fillvalue="")):
            try:
                found.setdefault(name, []).append(_values(name, cells))
            except (ValueError, TypeError, OverflowError):
                raise check.fail(
                    "file", str(path), f"numbers in column {name}, as a run writes them"
                ) from None
    return {name: _joined(blocks) for name, blocks in found.items()}


def _values(name: str, cells: Sequence[str]) -> Any:
    """Numbers as an array where none is missing or NaN stands for it, all else as a list."""
    if name not in CLIENT_COLUMNS[1:]:
        return [from_text(cell) for cell in cells]
    kind = _KINDS.get(name, float)
    values = [kind(cell) if cell else None for cell in cells]
    if kind is float or (kind is int and None not in values):
        return np.array(values, dtype=kind)
    return values


def _joined(blocks: list[Any]) -> Any:
    if all(isinstance(block, np.ndarray) for block in blocks):
        return np.concatenate(blocks)
    return [
        value for block in blocks for value in (block.tolist() if isinstance(block, np.ndarray) else block)
    ]


def human_bytes(count: float) -> str:
    """1,234,567 as 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"
