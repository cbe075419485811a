"""The multi-step forward pass: what frozen blocks make of a client's samples, piece by piece.

As a script this file is a weak client: `python test_record.py FOLDER` reads its samples and, piece by piece,
the model from the files in FOLDER, trains its blocks, writes them there and tells what that took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import partita as pt
from partita.capacity import depth
from partita.capacity.blocks import part
from partita.engine.devices.activations import SAMPLES, passed
from support import each

Tensors = dict[str, Tensor]
CUT, SHARE, SAMPLES_OF_CLIENT, BATCH = 7, 0.16, 48, 32


# ---- one piece after another


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    ).eval()


def in_batches(x: Tensor, size: int) -> Iterator[Tensor]:
    return (x[i : i + size] for i in range(0, max(len(x), 1), size))


@each("disk", [False, True])
@each("rows", [0, 1, SAMPLES, SAMPLES + 1, 200])
def test_all_samples_pass_all_pieces(rows, disk) -> None:
    whole, x = model(), torch.randn(rows, 6)
    pieces = [part(whole, names) for names in (("0", "1"), ("2",), ("3", "4"))]
    tensors = whole.state_dict()
    record = passed(pieces, lambda names: {k: tensors[k] for k in names}, in_batches(x, 7), rows, disk=disk)
    assert record.shape == (rows, 3)
    assert not record.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(record, whole(x))


def test_the_tensors_are_those_that_were_fetched() -> None:
    """The pieces' own are never read; each asks for its own by name, once, when its turn comes."""
    whole, asked = model(), []
    pieces = [part(whole, names) for names in (("0", "1"), ("2",), ("3", "4"))]
    tensors = {k: v.clone() for k, v in whole.state_dict().items()}
    x = torch.randn(100, 6)
    with torch.no_grad():
        expected = whole(x)
        for p in whole.parameters():
            p.fill_(float("nan"))

    def fetch(names: Sequence[str]) -> Tensors:
        asked.append(set(names))
        return {k: tensors[k] for k in names}

    torch.testing.assert_close(passed(pieces, fetch, in_batches(x, 10), 100), expected)
    norm = {f"3.{k}" for k in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert asked == [{"0.weight", "0.bias"}, {"2.weight", "2.bias"}, norm | {"4.weight", "4.bias"}]


@each("size", [1, 16, 1000])
def test_the_size_of_batches_is_chosen(size) -> None:
    """From the second piece on; the first gets what comes."""
    seen: list[tuple[str, int]] = []

    class Look(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.name, len(x)))
            return x + 1

    x = torch.zeros(40, 2)
    record = passed([Look("a"), Look("b")], lambda _: {}, in_batches(x, 30), 40, size=size)
    assert torch.equal(record, x + 2)
    assert [n for name, n in seen if name == "a"] == [30, 10]
    assert [n for name, n in seen if name == "b"] == [len(b) for b in in_batches(x, size)]


def test_a_batch_is_gone_before_the_next_one_passes() -> None:
    """What it became is in the record; a device has room for one of them."""
    last: list[weakref.ref[Tensor]] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert all(ref() is None for ref in last)
            found = x + 1
            last.append(weakref.ref(found))
            return found

    passed([Look(), Look()], lambda _: {}, in_batches(torch.zeros(40, 2), 10), 40, size=10)
    assert len(last) == 8


def test_files_leave_nothing(tmp_path, monkeypatch) -> None:
    """A record's file has no name once it is there; it ends with the record."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    whole, seen = model(), []
    pieces = [part(whole, (name,)) for name in ("0", "2", "4")]
    tensors = whole.state_dict()

    def fetch(names: Sequence[str]) -> Tensors:
        seen.append(list(tmp_path.iterdir()))
        return {k: tensors[k] for k in names}

    record = passed(pieces, fetch, in_batches(torch.randn(20, 6), 8), 20, disk=True)
    where = record.untyped_storage().filename
    assert where is not None
    assert Path(where).parent == tmp_path
    assert not any(seen)
    assert not list(tmp_path.iterdir())
    assert passed(pieces, fetch, in_batches(torch.randn(20, 6), 8), 20).untyped_storage().filename is None


# ---- a weak client in a process of its own


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive; what lies in a file is not in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if tensor.device.type != "cpu" or storage.filename is not None or place in self.known:
            return
        self.known.add(place)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, place, storage.nbytes())

    def _gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def test_live_tensors_are_counted() -> None:
    with Live() as live:
        a = torch.zeros(1000)
        b = a[:10] + 1
        view = a.view(10, 100)
        assert live.now == 4 * 1010
        del a
        assert live.now == 4 * 1010  # its memory is the view's
        del view
        assert live.now == 4 * 10
        w = torch.ones(1000, requires_grad=True)
        y = (w * w).exp().sum()  # exp keeps what it put out
        assert live.now == 4 * (10 + 1000 + 1000 + 1)
        y.backward()
        assert live.now == 4 * (10 + 1000 + 1000 + 1)  # the gradient in place of it
        assert live.peak >= 4 * (10 + 3000)
    assert len(b) == 10


def steps(trained: nn.Module, x: Any, y: Tensor) -> None:
    """Three steps of SGD, each on a batch that is read when its turn comes."""
    optimizer = torch.optim.SGD(trained.parameters(), 0.05)
    for begin in (0, 16, 8):
        optimizer.zero_grad()
        rows = slice(begin, begin + BATCH)
        nn.functional.cross_entropy(trained(x[rows].clone()), y[rows]).backward()
        optimizer.step()


def weak_client(folder: Path) -> dict[str, Any]:
    """What a weak device does in a round: record, train, send. No two pieces are ever here together."""
    structure = pt.models.resnet20(10)
    (share,) = depth({"weak": CUT}).shares(structure, torch.zeros(2, 3, 32, 32))
    structure.to("meta")  # from here on it has no numbers
    earlier: list[weakref.ref[Tensor]] = []
    names_of_pieces: list[list[str]] = []
    server, own = (safe_open(folder / f"{name}.safetensors", "pt") for name in ("server", "client"))
    x, y = own.get_slice("x"), own.get_tensor("y")

    def fetch(names: Sequence[str]) -> Tensors:
        assert all(ref() is None for ref in earlier), "a piece is still here when the next one comes"
        found = {k: server.get_tensor(k).clone() for k in names}
        earlier[:] = [weakref.ref(v) for v in found.values()]
        names_of_pieces.append(list(names))
        return found

    with Live() as live:
        batches = (x[i : i + 8].clone() for i in range(0, SAMPLES_OF_CLIENT, 8))
        record = passed(
            [p.eval() for p in share.pieces], fetch, batches, SAMPLES_OF_CLIENT, disk=True, size=8
        )
        recording, live.peak = live.peak, live.now
        trained = share.model.to_empty(device="cpu").train()
        trained.load_state_dict(fetch(list(trained.state_dict())))
        steps(trained, record, y)
    save_file(trained.state_dict(), folder / "sent.safetensors")
    return {"recording": recording, "training": live.peak, "pieces": names_of_pieces}


def strong_client(tensors: Tensors, x: Tensor, y: Tensor) -> int:
    """The same steps with the whole model; the most bytes at a time."""
    with Live() as live:
        whole = pt.models.resnet20(10).train()
        for p in whole.parameters():
            live.add(p)
        whole.load_state_dict(tensors)
        steps(whole, x, y)
    return live.peak


def test_a_weak_client_never_needs_more_than_its_capacity(tmp_path) -> None:
    """Table 1: 0.16 of what a strong client takes, while it records and while it trains.

    2a counts what the trained layers put out, not what the first of them gets: where a strong client's batch
    is one of images (0.4 MB), the weak one's is of records (1 MB). That batch alone comes on top.
    """
    torch.manual_seed(0)
    server = pt.models.resnet20(10)
    for name, buffer in server.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
    tensors = {k: v.detach().clone() for k, v in server.state_dict().items()}
    x, y = torch.rand(SAMPLES_OF_CLIENT, 3, 32, 32), torch.randint(10, (SAMPLES_OF_CLIENT,))
    save_file(tensors, tmp_path / "server.safetensors")
    save_file({"x": x, "y": y}, tmp_path / "client.safetensors")
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    strong = strong_client(tensors, x, y)
    assert strong > 40e6
    assert told["recording"] < SHARE * strong
    batch = 4 * BATCH * 32 * 16 * 16
    assert told["training"] < SHARE * strong + batch
    # all blocks in their turn, each once: two pieces, then what is trained
    blocks = [sorted({name.split(".")[0] for name in names}) for names in told["pieces"]]
    assert blocks == [
        ["block1", "block2", "block3", "stem"],
        ["block4", "block5", "block6"],
        ["block7", "block8", "block9", "output"],
    ]
    # and it is the right model: plainly, the whole one with its first blocks frozen
    frozen = nn.Sequential(*list(server.children())[:CUT]).eval().requires_grad_(False)
    rest = nn.Sequential(OrderedDict(list(server.named_children())[CUT:])).train()
    steps(rest, frozen(x), y)
    sent = load_file(tmp_path / "sent.safetensors")
    assert set(sent) == {k for k in tensors if k.split(".")[0] in dict(rest.named_children())}
    for k, v in rest.state_dict().items():
        torch.testing.assert_close(sent[k], v, atol=1e-5, rtol=1e-4)
        assert k.endswith("tracked") or not torch.equal(sent[k], tensors[k])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(weak_client(Path(sys.argv[1]))))
