"""Runs in lockstep are the runs that they are alone, whatever they differ in."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita.engine import loop, stage
from partita.engine.callbacks import Callback
from partita.engine.execute import auto, plan
from partita.engine.execute.cuda.captured import Captured
from partita.engine.lockstep import member, paying
from partita.engine.lockstep.runs import in_lockstep
from partita.engine.store import durable
from partita.recipes import tuning
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, run_study
from partita.recipes.variant import Variant
from support import each

RUNS = 3


@functools.cache
def samples(seed: int) -> pt.data.FederatedData:
    return pt.data.digits(clients=8, partition=pt.data.dirichlet(alpha=0.5), seed=seed)


def run(seed: int, method: pt.Algorithm, data: pt.data.FederatedData | None = None, **changed: Any) -> pt.Run:
    settings = {"rounds": 4, "cohort": 4, "epochs": 1, "batch": 16, "executor": "vmap", **changed}
    return pt.federate(
        pt.models.mlp(64, 8, 10, seed=seed),
        samples(seed) if data is None else data,
        method,
        seed=seed,
        baselines=False,
        progress=False,
        **settings,
    )


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was computed for several runs at once: the program, and for how many."""
    found: list[tuple[str, int]] = []
    compute = member.Joint.__call__

    def noted(self: member.Joint, members: Any, calls: Any) -> Any:
        result = compute(self, members, calls)
        found.append((calls[0].program.name, len(calls)))
        return result

    monkeypatch.setattr(member.Joint, "__call__", noted)
    return found


def assert_same(alone: pt.Run, together: pt.Run) -> None:
    for name, value in alone.shared.items():
        torch.testing.assert_close(together.shared[name], value, atol=1e-5, rtol=1e-4)
    for client in [c for c in range(len(alone.clients)) if alone.client(c).trained]:
        for part in ("personal", "memory"):
            tensors = getattr(together.client(client), part)
            for name, value in getattr(alone.client(client), part).items():
                torch.testing.assert_close(tensors[name], value, atol=1e-5, rtol=1e-4)
    for a, b in zip(alone.metrics, together.metrics, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"seconds"}:
            is_number = isinstance(a[name], float)
            assert b[name] == (pytest.approx(a[name], abs=1e-4) if is_number else a[name]), name


DELAYS = pt.schedule.delays(upload=pt.schedule.exponential(2.0))
CASES: dict[str, tuple[Callable[[int], pt.Algorithm], dict[str, Any]]] = {
    "fedavg": (lambda _: pt.fedavg(lr=0.1, momentum=0.5), {}),
    "rates": (lambda i: pt.fedalt("output", lr=0.05 * (i + 1), personal_lr=0.2 / (i + 1)), {}),
    "rates of both kinds": (
        lambda i: pt.fedavg(lr=pt.optim.within_round(pt.optim.linear(0.2)) if i == 1 else 0.1),
        {},
    ),
    "rates by step": (lambda i: pt.fedavg(lr=pt.optim.within_round(pt.optim.linear(0.1 * (i + 1)))), {}),
    "rates by round": (lambda i: pt.fedsim("output", lr=pt.optim.halving(0.1 * (i + 1), every=2)), {}),
    "memory": (lambda _: pt.scaffold(lr=0.1), {}),
    "whole models": (lambda _: pt.ditto(lr=0.1), {"batch": None, "epochs": None, "steps": 3}),
    "inner steps": (lambda _: pt.pfedme(lr=0.1, lam=5.0, inner_lr=0.1, inner_steps=2), {}),
    "own server": (lambda i: pt.fedavg(lr=0.1, server=pt.optim.adam(lr=0.01 * (i + 1))), {}),
    "robust": (lambda _: pt.fedavg(lr=0.1, aggregate=pt.aggregate.trimmed_mean(1)), {}),
    "attacked": (lambda _: pt.fedavg(lr=0.1), {"attack": pt.attack.nonfinite(), "byzantine": 0.25}),
    "asynchronous": (
        lambda _: pt.fedbuff(lr=0.1),
        {"schedule": pt.schedule.asynchronous(concurrency=4, buffer=2, delays=DELAYS)},
    ),
    "stragglers": (
        lambda _: pt.fedavg(lr=0.1),
        {"schedule": pt.schedule.synchronous(stragglers=0.5), "epochs": 3},
    ),
    "recorded": (lambda _: pt.fedalt("output", lr=0.1), {"executor": "graph"}),
    "measured": (lambda _: pt.fedavg(lr=0.1), {"executor": "auto"}),
    "pipeline": (
        lambda _: pt.pipeline(
            pt.stage(pt.fedavg(lr=0.1), rounds=2), pt.stage(pt.finetune("output", lr=0.1), rounds=2)
        ),
        {"rounds": None},
    ),
}


@each("name", list(CASES))
def test_runs_are_those_of_each_alone(name: str, joint: list[tuple[str, int]]) -> None:
    make, settings = CASES[name]
    alone = [run(i, make(i), **settings) for i in range(RUNS)]
    joint.clear()
    together = in_lockstep([functools.partial(run, i, make(i), **settings) for i in range(RUNS)])
    assert ("training", RUNS) in joint
    for a, b in zip(alone, together):
        assert_same(a, b)


@each("name", ["fedavg", "memory", "rates by round", "pipeline", "recorded"])
def test_samples_of_all_runs_are_drawn_while_a_device_works(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run has the results that it has alone, and what was drawn ahead is used."""
    make, settings = CASES[name]
    alone = [run(i, make(i), **settings) for i in range(RUNS)]
    drawn: list[int] = []
    monkeypatch.setattr(loop, "WORK_AHEAD", ("cpu",))
    draw = plan.draw

    def counted(data: Any, clients: np.ndarray, *given: Any) -> Any:
        drawn.append(len(clients))
        return draw(data, clients, *given)

    monkeypatch.setattr(plan, "draw", counted)
    together = in_lockstep([functools.partial(run, i, make(i), **settings) for i in range(RUNS)])
    for a, b in zip(alone, together):
        assert_same(a, b)
    plans = 2 * 4 if name == "recorded" else 4  # fedalt has two phases
    assert drawn.count(4 * RUNS) == plans  # each plan is drawn once: for its round, or ahead of it


def test_one_copy_of_data_that_all_share(joint: list[tuple[str, int]]) -> None:
    method, data = pt.fedavg(lr=0.1), samples(0)
    together = in_lockstep([functools.partial(run, i, method, data) for i in range(RUNS)])
    assert joint
    for i, found in enumerate(together):
        assert_same(run(i, method, data), found)


NUMBERS: dict[str, tuple[Callable[[int], pt.Algorithm], bool]] = {
    "fedprox": (lambda i: pt.fedprox(lr=0.1, mu=0.3 * (i + 1)), True),
    "ditto": (lambda i: pt.ditto(lr=0.05 * (i + 1), lam=0.5 * (i + 1)), True),
    "pfedme": (lambda i: pt.pfedme(lr=0.1, lam=2.0 * (i + 1), inner_lr=0.1, inner_steps=2), True),
    "fedavg_plus": (lambda i: pt.fedavg_plus(lr=0.1, sigma=0.5 * (i + 1), delta=0.1 * (i + 1)), True),
    "perfedavg": (lambda i: pt.perfedavg(lr=0.1, alpha=0.05 * (i + 1)), True),
    "apfl": (lambda i: pt.apfl(lr=0.1, alpha=0.2 * (i + 1)), True),
    "moon": (lambda i: pt.moon(lr=0.1, mu=1.0 * (i + 1)), False),
    "momentum": (lambda i: pt.fedavg(lr=0.1, momentum=0.2 * (i + 1)), True),
    "decay": (lambda i: pt.ditto(lr=0.1, lam=0.5, weight_decay=0.01 * (i + 1)), True),
    "clipping": (lambda i: pt.fedavg(lr=0.1, max_grad_norm=0.5 * (i + 1)), True),
    "some zero": (lambda i: pt.fedprox(lr=0.1, mu=0.3 * i), False),
}


@each("name", list(NUMBERS))
def test_numbers_that_differ_between_runs(name: str, joint: list[tuple[str, int]]) -> None:
    """Each client has that of its run; where a rule cannot be made so, its runs stay apart."""
    make, shared = NUMBERS[name]
    alone = [run(i, make(i), rounds=3) for i in range(RUNS)]
    joint.clear()
    together = in_lockstep([functools.partial(run, i, make(i), rounds=3) for i in range(RUNS)])
    assert (("training", RUNS) in joint) is shared
    for a, b in zip(alone, together):
        assert_same(a, b)


APART: dict[str, tuple[Callable[[int], pt.Algorithm], Callable[[int], dict[str, Any]]]] = {
    "another method": (lambda i: (pt.fedavg, pt.ditto, pt.scaffold)[i](lr=0.1), lambda _: {}),
    "the stage's model": (lambda _: pt.fedalt("output", lr=0.1, personal_l2=0.5), lambda _: {}),
    "other batches": (lambda _: pt.fedavg(lr=0.1), lambda i: {"batch": 8 * (i + 1)}),
}


@each("name", list(APART))
def test_what_cannot_be_one_program_stays_apart(name: str, joint: list[tuple[str, int]]) -> None:
    make, settings = APART[name]
    alone = [run(i, make(i), **settings(i)) for i in range(RUNS)]
    joint.clear()
    together = in_lockstep([functools.partial(run, i, make(i), **settings(i)) for i in range(RUNS)])
    assert not [count for program, count in joint if program == "training"]
    for a, b in zip(alone, together):
        assert_same(a, b)


REASONS: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "batches": (lambda i: {"batch": 8 * (i + 1)}, r"they differ in settings\.batch \(8, 16\)"),
    "methods": (lambda i: {"method": (pt.fedavg, pt.ditto, pt.scaffold)[i](lr=0.1)}, r"differ in .*'ditto'"),
    "room": (lambda _: {"memory": 1 << 19}, r"the data of all are [\d,]+ bytes, more than the [\d,]+ of mem"),
}


@each("name", list(REASONS))
def test_the_log_says_once_why_runs_stay_apart(name: str, caplog: pytest.LogCaptureFixture) -> None:
    settings, reason = REASONS[name]
    caplog.set_level("INFO", logger="partita")
    caplog.clear()

    def body(i: int) -> pt.Run:
        own = settings(i)
        return run(i, own.pop("method", pt.fedavg(lr=0.1)), rounds=3, **own)

    in_lockstep([functools.partial(body, i) for i in range(2)])
    told = [text for text in caplog.messages if "training of" in text]
    assert len(told) == 1, caplog.messages
    assert re.search(reason, told[0]), told


def test_a_rule_that_knows_its_run_is_found_out(joint: list[tuple[str, int]]) -> None:
    """Its name and options say that it is the same in all runs; its results do not."""

    def method(i: int) -> pt.Algorithm:
        plain, factor = pt.fedavg(lr=0.1), SimpleNamespace(value=i + 1)

        def local(problem: Any) -> Any:
            rule = plain.local(problem)

            def finish(carry: Any, download: Any, state: Any) -> Any:
                upload, new = rule.finish(carry, download, state)
                return upload._replace(delta={k: v * factor.value for k, v in upload.delta.items()}), new

            return rule._replace(finish=finish)

        return pt.Algorithm(**{**vars(plain), "local": local})

    alone = [run(i, method(i)) for i in range(RUNS)]
    joint.clear()
    together = in_lockstep([functools.partial(run, i, method(i)) for i in range(RUNS)])
    programs = {program for program, _ in joint}
    assert programs  # they are of one kind, as far as anybody can tell
    assert "training" not in programs
    for a, b in zip(alone, together):
        assert_same(a, b)


def test_a_trial_without_a_step_tells_nothing(joint: list[tuple[str, int]]) -> None:
    """Rates that begin at zero let nobody move in the first round: it is tried again in the next one."""

    def rate(i: int) -> Any:
        return lambda t, rounds: 0.0 if t == 0 else 0.05 * (i + 1)  # noqa: ARG005

    alone = [run(i, pt.fedavg(lr=rate(i))) for i in range(RUNS)]
    joint.clear()
    together = in_lockstep([functools.partial(run, i, pt.fedavg(lr=rate(i))) for i in range(RUNS)])
    assert [count for program, count in joint if program == "training"] == [RUNS] * 3
    for a, b in zip(alone, together):
        assert_same(a, b)


@each("executor", ["vmap", "auto"])
def test_cohorts_in_blocks(
    executor: str, joint: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever computes may not use the memory of the block before again."""
    monkeypatch.setattr(stage, "BLOCK_CLIENTS", 2)
    if executor == "auto":
        monkeypatch.setattr(auto, "STACK_SPEEDUP", 1e9)  # one after another, or a client on each core
        monkeypatch.setattr(auto, "CLEAR_SPEEDUP", 1e9)
    method = pt.scaffold(lr=0.1)
    alone = [run(i, method, executor=executor) for i in range(RUNS)]
    joint.clear()
    together = in_lockstep([functools.partial(run, i, method, executor=executor) for i in range(RUNS)])
    assert len([count for program, count in joint if program == "training"]) == 2 * 4
    for a, b in zip(alone, together):
        assert_same(a, b)


def test_the_parts_of_all_runs_take_no_longer_than_all_of_them() -> None:
    """Each has its share of what is computed as one, and does not count how long it waits for the others."""
    together = in_lockstep([functools.partial(run, i, pt.fedavg(lr=0.1), rounds=30) for i in range(RUNS)])
    phases, took = [r.facts["phases"] for r in together], max(r.facts["seconds"] for r in together)
    assert sum(sum(own.values()) for own in phases) < 1.2 * took
    steps = [own["steps"] for own in phases]
    assert min(steps) > 0
    assert max(steps) < 3 * min(steps)


def test_auto_measures_whether_it_pays(
    tmp_path: Path, joint: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that are no faster as one batch are apart after three rounds, for good; config.json says why."""
    settings = {"executor": "auto", "rounds": 14, "checkpoint_every": 1}

    def body(i: int, folder: str, **changed: Any) -> pt.Run:
        return run(i, pt.fedavg(lr=0.1), out=tmp_path / folder / str(i), **{**settings, **changed})

    def trained() -> int:
        return len([count for program, count in joint if program == "training"])

    def all_of(folder: str, **changed: Any) -> list[pt.Run]:
        joint.clear()
        return in_lockstep([functools.partial(body, i, folder, **changed) for i in range(RUNS)])

    alone = [run(i, pt.fedavg(lr=0.1), **settings) for i in range(RUNS)]
    role = "training of several runs, stage 0"
    for folder, least, picked, rounds in (("slow", 1e9, "apart", 3), ("fast", 0.0, "together", 14)):
        monkeypatch.setattr(paying, "LEAST_SPEEDUP", least)
        found = all_of(folder)
        assert trained() == rounds
        for a, b in zip(alone, found):
            assert_same(a, b)
        assert {r.config["executor"]["picks"][role]["picked"] for r in found} == {picked}
        assert "one after another" in found[0].config["executor"]["picks"][role]["why"]
    all_of("slow", resume=True, rounds=16)
    assert trained() == 0
    assert all_of("short", rounds=3)[0].config["executor"]["picks"][role]["why"].endswith("few to measure")
    assert trained() == 3


def test_two_trainings_in_one_run(joint: list[tuple[str, int]]) -> None:
    """What was bound for the first does not serve the second."""

    def both(i: int) -> pt.Run:
        run(i, pt.fedavg(lr=0.01))
        return run(i, pt.fedavg(lr=0.5))

    together = in_lockstep([functools.partial(both, i) for i in range(RUNS)])
    assert joint
    for i, found in enumerate(together):
        assert_same(run(i, pt.fedavg(lr=0.5)), found)


def test_too_little_memory_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(parts: Any) -> None:  # noqa: ARG001
        raise MemoryError

    monkeypatch.setattr(member, "joined_data", full)
    together = in_lockstep([functools.partial(run, i, pt.fedavg(lr=0.1)) for i in range(RUNS)])
    for i, found in enumerate(together):
        assert_same(run(i, pt.fedavg(lr=0.1)), found)


def test_runs_that_end_early_leave_the_others(joint: list[tuple[str, int]]) -> None:
    class Early(Callback):
        def round(self, event: Any) -> None:
            if event.round == 2:
                raise pt.Stop

    def body(i: int) -> pt.Run:
        return run(i, pt.fedavg(lr=0.1), callbacks=[Early()] if i == 1 else [])

    together = in_lockstep([functools.partial(body, i) for i in range(RUNS)])
    assert [r.facts["rounds"] for r in together] == [4, 2, 4]
    assert {count for program, count in joint if program == "training"} == {2, 3}
    for i in (0, 2):
        assert_same(run(i, pt.fedavg(lr=0.1)), together[i])


def test_an_error_in_one_run_lets_the_others_end(tmp_path: Path) -> None:
    class Broken(Callback):
        def round(self, event: Any) -> None:
            if event.round == 2:
                raise OSError("no space left")

    def body(i: int) -> pt.Run:
        return run(i, pt.fedavg(lr=0.1), callbacks=[Broken()] if i == 0 else [], out=tmp_path / str(i))

    with pytest.raises(OSError, match="no space left"):
        in_lockstep([functools.partial(body, i) for i in range(RUNS)])
    assert [(tmp_path / str(i) / "summary.json").exists() for i in range(RUNS)] == [False, True, True]


class Signalled(Callback):
    def round(self, event: Any) -> None:
        if event.round == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_leaves_a_checkpoint_of_every_run(tmp_path: Path) -> None:
    """And resumed they are the runs that nobody stopped."""

    def body(i: int, **changed: Any) -> pt.Run:
        return run(i, pt.fedalt("output", lr=0.1), out=tmp_path / str(i), **changed)

    runs = [functools.partial(body, i, callbacks=[Signalled()] if i == 0 else []) for i in range(RUNS)]
    with pytest.raises(KeyboardInterrupt):
        in_lockstep(runs)
    for i in range(RUNS):
        assert not (tmp_path / str(i) / "summary.json").exists()
        assert durable.rounds(tmp_path / str(i) / "checkpoint")[0] == 2
    resumed = in_lockstep([functools.partial(body, i, resume=True) for i in range(RUNS)])
    straights = in_lockstep([functools.partial(run, i, pt.fedalt("output", lr=0.1)) for i in range(RUNS)])
    for found, straight in zip(resumed, straights):
        for name, value in straight.shared.items():
            assert torch.equal(found.shared[name], value)


@each("who", range(RUNS))
def test_ctrl_c_ends_all_runs_after_the_same_round(who: int, tmp_path: Path) -> None:
    """Those that the signal finds a round ahead take no step back: the others take one more."""

    def body(i: int) -> pt.Run:
        watch = [Signalled()] if i == who else []
        return run(i, pt.fedavg(lr=0.1), out=tmp_path / str(who) / str(i), callbacks=watch)

    with pytest.raises(KeyboardInterrupt):
        in_lockstep([functools.partial(body, i) for i in range(RUNS)])
    newest = {durable.rounds(tmp_path / str(who) / str(i) / "checkpoint")[0] for i in range(RUNS)}
    assert newest == {2 if who == 0 else 3}


def test_a_second_ctrl_c_gives_all_folders_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the runs where they are, while something else than a run is at work; they can go on at once."""
    compute, times = member.Joint.__call__, 0

    def insisted(self: member.Joint, members: Any, calls: Any) -> Any:
        nonlocal times
        times += calls[0].program.trains
        if times == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return compute(self, members, calls)

    def body(i: int, **changed: Any) -> pt.Run:
        return run(i, pt.fedavg(lr=0.1), out=tmp_path / str(i), **changed)

    monkeypatch.setattr(member.Joint, "__call__", insisted)
    with pytest.raises(KeyboardInterrupt) as kept:  # what holds the frames of the runs
        in_lockstep([functools.partial(body, i) for i in range(RUNS)])
    resumed = in_lockstep([functools.partial(body, i, resume=True) for i in range(RUNS)])
    assert [r.facts["rounds"] for r in resumed] == [4] * RUNS
    del kept


# ---- studies and searches


def recipe(seed: int, method: pt.Algorithm) -> Experiment:
    return Experiment(
        model=pt.models.mlp(64, 8, 10, seed=seed),
        data=samples(seed),
        algorithm=method,
        rounds=4,
        cohort=4,
        steps=2,
        batch=16,
        seed=seed,
    )


def compared(out: Path, **options: Any) -> Any:
    def build(seed: int) -> Study:
        first = Variant(recipe(seed, pt.fedavg(lr=0.1)))
        return Study(
            {
                "fedavg": first,
                "fedalt": Variant(recipe(seed, pt.fedalt("output", lr=0.1)), "fedavg", {"global": "fedavg"}),
            }
        )

    return run_study(build, [0, 1, 2], out=out, announce=str, **options)[0]


def figures(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.glob("*/*/summary.json")):
        summary = json.loads(path.read_text())
        yield path.parent.relative_to(folder), summary["test"], summary["hurt"], summary["bytes_up"]


def test_a_study_is_the_same_together_and_alone(tmp_path: Path, joint: list[tuple[str, int]]) -> None:
    compared(tmp_path / "alone", alone=True)
    assert not joint
    compared(tmp_path / "together")
    assert ("training", 3) in joint
    assert list(figures(tmp_path / "alone")) == list(figures(tmp_path / "together"))
    joint.clear()
    compared(tmp_path / "together", resume=True)  # finished: read again
    assert not joint


def test_a_killed_study_goes_on_where_all_of_its_runs_were(tmp_path: Path) -> None:
    """A run that was a round ahead goes back: so all of them are of one size again until their ends."""
    compared(tmp_path / "straight", checkpoint_every=1)
    compared(tmp_path / "killed", checkpoint_every=1)
    for name in ("fedavg", "fedalt"):
        for seed in range(3):
            folder = tmp_path / "killed" / name / f"seed-{seed}"
            (folder / "summary.json").unlink()
            durable.drop(folder / "checkpoint", 4 - (seed == 1))  # seed 1 was killed before its last round
    compared(tmp_path / "killed", checkpoint_every=1, resume=True)
    for path in sorted((tmp_path / "straight").glob("*/*/checkpoint/00000004/tensors.safetensors")):
        assert (
            path.read_bytes() == (tmp_path / "killed" / path.relative_to(tmp_path / "straight")).read_bytes()
        )
    assert list(figures(tmp_path / "straight")) == list(figures(tmp_path / "killed"))


def test_a_search_tries_the_same_together_and_alone(tmp_path: Path, joint: list[tuple[str, int]]) -> None:
    pytest.importorskip("optuna")
    settings = {"rounds": 6, "cohort": 4, "steps": 2, "batch": 16, "budget": 10, "seed": 0}
    model, data = pt.models.mlp(64, 8, 10, seed=0), samples(0)
    alone = pt.tune(model, data, [pt.fedavg(lr=0.1)], alone=True, **settings)
    assert not joint
    together = pt.tune(model, data, [pt.fedavg(lr=0.1)], out=tmp_path / "search", **settings)
    assert ("training", 10) in joint  # with the method as it was given
    for a, b in zip(alone.trials, together.trials, strict=True):
        assert (a.params, a.state) == (b.params, b.state)
        assert b.score == pytest.approx(a.score, abs=0.02)
    lines = (tmp_path / "search" / "trials.jsonl").read_text().splitlines()
    (tmp_path / "search" / "trials.jsonl").write_text("\n".join(lines[:3]) + "\n")  # killed in a generation
    again = pt.tune(model, data, [pt.fedavg(lr=0.1)], out=tmp_path / "search", resume=True, **settings)
    assert [t.params for t in again.trials] == [t.params for t in together.trials]


@each("executor", ["vmap", "graph"])
def test_a_pruned_trial_leaves_the_others_as_they_are(
    executor: str, joint: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded for six serves five: no step is recorded for each number of runs that are left."""
    pytest.importorskip("optuna")
    propose, record, recorded = tuning.propose, Captured.record, []

    def forced(*given: Any) -> Any:
        ends = {1: 3, 2: 4}  # the round after which a trial is hopeless

        def hopeless(number: int) -> Callable[[int, float], bool]:
            return lambda now, score: now >= ends.get(number, now + 1)  # noqa: ARG005

        return [p._replace(hopeless=hopeless(p.number)) for p in propose(*given)]

    def noted(self: Captured) -> None:
        recorded.append(self.shape.n)
        record(self)

    monkeypatch.setattr(tuning, "propose", forced)
    monkeypatch.setattr(Captured, "record", noted)
    settings = {"rounds": 10, "cohort": 4, "steps": 2, "batch": 16, "budget": 7, "evaluate_every": 1}
    given = pt.models.mlp(64, 8, 10, seed=0), samples(0), [pt.fedavg(lr=0.1)]
    alone = pt.tune(*given, alone=True, executor=executor, **settings)
    joint.clear()
    recorded.clear()
    together = pt.tune(*given, executor=executor, **settings)
    counts = [count for program, count in joint if program == "training"]
    assert counts == [7] * 3 + [6] + [5] * 6
    if executor == "graph":
        assert {n for n in recorded if n > 4} == {7 * 4, 6 * 4}  # five runs have room among six
    assert [t.state for t in together.trials].count("pruned") == 2
    for a, b in zip(alone.of("fedavg"), together.of("fedavg"), strict=True):
        assert (a.params, a.state) == (b.params, b.state)
        assert b.score == pytest.approx(a.score, abs=0.02)
