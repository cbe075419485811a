"""Checkpoints of a run: folders named by the round, each complete and verified or not used at all.

    00000012/tensors.safetensors    named tensors
    00000012/state.json             everything else
    00000012/manifest.json          sizes and SHA-256 of both, and a SHA-256 of itself

A checkpoint is written under a name that starts with a dot and renamed when all of it is on disk; it is
removed by renaming it back to such a name. Whatever moment a run is killed at, names without a dot are whole
checkpoints; the checksums find what happens to them later.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from partita.core import check
from partita.core.types import Tensors
from partita.engine.store.files import sync_folder, write_text

FORMAT = 3  # 2: tensors had other names
FLOAT = "__float__"
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


class Checkpoint(NamedTuple):
    """What was read, and where."""

    round: int
    tensors: Tensors
    state: dict[str, Any]
    path: Path


class _Damaged(Exception):
    """This checkpoint cannot be used; the message names the file and what is wrong."""


def write(folder: str | Path, round: int, tensors: Tensors, state: dict[str, Any], keep: int = 2) -> Path:
    """Write the checkpoint of a round, on disk when this returns; then drop all but the newest `keep`.

    Checkpoints of this and later rounds are replaced: they belong to a future that the run did not take.
    `state` comes back as it is, NaN included, with JSON's types (tuples as lists, keys as strings).
    """
    folder = Path(folder)
    check.integer("round", round, low=0)
    check.integer("keep", keep, low=1)
    temporary = folder / f".{round:08d}.tmp"
    try:
        _prepare(folder)
        _fill(temporary, round, tensors, state)
        return _publish(temporary, folder / f"{round:08d}", keep)
    except (OSError, SafetensorError) as e:
        number = getattr(e, "errno", None) or errno.EIO
        raise OSError(
            number, f"cannot write the checkpoint of round {round} to {folder}: {e}; earlier ones are intact"
        ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read(folder: str | Path, names: Collection[str] | None = None) -> Checkpoint | None:
    """The newest valid checkpoint, None if there is none at all; `names` limits the tensors that are read.

    Damaged ones are skipped with a warning. It is an error if no valid one is left. A run that resumes from
    what it read calls `drop`, so that the damaged ones do not count among those that `write` keeps.
    """
    problems: list[str] = []
    for path in _found(Path(folder)):
        try:
            return _load(path, names)
        except PermissionError:
            raise  # not damage: an older checkpoint would hide it
        except (_Damaged, OSError) as e:
            problems.append(str(e))
            check.warn(f"checkpoint skipped: {e}")
    if problems:
        reasons = f"it has no valid checkpoint: {'; '.join(problems)}"
        raise check.fail("checkpoint", str(folder), f"at least one that is whole; {reasons}")
    return None


def drop(folder: str | Path, after: int) -> None:
    """Remove the checkpoints of rounds later than `after`."""
    _delete(_hide(p for p in _found(Path(folder)) if int(p.name) > after))


def _prepare(folder: Path) -> None:
    """Make the folder, without what a killed run left half-written or half-removed."""
    if not folder.exists():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
    for path in folder.iterdir():
        if path.suffix in (".tmp", ".old") and path.stem[1:].isdecimal():
            shutil.rmtree(path)


def _fill(folder: Path, round: int, tensors: Tensors, state: dict[str, Any]) -> None:
    folder.mkdir()
    write_text(folder / STATE, _json(state))
    save_file(_storable(tensors), folder / TENSORS)
    shutil.copymode(folder / STATE, folder / TENSORS)  # safetensors lets the owner alone read
    _sync_file(folder / TENSORS)
    files = {name: _facts(folder / name) for name in (TENSORS, STATE)}
    body = {"format": FORMAT, "round": round, "files": files}
    write_text(folder / MANIFEST, json.dumps({**body, "sha256": _digest(body)}, indent=2) + "\n")


def _publish(temporary: Path, path: Path, keep: int) -> Path:
    folder = path.parent
    hidden = _hide(p for p in _found(folder) if int(p.name) >= int(path.name))
    os.rename(temporary, path)
    sync_folder(folder)
    _delete(hidden + _hide(_found(folder)[keep:]))
    return path


def _hide(paths: Iterable[Path]) -> list[Path]:
    """Take checkpoints out of sight before they are deleted, so that none is ever seen in parts."""
    return [path.rename(path.with_name(f".{path.name}.old")) for path in paths]


def _delete(hidden: list[Path]) -> None:
    if hidden:
        sync_folder(hidden[0].parent)
    for path in hidden:
        shutil.rmtree(path, ignore_errors=True)  # the next write tries again


def _found(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    if not folder.is_dir():
        return []
    paths = (p for p in folder.iterdir() if p.is_dir() and p.name.isdecimal())
    return sorted(paths, key=lambda p: int(p.name), reverse=True)


def _load(path: Path, names: Collection[str] | None) -> Checkpoint:
    manifest = _manifest(path / MANIFEST)
    if manifest["round"] != int(path.name):
        raise _Damaged(f"{path / MANIFEST} is of round {manifest['round']}")
    for name in (TENSORS, STATE):
        _verify(path / name, manifest["files"][name])
    state = _state(path / STATE)
    return Checkpoint(manifest["round"], _tensors(path / TENSORS, names), state, path)


def _json(state: dict[str, Any]) -> str:
    """JSON has no NaN and no infinity, but a diverged run must resume as it was: see `_spelled`."""
    try:
        return json.dumps(state, allow_nan=False)
    except ValueError:
        return json.dumps(_spelled(state), allow_nan=False)


def _spelled(value: Any) -> Any:
    """With {"__float__": "nan"} for NaN, and the like."""
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if isinstance(value, dict):
        return {k: _spelled(v) for k, v in value.items()}
    return [_spelled(v) for v in value] if isinstance(value, list | tuple) else value


def _number(found: dict[str, Any]) -> Any:
    return float(found[FLOAT]) if found.keys() == {FLOAT} else found


def _manifest(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
        digest = body.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise _Damaged(f"{path} is not a manifest") from None
    if digest != _digest(body):
        raise _Damaged(f"{path} was altered (its checksum differs)")
    kind = body.get("format")
    if isinstance(kind, int) and kind != FORMAT:
        reason = f"it has format {kind}, this version of Partita reads {FORMAT}"
        raise check.fail("checkpoint", str(path.parent), f"one of this version; {reason}")
    files = body.get("files")
    if kind != FORMAT or type(body.get("round")) is not int or not _are_facts(files):
        raise _Damaged(f"{path} is not a manifest")
    return dict(body)


def _state(path: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors; also a file whose checksum fits may be another one."""
    try:
        state = json.loads(path.read_bytes(), object_hook=_number)
    except (ValueError, TypeError, RecursionError):
        raise _Damaged(f"{path} is not JSON") from None
    if not isinstance(state, dict):
        raise _Damaged(f"{path} is not a JSON object")
    return state


def _verify(path: Path, facts: dict[str, Any]) -> None:
    found = _facts(path)
    if found["bytes"] != facts["bytes"]:
        raise _Damaged(f"{path} has {found['bytes']} bytes, expected {facts['bytes']}")
    if found["sha256"] != facts["sha256"]:
        raise _Damaged(f"{path} was altered (its checksum differs)")


def _are_facts(files: Any) -> bool:
    """Whether sizes and checksums of both files are there."""
    facts = [files.get(name) for name in (TENSORS, STATE)] if isinstance(files, dict) else [None]
    return all(isinstance(each, dict) and {"bytes", "sha256"} <= each.keys() for each in facts)


def _tensors(path: Path, names: Collection[str] | None) -> Tensors:
    try:
        return _read_tensors(path, names)
    except SafetensorError as error:
        raise _Damaged(f"{path} is no safetensors file ({error})") from None


def _read_tensors(path: Path, names: Collection[str] | None) -> Tensors:
    with safe_open(path, framework="pt") as f:
        there = set(f.keys())
        wanted = there if names is None else set(names)
        if wanted - there:
            raise ValueError(f"{path} has no tensor {', '.join(map(repr, sorted(wanted - there)))}")
        # clones: what safetensors returns is a map of the file, which is removed two checkpoints later
        return {name: f.get_tensor(name).clone() for name in f.keys() if name in wanted}  # noqa: SIM118


def _storable(tensors: Tensors) -> Tensors:
    """On the CPU, contiguous, and none sharing memory with another: safetensors refuses the rest."""
    seen: set[int] = set()
    out = {}
    for name, x in tensors.items():
        y = x.detach().cpu().contiguous()
        out[name] = y.clone() if _memory(y) in seen else y
        seen.add(_memory(y))
    return out


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _facts(path: Path) -> dict[str, Any]:
    with open(path, "rb") as f:
        return {"bytes": os.fstat(f.fileno()).st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as f:
        os.fsync(f.fileno())
