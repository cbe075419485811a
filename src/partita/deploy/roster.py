"""The roster: who may take part, each name pinned to the fingerprint of a public key."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from partita.core import check
from partita.deploy.folder import write_private

FILE = "roster.toml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY = re.compile(r"sha256:[0-9a-f]{64}")
LARGEST = 1 << 24
MOST_SAMPLES = 1 << 31
SPLITS = ("training", "validation", "test")
HEAD = """\
# Who may take part: each client's name, and the SHA-256 of its public key (client.crt).
# `partita deploy keys` adds clients; a client whose line is removed is dismissed at once.
#
# A client says itself how many samples it has. To hold it to a number of yours, for training, validation and
# test, write its line as
#   north = { key = "sha256:...", samples = [420, 60, 120] }

[clients]
"""


def name(field: str, value: str) -> str:
    """Return the name of a client; refuse what could not name a folder."""
    if not NAME.fullmatch(value):
        allowed = (
            "a name of at most 64 letters, digits, '.', '_' and '-' that begins with a letter or a digit"
        )
        raise check.fail(field, value, allowed)
    return value


def read(path: Path) -> dict[str, str]:
    """Return the fingerprint of each client's key, by name."""
    clients = {client: line["key"] for client, line in _lines(path).items()}
    shared = {key for key in clients.values() if list(clients.values()).count(key) > 1}
    for key in sorted(shared):
        names = ", ".join(client for client, own in clients.items() if own == key)
        raise check.fail(f"{path}: {names}", key, "a key for each client: this one is of several")
    return clients


def samples(path: Path) -> dict[str, list[int]]:
    """Return how many samples the clients have of whom the roster says it, by name."""
    return {client: line["samples"] for client, line in _lines(path).items() if "samples" in line}


def write(path: Path, clients: Mapping[str, str]) -> None:
    """Replace the roster in one step; what it says of samples stays."""
    known = samples(path) if path.exists() else {}
    lines = [f"{json.dumps(client)} = {_line(key, known.get(client))}\n" for client, key in clients.items()]
    write_private(path, (HEAD + "".join(lines)).encode())


def _line(key: str, counts: list[int] | None) -> str:
    own = json.dumps(key)
    return own if counts is None else f"{{ key = {own}, samples = {counts} }}"


def _lines(path: Path) -> dict[str, dict[str, Any]]:
    """Return what the roster says of each client: its key, and there may be its samples."""
    content = toml(path)
    known(str(path), content, ("clients",))
    clients = content.get("clients")
    if not isinstance(clients, Mapping) or not clients:
        allowed = '[clients] with lines such as a = "sha256:..." (partita deploy keys writes them)'
        raise check.fail("roster", str(path), allowed)
    lines = {}
    for client, said in clients.items():
        where = f"{path}: {client}"
        name(f"{path}: client", client)
        line = said if isinstance(said, dict) else {"key": said}
        known(where, line, ("key", "samples"))
        if not isinstance(line.get("key"), str) or not KEY.fullmatch(line["key"]):
            raise check.fail(where, line.get("key"), "'sha256:' and 64 hexadecimal digits")
        if "samples" in line and not _are_counts(line["samples"]):
            allowed = f"how many there are for {', '.join(SPLITS)}, such as [420, 60, 120]"
            raise check.fail(f"{where}: samples", line["samples"], allowed)
        lines[client] = line
    return lines


def _are_counts(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) == len(SPLITS)
    return is_list and all(type(n) is int and 0 <= n <= MOST_SAMPLES for n in value)


def toml(path: Path) -> dict[str, Any]:
    """Read a file of TOML; the error names the file and the line."""
    if not path.is_file():
        raise check.fail("file", str(path), "a file that exists (partita deploy keys writes it)")
    if path.stat().st_size > LARGEST:
        raise check.fail("file", str(path), f"at most {LARGEST} bytes")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise check.fail("file", str(path), "TOML", str(error)) from None


def known(where: str, content: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse a key that nobody would read, and suggest the one that is meant."""
    allowed = list(keys)
    for key in content:
        if key not in allowed:
            raise check.fail(f"{where}: key", key, f"one of {', '.join(allowed)}{check.meant(key, allowed)}")
