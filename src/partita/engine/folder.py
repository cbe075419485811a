"""The output folder of a run: its files, its lock, its checkpoints, and how a run in it is resumed."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from partita.core import check
from partita.engine.lockstep import seat
from partita.engine.record import CLIENT_COLUMNS, FURTHER, Record, read_json
from partita.engine.samples import FILE as SAMPLES
from partita.engine.stage import Choices, Stage
from partita.engine.state import Holdings, State, encode
from partita.engine.store import durable
from partita.engine.store.durable import Checkpoint
from partita.engine.store.files import (
    append_jsonl,
    locked,
    plain,
    write_csv,
    write_json,
    write_jsonl,
    write_tensors,
)
from partita.engine.store.output import new_folder

CHECKPOINT_SECONDS = 30.0
NOT_DECIDING = ("data_on", "checkpoint_every", "workers")
LEFT = r"checkpoint|deployment|\.config\.json\.tmp"
"""What a run may have left that was killed before its first checkpoint."""
RELEASED = "released"
"""What a deployment with privacy keeps of each release before anybody sees it: the run right after it."""
ROUNDINGS = 1e-3
"""What two machines may differ by, as a share, when they pass the same samples through the same model."""


_LATEST: ContextVar[Mapping[Path, int]] = ContextVar("latest", default={})  # noqa: B039 (never changed)


@contextmanager
def resuming_from(rounds: Mapping[Path, int]) -> Iterator[None]:
    """Let the runs in these folders go on from a round, or from one before, though later ones were saved."""
    token = _LATEST.set(rounds)
    try:
        yield
    finally:
        _LATEST.reset(token)


class Pace:
    """Says after which rounds a checkpoint is due by time: for all runs that go on together, the same."""

    def __init__(self) -> None:
        self._saved_at, self._decided = time.monotonic(), -1
        self._due: set[int] = set()

    def due(self, round: int) -> bool:
        """Return whether this round is one; the first run that comes to it decides."""
        if round > self._decided:
            self._decided = round
            if time.monotonic() - self._saved_at > CHECKPOINT_SECONDS:
                self._due.add(round)
                self.saved()
        return round in self._due

    def saved(self) -> None:
        """Count from now on, when a checkpoint has been written."""
        self._saved_at = time.monotonic()


def _pace(kind: str) -> Pace:
    """Return the pace of a run: in lockstep that of all runs of this kind."""
    place = seat()
    return Pace() if place is None else place.common.setdefault(("pace", kind), Pace())


class RunFolder:
    """The files of a run; without a path nothing is written.

    every          rounds between checkpoints (0: none; None: about every 30 seconds)
    baseline       which one it is, '' for a run itself
    within_a_round  whether the run goes on from a release that nobody was told of
    """

    def __init__(self, path: Path | None, every: int | None = None, baseline: str = "") -> None:
        self.path, self._every = path, every
        self.within_a_round = False
        self._lock: int | None = None
        self._pace, self._saved_version = _pace(baseline), -1

    @property
    def name(self) -> str | None:
        """The path as text."""
        return None if self.path is None else str(self.path)

    # ---- one process at a time

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out of the folder, once it exists, until the end."""
        self._hold()
        try:
            yield
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _hold(self) -> None:
        if self.path is not None and self.path.is_dir() and self._lock is None:
            self._lock = _locked(self.path)

    # ---- new or resumed

    def checkpoint_to_resume(
        self, config: dict[str, Any], choices: Choices, resume: bool
    ) -> Checkpoint | None:
        """Return the newest valid checkpoint of the run in the folder; None where a new run begins.

        What its executors have decided is added to `choices`. To overwrite or to mix runs is refused.
        """
        if self.path is None:
            return None
        if not (self.path / "config.json").exists():
            new_folder("out", self.path, left=LEFT)
            self._hold()
            _clear(self.path)
            return None
        if not resume:
            allowed = "a new folder, or resume=True to continue the run in it"
            raise check.fail("out", str(self.path), allowed)
        before = check_same(config, self.path, longer=True)
        choices.update(before["executor"]["picks"])
        saved = self._newest(self.path)
        if saved is None:
            if (self.path / "metrics.jsonl").exists():
                reason = f"the run in {self.path} has no checkpoint left"
                raise check.fail("resume", True, "another folder out=", reason)
            _clear(self.path)
            return None
        return saved

    def _newest(self, path: Path) -> Checkpoint | None:
        """Return the newest valid checkpoint, but none before a release: it would be made again.

        Other clients might answer then, and the difference of two releases with the same noise has none.
        """
        saved = durable.read(path / "checkpoint", latest=_LATEST.get().get(path))
        newest = max(durable.rounds(path / RELEASED), default=-1)
        if newest < 0 or (saved is not None and saved.round >= newest):
            return saved
        found = durable.read(path / RELEASED)
        if found is None or found.round < newest:
            reason = f"what {path / RELEASED} has of round {newest} is damaged, and that round was released"
            raise check.fail("resume", True, "another folder out=: a new run draws other noise", reason)
        return found

    def resumed(self, saved: Checkpoint) -> None:
        """Remove the checkpoints after this one, which the run goes on from."""
        assert self.path is not None
        self.within_a_round = saved.path.parent.name == RELEASED
        self._saved_version = -1 if self.within_a_round else saved.round
        durable.drop(self.path / "checkpoint", after=saved.round)

    def reopen(self) -> None:
        """Remove the results of a finished run that goes on: they are not those of the rounds to come."""
        if self.path is not None:
            for name in ("summary.json", "clients.csv"):
                (self.path / name).unlink(missing_ok=True)

    # ---- files

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json."""
        if self.path is not None:
            write_json(self.path / "config.json", config)

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write metrics.jsonl anew."""
        if self.path is not None:
            write_jsonl(self.path / "metrics.jsonl", rows)

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Add a row to metrics.jsonl."""
        if self.path is not None:
            append_jsonl(self.path / "metrics.jsonl", row)

    def write_results(self, record: Record) -> None:
        """Write samples.safetensors, clients.csv and summary.json."""
        if self.path is not None:
            if record.samples is not None:
                write_tensors(self.path / SAMPLES, record.samples.tensors())
            further = [name for name in record.table.names if name.startswith(FURTHER)]
            columns, tables = [*CLIENT_COLUMNS, *further], (record.table, record.newcomers)
            cells = itertools.chain.from_iterable(table.values(columns, finite=True) for table in tables)
            write_csv(self.path / "clients.csv", cells, columns)
            write_json(self.path / "summary.json", record.facts)

    def checkpoint_due(self, version: int) -> bool:
        """Return whether it is time for a checkpoint."""
        if self._every:
            return version % self._every == 0
        return self._pace.due(version)

    def checkpoint(self, stage: Stage, state: State) -> None:
        """Write the whole run to disk, or nothing of it."""
        version = state.server.version
        if self.path is None or version == self._saved_version or self._every == 0:
            return
        self._write(self.path / "checkpoint", stage, state, keep=2)
        self._saved_version = version
        self._pace.saved()

    def keep_release(self, stage: Stage, state: State) -> None:
        """Write the run to disk as it is after a release, which is made once: nobody has seen it yet."""
        if self.path is not None:
            self._write(self.path / RELEASED, stage, state, keep=1)

    def _write(self, folder: Path, stage: Stage, state: State, keep: int) -> None:
        with state.timer("files"):
            tensors, rest = encode({**state.state(), "holdings": Holdings.of(stage, state)._asdict()})
            durable.write(folder, state.server.version, tensors, rest, keep)
            state.store.committed()


def _locked(folder: Path) -> int | None:
    """Lock a folder until the handle is closed, or this process ends."""
    try:
        return locked(folder)
    except BlockingIOError:
        raise check.fail("out", str(folder), "a folder that no other process is writing to now") from None


def _clear(folder: Path) -> None:
    """Remove what a killed run left before its first checkpoint, and refuse what others wrote there."""
    left = folder / "checkpoint"
    foreign = [p.name for p in left.glob("*") if not re.fullmatch(r"\.\d+\.(tmp|old)|clients-\d+", p.name)]
    if left.exists() and not left.is_dir():
        foreign = ["a file"]
    if foreign:
        allowed = f"a folder without a checkpoint/ of something else ({foreign[0]})"
        raise check.fail("out", str(folder), allowed)
    shutil.rmtree(left, ignore_errors=True)


def parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides a result, of what config.json holds: all but names, versions and choices.

    How often a run is written down does not count, nor who computes it: a run may be resumed with another
    `checkpoint_every` and with other `workers`.
    """
    deciding = {k: v for k, v in config.items() if k not in ("what", "executor", "versions")}
    if isinstance(deciding.get("settings"), dict):
        deciding["settings"] = {k: v for k, v in deciding["settings"].items() if k not in NOT_DECIDING}
    return deciding


def without_rounds(deciding: Mapping[str, Any]) -> dict[str, Any]:
    """Return `parts` without the number of rounds, of the run and of its stages."""
    result = dict(deciding)
    if isinstance(result.get("settings"), dict):
        result["settings"] = {k: v for k, v in result["settings"].items() if k != "rounds"}
    algorithm = result.get("algorithm")
    if isinstance(algorithm, dict) and isinstance(algorithm.get("stages"), list):
        stages = [{**s, "rounds": None} if isinstance(s, dict) else s for s in algorithm["stages"]]
        result["algorithm"] = {**algorithm, "stages": stages}
    return result


def check_same(now: dict[str, Any], folder: Path, *, longer: bool = False) -> dict[str, Any]:
    """Return the config.json of a folder, or refuse to go on if it is of another run than this one.

    `longer` accepts another number of rounds: what has been computed decides then whether it can go on.
    Single runs, baselines and the runs of a study, finished or not, are all compared here.
    """
    before = read_json(folder / "config.json")
    versions, executor = before.get("versions"), before.get("executor")
    version = versions.get("partita") if isinstance(versions, dict) else None
    if version != now["versions"]["partita"]:
        reason = f"{folder} holds a run of partita {version}, not {now['versions']['partita']}"
        raise check.fail("resume", True, "the same version, or another folder out=", reason)
    if not isinstance(executor, dict) or not isinstance(executor.get("picks"), dict):
        raise _another("executor", str(executor), folder)
    old_parts, new_parts = parts(before), parts(plain(now))
    _check_shares(old_parts["settings"], new_parts["settings"], folder)
    if longer:
        old_parts, new_parts = without_rounds(old_parts), without_rounds(new_parts)
    for part, new in new_parts.items():
        if part not in old_parts:
            reason = f"config.json in {folder} has no {part}: another version of partita may have written it"
            raise check.fail("resume", True, "another folder out=", reason)
        old = old_parts[part]
        if part == "trial":
            _check_trial(old, new, folder)
        elif old != new:
            changes = _changes(old, new)
            weights = all(change.startswith(("initial: ", "fixed: ")) for change in changes)
            hint = "; a model without a seed is another one each time" if weights else ""
            raise _another(part, ", ".join(changes), folder, hint)
    return before


def _check_shares(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Refuse other shares than the run has, which decide its bits; None asks for those that it has."""
    before, now = old.get("shares"), new["shares"]
    if now is not None and before != now:
        has = "was begun without workers" if before is None else f"has {before} shares"
        allowed = (
            "no workers and no shares" if before is None else f"shares={before}, with any number of workers"
        )
        raise check.fail("shares", now, f"{allowed}, or another folder out=", f"the run in {folder} {has}")
    old["shares"] = now


def _another(part: str, changes: str, folder: Path, hint: str = "") -> check.Refused:
    """Return the error of a folder whose run differs from the one that would go on with it."""
    reason = f"{folder} holds a run that differs in its {part} ({changes})"
    return check.fail("resume", True, f"the same {part}, or another folder out={hint}", reason)


def _check_trial(old: Any, new: Mapping[str, Any], folder: Path) -> None:
    """Refuse where two trials differ by more than the roundings of other machines and threads."""
    before = old if isinstance(old, dict) else {}
    for name in {**before, **new}:
        if not _are_close(before.get(name), new.get(name)):
            part = {"training.loss": "loss", "evaluation.metric": "metric"}.get(name, "model")
            numbers = f"{name}: {before.get(name)} -> {new.get(name)}"
            changes = f"on the same samples, with the same initial weights: {numbers}"
            raise _another(part, changes, folder)


def _are_close(old: Any, new: list[float] | None) -> bool:
    """Return whether two lists of numbers are the same up to roundings."""
    if old is None or new is None:
        return old is new
    if not isinstance(old, list) or len(old) != len(new) or not all(isinstance(x, int | float) for x in old):
        return False
    scale = max([abs(x) for x in new], default=0.0)
    return all(abs(x - y) <= ROUNDINGS * (scale + ROUNDINGS) for x, y in zip(old, new))


def _changes(old: Any, new: Any, name: str = "") -> list[str]:
    """Return what differs, by name; parts with names are compared entry by entry: `delays.upload.mean`."""
    both = isinstance(old, dict) and isinstance(new, dict)
    if not both or (name and not ("name" in old and "name" in new)):
        return [f"{name and name + ': '}{old!r} -> {new!r}"[:160]]
    prefix = f"{name}." if name else ""
    if old.get("name") != new.get("name"):  # another part altogether
        return [f"{prefix}name: {old.get('name')!r} -> {new.get('name')!r}"]
    keys = [k for k in {**new, **old} if k not in old or k not in new or old[k] != new[k]]
    return [change for k in keys for change in _changes(old.get(k), new.get(k), f"{prefix}{k}")]
