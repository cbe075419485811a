"""What goes wrong among real clients: each fault is named, and has no effect beyond its client."""

from __future__ import annotations

import errno
import os
import pickle
import re
import struct
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deployed import (
    Recorded,
    assert_same,
    bits_of_deployment,
    clients_of,
    deployed,
    experiment,
    simulated,
)

import partita as pt
from partita.core.check import Refused
from partita.deploy import Arrival, Local, serve
from partita.deploy.states import States
from partita.deploy.wire import Body, pack, unpack
from partita.schedule.clock import Flight
from support import each

Change = Callable[[Arrival, "Lying"], list[Arrival]]
METHOD = pt.fedalt("output", lr=0.1)


class Lying(Recorded):
    """A transport in which what bob answers to training is changed."""

    change_training: Change

    def __init__(self, clients: Any) -> None:
        super().__init__(clients)
        self.replies: list[Arrival] = []
        self.change = self._changed

    def _changed(self, arrival: Arrival) -> list[Arrival]:
        head, _ = unpack(arrival.body, 1 << 30)
        if head["kind"] != "upload":
            return [arrival]
        self.replies.append(arrival)
        return self.change_training(arrival, self) if arrival.name == "bob" else [arrival]


def lying(change: Change) -> Any:
    return type("LyingNow", (Lying,), {"change_training": staticmethod(change)})


def edited(edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]) -> Change:
    """Change what is in bob's uploads."""

    def change(arrival: Arrival, _: Lying) -> list[Arrival]:
        head, tensors = unpack(arrival.body, 1 << 30)
        edit(head, tensors)
        return [arrival._replace(body=pack(head, Body.of(tensors)))]

    return change


def body(make: Callable[[bytes], bytes]) -> Change:
    return lambda arrival, _: [arrival._replace(body=make(arrival.body))]


def filled(value: float) -> Change:
    def edit(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:  # noqa: ARG001
        name = next(k for k in tensors if k.startswith("delta/"))
        tensors[name] = torch.full_like(tensors[name], value)

    return edited(edit)


def first(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Replace a tensor of a part."""

    def edit(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:  # noqa: ARG001
        key = next(k for k in tensors if k.startswith(name))
        tensors[key] = make(tensors[key])

    return edited(edit)


def renamed(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:  # noqa: ARG001
    tensors["delta/other"] = tensors.pop(next(k for k in tensors if k.startswith("delta/")))


def foreign(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:  # noqa: ARG001
    tensors["personal/linear.weight"] = torch.zeros(2)


def replayed(arrival: Arrival, transport: Lying) -> list[Arrival]:
    """Answer the request of now with the first reply that there was."""
    return [arrival._replace(body=transport.replies[0].body)]


def late_event(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:  # noqa: ARG001
    head["event"] += 1


class Evil:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("something was unpickled",))


FAULTS: dict[str, tuple[Change, str]] = {
    "NaN": (filled(float("nan")), "not finite"),
    "infinite": (filled(float("inf")), "not finite"),
    "1e30": (filled(1e30), "too large"),
    "another shape": (first("delta/", lambda x: torch.zeros(3, *x.shape)), "of shape"),
    "another type": (first("delta/", lambda x: x.double()), "of type"),
    "another name": (edited(renamed), "without"),
    "one more part": (edited(foreign), "unknown name"),
    "metrics of another shape": (first("metrics/", lambda x: torch.stack([x, x])), "metrics"),
    "metrics that are not finite": (first("metrics/loss", lambda x: x * float("nan")), "not finite"),
    "another event": (edited(late_event), "another event"),
    "an old reply": (replayed, "another request"),
    "nothing": (body(lambda b: b""), "too large, or broken"),  # noqa: ARG005
    "half of it": (body(lambda b: b[: len(b) // 2]), "header"),
    "more of it": (body(lambda b: b + b"more"), "described"),
    "oversize": (body(lambda b: b + bytes(1 << 20)), "at most"),
    "a long header": (body(lambda b: struct.pack("<Q", 1 << 60) + b), "header"),
    "pickle": (body(lambda b: pickle.dumps(Evil())), "header"),  # noqa: ARG005
    "text": (body(lambda b: b"hello" * 20), "header"),  # noqa: ARG005
    "an error": (body(lambda b: pack({**head_of(b), "kind": "error", "why": "no room"})), "no room"),
    "another kind": (body(lambda b: pack({**head_of(b), "kind": "scores"})), "of kind scores"),
    "a lack of what nobody has": (
        body(lambda b: pack({**head_of(b), "kind": "lacks", "stages": [7]})),
        "lacks what nobody has",
    ),
    "a fault of its own": (body(lambda b: pack({**head_of(b), "fault": "x" * 999})), "a fault of its own"),
}


def head_of(message: bytes) -> dict[str, Any]:
    return unpack(message, 1 << 30)[0]


@cache
def without_bob() -> dict[str, torch.Tensor]:
    """The server's tensors where bob's uploads are never used."""
    return simulated(experiment(attack=pt.attack.nonfinite(), byzantine=["bob"])).shared


@each("name", FAULTS)
def test_a_fault_is_named_and_has_no_effect(name: str, tmp_path: Path) -> None:
    change, reason = FAULTS[name]
    run, _ = deployed(experiment(), tmp_path, lying(change), out=None)
    why = run.facts["excluded_why"]
    assert list(why) == ["bob"]
    assert any(word in why["bob"] for word in reason.split("|")), why
    assert run.facts["clock"]["abandoned"] == 0
    assert_same(run.shared, without_bob())
    assert run.store.touched.tolist() == [0, 2]  # bob begins each time as one that was never seen


def test_a_client_that_lied_once_goes_on_from_where_it_was(tmp_path: Path) -> None:
    lied, transports = [], set()

    def once(arrival: Arrival, transport: Lying) -> list[Arrival]:
        lied.append(arrival)
        transports.add(transport)
        return filled(float("nan"))(arrival, transport) if len(lied) == 2 else [arrival]

    run, clients = deployed(experiment(), tmp_path, lying(once), out=None)
    assert run.facts["excluded_why"] == {"bob": "not finite"}
    assert len(lied) == 3
    heads = [head_of(message) for transport in transports for message in transport.messages]
    asked = [head["address"] for head in heads if head["kind"] == "train" and head["number"] == 1]
    assert [address and address[1] for address in asked] == [None, 0, 0]
    kept = {int(p.name.split("-")[2]) for p in clients["bob"].folder.glob("*/state-*")}
    assert kept == {1, 2}  # the last is that of its third turn; of the first nobody needs anything
    honest, _ = deployed(experiment(), tmp_path / "honest", out=None)
    assert not torch.equal(run.shared["hidden1.linear.weight"], honest.shared["hidden1.linear.weight"])


def test_a_reply_to_nothing_is_ignored(tmp_path: Path) -> None:
    """Unknown requests, and known ones in the name of somebody else."""

    def change(arrival: Arrival, transport: Lying) -> list[Arrival]:  # noqa: ARG001
        unknown = arrival._replace(request="0" * 32, body=b"")
        return [unknown, arrival._replace(name="cy", body=b""), arrival, arrival]

    run, clients = deployed(experiment(), tmp_path, lying(change), out=None)
    assert run.facts["excluded"] == []
    plain, others = deployed(experiment(), tmp_path / "plain", out=None)
    assert_same(bits_of_deployment(run, clients), bits_of_deployment(plain, others))


# ---- the disk of a client


def test_a_full_disk_is_named_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = os.fsync, []

    def fsync(handle: int) -> None:
        if "clients/1/" in os.readlink(f"/proc/self/fd/{handle}"):
            full.append(handle)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    run, clients = deployed(experiment(), tmp_path, out=None)
    assert "No space left" in run.facts["excluded_why"]["bob"]
    assert_same(run.shared, without_bob())
    assert full
    assert list(clients["bob"].folder.glob("*/*")) == []  # nor anything of a file that was begun


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    class Damaging(Recorded):
        def receive(self, timeout: float) -> list[Arrival]:
            for path in (tmp_path / "clients" / "1").glob("*/state-0-0-*"):
                path.write_bytes(path.read_bytes()[:-1] + b"?")
            return super().receive(timeout)

    run, _ = deployed(experiment(), tmp_path, Damaging, out=None)
    assert "is damaged" in run.facts["excluded_why"]["bob"]


# ---- anything from anybody


def random_bodies(count: int, valid: bytes) -> Any:
    """Yield bytes: random ones, and good ones with some of them changed, cut or doubled."""
    rng = np.random.default_rng(0)
    for number in range(count):
        if number % 2:
            yield rng.bytes(int(rng.integers(0, 200)))
            continue
        changed = bytearray(valid)
        for place in rng.integers(0, len(valid) if number % 4 else 400, 1 + number % 5):
            changed[place % len(changed)] = int(rng.integers(256))
        yield bytes(changed[: int(rng.integers(len(changed)))] if number % 8 == 2 else changed)


def test_random_bodies_are_faults_of_their_client(tmp_path: Path) -> None:
    """Each of 10,000 as an answer to a request of its own: a reason, or numbers that are usable."""
    transport: list[Recorded] = []

    def made(clients: Mapping[str, Any]) -> Recorded:
        transport.append(Recorded(clients))
        return transport[0]

    run, _ = deployed(experiment(rounds=1), tmp_path, made, out=None)
    valid = next(b for b in transport[0].messages if head_of(b)["kind"] == "upload")
    assert run.outcome is not None
    fleet: Any = run.outcome.stage.setup.elsewhere
    flight = Flight(end=1.0, number=1, client=1, version=1, repeat=0, begin=0.0, lost=False)
    transport[0].clients = {}  # nobody else answers
    good, begin = 0, time.monotonic()
    for body in random_bodies(10_000, valid):
        fleet.ask(flight, run.outcome.state.server)
        (number, request), *_ = fleet.requests.items()
        head = {**head_of(valid), "id": number, "event": 1} if body[:8] == valid[:8] else {}
        fleet._take(Arrival(request.name, number, _with_id(body, valid, head)))
        row = fleet.answers.pop(1)
        assert fleet.requests == {}
        good += not row.rejection
        assert all(bool(torch.isfinite(x).all()) for x in row.delta.values())
    assert 0 < good < 5_000  # changed digits of a number are another number
    took = time.monotonic() - begin
    print(f"figure: 10,000 random bodies as answers: {10_000 - good} set aside by name, in {took:.1f} s")


def _with_id(body: bytes, valid: bytes, head: dict[str, Any]) -> bytes:
    """Let a changed message answer the request of now, where its header is whole."""
    size = 8 + struct.unpack("<Q", valid[:8])[0]
    if not head or body[:size] != valid[:size]:
        return body
    return pack(head, Body.of(unpack(valid, 1 << 30)[1]))[: -(len(valid) - size)] + body[size:]


def test_a_client_answers_random_bodies(tmp_path: Path) -> None:
    transport: list[Recorded] = []

    def made(clients: Mapping[str, Any]) -> Recorded:
        transport.append(Recorded(clients))
        return transport[0]

    _, clients = deployed(experiment(rounds=1), tmp_path, made, out=None)
    valid = next(b for b in transport[0].messages if head_of(b)["kind"] == "train")
    kinds = set()
    for body in [pickle.dumps(Evil()), *random_bodies(1_000, valid)]:
        kinds.add(head_of(clients["ann"].handle(body))["kind"])
    assert "error" in kinds
    assert kinds <= {"error", "upload", "lacks"}


# ---- another experiment


def test_another_experiment_is_refused_by_name(tmp_path: Path) -> None:
    made, other = experiment(), experiment(algorithm=pt.fedalt("output", lr=0.2))
    clients = {**clients_of(made, tmp_path), "bob": clients_of(other, tmp_path)["bob"]}
    with pytest.raises(Refused, match="bob: another experiment: it differs in its method") as error:
        serve(made, list(clients), Local(clients), None, enrolment=0.1)
    assert error.value.field == "roster"


def test_who_comes_back_with_another_experiment_is_set_aside(tmp_path: Path) -> None:
    other = clients_of(experiment(seed=1), tmp_path)["bob"]

    class Changing(Recorded):
        def send(self, name: str, request: str, *body: bytes) -> None:
            if head_of(b"".join(body))["kind"] == "train":
                self.clients["bob"] = other
            super().send(name, request, *body)

    run, _ = deployed(experiment(), tmp_path, Changing, out=None)
    assert run.facts["excluded_why"] == {"bob": "error there: another experiment"}
    assert_same(run.shared, without_bob())


def test_who_comes_back_with_other_samples_is_set_aside(tmp_path: Path) -> None:
    made = experiment()
    other = clients_of(made, tmp_path)["bob"]
    other.data = made.data.subset([1]).hold_out(0.3)

    class Changing(Recorded):
        def send(self, name: str, request: str, *body: bytes) -> None:
            if head_of(b"".join(body))["kind"] == "train":
                self.clients["bob"] = other
            super().send(name, request, *body)

    run, _ = deployed(made, tmp_path, Changing, out=None)
    assert "sizes" in run.facts["excluded_why"]["bob"]


def test_a_client_that_never_comes_is_named(tmp_path: Path) -> None:
    clients = clients_of(experiment(), tmp_path)
    del clients["bob"]
    with pytest.raises(Refused, match="bob: not connected"):
        serve(experiment(), ["ann", "bob", "cy"], Local(clients), None, enrolment=0.05)


def test_states_can_be_read_by_their_owner_alone(tmp_path: Path) -> None:
    _, clients = deployed(experiment(), tmp_path)
    files = [path for client in clients.values() for path in client.folder.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in files if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in files if path.is_dir()} == {0o700}
    with pytest.raises(ValueError, match="number"):
        States(tmp_path, "../elsewhere")


def test_counts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for sizes in ([1 << 40, 0, 0], [-1, 0, 0], [5], "many", [True, 0, 0]):
        made = experiment()

        class Boasting(Recorded):
            def __init__(self, clients: Mapping[str, Any]) -> None:
                super().__init__(clients)
                self.change = self._boast

            def _boast(self, arrival: Arrival, sizes: Any = sizes) -> list[Arrival]:
                head = head_of(arrival.body)
                if head["kind"] == "hello" and arrival.name == "bob":
                    arrival = arrival._replace(body=pack({**head, "sizes": sizes}))
                return [arrival]

        with pytest.raises(Refused, match="bob: counts of samples that cannot be"):
            deployed(made, tmp_path, Boasting, out=None)


def test_pinned_counts_are_those_that_count(tmp_path: Path) -> None:
    """A client that has others than the roster says is told so, each time; it counts for nothing."""
    made = experiment()
    sizes = {split: made.data.sizes(split) for split in ("train", "validation", "test")}
    train = sizes["train"].copy()
    train[1] += 1
    clients = clients_of(made, tmp_path)
    pinned = [
        pt.data.Population.make(n, sizes["test"], list(clients), n_validation=sizes["validation"])
        for n in (sizes["train"], train)
    ]
    run = serve(made, pinned[0], Local(clients), None, report=False)
    assert_same(run.shared, simulated(made).shared)
    run = serve(made, pinned[1], Local(clients_of(made, tmp_path / "other")), None, report=False)
    assert run.facts["excluded_why"] == {"bob": "error there: sizes was refused there"}


def test_who_says_other_counts_than_the_roster_is_not_enrolled(tmp_path: Path) -> None:
    """The message says who, what it says and what was expected; a run does not go on with other counts."""
    made = experiment()
    counts = {n: client.sizes for n, client in clients_of(made, tmp_path / "other").items()}
    more = {"bob": [counts["bob"][0] + 1, *counts["bob"][1:]]}
    told = f"bob: it says that it has {counts['bob']} samples, and the roster that it has {more['bob']}"
    with pytest.raises(Refused, match=re.escape(told)):
        deployed(made, tmp_path / "refused", samples=more)
    run, _ = deployed(made, tmp_path, samples={"bob": counts["bob"]})
    assert_same(run.shared, simulated(made).shared)
    with pytest.raises(Refused, match="that bob was enrolled with"):
        deployed(made, tmp_path, samples=more, resume=True)


# ---- who says that it lacks something


PIPELINE = pt.pipeline(pt.stage(pt.fedavg(0.1), rounds=1), pt.stage(METHOD, rounds=2))


class Lacking(Recorded):
    """A transport in which bob's replies of one kind, in a stage, say that it lacks the models of stages."""

    kind, stage, stages = "upload", 0, [1]
    most = 1 << 30  # replies of these, after which bob says nothing more

    def __init__(self, clients: Mapping[str, Any]) -> None:
        super().__init__(clients)
        self.asked: dict[str, dict[str, Any]] = {}
        self.changed = 0
        self.change = self._lacking

    def send(self, name: str, request: str, *body: bytes) -> None:
        if name == "bob":
            self.asked[request] = head_of(b"".join(body))
        super().send(name, request, *body)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """What bob was asked of a kind."""
        return [head for head in self.asked.values() if head["kind"] == kind]

    def _lacking(self, arrival: Arrival) -> list[Arrival]:
        head = head_of(arrival.body)
        asked = self.asked.get(arrival.request, {})
        if arrival.name != "bob" or head["kind"] != self.kind or asked.get("stage", 0) != self.stage:
            return [arrival]
        self.changed += 1
        changed = arrival._replace(body=pack({**head, "kind": "lacks", "stages": self.stages}))
        return [changed] if self.changed <= self.most else []


def lacking(**about: Any) -> Callable[[Mapping[str, Any]], Lacking]:
    return type("LackingNow", (Lacking,), about)


@each("kind", ["hello", "check"])
def test_who_lacks_something_before_a_run_begins_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="bob: a reply of kind lacks"):
        deployed(experiment(), tmp_path, lacking(kind=kind), out=None)


def in_pipeline(folder: Path, **about: Any) -> tuple[pt.Run, Lacking]:
    """Run a pipeline, in whose second stage bob says that it lacks something."""
    transports: list[Lacking] = []

    def made(clients: Mapping[str, Any]) -> Lacking:
        transports.append(lacking(stage=1, **about)(clients))
        return transports[0]

    run, _ = deployed(experiment(algorithm=PIPELINE, rounds=None), folder, made, out=None, patience=0.2)
    return run, transports[0]


def test_a_model_that_was_sent_is_not_sent_again_for_its_receipt(tmp_path: Path) -> None:
    run, transport = in_pipeline(tmp_path, kind="stage")
    assert run.facts["excluded_why"] == {}
    assert transport.changed == len(transport.of("stage")) == 1


@each("stages", [[1] * 20_000, [1, 1], [True], [2], [0], [], "1"])
def test_what_is_lacked_is_named_once_for_each_stage(stages: Any, tmp_path: Path) -> None:
    run, transport = in_pipeline(tmp_path, kind="upload", stages=stages)
    assert run.facts["excluded_why"]["bob"] in (
        "it lacks what nobody has",
        "a header longer than its message, or than a header may be",
    )
    assert len(transport.of("stage")) == 1  # that of the first turn, which it lacks in truth


def test_who_lacks_the_same_for_ever_is_set_aside(tmp_path: Path) -> None:
    run, transport = in_pipeline(tmp_path, kind="upload")
    assert run.facts["excluded_why"] == {"bob": "it goes on lacking what it was sent"}
    assert len(transport.of("stage")) <= 2 * 2  # of each of its two turns


def test_a_question_that_was_asked_again_is_cancelled_with_the_first(tmp_path: Path) -> None:
    """Nobody waits any more for what comes after the end of an evaluation."""
    run, transport = in_pipeline(tmp_path, kind="scores", most=1)
    assert transport.changed >= 2
    assert run.outcome is not None
    fleet: Any = run.outcome.stage.setup.elsewhere
    assert fleet.requests == {}
