"""Flower without Flower: messages, a grid of SuperNodes that are functions, and the example's ClientApp."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from partita.deploy.grpc.tls import key_fingerprint

APP = Path(__file__).parents[2] / "examples" / "deploy" / "flower"


@dataclass
class Array:
    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: bytes


@dataclass
class Error:
    code: int
    reason: str


class Message:
    """A request to a SuperNode, or the reply to one."""

    numbers = itertools.count()

    def __init__(
        self, content: Any, node: int = 0, kind: str = "", *, reply_to: Any = None, ttl: float = 0.0
    ) -> None:
        self.node, self.kind, self.ttl = node, kind, ttl
        self.error = content if isinstance(content, Error) else None
        self.content = None if self.error else content
        name = "" if reply_to is None else reply_to.metadata.message_id
        number = f"m{next(self.numbers)}"
        self.metadata = SimpleNamespace(message_id=number, reply_to_message_id=name)

    def has_error(self) -> bool:
        return self.error is not None


class ClientApp:
    def query(self) -> Callable[[Any], Any]:
        return lambda function: function


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import flwr` find these."""
    parts = {"Array": Array, "ArrayRecord": dict, "RecordDict": dict, "Message": Message, "Error": Error}
    app, clientapp = ModuleType("flwr.app"), ModuleType("flwr.clientapp")
    vars(app).update(parts, Context=SimpleNamespace)
    vars(clientapp).update(ClientApp=ClientApp)
    for module in (ModuleType("flwr"), app, clientapp):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def client_app() -> Any:
    """Load the ClientApp of the example, as a SuperNode does."""
    spec = importlib.util.spec_from_file_location("client_app", APP / "partita_flower" / "client_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Node:
    """A SuperNode that has signed in."""

    node_id: int
    public_key: bytes
    last_activated_at: str = "first"


def key() -> tuple[bytes, str]:
    """Return a public key as Flower gives it, and its fingerprint."""
    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return pem, key_fingerprint(pem)


@dataclass
class Grid:
    """A grid that keeps what is pushed; `answer` has SuperNodes work the oldest message of each."""

    nodes: dict[str, Node]
    waiting: list[Any] = field(default_factory=list)
    replies: dict[str, Any] = field(default_factory=dict)
    pushed: list[Any] = field(default_factory=list)
    takes: bool = True

    def get_nodes(self) -> list[Node]:
        return list(self.nodes.values())

    def push_messages(self, messages: list[Any]) -> list[str]:
        if not self.takes:
            return []
        self.waiting += messages
        self.pushed += messages
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        return [self.replies.pop(i) for i in ids if i in self.replies]

    def reply(self, message: Any, content: Any) -> None:
        self.replies[message.metadata.message_id] = Message(content, reply_to=message)

    def answer(self, work: Callable[[str, bytes], bytes | Error]) -> None:
        """Let all SuperNodes that are there work what waits for them."""
        names = {node.node_id: name for name, node in self.nodes.items()}
        for message in [m for m in self.waiting if m.node in names]:
            self.waiting.remove(message)
            result = work(names[message.node], message.content["request"]["body"].data)
            if isinstance(result, bytes):
                result = {"reply": {"body": Array("uint8", (len(result),), "partita", result)}}  # type: ignore[assignment]
            self.reply(message, result)
