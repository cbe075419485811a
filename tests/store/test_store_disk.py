"""The row file: what it costs, what it refuses, what it notices."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from partita.store import DiskStore, MemoryStore
from partita.types import ClientState, Tensors

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
    """A store after four checkpoints; the rows of the first three are in the file."""
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


def test_a_million_clients_cost_what_is_touched(tmp_path: Path) -> None:
    clients = 1_000_000
    template = ClientState({"w": torch.zeros(2500)}, {})
    start = time.perf_counter()
    store = DiskStore(template, clients, tmp_path)
    assert time.perf_counter() - start < 0.5
    file = tmp_path / "rows.bin"
    assert file.stat().st_size > clients * 10_000
    touched = list(range(0, clients, 10_000))
    ones = ClientState({"w": torch.ones(len(touched), 2500)}, {})
    store.save(touched, ones)
    assert store.overlay_bytes == len(touched) * store.layout.width
    first = checkpoint(store, 1)
    assert store.overlay_bytes == 0
    store.save([5], ClientState({"w": torch.ones(1, 2500)}, {}))
    second = checkpoint(store, 2)
    # a row of 10 kB covers up to four pages, its tag one
    assert file.stat().st_blocks * 512 < (len(touched) * 5 + 16) * 4096
    assert len(first["rows"]) == 100
    assert len(second["rows"]) == 101
    store.save([6], ClientState({"w": torch.ones(1, 2500)}, {}))
    assert checkpoint(store, 3)["clients"].tolist() == [5, 6]
    start = time.perf_counter()
    again = DiskStore(template, clients, tmp_path)
    again.restore(second)
    assert time.perf_counter() - start < 0.5
    assert again.touched == sorted([5, *touched])
    assert torch.equal(again.load(touched).personal["w"], ones.personal["w"])


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    store, kept = grown(tmp_path)
    file = tmp_path / "rows.bin"
    alter(file, file.stat().st_size - 9 * store.layout.width)  # client 1
    again = DiskStore(TEMPLATE, 10, tmp_path)
    again.restore(kept[-1])
    assert values(again, 0, 2, 3, 4) == [1.0, 3.0, 4.0, 0.0]
    with pytest.raises(ValueError, match=r"rows\.bin: the row of client 1 is damaged"):
        again.load([0, 1])


def test_a_row_in_the_wrong_place_is_noticed(tmp_path: Path) -> None:
    store, kept = grown(tmp_path)
    file = tmp_path / "rows.bin"
    width, size = store.layout.width, file.stat().st_size
    content = file.read_bytes()
    row, tag = (
        content[size - 10 * width :][:width],
        content[2 * 4096 :][:8],
    )  # the first two pages are the header
    alter(file, size - 9 * width, row)
    alter(file, 2 * 4096 + 8, tag)
    again = DiskStore(TEMPLATE, 10, tmp_path)
    again.restore(kept[-1])
    with pytest.raises(ValueError, match="client 1 is damaged"):
        again.load([1])


def test_rows_that_the_checkpoint_carries_may_be_torn(tmp_path: Path) -> None:
    store, kept = grown(tmp_path)
    file = tmp_path / "rows.bin"
    alter(file, file.stat().st_size - 8 * store.layout.width)  # client 2 was written last
    for snapshot, last in ((kept[3], 4.0), (kept[2], 0.0)):
        again = DiskStore(TEMPLATE, 10, tmp_path)
        again.restore(snapshot)
        assert values(again, 0, 1, 2, 3) == [1.0, 2.0, 3.0, last]


def test_only_the_last_two_checkpoints_fit_the_file(tmp_path: Path) -> None:
    _, kept = grown(tmp_path)
    again = DiskStore(TEMPLATE, 10, tmp_path)
    with pytest.raises(ValueError, match=r"up to round 2, too new for the checkpoint of round 1"):
        again.restore(kept[1])
    with pytest.raises(ValueError, match=r"up to round -1, the checkpoint of round 3 needs those up to 1"):
        DiskStore(TEMPLATE, 10, tmp_path / "new").restore(kept[3])
    with pytest.raises(ValueError, match="resume with kind='disk'"):
        MemoryStore(TEMPLATE, 10).restore(kept[3])


def test_a_store_in_memory_moves_to_disk(tmp_path: Path) -> None:
    memory = MemoryStore(TEMPLATE, 10)
    memory.save([4], states(7.0))
    store = DiskStore(TEMPLATE, 10, tmp_path)
    store.restore(memory.snapshot(3))
    assert values(store, 4, 5) == [7.0, 0.0]


@pytest.mark.parametrize(
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
        (whole[:-1], "bytes long, expected"),
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


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, kept = grown(tmp_path)
    store.save([5], states(6.0))
    kept.append(store.snapshot(4))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"rows\.bin \(the last checkpoint is intact\): No space") as e:
            store.committed()
    assert e.value.errno == errno.ENOSPC
    again = DiskStore(TEMPLATE, 10, tmp_path)
    again.restore(kept[-1])
    assert values(store, 0, 3, 5, 6) == values(again, 0, 3, 5, 6) == [1.0, 4.0, 6.0, 0.0]
    store.committed()
    assert values(store, 0, 3, 5, 6) == [1.0, 4.0, 6.0, 0.0]


def test_a_file_that_cannot_be_changed_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, kept = grown(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    store = DiskStore(TEMPLATE, 10, tmp_path)
    store.restore(kept[-1])
    assert values(store, 0, 3, 4) == [1.0, 4.0, 0.0]
    store.snapshot(5)
    with pytest.raises(OSError, match="cannot write client rows"):
        store.committed()


def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot create .*rows\.bin for 10 clients of 32 bytes: No space"):
        DiskStore(TEMPLATE, 10, tmp_path)
    assert list(tmp_path.iterdir()) == []
