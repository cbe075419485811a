"""Other packages in the bench: those that are there are measured, and none of them can stop it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import peers
from adapters import PEERS, Peer, choose, worker
from adapters.job import ClassesSecond, Job, samples
from adapters.process import Speed, Turns, measured
from partita.cli.bench import WORKLOADS
from support import each

JOB = Job("logistic", "cpu", "tf32", 2)
STEPS = 50 * 20  # of a round of logistic on a CPU
GOOD = "def rounds(job):\n    return [0.5 * i for i in range(job.rounds + 1)]\n"
BROKEN = "def rounds(job):\n    raise ValueError('a [very]\\n  bad day')\n"
Make = Callable[[str, str], str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Stand-ins for packages: a name and what is in it."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.setitem(PEERS, name, Peer(name.title(), (name,), name))
        return name

    return add


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the real ones."""
    for name in list(PEERS):
        monkeypatch.delitem(PEERS, name)


def told(tmp_path: Path, adapter: str, job: Job = JOB) -> dict[str, object]:
    """What the process of a peer writes, without the process."""
    worker.main(adapter, json.dumps(job), str(tmp_path / "found.json"))
    return dict(json.loads((tmp_path / "found.json").read_text()))


# ---- which


@pytest.mark.usefixtures("only")
def test_chosen_are_those_that_are_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make("one_peer", GOOD)
    monkeypatch.setitem(PEERS, "absent", Peer("Absent", ("no_such_module_anywhere",), "absent"))
    monkeypatch.setitem(PEERS, "half", Peer("Half", ("one_peer", "no_such_module_anywhere"), "half"))
    assert choose("installed") == (["one_peer"], ["absent", "half"])
    assert choose("one_peer") == (["one_peer"], [])
    assert choose(" half, one_peer,half") == (["one_peer"], ["half"])
    assert choose("none") == ([], [])


@each("text", ["flower", "", "pfl,", "none,pfl", "pfl,installed"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--peers"):
        choose(text)


def test_every_peer_has_its_adapter() -> None:
    """The adapters import nothing of theirs before they run."""
    for peer in PEERS.values():
        assert callable(importlib.import_module(peer.adapter).rounds)


# ---- what a peer is given


def test_a_job_names_the_work() -> None:
    data = JOB.data()
    x, y = samples(data, 3)
    assert (x.shape, y.shape) == ((400, 784), (400,))
    for name in WORKLOADS:
        job = Job(name, "cpu", "tf32", 1)
        assert int(job.work.clients * job.share) == job.work.cohort


def test_classes_come_second() -> None:
    for name, shape in {"logistic": (2, 10), "transformer": (2, 10004, 20)}.items():
        work = WORKLOADS[name]
        x, _ = work.data().gather(torch.arange(2))
        assert ClassesSecond(work.model())(x).shape == shape


# ---- what comes of it


def test_seconds_are_those_between_the_ends_of_rounds(make: Make, tmp_path: Path) -> None:
    assert told(tmp_path, make("good_peer", GOOD)) == {"seconds": [0.5, 0.5]}


@each(
    ("text", "error"),
    [
        (BROKEN, "ValueError: a [very]\n  bad day"),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("def rounds(job):\n    raise SystemExit", "SystemExit"),
        ("def rounds(job):\n    return [1.0]", "RuntimeError: it ended after 1 of 3 rounds"),
        (
            "from adapters import job\ndef rounds(_):\n    raise job.Declined('no such model')",
            "no such model",
        ),
    ],
)
def test_what_goes_wrong_is_told(make: Make, tmp_path: Path, text: str, error: str) -> None:
    name = make(f"bad_peer_{abs(hash(text))}", text)  # a module is imported once
    assert told(tmp_path, name) == {"error": error}


def test_fedjax_declines_models_that_it_has_not(tmp_path: Path) -> None:
    found = told(tmp_path, "adapters.fedjax", Job("resnet20", "cpu", "tf32", 1))
    assert found == {"error": "no resnet20 is written in Haiku here"}


def test_in_a_process_of_its_own(make: Make) -> None:
    turns = Turns(make("good_peer", GOOD), JOB)
    turns.measure()
    assert turns.speed().steps == STEPS / 0.5
    assert len(turns.seconds) == 2


def test_a_crash_is_an_error_and_the_peer_is_not_asked_again(make: Make) -> None:
    turns = Turns(make("dead_peer", "import os\ndef rounds(job):\n    os._exit(7)\n"), JOB)
    turns.measure()
    assert turns.speed() == Speed(None, "its process ended with code 7")
    turns.name = "nobody"  # whom to ask would be an error
    turns.measure()


def test_too_long_is_an_error(make: Make) -> None:
    name = make("slow_peer", "import time\ndef rounds(job):\n    time.sleep(600)\n")
    assert measured(name, JOB, limit=0.5) == ([], "no result after 0.5 s")


# ---- the command

Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """What `python bench/peers.py` prints, with as little work as there can be."""
    little = WORKLOADS["logistic"]._replace(cohort=2, steps=1, batch=2, rounds=1, clients=4)
    monkeypatch.setitem(WORKLOADS, "logistic", little)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words: str) -> str:
        fixed = ("--device", "cpu", "--executor", "loop", "--repeats", "1")
        peers.main(["logistic", *fixed, *words])
        return capsys.readouterr().out

    return call


@pytest.mark.slow
@pytest.mark.usefixtures("only")
def test_the_command_shows_speeds_and_errors_and_who_is_missing(
    make: Make, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("good_peer", GOOD)
    make("broken_peer", BROKEN)
    monkeypatch.setitem(PEERS, "absent", Peer("Absent", ("no_such_module_anywhere",), "absent"))
    shown = command()
    assert "Good_Peer" in shown
    assert "ValueError: a [very] bad day" in " ".join(shown.split())
    assert "not installed, so left out: absent" in shown
    row = json.loads(command("--json"))
    assert row["peers"]["good_peer"] == {"steps": 2 / 0.5, "error": None}
    assert row["peers"]["broken_peer"] == {"steps": None, "error": "ValueError: a [very] bad day"}
    assert row["not_installed"] == ["absent"]


@pytest.mark.usefixtures("only")
def test_none_means_none(make: Make, command: Command) -> None:
    make("good_peer", GOOD)
    shown = command("--peers", "none")
    assert "Good_Peer" not in shown
    assert "left out" not in shown
    assert json.loads(command("--peers", "none", "--json"))["peers"] == {}


def test_wrong_words_end_with_code_2(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--peers", "nobody"), ("resnet",), ("--repeats", "0")):
        with pytest.raises(SystemExit) as end:
            command(*words)
        assert end.value.code == 2
        assert words[-1] in capsys.readouterr().err
