"""Tests with Flower, which `make test-flower` installs in an environment of its own and asks for by name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))  # the experiment, and processes that die


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out of `make test`; without flwr it cannot run."""
    asked = any("flower" in str(argument) for argument in config.invocation_params.args)
    missing = importlib.util.find_spec("flwr") is None
    return True if collection_path.suffix == ".py" and (missing or not asked) else None


@pytest.fixture(scope="session")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A SuperLink and three SuperNodes, which all tests use, each with client processes of its own."""
    from federation import Federation

    there = Federation(tmp_path_factory.mktemp("fl"))
    try:
        there.open()
        yield there
    finally:
        there.close()


@pytest.fixture
def federation(superlink: object, tmp_path: Path) -> Iterator[object]:
    """The federation, with no client process and no run."""
    superlink.begin(tmp_path)  # type: ignore[attr-defined]
    yield superlink
    superlink.end()  # type: ignore[attr-defined]
