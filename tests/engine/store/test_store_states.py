"""Both stores behave like a dictionary of states, through checkpoints and crashes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from partita.core import tree
from partita.core.types import ClientState, Tensors
from partita.engine.store import DiskStore, MemoryStore, Store, open_store
from support import each

CLIENTS = 12
TEMPLATE = ClientState(
    {"head": torch.full((2, 3), -1.0)}, {"seen": torch.tensor(False), "n": torch.tensor(0)}
)
EMPTY = ClientState({}, {})


def state(value: int) -> ClientState:
    """A state that shows its value in every tensor."""
    head = torch.full((2, 3), value / 8)
    return ClientState({"head": head}, {"seen": torch.tensor(True), "n": torch.tensor(value)})


def stacked(values: list[int]) -> ClientState:
    return tree.stack([state(v) for v in values])


def equal(a: ClientState, b: ClientState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(TEMPLATE, CLIENTS, kind=request.param, folder=tmp_path)


def test_load_gives_saved_rows_in_the_order_asked(store: Store) -> None:
    store.save([7, 2], stacked([70, 20]))
    expected = tree.stack([state(20), TEMPLATE, state(70), state(20)])
    assert equal(store.load([2, 0, 7, 2]), expected)
    assert store.touched.tolist() == [2, 7]
    assert equal(store.load(np.array([2])), stacked([20]))
    assert store.load([]).personal["head"].shape == (0, 2, 3)


def test_saves_and_loads_share_no_memory(store: Store) -> None:
    given = stacked([5])
    store.save([3], given)
    before = store.load([3, 4])
    given.personal["head"].zero_()
    store.save([3, 4], stacked([6, 7]))
    assert equal(before, tree.stack([state(5), TEMPLATE]))
    store.load([0]).personal["head"].zero_()
    store.load([3]).personal["head"].zero_()
    assert equal(store.load([0, 3]), tree.stack([TEMPLATE, state(6)]))


def test_snapshot_is_not_changed_by_later_saves(store: Store) -> None:
    store.save([3], stacked([5]))
    snapshot = store.snapshot(1)
    copy = {k: x.clone() for k, x in snapshot.items()}
    store.save([3, 4], stacked([6, 7]))
    store.committed()
    assert all(torch.equal(snapshot[k], copy[k]) for k in copy)
    store.restore(snapshot)
    assert equal(store.load([3, 4]), tree.stack([state(5), TEMPLATE]))
    assert store.touched.tolist() == [3]


def test_states_saved_while_a_checkpoint_is_written_belong_to_the_next(store: Store, tmp_path: Path) -> None:
    store.save([1], stacked([1]))
    store.snapshot(1)
    store.save([2], stacked([2]))
    store.committed()
    second = store.snapshot(2)
    store.committed()
    fresh = type(store)(TEMPLATE, CLIENTS, *([tmp_path] if isinstance(store, DiskStore) else []))
    fresh.restore(second)
    assert equal(fresh.load([1, 2, 3]), tree.stack([state(1), state(2), TEMPLATE]))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_stateless_clients(kind: str, tmp_path: Path) -> None:
    store = open_store(EMPTY, CLIENTS, kind=kind, folder=tmp_path)
    store.save([1, 2], EMPTY)
    assert store.load([0, 1]) == EMPTY
    snapshot = store.snapshot(1)
    store.committed()
    store.restore(snapshot)
    assert store.touched.tolist() == [1, 2]


@each("bad", [[-1], [0, CLIENTS]])
def test_clients_out_of_range_are_named(store: Store, bad: list[int]) -> None:
    with pytest.raises(ValueError, match=f"clients={bad[-1]}: expected numbers from 0 to {CLIENTS - 1}"):
        store.load(bad)
    with pytest.raises(ValueError, match="expected numbers from 0"):
        store.save(bad, stacked([1] * len(bad)))


def test_a_client_cannot_be_saved_twice_at_once(store: Store) -> None:
    with pytest.raises(ValueError, match="each client once"):
        store.save([1, 1], stacked([1, 2]))


def test_foreign_snapshots_are_refused(store: Store) -> None:
    other = MemoryStore(ClientState({"body": torch.zeros(2)}, {}), CLIENTS)
    with pytest.raises(ValueError, match=r"other client states.*'body'"):
        store.restore(other.snapshot(1))
    with pytest.raises(ValueError, match="written for 5 clients, this run has 12"):
        store.restore(MemoryStore(TEMPLATE, 5).snapshot(1))
    with pytest.raises(ValueError, match=r"about.*missing"):
        store.restore({"clients": torch.zeros(0), "rows": torch.zeros(0)})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_states_on_an_accelerator(kind: str, tmp_path: Path) -> None:
    store = open_store(TEMPLATE, CLIENTS, kind=kind, folder=tmp_path, device="cuda")
    store.save([7, 2], tree.to(stacked([70, 20]), "cuda"))
    snapshot = store.snapshot(1)
    store.restore(snapshot)
    loaded = store.load([2, 0, 7])
    assert all(x.device.type == "cpu" for x in snapshot.values())
    assert all(x.device.type == "cuda" for x in tree.leaves(loaded))
    assert equal(tree.to(loaded, "cpu"), tree.stack([state(20), TEMPLATE, state(70)]))


def test_open_store_chooses(tmp_path: Path) -> None:
    def kind(**options: object) -> type:
        return type(open_store(TEMPLATE, CLIENTS, **options))  # type: ignore[arg-type]

    assert kind() is MemoryStore
    assert kind(limit=10) is MemoryStore
    assert kind(folder=tmp_path) is MemoryStore
    assert kind(folder=tmp_path, limit=10) is DiskStore
    assert kind(folder=tmp_path, limit=10, kind="memory") is MemoryStore
    assert kind(folder=tmp_path, kind="disk") is DiskStore
    with pytest.raises(ValueError, match="expected a folder"):
        kind(kind="disk")
    with pytest.raises(ValueError, match="did you mean 'disk'"):
        kind(kind="disc")


def test_the_pool_grows_with_the_clients_saved_only() -> None:
    store = MemoryStore(TEMPLATE, 1_000_000)
    for first in range(0, 100, 10):
        store.save(range(first, first + 10), stacked(list(range(first, first + 10))))
    assert len(store._pool) <= 2 * 101
    assert equal(store.load(range(100)), stacked(list(range(100))))


OUTCOMES = (
    "safe",
    "failed",  # the run goes on
    "landed",  # an error was reported although the checkpoint is there; the run goes on
    "killed",  # before `committed`
)


class Machine(RuleBasedStateMachine):
    """A store beside a plain dictionary. `kept` are the two last checkpoints and the model at each."""

    kind = "memory"

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.model: dict[int, int] = {}
        self.kept: list[tuple[Tensors, dict[int, int]]] = []
        self.round = 0
        self.value = 0
        self.open()

    def open(self) -> None:
        self.store = open_store(TEMPLATE, CLIENTS, kind=self.kind, folder=self.folder)

    @rule(clients=st.sets(st.integers(0, CLIENTS - 1), max_size=5))
    def save(self, clients: set[int]) -> None:
        values = [self.value + i for i in range(len(clients))]
        self.value += len(clients)
        if clients:
            self.store.save(list(clients), stacked(values))
        self.model.update(zip(clients, values, strict=True))

    @rule(advance=st.integers(0, 2), outcome=st.sampled_from(OUTCOMES))
    def checkpoint(self, advance: int, outcome: str) -> None:
        """Take one, with any outcome of writing it."""
        self.round += advance
        snapshot = self.store.snapshot(self.round)
        if outcome == "failed":
            return
        if self.kept and self.kept[-1][0]["round"] == self.round:
            self.kept.pop()  # a checkpoint of the same round replaces the former one
        self.kept = [*self.kept, ({**snapshot, "round": self.round}, dict(self.model))][-2:]  # type: ignore[list-item]
        if outcome == "killed":
            self.crash(damaged=False)
        elif outcome == "safe":
            self.store.committed()

    @rule(damaged=st.booleans())
    def crash(self, damaged: bool) -> None:
        """Start again from the last checkpoint, or from the one before if the last is damaged."""
        if damaged and len(self.kept) == 2:
            self.kept.pop()
        if damaged and not self.kept:
            return
        self.open()
        self.model, self.round = {}, 0
        if self.kept:
            snapshot, model = self.kept[-1]
            self.store.restore({k: x for k, x in snapshot.items() if k != "round"})
            self.model, self.round = dict(model), snapshot["round"]  # type: ignore[assignment]

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        expected = [state(self.model[c]) if c in self.model else TEMPLATE for c in range(CLIENTS)]
        assert equal(self.store.load(range(CLIENTS)), tree.stack(expected))
        assert self.store.touched.tolist() == sorted(self.model)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


class DiskMachine(Machine):
    kind = "disk"


@pytest.mark.parametrize("machine", [Machine, DiskMachine])
def test_model(machine: type[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # nothing here is about power
    test = machine.TestCase
    test.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
    test().runTest()
