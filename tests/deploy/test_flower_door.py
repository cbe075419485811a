"""The door of a client process, and the ClientApp before it: what is refused, what dies, and who may ask."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_flower
import pytest
from cable import until

from partita.core.check import Refused
from partita.deploy.flower import Door, door
from support import each


class Echo:
    """Answers with what it was asked, backwards."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def handle(self, body: bytes) -> bytes:
        self.asked.append(body)
        if body == b"fail":
            raise RuntimeError("a fault of the handler")
        return body[::-1]


class House:
    """Doors that end with their test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.open: list[tuple[Door, threading.Thread]] = []

    def door(self, handler: Any, name: str = "s", **options: Any) -> Door:
        made = Door(
            self.folder / "door" / name, **{"largest": 1 << 20, "notice": self.said.append, **options}
        )
        thread = threading.Thread(target=made.run, args=(handler,))
        thread.start()
        self.open.append((made, thread))
        return made

    def close(self) -> None:
        for made, thread in self.open:
            made.stop()
            thread.join(10)
            assert not thread.is_alive()
        self.open.clear()


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(door, "LOOK", 0.02)
    there = House(tmp_path)
    yield there
    there.close()


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake_flower.install(monkeypatch)
    loaded = fake_flower.client_app()
    loaded.COMES_BACK = 0.0
    return loaded


def ask(app: Any, path: Path, body: bytes, seconds: float = 0.0) -> bytes:
    reply: bytes = app.asked(str(path), body, time.monotonic() + seconds)
    return reply


def test_what_is_asked_is_answered_in_order(house: House, app: Any) -> None:
    echo = Echo()
    path = house.door(echo).path
    bodies = [b"", b"one", os.urandom(1 << 20)]
    assert [ask(app, path, body) for body in bodies] == [body[::-1] for body in bodies]
    assert echo.asked == bodies


def test_a_client_app_carries_bytes(house: House, app: Any) -> None:
    path = house.door(Echo()).path
    array = fake_flower.Array("uint8", (3,), "partita", b"abc")
    message = fake_flower.Message({"request": {"body": array}})
    reply = app.query(message, SimpleNamespace(node_config={"socket": str(path)}))
    assert reply.content["reply"]["body"].data == b"cba"
    assert reply.metadata.reply_to_message_id == message.metadata.message_id


@each("config", [{}, {"socket": "/nowhere/s"}])
def test_a_client_app_without_its_process_says_so(
    config: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flower.install(monkeypatch)
    app = fake_flower.client_app()
    app.COMES_BACK = 0.0
    array = fake_flower.Array("uint8", (3,), "partita", b"abc")
    reply = app.query(fake_flower.Message({"request": {"body": array}}), SimpleNamespace(node_config=config))
    assert "no reply from the client process" in reply.error.reason


def test_a_process_that_comes_back_is_asked_again(house: House, app: Any) -> None:
    answers: list[bytes] = []
    path = house.folder / "door" / "s"
    asking = threading.Thread(target=lambda: answers.append(ask(app, path, b"abc", 30.0)))
    asking.start()
    house.door(Echo())
    asking.join(30)
    assert answers == [b"cba"]


def test_other_files_and_modes(house: House) -> None:
    path = house.door(Echo()).path
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(Refused, match="another is there"):
        house.door(Echo())
    house.close()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(Refused, match="no other file"):
        house.door(Echo())
    assert path.read_text() == "mine"
    path.unlink()
    path.parent.chmod(0o722)
    with pytest.raises(Refused, match="nobody else can write to"):
        house.door(Echo())
    with pytest.raises(Refused, match="at most 107 bytes"):
        house.door(Echo(), "x" * 108)


def test_the_socket_of_a_process_that_was_killed_is_replaced(house: House, app: Any) -> None:
    path = house.folder / "door" / "s"
    path.parent.mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # a process that is killed removes nothing
    house.door(Echo())
    assert ask(app, path, b"abc") == b"cba"


def raw(path: Path, data: bytes) -> bytes:
    """Send bytes, and return what comes back until the connection is closed."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(10)
        link.connect(str(path))
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        come = b""
        try:
            while piece := link.recv(1 << 16):
                come += piece
        except ConnectionResetError:
            pass
        return come


class Evil:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("something was unpickled",))


@each(
    "data, told",
    [
        (b"", "0 of 8 bytes"),
        (b"abc", "3 of 8 bytes"),
        (struct.pack("<Q", 9) + b"half", "4 of 9 bytes"),
        (struct.pack("<Q", (1 << 20) + 1), "where at most 1048576 may come"),
        (struct.pack("<Q", 1 << 62), "where at most 1048576 may come"),
        (struct.pack("<Q", 4) + b"fail", "a fault of the handler"),
        (pickle.dumps(Evil()), "where at most 1048576 may come"),
    ],
)
def test_what_is_no_request_is_closed(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, told: str
) -> None:
    there = House(tmp_path_factory.mktemp("house"))
    try:
        path = there.door(Echo()).path
        assert raw(path, data) == b""
        assert raw(path, struct.pack("<Q", 3) + b"abc") == struct.pack("<Q", 3) + b"cba"
        assert told in there.said[0]
    finally:
        there.close()


def test_a_connection_that_says_nothing_ends(house: House, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "SECONDS", 0.1)
    path = house.door(Echo()).path
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))
        assert ask(app, path, b"abc", 10.0) == b"cba"


def test_a_client_app_that_is_killed_ends_nothing(house: House, app: Any) -> None:
    """It has asked, and nobody takes the reply."""
    path = house.door(Echo()).path
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        body = os.urandom(1 << 20)
        link.sendall(struct.pack("<Q", len(body)) + body)
    assert ask(app, path, b"abc") == b"cba"
    until(lambda: any("ended without its reply" in line for line in house.said))


# ---- who may ask

ASK = """
import os, socket, struct, sys
os.setgroups([int(g) for g in sys.argv[4:]]); os.setgid(65534); os.setuid(65534)
try:
    print("read", open(sys.argv[2]).read())
except OSError as error:
    print("read", type(error).__name__)
link = socket.socket(socket.AF_UNIX)
try:
    link.connect(sys.argv[1])
    link.sendall(struct.pack("<Q", 3) + b"abc")
    come = b""
    while piece := link.recv(64):
        come += piece
    print("ask", come[8:].decode())
except OSError as error:
    print("ask", type(error).__name__)
print("write", os.access(os.path.dirname(sys.argv[1]), os.W_OK))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
@each(
    "group, groups, expected",
    [
        (None, [], "ask PermissionError"),
        ("daemon", [], "ask PermissionError"),
        ("daemon", [1], "ask cba"),
    ],
)
def test_another_user_reads_no_state_and_asks_only_by_its_group(
    tmp_path_factory: pytest.TempPathFactory, group: str | None, groups: list[int], expected: str
) -> None:
    folder = Path("/tmp") / tmp_path_factory.mktemp("users").name  # all may go as far as there
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o755)
    there = House(folder)
    try:
        state = folder / "state" / "model"
        state.parent.mkdir(mode=0o700)
        state.write_text("personal")
        state.chmod(0o600)
        path = there.door(Echo(), group=group).path
        words = [sys.executable, "-c", ASK, str(path), str(state), *["-"], *map(str, groups)]
        done = subprocess.run(words, capture_output=True, text=True, cwd="/")
        assert done.stdout.splitlines() == ["read PermissionError", expected, "write False"], done.stderr
    finally:
        there.close()
        shutil.rmtree(folder)


def test_a_group_that_is_not_there_is_refused(house: House) -> None:
    with pytest.raises(Refused, match="the user of this process is in"):
        house.door(Echo(), group="no-such-group")
