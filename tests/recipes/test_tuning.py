"""`partita.tune`: equal budgets on validation samples, pruned, resumable, and blind to test samples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import partita as pt
from partita.engine.callbacks import Callback, Event
from partita.recipes import tuning
from partita.recipes.experiment import Experiment
from partita.recipes.tuning import APART, space
from support import each

pytest.importorskip("optuna")

ROUNDS = 8
METHODS = {"fedavg": pt.fedavg(lr=0.5), "ditto": pt.ditto(lr=0.5)}


class Outcome:
    """What a run of the fake below returns: the part of a record that a search looks at."""

    higher_is_better = True

    def __init__(self, validation: float | None, test: float) -> None:
        self._facts: dict[str, Any] = {"metric": "accuracy", "test": {"personal": test}}
        if validation is not None:
            self._facts["validation"] = {"personal": validation}

    def summary(self) -> dict[str, Any]:
        return self._facts


class Runs:
    """In place of training: the validation score is best at lr = 0.02, the test score at lr = 0.8."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int, int]] = []
        self.kill_at: int | None = None
        self.has_validation = True

    def __call__(self, experiment: Experiment, **options: Any) -> Outcome:
        lr, name = experiment.algorithm.options["lr"], experiment.algorithm.name
        watch: Callback = options["callbacks"][0]
        assert options["baselines"] is False
        if self.kill_at == len(self.seen):
            raise KeyboardInterrupt
        if lr > 0.95:
            self.seen.append((name, lr, experiment.seed, 1))
            watch.start(name, 0, ROUNDS)
            watch.round(Event(name, 1, ROUNDS, None, (), diverged=2))
            raise AssertionError("a run that diverges goes on")
        score = 1 / (1 + math.log10(lr / 0.02) ** 2)
        watch.start(name, 0, ROUNDS)
        self.seen.append((name, lr, experiment.seed, ROUNDS))
        for now in range(2, ROUNDS + 1, 2):
            self.seen[-1] = (*self.seen[-1][:3], now)
            watch.round(Event(name, now, ROUNDS, 0.1, ()))
            row = {"round": now, "test.personal": lr, "validation.personal": score * now / ROUNDS}
            watch.evaluation(name, row)
        return Outcome(score if self.has_validation else None, test=lr)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    fake = Runs()
    monkeypatch.setattr(Experiment, "run", lambda self, **options: fake(self, **options))
    return fake


def data(validation: float = 0.2) -> pt.data.FederatedData:
    torch.manual_seed(0)
    x = torch.randn(60, 5)
    return pt.data.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(60) % 3, test=0.3, validation=validation)


MODEL = pt.models.mlp(5, 4, 2)


def tune(methods: Any = METHODS, **options: Any) -> pt.Tuning:
    usual = {"budget": 12, "rounds": ROUNDS, "progress": False}
    return pt.tune(MODEL, data(), methods, **{**usual, **options})


def told(found: pt.Tuning) -> list[Any]:
    """Return the trials without how long they took."""
    return [trial._replace(seconds=0.0) for trial in found.trials]


def test_every_method_has_the_same_budget_and_begins_as_given(runs: Runs) -> None:
    found = tune()
    assert [t.label for t in found.trials] == ["fedavg"] * 12 + ["ditto"] * 12
    assert [t.number for t in found.trials] == [*range(12)] * 2
    first = [t for t in found.trials if t.number == 0]
    assert [t.options["lr"] for t in first] == [0.5, 0.5]
    assert (runs.seen[0][1], runs.seen[12][1]) == (0.5, 0.5)
    ditto = found.spaces["ditto"]
    assert {name: d.log for name, d in ditto.items()} == {"lr": True, "lam": True, "personal_lr": True}
    assert first[1].options["personal_lr"] == 0.5  # as lr, which it follows


def test_validation_decides_and_not_test(runs: Runs) -> None:
    found = tune()
    assert 0.005 < found.best["fedavg"].options["lr"] < 0.1
    best = found.best_trial("fedavg")
    assert best is not None
    scores = [t.score for t in found.trials if t.label == "fedavg" and t.state == "complete"]
    assert best.score == max(scores)
    tested = max(runs.seen[:12], key=lambda run: run[1] * (run[3] == ROUNDS))
    assert tested[1] > 0.4, "the test score is best elsewhere"
    assert found.best["fedavg"].name == "fedavg"


def test_trials_have_seeds_of_their_own(runs: Runs) -> None:
    tune({"fedavg": pt.fedavg(lr=0.5)}, seed=7, budget=3)
    assert {seed for _, _, seed, _ in runs.seen} == {7 + APART}
    with pytest.raises(pt.Refused) as refused:
        tune(seed=2**63 - 1)
    assert refused.value.field == "seed"


def test_hopeless_trials_end_early_and_divergence_is_a_failure(runs: Runs) -> None:
    found = tune(search={"lr": pt.Range(1e-3, 1.5)}, budget=20)
    states = {
        state: [t for t in found.trials if t.state == state] for state in ("pruned", "failed", "complete")
    }
    assert all(states.values()), {k: len(v) for k, v in states.items()}
    for trial, (_, lr, _, last) in zip(found.trials, runs.seen, strict=True):
        assert trial.params["lr"] == lr
        assert (trial.state == "failed") == (lr > 0.95)
        assert (trial.state == "pruned") == (1 < last < ROUNDS)
    assert all("diverged" in t.reason and t.score is None for t in states["failed"])
    assert all(t.curve[-1][0] < ROUNDS for t in states["pruned"])


@each("kill_at", [0, 1, 5, 13])
def test_resumed_equals_never_killed(kill_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    monkeypatch.setattr(Experiment, "run", lambda self, **options: runs(self, **options))
    straight = told(tune(budget=9))
    runs.kill_at, runs.seen = kill_at, []
    with pytest.raises(KeyboardInterrupt):
        tune(budget=9, out=tmp_path / "found")
    with open(tmp_path / "found/trials.jsonl", "a") as f:
        f.write('{"label": "fed')  # the line that was being written
    runs.kill_at = None
    again = tune(budget=9, out=tmp_path / "found", resume=True)
    assert told(again) == straight
    assert len(runs.seen) == 18, "a finished trial ran again"
    lines = (tmp_path / "found/trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [*range(9)] * 2
    before = len(runs.seen)
    assert told(tune(budget=9, out=tmp_path / "found", resume=True)) == straight
    assert len(runs.seen) == before


@pytest.mark.usefixtures("runs")
def test_another_search_is_not_resumed(tmp_path: Path) -> None:
    tune(budget=2, out=tmp_path)

    @each(
        "options",
        [{"budget": 3}, {"budget": 2, "rounds": 9}, {"budget": 2, "search": {"lr": [0.1, 0.2]}}],
    )
    def refused(options: dict[str, Any]) -> None:
        with pytest.raises(pt.Refused) as error:
            tune(out=tmp_path, resume=True, **options)
        assert error.value.field == "resume"

    refused()
    with pytest.raises(pt.Refused) as error:
        tune(budget=2, out=tmp_path)
    assert error.value.field == "out"


@pytest.mark.usefixtures("runs")
def test_the_seed_decides_what_is_tried() -> None:
    tried = [[t.params for t in tune(budget=4, seed=seed).trials] for seed in (0, 0, 1)]
    assert tried[0] == tried[1] != tried[2]


def test_data_without_validation_samples_are_refused(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(pt.Refused) as refused:
        pt.tune(MODEL, data(validation=0.0), METHODS, rounds=2, out=tmp_path / "new", progress=False)
    assert refused.value.field == "data"
    assert not (tmp_path / "new").exists()
    runs.has_validation = False
    with pytest.raises(pt.Refused) as refused:
        tune()
    assert refused.value.field == "data"


@pytest.mark.usefixtures("runs")
def test_where_nothing_works_a_method_stays_as_it_is() -> None:
    with pytest.warns(UserWarning, match="no trial of fedavg"):
        found = tune({"fedavg": pt.fedavg(lr=1.0)}, search={"lr": [1.0, 1.5]}, budget=3)
    assert {t.state for t in found.trials} == {"failed"}
    assert found.best_trial("fedavg") is None
    assert found.best["fedavg"].options["lr"] == 1.0
    assert found.expression("fedavg") == "fedavg"


def test_a_wrong_request_is_no_failed_trial(runs: Runs) -> None:
    """What is wrong with the first trial is wrong with the request."""

    @each(
        ("options", "field"),
        [
            ({"budget": 0}, "budget"),
            ({"search": {"lrr": True}}, "search"),
            ({"search": {"lr": "0.1"}}, "search['lr']"),
            ({"search": {"optimizer": True}}, "search['optimizer']"),
            ({"methods": []}, "methods"),
            ({"methods": {"fedavg": pt.ditto(lr=0.1)}}, "methods"),
            ({"roundss": 3}, "roundss"),
            ({"resume": True}, "resume"),
            ({"methods": [pt.fedalt(personal="nowhere.*", lr=0.1)]}, "personal"),
        ],
    )
    def refused(options: dict[str, Any], field: str) -> None:
        with pytest.raises(pt.Refused) as error:
            tune(**options)
        assert error.value.field == field

    refused()
    assert runs.seen == []


def test_what_is_searched_can_be_chosen() -> None:
    method = pt.fedalt(personal="output", lr=pt.optim.linear(0.1), momentum=0.5)
    usual = space(method)
    assert list(usual) == ["lr", "personal_lr"]
    assert usual["lr"].start == 0.1
    assert usual["lr"].option(0.4) == pt.optim.linear(0.4)
    assert usual["personal_lr"].option(0.4) == pt.optim.linear(0.4)
    wishes = {"lr": False, "momentum": True, "a.personal": ["input", "output"], "b.personal_lr": False}
    chosen = space(method, wishes, "a")
    assert list(chosen) == ["personal", "personal_lr", "momentum"]
    assert (chosen["personal"].start, chosen["personal"].option(0)) == (1, "input")
    assert list(space(method, wishes, "b")) == ["momentum"]
    assert [d.start for d in space(pt.scaffold(lr=0.1), {"option": True, "weighting": True}).values()] == [
        0.1, 1, 1.0, 1,
    ]  # fmt: skip
    far = space(pt.fedavg(lr=1e-5))["lr"].values
    assert isinstance(far, pt.Range)
    assert far.low < 1e-5
    stages = space(pt.pipeline(pt.fedavg(lr=0.1), pt.stage(pt.finetune("all", lr=0.2), epochs=1)))
    assert {name: d.start for name, d in stages.items()} == {"0.lr": 0.1, "1.lr": 0.2}
    assert space(pt.fedavg(lr=lambda t, rounds: 0.1)) == {}  # noqa: ARG005


@pytest.mark.usefixtures("runs")
def test_the_best_is_written_as_it_is_read() -> None:
    found = tune({"ditto": pt.ditto(lr=0.5)}, budget=8)
    best = found.best["ditto"].options
    text = found.expression("ditto", "ditto(weight_decay=0.1, lr=0.5)")
    from partita.recipes.versus import methods_of

    base = Experiment(MODEL, data(), pt.fedavg(lr=0.5), rounds=2)
    (read,) = methods_of(base, [text]).values()
    assert {k: read.options[k] for k in ("lr", "lam", "personal_lr")} == {
        k: best[k] for k in ("lr", "lam", "personal_lr")
    }
    assert read.options["weight_decay"] == 0.1


def test_the_stages_of_a_pipeline_are_written_one_by_one() -> None:
    both = pt.pipeline(pt.fedavg(lr=0.5), pt.stage(pt.finetune("all", lr=0.5), epochs=1))
    options = {"0.lr": 0.2, "1.lr": 0.01}
    trial = tuning.Trial("both", 1, "complete", 0.9, dict(options), options, [], True, "accuracy", 0.1)
    found = pt.Tuning({"both": both}, {"both": space(both)}, 2, [trial])
    text = found.expression("both", "fedavg(lr=0.5) > finetune(personal=all)")
    assert text == "fedavg(lr=0.2) > finetune(personal=all, lr=0.01)"
    assert [s.algorithm.options["lr"] for s in found.best["both"].stages] == [0.2, 0.01]


@pytest.mark.usefixtures("runs")
def test_tables_and_the_page(tmp_path: Path) -> None:
    found = tune({"<b>": pt.fedavg(lr=0.5), "ditto": pt.ditto(lr=0.5)}, budget=4, out=tmp_path / "found")
    rows = found.table()
    assert len(rows) == 8
    assert rows[0]["option.lr"] == 0.5
    assert "ditto" in str(found)
    assert "<b>" not in found._repr_html_().replace("<b>Best", "")
    page = (tmp_path / "found/report.html").read_text()
    assert "Made by Partita" in page
    for word in ("Best so far", "All trials", "personal_lr", "&lt;b&gt;"):
        assert word in page, word
    assert "https://" not in page.split("<script>")[0]
    assert found.report(tmp_path / "again.html").read_text() == page


def test_a_run_scores_its_validation_samples() -> None:
    """The real thing: a few trials on data that are easy to learn."""
    found = tune(budget=3, rounds=4, executor="vmap")
    assert {t.state for t in found.trials} <= {"complete", "pruned"}
    assert all(0 <= t.score <= 1 for t in found.trials if t.score is not None)
    assert all(t.curve for t in found.trials)


def test_without_optuna_it_says_what_to_install(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning._optuna.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(pt.Refused) as refused:
        tune()
    assert refused.value.field == "tune"
    assert "partita[tune]" in refused.value.allowed
    assert runs.seen == []
