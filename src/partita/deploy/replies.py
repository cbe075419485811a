"""Requests that are waited for, and how a reply is read: first of all as what it must not be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from partita.core.types import Tensors
from partita.deploy.transport import Arrival
from partita.deploy.wire import Body, Malformed, printable, unpack

KINDS = {
    "hello": "hello",
    "check": "check",
    "train": "upload",
    "score": "scores",
    "stage": "stage",
    "last": "last",
    "arrive": "arrived",
}
"""What a request of each kind is answered with."""
LACKING = ("train", "score", "last", "arrive")
"""Requests whose answer may be that the client lacks the models with which stages begin."""


@dataclass
class Request:
    """One request that is waited for.

    taken     is called with the head and the tensors of its reply, or with what is wrong with it
    question  the number of the request that was sent first: what a client lacks, and the same request once
              more, are sent for it
    again     how often it was sent before
    """

    client: int
    name: str
    head: dict[str, Any]
    body: Body
    limit: int
    taken: Callable[[dict[str, Any], Tensors, str], None]
    question: str
    asked: float = field(default_factory=time.monotonic)
    again: int = 0


def read_reply(arrival: Arrival, request: Request) -> tuple[dict[str, Any], Tensors, str]:
    """Return the head and the tensors of a reply, and what is wrong with it ('': nothing)."""
    if not arrival.body:
        return {}, {}, "a reply that is too large, or broken"
    try:
        head, tensors = unpack(arrival.body, request.limit)
    except Malformed as error:
        return {}, {}, str(error)
    if head.get("id") != request.head["id"] or head.get("run") != request.head["run"]:
        return {}, {}, "a reply to another request"
    kind = head.get("kind")
    if kind == "error":
        return {}, {}, f"error there: {_text(head.get('why'))}"
    asked = request.head["kind"]
    if kind != KINDS[asked] and not (kind == "lacks" and asked in LACKING):
        return {}, {}, f"a reply of kind {printable(kind)}"
    return head, tensors, ""


def _text(value: object) -> str:
    """Return a line of printable characters of what came from outside."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:200])


def unused(client: int, head: dict[str, Any]) -> None:
    """Do nothing with a good reply."""


def ignored(head: dict[str, Any], tensors: Tensors, fault: str) -> None:
    """Do nothing with a reply."""
