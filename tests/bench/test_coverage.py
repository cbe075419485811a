"""A few rows of bench/coverage.py: what is said about chance is true often enough, on known clients.

Seeds are fixed, so that nothing depends on luck; the bounds are loose enough for other seeds to pass too.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "coverage.py"


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    """By path: `coverage` is also the name of a package that measures tests."""
    return runpy.run_path(str(BENCH))


def test_intervals_of_clients_hold(bench: dict[str, Any]) -> None:
    for row in bench["intervals"](30, sizes=(10, 50)):
        assert row["coverage, no change"] > 0.9
        assert row["coverage, clear loss"] > 0.88
        assert row["p ≤ 5 %"] < 0.1


def test_the_number_of_losers_is_in_its_interval(bench: dict[str, Any]) -> None:
    for row in bench["losers"](8, counts=(50,), sizes=(10, 50), kinds=("accuracy",)):
        assert row["coverage"] > 0.6
        assert row["low"] <= row["estimate"] <= row["high"]
        assert row["false discoveries"] < 0.35
        if row["setting"] == "half hurt" and row["n_test"] == 50:
            assert row["low"] > 0.2 * row["clients"]
            assert row["named rightly"] > 0.2 * row["clients"]


def test_flat_curves_are_rarely_called_rising(bench: dict[str, Any]) -> None:
    for row in bench["rising"](20):
        assert row["flat, correlation 0"] < 0.2
        assert row["0.294 to go"] > 0.8


def test_tables_are_printed(
    bench: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["coverage.py", "unusual", "means", "--replications", "2"])
    bench["main"]()
    printed = capsys.readouterr().out
    assert "| clients | labels, all alike |" in printed
    assert printed.count("| clients and seeds |") == 12
