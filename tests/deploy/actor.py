"""The command with a fault: `actor.py FAULT NUMBER FILE -- deploy client ...`. No clock decides where.

before   a client dies as `kill -9` would, before it trains for event NUMBER
after    it dies when its new state is on disk and nobody has heard of it
hold     it says so in FILE when it has trained for event NUMBER, and answers when FILE is gone
score    it dies when it is asked for scores of version NUMBER
last     it dies when it has been told the last model, and nobody has heard that it has it
round    the server dies after round NUMBER, whose checkpoint is written
scores   the server dies in an evaluation of version NUMBER, when all have been asked
end      the server dies when all rounds are over, before clients are told
none     nothing
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from partita import cli
from partita.cli.deploy.client import head_of
from partita.cli.deploy.server import Rounds
from partita.deploy import Client
from partita.deploy.fleet import Fleet


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    fault, number, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    handle, told, held = Client.handle, Rounds.round, list[bool]()
    survey, finish = Fleet.survey, Fleet.finish

    def faulty(self: Client, body: bytes) -> bytes:
        head = head_of(body)
        strikes = head.get("kind") == "train" and head.get("event") == number
        scores = head.get("kind") == "score" and head.get("version") == number
        if (strikes and fault == "before") or (scores and fault == "score"):
            die()
        reply = handle(self, body)
        if (strikes and fault == "after") or (head.get("kind") == "last" and fault == "last"):
            die()
        if strikes and fault == "hold" and not held:
            held.append(True)  # once
            file.touch()
            while file.exists():
                time.sleep(0.01)
        return reply

    def ended(self: Rounds, event: object) -> None:
        told(self, event)  # type: ignore[arg-type]
        if fault == "round" and event.round == number:  # type: ignore[attr-defined]
            die()

    def asked(self: Fleet, kind: str, *arguments: Any, **options: Any) -> Any:
        if kind == "score" and fault == "scores" and self.state.server.version == number:
            self.wait = lambda seconds: die()  # type: ignore[method-assign]  # noqa: ARG005
        return survey(self, kind, *arguments, **options)

    def over(self: Fleet) -> None:
        if fault == "end":
            die()
        finish(self)

    Client.handle, Rounds.round = faulty, ended  # type: ignore[method-assign]
    Fleet.survey, Fleet.finish = asked, over  # type: ignore[method-assign]
    sys.argv = ["partita", *sys.argv[sys.argv.index("--") + 1 :]]
    cli.main()


if __name__ == "__main__":
    main()
