"""The row file: what it costs, what it refuses, what it notices."""

from __future__ import annotations

import errno
import gc
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import killed
from partita.core.types import ClientState, Tensors
from partita.engine.store import DiskStore, MemoryStore
from support import each

TEMPLATE = ClientState({"w": torch.zeros(5)}, {})


def states(*values: float) -> ClientState:
    return ClientState({"w": torch.tensor(values)[:, None].repeat(1, 5)}, {})


def values(store: DiskStore, *clients: int) -> list[float]:
    return store.load(clients).personal["w"][:, 0].tolist()


def checkpoint(store: DiskStore, round: int) -> Tensors:
    snapshot = store.snapshot(round)
    store.committed()
    return snapshot


def grown(folder: Path) -> tuple[DiskStore, list[Tensors]]:
    """A store after four checkpoints, each of which saw one more client."""
    store = DiskStore(TEMPLATE, 10, folder)
    kept = []
    for round in range(4):
        store.save([round], states(round + 1.0))
        kept.append(checkpoint(store, round))
    return store, kept


def alter(file: Path, at: int, data: bytes | None = None) -> None:
    """Flip a bit, or write other bytes."""
    content = bytearray(file.read_bytes())
    new = data or bytes([content[at] ^ 4])
    content[at : at + len(new)] = new
    file.write_bytes(content)


def row_at(store: DiskStore, file: Path, slot: int) -> int:
    """Where the rows of `grown` lie: one after another, four of them."""
    return file.stat().st_size - (4 - slot) * store.layout.width


def visited(clients: int, folder: Path) -> tuple[int, int]:
    """Save a hundred and one of them and open the store again: calls of functions, and bytes at the peak."""
    template = ClientState({"w": torch.zeros(2500)}, {})
    touched = list(range(0, clients, clients // 100))
    ones = ClientState({"w": torch.ones(len(touched), 2500)}, {})
    gc.collect()
    tracemalloc.start()
    count = killed.at_call(killed.NEVER)
    store = DiskStore(template, clients, folder)
    store.save(touched, ones)
    first = checkpoint(store, 1)
    store.save([5], ClientState({"w": torch.ones(1, 2500)}, {}))
    second = checkpoint(store, 2)
    again = DiskStore(template, clients, folder)
    again.restore(second)
    sys.setprofile(None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (folder / "rows.bin").stat().st_size == 2 * 4096 + 101 * store.layout.width  # two pages of header
    assert [len(s["rows"]) for s in (first, second)] == [100, 101]
    assert second["rows"].nbytes == 101 * 8
    assert again.touched.tolist() == sorted([5, *touched])
    assert torch.equal(again.load(touched).personal["w"], ones.personal["w"])
    return next(count), peak


def test_a_million_clients_cost_what_is_touched(tmp_path: Path) -> None:
    """As many calls as for a thousand, and some bytes for each where its row has ten thousand."""
    visited(1000, tmp_path / "first")  # what is made on first use
    few, _ = visited(1000, tmp_path / "few")
    many, peak = visited(1_000_000, tmp_path / "many")
    assert many < 1.05 * few
    assert peak < 50 * 1_000_000


def test_places_that_no_checkpoint_needs_are_used_again(tmp_path: Path) -> None:
    store = DiskStore(TEMPLATE, 10, tmp_path)
    file = tmp_path / "rows.bin"
    for round in range(20):
        for value in range(3):  # of several saves between two checkpoints the last one counts
            store.save([1, 2, 3], states(*[round + value / 4] * 3))
        checkpoint(store, round)
    header = 2 * 4096
    # those of both checkpoints, of the save that counts and of the one that is being written
    assert file.stat().st_size <= header + 4 * 3 * store.layout.width
    for round in range(20, 30):  # whoever goes on does not know what the other checkpoint needs at first
        snapshot = checkpoint(store, round)
        store = DiskStore(TEMPLATE, 10, tmp_path)
        store.restore(snapshot)
        store.save([1], states(float(round)))
    assert file.stat().st_size <= header + 25 * store.layout.width
    assert values(store, 1, 2) == [29.0, 19.5]


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    store, kept = grown(tmp_path)
    file = tmp_path / "rows.bin"
    alter(file, row_at(store, file, 1))
    again = DiskStore(TEMPLATE, 10, tmp_path)
    again.restore(kept[-1])
    assert values(again, 0, 2, 3, 4) == [1.0, 3.0, 4.0, 0.0]
    with pytest.raises(ValueError, match=r"rows\.bin: the row of client 1 is damaged"):
        again.load([0, 1])


def test_a_row_in_the_wrong_place_is_noticed(tmp_path: Path) -> None:
    store, kept = grown(tmp_path)
    file = tmp_path / "rows.bin"
    width, at = store.layout.width, row_at(store, file, 0)
    alter(file, at + width, file.read_bytes()[at : at + width])
    again = DiskStore(TEMPLATE, 10, tmp_path)
    again.restore(kept[-1])
    with pytest.raises(ValueError, match="client 1 is damaged"):
        again.load([1])
    swapped = {**kept[-1], "clients": torch.tensor([1, 0, 2, 3])}
    again.restore(swapped)
    with pytest.raises(ValueError, match="client 0 is damaged"):
        again.load([0])


def test_rows_that_no_checkpoint_has_may_be_torn(tmp_path: Path) -> None:
    store, kept = grown(tmp_path)
    file = tmp_path / "rows.bin"
    end = file.stat().st_size
    store.save([0, 2], states(8.0, 9.0))
    os.truncate(file, end + store.layout.width // 2)
    for snapshot, last in ((kept[3], 4.0), (kept[2], 0.0)):
        again = DiskStore(TEMPLATE, 10, tmp_path)
        again.restore(snapshot)
        assert values(again, 0, 1, 2, 3) == [1.0, 2.0, 3.0, last]
        again.save([0], states(7.0))
        assert values(again, 0, 1) == [7.0, 2.0]


def test_only_the_last_two_checkpoints_fit_the_file(tmp_path: Path) -> None:
    _, kept = grown(tmp_path)
    again = DiskStore(TEMPLATE, 10, tmp_path)
    with pytest.raises(ValueError, match=r"from round 2 on, it is too new for the checkpoint of round 1"):
        again.restore(kept[1])
    with pytest.raises(ValueError, match=r"rows\.bin=.*8192 bytes long, expected 8320 or more"):
        DiskStore(TEMPLATE, 10, tmp_path / "new").restore(kept[3])
    with pytest.raises(ValueError, match="resume with kind='disk'"):
        MemoryStore(TEMPLATE, 10).restore(kept[3])


def test_a_store_in_memory_moves_to_disk(tmp_path: Path) -> None:
    memory = MemoryStore(TEMPLATE, 10)
    memory.save([4], states(7.0))
    store = DiskStore(TEMPLATE, 10, tmp_path)
    store.restore(memory.snapshot(3))
    assert values(store, 4, 5) == [7.0, 0.0]
    store.save([5], states(8.0))
    assert values(store, 4, 5) == [7.0, 8.0]


def test_rows_that_no_checkpoint_ever_had_are_forgotten(tmp_path: Path) -> None:
    """As after a kill before the first checkpoint."""
    DiskStore(TEMPLATE, 10, tmp_path).save([4], states(7.0))
    again = DiskStore(TEMPLATE, 10, tmp_path)
    assert again.touched.tolist() == []
    again.save([2], states(1.0))
    assert values(again, 2, 4) == [1.0, 0.0]


@each(
    "use",
    [
        lambda s: s.load([0]),
        lambda s: s.save([0], states(1.0)),
        lambda s: s.snapshot(9),
        lambda s: s.touched,
    ],
)
def test_the_rows_of_an_earlier_run_are_not_taken_for_new(
    tmp_path: Path, use: Callable[[DiskStore], object]
) -> None:
    grown(tmp_path)
    with pytest.raises(ValueError, match="clients of an earlier run"):
        use(DiskStore(TEMPLATE, 10, tmp_path))


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    grown(tmp_path)
    file = tmp_path / "rows.bin"
    with pytest.raises(
        ValueError, match=r"rows\.bin was written for other client states: there personal 'w'"
    ):
        DiskStore(ClientState({"v": torch.zeros(5)}, {}), 10, tmp_path)
    with pytest.raises(ValueError, match=r"rows\.bin was written for 10 clients, this run has 11"):
        DiskStore(TEMPLATE, 11, tmp_path)
    whole = file.read_bytes()
    for content, message in (
        (whole[:5000], "bytes long, expected"),
        (b"something else entirely", "not a row file"),
        (b"", "not a row file"),
        (whole[:20] + b"\xff" + whole[21:], "description is damaged"),
        (whole[:4096] + bytes(4096) + whole[8192:], "header is damaged"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"rows\.bin.*{message}"):
            DiskStore(TEMPLATE, 10, tmp_path)


def test_rounds_do_not_go_back_and_commits_follow_snapshots(tmp_path: Path) -> None:
    store, _ = grown(tmp_path)
    with pytest.raises(ValueError, match="round=2: expected a whole number from 3"):
        store.snapshot(2)
    with pytest.raises(RuntimeError, match="without a snapshot"):
        store.committed()


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_loses_nothing(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, kept = grown(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        if call == "fsync":
            store.save([3, 5], states(5.0, 6.0))
        with pytest.raises(OSError, match=r"rows\.bin \(the last checkpoint is intact\): No space") as e:
            store.save([3, 5], states(5.0, 6.0)) if call == "pwrite" else store.snapshot(4)
    assert e.value.errno == errno.ENOSPC
    again = DiskStore(TEMPLATE, 10, tmp_path)
    again.restore(kept[-1])
    assert values(again, 0, 3, 5, 6) == [1.0, 4.0, 0.0, 0.0]
    assert values(store, 0, 3, 5, 6) == ([1.0, 5.0, 6.0, 0.0] if call == "fsync" else [1.0, 4.0, 0.0, 0.0])
    store.save([3, 5], states(5.0, 6.0))
    again = DiskStore(TEMPLATE, 10, tmp_path)
    again.restore(store.snapshot(4))
    assert values(store, 0, 3, 5, 6) == values(again, 0, 3, 5, 6) == [1.0, 5.0, 6.0, 0.0]


def test_a_file_that_cannot_be_changed_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, kept = grown(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    store = DiskStore(TEMPLATE, 10, tmp_path)
    store.restore(kept[-1])
    assert values(store, 0, 3, 4) == [1.0, 4.0, 0.0]
    with pytest.raises(OSError, match="cannot write client rows"):
        store.save([0], states(2.0))
    store.snapshot(5)
    with pytest.raises(OSError, match="cannot write client rows"):
        store.committed()


def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot create .*rows\.bin for 10 clients of 32 bytes: No space"):
        DiskStore(TEMPLATE, 10, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reading_ahead_asks_for_the_rows_and_changes_nothing(tmp_path, monkeypatch) -> None:
    """Rows that lie side by side in one piece; clients that were never saved are nowhere."""
    asked = []
    monkeypatch.setattr("os.posix_fadvise", lambda fd, at, length, how: asked.append((at, length)))  # noqa: ARG005
    template = ClientState({"w": torch.zeros(3)}, {})
    store = DiskStore(template, 10, tmp_path)
    store.save([1, 2, 5, 7], ClientState({"w": torch.arange(12.0).view(4, 3)}, {}))
    store.prefetch([7, 0, 2, 1])
    width = store.layout.width
    assert [length for _, length in asked] == [2 * width, width]
    assert asked[1][0] - asked[0][0] == 3 * width
    assert store.load([5]).personal["w"].tolist() == [[6.0, 7.0, 8.0]]
    store.prefetch([0, 9])
    assert len(asked) == 2
