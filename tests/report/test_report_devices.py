"""The section on classes of devices: a bar and a row for each class, in the colours of the runs."""

from __future__ import annotations

import re
from typing import Any

import pytest

import partita as pt
from partita import Run
from partita.report.devices import devices


def run(**options: Any) -> Run:
    data = pt.data.digits(clients=6)
    common: dict[str, Any] = {"rounds": 2, "steps": 2, "batch": 8, "baselines": False, "executor": "vmap"}
    return pt.federate(pt.models.mlp(64, 16, 10), data, pt.fedavg(lr=0.1), **common, **options)


@pytest.fixture(scope="module")
def weak() -> Run:
    return run(capacity=pt.capacity.depth({"strong": 0, "weak": 1}))


def test_a_bar_for_each_class_in_the_colour_of_its_run(weak: Run) -> None:
    figures, section = devices({"depth": [weak], "<again>": [weak]})
    classes = weak.summary()["classes"]
    bars = figures["devices"]["data"]
    assert [bar["name"] for bar in bars] == ["depth", "&lt;again&gt;"]
    assert [bar["marker"]["color"] for bar in bars] == ["@0", "@1"]  # names in the palette of the page
    for bar in bars:
        assert bar["x"] == list(classes) == ["strong", "weak"]
        assert bar["y"] == [found["test"]["personal"] for found in classes.values()]
    assert section is not None
    assert len(re.findall("<td[^>]*>weak</td>", str(section))) == 2


def test_nothing_where_all_hold_the_whole_model() -> None:
    assert devices({"plain": [run()]}) == ({}, None)
