"""The status page: what it shows, and to whom."""

from __future__ import annotations

import http.client
import json
import logging
import shutil
import socket
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from partita.core.check import Refused
from partita.deploy.board import Board, Lines, duration, size
from partita.deploy.status import StatusPage
from partita.engine.callbacks import Event
from support import each

EVIL = "<script>alert(1)</script>"


def traffic() -> dict[str, dict[str, Any]]:
    there = {"connected": True, "sent": 1_500_000, "received": 900, "connections": 2, "heard": 1.0}
    return {"a": there, "b&c": {**there, "connected": False, "heard": None, "sent": 0}}


@pytest.fixture
def board() -> Board:
    board = Board(traffic)
    board.start("fedalt", 0, 10)
    board.round(Event("fedalt", 3, 10, 0.25, ("b&c",), abandoned=1))
    board.round(Event("fedalt", 4, 10, 0.125, ("b&c",), abandoned=1))
    board.told(f"client b&c: {EVIL}")
    return board


@pytest.fixture
def page(board: Board) -> Iterator[StatusPage]:
    page = StatusPage(board)
    yield page
    page.close()


def get(page: StatusPage, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, str]:
    link = http.client.HTTPConnection(page.address.split("/")[2], timeout=30)
    link.request(method, path, headers=headers)
    answer = link.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def test_the_page_shows_the_run(page: StatusPage) -> None:
    status, headers, text = get(page, "/")
    assert status == 200
    assert "script-src" not in headers["Content-Security-Policy"]
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    for shown in ("fedalt", "4 of 10", "1 of 2", "0.1250", "1.5 MB", "b&amp;c", "away", "never"):
        assert shown in text, shown
    assert EVIL not in text
    assert "&lt;script&gt;" in text
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)  # type: ignore[assignment, method-assign]  # noqa: ARG005
    parser.feed(text)
    assert not {"script", "link", "img", "iframe", "form"} & set(tags)


def test_the_same_as_json(page: StatusPage) -> None:
    status, _, text = get(page, "/status.json")
    found = json.loads(text)
    assert status == 200
    assert (found["round"], found["rounds"], found["abandoned"]) == (4, 10, 1)
    assert [(c["name"], c["connected"], c["excluded"]) for c in found["clients"]] == [
        ("a", True, 0),
        ("b&c", False, 2),
    ]
    assert found["log"][0][1] == f"client b&c: {EVIL}"


NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for found in map(shutil.which, NAMES) if found), None)
PATIENCE = 300_000  # milliseconds: more than a busy machine needs


@pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(NAMES)} is installed")
def test_the_page_in_a_browser(page: StatusPage) -> None:
    """It shows the round and the clients, asks for nothing else, and complains of nothing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    complaints, asked = list[str](), list[str]()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE
        )
        opened = browser.new_page()
        opened.set_default_timeout(PATIENCE)
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto(page.address)
        text, title = opened.inner_text("body"), opened.title()
        rows = [row.split() for row in opened.locator("tr").all_inner_texts()]
        browser.close()
    assert title
    for shown in ("fedalt", "4 of 10", "1 of 2", EVIL):
        assert shown in text, shown
    assert {"a", "b&c"} <= {row[0] for row in rows if row}
    assert [row[1] for row in rows if row and row[0] == "b&c"] == ["away"]
    assert [url for url in asked if not url.endswith("favicon.ico")] == [page.address]
    assert complaints == []


@each(
    "path, method, host, status",
    [
        ("/other", "GET", None, 404),
        ("/../etc/passwd", "GET", None, 404),
        ("/", "POST", None, 501),
        ("/", "DELETE", None, 501),
        ("/", "GET", "evil.example", 403),
        ("/", "GET", "127.0.0.1", 403),
    ],
)
def test_what_is_refused(page: StatusPage, path: str, method: str, host: str | None, status: int) -> None:
    """A page of another site, which a name server leads here, learns nothing."""
    headers = {} if host is None else {"Host": host}
    assert get(page, path, method, **headers)[0] == status


def test_only_on_loopback(page: StatusPage) -> None:
    assert page.address.startswith("http://127.0.0.1:")
    with pytest.raises(Refused, match="--status"):
        StatusPage(Board(traffic), int(page.address.split(":")[2].strip("/")))


def test_a_reader_that_says_nothing_holds_nobody_up(page: StatusPage) -> None:
    silent = socket.create_connection(("127.0.0.1", int(page.address.split(":")[2].strip("/"))))
    assert get(page, "/")[0] == 200
    silent.close()


def test_lines_of_the_log(board: Board) -> None:
    log = logging.getLogger("partita.test")
    handler = Lines(board.told)
    log.addHandler(handler)
    log.warning("client %s: %s", "a", "gone")
    log.removeHandler(handler)
    assert board.lines[-1][1] == "client a: gone"


def test_words() -> None:
    assert [size(n) for n in (0, 999, 1000, 26_000_000, 3e9, 4e13)] == [
        "0 B", "999 B", "1.0 kB", "26.0 MB", "3.0 GB", "40.0 TB",
    ]  # fmt: skip
    assert [duration(s) for s in (-1, 5, 120, 7200)] == ["0 s", "5 s", "2 min", "2.0 h"]
