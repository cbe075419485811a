"""Requests and replies as Flower's messages: their bytes, in an array, and nothing else."""

from __future__ import annotations

import importlib
from typing import Any

from partita.core import check

KIND = "query"
REQUEST, REPLY, BODY = "request", "reply", "body"
TYPE = "partita"
"""What Flower notes as the form of the bytes, which it does not look into."""
SECONDS = 12 * 3600.0
"""After which Flower gives up a message."""


def library(module: str) -> Any:
    """Load a module of Flower; say how to install it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed = "Flower (pip install 'partita[flower]', in an environment of its own)"
        raise check.fail("flower", module, needed, check.reason(error)) from error


def request(body: bytes, node: int) -> Any:
    """Return the message that takes a request to a SuperNode."""
    app = library("flwr.app")
    array = app.Array("uint8", (len(body),), TYPE, body)
    content = app.RecordDict({REQUEST: app.ArrayRecord({BODY: array})})
    return app.Message(content, node, KIND, ttl=SECONDS)


def reply_of(message: Any, largest: int) -> bytes:
    """Return the bytes of a reply; none if it is too large, or is no reply of a client."""
    try:
        body = message.content[REPLY][BODY].data
    except (KeyError, TypeError, AttributeError, ValueError):
        return b""
    return bytes(body) if isinstance(body, bytes | bytearray) and len(body) <= largest else b""
