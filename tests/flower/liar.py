"""A client process that lies: `liar.py NAME SOCKET FOLDER FAULT...`, one fault for each turn, in order."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import small_experiment
import torch

from partita.cli.deploy.client import head_of
from partita.deploy import Client
from partita.deploy.flower import Door
from partita.deploy.wire import Body, pack, unpack

LARGE = 64 << 20


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path(sys.argv[3]) / "unpickled",))


def not_finite(reply: bytes) -> bytes:
    head, tensors = unpack(reply, 1 << 30)
    return pack(head, Body.of({k: torch.full_like(v, float("nan")) for k, v in tensors.items()}))


FAULTS = {
    "nan": not_finite,
    "garbage": lambda reply: bytes(range(256)) * 9,  # noqa: ARG005
    "pickle": lambda reply: pickle.dumps(Evil()),  # noqa: ARG005
    "oversize": lambda reply: reply + bytes(LARGE),
}


class Liar:
    """A handler whose replies to training are changed."""

    def __init__(self, handler: Client, faults: list[str]) -> None:
        self.handler, self.faults = handler, faults

    def handle(self, body: bytes) -> bytes:
        reply = self.handler.handle(body)
        is_training = head_of(body).get("kind") == "train" and self.faults
        return FAULTS[self.faults.pop(0)](reply) if is_training else reply


def main() -> None:
    name, socket, folder, *faults = sys.argv[1:]
    client = Client(small_experiment.experiment("fedalt", 4), name, small_experiment.data(name), folder)
    Door(socket, largest=1 << 30).run(Liar(client, faults))


if __name__ == "__main__":
    main()
