"""Small files, written in full or not at all: JSON, CSV and text."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors.torch import save
from torch import Tensor

from partita.core import check


def write_text(path: str | Path, text: str) -> None:
    """Replace a file in one step: a reader (or a kill) finds the old text or the new, nothing between."""
    with _replaced(Path(path)) as f:
        f.write(text.encode())


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of an earlier one when all of it is on disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(e, OSError):
            raise failed(e, f"cannot write {path}") from e
        raise


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON that every parser takes; see `plain` for what becomes of tensors and NaN."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as a file of JSON."""
    write_text(path, json_text(value, indent=2) + "\n")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as safetensors."""
    with _replaced(Path(path)) as f:
        f.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def write_csv(path: str | Path, rows: Iterable[Iterable[Any]], columns: Sequence[str]) -> None:
    """Write a table of plain values, None as an empty cell, row by row: it is never in memory as a whole."""
    with _replaced(Path(path)) as f:
        table = csv.writer(_Lines(f), lineterminator="\r\n")
        table.writerow(columns)
        table.writerows(map(_cells, rows))


_FORMULA = re.compile("'*[=+@\\-\t\r\n＝＋－＠]")
"""How a text begins that a spreadsheet takes for a formula, or that is one made harmless."""


def as_text(value: str) -> str:
    """Return a text, quoted if a spreadsheet would take it for a formula; `from_text` undoes it.

    See https://owasp.org/www-community/attacks/CSV_Injection.
    """
    return f"'{value}" if _FORMULA.match(value) else value


def from_text(cell: str) -> str:
    """Return the text that `as_text` was called with."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _cells(row: Iterable[Any]) -> list[Any]:
    """Return a row with its texts quoted; numbers stay numbers, negative ones too."""
    return [as_text(value) if type(value) is str else value for value in row]


class _Lines:
    """A file for a csv writer: told that lines end in \\r\\n it quotes both characters; ours end in \\n."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def write(self, row: str) -> None:
        self.file.write((row.removesuffix("\r\n") + "\n").encode())


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON object per line."""
    write_text(path, "".join(_line(row) for row in rows))


def append_jsonl(path: str | Path, row: Mapping[str, Any]) -> None:
    """Append a line, on disk when this returns. A torn line of a killed run is cut off first."""
    path = Path(path)
    new, line = not path.exists(), _line(row).encode()
    try:
        with open(path, "ab+") as f:
            f.truncate(_whole_lines(f))
            f.write(line)
            f.flush()
            os.fsync(f.fileno())
        if new:
            sync_folder(path.parent)
    except OSError as e:
        raise failed(e, f"cannot write {path}") from e


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a file; a last line without its end was torn by a kill and is ignored."""
    rows = []
    for i, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1]):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            raise check.fail(
                "file", str(path), "a JSON object per line", f"line {i + 1} is not JSON"
            ) from None
        if not isinstance(rows[-1], dict):
            reason = f"line {i + 1} is {check.shortened(rows[-1])}"
            raise check.fail("file", str(path), "a JSON object per line", reason)
    return rows


def plain(value: Any) -> Any:
    """Return a value in JSON's types: tensors and arrays as lists; NaN and ±inf, unknown to JSON, as None."""
    if value is None or type(value) in (str, int, bool):  # most of a large table
        return value
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    elif isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def make_folder(field: str, folder: str | os.PathLike[str]) -> Path:
    """Make a folder if it does not exist; refuse what cannot be one, as the argument `field`."""
    path = check.path(field, folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:  # ValueError: a path with a null character
        reason = getattr(e, "strerror", None) or str(e)
        raise check.fail(field, str(folder), f"a folder that can be made and written ({reason})") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise check.fail(field, str(folder), "a folder that can be written (Permission denied)")
    return path


def failed(cause: OSError, what: str) -> OSError:
    """Return the same kind of error, saying what could not be done; some do not even name the file."""
    return OSError(cause.errno or errno.EIO, f"{what}: {cause.strerror or cause}")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk (a new or renamed file is not, before)."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(row: Mapping[str, Any]) -> str:
    return json_text(row) + "\n"


def _whole_lines(f: BinaryIO) -> int:
    size = f.seek(0, os.SEEK_END)
    f.seek(max(size - 1, 0))
    if f.read(1) in (b"\n", b""):
        return size
    f.seek(0)
    return f.read().rfind(b"\n") + 1


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder; holes in files stay holes, so that rows never written cost nothing."""
    copy = _copy_sparse if hasattr(os, "SEEK_DATA") else shutil.copy2
    earlier = set(os.listdir(target)) if target.exists() else set()
    try:
        shutil.copytree(source, target, dirs_exist_ok=True, copy_function=copy)
    except OSError as e:
        for name in set(os.listdir(source)) - earlier:
            _remove(target / name)
        reasons = [str(r[-1]) for r in e.args[0]] if isinstance(e, shutil.Error) else [str(e)]
        raise OSError(e.errno or errno.EIO, f"cannot copy {source} to {target}: {reasons[0]}") from e


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _copy_sparse(source: str, target: str) -> str:
    with open(source, "rb") as a, open(target, "wb") as b:
        size, at = os.fstat(a.fileno()).st_size, 0
        b.truncate(size)
        while at < size:
            try:
                at = os.lseek(a.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole is left
                    break
                raise
            end = os.lseek(a.fileno(), at, os.SEEK_HOLE)
            b.seek(at)
            while at < end:
                block = os.pread(a.fileno(), min(1 << 20, end - at), at)
                b.write(block)
                at += len(block)
    shutil.copystat(source, target)
    return target


def locked(folder: Path) -> int | None:
    """Lock a folder until the handle is closed, or this process ends; None where there are no locks.

    Raises `BlockingIOError` where it is locked already.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # not on this system
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle
