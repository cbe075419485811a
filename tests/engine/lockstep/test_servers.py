"""What servers of several runs do together is what each does alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import partita as pt
from partita.core.parts import Combined
from partita.core.types import ClientState, Tensors, Upload
from partita.engine.lockstep import member, servers
from partita.engine.lockstep.runs import in_lockstep
from partita.engine.lockstep.servers import AGGREGATION, SERVER, Act, all_same, parted, rows, stacked
from partita.engine.look import Look, looks_at
from support import each

RUNS = 3


@functools.cache
def samples() -> pt.data.FederatedData:
    return pt.data.digits(clients=8, partition=pt.data.dirichlet(alpha=0.5), seed=0)


def run(seed: int, method: pt.Algorithm, **changed: Any) -> pt.Run:
    settings = {"rounds": 4, "cohort": 6, "steps": 2, "batch": 16, "executor": "vmap", **changed}
    model = pt.models.mlp(64, 8, 10, seed=seed)
    return pt.federate(model, samples(), method, seed=seed, baselines=False, progress=False, **settings)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was computed for several servers as one operation, and for how many."""
    found: list[tuple[str, int]] = []
    compute = servers.stacked

    def noted(acts: Any) -> Any:
        found.append((acts[0].what, len(acts)))
        return compute(acts)

    monkeypatch.setattr(servers, "stacked", noted)
    return found


METHODS: dict[str, Callable[[], pt.Algorithm]] = {
    "mean": lambda: pt.fedavg(lr=0.1),
    "server with a memory": lambda: pt.fedadam(lr=0.1, server_lr=0.01),
    "sums beside": lambda: pt.scaffold(lr=0.1),
    "median": lambda: pt.fedavg(lr=0.1, aggregate=pt.aggregate.coordinate_median()),
    "iteration": lambda: pt.fedavg(lr=0.1, aggregate=pt.aggregate.geometric_median()),
    "neighbours": lambda: pt.fedavg(lr=0.1, aggregate=pt.aggregate.krum(1)),
    "draws": lambda: pt.fedavg(lr=0.1, aggregate=pt.aggregate.bucketing(2, pt.aggregate.trimmed_mean(1))),
}


@each("name", list(METHODS))
def test_servers_of_several_runs_are_those_of_each(name: str, together: list[tuple[str, int]]) -> None:
    method = METHODS[name]()
    alone = [run(i, method) for i in range(RUNS)]
    together.clear()
    found = in_lockstep([functools.partial(run, i, method) for i in range(RUNS)])
    for a, b in zip(alone, found):
        for key, value in a.shared.items():
            torch.testing.assert_close(b.shared[key], value, atol=1e-5, rtol=1e-4)
    assert (SERVER, RUNS) in together


def test_the_mean_and_its_server_are_one_operation_for_all(together: list[tuple[str, int]]) -> None:
    in_lockstep([functools.partial(run, i, pt.fedavg(lr=0.1), rounds=3) for i in range(RUNS)])
    assert together == [(AGGREGATION, RUNS), (SERVER, RUNS)] * 3


def test_servers_that_differ_stay_apart(together: list[tuple[str, int]]) -> None:
    """Their rates are numbers of the server: nobody takes another's."""
    methods = [pt.fedadam(lr=0.1, server_lr=0.01 * (i + 1)) for i in range(RUNS)]
    alone = [run(i, method) for i, method in enumerate(methods)]
    found = in_lockstep([functools.partial(run, i, method) for i, method in enumerate(methods)])
    assert SERVER not in dict(together)
    assert AGGREGATION in dict(together)
    for a, b in zip(alone, found):
        for key, value in a.shared.items():
            torch.testing.assert_close(b.shared[key], value, atol=1e-5, rtol=1e-4)


def by_lengths() -> pt.Algorithm:
    """A method whose aggregator looks at numbers, so that nobody can compute it for several runs at once."""

    def combine(deltas: Tensors, weight: Tensor, key: Tensor) -> Combined:  # noqa: ARG001
        assert float(weight.sum()) > 0
        return Combined({k: v.mean(0) for k, v in deltas.items()})

    return pt.fedavg(lr=0.1, aggregate=pt.Aggregator("watched", combine, {}))


def test_an_aggregator_that_looks_at_numbers_stays_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="partita"):
        method = by_lengths()
        found = in_lockstep([functools.partial(run, i, method) for i in range(RUNS)])
    assert f"aggregation of {RUNS} runs apart" in caplog.text
    for i, b in enumerate(found):
        for key, value in run(i, method).shared.items():
            torch.testing.assert_close(b.shared[key], value, atol=1e-5, rtol=1e-4)


def test_an_error_of_one_server_is_that_of_its_run() -> None:
    calls: list[int] = []

    def failing(number: int) -> pt.Algorithm:
        def combine(deltas: Tensors, weight: Tensor, key: Tensor) -> Combined:  # noqa: ARG001
            calls.append(number)
            if number == 1:
                raise ArithmeticError("too few uploads")
            return Combined({k: v.mean(0) for k, v in deltas.items()})

        return pt.fedavg(lr=0.1, aggregate=pt.Aggregator("failing", combine, {}))

    with pytest.raises(ArithmeticError, match="too few uploads"):
        in_lockstep([functools.partial(run, i, failing(i)) for i in range(RUNS)])
    assert calls.count(0) == calls.count(2) == 4  # the others have come to their ends


# ---- which functions are the same


def made(factor: float, other: Any = None) -> Callable[[Tensor], Any]:
    return lambda x: (x * factor, other)


def test_functions_are_the_same_where_code_and_values_are() -> None:
    assert all_same([made(0.5), made(0.5)])
    assert not all_same([made(0.5), made(0.25)])
    assert not all_same([made(0.5), lambda x: (x * 0.5, None)])
    assert all_same([made(1, torch.ones(2)), made(1, torch.ones(2))])
    assert not all_same([made(1, torch.ones(2)), made(1, torch.zeros(2))])
    assert all_same([made(1, {"a": made(2)}), made(1, {"a": made(2)})])
    assert not all_same([made(1, object()), made(1, object())])  # nobody knows
    assert all_same([functools.partial(made, 1), functools.partial(made, 1)])
    assert not all_same([functools.partial(made, 1), functools.partial(made, 2)])
    assert not all_same([made(1), made(True)])


def test_a_function_that_knows_itself_is_not_compared_for_ever() -> None:
    def recursive(number: int) -> Callable[[int], int]:
        def down(n: int) -> int:
            return number if n == 0 else down(n - 1)

        return down

    assert not all_same([recursive(1), recursive(1)])


# ---- stacks of runs


def test_rows_that_lie_in_a_row_are_no_copy() -> None:
    whole = torch.arange(24.0).reshape(4, 3, 2)
    pieces = list(whole.unbind())
    assert rows(pieces).data_ptr() == whole.data_ptr()
    assert torch.equal(rows(pieces[1:]), whole[1:])
    for others in (pieces[::-1], [pieces[0], pieces[2]], [p.clone() for p in pieces], [x.T for x in pieces]):
        assert torch.equal(rows(others), torch.stack(others))


def test_parts_of_a_stack_are_what_it_was_made_of() -> None:
    acts = [Act(SERVER, lambda *_: None, {"w": torch.full((2,), float(i))}, 3) for i in range(4)]
    assert len({act.kind for act in acts}) == 1
    for i, (tensors, number) in enumerate(parted(stacked(acts), 4)):
        assert number == 3
        assert torch.equal(tensors["w"], torch.full((2,), float(i)))
    assert Act(SERVER, lambda *_: None, {"w": torch.zeros(2)}, 4).kind != acts[0].kind


# ---- a look at all


@each("bad", [None, 0, 3])
def test_a_look_at_all_has_what_each_look_has(bad: int | None) -> None:
    delta = torch.ones(5, 3)
    if bad is not None:
        delta[bad, 1] = float("nan")
    uploads = Upload({"w": delta}, torch.ones(5), metrics={"loss": torch.arange(5.0)})
    states = ClientState({}, {})
    assert Look(uploads, states).read().sound == (bad is None)
    first, second = looks_at(uploads, states, [2, 3])
    assert first.read().metrics["loss"].tolist() == [0.0, 1.0]
    assert second.read().metrics["loss"].tolist() == [2.0, 3.0, 4.0]
    assert first.read().sound == second.read().sound == (bad is None)  # else each is examined


def test_servers_of_another_training_act_alone() -> None:
    """What was found to be the same for the runs of one training need not be for those of the next."""

    def refused(acts: Any) -> Any:
        raise AssertionError(acts)

    known = SimpleNamespace(seat=SimpleNamespace(number=0), key="one", bound=object())
    answering = member.Together()
    answering._joints["one"] = {0: known}, SimpleNamespace(servers=refused)  # type: ignore[dict-item,assignment]
    later: Any = SimpleNamespace(seat=known.seat, key="one", bound=object())
    assert answering._acts([later], [Act("a step", lambda x: x + 1, 1)]) == [2]
