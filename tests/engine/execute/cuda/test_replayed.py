"""Functions that a GPU replays. On a CPU a tape of operations stands for a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import partita as pt
from partita.core.types import Message, ServerState, Upload
from partita.engine.execute.cuda import replayed
from partita.engine.execute.cuda.replayed import Replayed, is_ours
from partita.engine.execute.stack import Stack, lift


class Tape(TorchDispatchMode):
    """Notes operations, and the tensors that they read and left."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.notes.append((func, args, kwargs or {}, result))
        return result


def taped(work: Callable[[], Any], _: torch.device) -> Callable[[], Any]:
    """Return what carries out the operations of work again, in the same memory and without its Python."""
    with Tape() as tape:
        result = work()

    def again() -> Any:
        for func, args, kwargs, left in tape.notes:
            read = {
                x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
            }
            old = [x for x in tree_leaves(left) if isinstance(x, Tensor)]
            if func._schema.is_mutable:
                func(*args, **kwargs)
            elif not all(not x.numel() or x.untyped_storage().data_ptr() in read for x in old):  # no view
                new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for x, y in zip(old, new, strict=True):
                    x.copy_(y)
        return result

    return again


@pytest.fixture(autouse=True)
def at_once_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "DEVICES", ("cpu",))
    monkeypatch.setattr(replayed, "OURS", ("partita.", f"{__name__}."))
    monkeypatch.setattr(replayed, "RECORDING_SECONDS", -1.0)
    monkeypatch.setattr(replayed, "REPLAY_SECONDS", -1.0)
    monkeypatch.setattr(replayed, "record", taped)


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
    """Of the functions that are recorded none has; if one had, the comparisons would tell."""
    seen: list[float] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(0.0)
        return x * len(seen)

    _, was_replayed = called(fn, *[(torch.ones(2),)] * 6)
    assert not was_replayed


def clips_in_place(state: ServerState) -> ServerState:
    for x in state.shared.values():
        x.clamp_(max=1.0)
    return state


MEMORY = torch.zeros(2)


def remembers(state: ServerState) -> ServerState:
    MEMORY.mul_(0.5).add_(state.shared["w"])
    return state._replace(shared={"w": MEMORY.clone()})


@pytest.mark.parametrize("step", [clips_in_place, remembers])
def test_a_function_that_changes_what_was_there_before_stays_as_it_is(step: Callable[..., Any]) -> None:
    def calls() -> list[tuple[ServerState]]:
        MEMORY.zero_()
        return [(ServerState({"w": torch.full((2,), float(i))}, {}, {}, i),) for i in range(12)]

    results, was_replayed = called(step, *calls())
    assert not was_replayed
    for after, (before,) in zip(results, calls(), strict=True):
        assert torch.equal(after.shared["w"], step(before).shared["w"])


def test_what_is_written_to_inside_may_be_recorded() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).add_(x).mul_(2.0)

    results, was_replayed = called(fn, *[(torch.full((2,), float(i)),) for i in range(5)])
    assert was_replayed
    assert [float(y[0]) for y in results] == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    x = torch.arange(3)
    for fn in (lambda x, by: x * by,):
        calls = [(x, by) for by in (True, True, True, True, 1.0, 1.0, 1.0, 1.0)]
        results, was_replayed = called(fn, *calls)
        assert was_replayed
        assert [y.dtype for y in results] == [(x * by).dtype for _, by in calls]


def test_strided_arguments_have_the_bits_of_the_function() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean(0), torch.linalg.vector_norm(x)

    calls = [(torch.randn(7).expand(33, 7).t(),) for _ in range(5)]
    results, _ = called(fn, *calls)
    for (x,), result in zip(calls, results, strict=True):
        assert all(map(torch.equal, result, fn(x)))


@pytest.mark.parametrize("value", [np.arange(3), [1, 2], object()], ids=["array", "list", "object"])
def test_a_function_that_returns_something_else_stays_as_it_is(value: Any) -> None:
    results, was_replayed = called(lambda x: (x + 1, value), *[(torch.ones(2),)] * 4)
    assert not was_replayed
    assert all(result[1] is value for result in results)


def test_memory_of_recordings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were called last stay; one that had to go is not recorded again."""
    monkeypatch.setattr(replayed, "ROOM", 100 * 4)
    monkeypatch.setattr(replayed, "MOST_KINDS", 20)
    recorded = Replayed("a function")

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for n in (30, 40, 30, 50, 30, 40, *range(1, 30)):
        recorded.function(fn, torch.ones(n))
        recorded.function(fn, torch.ones(n))
        sizes = [known.recording.nbytes for known in recorded.known.values() if known.recording]
        assert sum(sizes) <= 100 * 4
        assert len(recorded.known) <= 20


def test_only_functions_of_this_package_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "OURS", ("partita.",))
    model = pt.models.mlp(5, 3, 4)
    for method in METHODS.values():
        assert is_ours(method.aggregate, set())
        assert is_ours(method.server, set())
    own = pt.Aggregator(
        "own", lambda deltas, weight, key: pt.aggregate.mean().combine(deltas, weight, key), {}
    )
    assert not is_ours(pt.fedavg(lr=0.1, aggregate=own).aggregate, set())
    assert not is_ours(model.forward, set())


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
    monkeypatch.setattr(replayed, "OURS", ("partita.",))
    replayed_run = run()
    assert len(replays) >= 2 * 5  # the beginning and the end of clients, in all rounds but the first
    monkeypatch.setattr(replayed, "DEVICES", ())
    plain = run()
    for name, value in plain.shared.items():
        assert torch.equal(replayed_run.shared[name], value), name


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_transform_enforces_holds_in_every_round(in_place: bool) -> None:
    def accept(message: Message, public: dict[str, Tensor]) -> Message:  # noqa: ARG001
        if in_place:
            for value in message.numbers.values():
                value.mul_(0.01)
            return message
        return message._replace(numbers={k: v * 0.01 for k, v in message.numbers.items()})

    data, model = pt.data.digits(clients=6, seed=0), pt.models.mlp(64, 8, 10, seed=0)
    run = pt.federate(
        model, data, pt.fedavg(lr=0.5, weighting="uniform"), rounds=8, cohort=3, steps=4, batch=8,
        uploads=[pt.Transform("small", {}, accept=accept)], executor="graph", baselines=False,
    )  # fmt: skip
    for name, value in model.named_parameters():
        assert 0 < (run.shared[name] - value).abs().max() < 0.1


def test_an_upload_of_a_tensor_on_the_host_is_passed_on() -> None:
    recorded = Replayed("a function")
    for i in range(4):
        uploads = Upload({"w": torch.ones(2, 3) * i}, torch.ones(2), client=torch.arange(2))
        found = recorded.function(lambda uploads: uploads._replace(weight=uploads.weight * 2), uploads)
        assert found.client is uploads.client
