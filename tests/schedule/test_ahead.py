"""Training ahead, and in parts, is training at arrival."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partita as pt
from partita import federation
from partita.schedule.clock import Clock
from partita.types import Cohort

S = pt.schedule
CLIENTS = 8
WAITS = S.delays(upload=S.exponential(1), dropout=0.1)
SCHEDULES = {
    "on every arrival": S.asynchronous(5, delays=WAITS),
    "buffer": S.asynchronous(5, 3, delays=WAITS),
    "too stale": S.asynchronous(5, delays=WAITS, max_staleness=1),
    "too stale, the same clients": S.asynchronous(5, 2, delays=WAITS, max_staleness=1, order="same"),
    "late and dropped": S.synchronous(delays=WAITS, deadline=1.0),
    "late and applied": S.synchronous(delays=WAITS, deadline=1.0, late="apply"),
}


def tensors(schedule: Any) -> list[torch.Tensor]:
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    data = pt.data.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(80).numpy() % CLIENTS)
    given: dict[str, Any] = {"rounds": 20, "cohort": 5, "steps": 2, "batch": 4, "executor": "loop"}
    method = pt.fedalt("output", lr=0.1)
    run = pt.federate(pt.models.mlp(6, 4, 2), data, method, schedule=schedule, baselines=False, **given)
    own = [v for i in range(CLIENTS) for v in run.client(i).personal.values()]
    return [*run.shared.values(), *own]


@pytest.mark.parametrize("name", SCHEDULES)
def test_ahead_in_parts_and_at_arrival(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tensors(SCHEDULES[name])
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "flying", lambda clock: Cohort((), (), (), clock.now))
        assert all(map(torch.equal, tensors(SCHEDULES[name]), expected))
    monkeypatch.setattr(federation, "BLOCK_CLIENTS", 2)
    assert all(map(torch.equal, tensors(SCHEDULES[name]), expected))
