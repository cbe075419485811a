"""What all trackers share: the names of things, and what becomes of a tool that fails."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from partita.core import check
from partita.engine.callbacks import Callback, Event
from partita.engine.stopping import Stopped, Terminated

# Of a run's folder, what is worth keeping with the run in the tool.
FILES = ("config.json", "metrics.jsonl", "clients.csv", "summary.json", "report.html")
# No options of a run: what it is called and where it is; lists as long as the model.
OMITTED = ("what", "out", "model.tensors", "model.initial", "model.fixed", "code", "executor.picks")
NAMES = {"train_loss": "train/loss", "bytes_up": "bytes/up", "bytes_down": "bytes/down"}


class Tracker(Callback):
    """A callback for a tool that follows runs. A baseline is a run of its own, next to the method's.

    What the tool cannot begin is a ValueError, before anything is trained. What fails later is a warning,
    once: the training goes on without its tracker, which tries again with the next run and at the end.

    A tool's class says how to `open` a run, `log` numbers, keep the `results` and `finish`.
    """

    tool = ""

    def __init__(self) -> None:
        self._begun = (0, 0)  # the round it starts from, the rounds in all
        self._open = self._ended = self._broken = False
        self._tracked = self._warned = False  # since the last `close`

    # ---- a tool's part

    def open(self, what: str, round: int, config: Mapping[str, Any]) -> None:
        """A run begins, or goes on after `round`."""
        raise NotImplementedError

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of a round."""
        raise NotImplementedError

    def results(self, numbers: Mapping[str, float], step: int) -> None:
        """The numbers of the summary."""
        self.log(numbers, step)

    def finish(self, status: str) -> None:
        """The run is over: 'finished', 'stopped' (by Ctrl-C) or 'failed'."""
        raise NotImplementedError

    # ---- the run's calls

    def start(self, what: str, round: int, rounds: int) -> None:  # noqa: ARG002
        """A run before this one is over."""
        self._settle()
        self._begun = (round, rounds)
        self._ended = self._broken = False

    def config(self, what: str, config: Mapping[str, Any]) -> None:
        """Opens the run."""
        try:
            self.open(what, self._begun[0], config)
        except Exception as error:
            if not self._tracked:
                raise check.fail("track", self.tool, "", one_line(error)) from error
            self._fail(error)
        else:
            self._open = self._tracked = True

    def round(self, event: Event) -> None:
        """The training loss."""
        if event.train_loss is not None:
            self._attempt(self.log, {"train/round_loss": event.train_loss}, event.round)

    def evaluation(self, what: str, row: Mapping[str, Any]) -> None:  # noqa: ARG002
        """The row's numbers."""
        found = numbers({k: v for k, v in row.items() if k != "round"})
        self._attempt(self.log, found, row["round"])

    def end(self, what: str) -> None:  # noqa: ARG002
        """From here on the run counts as finished."""
        self._ended = True

    def summary(self, what: str, summary: Mapping[str, Any]) -> None:  # noqa: ARG002
        """The summary's numbers."""
        found = {f"summary/{name}": value for name, value in numbers(summary).items()}
        self._attempt(self.results, found, self._begun[1])

    def close(self) -> None:
        """Ends the run in the tool: finished, stopped or failed."""
        self._settle()
        self._tracked = self._warned = False

    def _settle(self) -> None:
        if not self._open:
            return
        self._open, self._broken = False, False  # a tool that is back can still tell how the run ended
        stopped = isinstance(sys.exception(), KeyboardInterrupt | Stopped | Terminated)
        self._attempt(
            self.finish, "finished" if self._ended else "stopped" if stopped else "failed", over=True
        )

    def _attempt(self, action: Callable[..., None], *arguments: Any, over: bool = False) -> None:
        if (self._open or over) and not self._broken:
            try:
                action(*arguments)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._broken = True
        if not self._warned:
            self._warned = True
            warnings.warn(f"{self.tool}: {one_line(error)}; the run goes on without it", stacklevel=3)


def library(tool: str, module: str, package: str = "") -> Any:
    """A tool's module, loaded when it is first needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed = f"the package {package or module} (pip install 'partita[track]'); {one_line(error)}"
        raise check.fail("track", tool, needed) from error


def options(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as `algorithm.lr`, `settings.rounds`, ...; lists as JSON."""
    return dict(_flat(selected(config)))


def selected(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A configuration without what is no option."""
    return {
        key: selected(value, f"{path}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{path}{key}" not in OMITTED
    }


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row or a summary under the names that tools show, such as measures/NAME/KEY; no lists,
    but of clients left out how many."""
    found = {}
    for key, value in _flat({**values, "excluded": len(values.get("excluded") or ())}):
        if isinstance(value, int | float) and not isinstance(value, bool):
            name = NAMES.get(key, key.replace(".", "/"))
            found[re.sub(r"[^\w/ :-]", "_", name)] = float(value)  # MLflow takes no others
    return found


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value):
            value = dict(enumerate(value))  # the stages of a pipeline
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, json.dumps(value, default=str)
        else:
            yield name, value


def is_baseline(what: str) -> bool:
    """Whether a run is one that the method is compared with."""
    return what.startswith("baseline ")


def label(name: str | None, what: str, config: Mapping[str, Any]) -> str:
    """What people call a run: as they said, or as its folder, or as its method."""
    if is_baseline(what):
        return what
    return name or (Path(config["out"]).name if config.get("out") else "") or what


def slug(text: str) -> str:
    """A name for files and artifacts."""
    return re.sub(r"[^\w.-]+", "-", text)


def files(config: Mapping[str, Any]) -> list[Path]:
    """The files of a run's folder that go with it."""
    folder = config.get("out")
    return [path for path in (Path(folder) / name for name in FILES) if path.is_file()] if folder else []


def recall(tool: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What was kept in the run's folder about the run in the tool: a resumed run goes on there."""
    path = Path(config.get("out") or ".") / f"track-{tool}.json"
    try:
        found = json.loads(path.read_text()) if config.get("out") else {}
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(tool: str, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """For `recall`; a run without a folder is never resumed."""
    if config.get("out"):
        path = Path(config["out"]) / f"track-{tool}.json"
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(dict(facts)) + "\n")
        os.replace(temporary, path)


def one_line(error: Exception) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
