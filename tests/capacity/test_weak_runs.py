"""Devices of different capacity with everything else that a run may have: time, liars, stages, the disk."""

from __future__ import annotations

import copy
import itertools
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from capacity.weak import (
    KINDS,
    Tensors,
    assert_close,
    assert_same,
    batches,
    convs,
    digits,
    everything,
    federate,
    mlp,
    of_blocks,
    rounds,
)
from partita.capacity import depth, fjord, width
from partita.engine.callbacks import Callback, Event

DEPTH = depth({"strong": 0, "weak": 1}, KINDS)
WIDTH = width({"strong": 1.0, "weak": 0.5}, KINDS)
FJORD = fjord({"strong": 1.0, "weak": 0.5}, KINDS)
SLOW = pt.schedule.delays(compute=pt.schedule.exponential(1.0), upload=pt.schedule.lognormal(1.0))
LATER = pt.schedule.asynchronous(concurrency=4, buffer=2, staleness="sqrt", delays=SLOW)


# ---- time


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_weak_client_that_is_late_has_trained_on_what_it_received(executor) -> None:
    """Its frozen blocks are those of that version; plainly, in the whole model."""
    data = digits()
    found, run = rounds(
        mlp(), data, pt.fedavg(lr=0.2), rounds=10, schedule=LATER, capacity=DEPTH, executor=executor
    )
    assert run.summary()["clock"]["staleness"]["max"] > 1
    checked = 0
    for round in found:
        for client in round.clients:
            if KINDS[client] == "strong":
                continue
            received, event = round.received[client]
            model = mlp()
            model.load_state_dict(received)
            model.hidden1.requires_grad_(False)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.2)
            for x, y in batches(data, client, round=event, steps=2, batch=8):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            expected = {k: received[k] - v.detach() for k, v in model.named_parameters()}
            assert_close(round.upload(client), expected, atol=1e-6)
            checked += not torch.equal(received["hidden1.linear.weight"], mlp().hidden1.linear.weight)
    assert checked > 5


@pytest.mark.parametrize("capacity", [DEPTH, WIDTH, FJORD], ids=lambda c: c.name)
def test_partial_personalization_of_weak_clients_in_their_own_time(capacity) -> None:
    runs = [
        federate(
            mlp(),
            digits(),
            pt.fedalt("output", lr=0.2),
            rounds=8,
            schedule=LATER,
            capacity=capacity,
            executor=executor,
        )
        for executor in ("loop", "vmap")
    ]
    assert_close(*map(everything, runs), atol=1e-5)
    assert [row["reports"] for row in runs[0].clients] == [row["reports"] for row in runs[1].clients]
    outputs = [run.client(i).personal["output.linear.weight"] for run in runs[:1] for i in range(6)]
    for a, b in itertools.combinations(outputs, 2):
        assert not torch.equal(a, b)


def test_bytes_of_clients_in_their_own_time() -> None:
    """Whoever leaves has downloaded, whoever arrives has sent: what its class holds."""
    run = federate(mlp(), digits(), pt.fedavg(lr=0.1), rounds=8, schedule=LATER, capacity=WIDTH)
    size = {"strong": 4 * (64 * 32 + 32 + 32 * 16 + 16 + 170), "weak": 4 * (64 * 16 + 16 + 16 * 8 + 8 + 90)}
    sent = sum(row["reports"] * size[row["class"]] for row in run.clients)
    assert run.metrics[-1]["bytes_up"] == sent
    left = run.metrics[-1]["bytes_down"] - sent
    assert 0 < left <= 4 * size["strong"]  # who is still at work


# ---- liars


AGGREGATORS = {
    "mean": pt.aggregate.mean(),
    "coordinate_median": pt.aggregate.coordinate_median(),
    "geometric_median": pt.aggregate.geometric_median(),
    "krum": pt.aggregate.krum(1),
}


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_a_weak_liar_has_no_say_in_what_it_does_not_hold(aggregator) -> None:
    """Noise for a tensor, or for channels, that it never had is read by nobody."""
    kinds = ("strong", "weak", "strong", "strong", "weak", "weak")
    method = pt.fedavg(lr=0.2, aggregate=AGGREGATORS[aggregator])
    start = {k: v.detach() for k, v in mlp().named_parameters()}

    def blocks(x: Tensors) -> Tensors:
        return of_blocks(x, "hidden1")

    def channels(x: Tensors) -> Tensors:
        return {"channels": x["hidden2.linear.weight"][:, 16:]}

    deep, wide = depth({"strong": 0, "weak": 1}, kinds), width({"strong": 1.0, "weak": 0.5}, kinds)
    for capacity, some in ((deep, blocks), (wide, channels)):
        honest = federate(mlp(), digits(), method, capacity=capacity).shared
        assert not any(torch.equal(v, some(start)[k]) for k, v in some(honest).items())
        for attack in (pt.attack.sign_flip(), pt.attack.gaussian(1.0)):
            lied = federate(mlp(), digits(), method, capacity=capacity, attack=attack, byzantine=[1]).shared
            assert_same(some(lied), some(honest))
            if aggregator != "krum":  # which may choose the same client
                assert not torch.equal(honest["output.linear.weight"], lied["output.linear.weight"])


@pytest.mark.parametrize("aggregator", ["coordinate_median", "geometric_median", "krum"])
def test_robust_rules_hold_among_the_strong_and_among_all(aggregator) -> None:
    """One strong and one weak liar of six send numbers of 10⁶: what comes out stays small."""
    kinds = ("strong", "strong", "strong", "strong", "weak", "weak")
    run = federate(
        mlp(),
        digits(),
        pt.fedavg(lr=0.2, aggregate=AGGREGATORS[aggregator]),
        capacity=depth({"strong": 0, "weak": 1}, kinds),
        attack=pt.attack.gaussian(1e6),
        byzantine=[0, 4],
    )
    start = dict(mlp().named_parameters())
    for k, v in run.shared.items():
        assert 0 < (v - start[k]).abs().max() < 10, k


# ---- stages, baselines, the disk


def test_stages() -> None:
    """Each with the devices' parts; loop equals vmap, and what is personal starts from what was trained."""
    method = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.2), rounds=2),
        pt.stage(pt.fedalt("output", lr=0.2), rounds=2),
        pt.stage(pt.finetune("output", lr=0.1), epochs=1),
    )
    for capacity in (DEPTH, WIDTH):
        runs = [
            federate(mlp(), digits(), method, rounds=None, capacity=capacity, executor=executor)
            for executor in ("loop", "vmap")
        ]
        assert_close(*map(everything, runs), atol=1e-5)
        first = federate(mlp(), digits(), pt.fedavg(lr=0.2), rounds=2, capacity=capacity)
        assert not torch.equal(runs[0].shared["hidden1.linear.weight"], first.shared["hidden1.linear.weight"])
        for i in range(6):
            score = _score(runs[0].client(i).model(), *digits().client(i, "test"))
            assert score == pytest.approx(runs[0].clients[i]["personal"], abs=1e-6)


def _score(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def test_a_stage_that_is_alone_goes_on_from_the_servers_model() -> None:
    """A weak client that trains for itself still has the frozen blocks that all have trained before."""
    method = pt.pipeline(pt.stage(pt.fedavg(lr=0.2), rounds=2), pt.stage(pt.local(lr=0.1), rounds=1))
    run = federate(mlp(), digits(), method, rounds=None, capacity=DEPTH)
    first = federate(mlp(), digits(), pt.fedavg(lr=0.2), rounds=2, capacity=DEPTH)
    model = run.client(1).model()
    assert_same(of_blocks(dict(model.named_parameters()), "hidden1"), of_blocks(first.shared, "hidden1"))
    plain = copy.deepcopy(first.model()).train()
    plain.hidden1.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.1)
    for x, y in batches(digits(), 1, round=2, steps=2, batch=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), atol=1e-6)


@pytest.mark.parametrize("capacity", [DEPTH, WIDTH], ids=lambda c: c.name)
def test_baselines_have_the_same_devices(capacity) -> None:
    data = digits(test=40)
    options: dict[str, Any] = {"rounds": 2, "steps": 8, "capacity": capacity, "executor": "vmap"}
    run = federate(mlp(), data, pt.fedalt("output", lr=0.3), **options, baselines=True)
    alone = federate(mlp(), data, pt.local(lr=0.3), **options)
    everyone = federate(mlp(), data, pt.fedavg(lr=0.3), **options)
    for i in range(6):
        assert run.clients[i]["local"] == alone.clients[i]["personal"]
        assert run.clients[i]["global"] == everyone.clients[i]["global"]
    whole = federate(mlp(), data, pt.local(lr=0.3), **{**options, "capacity": None})
    assert [c["personal"] for c in whole.clients] != [c["personal"] for c in alone.clients]


@pytest.mark.parametrize(
    ("method", "capacity"),
    [(pt.fedalt("output", lr=0.2), DEPTH), (pt.ditto(lr=0.1, lam=0.5), WIDTH), (pt.scaffold(lr=0.1), FJORD)],
    ids=lambda x: x.name,
)
def test_states_on_disk(method, capacity, tmp_path) -> None:
    options: dict[str, Any] = {"rounds": 3, "cohort": 3, "capacity": capacity, "executor": "vmap"}
    memory = federate(mlp(), digits(), method, **options)
    disk = federate(mlp(), digits(), method, **options, store="disk", out=tmp_path / "run", report=False)
    assert_same(everything(disk), everything(memory))


@pytest.mark.parametrize("norm", ["global", "static"])
def test_records_on_disk(norm) -> None:
    """What the frozen blocks put out waits in files, which are gone afterwards."""
    runs = [
        federate(
            convs(),
            digits(),
            pt.fedavg(lr=0.1),
            rounds=2,
            norm=norm,
            capacity=depth({"strong": 0, "weak": 2}, KINDS, pieces=1, record=record),
        )
        for record in ("memory", "disk")
    ]
    assert_same(*(run.shared for run in runs))
    assert [row["personal"] for row in runs[0].clients] == [row["personal"] for row in runs[1].clients]


# ---- interrupted and resumed


class Stop(Callback):
    """Presses Ctrl-C after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, event: Event) -> None:
        if event.round == self.after:
            signal.raise_signal(signal.SIGINT)


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "depth": (mlp, pt.scaffold(lr=0.1), {"capacity": DEPTH, "cohort": 3}),
    "depth, static": (convs, pt.fedavgm(lr=0.1), {"capacity": DEPTH, "cohort": 3, "norm": "static"}),
    "depth, later": (mlp, pt.fedalt("output", lr=0.2), {"capacity": DEPTH, "schedule": LATER}),
    "depth, ditto": (mlp, pt.ditto(lr=0.1, lam=0.5), {"capacity": DEPTH, "cohort": 3, "store": "disk"}),
    "width, static": (
        convs,
        pt.fedalt("output", lr=0.1),
        {"capacity": WIDTH, "cohort": 3, "norm": "static", "store": "disk"},
    ),
    "fjord, later": (convs, pt.fedavg(lr=0.1), {"capacity": FJORD, "schedule": LATER, "norm": "global"}),
}


@pytest.mark.parametrize("case", CASES)
def test_resumed_equals_straight(case, tmp_path) -> None:
    make, method, more = CASES[case]
    options: dict[str, Any] = {"rounds": 5, "checkpoint_every": 2, "evaluate_every": 2, "executor": "vmap"}
    options |= {"report": False, **more}

    def run(folder: str, **how: Any) -> pt.Run:
        return federate(make(), digits(), method, out=tmp_path / folder, **options, **how)

    straight = run("straight")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", callbacks=[Stop(3)])
    resumed = run("stopped", resume=True)
    assert_same(everything(resumed), everything(straight))
    assert resumed.clients == straight.clients
    for a, b in zip(resumed.metrics, straight.metrics, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    for i in range(6):
        assert_same(*(dict(r.client(i).model().state_dict()) for r in (resumed, straight)))


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (None, "None"),
        (depth({"strong": 0, "weak": 2}, KINDS), r"cuts: .*'weak': 1.* -> .*'weak': 2"),
        (depth({"strong": 0, "weak": 1}, KINDS[::-1]), "assign"),
        (depth({"strong": 0, "weak": 1}, KINDS, pieces=1), "pieces: None -> 1"),
        (WIDTH, "name: 'depth' -> 'width'"),
    ],
    ids=["none", "cuts", "assign", "pieces", "width"],
)
def test_another_capacity_is_not_resumed(other, shown, tmp_path) -> None:
    folder: Path = tmp_path / "run"
    options: dict[str, Any] = {"rounds": 3, "out": folder, "checkpoint_every": 1, "report": False}
    with pytest.raises(KeyboardInterrupt):
        federate(mlp(), digits(), pt.fedavg(lr=0.1), capacity=DEPTH, callbacks=[Stop(1)], **options)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(
        ValueError, match=rf"^resume=True: .* holds a run that differs in its capacity \(.*{shown}"
    ):
        federate(mlp(), digits(), pt.fedavg(lr=0.1), capacity=other, resume=True, **options)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    run = federate(mlp(), digits(), pt.fedavg(lr=0.1), capacity=DEPTH, resume=True, **options)
    assert np.isfinite(run.metrics[-1]["test.global"])
