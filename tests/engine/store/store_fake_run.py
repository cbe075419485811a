"""A run without learning, to be killed: states that depend on every round before, checkpoints on the way.

As a script it reads one run per line (the arguments of `train` as JSON), forks for each and prints the exit
code when it ends. Forking spares the kill tests the import of torch.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from engine import killed
from engine.killed import NEVER
from partita.core.types import ClientState
from partita.engine.store import DiskStore, durable
from partita.engine.store.files import append_jsonl

CLIENTS = 20
TEMPLATE = ClientState({"w": torch.zeros(8)}, {"n": torch.tensor(0)})
FOREVER = 1_000_000


def cohort(round: int) -> list[int]:
    return sorted({(round * k + k * k) % CLIENTS for k in (3, 7, 11)})


def step(n: int, round: int) -> int:
    return (n * 31 + round) % 1_000_003


def straight(rounds: int) -> list[int]:
    """What each client's n is after so many rounds."""
    values = [0] * CLIENTS
    for t in range(1, rounds + 1):
        for c in cohort(t):
            values[c] = step(values[c], t)
    return values


def states(values: list[int]) -> ClientState:
    n = torch.tensor(values)
    return ClientState({"w": n[:, None] + torch.arange(8.0)}, {"n": n})


def resume(folder: Path) -> tuple[DiskStore, int]:
    """The store and the round of the newest valid checkpoint, compared with a straight run."""
    store = DiskStore(TEMPLATE, CLIENTS, folder)
    found = durable.read(folder / "checkpoint")
    if found is None:
        round = 0
    else:
        store.restore({k.removeprefix("store."): x for k, x in found.tensors.items()})
        round = found.state["round"]
        assert round == found.round
    values = straight(round)
    loaded = store.load(range(CLIENTS))
    expected = states(values)
    for c in range(CLIENTS):
        if values[c]:  # a client that was never in a cohort has the template
            assert torch.equal(loaded.personal["w"][c], expected.personal["w"][c]), (round, c)
    assert loaded.memory["n"].tolist() == values, round
    assert store.touched.tolist() == sorted({c for t in range(1, round + 1) for c in cohort(t)})
    return store, round


def train(folder: str, rounds: int, every: int, at_write: int = NEVER, at_call: int | None = None) -> None:
    root = Path(folder)
    writes = killed.at_write(at_write)
    store, start = resume(root)
    calls = itertools.count() if at_call is None else killed.at_call(at_call)
    durable.drop(root / "checkpoint", after=start)
    for t in range(start + 1, rounds + 1):
        clients = cohort(t)
        values = store.load(clients).memory["n"].tolist()
        store.save(clients, states([step(n, t) for n in values]))
        if t % every == 0:
            tensors = {f"store.{k}": x for k, x in store.snapshot(t).items()}
            durable.write(root / "checkpoint", t, tensors, {"round": t})
            store.committed()
    sys.setprofile(None)
    append_jsonl(root / "counts.jsonl", {"writes": next(writes), "calls": next(calls)})


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                train(**json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
