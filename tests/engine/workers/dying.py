"""Workers and drivers that die: executors that end their process, and a driver to be killed.

As a script: python dying.py OUT WORKERS ROUND, a run whose driver is killed with `kill -9` after a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import partita as pt
from partita.engine.execute import Task
from partita.engine.workers import crew as crews

ROUNDS = 5


def data() -> pt.data.FederatedData:
    return pt.data.digits(clients=6, partition=pt.data.label_skew(classes=4), seed=0)


def federate(**settings: Any) -> pt.Run:
    usual: dict[str, Any] = {
        "rounds": ROUNDS, "steps": 2, "batch": 8, "seed": 0, "executor": "loop", "device": "cpu",
        "baselines": False, "progress": False, "report": False, "checkpoint_every": 1,
    }  # fmt: skip
    method = settings.pop("algorithm", None) or pt.fedalt(personal="output", lr=0.1)
    return pt.federate(pt.models.mlp(64, 8, 10, seed=0), data(), method, **{**usual, **settings})


def claimed(folder: Path, times: int) -> bool:
    """Return whether one of so many deaths is left for this process; two never get the same one."""
    for number in range(times):
        with contextlib.suppress(FileExistsError):
            (folder / str(number)).touch(exist_ok=False)
            return True
    return False


class Dying:
    """An executor for `executor=`: whoever trains client 1 in round 2 dies, as often as the folder says."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def __call__(self, task: Task) -> Any:
        folder, times, inner = self.folder, self.times, pt.EXECUTORS["loop"](task)

        class Executor(type(inner)):  # type: ignore[misc]
            def __call__(self, program: Any, clients: Any, group: Any, states: Any, context: Any) -> Any:
                if program.trains and context.round == 2 and 1 in clients and claimed(folder, times):
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().__call__(program, clients, group, states, context)

        return Executor(inner.bound)


class Die(pt.callbacks.Callback):
    """Note the processes of the workers, and kill the driver after a round."""

    def __init__(self, after: int, pids: Path) -> None:
        self.after, self.pids = after, pids

    def round(self, event: pt.callbacks.Event) -> None:
        if event.round == self.after:
            teams = [crews.Team(crew, crews.Terms(2, 1, 1)) for crew in crews._open.values()]
            told = [worker["pid"] for team in teams for worker in team.description()["each"]]
            self.pids.write_text(json.dumps(told))
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    target, workers, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with crews.staying():
        federate(out=target, workers=workers, callbacks=[Die(last, target.with_suffix(".pids"))])
