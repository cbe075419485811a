"""Whatever arrives in place of an upload, the run goes on: it is taken as tensors of ours, or set aside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import partita as pt
from partita import capacity
from partita.core import tree
from partita.core.parts import Attack
from partita.core.types import Upload
from partita.engine.screen import screen
from support import each

BAD = RuntimeError("what now?")


def expected() -> Upload:
    delta = {"w": torch.zeros(3, 4, 2), "b": torch.zeros(3, 4), "n": torch.zeros(3, dtype=torch.int64)}
    weight = torch.tensor([5.0, 8.0, 7.0], dtype=torch.float64)
    return Upload(delta, weight, {"c": torch.zeros(3, 2)})


def honest() -> dict[str, Tensor]:
    return {"w": torch.ones(4, 2), "b": torch.ones(4), "n": torch.tensor(3)}


class Raises(Tensor):
    """A tensor that cannot be computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise BAD


class Claims(Tensor):
    """One that says it has another shape."""

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return torch.Size([4])


class Names(Mapping[str, Any]):
    """Names that change from one reading to the next, or cannot be read."""

    def __init__(self, tensors: dict[str, Any], fail: str = "") -> None:
        self.tensors, self.fail, self.reads = tensors, fail, 0

    def __iter__(self) -> Iterator[str]:
        if self.fail == "iter":
            raise BAD
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Any:
        if self.fail == "get":
            raise BAD
        self.reads += 1
        return self.tensors[name] if self.reads <= len(self.tensors) else torch.ones(99)


class Odd:
    """A name that is equal to everything, or cannot be printed."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise BAD

    def __str__(self) -> str:
        raise BAD


class Property(Upload):
    """An upload whose parts cannot be read."""

    @property
    def delta(self) -> Any:  # type: ignore[override]
        raise BAD


def emptied(n: int = 4) -> Tensor:
    """Some numbers, and no memory for them."""
    x = torch.ones(n)
    x.untyped_storage().resize_(0)
    return x


def shadowed() -> Tensor:
    """A tensor with methods of its own."""
    x = torch.ones(4)
    x.detach = x.to = x.clone = x.item = lambda *_, **__: 1 / 0  # type: ignore[method-assign, assignment]
    return x


def batched() -> Tensor:
    """What leaks out of vmap."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    torch.func.vmap(keep)(torch.ones(2, 4))
    return kept[0]


def inference(value: float | None = None) -> Tensor:
    with torch.inference_mode():
        return torch.ones(4) if value is None else torch.tensor(value)


def with_b(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: Upload({**honest(), "b": make()}, extra={"c": torch.ones(2)})


def with_weight(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: Upload(honest(), make(), {"c": torch.ones(2)})


def whole(delta: Any, extra: Any = None) -> Upload:
    return Upload(delta, extra={"c": torch.ones(2)} if extra is None else extra)


GOOD: dict[str, Callable[[], Any]] = {
    "plain": with_b(lambda: torch.ones(4)),
    "a parameter": with_b(lambda: nn.Parameter(torch.ones(4))),
    "a gradient": with_b(lambda: torch.ones(4, requires_grad=True) * 1),
    "inference": with_b(inference),
    "a view": with_b(lambda: torch.ones(8)[::2]),
    "expanded": with_b(lambda: torch.ones(1).expand(4)),
    "negated view": with_b(lambda: (-torch.ones(4, dtype=torch.float32) * 1j).conj().imag),
    "methods of its own": with_b(shadowed),
    "names that change": lambda: whole(Names(honest())),
    "a weight with a gradient": with_weight(lambda: torch.tensor(8.0, requires_grad=True)),
    "a weight that was computed": with_weight(lambda: torch.tensor(4.0, requires_grad=True) * 2),
    "a parameter as weight": with_weight(lambda: nn.Parameter(torch.tensor(8.0))),
    "a short weight": with_weight(lambda: torch.tensor(8.0, dtype=torch.float16)),
    "a whole weight": with_weight(lambda: torch.tensor([[8]])),
    "an inference weight": with_weight(lambda: inference(8.0)),
    "more beside it": lambda: whole(honest())._replace(
        metrics={"loss": Raises(), "steps": "many"}, client="me"
    ),
}
HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (with_b(lambda: torch.ones(4).as_subclass(Raises)), "b of type Raises, not a tensor"),
    "claims": (with_b(lambda: torch.ones(9).as_subclass(Claims)), "b of type Claims, not a tensor"),
    "emptied": (with_b(emptied), "b without its numbers"),
    "nested": (with_b(lambda: torch.nested.nested_tensor([torch.ones(4)])), "b without its numbers"),
    "sparse": (with_b(lambda: torch.ones(4).to_sparse()), "b without its numbers"),
    "meta": (with_b(lambda: torch.ones(4, device="meta")), "b without its numbers"),
    "batched": (with_b(batched), ""),
    "half": (with_b(lambda: torch.ones(4).half()), "b of type torch.float16, not torch.float32"),
    "complex view": (
        with_b(lambda: torch.ones(4, dtype=torch.complex64).conj()),
        "b of type torch.complex64",
    ),
    "huge": (with_b(lambda: torch.ones(1).expand(10**12)), "b of shape [1000000000000], not [4]"),
    "names that raise": (lambda: whole(Names(honest(), "iter")), "RuntimeError when it was read"),
    "values that raise": (lambda: whole(Names(honest(), "get")), "RuntimeError when it was read"),
    "an odd name": (lambda: whole({**honest(), Odd(): torch.ones(4)}), "RuntimeError when it was read"),
    "an odd name instead": (
        lambda: whole({"w": torch.ones(4, 2), "n": torch.tensor(3), Odd(): torch.ones(4)}),
        "without b",
    ),
    "a name that is no text": (
        lambda: whole({**honest(), "\ud800\n\x1b[31m": torch.ones(1)}),
        "unknown name ???[31m",
    ),
    "a long name": (lambda: whole({**honest(), "x" * 10**6: torch.ones(1)}), "unknown name " + "x" * 60),
    "parts that raise": (lambda: Property({}), "RuntimeError when it was read"),
    "extra that raises": (lambda: whole(honest(), Names({"c": torch.ones(2)}, "get")), "RuntimeError when"),
    "extra of another type": (
        lambda: whole(honest(), {"c": torch.ones(2).double()}),
        "c of type torch.float64",
    ),
    "a weight that raises": (
        with_weight(lambda: torch.tensor(8.0).as_subclass(Raises)),
        "weight of type Raises",
    ),
    "a sparse weight": (with_weight(lambda: torch.ones(1).to_sparse()), "weight of shape [1]"),
    "a weight nowhere": (with_weight(lambda: torch.tensor(8.0, device="meta")), "weight of shape []"),
    "an emptied weight": (with_weight(lambda: emptied(1)), "weight of shape [1]"),
    "a nested weight": (with_weight(lambda: torch.nested.nested_tensor([torch.ones(1)])), "weight of shape"),
}
quiet = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@each("what", GOOD)
def test_what_has_the_right_form_is_taken(what: str) -> None:
    arrived, why = screen(expected(), [""] * 3, {1: GOOD[what]()})
    assert why == [""] * 3
    assert arrived.weight is not None
    assert arrived.weight.tolist() == [5, 8, 7]
    for name, value in {**honest(), "c": torch.ones(2)}.items():
        stack = (arrived.delta | arrived.extra)[name]
        assert torch.equal(stack[1].abs(), value)
        assert type(stack) is Tensor
    for x in (*arrived.delta.values(), *arrived.extra.values(), arrived.weight):
        assert not x.requires_grad
        assert not x.is_inference()
        x.numpy()


@quiet
@each("what", HOSTILE)
def test_what_has_not_is_set_aside(what: str) -> None:
    make, words = HOSTILE[what]
    arrived, why = screen(expected(), [""] * 3, {1: make()})
    assert why[0] == why[2] == ""
    assert why[1].startswith(words)
    assert why[1].isprintable()
    assert words or why[1]
    assert all(torch.equal(arrived.delta[k], x) for k, x in expected().delta.items())


def test_what_is_taken_is_a_copy() -> None:
    """A sender that changes its tensors later changes nothing here."""
    sent = honest()
    arrived, _ = screen(expected(), [""] * 3, {1: whole(sent)})
    sent["b"].fill_(float("nan"))
    assert torch.equal(arrived.delta["b"][1], torch.ones(4))


KINDS = [torch.float16, torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64]
tensors = st.builds(lambda n, kind: torch.zeros(n).to(kind), st.integers(0, 5), st.sampled_from(KINDS))
names = st.one_of(st.sampled_from(["w", "b", "n", "c"]), st.none(), st.integers(), st.text(max_size=5))
pieces = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5), st.just(np.zeros(4)), tensors)
anything = st.one_of(pieces, st.lists(pieces, max_size=3), st.dictionaries(names, pieces, max_size=5))


@settings(deadline=None, max_examples=150)
@given(delta=anything, weight=anything, extra=anything, other=anything)
def test_anything_at_all(delta: Any, weight: Any, extra: Any, other: Any) -> None:
    """It is set aside with words, and the others stay as they are."""
    for sent in (Upload(delta, weight, extra), Upload(honest(), weight, extra), other):
        arrived, why = screen(expected(), [""] * 3, {1: sent})
        assert why[0] == why[2] == ""
        assert why[1]
        assert all(torch.equal(arrived.delta[k], x) for k, x in expected().delta.items())


# ---- in a run


def spoiled(change: Callable[[Tensor], Tensor]) -> Callable[[Upload], Any]:
    """The last tensor is changed."""

    def spoil(own: Upload) -> Upload:
        *_, last = own.delta
        return own._replace(delta={**own.delta, last: change(own.delta[last])})

    return spoil


def without_memory(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def attack(spoil: Callable[[Upload], Any]) -> Attack:
    """Byzantine clients send what this makes of what they should send."""

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Any]:  # noqa: ARG001
        return {i: spoil(Upload(*tree.row(uploads[:4], i))) for i in byzantine}

    return Attack("hostile", forge, None, {})


CAPACITIES = {
    "whole": None,
    "depth": capacity.depth({"strong": 0, "weak": 1}),
    "width": capacity.width({"strong": 1.0, "weak": 0.5}),
}
TAKEN = ("gradient", "weight")
CASES: dict[str, Callable[[Upload], Any]] = {
    "gradient": spoiled(lambda x: x.clone().requires_grad_() * 1),
    "weight": lambda own: own._replace(weight=own.weight.requires_grad_()),
    "half": spoiled(lambda x: x.half()),
    "raises": spoiled(lambda x: x.as_subclass(Raises)),
    "emptied": spoiled(without_memory),
    "nothing": lambda own: None,  # noqa: ARG005
    "names": lambda own: own._replace(delta=Names(own.delta, "iter")),
}


@each("what", CASES)
@each("devices", CAPACITIES)
def test_the_run_goes_on(what: str, devices: str) -> None:
    data = pt.data.digits(clients=4, test=0.4, seed=0)
    run = pt.federate(
        pt.models.mlp(64, 4, 10),
        data,
        pt.fedavg(lr=0.1),
        rounds=2,
        steps=1,
        batch=4,
        baselines=False,
        capacity=CAPACITIES[devices],
        attack=attack(CASES[what]),
        byzantine=[1],
    )
    assert all(bool(torch.isfinite(x).all()) and not x.requires_grad for x in run.shared.values())
    excluded = run.summary()["excluded_why"]
    assert list(excluded) == ([] if what in TAKEN else ["1"])
