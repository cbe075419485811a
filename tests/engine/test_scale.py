"""A round, and what a run holds in memory, follow the cohort and not the number of clients.

No times: calls and objects are counted, for ten times as many clients.
"""

from __future__ import annotations

import csv
import gc
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita.engine.callbacks import Callback, Event

FEW, MANY, COHORT, ROUNDS = 2_000, 20_000, 40, 6
SLOW = pt.schedule.delays(upload=pt.schedule.exponential(1.0), dropout=0.1)
CASES: dict[str, dict[str, Any]] = {
    "disk": {"algorithm": pt.fedalt("output", lr=0.1), "store": "disk", "checkpoint_every": 2},
    "memory": {"algorithm": pt.fedalt("output", lr=0.1), "store": "memory"},
    "byzantine": {"algorithm": pt.fedavg(lr=0.1), "attack": pt.attack.sign_flip(), "byzantine": 0.2},
    "asynchronous": {
        "algorithm": pt.fedalt("output", lr=0.1),
        "schedule": pt.schedule.asynchronous(concurrency=COHORT, buffer=20, delays=SLOW),
    },
    "classes": {"algorithm": pt.fedavg(lr=0.1), "capacity": pt.capacity.width({"whole": 1.0, "half": 0.5})},
}


def data(clients: int) -> pt.data.FederatedData:
    """Every client reads a window of a pool."""
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(512, 6, generator=generator),
        torch.randint(0, 3, (512,), generator=generator),
    )
    start = np.arange(clients) * 7 % 500
    return pt.data.FederatedData.make(x, y, np.stack([start, np.full_like(start, 12)], axis=1))


class Count(Callback):
    """What happens in the rounds but the first and the last: calls of functions, and what they leave."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.blocks = 0

    def round(self, event: Event) -> None:
        """Count from here to the next one."""
        sys.setprofile(self._note if event.round < ROUNDS - 1 else None)
        gc.collect()
        self.blocks = sys.getallocatedblocks()

    def _note(self, frame: FrameType, event: str, arg: object) -> None:  # noqa: ARG002
        self.calls[event] += 1


def federate(clients: int, folder: Path, case: str, **changed: Any) -> pt.Run:
    options = {"rounds": ROUNDS, "cohort": COHORT, "steps": 2, "batch": 4, **CASES[case], **changed}
    return pt.federate(
        pt.models.mlp(6, 4, 3),
        data(clients),
        options.pop("algorithm"),
        **options,
        executor="vmap",
        evaluate_every=ROUNDS,
        baselines=False,
        report=False,
        out=folder,
    )


def counted(clients: int, folder: Path, case: str) -> tuple[Counter[str], int, int]:
    """Calls in the rounds, and how many blocks of memory Python holds in the last one and after the run."""
    gc.collect()
    before, count = sys.getallocatedblocks(), Count()
    found = federate(clients, folder, case, callbacks=[count])
    gc.collect()
    blocks = count.blocks - before, sys.getallocatedblocks() - before
    assert len(found.clients) == clients
    return count.calls, *blocks


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "disk")) for c in CASES])
def test_ten_times_the_clients_make_no_calls_and_no_objects(case: str, tmp_path: Path) -> None:
    counted(FEW, tmp_path / "first", case)  # what is made on first use
    few, many = (counted(clients, tmp_path / str(clients), case) for clients in (FEW, MANY))
    for kind, calls in few[0].items():
        assert many[0][kind] == pytest.approx(calls, rel=0.03), kind
    # Byzantine clients are listed one by one in the settings
    allowed = (MANY - FEW) * (0.05 + CASES[case].get("byzantine", 0))
    assert many[1] - few[1] < allowed
    assert many[2] - few[2] < allowed


def test_ten_times_the_clients_are_a_few_arrays(tmp_path: Path) -> None:
    """At no moment more than some hundred bytes for each further client; a dictionary alone takes more."""

    def peak(clients: int) -> int:
        tracemalloc.start()
        try:
            federate(clients, tmp_path / str(clients), "disk", rounds=2)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(FEW - 1)
    few, many = peak(FEW), peak(MANY)
    assert many - few < 250 * (MANY - FEW)


def test_names_and_rows_are_made_when_they_are_looked_at(tmp_path: Path) -> None:
    run = federate(FEW, tmp_path / "run", "disk")
    loaded = pt.load(tmp_path / "run")
    assert loaded.clients == run.clients
    assert run.clients == [*run.clients]
    assert run.clients[-1] == [*run.clients][-1] == run.clients[FEW - 2 :][1]
    assert run.names == loaded.names == [str(i) for i in range(FEW)]
    assert run.client("7").number == 7
    with open(tmp_path / "run" / "clients.csv", newline="") as f:
        assert [row["client"] for row in csv.DictReader(f)] == run.names
    for wrong in ("-1", "07", "²", str(FEW), "seven"):
        assert wrong not in data(FEW).names
    with pytest.raises(IndexError):
        run.clients[FEW]
