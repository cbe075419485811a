"""Which runs of a study go on together, how many, and with whom after a kill."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import partita as pt
from partita.engine import folder as folders
from partita.engine.callbacks import Callback
from partita.engine.lockstep import member
from partita.engine.store import durable
from partita.recipes.experiment import Experiment
from partita.recipes.in_lockstep import _common_round, meetings
from partita.recipes.study import Study, run_study
from partita.recipes.variant import Variant
from support import each

DATA = pt.data.digits(clients=6, partition=pt.data.dirichlet(alpha=0.5), seed=0)


def recipe(seed: int, method: pt.Algorithm | None = None, **changed: Any) -> Experiment:
    settings = {"rounds": 3, "cohort": 3, "steps": 1, "batch": 8, "seed": seed, **changed}
    model = pt.models.mlp(64, 8, 10, seed=seed)
    return Experiment(model=model, data=DATA, algorithm=method or pt.fedavg(lr=0.1), **settings)


def one(seed: int, **changed: Any) -> Study:
    return Study({"fedavg": Variant(recipe(seed, **changed))})


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs trained at once, step by step."""
    found: list[int] = []
    compute = member.Joint.__call__

    def noted(self: member.Joint, members: Any, calls: Any) -> Any:
        result = compute(self, members, calls)
        if calls[0].program.trains:
            found.append(len(calls))
        return result

    monkeypatch.setattr(member.Joint, "__call__", noted)
    return found


# ---- who meets whom


def variants(**needs: tuple[str, ...]) -> Mapping[str, Variant]:
    """Variants by name: the method is what the name begins with, up to a digit."""
    methods = {"prox": pt.fedprox(lr=0.1, mu=0.1), "avg": pt.fedavg(lr=0.1)}
    return {
        name: Variant(recipe(0, methods[name.rstrip("0123456789")]), baselines=dict(zip("abc", needed)))
        for name, needed in needs.items()
    }


MEETINGS: dict[str, tuple[Mapping[str, Variant], int, list[list[str]]]] = {
    "one method": (variants(prox1=(), prox2=(), prox3=()), 16, [["prox1", "prox2", "prox3"]]),
    "most": (variants(prox1=(), prox2=(), prox3=()), 2, [["prox1", "prox2"], ["prox3"]]),
    "of two methods": (variants(avg=(), prox1=(), avg1=()), 16, [["avg", "avg1"], ["prox1"]]),
    "one that is needed": (variants(avg=(), avg1=("avg",), avg2=()), 16, [["avg", "avg2"], ["avg1"]]),
    "needed later": (
        variants(prox=(), avg=("prox",), prox1=("avg",)),
        16,
        [["prox"], ["avg"], ["prox1"]],
    ),
}


@each("name", list(MEETINGS))
def test_variants_of_one_method_meet(name: str) -> None:
    given, most, expected = MEETINGS[name]
    assert meetings(given, most) == expected


@each("seeds", [(0,), (0, 1, 2)])
def test_settings_of_one_method_are_one_batch(seeds: tuple[int, ...], sizes: list[int]) -> None:
    """Four μ of three seeds are twelve runs, and four of a single seed are four; none has another result."""
    methods = {f"mu{i}": pt.fedprox(lr=0.1, mu=0.1 * (i + 1)) for i in range(4)}

    def build(seed: int) -> Study:
        return Study({name: Variant(recipe(seed, method)) for name, method in methods.items()})

    said: list[str] = []
    sizes.clear()
    found, _ = run_study(build, seeds, announce=said.append)
    assert set(sizes) == {4 * len(seeds)}
    assert len(said) == 1
    assert said[0].startswith(f"1/{4 * len(seeds)}  mu0, mu1, mu2, mu3, seed")
    alone, _ = run_study(build, seeds, announce=str, alone=True)
    assert list(found) == list(alone)
    for name in alone:
        for a, b in zip(alone[name], found[name], strict=True):
            assert a.facts["seed"] == b.facts["seed"]
            assert a.summary()["test"]["personal"] == pytest.approx(b.summary()["test"]["personal"], abs=0.02)


def test_what_a_study_holds_is_bounded_by_a_group_of_seeds(sizes: list[int]) -> None:
    """Neither the data of later seeds is there yet, nor the runs of earlier ones still."""
    held: list[tuple[int, int]] = []

    def build(seed: int) -> Study:
        data = pt.data.digits(clients=6, seed=seed)
        whole = replace(recipe(seed, rounds=1), data=data)
        return Study({name: Variant(whole) for name in "ab"})

    def live(text: str) -> None:  # noqa: ARG001
        gc.collect()
        found = [type(x) for x in gc.get_objects()]
        held.append((found.count(pt.Run), found.count(pt.data.FederatedData)))

    live("before")
    run_study(build, range(34), announce=live)
    assert max(sizes) == 16
    (runs, data), *rest = held
    assert max(r for r, _ in rest) - runs <= 16
    assert max(d for _, d in rest) - data <= 2 * 17  # of a group, and of the study's first seed


def test_membership_has_at_most_sixteen_runs_at_once(sizes: list[int]) -> None:
    data = pt.data.digits(clients=12, seed=0)
    settings = {"rounds": 1, "cohort": 3, "steps": 1, "batch": 8}
    pt.membership(pt.models.mlp(64, 8, 10, seed=0), data, pt.fedavg(lr=0.1), runs=20, **settings)
    assert max(sizes) == 16


# ---- after a kill


def begun(folder: Path, *rounds: int) -> Path:
    for number in rounds:
        (folder / "checkpoint" / f"{number:08d}").mkdir(parents=True)
    return folder


def test_the_newest_round_that_all_have(tmp_path: Path) -> None:
    a, b, c = begun(tmp_path / "a", 4, 7), begun(tmp_path / "b", 4, 8), begun(tmp_path / "c", 3)
    assert _common_round([a, b]) == {a: 4, b: 4}
    assert _common_round([a, c]) == {}
    assert _common_round([a, tmp_path / "killed before its first"]) == {}
    assert _common_round([]) == {}


def test_checkpoints_by_time_are_of_the_same_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the others take to write theirs: a run that is killed finds a round that all have."""
    monkeypatch.setattr(folders, "CHECKPOINT_SECONDS", 0.05)
    written: dict[str, list[int]] = {}
    write = durable.write

    def noted(folder: Path, round: int, *given: Any, **further: Any) -> Path:
        written.setdefault(str(folder), []).append(round)
        return write(folder, round, *given, **further)

    monkeypatch.setattr(folders.durable, "write", noted)
    run_study(lambda seed: one(seed, rounds=40), range(3), out=tmp_path, announce=str)
    first, *others = written.values()
    assert len(first) > 3
    assert all(other == first for other in others)


def killed(out: Path, rounds: Callable[[int], int | None]) -> None:
    """Leave what a kill leaves: checkpoints up to a round, nothing at all (-1), or a finished run (None)."""
    for seed in range(18):
        run = out / "fedavg" / f"seed-{seed}"
        last = rounds(seed)
        if last == -1:
            shutil.rmtree(run)
        elif last is not None:
            (run / "summary.json").unlink()
            durable.drop(run / "checkpoint", last)


def test_groups_of_seeds_are_the_same_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that had finished is missed in its group, but nobody else takes its place."""
    run_study(lambda seed: one(seed, checkpoint_every=1), range(18), out=tmp_path, announce=str)
    killed(tmp_path, lambda seed: -1 if seed > 15 else None if seed == 1 else 3 - seed % 2)
    asked: list[tuple[int, set[int]]] = []

    def noted(begun: list[Path]) -> Mapping[Path, int]:
        found = _common_round(begun)
        asked.append((len(begun), set(found.values())))
        return found

    monkeypatch.setattr("partita.recipes.in_lockstep._common_round", noted)
    said: list[str] = []
    again = {"checkpoint_every": 1}
    run_study(lambda seed: one(seed, **again), range(18), out=tmp_path, announce=said.append, resume=True)
    assert asked == [(15, {2}), (0, set())]
    assert said[0] == "1/18  fedavg, seed 1 (finished before)"
    assert said[1].startswith("2/18  fedavg, seeds 0, 2, 3,")
    assert said[2] == "17/18  fedavg, seeds 16 to 17 together"


def test_threads_are_those_of_all_runs(tmp_path: Path) -> None:
    """A study goes on with the threads that it began with, in all of its runs; then they are as before."""
    run_study(lambda seed: one(seed, checkpoint_every=1), range(3), out=tmp_path, announce=str)
    now = torch.get_num_threads()
    other = 1 if now > 1 else 2
    for seed in range(3):
        run = tmp_path / "fedavg" / f"seed-{seed}"
        (run / "summary.json").unlink()
        durable.drop(run / "checkpoint", 2)
        config = json.loads((run / "config.json").read_text())
        config["executor"]["threads"] = other
        (run / "config.json").write_text(json.dumps(config))
    seen: list[int] = []

    class Looking(Callback):
        def round(self, event: Any) -> None:  # noqa: ARG002
            seen.append(torch.get_num_threads())

    with pytest.warns(UserWarning, match="threads"):
        run_study(
            lambda seed: one(seed, checkpoint_every=1, rounds=3),
            range(3),
            out=tmp_path,
            announce=str,
            resume=True,
            callbacks=[Looking()],
        )
    assert seen == [other] * 3
    assert torch.get_num_threads() == now
