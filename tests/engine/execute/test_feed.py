"""Samples on the host or in files: the same bits as on the device, read in windows ahead of the steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita.core import check
from partita.data import FederatedData
from partita.data.mapped import Mapped
from partita.engine.execute import feed, plan
from partita.engine.placement import placed
from support import each

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (120, 1, 4, 4), dtype=np.uint8)
Y = RNG.integers(0, 3, 120)
CLIENT = RNG.integers(0, 8, 120) ** 2 // 16  # some have many more than others
FIXED: dict[str, Any] = {"baselines": False, "progress": False, "norm": "global"}


def data(x: Any = X) -> FederatedData:
    return pt.data.from_arrays(x, Y, CLIENT)


def in_a_file(folder: Path) -> FederatedData:
    np.save(folder / "x.npy", X)
    return data(np.load(folder / "x.npy", mmap_mode="r"))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def run(samples: FederatedData, method: Any = None, **settings: Any) -> pt.Run:
    method = method or pt.fedavg(lr=0.1)
    return pt.federate(
        model(), samples, method, **{"rounds": 2, "epochs": 2, "batch": 4, **FIXED, **settings}
    )


def same(one: pt.Run, two: pt.Run) -> bool:
    states = [(one.client(i).personal, two.client(i).personal) for i in range(2)]
    pairs = [(one.shared, two.shared), *states]
    equal = all(torch.equal(a[k], b[k]) for a, b in pairs for k in a)
    return equal and one.summary()["test"] == two.summary()["test"]


@pytest.mark.parametrize("executor", ["loop", "pool", "vmap", "graph"])
def test_bits_do_not_depend_on_where_samples_are(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "WINDOW_BYTES", 800)  # some steps of all clients, and many of one
    by_step = pt.fedavg(lr=pt.optim.within_round(pt.optim.linear(0.2)))
    cases: list[dict[str, Any]] = [
        {"method": pt.fedalt(personal="output", lr=0.1)},
        {"batch": None, "epochs": None, "steps": 3},
        {"method": by_step, "cohort": 2},
    ]
    for case in cases:
        here = run(data(), executor=executor, data_on="device", **case)
        there = data() if case is cases[0] else in_a_file(tmp_path)
        assert same(here, run(there, executor=executor, data_on="host", **case))


def test_sequences_are_sent_without_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "WINDOW_BYTES", 300)
    sequences = [RNG.integers(0, 9, n) for n in RNG.integers(1, 12, 120)]
    samples = pt.data.from_arrays(sequences, [s % 3 for s in sequences], CLIENT)
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    for executor in ("loop", "vmap", "graph"):
        runs = [
            pt.federate(
                words,
                samples,
                pt.fedavg(lr=0.3),
                rounds=2,
                epochs=1,
                batch=4,
                executor=executor,
                data_on=place,
                **FIXED,
            )
            for place in ("device", "host")
        ]
        assert same(*runs)
    sent = samples.stay("cpu").sent(torch.tensor([0, 5, 0]))
    assert sent.rows == 3
    assert len(sent.x.values) == int(samples.x.length[[0, 5, 0]].sum())


def window_rows(samples: FederatedData, work: pt.Work, clients: np.ndarray) -> list[Any]:
    context = pt.RoundContext(0, 0, 0, 0, 1, work)
    drawn = [plan.draw(samples, clients, work, 0, context)]
    windows = list(feed.Feed(samples, drawn))
    for window in windows:  # what a step finds is what it would find in all samples
        (part,) = window.plans
        steps = slice(window.first, window.first + part.size.shape[1])
        for mine, all_of_them in zip(window.data.gather(part.rows), samples.gather(drawn[0].rows[:, steps])):
            assert torch.equal(mine, all_of_them)
        assert torch.equal(part.real, drawn[0].real[:, steps])
    assert sum(w.plans[0].size.shape[1] for w in windows) == drawn[0].size.shape[1]
    assert sum(w.plans[0].steps for w in windows).tolist() == drawn[0].steps.tolist()  # type: ignore[attr-defined]
    return [window.data.rows for window in windows]


def test_windows_have_the_rows_of_their_steps_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, clients = data().stay("cpu"), np.array([1, 0, 3])
    sizes = samples.train[clients, 1]
    monkeypatch.setattr(feed, "WINDOW_BYTES", 10**9)
    assert window_rows(samples, pt.Work(epochs=2, batch=4), clients) == [1 + 2 * sizes.sum()]
    assert window_rows(samples, pt.Work(steps=5, batch=None), clients) == [1 + sizes.sum()]
    monkeypatch.setattr(feed, "WINDOW_BYTES", 1)
    rows = window_rows(samples, pt.Work(epochs=2, batch=4), clients)
    assert len(rows) == 2 * -(-sizes.max() // 4)
    assert sum(rows) == len(rows) + 2 * sizes.sum()


def test_the_next_window_is_read_while_the_present_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "WINDOW_BYTES", 1)
    samples, work = data().stay("cpu"), pt.Work(steps=4, batch=4)
    drawn = [plan.draw(samples, np.array([3]), work, 0, pt.RoundContext(0, 0, 0, 0, 1, work))]
    read, reading = [], feed.Feed._read

    def recorded(self: feed.Feed, first: int) -> Any:
        read.append((first, threading.current_thread() is threading.main_thread()))
        return reading(self, first)

    monkeypatch.setattr(feed.Feed, "_read", recorded)
    ready = feed.Feed(samples, drawn).begin()
    seen = []
    for window in ready:
        ahead = min(window.first + 1, 3)
        while len(read) <= ahead:
            threading.Event().wait(0.001)
        seen.append((window.first, len(read)))
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert read == [(first, False) for first in range(4)]


def test_an_error_while_reading_reaches_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: feed.Feed, first: int) -> Any:
        raise OSError(f"cannot read step {first}")

    monkeypatch.setattr(feed.Feed, "_read", broken)
    with pytest.raises(OSError, match="cannot read step 0"):
        run(data(), executor="vmap", data_on="host")


def test_samples_stay_where_they_are_if_they_are_large(tmp_path: Path) -> None:
    here, there = data(), in_a_file(tmp_path)
    size = here.nbytes
    for memory, stays in ((2 * size, False), (2 * size - 2, True)):
        assert placed(there, "auto", "cpu", memory).elsewhere is stays
        assert not placed(here, "auto", "cpu", memory).elsewhere  # they are in memory already
    assert isinstance(placed(there, "host", "cpu", None).x, Mapped)
    assert isinstance(placed(there, "device", "cpu", 1).x, torch.Tensor)
    with pytest.raises(check.Refused, match="data_on='disk'"):
        run(here, data_on="disk")


def test_a_run_goes_on_from_another_place(tmp_path: Path) -> None:
    whole = run(data(), rounds=4)
    run(data(), rounds=2, out=tmp_path)
    resumed = run(data(), rounds=4, out=tmp_path, resume=True, data_on="host")
    assert same(whole, resumed)


@each(
    "capacity", [pt.capacity.depth({"strong": 0, "weak": 1}), pt.capacity.width({"strong": 1.0, "weak": 0.5})]
)
def test_weak_devices_find_samples_on_the_host(capacity: Any) -> None:
    samples = pt.data.from_arrays(X.reshape(120, 16) / np.float32(255), Y, CLIENT)
    net = pt.models.mlp(16, 8, 8, 3)
    runs = [
        pt.federate(
            net,
            samples,
            pt.fedavg(lr=0.1),
            rounds=2,
            steps=2,
            batch=4,
            capacity=capacity,
            data_on=place,
            executor="vmap",
            baselines=False,
            progress=False,
        )
        for place in ("device", "host")
    ]
    assert all(torch.equal(runs[0].shared[k], v) for k, v in runs[1].shared.items())
