"""Functions that a GPU replays. On a CPU a replay is the function itself, on the memory of its recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import partita as pt
from partita.core.types import ServerState
from partita.engine.execute.cuda import replayed
from partita.engine.execute.cuda.replayed import CHECKED_REPLAYS, Replayed
from partita.engine.execute.stack import Stack, lift


@pytest.fixture(autouse=True)
def at_once_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "DEVICES", ("cpu",))
    monkeypatch.setattr(replayed, "RECORDING_SECONDS", -1.0)
    monkeypatch.setattr(replayed, "REPLAY_SECONDS", -1.0)


def called(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> tuple[list[Any], bool]:
    """Return the results of several calls, and whether the last one was a replay."""
    recorded = Replayed("a function")
    results = [recorded.function(fn, *given) for given in calls]
    return results, any(known.recording is not None for known in recorded.known.values())


class Pair(NamedTuple):
    number: int
    tensors: dict[str, torch.Tensor]
    word: str


def test_results_are_those_of_the_function() -> None:
    def fn(pair: Pair, x: torch.Tensor) -> tuple[Any, ...]:
        return pair._replace(number=pair.number + 1), pair.tensors["a"] * x, x, None, pair.word

    calls = [(Pair(i, {"a": torch.randn(3)}, "w"), torch.randn(3)) for i in range(6)]
    results, was_replayed = called(fn, *calls)
    assert was_replayed
    for (pair, x), (after, product, same, nothing, word) in zip(calls, results):
        assert after.number == pair.number + 1
        assert after.tensors["a"] is pair.tensors["a"]
        assert torch.equal(product, pair.tensors["a"] * x)
        assert same is x
        assert nothing is None
        assert word == "w"


def test_other_shapes_words_and_types_have_recordings_of_their_own() -> None:
    def fn(word: str, x: torch.Tensor) -> torch.Tensor:
        return x * len(word)

    recorded = Replayed("a function")
    for word in ("a", "bb"):
        for x in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.float64)):
            for _ in range(4):
                assert torch.equal(recorded.function(fn, word, x), x * len(word))
    assert len(recorded.known) == 6


def by_version(server: ServerState) -> ServerState:
    later = server.version >= 4
    return server._replace(shared={"w": server.shared["w"] + later}, version=server.version + 1)


def by_rate(server: ServerState) -> ServerState:
    return server._replace(shared={"w": server.shared["w"] * (0.5**server.version)})


def by_name(server: ServerState) -> ServerState:
    return server._replace(shared={"w": server.shared["w"] * {0: 1.0, 5: 2.0}.get(server.version, 3.0)})


@pytest.mark.parametrize("step", [by_version, by_rate, by_name])
def test_a_function_that_reads_the_version_stays_as_it_is(step: Callable[..., Any]) -> None:
    servers = [ServerState({"w": torch.full((2,), float(i))}, {}, {}, i) for i in range(8)]
    results, was_replayed = called(step, *[(server,) for server in servers])
    assert not was_replayed
    for server, after in zip(servers, results):
        expected = step(server)
        assert torch.equal(after.shared["w"], expected.shared["w"])
        assert after.version == expected.version


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * float(x.sum().item()),
        lambda x: x[x > 0].sum(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x + torch.rand(3),
    ],
    ids=["item", "mask", "branch", "draws"],
)
def test_a_function_that_looks_at_values_or_draws_stays_as_it_is(fn: Callable[..., Any]) -> None:
    calls = [(torch.randn(3),) for _ in range(6)]
    torch.manual_seed(0)
    results, was_replayed = called(fn, *calls)
    assert not was_replayed
    torch.manual_seed(0)
    for (x,), result in zip(calls, results):
        if fn(x).shape == (3,) and torch.equal(fn(x), fn(x)):
            assert torch.equal(result, fn(x))


def test_a_function_with_a_memory_of_its_own_is_found_out() -> None:
    seen: list[float] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(0.0)
        return x * len(seen)

    _, was_replayed = called(fn, *[(torch.ones(2),)] * (CHECKED_REPLAYS + 2))
    assert not was_replayed


def test_a_result_outlives_the_next_call() -> None:
    calls = [(torch.full((2,), float(i)),) for i in range(6)]
    results, was_replayed = called(lambda x: (x + 1).view(2, 1), *calls)
    assert was_replayed
    assert [float(y[0]) for y in results] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_stack_keeps_what_is_common() -> None:
    recorded = Replayed("a function")

    def fn(shared: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[Any, ...]:
        return shared, shared["w"] * x

    for _ in range(5):
        shared, x = {"w": torch.randn(2)}, torch.randn(4, 2)
        args = Stack.of(shared, 4, rows=False), Stack.of(x, 4, rows=True)
        found, expected = recorded(fn, fn, *args), lift(fn, *args)
        assert found.has_rows == expected.has_rows == [False, True]
        assert torch.equal(found.leaves[1], expected.leaves[1])
        assert found.leaves[0] is shared["w"]
    assert any(known.recording is not None for known in recorded.known.values())


UPLOADS: dict[str, list[Any]] = {
    "plain": [],
    "gaussian": [pt.privacy.gaussian(noise=0.1, quantile=0.5)],
    "banded": [pt.privacy.banded(noise=0.1)],
    "topk": [pt.transforms.topk(0.2)],
    "quantize": [pt.transforms.quantize(4)],
}
METHODS = {
    "fedavg": pt.fedavg(lr=0.1, weighting="uniform"),
    "fedalt": pt.fedalt(personal="output", lr=0.1, momentum=0.5, weighting="uniform"),
    "scaffold": pt.scaffold(lr=0.1, weighting="uniform"),
}


@pytest.mark.parametrize("uploads", UPLOADS)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_has_the_same_bits(method: str, uploads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(6), np.arange(7, 13))
    x = rng.normal(size=(len(client), 5)).astype("float32")
    data = pt.data.from_arrays(x, rng.integers(0, 3, len(client)), client, test=0.3)
    model = pt.models.mlp(5, 3, 4)

    def run() -> pt.Run:
        order = "cyclic" if uploads == "banded" else "random"
        return pt.federate(
            model, data, METHODS[method], rounds=7, cohort=3, steps=2, batch=4, uploads=UPLOADS[uploads],
            executor="graph", baselines=False, schedule=pt.schedule.synchronous(order),
        )  # fmt: skip

    replays: list[int] = []
    replay = replayed._Recording.__call__
    monkeypatch.setattr(
        replayed._Recording, "__call__", lambda self, args: replays.append(1) or replay(self, args)
    )
    replayed_run = run()
    assert len(replays) >= 2 * 5  # the beginning and the end of clients, in all rounds but the first
    monkeypatch.setattr(replayed, "DEVICES", ())
    plain = run()
    for name, value in plain.shared.items():
        assert torch.equal(replayed_run.shared[name], value), name
