"""The output folder of a run: its files, its lock, its checkpoints, and how a run there is gone on with."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partita.core import check
from partita.engine.record import CLIENT_COLUMNS, Record, read_json
from partita.engine.stage import Choices, Stage
from partita.engine.state import Holdings, State, encode
from partita.engine.store import durable
from partita.engine.store.durable import Checkpoint
from partita.engine.store.files import append_jsonl, plain, write_csv, write_json, write_jsonl
from partita.engine.store.output import new_folder

CHECKPOINT_SECONDS = 30.0
ROUNDINGS = 1e-3
"""What two machines may differ by, as a share, when they pass the same samples through the same model."""


class RunFolder:
    """A run's files; without a path nothing is written.

    every  rounds between checkpoints (0: none; None: about every 30 seconds)
    """

    def __init__(self, path: Path | None, every: int | None = None) -> None:
        self.path, self._every = path, every
        self._lock: int | None = None
        self._saved_at, self._saved_version = time.monotonic(), -1

    @property
    def name(self) -> str | None:
        """The path as a text."""
        return None if self.path is None else str(self.path)

    # ---- one process at a time

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out of the folder, once it is there; let them in again at the end."""
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
        """Return the newest valid checkpoint of the run that is there; None where a new run begins.

        What its executors have decided is added to `choices`. Refuses to overwrite or to mix runs.
        """
        if self.path is None:
            return None
        if not (self.path / "config.json").exists():
            new_folder("out", self.path, left=r"checkpoint|\.config\.json\.tmp")
            self._hold()
            _clear(self.path)
            return None
        if not resume:
            allowed = "a new folder, or resume=True to go on with the run in it"
            raise check.fail("out", str(self.path), allowed)
        before = check_same(config, self.path)
        choices.update(before["executor"]["picks"])
        saved = durable.read(self.path / "checkpoint")
        if saved is None:
            if (self.path / "metrics.jsonl").exists():
                reason = f"the run in {self.path} has no checkpoint left"
                raise check.fail("resume", True, "another folder out=", reason)
            _clear(self.path)
            return None
        return saved

    def resumed(self, saved: Checkpoint) -> None:
        """Go on from this checkpoint: later ones are removed."""
        assert self.path is not None
        self._saved_version = saved.round
        durable.drop(self.path / "checkpoint", after=saved.round)

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
        """Write clients.csv and summary.json."""
        if self.path is not None:
            cells = record.table.values(CLIENT_COLUMNS, finite=True)
            write_csv(self.path / "clients.csv", cells, CLIENT_COLUMNS)
            write_json(self.path / "summary.json", record.facts)

    def checkpoint_due(self, version: int) -> bool:
        """Whether it is time for a checkpoint."""
        if self._every:
            return version % self._every == 0
        return time.monotonic() - self._saved_at > CHECKPOINT_SECONDS

    def checkpoint(self, stage: Stage, state: State) -> None:
        """Write the whole run to disk, or nothing of it."""
        version = state.server.version
        if self.path is None or version == self._saved_version or self._every == 0:
            return
        with state.timer("files"):
            tensors, rest = encode({**state.state(), "holdings": Holdings.of(stage, state)._asdict()})
            durable.write(self.path / "checkpoint", version, tensors, rest)
            state.store.committed()
        self._saved_at, self._saved_version = time.monotonic(), version


def _locked(folder: Path) -> int | None:
    """Lock a folder until the handle is closed, or this process ends."""
    try:
        import fcntl
    except ModuleNotFoundError:  # not on this system
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise check.fail("out", str(folder), "a folder that no other process is writing to now") from None
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def _clear(folder: Path) -> None:
    """Remove what a killed run left before its first checkpoint, and nothing of anybody else."""
    left = folder / "checkpoint"
    theirs = [p.name for p in left.glob("*") if not re.fullmatch(r"\.\d+\.(tmp|old)|clients-\d+", p.name)]
    if left.exists() and not left.is_dir():
        theirs = ["a file"]
    if theirs:
        raise check.fail(
            "out", str(folder), f"a folder without a checkpoint/ of something else ({theirs[0]})"
        )
    shutil.rmtree(left, ignore_errors=True)


def parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a result, of what config.json holds: all but names, versions and what was picked.

    How often a run is written down does not count: a run may be resumed with another `checkpoint_every`.
    """
    found = {k: v for k, v in config.items() if k not in ("what", "executor", "versions")}
    if isinstance(found.get("settings"), dict):
        found["settings"] = {k: v for k, v in found["settings"].items() if k != "checkpoint_every"}
    return found


def check_same(now: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config.json of a folder, if a run that is described like this one wrote it.

    Single runs, baselines and the runs of a study, finished or not, are all compared here.
    """
    before = read_json(folder / "config.json")
    versions, executor = before.get("versions"), before.get("executor")
    theirs = versions.get("partita") if isinstance(versions, dict) else None
    if theirs != now["versions"]["partita"]:
        ours = now["versions"]["partita"]
        reason = f"{folder} holds a run of partita {theirs}, not {ours}"
        raise check.fail("resume", True, "the same version, or another folder out=", reason)
    if not isinstance(executor, dict) or not isinstance(executor.get("picks"), dict):
        raise _another("executor", str(executor), folder)
    there = parts(before)
    for part, new in parts(plain(now)).items():
        if part not in there:
            reason = f"config.json in {folder} has no {part}: another version of partita may have written it"
            raise check.fail("resume", True, "another folder out=", reason)
        if part == "trial":
            _check_trial(there[part], new, folder)
            continue
        if there[part] != new:
            changes = _changes(there[part], new)
            hint = "; a model without a seed is another one each time" if _only_weights(changes) else ""
            raise _another(part, ", ".join(changes), folder, hint)
    return before


def _another(part: str, changes: str, folder: Path, hint: str = "") -> check.Refused:
    """Return the error of a folder whose run differs from the one that would go on with it."""
    reason = f"{folder} holds a run that differs in its {part} ({changes})"
    return check.fail("resume", True, f"the same {part}, or another folder out={hint}", reason)


def _check_trial(old: Any, new: Mapping[str, Any], folder: Path) -> None:
    """Refuse where two trials differ by more than the roundings of other machines and threads."""
    known = old if isinstance(old, dict) else {}
    for name in [name for name in {**known, **new} if not _alike(known.get(name), new.get(name))]:
        what = {"training.loss": "loss", "evaluation.metric": "metric"}.get(name, "model")
        numbers = f"{name}: {known.get(name)} -> {new.get(name)}"
        changes = f"on the same samples, with the same initial weights: {numbers}"
        raise _another(what, changes, folder)


def _alike(old: Any, new: list[float] | None) -> bool:
    """Whether two lists of numbers are the same up to roundings."""
    if old is None or new is None:
        return old is new
    if not isinstance(old, list) or len(old) != len(new) or not all(isinstance(x, int | float) for x in old):
        return False
    scale = max([abs(x) for x in new], default=0.0)
    return all(abs(x - y) <= ROUNDINGS * (scale + ROUNDINGS) for x, y in zip(old, new))


def _only_weights(changes: Sequence[str]) -> bool:
    """Whether models differ in their initial weights alone."""
    return all(change.startswith(("initial: ", "fixed: ")) for change in changes)


def _changes(old: Any, new: Any, name: str = "") -> list[str]:
    """What differs, by name; parts that have names of their own are looked into: `delays.upload.mean`."""
    both = isinstance(old, dict) and isinstance(new, dict)
    if not both or (name and not ("name" in old and "name" in new)):
        return [f"{name and name + ': '}{old!r} -> {new!r}"[:160]]
    if old.get("name") != new.get("name"):  # another thing altogether
        return [f"{name and name + '.'}name: {old.get('name')!r} -> {new.get('name')!r}"]
    keys = [k for k in {**new, **old} if k not in old or k not in new or old[k] != new[k]]
    return [c for k in keys for c in _changes(old.get(k), new.get(k), f"{name and name + '.'}{k}")]
