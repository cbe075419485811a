"""What is known of a server's run at this moment: who is there, how far it is, what has happened to whom."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from partita.engine.callbacks import Callback, Event
from partita.report.html import Safe, join, note, section, table, tag, text, tiles

RECENT = 200
"""Lines of the log that the page shows."""
REFRESH = 2  # seconds


class Board(Callback):
    """Collects what callbacks and the log say; `snapshot` and `page` show it.

    traffic  returns, for each client of the roster, whether it is connected and what has passed
    """

    def __init__(self, traffic: Callable[[], Mapping[str, Mapping[str, Any]]]) -> None:
        self.traffic, self.begun = traffic, time.time()
        self.state, self.what, self.at, self.rounds = "waiting for clients", "", 0, 0
        self.train_loss: float | None = None
        self.abandoned = 0
        self.excluded: Counter[str] = Counter()
        self.row: dict[str, Any] = {}
        self.lines: deque[tuple[float, str]] = deque(maxlen=RECENT)

    # ---- what tells it

    def start(self, what: str, round: int, rounds: int) -> None:
        """A run begins, or goes on."""
        self.state, self.what, self.at, self.rounds = "training", what, round, rounds

    def note(self, what: str, text: str) -> None:  # noqa: ARG002
        """Something beside rounds takes a while."""
        self.state = text or "training"

    def round(self, event: Event) -> None:
        """A round is over."""
        self.at, self.rounds, self.abandoned = event.round, event.rounds, event.abandoned
        self.train_loss = event.train_loss
        self.excluded.update(event.excluded)

    def evaluation(self, what: str, row: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Keep the last row of metrics.jsonl."""
        self.row = dict(row)

    def end(self, what: str) -> None:  # noqa: ARG002
        """The rounds are over."""
        self.state = "writing results"

    def close(self) -> None:
        """All is over."""
        self.state = "done"

    def told(self, line: str) -> None:
        """Keep a line of the log."""
        self.lines.append((time.time(), line))

    # ---- what shows it

    def snapshot(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        clients = [
            {"name": name, "excluded": self.excluded[name], **facts} for name, facts in self.traffic().items()
        ]
        return {
            "state": self.state,
            "method": self.what,
            "round": self.at,
            "rounds": self.rounds,
            "abandoned": self.abandoned,
            "train_loss": self.train_loss,
            "seconds": round(time.time() - self.begun, 1),
            "clients": clients,
            "log": [[round(when, 3), line] for when, line in self.lines],
        }

    def page(self) -> str:
        """Return it as a page that opens without anything else, and asks for itself again."""
        now = self.snapshot()
        clients, there = now["clients"], sum(bool(c["connected"]) for c in now["clients"])
        loss = "-" if now["train_loss"] is None else f"{now['train_loss']:.4f}"
        facts = [
            ("round", f"{now['round']} of {now['rounds']}" if now["rounds"] else "-"),
            ("connected", f"{there} of {len(clients)}"),
            ("training loss", loss),
            ("abandoned rounds", str(now["abandoned"])),
            ("to clients", size(sum(c["sent"] for c in clients))),
            ("from clients", size(sum(c["received"] for c in clients))),
            ("running for", duration(now["seconds"])),
        ]
        columns = ("client", "now", "last heard", "connections", "to it", "from it", "uploads set aside")
        lines = [f"{clock(when)}  {line}" for when, line in reversed(now["log"])]
        body = (
            tag("p", "Partita server", class_="eyebrow"),
            tag("h1", f"{now['method'] or 'Federation'}: {now['state']}"),
            tiles(facts),
            section("clients", "Clients", table(columns, [_row(c) for c in clients], (0, 1, 2))),
            section("log", "What has happened", tag("pre", "\n".join(lines) or "nothing yet")),
            note(f"As of {clock(time.time())}; this page asks again every {REFRESH} seconds."),
        )
        return document(now["state"], join(body))


def _row(client: Mapping[str, Any]) -> list[object]:
    """Return the line of a client."""
    heard = "never" if client["heard"] is None else f"{duration(time.time() - client['heard'])} ago"
    here = tag("b", "connected") if client["connected"] else "away"
    amounts = (size(client["sent"]), size(client["received"]))
    return [client["name"], here, heard, client["connections"], *amounts, client["excluded"] or "-"]


def document(title: str, body: Safe) -> str:
    """Return a page with the style of reports; it loads nothing and runs nothing."""
    style = resources.files("partita.report").joinpath("style.css").read_text()
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{REFRESH}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}: Partita server</title><style>{style}\npre {{ white-space: pre-wrap; }}"
    )
    return f"{head}</style></head><body><main>{body}</main></body></html>"


class Lines(logging.Handler):
    """Hands the lines of a log to a function."""

    def __init__(self, told: Callable[[str], None]) -> None:
        super().__init__()
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        """Hand on one line."""
        self.told(record.getMessage())


def size(count: float) -> str:
    """Return bytes in words."""
    if count < 1000:
        return f"{count:.0f} B"
    power = min(4, max(1, int(math.log10(count) // 3)))
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def duration(seconds: float) -> str:
    """Return seconds in words."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def clock(when: float) -> str:
    """Return a time of day."""
    return time.strftime("%H:%M:%S", time.localtime(when))
