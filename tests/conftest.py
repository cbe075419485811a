"""Settings of all tests."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Tests compare with numbers of the CPU; PARTITA_TEST_CUDA=1 lets tests/test_cuda.py see the GPU.
if not os.environ.get("PARTITA_TEST_CUDA"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# One thread: the models are tiny, several test runs share a machine, and sums keep one order.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
# Some virtual machines name AMX among their instructions and stop a program that uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import pytest
import torch
from torch._subclasses import fake_tensor

from partita import cli
from partita.cli import catalogue
from partita.engine import description
from partita.engine.execute import Auto
from support import Command, Done, Selected

torch.set_num_threads(1)

# A test may draw as it likes: module level and each test begin from one seed, on every machine, so that
# what passes here passes there, and no test fails because the machine is busy. `make test-all` lets
# hypothesis search anew.
patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("search", **patient)
hypothesis.settings.register_profile("repeatable", derandomize=True, **patient)
hypothesis.settings.load_profile("repeatable")
torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """Tests that loop over cases leave out the slow ones where slow tests are left out."""
    Selected.slow = config.option.markexpr != "not slow"
    # A shell that starts the tests in the background lets them ignore the signals that some of them test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def brief_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients alone train a few rounds only, in tests that do not look at how far they get."""
    monkeypatch.setattr("partita.engine.settings.MOST_ROUNDS", 5)


@pytest.fixture
def longer_baselines(brief_baselines: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Let them get further, in tests that compare with them."""
    monkeypatch.setattr("partita.engine.settings.MOST_ROUNDS", 20)


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)


# ---- what runs of a few rounds spend much of their time on, and few tests are about

MEASURE = Auto._measure


def picked(*_: Any) -> dict[str, str]:
    return {"picked": "vmap", "why": "tests do not measure"}


Auto._measure = picked  # type: ignore[method-assign]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`executor="auto"` measures before it picks, as it does for users; else it picks vmap at once."""
    monkeypatch.setattr(Auto, "_measure", MEASURE)


@pytest.fixture
def partita(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process: its entry point with these arguments."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command sets its own
        monkeypatch.setattr(sys, "argv", ["partita", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Done(int(stop.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in; no variable says where data are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("PARTITA_DATA", raising=False)
    return tmp_path


# every run notes the versions of its libraries: they are read from disk once
description.version = functools.cache(description.version)  # type: ignore[attr-defined]
# and the catalogue looks up the file of every part for each page
catalogue._file = functools.cache(catalogue._file)

# torch notes the whole stack of calls, with the text of its lines, at each operation that it writes down:
# under pytest the stack is deep, and nobody reads it
fake_tensor.traceback = SimpleNamespace(  # type: ignore[attr-defined]
    **{**vars(traceback), "extract_stack": traceback.StackSummary}
)


def pytest_collection_finish() -> None:
    """Libraries and tests stay to the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()
