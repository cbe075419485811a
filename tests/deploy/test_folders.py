"""A client's folder: which states stay, who may write, which run is exported, what no server can do to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_experiment
import torch
from deployed import Recorded, assert_same, clients_of, deployed, experiment, simulated
from test_deployed_recovery import ASYNCHRONOUS, DATA, Kill, Killed
from test_live import _is

import partita as pt
from partita.core.check import Refused
from partita.core.types import ClientState
from partita.deploy import Arrival, Client, Local, folder, serve
from partita.deploy import keys as deployed_keys
from partita.deploy.folder import write_private
from partita.deploy.states import NEWEST, States
from partita.deploy.wire import Malformed, pack, unpack
from partita.engine.store.addresses import Address
from partita.schedule.clock import Event
from support import Command

RUN = "0" * 31 + "1"
EXPERIMENT = str(Path(__file__).parent / "small_experiment.py")


def head_of(message: bytes) -> dict[str, Any]:
    return unpack(message, 1 << 30)[0]


def states_of(folder: Path, events: list[Event]) -> tuple[States, list[Address]]:
    """States of events, written in this order."""
    states = States(folder, RUN)
    addresses = [Address(0, event.number, 7) for event in events]
    for address in addresses:
        states.save(address, ClientState({"x": torch.zeros(2)}, {}))
    return states, addresses


# ---- which states stay


def test_events_are_compared_by_their_versions(tmp_path: Path) -> None:
    """Who is asked twice at one version has an event with a large number, and smaller ones follow."""
    events = [Event(0), Event(3), Event(3, 1), Event(4), Event(5), Event(6)]
    states, addresses = states_of(tmp_path, events)
    states.prune([addresses[2]], addresses[3])
    assert states.here() == addresses[1:]
    states.prune([addresses[3]], addresses[4])
    assert states.here() == addresses[3:]


def test_what_was_just_saved_stays_whatever_the_clock_says(tmp_path: Path) -> None:
    states, addresses = states_of(tmp_path, [Event(n) for n in range(5)])
    os.utime(states.folder / "state-0-0-7", ns=(1, 1))
    states.prune([addresses[4]], saved=addresses[0])
    assert addresses[0] in states.here()
    assert addresses[1] not in states.here()


def test_a_server_cannot_make_a_client_forget_its_newest_states(tmp_path: Path) -> None:
    states, addresses = states_of(tmp_path, [Event(n) for n in range(5)])
    for kept in ([], [Address(0, 1 << 39, 1)], [Address(0, 4, 8)], [addresses[-1]]):
        states.prune(kept)
        assert states.here()[-NEWEST:] == addresses[-NEWEST:]
    with pytest.raises(Malformed, match="a state of version 5 to keep, where the newest is of version 4"):
        states.refuse_unknown([Address(0, 5, 7)])


def test_states_that_nobody_names_do_not_fill_a_disk(tmp_path: Path) -> None:
    """Those of turns that always come too late, for example."""
    states, _ = states_of(tmp_path, [Event(n) for n in range(40)])
    states.prune([])
    assert len(states.here()) == 16


class Blip(Recorded):
    """What bob sends in his second turn is lost with his process; he is back soon, and asked again."""

    turns, looks, away = 0, 0, 0

    def present(self) -> frozenset[str]:
        return frozenset(self.clients) - ({"bob"} if self.looks < self.away else set())

    def receive(self, timeout: float) -> list[Arrival]:
        self.looks += 1
        found = []
        for arrival in super().receive(timeout):
            self.turns += (bob := _is(arrival, "bob", "upload"))
            if bob and self.turns == 2:
                self.away = self.looks + 20
                continue
            found.append(arrival)
        return found


def test_a_client_that_is_given_up_and_asked_again_at_one_version_keeps_its_state(tmp_path: Path) -> None:
    transports: list[Blip] = []

    def made_of(clients: Mapping[str, Client]) -> Blip:
        transports.append(Blip(clients))
        return transports[-1]

    schedule = pt.schedule.asynchronous(concurrency=3, buffer=3)
    made = experiment(schedule=schedule, rounds=8, evaluate_every=8)
    run, clients = deployed(made, tmp_path, made_of, out=None, patience=0.05)
    heads = [head_of(m) for m in transports[0].messages]
    events = [h["event"] for h in heads if h["kind"] == "train" and h["number"] == 1]
    assert sorted(events) != events  # which is what this test is about
    assert run.facts["clock"]["lost"] == 1
    assert run.facts["excluded_why"] == {}
    clients["bob"].model()


def test_what_had_been_answered_at_a_checkpoint_can_be_used_again(tmp_path: Path) -> None:
    """Answers that wait for the buffer are of states that no checkpoint's store knows."""
    shape = {"model": pt.models.mlp(6, 5, 4, seed=1), "data": DATA, "algorithm": pt.fedalt("output", 0.1)}
    for checkpoints in (2, 3, 4, 5):
        made = experiment(
            **shape, schedule=ASYNCHRONOUS, rounds=12, evaluate_every=12, checkpoint_every=checkpoints
        )
        plain, _ = deployed(made, tmp_path / f"plain {checkpoints}", out=None)
        place = tmp_path / str(checkpoints)
        for after in (2 * checkpoints - 1, None):
            clients = clients_of(made, place)
            options = {"resume": after is None, "callbacks": [Kill(after)] if after else [], "report": False}
            if after is None:
                run = serve(made, list(clients), Local(clients), place / "out", **options)
            else:
                with pytest.raises(Killed):
                    serve(made, list(clients), Local(clients), place / "out", **options)
        assert run.facts["excluded_why"] == {}
        assert_same(run.shared, plain.shared)


# ---- whose folder it is


def test_a_folder_is_of_one_client(tmp_path: Path) -> None:
    made = experiment()
    deployed(made, tmp_path)
    with pytest.raises(Refused, match="it has the states of client 'bob': give 'cy' a folder= of its own"):
        Client(made, "cy", made.data, tmp_path / "clients" / "1").hold()
    both = Client(made, "ann", made.data, tmp_path / "both"), Client(made, "cy", made.data, tmp_path / "both")
    both[0].hold()
    with pytest.raises(Refused, match="states of client 'ann'"):
        both[1].hold()


def holder(place: Path, then: str) -> subprocess.Popen[str]:
    """A process that has a folder."""
    code = f"from partita.deploy.folder import *; h = hold(Path({str(place)!r}), 'a'); print(1, flush=True)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", f"{code}; {then}"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)


def test_one_process_writes_to_a_folder(tmp_path: Path, partita: Command) -> None:
    """A second client of a site is refused at once, and export beside a running one changes nothing."""
    deployed_keys.make(tmp_path, ["a"])
    site, place = tmp_path / "a" / "site.toml", tmp_path / "a" / "state"
    with holder(place, "input()") as other:
        assert other.stdout
        assert other.stdout.readline()
        _while_another_has_it(place, site, tmp_path, partita)
        other.communicate("\n")
    one = Client(small_experiment.experiment(), "a", small_experiment.data("a"), place)
    one.hold()
    assert not list(place.glob("*/.*"))  # by a client that was killed


def _while_another_has_it(place: Path, site: Path, tmp_path: Path, partita: Command) -> None:
    assert place.stat().st_mode & 0o777 == 0o700
    refused = partita("deploy", "client", EXPERIMENT, "--site", str(site), "--give-up", "5s")
    assert refused.returncode == 2
    assert "a client runs there already: end it first" in refused.stderr
    being_written = place / RUN / ".state-0-0-7.tmp"
    being_written.parent.mkdir()
    being_written.touch()
    partita("deploy", "export", EXPERIMENT, "--site", str(site), "--to", str(tmp_path / "model"))
    assert being_written.exists()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    holder(tmp_path / "x", "os._exit(1)").communicate()
    folder.hold(tmp_path / "x", "a")


# ---- runs


def test_an_unfinished_run_does_not_hide_a_finished_model(tmp_path: Path) -> None:
    made = experiment()
    _, clients = deployed(made, tmp_path, out="first")
    (first,) = clients["bob"].runs()
    expected = clients["bob"].model()
    with pytest.raises(Killed):
        deployed(replace(made, rounds=2), tmp_path, out="second", callbacks=[Kill(1)])
    assert len(clients["bob"].runs(ended=False)) == 2
    assert clients["bob"].runs() == [first]
    assert_same(clients["bob"].model(), expected)
    _, others = deployed(replace(made, rounds=2), tmp_path, out="third")
    third = others["bob"].runs()[-1]
    assert third != first
    assert_same(others["bob"].model(), simulated(replace(made, rounds=2)).personalized(1))
    assert_same(clients["bob"].model(first[:8]), expected)
    path = clients["bob"].export(tmp_path / "bob.safetensors", first)
    assert first.encode() in path.read_bytes()[:2000]
    with pytest.raises(Refused, match="one of the runs that have ended here"):
        clients["bob"].model("f" * 32)


def test_a_run_that_goes_on_keeps_the_model_of_its_first_end(tmp_path: Path) -> None:
    made = experiment(checkpoint_every=1)
    _, clients = deployed(made, tmp_path)
    expected = clients["bob"].model()
    with pytest.raises(Killed):
        deployed(replace(made, rounds=9), tmp_path, resume=True, callbacks=[Kill(8)])
    assert_same(clients["bob"].model(), expected)
    _, clients = deployed(replace(made, rounds=9), tmp_path, resume=True)
    assert_same(clients["bob"].model(), simulated(replace(made, rounds=9)).personalized(1))


def test_export_says_which_run_it_is_of(tmp_path: Path, partita: Command) -> None:
    deployed_keys.make(tmp_path, ["a"])
    place = tmp_path / "a" / "state"
    made = small_experiment.experiment(rounds=1)
    clients = {"a": Client(made, "a", small_experiment.data("a"), place)}
    serve(made, ["a"], Local(clients), None, report=False, progress=False)
    (run,) = clients["a"].runs()
    (place / ("e" * 32)).mkdir()
    os.utime(place / run, ns=(1, 1))
    words = ("deploy", "export", EXPERIMENT, "--site", str(tmp_path / "a" / "site.toml"))
    words = (*words, "--set", "rounds=1", "--to")
    for name, *more in (("one",), ("two", "--run", run[:6])):
        done = partita(*words, str(tmp_path / name), *more)
        assert done.returncode == 0, done.stderr
        assert f"of client a of run {run}" in done.stdout
        assert f"Run {'e' * 32} is newer and has not ended here" in " ".join(done.stdout.split())
    done = partita(*words, str(tmp_path / "three"), "--run", "eeee")
    assert done.returncode == 2
    assert run in done.stderr
    before = (tmp_path / "one").read_bytes()
    for path, told in (("one", "does not exist yet"), ("none/model", f"mkdir -p {tmp_path / 'none'}")):
        done = partita(*words, str(tmp_path / path))
        assert done.returncode == 2
        assert f"--to={str(tmp_path / path)!r}" in done.stderr
        assert told in " ".join(done.stderr.split())
        with pytest.raises(Refused, match="path="):
            clients["a"].export(tmp_path / path)
    assert (tmp_path / "one").read_bytes() == before


def test_what_is_made_is_on_disk_with_the_folders_that_lead_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file is on disk when its folder says so, and that one when its own does."""
    synced, sync = set[str](), os.fsync

    def fsync(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}").partition(".tmp")[0])
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    place = tmp_path / "new" / "state"
    held = folder.hold(place, "ann")
    folder.new_run(place / RUN)
    assert {str(path) for path in (tmp_path, tmp_path / "new", place)} <= synced
    del held
    keys = tmp_path / "keys"
    deployed_keys.make(keys, ["ann"])
    files = [path for path in keys.rglob("*") if path.name != "roster.toml"]
    assert {str(path) for path in files} <= synced
    assert any(name.startswith(str(keys / "server" / ".roster.toml")) for name in synced)


# ---- what a lying server cannot do


def train_requests(tmp_path: Path) -> tuple[Client, list[bytes]]:
    transports: list[Recorded] = []

    def made_of(clients: Mapping[str, Client]) -> Recorded:
        transports.append(Recorded(clients))
        return transports[-1]

    _, clients = deployed(experiment(), tmp_path, made_of)
    asked = [m for m in transports[0].messages if head_of(m)["kind"] == "train" and head_of(m)["number"] == 1]
    return clients["bob"], asked


def changed(message: bytes, **head: Any) -> bytes:
    from partita.deploy.wire import Body

    old, tensors = unpack(message, 1 << 30)
    return pack({**old, **head}, Body.of(tensors))


def test_a_request_that_names_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    bob, asked = train_requests(tmp_path)
    before = sorted(path.name for path in bob.folder.glob("*/state-*"))
    future = [*head_of(asked[-1])["kept"], [0, 1000, 5]]
    for kept, told in ((future, "of version 1000 to keep"), ([[0, 1, 1]] * 9, "9 states to keep")):
        reply = head_of(bob.handle(changed(asked[-1], kept=kept)))
        assert reply["kind"] == "error"
        assert told in reply["why"]
    assert sorted(path.name for path in bob.folder.glob("*/state-*")) == before


def test_a_server_cannot_fill_a_disk_with_runs_or_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MOST_RUNS", 3)
    bob, asked = train_requests(tmp_path)
    replies = [head_of(bob.handle(changed(asked[0], run=f"{n:032x}"))) for n in range(1, 5)]
    assert [reply["kind"] for reply in replies] == ["upload", "upload", "error", "error"]
    assert replies[-1]["why"] == "folder was refused there"
    assert len(bob.runs(ended=False)) == 3
    for stage, body in ((1 << 40, asked[0]), (0, pack(head_of(asked[0])))):
        reply = head_of(bob.handle(changed(body, kind="stage", stage=stage)))
        assert reply["kind"] == "error"
    assert not list(bob.folder.glob("*/stage-*"))


def test_a_model_of_states_that_are_gone_is_not_kept_as_the_last(tmp_path: Path) -> None:
    bob, asked = train_requests(tmp_path)
    last = bob.folder / bob.runs()[0] / "last"
    before = last.read_bytes()
    reply = head_of(bob.handle(changed(asked[-1], kind="last", address=[0, 1, 99])))
    assert "is not on this client's disk" in reply["why"]
    assert last.read_bytes() == before


def test_a_private_file_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it is written to at first, which an attacker might guess, nor at its place."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "model").symlink_to(victim)
    write_private(tmp_path / "model", b"model")
    assert victim.read_text() == "untouched"
    assert not (tmp_path / "model").is_symlink()
    monkeypatch.setattr("secrets.token_hex", lambda n: "guessed")  # noqa: ARG005
    (tmp_path / ".model.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "model", b"model")
    assert victim.read_text() == "untouched"


def test_the_owner_of_a_folder_is_written_down(tmp_path: Path) -> None:
    _, clients = deployed(experiment(), tmp_path)
    assert (clients["cy"].folder / "owner").read_text() == "cy\n"
    assert clients["cy"].folder.stat().st_mode & 0o777 == 0o700
    told = json.loads((tmp_path / "out" / "deployment" / "told.json").read_text())
    assert told["clients"] == ["ann", "bob", "cy"]
