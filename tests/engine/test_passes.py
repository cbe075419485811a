"""How many files a newcomer passes who follows a plain round, or a restore, from call to call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import partita as pt
from partita.engine import folder, train
from partita.engine.monitor import Monitor

PACKAGE = str(Path(pt.__file__).parent)
DATA = pt.data.digits(clients=12, partition=pt.data.label_skew(classes=3), seed=1)
ROUNDS = 60  # a step that comes often is traced by then, and only carried out


class Files:
    """The files of the package whose functions are called while it looks."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def during(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with a look at what it calls."""

        def watched(*args: Any, **options: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(self._look)
            try:
                return function(*args, **options)
            finally:
                sys.setprofile(before)

        return watched

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ARG002
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            self.names.add(str(Path(path).relative_to(PACKAGE)))

    def show(self, what: str) -> None:
        """Print the list, for `pytest -s`."""
        print(f"\n{what} passes {len(self.names)} files: {' '.join(sorted(self.names))}")


def federate(**options: Any) -> pt.Run:
    settings = {
        "rounds": ROUNDS, "cohort": 6, "steps": 3, "batch": 8, "seed": 3, "executor": "vmap", "device": "cpu",
        "baselines": False, "evaluate_every": 1000, "progress": False, "report": False, **options,
    }  # fmt: skip
    return pt.federate(pt.models.mlp(64, 16, 10), DATA, pt.fedalt(personal="output", lr=0.1), **settings)


def test_a_plain_synchronous_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round itself, and what the monitor counts after it."""
    files = Files()
    one_round, after = train.one_round, Monitor.after

    def late(function: Callable[..., Any], state: Any) -> Callable[..., Any]:
        return files.during(function) if state.server.version == ROUNDS - 2 else function

    monkeypatch.setattr(train, "one_round", lambda stage, state: late(one_round, state)(stage, state))
    monkeypatch.setattr(
        Monitor,
        "after",
        lambda self, stage, state, done: late(after, state)(self, stage, state, done),
    )
    federate()
    files.show("a round of fedalt")
    assert "engine/loop.py" in files.names
    assert len(files.names) <= 26


class Killed(Exception):
    """Raised in the middle of a run."""


class Kill(pt.callbacks.Callback):
    def round(self, event: Any) -> None:
        if event.round == 3:
            raise Killed


def test_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the files of a checkpoint to the state of the run; the stage is bound as that of a new run."""
    options: dict[str, Any] = {"rounds": 5, "out": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(Killed):
        federate(**options, callbacks=[Kill()])
    files = Files()
    monkeypatch.setattr(folder.durable, "read", files.during(folder.durable.read))
    monkeypatch.setattr(train, "decode", files.during(train.decode))
    monkeypatch.setattr(train, "restored", files.during(train.restored))
    federate(**options, resume=True)
    files.show("a restore")
    assert "engine/state.py" in files.names
    assert len(files.names) <= 25
