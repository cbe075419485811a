"""What a client or a server says of counts of samples takes no memory, however large they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from deployed import Recorded, clients_of, deployed, experiment

import partita as pt
from partita.deploy import Client, Local, serve
from partita.deploy.agreed import MOST_SAMPLES, standing_for
from partita.deploy.wire import Body, pack, unpack

ROOM = 512 << 20
"""Bytes that a process may take beside what it has when its imports are done."""
HERE = Path(__file__).resolve()
PATHS = [str(HERE.parents[2] / "src"), str(HERE.parents[1]), str(HERE.parent)]
METHODS: dict[str, dict[str, Any]] = {
    "personal": {},
    "epochs": {"algorithm": pt.fedavg(0.1), "epochs": 1},
    "full batch": {"algorithm": pt.fedavg(0.1), "batch": None},
    "cohort": {"algorithm": pt.scaffold(0.1), "cohort": 2},
    "packed": {"uploads": [pt.transforms.topk(0.3)]},
    "private": {"uploads": [pt.privacy.gaussian(noise=1.0, clip=0.1)], "epochs": 1},
    "weak devices": {
        "capacity": pt.capacity.width({"strong": 1.0, "weak": 0.5}),
        "algorithm": pt.fedavg(0.1),
    },
}


class Boasting(Client):
    """A client that says other counts than it has."""

    said: tuple[int, int, int] = (1, 1, 1)

    @property
    def sizes(self) -> list[int]:
        return list(self.said)


def served(folder: str, name: str, *said: int) -> None:
    """Run an experiment in which a client claims so many samples."""
    made = experiment(**METHODS[name])
    clients = clients_of(made, Path(folder))
    liar = type("Liar", (Boasting,), {"said": said})
    clients["bob"] = liar(made, "bob", made.data.subset([1]), Path(folder) / "bob")
    run = serve(made, list(clients), Local(clients), None, report=False, progress=False, enrolment=0.1)
    assert run.facts["rounds"] == 3
    assert all(bool(torch.isfinite(value).all()) for value in run.shared.values())


def asked(folder: str, name: str, largest: int) -> None:
    """Ask a client to check and to train, among clients of whom one is said to have so many samples."""
    transports: list[Recorded] = []

    def noted(clients: Any) -> Recorded:
        transports.append(Recorded(clients))
        return transports[0]

    made = experiment(**{**METHODS[name], "rounds": 1})
    deployed(made, Path(folder), noted, out=None)
    client = clients_of(made, Path(folder) / "again")["bob"]
    for message in transports[0].messages:
        head, tensors = unpack(message, 1 << 30)
        if head["kind"] in ("check", "train") and head.get("number") == 1 and "clients" in head:
            reply, _ = unpack(client.handle(pack({**head, "largest": largest}, Body.of(tensors))), 1 << 30)
            assert reply["kind"] == {"check": "check", "train": "upload"}[head["kind"]], reply


def in_little_memory(calls: str) -> None:
    """Call functions of this file in a process that cannot take much."""
    code = (
        f"import sys; sys.path[:0] = {PATHS}\n"
        "import resource\nfrom test_claims import *\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        f"most = pages * resource.getpagesize() + {ROOM}\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        f"{calls}\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_server_holds_nothing_for_claimed_samples(tmp_path: Path) -> None:
    of_all = (
        f"for i, name in enumerate(METHODS): served({str(tmp_path)!r} + str(i), name, {MOST_SAMPLES}, 1, 1)"
    )
    in_little_memory(f"{of_all}\nserved({str(tmp_path)!r}, 'personal', 8, {MOST_SAMPLES}, {MOST_SAMPLES})")


def test_a_client_holds_nothing_for_the_samples_of_others(tmp_path: Path) -> None:
    in_little_memory(
        f"for i, name in enumerate(METHODS): asked({str(tmp_path)!r} + str(i), name, {MOST_SAMPLES})"
    )


def test_rows_that_stand_for_samples_are_those_of_the_example() -> None:
    example = experiment().data
    data = standing_for(example, pt.data.Population.make([1 << 30, 3], [2, 1]))
    assert data.sizes().tolist() == [1 << 30, 3]
    assert data.sizes("test").tolist() == [2, 1]
    assert data.rows == max(64, example.rows)
    x, y = data.gather(torch.tensor([0, example.rows - 1]))
    assert torch.equal(x, example.gather(torch.tensor([0, example.rows - 1]))[0])
    assert y.tolist() == [int(example.y[0]), int(example.y[-1])]
