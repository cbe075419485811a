"""Killed at any moment and resumed, a run ends with the same bits as one that was never killed.

As a script this file reads one run per line (the arguments of `job` as JSON), forks for each and reports the
process id, every round and the exit code: real processes to kill, without importing torch for each.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from engine import killed
from partita.core import check, parts
from partita.engine.callbacks import Callback, Event
from partita.engine.stopping import Interrupt
from partita.engine.store import durable
from support import each

CLIENTS = 8
NEVER = 10**6


def pipeline() -> parts.Algorithm:
    return pt.pipeline(
        pt.stage(pt.fedavg(lr=0.2, server=pt.optim.adam(0.02)), rounds=3),
        pt.stage(pt.fedalt("output", lr=0.2, momentum=0.5), rounds=4),
        pt.stage(pt.finetune("output", lr=0.1), epochs=1),
    )


S = pt.schedule
SLOW = S.delays(download=S.exponential(1.0), upload=S.lognormal(4.0), dropout=0.1)
CASES: dict[str, dict[str, Any]] = {
    "memory": {"store": "memory", "checkpoint_every": 1, "rounds": 8},
    "disk": {"store": "disk", "checkpoint_every": 1, "rounds": 8},
    "pipeline memory": {"store": "memory", "checkpoint_every": 2},
    "pipeline disk": {"store": "disk", "checkpoint_every": 1},
    "baselines": {"store": "disk", "checkpoint_every": 2, "rounds": 4, "baselines": True},
    "asynchronous": {
        "store": "disk",
        "checkpoint_every": 1,
        "rounds": 10,
        "schedule": S.asynchronous(concurrency=5, buffer=2, staleness="sqrt", delays=SLOW),
    },
    "private": {  # noise that is taken back later, a clip that follows, and what compression has lost
        "store": "memory",
        "checkpoint_every": 1,
        "rounds": 8,
        "uploads": [pt.privacy.banded(noise=0.5, clip=0.2, quantile=0.5), pt.transforms.topk(0.3)],
    },
    "private by chance": {  # cohorts of any size, which are drawn again; a clip that follows
        "store": "memory",
        "checkpoint_every": 2,
        "rounds": 8,
        "uploads": [pt.privacy.gaussian(noise=0.5, clip=0.2, quantile=0.5)],
    },
    "late": {
        "store": "memory",
        "checkpoint_every": 1,
        "rounds": 8,
        "schedule": S.synchronous(delays=SLOW, deadline=4.0, late="apply", staleness="inverse"),
    },
}
_digits: list[pt.data.FederatedData] = []


def digits() -> pt.data.FederatedData:
    if not _digits:
        partition = pt.data.label_skew(classes=3)
        found = pt.data.digits(CLIENTS, partition, seed=0, validation=0)  # so that baselines alone are short
        _digits.append(found.subset(range(CLIENTS)))
    return _digits[0]


def model() -> nn.Module:
    return pt.models.mlp(64, 8, 10)


def federate(folder: str | Path | None, case: str = "memory", **changed: Any) -> pt.Run:
    method = pipeline() if case.startswith("pipeline") else pt.fedalt("output", lr=0.2, momentum=0.5)
    given: dict[str, Any] = {"model": model(), "data": digits(), "algorithm": method}
    given |= {
        "cohort": 3,
        "steps": 2,
        "batch": 8,
        "executor": "vmap",
        "evaluate_every": 2,
        "baselines": False,
    }
    given |= {"out": folder, **CASES[case], **changed}
    return pt.federate(given.pop("model"), given.pop("data"), given.pop("algorithm"), **given)


# ---- in the child


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Tell(Callback):
    """Reports every round; at the end of one it may wait for a signal."""

    def __init__(self, waits: int | None) -> None:
        self.waits = waits

    def start(self, what: str, round: int, rounds: int) -> None:
        say("start", round, rounds, what)

    def round(self, event: Event) -> None:
        if event.round != self.waits:
            say("round", event.round, event.rounds, event.what)
            return
        signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # it may come before it is waited for
        say("round", event.round, event.rounds, event.what)
        while not signals & signal.sigpending():
            time.sleep(0.001)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def job(
    folder: str,
    case: str,
    at_write: int = killed.NEVER,
    at_call: int | None = None,
    number: int = signal.SIGKILL,
    waits: int | None = None,
) -> None:
    writes = killed.at_write(at_write)
    calls = itertools.count() if at_call is None else killed.at_call(at_call, number)
    federate(folder, case, resume=True, callbacks=[Tell(waits)])
    sys.setprofile(None)
    say("counts", next(writes), next(calls))


def main() -> None:
    torch.set_num_threads(1)
    federate(None, rounds=1)  # what is loaded on first use is loaded once, before the forks
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                job(**json.loads(line))
            except KeyboardInterrupt:
                os._exit(130)
            except SystemExit as stop:
                os._exit(int(stop.code or 0))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        say("pid", pid)
        say("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


# ---- in the parent


class Process:
    """A run in a process of its own."""

    def __init__(self, forks: Forks) -> None:
        self.forks, self.pid, self.code = forks, 0, NEVER
        self.rounds = self.writes = self.calls = 0
        while not self.pid:
            self.read()

    def read(self) -> None:
        """One line of what it reports."""
        word, *rest = self.forks.line().split()
        if word == "pid":
            self.pid = int(rest[0])
        elif word == "exit":
            self.code = int(rest[0])
        elif word == "counts":
            self.writes, self.calls = map(int, rest)
        elif word == "round":
            self.rounds += 1

    def until(self, rounds: int) -> None:
        while self.rounds < rounds and self.code == NEVER:
            self.read()

    def end(self) -> int:
        while self.code == NEVER:
            self.read()
        return self.code


class Forks:
    """Starts runs, one at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that starts runs is gone"
        return line

    def start(self, folder: Path, case: str, **options: int) -> Process:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), "case": case, **options}) + "\n")
        self.process.stdin.flush()
        return Process(self)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    assert forks.process.stdin is not None
    forks.process.stdin.close()
    assert forks.process.wait() == 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """What a case ends with when nothing happens to it."""
    found: dict[str, dict[str, Any]] = {}

    def get(case: str) -> dict[str, Any]:
        if case not in found:
            folder = tmp_path_factory.mktemp("straight") / "run"
            federate(folder, case)
            found[case] = outcome(folder)
        return found[case]

    return get


TIMES = ("seconds", "client_steps_per_second", "peak_memory", "phases")


def outcome(folder: Path) -> dict[str, Any]:
    """All that a finished run left, but for what a clock decides."""
    run = pt.load(folder)
    found: dict[str, Any] = {f"shared {k}": x for k, x in run.shared.items()}
    for i in range(len(run.clients)):
        client = run.client(i)
        found |= {f"personal {i} {k}": x for k, x in client.personal.items()}
        found |= {f"memory {i} {k}": x for k, x in client.memory.items()}
    tensors = durable.read(folder / "checkpoint").tensors
    found |= {k: x for k, x in tensors.items() if k.split("/")[0] in ("base", "opt", "extra")}
    found["metrics"] = [{k: v for k, v in row.items() if k not in TIMES} for row in run.metrics]
    found["summary"] = {k: v for k, v in run.summary().items() if k not in TIMES}
    found["clients"] = (folder / "clients.csv").read_text()
    for baseline in sorted(folder.glob("baselines/*")):
        found |= {f"{baseline.name}: {k}": v for k, v in outcome(baseline).items()}
    return found


def assert_same_bits(folder: Path, expected: dict[str, Any]) -> None:
    got = outcome(folder)
    assert got.keys() == expected.keys()
    for k, x in expected.items():
        if isinstance(x, torch.Tensor):
            assert got[k].dtype == x.dtype, k
            assert torch.equal(got[k], x), k
        else:
            assert got[k] == x, k


# ---- killed


@pytest.fixture(scope="module")
def counts(forks, tmp_path_factory) -> Callable[[str], Process]:
    """How many calls a case makes when nothing happens to it: all of them, and those that change the disk."""
    found: dict[str, Process] = {}

    def get(case: str) -> Process:
        if case not in found:
            folder = tmp_path_factory.mktemp("counts") / "run"
            found[case] = forks.start(folder, case, at_call=killed.NEVER)
            assert found[case].end() == 0
        return found[case]

    return get


def kill_and_resume(forks: Forks, folder: Path, case: str, calls: list[int]) -> int:
    """Kill a run at these calls, each counted from where it was resumed, and resume it until it ends.

    Returns the number of processes that died.
    """
    for attempt, n in enumerate(calls):
        if forks.start(folder, case, at_call=n).end() == 0:  # less than n was left to do
            return attempt
    assert forks.start(folder, case).end() == 0
    return len(calls)


@pytest.mark.parametrize("case", CASES)
def test_killed_at_random_moments(case, forks, counts, straight, tmp_path) -> None:
    rng, most = killed.seeded(), counts(case).calls
    calls = [rng.randrange(most // 2) for _ in range(3)]
    assert kill_and_resume(forks, tmp_path / "run", case, calls) > 0
    assert_same_bits(tmp_path / "run", straight(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_at_random_moments_often(case, forks, counts, straight, tmp_path) -> None:
    rng, most = killed.seeded(), counts(case).calls
    for i in range(15):
        calls = [rng.randrange(most) for _ in range(rng.randint(1, 12))]
        kill_and_resume(forks, tmp_path / f"run{i}", case, calls)
        assert_same_bits(tmp_path / f"run{i}", straight(case))


def die_at(forks: Forks, folder: Path, case: str, n: int) -> None:
    assert forks.start(folder, case, at_write=n).end() == -signal.SIGKILL
    assert forks.start(folder, case).end() == 0


@pytest.mark.parametrize("case", [pytest.param("disk", marks=pytest.mark.slow), "pipeline disk"])
def test_killed_while_it_writes(case, forks, counts, straight, tmp_path) -> None:
    """At calls that change the disk: between two files of a checkpoint, within one, before it is named."""
    rng, writes = killed.seeded(), counts(case).writes
    assert writes > 100
    for n in sorted({0, writes - 1, *rng.sample(range(writes), 3)}):
        die_at(forks, tmp_path / f"run{n}", case, n)
        assert_same_bits(tmp_path / f"run{n}", straight(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_at_calls_all_along_the_run(case, forks, counts, straight, tmp_path) -> None:
    for n in range(killed.seeded().randrange(5), counts(case).writes, 5):
        die_at(forks, tmp_path / "run", case, n)
        assert_same_bits(tmp_path / "run", straight(case))
        shutil.rmtree(tmp_path / "run")


# ---- signals


@pytest.mark.parametrize(
    ("case", "number"),
    [
        ("disk", signal.SIGINT),
        ("pipeline memory", signal.SIGINT),
        ("disk", signal.SIGTERM),
        ("memory", signal.SIGHUP),
    ],
)
def test_interrupted_by_a_signal(case, number, forks, straight, tmp_path) -> None:
    process = forks.start(tmp_path / "run", case, waits=3)
    process.until(3)
    os.kill(process.pid, number)
    assert process.end() == 128 + number
    rounds = process.rounds
    assert rounds == 3  # it was finished, and no other begun
    newest = max(int(p.name) for p in (tmp_path / "run" / "checkpoint").iterdir() if p.name.isdecimal())
    assert newest == rounds
    assert not (tmp_path / "run" / "summary.json").exists()
    process = forks.start(tmp_path / "run", case)
    assert process.end() == 0
    assert process.rounds == 8 - rounds
    assert_same_bits(tmp_path / "run", straight(case))


@pytest.mark.parametrize("case", ["disk", "pipeline memory"])
def test_interrupted_within_a_round(case, forks, counts, straight, tmp_path) -> None:
    n = killed.seeded().randrange(counts(case).calls // 4, counts(case).calls // 2)
    process = forks.start(tmp_path / "run", case, at_call=n, number=signal.SIGINT)
    assert process.end() == 130
    rounds = process.rounds
    assert rounds > 0
    process = forks.start(tmp_path / "run", case)
    assert process.end() == 0
    assert process.rounds == 8 - rounds  # the round in progress was finished, so that none is repeated
    assert_same_bits(tmp_path / "run", straight(case))


class Press(Callback):
    """Presses Ctrl-C in some rounds, or sends another signal."""

    def __init__(self, *rounds: int, what: str = "", times: int = 1, number: int = signal.SIGINT) -> None:
        self.rounds, self.what, self.times, self.number = rounds, what, times, number
        self.seen: list[int] = []

    def round(self, event: Event) -> None:
        self.seen.append(event.round)
        if event.round in self.rounds and event.what.startswith(self.what):
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def stop_at(folder: Path, round: int, case: str, **options: Any) -> None:
    """A run up to the end of a round, by Ctrl-C."""
    with pytest.raises(KeyboardInterrupt):
        federate(folder, case, resume=True, callbacks=[Press(round)], **options)


def test_interrupted_in_every_round(straight, tmp_path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    for round in range(1, 9):
        stop_at(tmp_path / "run", round, "pipeline disk")
        assert signal.getsignal(signal.SIGINT) is handler
    federate(tmp_path / "run", "pipeline disk", resume=True)
    assert_same_bits(tmp_path / "run", straight("pipeline disk"))


def test_interrupted_in_a_baseline(straight, tmp_path) -> None:
    press = Press(2, what="baseline local")
    with pytest.raises(KeyboardInterrupt):
        federate(tmp_path / "run", "baselines", callbacks=[press])
    federate(tmp_path / "run", "baselines", resume=True)
    assert_same_bits(tmp_path / "run", straight("baselines"))


def test_a_second_ctrl_c_stops_at_once(straight, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        federate(tmp_path / "run", "memory", callbacks=[Press(3, times=2)])
    newest = max(int(p.name) for p in (tmp_path / "run" / "checkpoint").iterdir() if p.name.isdecimal())
    assert newest == 2  # the checkpoint of the round was not waited for
    federate(tmp_path / "run", "memory", resume=True)
    assert_same_bits(tmp_path / "run", straight("memory"))


def test_interrupted_without_a_folder() -> None:
    press = Press(2)
    with pytest.raises(KeyboardInterrupt):
        federate(None, "memory", callbacks=[press])
    assert press.seen == [1, 2]


ENDING = {signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_that_ends_the_program_leaves_a_checkpoint(number, straight, tmp_path) -> None:
    before = {n: signal.getsignal(n) for n in ENDING}
    with pytest.raises(SystemExit) as stop:
        federate(tmp_path / "run", "memory", checkpoint_every=100, callbacks=[Press(3, number=number)])
    assert stop.value.code == ENDING[number]
    assert newest(tmp_path / "run").name == "00000003"
    assert {n: signal.getsignal(n) for n in ENDING} == before
    federate(tmp_path / "run", "memory", resume=True)
    assert_same_bits(tmp_path / "run", straight("memory"))


def test_a_second_signal_stops_at_once(tmp_path) -> None:
    with pytest.raises(SystemExit) as stop:
        federate(tmp_path / "run", "memory", callbacks=[Press(3, times=2, number=signal.SIGTERM)])
    assert stop.value.code == 143
    assert newest(tmp_path / "run").name == "00000002"


def test_a_signal_after_the_last_look_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, *ENDING])
def test_a_signal_that_is_ignored_stays_ignored(number) -> None:
    """As `nohup` does with SIGHUP, and a shell with Ctrl-C for what runs in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        press = Press(2, number=number)
        federate(None, "memory", callbacks=[press])
        assert press.seen == list(range(1, 9))
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_what_a_program_does_on_sigterm_is_its_own_business() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        press = Press(2, number=signal.SIGTERM)
        federate(None, "memory", callbacks=[press])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    assert press.seen == list(range(1, 9))


def test_in_another_thread_signals_are_left_alone() -> None:
    seen: list[Any] = []

    class Look(Callback):
        def round(self, event: Event) -> None:  # noqa: ARG002
            seen.append([signal.getsignal(n) for n in ENDING])

    before = [signal.getsignal(n) for n in ENDING]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(federate, None, "memory", rounds=1, callbacks=[Look()]).result()
    assert seen == [before]


# ---- a budget of time


AT_ONCE = 1e-9  # seconds: over after the first round on any machine


def test_time_is_up_after_every_round(straight, tmp_path) -> None:
    for round in range(1, 8):
        with pytest.raises(pt.Stopped) as stop:
            federate(tmp_path / "run", "pipeline disk", resume=True, max_time=AT_ONCE, checkpoint_every=100)
        assert (stop.value.what, stop.value.round, stop.value.rounds) == ("pipeline", round, 8)
        assert str(stop.value) == (
            f"max_time is over: stopped in pipeline at round {round} of 8; go on with resume=True"
        )
        assert newest(tmp_path / "run").name == f"{round:08d}"
    # the last round is done: nothing is left that a checkpoint could be for
    federate(tmp_path / "run", "pipeline disk", resume=True, max_time=AT_ONCE)
    assert_same_bits(tmp_path / "run", straight("pipeline disk"))


def test_the_budget_is_that_of_the_baselines_too(straight, tmp_path) -> None:
    where = []
    while True:
        try:
            federate(tmp_path / "run", "baselines", resume=True, max_time=AT_ONCE)
            break
        except pt.Stopped as stop:
            where.append((stop.what, stop.round))
    # of each run the last round is not followed by a stop
    names = ("baseline global", "baseline local", "fedalt")
    assert where[:3] == [(names[0], n) for n in (1, 2, 3)]
    assert {what for what, _ in where} == set(names)
    assert_same_bits(tmp_path / "run", straight("baselines"))


def test_enough_time_changes_nothing(straight, tmp_path) -> None:
    federate(tmp_path / "run", "memory", max_time="1d")
    assert_same_bits(tmp_path / "run", straight("memory"))
    assert "max_time" not in (tmp_path / "run" / "config.json").read_text()


@each("value", [0, -1, "2 fortnights", "h", "nan", "inf", True, [2], "-3h"])
def test_what_is_no_time(value, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^max_time=.*: expected seconds above 0, or such as"):
        federate(tmp_path / "run", "memory", max_time=value)


def test_durations() -> None:
    known = {
        "90": 90,
        "90s": 90,
        "1.5 min": 90,
        "2h": 7200,
        "2H": 7200,
        "1d": 86400,
        5: 5,
        0.25: 0.25,
        "3m": 180,
    }
    assert {value: check.duration("x", value) for value in known} == known


def test_a_budget_needs_a_place_for_its_checkpoint(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^max_time='2h': expected out="):
        federate(None, "memory", max_time="2h")
    with pytest.raises(ValueError, match=r"^max_time='2h': expected checkpoints"):
        federate(tmp_path / "run", "memory", max_time="2h", checkpoint_every=0)
    assert not (tmp_path / "run").exists()


# ---- threads


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Threaded(nn.Module):
    """A model whose last bits depend on the number of threads, as those of long sums do on some machines."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pt.models.mlp(64, 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + 1e-4 * torch.get_num_threads())


def test_a_resumed_run_has_the_threads_that_it_began_with(threads, tmp_path, monkeypatch) -> None:
    """How sums are split among threads decides their last bits."""
    options = {"executor": "loop", "model": Threaded(), "steps": 1, "batch": None, "rounds": 2}
    options |= {"cohort": 1, "evaluate_every": 100}
    threads(2)
    whole = federate(tmp_path / "whole", "memory", **options)
    assert whole.config["executor"]["threads"] == 2
    stop_at(tmp_path / "run", 1, "memory", **options)
    threads(1)
    other = federate(None, "memory", **options)
    assert not all(torch.equal(other.shared[k], x) for k, x in whole.shared.items()), "no use as a test"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    with pytest.warns(UserWarning, match="began with 2 threads and continues with them: 1 are set now"):
        federate(tmp_path / "run", "memory", resume=True, **options)
    assert torch.get_num_threads() == 1
    assert_same_bits(tmp_path / "run", outcome(tmp_path / "whole"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    with pytest.warns(UserWarning, match="this machine has 1 cores, so it takes longer"):
        federate(tmp_path / "run", "memory", resume=True, **options)


# ---- damage


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    if how == "gone":
        path.unlink()


def newest(folder: Path) -> Path:
    return max(p for p in (folder / "checkpoint").iterdir() if p.name.isdecimal())


DAMAGE = [
    ("tensors.safetensors", "flip"),
    ("state.json", "flip"),
    ("manifest.json", "cut"),
    ("state.json", "gone"),
]
MORE_DAMAGE = [
    ("tensors.safetensors", "cut"),
    ("tensors.safetensors", "gone"),
    ("state.json", "cut"),
    ("manifest.json", "flip"),
    ("manifest.json", "gone"),
]


@each(
    ("case", "file", "how"),
    [(case, *damage) for case in ("memory", "disk", "pipeline memory", "pipeline disk") for damage in DAMAGE]
    + [("memory", *damage) for damage in MORE_DAMAGE],
)
def test_a_damaged_checkpoint_is_passed_over(case, file, how, straight, tmp_path) -> None:
    folder = tmp_path / "run"
    stop_at(folder, 5, case)
    assert newest(folder).name == "00000005"
    damage(newest(folder) / file, how)
    with pytest.warns(UserWarning, match="checkpoint skipped"):
        federate(folder, case, resume=True)
    assert_same_bits(folder, straight(case))


def test_damaged_metrics_are_written_again(straight, tmp_path) -> None:
    """They are in the checkpoint too."""
    folder = tmp_path / "run"
    stop_at(folder, 5, "memory")
    (folder / "metrics.jsonl").write_text("hello\nyou")
    federate(folder, "memory", resume=True)
    assert_same_bits(folder, straight("memory"))
    assert [row["round"] for row in pt.load(folder).metrics] == [2, 4, 6, 8]


def test_damage_after_damage(straight, tmp_path) -> None:
    """What was resumed from stays until something newer is whole: a damaged checkpoint does not count."""
    folder = tmp_path / "run"
    for round in (3, 5):
        stop_at(folder, round, "disk", checkpoint_every=100)
    damage(newest(folder) / "tensors.safetensors", "flip")
    with pytest.warns(UserWarning, match="checkpoint skipped"):
        stop_at(folder, 6, "disk", checkpoint_every=100)
    damage(newest(folder) / "tensors.safetensors", "flip")
    with pytest.warns(UserWarning, match="checkpoint skipped"):
        federate(folder, "disk", resume=True, checkpoint_every=100)
    assert_same_bits(folder, straight("disk"))


def test_older_weights_are_not_loaded_beside_newer_figures(straight, tmp_path) -> None:
    folder = tmp_path / "run"
    federate(folder, "memory")
    damage(newest(folder) / "tensors.safetensors", "flip")
    with (
        pytest.warns(UserWarning, match="checkpoint skipped"),
        pytest.raises(ValueError, match=r"a whole checkpoint of round 8.*newest is of round 7.*resume=True"),
    ):
        pt.load(folder)
    with pytest.warns(UserWarning, match="checkpoint skipped"):
        federate(folder, "memory", resume=True)
    assert pt.load(folder).summary()["rounds"] == 8
    assert_same_bits(folder, straight("memory"))


def test_no_checkpoint_is_whole(tmp_path) -> None:
    folder = tmp_path / "run"
    stop_at(folder, 5, "memory")
    for path in (folder / "checkpoint").iterdir():
        damage(path / "tensors.safetensors", "flip")
    before = sorted(p.name for p in (folder / "checkpoint").iterdir())
    with (
        pytest.warns(UserWarning, match="checkpoint skipped"),
        pytest.raises(ValueError, match="no valid checkpoint"),
    ):
        federate(folder, "memory", resume=True)
    assert sorted(p.name for p in (folder / "checkpoint").iterdir()) == before


# ---- resuming


def test_resume_without_a_run_begins_one(straight, tmp_path) -> None:
    federate(tmp_path / "run", "memory", resume=True)
    assert_same_bits(tmp_path / "run", straight("memory"))


def test_resuming_a_finished_run_changes_nothing(straight, tmp_path) -> None:
    folder = tmp_path / "run"
    for case in ("baselines", "pipeline disk"):
        first = federate(folder, case)
        press = Press()
        again = federate(folder, case, resume=True, callbacks=[press])
        assert press.seen == []
        assert_same_bits(folder, straight(case))
        assert again.clients == first.clients
        assert again.summary()["test"] == first.summary()["test"]
        shutil.rmtree(folder)


def test_a_run_is_never_overwritten(tmp_path) -> None:
    folder = tmp_path / "run"
    stop_at(folder, 2, "memory")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=r"^out=.*: expected a new folder, or resume=True"):
        federate(folder, "memory")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def other_data() -> pt.data.FederatedData:
    return pt.data.digits(CLIENTS, pt.data.label_skew(classes=3), seed=1)


def doubled(output, target):
    return 2 * nn.functional.cross_entropy(output, target)


def nudged() -> pt.data.FederatedData:
    source = digits()
    x = source.x.clone()
    x[:, 3, 3] += 0.01
    return pt.data.FederatedData.make(x, source.y, source.train, source.test, source=source.source)


@each(
    ("changed", "part", "shown"),
    [
        ({"algorithm": pt.fedalt("output", lr=0.3, momentum=0.5)}, "algorithm", "lr: 0.2 -> 0.3"),
        (
            {"algorithm": pt.fedalt("input", lr=0.2, momentum=0.5)},
            "algorithm",
            "personal: 'output' -> 'input'",
        ),
        ({"algorithm": pt.fedavg(lr=0.2)}, "algorithm", "name: 'fedalt' -> 'fedavg'"),
        (
            {"algorithm": pt.fedalt("output", lr=0.2, momentum=0.5, server=pt.optim.adam(1.0))},
            "algorithm",
            "server",
        ),
        ({"seed": 1}, "settings", "seed: 0 -> 1"),
        ({"cohort": 4}, "settings", "cohort: 3 -> 4"),
        ({"steps": 3}, "settings", "steps: 2 -> 3"),
        ({"batch": 9}, "settings", "batch: 8 -> 9"),
        ({"store": "disk"}, "settings", "store: 'memory' -> 'disk'"),
        ({"executor": "loop"}, "settings", "executor: 'vmap' -> 'loop'"),
        ({"data": other_data}, "data", "fingerprint"),
        ({"data": nudged}, "data", "fingerprint"),
        ({"model": lambda: pt.models.mlp(64, 9, 10)}, "model", "tensors"),
        ({"loss": doubled}, "loss", "'cross_entropy' -> 'doubled'"),
        ({"metric": "loss"}, "metric", "'accuracy' -> 'loss'"),
    ],
)
def test_another_run_is_not_resumed(changed, part, shown, tmp_path) -> None:
    folder = tmp_path / "run"
    stop_at(folder, 2, "memory")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    changed = {k: v() if k in ("data", "model") else v for k, v in changed.items()}
    with pytest.raises(pt.Refused) as error:
        federate(folder, "memory", resume=True, **changed)
    assert (error.value.field, error.value.value) == ("resume", True)
    assert f"the same {part}" in error.value.allowed
    assert shown in error.value.reason
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_other_initial_weights_are_another_run(tmp_path) -> None:
    """They decide a result; those of a model that is made by a function follow the seed in every process."""
    stop_at(tmp_path / "run", 3, "memory")
    with pytest.raises(ValueError, match=r"its model \(initial: .*without a seed"):
        federate(tmp_path / "run", "memory", resume=True, model=pt.models.mlp(64, 8, 10, seed=99))
    stop_at(
        tmp_path / "made",
        3,
        "memory",
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10)),
    )
    torch.manual_seed(5)
    federate(
        tmp_path / "made",
        "memory",
        resume=True,
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10)),
    )


def test_frozen_weights_of_another_model_are_noticed(tmp_path) -> None:
    """They are in no checkpoint, so that a model with others would silently train something else."""

    def frozen(seed: int) -> nn.Module:
        made = pt.models.mlp(64, 8, 10, seed=seed)
        made.hidden1.requires_grad_(False)
        return made

    method = pt.fedavg(lr=0.2)
    whole = federate(None, "memory", model=frozen(0), algorithm=method)
    stop_at(tmp_path / "run", 3, "memory", model=frozen(0), algorithm=method)
    try:
        resumed = federate(tmp_path / "run", "memory", resume=True, model=frozen(1), algorithm=method)
    except ValueError:
        return
    assert all(torch.equal(resumed.shared[k], x) for k, x in whole.shared.items())


@pytest.mark.parametrize(
    "method",
    [
        pt.pipeline(pt.stage(pt.local(lr=0.1), rounds=2), pt.stage(pt.fedavg(lr=0.1), rounds=2)),
        pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=2), pt.stage(pt.local(lr=0.1), rounds=2)),
    ],
    ids=["local then fedavg", "fedavg then local"],
)
def test_baselines_do_not_depend_on_the_stage_that_is_resumed(method, tmp_path) -> None:
    options = {"algorithm": method, "rounds": None, "baselines": True}
    federate(tmp_path / "whole", "memory", **options)
    press = Press(3, what="pipeline")
    with pytest.raises(KeyboardInterrupt):
        federate(tmp_path / "run", "memory", callbacks=[press], **options)
    federate(tmp_path / "run", "memory", resume=True, **options)
    assert_same_bits(tmp_path / "run", outcome(tmp_path / "whole"))


@pytest.mark.usefixtures("measured")
def test_auto_goes_on_with_what_it_picked(tmp_path) -> None:
    folder = tmp_path / "run"
    stop_at(folder, 3, "memory", executor="auto")
    state = json.loads((newest(folder) / "state.json").read_text())
    assert state["executor_choices"]
    federate(folder, "memory", executor="auto", resume=True)
    after = json.loads((folder / "config.json").read_text())["executor"]["picks"]
    assert state["executor_choices"].items() <= after.items()


def test_statistics_are_recovered(tmp_path) -> None:
    def norms() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    for norm in ("global", "personal"):
        options = {"model": norms(), "algorithm": pt.fedavgm(lr=0.1), "norm": norm}
        federate(tmp_path / f"whole {norm}", "disk", **options)
        for round in (2, 5):
            stop_at(tmp_path / f"run {norm}", round, "disk", **options)
        federate(tmp_path / f"run {norm}", "disk", resume=True, **options)
        assert_same_bits(tmp_path / f"run {norm}", outcome(tmp_path / f"whole {norm}"))


# ---- save and load


@pytest.mark.parametrize("case", ["memory", "disk", "pipeline memory", "pipeline disk", "nowhere"])
def test_saved_and_loaded(case, tmp_path) -> None:
    if case == "nowhere":
        run = federate(None, "memory")
    else:
        run = federate(tmp_path / "run", case)
    run.save(tmp_path / "copy")
    x = digits().client(0, "test")[0]
    models = {i: run.client(i).model() for i in range(CLIENTS)}
    server = run.model(personal="mean")
    shutil.rmtree(tmp_path / "run", ignore_errors=True)  # the copy stands alone
    loaded = pt.load(tmp_path / "copy", model=model())
    assert dict(loaded.summary()) == dict(run.summary())
    assert str(loaded.summary()) == str(run.summary())
    assert loaded.metrics == run.metrics
    assert loaded.clients == run.clients
    assert loaded.names == run.names
    assert loaded.shared.keys() == run.shared.keys()
    assert all(torch.equal(loaded.shared[k], v) for k, v in run.shared.items())
    np.testing.assert_array_equal(loaded.scores(), run.scores())
    for i in range(CLIENTS):
        one = loaded.client(i)
        assert one.name == str(i)
        assert set(one.personal) == {"output.linear.weight", "output.linear.bias"}
        ours = one.model()
        assert not ours.training
        assert torch.equal(ours(x), models[i](x))
    assert torch.equal(loaded.model(personal="mean")(x), server(x))
    assert len({models[i](x)[0, 0].item() for i in range(CLIENTS)}) > 1
    loaded.save(tmp_path / "again")
    assert_same_bits(tmp_path / "again", outcome(tmp_path / "copy"))


def test_a_folder_of_a_run_is_loaded_where_it_is(tmp_path) -> None:
    run = federate(tmp_path / "run", "disk")
    loaded = pt.load(tmp_path / "run")
    for i in range(CLIENTS):
        a, b = run.client(i).personal, loaded.client(i).personal
        assert all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(pt.Refused, match=r"model=None: .*partita.load\(folder, model=...\)"):
        loaded.client(0).model()


def test_what_cannot_be_loaded_or_saved(tmp_path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="expected the folder of a finished run"):
            pt.load(folder)
    stop_at(tmp_path / "run", 2, "memory")
    with pytest.raises(ValueError, match="expected the folder of a finished run"):
        pt.load(tmp_path / "run")
    run = federate(None, "memory")
    with pytest.raises(ValueError, match=r"^folder=.*this one holds a run already"):
        run.save(tmp_path / "run")
    for number in (-1, CLIENTS, 1.5, None):
        with pytest.raises(ValueError, match=r"^client=.*from 0 up to 7"):
            run.client(number)


if __name__ == "__main__":
    main()
