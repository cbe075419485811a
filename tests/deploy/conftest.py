"""Keys of a federation, made once, and servers and clients that end with their test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
from cable import Net

from partita.deploy import keys as deployed


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation") / "keys"
    deployed.make(folder, ["a", "b", "c"])
    return folder


@pytest.fixture
def net(keys: Path) -> Iterator[Net]:
    there = Net(keys)
    yield there
    there.close()
