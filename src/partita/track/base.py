"""What all trackers share: the names of numbers and options, and how to go on when a tool fails."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from partita.core import check
from partita.engine.callbacks import Callback, Event
from partita.engine.stopping import Stopped, Terminated

# the files of a run's folder that are kept with the run in the tool
FILES = ("config.json", "metrics.jsonl", "clients.csv", "summary.json", "report.html")
# what is no option of a run: its name and folder, and lists as long as the model
OMITTED = ("what", "out", "model.tensors", "model.initial", "model.fixed", "code", "executor.picks")
NAMES = {"train_loss": "train/loss", "bytes_up": "bytes/up", "bytes_down": "bytes/down"}


class Tracker(Callback):
    """A callback for a tool that follows runs. A baseline is a run of its own, next to the method's.

    A tool that cannot begin raises a ValueError before anything is trained. A tool that fails later causes
    one warning: the training goes on without its tracker, which tries again with the next run and at the end.

    A subclass says how its tool opens a run, logs numbers, keeps the results and finishes.
    """

    tool = ""

    def __init__(self) -> None:
        self._what, self._config = "", dict[str, Any]()
        self._first_round = 0
        self._open = self._ended = self._broken = False
        self._tracked = self._warned = False  # since the last `close`

    # ---- what a subclass defines

    def open(self, what: str, round: int, config: Mapping[str, Any]) -> None:
        """Begin a run, or go on with it after `round`."""
        raise NotImplementedError

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log the numbers of a round."""
        raise NotImplementedError

    def results(self, numbers: Mapping[str, float], step: int) -> None:
        """Keep the numbers of the summary."""
        self.log(numbers, step)

    def finish(self, status: str) -> None:
        """End the run: 'finished', 'stopped' (by Ctrl-C) or 'failed'."""
        raise NotImplementedError

    # ---- what a subclass can use: the run that is open

    @property
    def is_baseline(self) -> bool:
        """Whether the run is one that the method is compared with."""
        return self._what.startswith("baseline ")

    def label(self, name: str | None) -> str:
        """Return what people call the run: `name`, or the name of its folder, or its method."""
        folder = Path(self._config.get("out") or "").name
        return self._what if self.is_baseline else name or folder or self._what

    def artifacts(self) -> list[Path]:
        """Return the files of the run's folder that go with it; a baseline has none of its own."""
        folder = self._config.get("out")
        if not folder or self.is_baseline:
            return []
        return [path for path in (Path(folder) / name for name in FILES) if path.is_file()]

    # ---- the callback

    def start(self, what: str, round: int, rounds: int) -> None:  # noqa: ARG002
        """Finish the run before this one."""
        self._settle()
        self._first_round = round
        self._ended = self._broken = False

    def config(self, what: str, config: Mapping[str, Any]) -> None:
        """Open the run."""
        self._what, self._config = what, dict(config)
        try:
            self.open(what, self._first_round, config)
        except Exception as error:
            if not self._tracked:
                raise check.fail("track", self.tool, "", one_line(error)) from error
            self._fail(error)
        else:
            self._open = self._tracked = True

    def round(self, event: Event) -> None:
        """Log the training loss."""
        if event.train_loss is not None:
            self._attempt(self.log, {"train/round_loss": event.train_loss}, event.round)

    def evaluation(self, what: str, row: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Log the row's numbers."""
        self._attempt(self.log, numbers({k: v for k, v in row.items() if k != "round"}), row["round"])

    def end(self, what: str) -> None:  # noqa: ARG002
        """Count the run as finished from here on."""
        self._ended = True

    def summary(self, what: str, summary: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Keep the summary's numbers."""
        results = {f"summary/{name}": value for name, value in numbers(summary).items()}
        self._attempt(self.results, results, int(summary["rounds"]))

    def close(self) -> None:
        """End the run in the tool: finished, stopped or failed."""
        self._settle()
        self._tracked = self._warned = False

    def _settle(self) -> None:
        if self._open:
            self._broken = False  # a tool that is back can still tell how the run ended
            stopped = isinstance(sys.exception(), KeyboardInterrupt | Stopped | Terminated)
            try:
                self._attempt(self.finish, "finished" if self._ended else "stopped" if stopped else "failed")
            finally:
                self._open = False

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._open and not self._broken:
            try:
                action(*arguments)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._broken = True
        if not self._warned:
            self._warned = True
            check.warn(f"{self.tool}: {one_line(error)}; the run goes on without it")


def library(tool: str, module: str, package: str = "") -> Any:
    """Load a tool's module."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed = f"the package {package or module} (pip install 'partita[track]'); {one_line(error)}"
        raise check.fail("track", tool, needed) from error


def options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as `algorithm.lr`, `settings.rounds`, ...; lists as JSON."""
    return dict(_flat(selected(config)))


def selected(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a configuration without what is no option."""
    return {
        key: selected(value, f"{path}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{path}{key}" not in OMITTED
    }


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row or a summary under the names that tools show, such as measures/NAME/KEY.

    Lists are left out, but the number of excluded clients is there.
    """
    named = {}
    for key, value in _flat({**values, "excluded": len(values.get("excluded") or ())}):
        if isinstance(value, int | float) and not isinstance(value, bool):
            name = NAMES.get(key, key.replace(".", "/"))
            named[re.sub(r"[^\w/ :-]", "_", name)] = float(value)  # MLflow takes no others
    return named


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


def slug(text: str) -> str:
    """Return a name for files and artifacts."""
    return re.sub(r"[^\w.-]+", "-", text)


def recall(tool: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run's folder remembers of the run in the tool: a resumed run goes on there."""
    path = Path(config.get("out") or ".") / f"track-{tool}.json"
    try:
        facts = json.loads(path.read_text()) if config.get("out") else {}
    except (FileNotFoundError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def keep(tool: str, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write what `recall` returns; a run without a folder is never resumed."""
    if config.get("out"):
        path = Path(config["out"]) / f"track-{tool}.json"
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(dict(facts)) + "\n")
        os.replace(temporary, path)


def one_line(error: Exception) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
