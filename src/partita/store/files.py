"""Small files that are either there in full or not at all."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor


def write_text(path: str | Path, text: str) -> None:
    """Replace a file in one step: a reader (or a kill) finds the old text or the new, nothing between."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(text.encode())
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: str | Path, value: Any) -> None:
    """A value as JSON; see `plain` for what becomes of tensors and NaN."""
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: str | Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A table; a missing, None or NaN value is an empty cell, a key that is no column an error."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(plain(row) for row in rows)
    write_text(path, text.getvalue())


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A JSON object per line."""
    write_text(path, "".join(_line(row) for row in rows))


def append_jsonl(path: str | Path, row: Mapping[str, Any]) -> None:
    """One more line, on disk when this returns. A torn line of a killed run is cut off first."""
    path = Path(path)
    new = not path.exists()
    with open(path, "ab+") as f:
        f.truncate(_whole_lines(f))
        f.write(_line(row).encode())
        f.flush()
        os.fsync(f.fileno())
    if new:
        sync_folder(path.parent)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file; a last line without its end was torn by a kill and is ignored."""
    rows = []
    for i, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1]):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}, line {i + 1}: not JSON") from None
    return rows


def plain(value: Any) -> Any:
    """In JSON's types: tensors and arrays as numbers and lists; NaN and ±inf, unknown to JSON, as None."""
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


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk (a new or renamed file is not, before)."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def _whole_lines(f: BinaryIO) -> int:
    size = f.seek(0, os.SEEK_END)
    f.seek(max(size - 1, 0))
    if f.read(1) in (b"\n", b""):
        return size
    f.seek(0)
    return f.read().rfind(b"\n") + 1


def copy_folder(source: Path, target: Path) -> None:
    """A folder with all it holds; holes in files stay holes, so that rows never written cost nothing."""
    copy = _copy_sparse if hasattr(os, "SEEK_DATA") else shutil.copy2
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=copy)


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
