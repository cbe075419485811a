"""A full disk: the error says what and where, and the run goes on when there is room again."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partita as pt
from partita.engine.store import durable
from small import federate
from support import Command, Stop, files_of, tensors


@pytest.fixture(scope="module")
def straight() -> dict[str, dict[str, Tensor]]:
    """What a run ends with when nothing happens to it."""
    return {store: tensors(federate(None)) for store in ("memory", "disk")}


def assert_goes_on(out: Path, store: str, expected: dict[str, Tensor]) -> None:
    found = tensors(federate(out, store=store, resume=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], x) for k, x in expected.items())
    assert pt.load(out).summary()["rounds"] == 3


def fail_at(patch: pytest.MonkeyPatch, last: int) -> list[int]:
    """From the n-th call on that waits for the disk or writes to it, there is no space; counts the calls."""
    calls = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > last:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **options)

        return call

    patch.setattr(durable, "save_file", wrap(durable.save_file))
    for name in ("fsync", "pwrite", "replace"):
        patch.setattr(os, name, wrap(getattr(os, name)))
    return calls


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_no_space_at_any_moment(
    store: str, home: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[str, dict[str, Tensor]]
) -> None:
    with monkeypatch.context() as patch:
        calls = fail_at(patch, 10**6)
        federate(home / "whole", store=store)
    assert calls[0] > 30
    for last in range(0, calls[0], 6):
        out = home / f"run{last}"
        with monkeypatch.context() as patch:
            fail_at(patch, last)
            with pytest.raises(OSError, match="No space left on device") as error:
                federate(out, store=store)
        assert error.value.errno == errno.ENOSPC
        assert str(out) in str(error.value)
        assert not [p for p in out.rglob("*") if p.suffix == ".tmp"]
        assert_goes_on(out, store, straight[store])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB, where one may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    if (
        os.name != "posix"
        or not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full(
    small_disk: Path, home: Path, partita: Command, straight: dict[str, dict[str, Tensor]]
) -> None:
    out = small_disk / "run"
    (home / "mine.py").write_text(
        f"from small import federate\nfrom pathlib import Path\n"
        f"def experiment():\n    return federate(Path({str(out)!r}), resume=True)\n"
    )
    ballast = small_disk / "ballast"
    with contextlib.suppress(KeyboardInterrupt):
        federate(out, callbacks=[Stop(2, KeyboardInterrupt)])
    before = files_of(out / "checkpoint")
    with contextlib.suppress(OSError), open(ballast, "wb") as f:
        while f.write(bytes(4096)):
            f.flush()
    line = partita("run", "mine.py").refusal
    assert "No space left on device" in line
    assert str(out) in line
    assert before.items() <= files_of(out / "checkpoint").items()
    ballast.unlink()
    assert_goes_on(out, "auto", straight["memory"])


def test_a_copy_that_does_not_fit_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = federate(tmp_path_factory.mktemp("whole") / "run")
    full, calls = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), iter(range(100))

    def copystat(*_: Any, **__: Any) -> None:
        if next(calls) == 5:
            raise full

    monkeypatch.setattr(shutil, "copystat", copystat)
    with pytest.raises(OSError, match=rf"cannot copy .* to {home / 'copy'}: .*No space left"):
        run.save(home / "copy")
    assert [p for p in home.rglob("*") if p.is_file()] == []
