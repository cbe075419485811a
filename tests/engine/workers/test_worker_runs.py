"""Runs over workers are the runs of one process; what workers raise, warn of and decide reaches the user."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import golden
import partita as pt
from engine.workers.dying import Dying
from partita.core import check
from partita.engine.execute import Task
from partita.engine.workers import crew as crews
from support import Command, Stop, each, tensors

TOLERANCE = 1e-5  # of sums that were added up in another order, after some rounds
EXACT = ("rfa, vmap", "fedbuff, asynchronous", "fedavg, depth", "sign flip, bucketing", "fedavg, deadline")
"""Every delta comes back: the same bits."""
SHORT = (*EXACT, "fedalt, loop", "scaffold, vmap", "fedavg, BatchNorm, static", "pipeline, vmap", "measures")


@pytest.fixture(scope="module", autouse=True)
def workers_stay() -> Iterator[None]:
    """Let the workers of one test serve the next one."""
    with crews.staying():
        yield


def data(clients: int = 6, validation: float = 0.1) -> pt.data.FederatedData:
    partition = pt.data.label_skew(classes=4)
    return pt.data.digits(clients=clients, partition=partition, validation=validation, seed=0)


def federate(algorithm: Any = None, samples: Any = None, **settings: Any) -> pt.Run:
    usual: dict[str, Any] = {
        "rounds": 3, "steps": 2, "batch": 8, "seed": 0, "executor": "vmap", "device": "cpu",
        "baselines": False, "progress": False, "report": False,
    }  # fmt: skip
    model = settings.pop("model", None) or pt.models.mlp(64, 8, 10, seed=0)
    return pt.federate(model, samples or data(), algorithm or pt.fedavg(lr=0.1), **{**usual, **settings})


def apart(a: pt.Run, b: pt.Run) -> float:
    ours, theirs = tensors(a), tensors(b)
    assert list(ours) == list(theirs)
    return max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours)


def compare_golden(names: Any, folder: Path, workers: Any) -> None:
    alone, spread = golden.runs(), golden.runs(workers=workers)
    for name in names or alone:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a, b = alone[name](folder / f"{name} alone"), spread[name](folder / f"{name} spread")
        assert apart(a, b) <= (0.0 if name in EXACT else TOLERANCE), name
        for key in ("bytes_up", "bytes_down", "excluded", "hurt", "rounds"):
            assert a.summary()[key] == b.summary()[key], (name, key)
        did = b.config["executor"]["workers"]["each"]
        assert sum(worker["shares"] for worker in did) > 0, name


def test_golden_runs(tmp_path: Path) -> None:
    compare_golden(SHORT, tmp_path, 2)


@pytest.mark.slow
def test_all_golden_runs(tmp_path: Path) -> None:
    compare_golden(None, tmp_path, 2)


def test_one_round_of_sums_is_that_of_one_process() -> None:
    assert apart(federate(rounds=1), federate(rounds=1, workers=2)) <= 1e-6


@each("executor", ["loop", "pool", "vmap", "graph"])
def test_all_deltas_have_the_same_bits(executor: str) -> None:
    method = pt.fedavg(lr=0.1, aggregate=pt.aggregate.trimmed_mean(1))
    assert apart(federate(method, executor=executor), federate(method, executor=executor, workers=2)) == 0.0


def test_the_number_of_workers_changes_nothing() -> None:
    runs = [federate(shares=3, workers=workers) for workers in (None, 1, 2)]
    assert apart(runs[0], runs[1]) == apart(runs[1], runs[2]) == 0.0


def test_screening_is_done_where_clients_train() -> None:
    samples = data()
    x = samples.x.clone()
    start, length = samples.train[2].tolist()
    x[start : start + length] = 1e30
    bad = pt.data.FederatedData(
        x, samples.y, samples.train, samples.validation, samples.test, samples.names, samples.source
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = federate(samples=bad), federate(samples=bad, workers=2)
    assert list(a.summary()["excluded"]) == list(b.summary()["excluded"]) == ["2"]
    assert apart(a, b) <= TOLERANCE


@pytest.mark.usefixtures("brief_baselines")
def test_baselines_and_evaluations_are_spread() -> None:
    method = pt.fedalt(personal="output", lr=0.1)
    a, b = (federate(method, baselines=True, patience=1, workers=workers) for workers in (None, 2))
    for kind in ("global", "local", "personal"):
        assert a.summary()["test"][kind] == pytest.approx(b.summary()["test"][kind], abs=1e-3)


# ---- what workers say


class Marked(RuntimeError):
    """An error of the user's own."""


def raising(task: Task) -> Any:
    """An executor whose training raises, and counts its calls in a file."""
    inner = pt.EXECUTORS["loop"](task)

    class Raising(type(inner)):  # type: ignore[misc]
        def __call__(self, program: Any, clients: Any, *rest: Any) -> Any:
            if program.trains:
                with open(os.environ["PARTITA_TEST_CALLS"], "a") as file:
                    file.write("called\n")
                raise Marked(f"client {int(clients[0])}")
            return super().__call__(program, clients, *rest)

    return Raising(inner.bound)


def test_an_error_is_raised_as_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("PARTITA_TEST_CALLS", str(calls))
    spec = pt.workers.processes(2, threads=2)  # others than those that have begun without the variable
    with pytest.raises(Marked, match="client 0") as found:
        federate(executor=raising, workers=spec)
    assert "raised in worker" in found.value.__notes__[0]
    assert len(calls.read_text().splitlines()) == 1  # the first share alone, since it may have to decide
    federate(workers=spec)  # they are as good as before


def test_warnings_of_workers_are_given_once() -> None:
    def loud(task: Task) -> Any:
        inner = pt.EXECUTORS["loop"](task)

        class Loud(type(inner)):  # type: ignore[misc]
            def __call__(self, *given: Any) -> Any:
                check.warn("this is loud")
                return super().__call__(*given)

        return Loud(inner.bound)

    with pytest.warns(UserWarning, match="this is loud") as found:
        federate(executor=loud, workers=2)
    assert len([w for w in found if "loud" in str(w.message)]) == 1


def test_auto_measures_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("the driver measured")

    monkeypatch.setattr("partita.engine.execute.auto.Auto._measure", forbidden)
    run = federate(executor="auto", workers=2)
    picks = run.config["executor"]["picks"]
    assert picks["training, stage 0"]["picked"] in ("vmap", "pool", "loop")
    assert "measured on" in picks["training, stage 0"]["why"]


def test_what_each_did_is_written_down(tmp_path: Path) -> None:
    run = federate(workers=2, out=tmp_path / "run")
    told = run.config["executor"]["workers"]
    assert (told["kind"], told["count"], told["shares"], told["threads"]) == ("processes", 2, 2, 1)
    assert run.config["settings"]["workers"] == {"name": "processes", "count": 2, "threads": None}
    assert [worker["worker"] for worker in told["each"]] == [0, 1]
    assert sum(worker["shares"] for worker in told["each"]) >= 6
    assert sum(worker["seconds"] for worker in told["each"]) > 0
    assert len({worker["pid"] for worker in told["each"]}) == 2
    again = federate(workers=2)  # counts are those of a run, not of all that they have served
    shares = [worker["shares"] for worker in told["each"]]
    assert sum(shares) == sum(worker["shares"] for worker in again.config["executor"]["workers"]["each"])


def test_progress_names_the_load() -> None:
    loads: list[tuple[float, ...]] = []

    class Note(pt.callbacks.Callback):
        def round(self, event: pt.callbacks.Event) -> None:
            loads.append(event.workers)

    federate(workers=2, callbacks=[Note()])
    assert all(len(load) == 2 and all(0 <= x <= 1 for x in load) for load in loads)
    assert max(map(max, loads)) > 0


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            log.write("a loss\n")
            return torch.nn.functional.cross_entropy(output, target)

        with pytest.raises(pt.Refused, match="open files") as error:
            federate(loss=loss, workers=2)
    assert error.value.field == "workers"
    assert "PicklingError" in error.value.reason


# ---- resumed with others


def test_resumed_with_other_workers(tmp_path: Path) -> None:
    method = pt.fedalt(personal="output", lr=0.1)
    straight = federate(method, rounds=4, workers=2, out=tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        federate(method, rounds=4, workers=2, out=tmp_path / "stopped", callbacks=[Stop(2)])

    @each("workers, shares", [(None, None), (1, None), (3, None), (2, 2)])
    def resumes(tmp_path: Path, workers: int | None, shares: int | None) -> None:
        shutil.copytree(tmp_path.parent / "stopped", tmp_path / "run")
        out = tmp_path / "run"
        resumed = federate(method, rounds=4, workers=workers, shares=shares, out=out, resume=True)
        assert apart(straight, resumed) == 0.0
        terms = [run.config["executor"]["workers"] for run in (straight, resumed)]
        assert all(terms[0][name] == terms[1][name] for name in ("shares", "threads", "memory"))

    resumes(tmp_path=tmp_path)


def test_other_shares_are_refused_on_resume(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        federate(workers=2, out=tmp_path / "run", callbacks=[Stop(2)])
    with pytest.raises(pt.Refused, match="has 2 shares"):
        federate(workers=3, shares=3, out=tmp_path / "run", resume=True)


def test_a_plain_run_is_not_resumed_in_shares(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        federate(out=tmp_path / "run", callbacks=[Stop(2)])
    with pytest.raises(pt.Refused, match="was begun without workers"):
        federate(workers=2, out=tmp_path / "run", resume=True)


# ---- after the run, studies, the command


def test_models_after_the_run_need_no_workers() -> None:
    method = pt.ditto(lr=0.1)
    a, b = federate(method), federate(method, workers=2)
    x = data().client(0, "test")[0]
    ours, theirs = (run.client(0).model()(x) for run in (a, b))
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert b.extend(1).summary()["rounds"] == 4


def compare(**settings: Any) -> pt.Comparison:
    """Two methods and two seeds; without validation samples clients alone train no longer than others."""
    samples = data(validation=0.0)
    methods = {"fedalt": pt.fedalt(personal="output", lr=0.1), "ditto": pt.ditto(lr=0.1)}
    usual: dict[str, Any] = {
        "seeds": 2, "rounds": 3, "steps": 2, "batch": 8, "executor": "vmap", "device": "cpu",
        "progress": False, "checkpoint_every": 1,
    }  # fmt: skip
    return pt.compare(pt.models.mlp(64, 8, 10, seed=0), samples, methods, **{**usual, **settings})


def test_a_study_keeps_its_workers() -> None:
    found = compare(workers=2, shares=2)
    pids = {
        worker["pid"]
        for runs in found.records.values()
        for run in runs
        for worker in run.config["executor"]["workers"]["each"]
    }
    assert len(pids) == 2


@each("kept", [True, False])
def test_runs_of_a_study_are_made_side_by_side(tmp_path: Path, kept: bool) -> None:
    alone, spread = (
        compare(workers=workers, out=tmp_path / str(workers) if kept else None) for workers in (None, 2)
    )
    assert list(alone.records) == list(spread.records)
    for name, runs in alone.records.items():
        for ours, theirs in zip(runs, spread.records[name], strict=True):
            assert ours.facts["test"] == theirs.facts["test"]
            assert theirs.config["settings"]["workers"] is None  # one worker has made it, alone
            assert ours.config["settings"]["seed"] == theirs.config["settings"]["seed"]
    assert str(alone) == str(spread)
    if kept:
        assert (tmp_path / "2" / "report.html").exists()
        again = compare(workers=3, out=tmp_path / "2", resume=True)
        assert str(again) == str(spread)


def test_a_run_goes_on_where_a_dead_worker_left_it(tmp_path: Path) -> None:
    (tmp_path / "deaths").mkdir()
    (tmp_path / "none").mkdir()
    straight = compare(out=tmp_path / "straight", executor=Dying(tmp_path / "none", 0))
    killed = compare(out=tmp_path / "killed", executor=Dying(tmp_path / "deaths", 1), workers=2)
    assert len(list((tmp_path / "deaths").iterdir())) == 1
    assert [run.facts["test"] for runs in straight.records.values() for run in runs] == [
        run.facts["test"] for runs in killed.records.values() for run in runs
    ]


def test_an_error_in_a_run_of_a_study_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_TEST_CALLS", str(tmp_path / "calls"))
    spec = pt.workers.processes(1, threads=2)  # another than those that have begun without the variable
    with pytest.raises(Marked, match="client"):
        compare(workers=spec, executor=raising)


def test_newcomers_come_after_workers() -> None:
    a, b = (federate(pt.fedalt(personal="output", lr=0.1), newcomers=[5], workers=n) for n in (None, 2))
    assert apart(a, b) <= TOLERANCE
    assert b.newcomers is not None


WRONG = [
    *(0, -1, True, 2.5, 99999, {"count": 2}, "two", "4 ", "spark:4", "ray:", "ray:0", "ray:-1"),
    *("open(4)", "ray(open)", "ray(", "ray(-1)", "ray(2, cores=1)"),
]


@each("workers", WRONG)
def test_wrong_workers_are_refused(workers: Any) -> None:
    with pytest.raises(pt.Refused) as error:
        federate(workers=workers)
    assert error.value.field.startswith("workers")


def test_wrong_shares_are_refused() -> None:
    with pytest.raises(pt.Refused) as error:
        federate(shares=0)
    assert error.value.field == "shares"


def test_words_of_a_command_line() -> None:
    words = {
        "4": pt.workers.processes(4),
        "ray:4": pt.workers.ray(4),
        "ray:auto": pt.workers.ray(None, address="auto"),
        "ray:8@head:6379": pt.workers.ray(8, address="head:6379"),
        "ray(2, threads=3, gpus=0.5)": pt.workers.ray(2, threads=3, gpus=0.5),
        "processes(2, threads=1)": pt.workers.processes(2, threads=1),
    }
    for text, spec in words.items():
        assert pt.workers.requested("workers", text) == spec


def test_the_command(partita: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("--set", "rounds=2", "--set", "baselines=False", "--executor", "vmap", "--json")
    done = partita("run", "digits", "--workers", "2", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr
    assert '"kind": "processes"' in (out / "config.json").read_text()
    refusal = partita("compare", "digits", "--workers", "many", "--out", str(tmp_path / "study")).refusal
    assert "--workers='many'" in refusal
    assert not (tmp_path / "study").exists()


def test_check_says_what_workers_have(partita: Command) -> None:
    done = partita("workers", "check", "2")
    assert done.returncode == 0
    assert torch.__version__[:5] in done.stdout
    assert "They started in" in done.stdout
