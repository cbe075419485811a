"""site.toml: what the process of one client has to know of its own machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from partita.core import check
from partita.deploy import roster
from partita.deploy.grpc import tls

T = TypeVar("T")
FILE = "site.toml"
SPLITS = ("train", "validation", "test")
TEMPLATE = """\
# The machine of client {name}. Paths are relative to this file, which stays here with its keys.

name = "{name}"
server = "{server}"
folder = "state"       # this client's personal parameters: they are nowhere else, so keep a copy

[keys]
authority = "ca.crt"
certificate = "client.crt"
key = "client.key"

[data]
# Without a file, the experiment's own function data(name, ...) is asked. A file is an .npz with x and y, or
# a .py with a function data(...) that returns a FederatedData of this client.
# file = "samples.npz"
# options = {{ path = "/srv/records" }}     # further arguments of data()

[leave]
# Which numbers about this client the server may learn, beside its counts of samples: with scores on its
# "train", "validation" or "test" samples the server can say how good the model is here.
scores = []            # for example ["validation", "test"]
train_loss = false     # the mean loss of each turn
"""


@dataclass(frozen=True)
class Keys:
    """Where a site has its keys."""

    authority: str = "ca.crt"
    certificate: str = "client.crt"
    key: str = "client.key"


@dataclass(frozen=True)
class DoorPlace:
    """Where a site is asked instead of calling a server: a socket, and a group whose users may open it."""

    socket: str = ""
    group: str | None = None


@dataclass(frozen=True)
class DataSource:
    """Where a site has its samples: a file, or a function and its arguments."""

    file: str | None = None
    function: str = "data"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Leave:
    """Which numbers may leave a site."""

    scores: tuple[str, ...] = ()
    train_loss: bool = False

    def allows(self, number: str) -> bool:
        """Return whether a number may leave: 'train_loss', or the scores of a split."""
        return self.train_loss if number == "train_loss" else number in self.scores


@dataclass(frozen=True)
class SiteFile:
    """What site.toml says. Its paths are absolute.

    A site has a server with credentials, which it calls, or a door, at which it is asked.
    """

    name: str
    folder: Path
    server: str
    credentials: tls.Credentials | None
    door: DoorPlace | None
    data: DataSource
    leave: Leave

    @classmethod
    def read(cls, path: Path) -> SiteFile:
        """Read a file; refuse what it does not know, and keys that others can read."""
        content = roster.toml(path)
        where, here = str(path), path.resolve().parent
        roster.known(where, content, ("name", "server", "folder", "keys", "door", "data", "leave"))
        if not isinstance(content.get("name"), str):
            raise check.fail(f"{where}: name", content.get("name"), "a text: name = ...")
        data = _table(where, content, "data", DataSource)
        if data.file is not None:
            data = dataclasses.replace(data, file=str(here / data.file))
        has_door = "door" in content
        return cls(
            roster.name(f"{where}: name", content["name"]),
            here / _text(f"{where}: folder", content.get("folder", "state")),
            "" if has_door else _server(where, content),
            None if has_door else _credentials(where, here, content),
            _door(where, here, content) if has_door else None,
            data,
            _table(where, content, "leave", Leave),
        )


def template(name: str, server: str) -> str:
    """Return the site.toml of a new client."""
    return TEMPLATE.format(name=name, server=server)


def server_of_others(folder: Path, clients: Collection[str]) -> str | None:
    """Return the address of the server, as the site of an earlier client has it."""
    for client in clients:
        if (folder / client / FILE).is_file():
            server = roster.toml(folder / client / FILE).get("server")
            return server if isinstance(server, str) else None
    return None


def _server(where: str, content: Mapping[str, Any]) -> str:
    """Return the address of the server."""
    server = content.get("server")
    if not isinstance(server, str):
        raise check.fail(f"{where}: server", server, "a text: server = ...")
    tls.address(f"{where}: server", server)
    return server


def _credentials(where: str, here: Path, content: Mapping[str, Any]) -> tls.Credentials:
    """Return where the keys are that the client shows to its server."""
    keys = _table(where, content, "keys", Keys)
    return tls.Credentials(*(_file(where, here, keys, f.name) for f in dataclasses.fields(keys)))


def _door(where: str, here: Path, content: Mapping[str, Any]) -> DoorPlace:
    """Return where the client is asked; refuse a site that also names a server to call."""
    for key in {"server", "keys"} & content.keys():
        raise check.fail(f"{where}: {key}", content[key], f"no {key} beside [door]: it calls nobody")
    door = _table(where, content, "door", DoorPlace)
    return dataclasses.replace(door, socket=str(here / _text(f"{where}: door.socket", door.socket)))


def _table(where: str, content: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return one table of the file, its values as its fields ask for."""
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise check.fail(f"{where}: {name}", table, f"a table: [{name}]")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    roster.known(f"{where}: {name}", table, fields)
    for key, value in table.items():
        field = f"{where}: {name}.{key}"
        kinds = str(fields[key].type)
        if kinds == "bool":
            if not isinstance(value, bool):
                raise check.fail(field, value, "true or false")
        elif kinds.startswith("tuple"):
            if not isinstance(value, list) or not set(map(str, value)) <= set(SPLITS):
                raise check.fail(field, value, f"a list of some of {', '.join(map(repr, SPLITS))}")
            table = {**table, key: tuple(value)}
        elif kinds.startswith("Mapping"):
            if not isinstance(value, dict):
                raise check.fail(field, value, "a table such as { path = '/srv/records' }")
        else:
            _text(field, value)
    return kind(**table)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise check.fail(field, value, "a text that is not empty")
    return value


def _file(where: str, here: Path, keys: Keys, field: str) -> Path:
    """Return the file of a key; refuse one that is not there, or that others can read."""
    path: Path = here / getattr(keys, field)
    if not path.is_file():
        raise check.fail(f"{where}: keys.{field}", str(path), "a file that exists")
    if field == "key" and path.stat().st_mode & 0o077:
        allowed = f"a file that its owner alone can read (chmod 600 {path})"
        raise check.fail(f"{where}: keys.{field}", str(path), allowed)
    return path
