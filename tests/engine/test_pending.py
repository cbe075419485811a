"""Training ahead, and in parts, is training at arrival."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partita as pt
from partita.core.types import Cohort
from partita.engine import loop
from partita.engine import stage as stages
from partita.engine.execute import vmap
from partita.schedule.clock import Clock

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


def tensors(schedule: Any, **options: Any) -> list[torch.Tensor]:
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    data = pt.data.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(80).numpy() % CLIENTS)
    given: dict[str, Any] = {"rounds": 20, "cohort": 5, "steps": 2, "batch": 4, "executor": "loop", **options}
    method = given.pop("method", pt.fedalt("output", lr=0.1))
    run = pt.federate(pt.models.mlp(6, 4, 2), data, method, schedule=schedule, baselines=False, **given)
    own = [v for i in range(CLIENTS) for v in run.client(i).personal.values()]
    return [*run.shared.values(), *own]


@pytest.mark.parametrize("name", SCHEDULES)
def test_ahead_in_parts_and_at_arrival(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tensors(SCHEDULES[name])
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "in_flight", lambda clock: Cohort((), (), (), clock.now))
        assert all(map(torch.equal, tensors(SCHEDULES[name]), expected))
    monkeypatch.setattr(stages, "BLOCK_CLIENTS", 2)
    assert all(map(torch.equal, tensors(SCHEDULES[name]), expected))


STAGES = pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=3), pt.stage(pt.fedalt("output", lr=0.1), rounds=3))
DRAWN: dict[str, tuple[dict[str, Any], int]] = {  # and how many plans are drawn ahead; fedalt has two phases
    "rounds": ({}, 2 * 3),
    "epochs": ({"steps": None, "epochs": 2}, 2 * 3),
    "turns": ({"cohort": 8, "schedule": S.synchronous(order="turns")}, 2 * 3),
    "ragged epochs by chance": (
        {"steps": None, "epochs": 2, "schedule": S.synchronous("poisson")},
        2 * 3,
    ),
    "stages": ({"method": STAGES, "rounds": None}, 2 + 2 * 2),
    "asynchronous": ({"schedule": S.asynchronous(5, delays=WAITS)}, 0),  # nobody knows who comes next
    "one at a time": ({"memory": 1}, 0),
}


@pytest.mark.parametrize(("executor", "name"), [*[("vmap", k) for k in DRAWN], ("graph", "rounds")])
def test_samples_drawn_while_a_device_works(
    executor: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, and what was drawn ahead is used."""
    options, used = DRAWN[name]
    given = {"schedule": None, "executor": executor, "rounds": 4, "evaluate_every": 9, **options}
    expected, drawn, hits = tensors(**given), [], 0
    monkeypatch.setattr(loop, "WORK_AHEAD", ("cpu",))
    expect = vmap.Vmap.prefetch

    def counted(self: vmap.Vmap, *args: Any) -> None:
        nonlocal hits
        hits += 0 if self.prefetched else len(drawn)
        expect(self, *args)
        drawn[:] = list(self.prefetched)

    monkeypatch.setattr(vmap.Vmap, "prefetch", counted)
    assert all(map(torch.equal, tensors(**given), expected))
    assert hits + len(drawn) == used
