"""How checkpoints are written: folders named by the round, each complete and verified or not used at all.

What a checkpoint holds is decided in `engine/state.py`; here it is named tensors and a JSON object.

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

from partita.core import check
from partita.core.types import Tensors
from partita.engine.store.files import sync_folder, write_text

FORMAT = 3  # 2: tensors had other names
FLOAT = "__float__"
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


class Checkpoint(NamedTuple):
    """A checkpoint that was read, and the folder that it was read from."""

    round: int
    tensors: Tensors
    state: dict[str, Any]
    path: Path


class _Damaged(Exception):
    """Raised for a checkpoint that cannot be used; the message names the file and what is wrong."""


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


def read(
    folder: str | Path, names: Collection[str] | None = None, latest: int | None = None
) -> Checkpoint | None:
    """Return the newest valid checkpoint, None if there is none; `names` limits the tensors that are read.

    Those after the round `latest` are left out, as long as there is a valid one before.

    Damaged ones are skipped with a warning. It is an error if no valid one is left. A run that resumes from
    what it read calls `drop`, so that the damaged ones do not count among those that `write` keeps.
    """
    problems: list[str] = []
    paths = _newest_first(Path(folder))
    if latest is not None:
        paths.sort(key=lambda path: int(path.name) > latest)  # the later ones come last
    for path in paths:
        try:
            return _load(path, names)
        except PermissionError:
            raise  # not damage: an older checkpoint would hide it
        except (_Damaged, OSError) as e:
            problems.append(str(e))
            check.warn(f"checkpoint skipped: {e}")
    if problems:
        reason = f"it has no valid checkpoint: {'; '.join(problems)}"
        raise check.fail("checkpoint", str(folder), "a folder with a whole checkpoint", reason)
    return None


def rounds(folder: str | Path) -> list[int]:
    """Return the rounds of which there are checkpoints, valid or not, the newest first."""
    return [int(path.name) for path in _newest_first(Path(folder))]


def drop(folder: str | Path, after: int) -> None:
    """Remove the checkpoints of rounds later than `after`."""
    _delete(_hide(p for p in _newest_first(Path(folder)) if int(p.name) > after))


# ---- writing


def _prepare(folder: Path) -> None:
    """Make the folder, and remove what a killed run left half-written or half-removed in it."""
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
    with open(folder / TENSORS, "rb+") as f:
        os.fsync(f.fileno())
    files = {name: _facts(folder / name) for name in (TENSORS, STATE)}
    body = {"format": FORMAT, "round": round, "files": files}
    write_text(folder / MANIFEST, json.dumps({**body, "sha256": _digest(body)}, indent=2) + "\n")


def _publish(temporary: Path, path: Path, keep: int) -> Path:
    folder = path.parent
    hidden = _hide(p for p in _newest_first(folder) if int(p.name) >= int(path.name))
    os.rename(temporary, path)
    sync_folder(folder)
    _delete(hidden + _hide(_newest_first(folder)[keep:]))
    return path


def _hide(paths: Iterable[Path]) -> list[Path]:
    """Take checkpoints out of sight before they are deleted, so that none is ever seen in parts."""
    return [path.rename(path.with_name(f".{path.name}.old")) for path in paths]


def _delete(hidden: list[Path]) -> None:
    if hidden:
        sync_folder(hidden[0].parent)
    for path in hidden:
        shutil.rmtree(path, ignore_errors=True)  # the next write tries again


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    paths = (p for p in folder.iterdir() if p.is_dir() and p.name.isdecimal())
    return sorted(paths, key=lambda p: int(p.name), reverse=True)


def _json(state: dict[str, Any]) -> str:
    """Return JSON, which has no NaN and no infinity: as a diverged run must resume, `_spelled` has them."""
    try:
        return json.dumps(state, allow_nan=False)
    except ValueError:
        return json.dumps(_spelled(state), allow_nan=False)


def _spelled(value: Any) -> Any:
    """Return the value with {"__float__": "nan"} for NaN, and the like."""
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if isinstance(value, dict):
        return {k: _spelled(v) for k, v in value.items()}
    return [_spelled(v) for v in value] if isinstance(value, list | tuple) else value


def _storable(tensors: Tensors) -> Tensors:
    """Return tensors on the CPU, contiguous, none sharing memory: safetensors refuses all others."""
    addresses: set[int] = set()
    copies = {}
    for name, x in tensors.items():
        y = x.detach().cpu().contiguous()
        address = y.untyped_storage().data_ptr()
        copies[name] = y.clone() if address in addresses else y
        addresses.add(address)
    return copies


# ---- reading


def _load(path: Path, names: Collection[str] | None) -> Checkpoint:
    manifest = _manifest(path / MANIFEST)
    if manifest["round"] != int(path.name):
        raise _Damaged(f"{path / MANIFEST} is of round {manifest['round']}")
    for name in (TENSORS, STATE):
        _verify(path / name, manifest["files"][name])
    state = _state(path / STATE)
    return Checkpoint(manifest["round"], _tensors(path / TENSORS, names), state, path)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
        digest = body.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise _Damaged(f"{path} is not a manifest") from None
    if digest != _digest(body):
        raise _Damaged(f"{path} was altered (its checksum differs)")
    version = body.get("format")
    if isinstance(version, int) and version != FORMAT:
        reason = f"it has format {version}, this version of Partita reads {FORMAT}"
        raise check.fail("checkpoint", str(path.parent), "one that this version wrote", reason)
    if version != FORMAT or type(body.get("round")) is not int or not _are_facts(body.get("files")):
        raise _Damaged(f"{path} is not a manifest")
    return dict(body)


def _are_facts(files: Any) -> bool:
    """Return whether a manifest has the sizes and checksums of both files."""
    facts = [files.get(name) for name in (TENSORS, STATE)] if isinstance(files, dict) else [None]
    return all(isinstance(each, dict) and {"bytes", "sha256"} <= each.keys() for each in facts)


def _verify(path: Path, expected: dict[str, Any]) -> None:
    facts = _facts(path)
    if facts["bytes"] != expected["bytes"]:
        raise _Damaged(f"{path} has {facts['bytes']} bytes, expected {expected['bytes']}")
    if facts["sha256"] != expected["sha256"]:
        raise _Damaged(f"{path} was altered (its checksum differs)")


def _state(path: Path) -> dict[str, Any]:
    """Read state.json; a file whose checksum fits may still be another one."""

    def unspelled(value: dict[str, Any]) -> Any:
        return float(value[FLOAT]) if value.keys() == {FLOAT} else value

    try:
        state = json.loads(path.read_bytes(), object_hook=unspelled)
    except (ValueError, TypeError, RecursionError):
        raise _Damaged(f"{path} is not JSON") from None
    if not isinstance(state, dict):
        raise _Damaged(f"{path} is not a JSON object")
    return state


def _tensors(path: Path, names: Collection[str] | None) -> Tensors:
    try:
        with safe_open(path, framework="pt") as f:
            stored = list(f.keys())
            missing = sorted(set(names or ()) - set(stored))
            if missing:
                raise ValueError(f"{path} has no tensor {', '.join(map(repr, missing))}")
            wanted = [name for name in stored if names is None or name in names]
            # clones: what safetensors returns is a map of the file, which is removed two checkpoints later
            return {name: f.get_tensor(name).clone() for name in wanted}
    except SafetensorError as error:
        raise _Damaged(f"{path} is no safetensors file ({error})") from None


def _facts(path: Path) -> dict[str, Any]:
    with open(path, "rb") as f:
        return {"bytes": os.fstat(f.fileno()).st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
