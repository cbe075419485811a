"""What several tests share: a loop that names the cases that fail, the command, and looks at runs."""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import partita as pt

Test = Callable[..., None]


class Selected:
    """What this session runs; `conftest.py` sets it."""

    slow = True


def each(
    names: str | Sequence[str],
    cases: Iterable[Any],
    ids: Iterable[str] | Callable[[Any], str] | None = None,
    slow: Callable[..., bool] | None = None,
) -> Callable[[Test], Test]:
    """Run a test for each case as `pytest.mark.parametrize` does, but as one test, for cases that are cheap.

    All cases are tried, and the failure names each one that does not pass; none can be skipped. Cases that
    are `slow` are tried where slow tests are: by `make test-all`. Each case begins from the seed of every
    test, and has a `tmp_path` and a `monkeypatch` of its own.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(_labelled(cases, arguments))
    if ids is not None:
        labels = ["-".join(map(ids, values)) for _, values in table] if callable(ids) else ids
        table = [(label, values) for label, (_, values) in zip(labels, table, strict=True)]
    assert table, "there are no cases"
    usual = [case for case in table if slow is None or not slow(*case[1])]
    assert usual, "all cases are slow"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            failures: dict[str, BaseException] = {}
            tried = table if Selected.slow else usual
            for number, (label, values) in enumerate(tried):
                torch.manual_seed(0)
                try:
                    _call(test, fixtures, number, dict(zip(arguments, values, strict=True)))
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    failures[f"{number}, {label}: {type(error).__name__}: {error}"] = error
            if failures:
                told = "\n".join([f"{len(failures)} of {len(tried)} cases", *failures])
                raise AssertionError(told) from next(iter(failures.values()))

        for name in [name for name in vars(loop) if "hypothesis" in name]:
            delattr(loop, name)  # the test in the loop may be drawn, the loop itself is not
        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in arguments]
        loop.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return loop

    return decorate


def _call(test: Test, fixtures: dict[str, Any], number: int, case: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        own: dict[str, Any] = {"monkeypatch": patch} if "monkeypatch" in fixtures else {}
        if "tmp_path" in fixtures:
            own["tmp_path"] = Path(fixtures["tmp_path"]) / str(number)
            own["tmp_path"].mkdir()
        test(**{**fixtures, **own, **case})


def _labelled(cases: Iterable[Any], arguments: Sequence[str]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the values of each case, and what a failure calls it: its id, or the values."""
    for case in cases:
        if isinstance(case, type(pytest.param())):
            assert not case.marks, "a mark is of a whole test"
            yield str(case.id or case.values), case.values
        else:
            yield str(case), (case,) if len(arguments) == 1 else case


# ---- the command


class Done(NamedTuple):
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def refusal(self) -> str:
        """Return the line of a command that was refused: exit code 2, and nothing else on any stream."""
        lines = [line for line in self.stderr.splitlines() if not line.startswith("partita: warning: ")]
        assert (self.returncode, self.stdout) == (2, "")
        assert len(lines) == 1, lines
        assert lines[0].startswith("partita: ")
        assert "Traceback" not in lines[0]
        return lines[0]


Command = Callable[..., Done]


# ---- runs


class Stop(pt.callbacks.Callback):
    """End the run in a round: by an error, or without one by Ctrl-C."""

    def __init__(self, after: int, error: type[BaseException] | None = None) -> None:
        self.after, self.error = after, error

    def round(self, event: pt.callbacks.Event) -> None:
        if event.round != self.after:
            return
        if self.error:
            raise self.error
        signal.raise_signal(signal.SIGINT)


def tensors(run: pt.Run) -> dict[str, Tensor]:
    """Return what a run ends with: the shared part, and what is personal of each client."""
    clients = range(len(run.clients))
    personal = {f"personal {i} {k}": x for i in clients for k, x in run.client(i).personal.items()}
    return {**{f"shared {k}": x for k, x in run.shared.items()}, **personal}


def files_of(folder: Path) -> dict[str, bytes | None]:
    """Return all that is in a folder, byte for byte."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}
