"""How a run begins: in a new folder, or from the checkpoint of the run that is there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.core import check
from partita.engine.federation import Federation
from partita.engine.monitor import Watch
from partita.engine.record import read_json
from partita.engine.store import checkpoint
from partita.engine.store.files import plain
from partita.engine.store.places import new_folder

ROUNDINGS = 1e-3
"""What two machines may differ by, as a share, when they pass the same samples through the same model."""


def hold(folder: Path) -> int | None:
    """Keep other processes out of a run's folder until the handle is closed, or this process ends."""
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


def begin_run(run: Federation, watch: Watch, resume: bool) -> None:
    """Begin, or go on from the newest valid checkpoint; refuse to overwrite or to mix runs."""
    folder = run.folder
    if folder is not None:
        if folder.is_dir():
            run.held = hold(folder)
        if (folder / "config.json").exists():
            if not resume:
                raise check.fail(
                    "out", str(folder), "a new folder, or resume=True to go on with the run in it"
                )
            before = check_same(watch.config(), folder)
            run.picks.update(before["executor"]["picks"])
            found = checkpoint.read(folder / "checkpoint")
            if found is None and (folder / "metrics.jsonl").exists():
                reason = f"the run in {folder} has no checkpoint left"
                raise check.fail("resume", True, "another folder out=", reason)
            if found is not None:
                _restore(watch, found)
                checkpoint.drop(folder / "checkpoint", after=found.round)
                return
        else:
            new_folder("out", folder, left=r"checkpoint|\.config\.json\.tmp")
        run.held = run.held if run.held is not None else hold(folder)
        _clear(folder)
    run.enter(0)
    watch.write_config()
    watch.checkpoint()  # the initial weights: what is resumed starts from the same ones


def _restore(watch: Watch, found: checkpoint.Checkpoint) -> None:
    counted = set(watch.counters)
    try:
        watch.restore(found)
        _check_numbers(counted, found.state)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        reason = f"{found.path} does not fit ({reason})"
        raise check.fail("resume", True, "a checkpoint of this run", reason) from error


def _check_numbers(counted: set[str], state: Mapping[str, Any]) -> None:
    """What is counted on must be there, as numbers, before anything is trained."""
    for name in ("counters", "phases"):
        if not all(isinstance(v, int | float) for v in state[name].values()):
            raise TypeError(f"{name} are no numbers")
    for name in ("stage", "first", "version"):
        if type(state[name]) is not int or state[name] < 0:
            raise TypeError(f"{name} is no whole number")
    if set(state["counters"]) != counted:
        raise KeyError("counters")
    if not isinstance(state["rows"], list) or not all(isinstance(row, dict) for row in state["rows"]):
        raise TypeError("rows are no objects")


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
