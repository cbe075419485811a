"""Operations that were written down once compute what `vmap` computes, to the bit; graphs fall back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.engine.execute import graph, stack
from partita.engine.execute.cuda import captured, compiled
from partita.engine.execute.stack import Stack, Steps, lift

N = 5


def stacks() -> tuple[Stack, Stack]:
    g = torch.Generator().manual_seed(0)
    own = {"w": torch.randn(N, 3, generator=g), "fixed": torch.randn(N, 3, generator=g)}
    common = Stack.of({"a": torch.randn(3, generator=g), "flag": None}, N, rows=False)
    return Stack.of(own, N, rows=True), common


def step(own: dict[str, Tensor], common: dict[str, Tensor]) -> dict[str, object]:
    gradient = torch.func.grad(lambda w: (w * common["a"]).sin().sum())(own["w"])
    return {"w": own["w"] - 0.1 * gradient, "fixed": own["fixed"], "a": common["a"], "flag": common["flag"]}


def test_the_same_bits_and_the_same_structure() -> None:
    given = stacks()
    wanted, found = lift(step, *given), stack.trace(step, *given)(*given)
    assert (found.spec, found.has_rows, found.n) == (wanted.spec, wanted.has_rows, wanted.n)
    for a, b in zip(wanted.leaves, found.leaves):
        assert a is b if a is None else torch.equal(a, b)


def test_other_values_of_the_same_shapes() -> None:
    first, common = stacks()
    other = Stack([x + 1 for x in first.leaves], first.has_rows, first.spec, N)
    traced = stack.trace(step, first, common)
    for a, b in zip(lift(step, other, common).leaves, traced(other, common).leaves):
        assert a is b if a is None else torch.equal(a, b)


def test_a_tensor_that_comes_twice_may_be_two_the_next_time() -> None:
    """What a client received is its model before its first step, and no longer after it."""
    received = torch.randn(N, 3, generator=torch.Generator().manual_seed(2))
    pair = {"w": received, "received": received}

    def pulled(pair: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"w": pair["w"] - 0.5 * (pair["w"] - pair["received"]) - 0.1, "received": pair["received"]}

    traced, twice = stack.trace(pulled, Stack.of(pair, N, rows=True)), Stack.of(pair, N, rows=True)
    for _ in range(3):
        wanted, found = lift(pulled, twice), traced(twice)
        for a, b in zip(wanted.leaves, found.leaves):
            assert torch.equal(a, b)
        twice = wanted


def test_a_step_that_comes_often_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "STEPS_BEFORE_TRACE", 3)
    calls = []

    def counted(own: dict[str, Tensor], common: dict[str, Tensor]) -> dict[str, object]:
        calls.append(1)
        return step(own, common)

    steps, given = Steps(), stacks()
    found = [steps(counted, *given) for _ in range(6)]
    assert len(calls) == 3  # twice by vmap, once to be written down
    assert all(torch.equal(x.leaves[0], found[0].leaves[0]) for x in found)
    shorter = [a.between(0, 2) for a in given]
    assert len(steps(counted, *shorter).leaves[0]) == 2  # another shape
    assert len(calls) == 4


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "STEPS_BEFORE_TRACE", 1)
    monkeypatch.setattr(stack, "MAX_TRACES", 2)
    steps, given = Steps(), stacks()
    for n in (2, 3, 4, 5):
        steps(step, *[a.between(0, n) for a in given])
    assert len(steps._traced) == 2


def test_a_step_that_looks_at_values_is_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "STEPS_BEFORE_TRACE", 1)

    def looks(own: dict[str, Tensor], common: dict[str, Tensor]) -> dict[str, Tensor]:
        scale = 2.0 if float(common["a"].sum()) > 0 else 1.0
        return {"w": own["w"] * scale}

    own, common = stacks()
    negative = Stack(
        [-x if isinstance(x, Tensor) else x for x in common.leaves], common.has_rows, common.spec, N
    )
    steps = Steps()
    for given in (common, negative):
        assert torch.equal(steps(looks, own, given).leaves[0], lift(looks, own, given).leaves[0])


def test_runs_have_the_same_bits_written_down_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for often in (10**9, 1):
        monkeypatch.setattr(stack, "STEPS_BEFORE_TRACE", often)
        runs.append(federate("vmap"))
    assert all(torch.equal(runs[0].shared[k], v) for k, v in runs[1].shared.items())


# ---- graphs


def federate(executor: str, **options: object) -> pt.Run:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(7), [9, 5, 1, 12, 6, 8, 8])
    x, y = rng.normal(size=(len(owner), 6)).astype("float32"), rng.integers(0, 4, len(owner))
    data = pt.data.from_arrays(x, y, owner, test=0.2)
    given = {"rounds": 3, "cohort": 5, "epochs": 2, "batch": 4, "baselines": False, **options}
    model = given.pop("model", pt.models.mlp(6, 5, 4))
    method = given.pop("method", pt.fedalt(personal="output", lr=0.1, momentum=0.5))
    return pt.federate(model, data, method, executor=executor, progress=False, **given)  # type: ignore[arg-type]


def test_sizes_do_not_depend_on_what_came_before() -> None:
    made = graph.Graph(None, 0, 1 << 21, 0, cohort_sizes=frozenset({100}))  # type: ignore[arg-type]
    small = graph.Graph(None, 0, 1, 0, cohort_sizes=frozenset({100}))  # type: ignore[arg-type]
    assert [small._size(n) for n in (100, 50, 40, 49, 70, 99, 101, 120)] == [
        100,
        50,
        50,
        50,
        100,
        100,
        128,
        128,
    ]
    assert [made._size(n) for n in (100, 50, 34, 33, 25)] == [100, 50, 34, 34, 25]
    assert [made._size(n) for n in (1, 2, 3, 5, 7, 9, 12, 49, 70)] == [1, 2, 4, 6, 8, 12, 13, 50, 96]
    assert [made._size(n) for n in (97, 98)] == [100, 100]  # some of the cohort have no samples


@pytest.mark.parametrize("options", [{"memory": 3000}, {"batch": None}, {"steps": 3, "epochs": None}])
def test_in_chunks_with_short_batches_and_padding(options: dict[str, object]) -> None:
    loop, found = federate("loop", **options), federate("graph", **options)
    for name, value in loop.shared.items():
        torch.testing.assert_close(found.shared[name], value, atol=1e-6, rtol=1e-5)
    for i in range(7):
        for name, value in loop.client(i).personal.items():
            torch.testing.assert_close(found.client(i).personal[name], value, atol=1e-6, rtol=1e-5)


def test_recordings_fit_the_budget() -> None:
    made = graph.Graph(None, 10, 0, 0)  # type: ignore[arg-type]

    class Recording:
        nbytes = 8

    for i in range(5):
        made.recordings[i] = Recording()  # type: ignore[assignment]
        made._drop_oldest()
    assert list(made.recordings) == [3, 4]
    made.recordings[3].nbytes = 30  # type: ignore[misc]
    made._drop_oldest()
    assert list(made.recordings) == [4]


def test_a_recording_that_fails_later_is_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory when it grows, for example: nothing of the round is lost."""
    runs = []
    run = captured.Captured.run

    def fails(made: captured.Captured, *given: Any) -> Any:
        runs.append(made)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("no room")
        return run(made, *given)

    monkeypatch.setattr(captured.Captured, "run", fails)
    with pytest.warns(UserWarning, match="not recorded but stacked .OutOfMemoryError: no room"):
        found = federate("graph")
    wanted = federate("vmap")
    assert len(runs) == 2
    assert found.config["executor"]["picks"]["steps of training, stage 0"]["picked"] == "vmap"
    for name, value in wanted.shared.items():
        torch.testing.assert_close(found.shared[name], value, atol=1e-6, rtol=1e-5)


def test_a_rule_that_cannot_be_recorded_is_stacked() -> None:
    usual = pt.fedavg(lr=0.1)

    def local(problem: object) -> object:
        rule = usual.local(problem)  # type: ignore[arg-type]
        (phase,) = rule.phases

        def looks(carry: object, batch: object, lr: tuple[Tensor, ...]) -> object:
            assert float(lr[0]) > 0
            return phase.step(carry, batch, lr)

        return rule._replace(phases=(phase._replace(step=looks),))

    from dataclasses import replace

    method = replace(usual, local=local)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="not recorded but stacked"):
        found = federate("graph", method=method)
    wanted = federate("vmap", method=usual)
    assert found.config["executor"]["picks"]["steps of training, stage 0"]["picked"] == "vmap"
    assert all(torch.equal(found.shared[k], v) for k, v in wanted.shared.items())


def test_a_number_that_changes_from_step_to_step_is_not_recorded() -> None:
    usual = pt.fedavg(lr=0.1)

    def local(problem: object) -> object:
        rule = usual.local(problem)  # type: ignore[arg-type]
        (phase,) = rule.phases

        def begin(*given: object) -> object:
            return rule.start(*given), 1.0  # type: ignore[arg-type]

        def step(carry: tuple[object, float], batch: object, lr: object) -> object:
            return phase.step(carry[0], batch, (lr[0] * carry[1], lr[1])), carry[1] / 2  # type: ignore[index]

        def finish(carry: tuple[object, float], *given: object) -> object:
            return rule.finish(carry[0], *given)  # type: ignore[arg-type]

        return rule._replace(start=begin, phases=(phase._replace(step=step),), finish=finish)

    from dataclasses import replace

    method = replace(usual, local=local)  # type: ignore[arg-type]
    wanted = federate("loop", method=method)
    with pytest.warns(UserWarning, match="no tensor"):
        found = federate("graph", method=method)
    for name, value in wanted.shared.items():
        torch.testing.assert_close(found.shared[name], value, atol=1e-6, rtol=1e-5)


def test_values_that_change_places_in_a_step() -> None:
    """Momentum-like rules keep what was: it must be read before it is overwritten."""

    def swap(carry: tuple[Tensor, Tensor], batch: object, lr: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        return carry[1], carry[0] + carry[1]

    carry = Stack.of((torch.ones(2, 3), torch.full((2, 3), 2.0)), 2, rows=True)
    nothing = Stack.of((), 2, rows=False)
    traced = stack.trace(swap, carry, nothing, nothing)
    run = captured._in_place(traced.graph, carry)
    run(*stack.tensors(carry))
    assert [x[0, 0].item() for x in carry.leaves] == [2.0, 3.0]


@pytest.mark.slow
def test_compiled_steps_compute_the_same() -> None:
    loop, found = federate("loop"), federate("compiled")
    for name, value in loop.shared.items():
        torch.testing.assert_close(found.shared[name], value, atol=1e-5, rtol=1e-4)
    assert found.config["executor"]["picks"]["steps of training, stage 0"]["picked"] == graph.COMPILED


@pytest.mark.slow
def test_a_choice_says_that_kernels_were_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that another process has compiled for the same model and shapes, found on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def reason() -> str:
        compiled._kernels.clear()  # as a new process
        why = federate("compiled").config["executor"]["picks"]["steps of training, stage 0"]["why"]
        return str(why)

    assert "loaded from disk" not in reason()
    assert "ms a step compiled (loaded from disk)" in reason()


def test_half_precision_trains_and_keeps_single_weights() -> None:
    exact, half = (federate("vmap", precision=p, rounds=10) for p in ("fp32", "bf16"))
    assert all(v.dtype == torch.float32 for v in half.shared.values())
    assert not all(torch.equal(exact.shared[k], v) for k, v in half.shared.items())
    for name, value in exact.shared.items():
        torch.testing.assert_close(half.shared[name], value, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("executor", ["loop", "vmap", "graph"])
def test_half_precision_is_the_same_in_every_executor(executor: str) -> None:
    found = federate(executor, precision="bf16", rounds=1, steps=1, epochs=None)
    wanted = federate("loop", precision="bf16", rounds=1, steps=1, epochs=None)
    for name, value in wanted.shared.items():
        torch.testing.assert_close(found.shared[name], value, atol=2e-3, rtol=2e-2)


def test_layers_that_share_a_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.output = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.output(self.hidden(self.hidden(x).relu()))
            return found

    model = Twice()
    loop, found = (federate(e, model=model) for e in ("loop", "graph"))
    for name, value in loop.shared.items():
        torch.testing.assert_close(found.shared[name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["depth", "width"])
def test_devices_whose_samples_change_every_round(kind: str) -> None:
    """What frozen blocks made of a large client's samples is followed by less, and by more again."""
    rng = np.random.default_rng(0)
    sizes = [70, 3, 5, 40, 2, 9, 4, 33]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x, y = rng.normal(size=(len(owner), 6)).astype("float32"), rng.integers(0, 4, len(owner))
    data = pt.data.from_arrays(x, y, owner, test=0.2)
    kinds = ["weak", "strong"] * 4
    held = {
        "depth": lambda: pt.capacity.depth({"strong": 0, "weak": 1}, kinds),
        "width": lambda: pt.capacity.width({"strong": 1.0, "weak": 0.5}, kinds),
    }[kind]()
    given = {"rounds": 8, "cohort": 3, "steps": 3, "batch": 8, "baselines": False, "capacity": held}
    model, method = pt.models.mlp(6, 8, 4), pt.fedavg(lr=0.1, momentum=0.9)
    loop, found = (
        pt.federate(model, data, method, executor=e, progress=False, **given) for e in ("loop", "graph")
    )
    for name, value in loop.shared.items():
        torch.testing.assert_close(found.shared[name], value, atol=1e-6, rtol=1e-5)
