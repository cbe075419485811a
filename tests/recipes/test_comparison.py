"""`partita.compare` and `partita.split`: the study of the commands, on a model and data of one's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import partita as pt
from partita.cli import tables
from partita.engine.record import Record, Summary
from partita.recipes.experiment import Experiment
from partita.recipes.study import read_study, run_study
from partita.recipes.versus import versus
from partita.report import compare as figures
from support import each

DATA = pt.data.digits(clients=6, partition=pt.data.label_skew(classes=3), test=0.4, validation=0, seed=0)
MODEL = pt.models.mlp(64, 8, 10)
SHORT: dict[str, Any] = {"rounds": 4, "steps": 3, "batch": 8, "executor": "vmap", "progress": False}


def compare(methods: Any, **options: Any) -> pt.Comparison:
    return pt.compare(MODEL, DATA, methods, **{"seeds": 2, **SHORT, **options})


def test_it_is_the_study_of_the_command(tmp_path: Path) -> None:
    """The same labels and, score for score, the same runs as `partita compare` has."""
    fedalt = pt.fedalt("output", lr=0.2)
    result = compare([fedalt, pt.ditto(lr=0.2)], out=tmp_path / "study")
    settings = {k: v for k, v in SHORT.items() if k not in ("executor", "progress")}
    records, _ = run_study(
        lambda seed: versus(Experiment(MODEL, DATA, fedalt, **settings, seed=seed), ["fedalt", "ditto"]),
        [0, 1],
        announce=lambda text: None,  # noqa: ARG005
        executor="vmap",
    )
    assert list(result.records) == list(records) == ["local", "fedavg", "fedalt", "ditto"]
    for label, runs in records.items():
        for ours, theirs in zip(result.records[label], runs, strict=True):
            assert list(ours.scores()) == list(theirs.scores())
    assert list(read_study(tmp_path / "study")) == list(records)
    assert (tmp_path / "study/report.html").exists()
    again = compare([fedalt, pt.ditto(lr=0.2)], out=tmp_path / "study", resume=True)
    assert again.table() == result.table()


def test_tables_are_plain(tmp_path: Path) -> None:
    result = compare({"fedavg": pt.fedavg(lr=0.3), "mine <b>": pt.fedsim("output", lr=0.2)}, seeds=[5, 3])
    rows = result.table()
    assert [row["label"] for row in rows] == ["local", "fedavg", "mine <b>"]
    for row in rows:
        assert all(not isinstance(value, dict) for value in row.values())
        assert row["personal"] == pytest.approx(
            sum(r.summary()["test"]["personal"] for r in result.records[row["label"]]) / 2
        )
    assert [r.summary()["seed"] for r in result.records["local"]] == [5, 3]
    assert result.leading in result.records
    assert result.best is None, "after four rounds nobody knows"
    assert {row["against"] for row in result.paired()} == {result.leading}
    text, markup = str(result), result._repr_html_()
    assert all(label in text for label in result.records)
    for words in ("95 % interval", "local epochs", "too early to say which method is best"):
        assert words in text
        assert words in result.summary()
        assert words in markup
    assert "mine &lt;b&gt;" in markup
    assert markup.count("<tr>") == 4
    assert result.report(tmp_path / "page.html").stat().st_size > 10_000
    options = result.records["fedavg"][0].config["algorithm"]
    assert options["lr"] == 0.3, "a baseline that is given is taken as it is"


def scored(mean: float) -> Record:
    """A run of twelve clients that has converged, with personal scores around this mean."""
    rows = [
        {"client": f"c{i}", "n_train": 20, "n_test": 10, "byzantine": 0, "personal": mean + 0.01 * (i % 3)}
        for i in range(12)
    ]
    facts = {"metric": "accuracy", "seed": 0, "scored": 12, "test": {"personal": mean + 0.01}}
    training = {"rounds": 9, "ended": "converged", "rising": False, "epochs": {"mean": 4.5}}
    return Record([], rows, {}, Summary(facts, training=training))


def test_the_best_is_named_and_marked_only_where_it_is_clear() -> None:
    for difference, best in ((0.3, "large"), (0.0, None)):
        result = pt.Comparison({"small": [scored(0.5)], "large": [scored(0.5 + difference)]})
        assert result.best == best
        marked = tables.comparison(figures.table(result.records), result.best, 200).columns[1]
        assert sum("green" in str(cell) for cell in marked.cells) == (best is not None)
    assert result.leading == "small"
    assert "4.5" in str(result)


@each(
    ("options", "field"),
    [
        ({"methods": "fedavg"}, "methods"),
        ({"methods": {"local": pt.fedavg(lr=0.1)}}, "methods"),
        ({"methods": [3]}, "methods['method']"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"rounds": 0}, "rounds"),
        ({"baselines": False}, "baselines"),
        ({"rund": 3}, "rund"),
    ],
)
def test_refusals(options: dict[str, Any], field: str) -> None:
    with pytest.raises(pt.Refused) as refused:
        compare(**{"methods": [pt.fedavg(lr=0.1)], **options})
    assert refused.value.field == field


def test_methods_of_one_name_are_numbered() -> None:
    result = compare([pt.fedsim("output", lr=0.1), pt.fedsim("input", lr=0.1)], seeds=1, rounds=1)
    assert list(result.records) == ["local", "fedavg", "fedsim", "fedsim-2"]


def test_a_split_has_a_row_for_each_part_and_advice(tmp_path: Path) -> None:
    result = pt.split(MODEL, DATA, ["input", "output"], lr=0.2, **SHORT)
    assert [row["part"] for row in result.table()] == ["none", "input", "output", "all"]
    assert result.recommendation.part is None  # four rounds say nothing
    assert result.recommendation.reason in str(result)
    assert "output" in result._repr_html_()
    assert result.report(tmp_path / "split.html").exists()
    with pytest.raises(pt.Refused) as refused:
        pt.split(MODEL, DATA, method=pt.fedavg(lr=0.1), **SHORT)
    assert refused.value.field == "method"


def test_validation_decides_between_splits() -> None:
    """Whichever split is best on validation samples is taken, whatever the test scores are."""
    result = pt.split(MODEL, DATA, ["output"], lr=0.2, **SHORT)
    for best in result.parts.values():
        for by_client in (False, True):
            scores = {label: 0.9 if part == best else 0.1 for label, part in result.parts.items()}
            records = {
                label: [validated(run, score, by_client) for run in result.records[label]]
                for label, score in scores.items()
            }
            advised = dataclasses.replace(result, records=records).recommendation
            assert advised.part == best


def validated(run: Record, score: float, by_client: bool) -> Record:
    """Return the record with these scores on validation samples."""
    rows = [{**row, **({"personal_validation": score} if by_client else {})} for row in run.clients]
    trained = {**run.facts["training"], "ended": "converged"}
    facts = Summary({**run.facts, "validation": {"personal": score}, "training": trained})
    return Record(run.metrics, rows, run.config, facts)
