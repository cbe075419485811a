"""Tests with models of other packages, which `make test-ecosystem` installs and asks for by name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGES = ("torchvision", "timm", "transformers", "peft")
ROWS: dict[str, dict[str, str]] = {}
"""The rows of the table in the documents, as tests of this run have found them."""

if importlib.util.find_spec("torchvision") is not None and not torch.cuda.is_available():
    # torchvision of the package index is built for CUDA. Beside a torch for CPUs its library is not loaded,
    # and its first import fails where it describes two of the operations in there, unless they are defined.
    OPERATIONS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATIONS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="write the table of docs/ecosystem.md")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out of `make test`; skip it where a package is missing."""
    asked = any("ecosystem" in argument for argument in config.args)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return True if collection_path.name.startswith("test_") and (missing or not asked) else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the rows of the table, from whichever process runs the test."""
    if report.when == "call":
        ROWS.update({name: json.loads(row) for name, row in report.user_properties if isinstance(row, str)})


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write") and ROWS:
        import table

        table.write(ROWS)


@pytest.fixture
def row(record_property: Any) -> Any:
    """A function that notes a row of the table: model, package, executor and so on."""
    return lambda model, **columns: record_property(model, json.dumps(columns))
