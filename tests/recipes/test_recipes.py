"""The recipes of the papers at their smallest: they run, and their tables are filled."""

from __future__ import annotations

import functools
import math
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

from partita import data, fedavg, federate, models
from partita.engine.record import Record, Summary
from partita.recipes import RECIPES, Study, partial, persafl, privacy, quadratic
from partita.recipes.bytes import frontier
from partita.recipes.byzantine import aggregators, attacks
from partita.recipes.expressions import parse
from partita.recipes.fedplus import table_methods
from partita.recipes.fedplus_figures import took_part
from partita.recipes.quadratic import error_table, errors
from partita.recipes.study import run_study
from partita.recipes.tables import Runs, Table
from partita.schedule import Asynchronous
from support import Selected

NEEDS_DATA = pytest.mark.skipif("PARTITA_DATA" not in os.environ, reason="needs the data of PARTITA_DATA")


def run(name: str, *only: str, **settings: Any) -> tuple[Runs, list[Table]]:
    """The recipe with one seed, in memory."""
    found, tables = run_study(
        lambda seed: RECIPES[name](seed=seed, **settings),  # type: ignore[arg-type, return-value]
        [0],
        only=only,
        announce=lambda text: None,  # noqa: ARG005
        executor="vmap",
        progress=False,
    )
    return found, list(tables)


@functools.cache
def heterogeneity() -> tuple[Runs, list[Table]]:
    some: tuple[str, ...] = ("ffgg-zeta20", "scaffold-zeta20")
    if Selected.slow:
        some = ("ffgg-*", "scaffold-zeta20", "l2gd-zeta80", "local-gd-zeta40")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quadratic, "POINTS", 3)  # an evaluation takes as long as a round
        return run("ffgg-heterogeneity", *some, rounds=18)


@pytest.mark.slow
def test_heterogeneity_does_not_slow_ffgg_down() -> None:
    """Figure 2: the same error whatever ζ, orders below the others; more local steps, a lower floor."""
    runs, _ = heterogeneity()
    last = {name: errors(seeds[0])[-1] for name, seeds in runs.items()}
    ours = [last[f"ffgg-zeta{z}"] for z in (20, 40, 80)]
    assert max(ours) < 1e-5
    assert max(ours) < 3 * min(ours)
    for z in (20, 40, 80):
        assert last[f"ffgg-tau40-zeta{z}"] < last[f"ffgg-zeta{z}"]
    for name in ("scaffold-zeta20", "local-gd-zeta40", "l2gd-zeta80"):
        assert last[name] > 1e3 * max(ours)


def test_tables_of_errors_are_filled() -> None:
    runs, _ = heterogeneity()
    table = error_table(runs, "title")
    assert [row[0] for row in table.rows] == list(runs)
    first = dict(zip(table.columns, table.rows[0]))
    assert float(first["last error"]) == pytest.approx(errors(runs["ffgg-zeta20"][0])[-1], rel=0.1)
    assert int(first["rounds to 1e-4"]) <= 18


@pytest.mark.slow
def test_byzantine_clients_do_not_stop_a_robust_aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figure 4: one θ* for all is found although ten of 42 flip signs; the mean diverges under large ones."""
    monkeypatch.setattr(quadratic, "POINTS", 2)
    some = ("same-flip-median", "same-flip4-*", "own-flip-median")
    runs, _ = run("ffgg-byzantine", *some, rounds=22)
    last = {name: errors(seeds[0])[-1] for name, seeds in runs.items()}
    assert last["same-flip-median"] < 1e-5
    assert last["same-flip4-median"] < 1e-5
    assert last["same-flip4-mean"] > 1
    assert last["own-flip-median"] > 1e-2  # honest gradients disagree: an error remains


def test_stale_gradients_converge_where_one_theta_fits_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronously slower for each gradient, much sooner on the clock, and better with more steps."""
    monkeypatch.setattr(quadratic, "POINTS", 4)
    some = ("same-sync-5", "same-async-5", "same-async-10")
    runs, _ = run("ffgg-async", *some, directions=200)
    last = {name: errors(runs[name][0])[-1] for name in some}
    assert last["same-async-5"] < 2e-3
    assert last["same-async-10"] < last["same-async-5"] / 5
    clock = {name: runs[name][0].summary()["clock"] for name in some}
    assert clock["same-async-5"]["time"] < clock["same-sync-5"]["time"] / 2
    assert clock["same-async-5"]["staleness"]["max"] > 10
    assert [row[0] for row in quadratic._directions(runs, clients=10).rows] == list(some)
    pair = {name: runs[name] for name in some[:2]}
    (first,), (second,) = (chart.panels for chart in quadratic._directions_charts(pair, clients=10))  # Fig. 3
    for series, name in zip(first.series, some):
        assert list(series.x) == list(range(0, 201, 50))  # gradients: 10 in a synchronous round
        assert series.y == pytest.approx([1.0, *errors(runs[name][0])])
    assert all(age is not None and age > 1 for age in second.series[0].y)


@NEEDS_DATA
def test_arrivals_are_ahead_of_rounds_in_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persafl, "POINTS", 1)
    runs, _ = run("persafl-mnist", "fedavg", "fedasync", time=9.0, batch=2, tune=1)
    synchronous, asynchronous = (runs[name][0].summary() for name in ("fedavg", "fedasync"))
    assert (synchronous["rounds"], asynchronous["rounds"] > 15) == (1, True)
    assert asynchronous["clock"]["active"] > 3 * synchronous["clock"]["active"]
    assert all(s["clock"]["time"] <= 9.0 for s in (synchronous, asynchronous))
    table = persafl._table(runs)
    active, uploading = (table.columns.index(f"{what}, %") for what in ("active", "uploading"))
    assert [row[active] for row in table.rows][1] == "100"  # nothing limits who is in flight
    assert 60 < float(table.rows[1][uploading]) < 90
    shares, scores = persafl._figure(runs, "mnist").panels
    assert [s.name for s in scores.series] == ["fedavg", "fedasync"]
    assert [s.name for s in shares.series][::2] == ["asynchronous, active", "synchronous, active"]
    assert shares.series[0].y == pytest.approx([100.0])


@NEEDS_DATA
def test_the_step_of_each_method_is_picked_on_validation_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persafl, "GRID", (1.0, 8.0))
    study = RECIPES["persafl-mnist"](time=9.0, tuning=True)
    assert isinstance(study, Study)
    assert len(study.variants) == 2 * 8
    steps = {k: v.experiment.algorithm.options.get("server_lr") for k, v in study.variants.items()}
    assert (steps["fedasync-8"], steps["scaffold-8"]) == (8 / 30, 8.0)
    assert study.variants["pfedme-1"].experiment.data.sizes("validation").min() > 0
    found = {
        "fedavg-1": [0.5, 0.7],
        "fedavg-8": [None, 0.1],
        "fedprox-1": [None, None],
        "fedprox-8": [0.2, 0.3],
    }
    runs: Any = {
        name: [
            SimpleNamespace(metrics=[{"validation.personal": 0.9}, {"validation.personal": v}]) for v in last
        ]
        for name, last in found.items()
    }
    table = persafl._tuning(runs)
    assert table.rows == [
        ("fedavg", "60.0 ± 14.1", "diverged", "1"),
        ("fedprox", "diverged", "25.0 ± 7.1", "8"),
    ]
    assert """--set 'step={"fedavg": 1, "fedprox": 8}'""" in table.note
    first, second = persafl._tuning_chart(runs).panels[0].series
    assert first.y == [pytest.approx(60.0), None]
    assert second.y == [None, pytest.approx(25.0)]


@NEEDS_DATA
def test_the_eight_methods_of_persafl() -> None:
    for name in ("persafl-mnist", "persafl-cifar"):
        study = RECIPES[name](time=9.0)
        assert isinstance(study, Study)
        assert len(study.variants) == 8
        assert study.variants["scaffold"].experiment.algorithm.options["option"] == 1  # footnote 5
        schedules = {k: v.experiment.schedule for k, v in study.variants.items()}
        assert [k for k, s in schedules.items() if isinstance(s, Asynchronous)] == [
            "fedasync",
            "persafl_maml",
            "persafl_me",
        ]


def test_pfedme_of_partial_splits_moves_its_shared_model() -> None:
    """Its outer steps are as long as those of SGD, however small λ is."""
    start = models.mlp(64, 16, 10)
    dealt = data.digits(6, data.label_skew(classes=3), validation=0)
    for lam in (0.1, 1e-4):
        t: Any = SimpleNamespace(lr=(0.1, 0.1, 0.1), pfedme=lam, max_grad_norm=None, rounds=(3, 3), epochs=1)
        method = partial.moreau(t).stages[0].algorithm
        assert method.options["weighting"] == "samples"
        moved = []
        for rule in (method, fedavg(0.1)):
            done = federate(start, dealt, rule, rounds=3, steps=5, batch=16, baselines=False)
            end, begin = (parameters_to_vector(m.parameters()).detach() for m in (done.model(), start))
            moved.append(float((end - begin).norm()))
        assert 0.5 < moved[0] / moved[1] < 2


@NEEDS_DATA
def test_steps_of_persafl_by_method() -> None:
    study = RECIPES["persafl-mnist"](time=9.0, **parse(['step={"fedasync": 6, "scaffold": 2}']))
    assert isinstance(study, Study)
    assert tuple(study.variants) == persafl.NAMES
    steps = {k: v.experiment.algorithm.options.get("server_lr") for k, v in study.variants.items()}
    assert (steps["fedasync"], steps["scaffold"], steps["persafl_me"]) == (6 / 30, 2.0, 4 / 30)
    for wrong, named in (({"fedasinc": 1}, "fedasync"), ({"fedavg": 0}, "step of fedavg"), ("four", "step")):
        with pytest.raises(ValueError, match=named):
            RECIPES["persafl-mnist"](step=wrong)


def test_seeds_that_do_not_reach_an_error_are_counted() -> None:
    config = {"data": {"source": {"gradient_norm_at_start": 1.0}}}
    seeds: Any = [
        SimpleNamespace(
            config=config, metrics=[{"round": 5, "measures": {"gradient_norm": {"total": error}}}]
        )
        for error in (1e-7, 1e-2, 1e-8)
    ]
    assert quadratic._rounds_to(seeds, 1e-6) == "5 ± 0 (2 of 3)"


def test_few_steps_of_conjugate_gradients_do() -> None:
    """Figure 1a, at its beginning: two steps are as good as ten until the error is small."""
    runs, _ = run("ffgg-solver", "cg-2", "cg-10", rounds=12)
    few, many = (errors(runs[name][0]) for name in ("cg-2", "cg-10"))
    assert few[-1] < 0.1
    np.testing.assert_allclose(few, many, rtol=0.05)


def test_methods_run_side_by_side() -> None:
    runs, (table,) = run("ffgg-methods", rounds=1)
    assert len(runs) == len(table.rows) == 12
    study = RECIPES["ffgg-methods"](rounds=1)
    assert isinstance(study, Study)
    (chart,) = study.charts(runs)
    assert [panel.title for panel in chart.panels] == ["τ = 10", "τ = 20", "τ = 50"]
    assert all([s.name for s in panel.series] == list(quadratic.RIVALS.values()) for panel in chart.panels)


def test_what_diverged_is_not_drawn() -> None:
    """Figures 1, 2 and 4 draw the geometric mean of the seeds, where all of them are finite."""

    config = {"data": {"source": {"gradient_norm_at_start": 2.0}}}
    seeds: Any = []
    for norms in ((2.0, 0.2, None), (0.5, 0.8)):
        measured = [{"gradient_norm": {"total": norm}} for norm in norms]
        rows = [{"round": 5 * t, "measures": values} for t, values in enumerate(measured, start=1)]
        seeds.append(SimpleNamespace(config=config, metrics=rows))
    series = quadratic._descent("name", seeds, 3)
    assert list(series.x) == [0, 15, 30]
    assert series.y == pytest.approx([1.0, 0.5, 0.2])


@pytest.mark.parametrize("name", ["ffgg-solver", "ffgg-heterogeneity", "ffgg-byzantine"])
def test_charts_draw_all_variants(name: str) -> None:
    study = RECIPES[name]()
    assert isinstance(study, Study)
    drawn: list[str] = []

    class Seen(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            drawn.append(key)
            return ()

    (chart,) = study.charts(Seen())
    assert sorted(drawn) == sorted(study.variants)
    assert all(panel.log == "y" for panel in chart.panels)


def test_fed_plus_makes_no_step_to_the_aggregate() -> None:
    """Figures 1 to 3."""
    runs, (table,) = run("fedplus-collapse", rounds=2)
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert float(rows["fedavg_plus"]["change, largest"]) == float(rows["local"]["change, mean"]) == 0
    assert float(rows["fedavg"]["change, mean"]) > 0.1
    assert float(rows["fedavg"]["loss after"]) > float(rows["fedavg"]["loss before"])
    assert all(len(seeds[0].metrics) == 2 for seeds in runs.values())
    study = RECIPES["fedplus-collapse"](rounds=2)
    assert isinstance(study, Study)
    changes, scores, ways = study.charts(runs)
    for chart in (changes, scores, ways):
        assert [panel.title for panel in chart.panels] == list(runs)
    fedavg = list(runs).index("fedavg")
    (change,), (accuracy,), (way, before) = (c.panels[fedavg].series for c in (changes, scores, ways))
    row = runs["fedavg"][0].metrics[-1]
    assert change.y[-1] == row["measures"]["aggregation_change"]["mean"]
    assert change.spread[-1] == row["measures"]["aggregation_change"]["std"]
    assert accuracy.y[-1] == pytest.approx(100 * row["test.personal"])
    assert list(way.y) == row["measures"]["line_loss"]["loss"]
    assert before.y[0] == runs["fedavg"][0].metrics[0]["measures"]["line_loss"]["loss"][-1]
    nothing = [SimpleNamespace(metrics=[])]  # of a run that ended before its first evaluation
    assert all(not panel.series for panel in study.charts({"fedavg": nothing})[2].panels)


def test_what_aggregation_does_to_a_run_that_diverged() -> None:
    change, line = {"mean": 0.5, "std": 0.1}, [0.1, 0.3]
    fine = {"aggregation_change": change, "line_loss": {"loss": line}}
    lost = {"aggregation_change": {"mean": None, "std": None}, "line_loss": {"loss": [0.3, None]}}
    study = RECIPES["fedplus-collapse"](rounds=2)
    assert isinstance(study, Study)
    for ended, row in (
        ((fine, lost), ("0.500", "0.500", "0.200", "0.300")),
        ((lost, {}), ("-", "-", "0.300", "-")),
        ((None, {"line_loss": None}), ("-",) * 4),
        ((), ("-",) * 4),
    ):
        rows = [{"round": i, "test.personal": None, "measures": m} for i, m in enumerate(ended, start=1)]
        facts = Summary(test={"personal": None})
        runs = {"fedavg": [Record(rows, [], {}, facts)]}
        (table,) = study.tables(runs)
        assert table.rows == [("fedavg", *row, "-")]
        assert len(study.charts(runs)) == 3


def test_parties_that_never_took_part_are_not_scored() -> None:
    """A party without a turn has its zero start, which says nothing of the method."""
    rows = [
        {"client": "a", "personal": 0.9, "n_test": 30, "reports": 2, "late": 0},
        {"client": "b", "personal": 0.5, "n_test": 10, "reports": 0, "late": 1},
        {"client": "c", "personal": 0.0, "n_test": 99, "reports": 0, "late": 0},
        {"client": "d", "personal": 0.1, "n_test": 99, "reports": 0, "late": 0},
    ]
    study = RECIPES["fedplus-synthetic"](rounds=2, epochs=1)
    assert isinstance(study, Study)
    one = Record([], rows, {}, Summary(test={"personal": 0.2}))
    runs = {name: [one] for name in study.variants}
    scores, parties = study.tables(runs)
    assert scores.rows[0][1:] == ("80.0", "70.0", "50.0")
    assert parties.rows[0] == ("3", "80.0", "70.2", "50.0")
    (chart,) = study.charts(runs)
    assert chart.panels[1].series[0].y == pytest.approx([80.0] * 3)


def test_all_methods_of_figure_4_ask_the_same_parties() -> None:
    names = ("fedavg-N30", "rfa-N30", "fedavg_plus-N30", "local-N30")
    runs, _ = run("fedplus-synthetic", *names, rounds=1, epochs=2)
    took = [took_part(runs[name][0]) for name in names]
    assert [int(who.sum()) for who in took] == [10] * 4
    assert all(np.array_equal(who, took[0]) for who in took)


def test_regression_has_a_column_for_each_method() -> None:
    runs, (table,) = run("fedplus-regression", rounds=2)
    assert len(runs) == len(table_methods(1e-4, 1.0)) == 8
    assert len(table.rows[0]) == len(table.columns) == 9
    assert "/ 2764" in table.rows[0][1]


def test_fedavg_drops_stragglers_and_the_others_use_their_work() -> None:
    study = RECIPES["fedplus-synthetic"](epochs=5)
    assert isinstance(study, Study)
    late = {
        name: getattr(variant.experiment.schedule, "late", None) for name, variant in study.variants.items()
    }
    assert late.pop("fedavg-N30") == "drop"
    assert set(late.values()) == {"partial"}
    whole, part = (study.variants[f"fedavg_plus-N{n}"].experiment.data for n in (30, 15))
    assert torch.equal(whole.client(14)[0], part.client(14)[0])
    runs, _ = run("fedplus-synthetic", "fedavg_plus-N3", rounds=1, epochs=2)
    (found,) = runs["fedavg_plus-N3"]
    assert sorted(row["epochs"] for row in found.clients) == [1, 1, 2]  # of three parties two straggle


def test_figure_4_has_a_curve_for_each_method() -> None:
    study = RECIPES["fedplus-synthetic"](rounds=2, epochs=1)
    assert isinstance(study, Study)
    found, _ = run("fedplus-synthetic", "fedavg_plus-N3", rounds=2, epochs=1)
    runs = dict.fromkeys(study.variants, found["fedavg_plus-N3"])
    (chart,) = study.charts(runs)
    learning, parties = chart.panels
    assert [s.name for s in learning.series] == [
        *("fedavg", "fedprox", "rfa", "coordinate_median", "fedavg_plus", "fedgeomed_plus", "fedcomed_plus"),
        "local",
    ]
    assert all(list(s.x) == [1, 2] for s in learning.series)
    assert [list(s.x) for s in parties.series] == [["3", "15", "30"]] * 3
    table = study.tables(runs)[1]
    assert [row[0] for row in table.rows] == ["3", "15", "30"]
    assert [row[2] for row in table.rows] == ["70.2", "90.7", "98.0"]


@NEEDS_DATA
@pytest.mark.parametrize(("data", "parties", "classes"), [("mnist", 100, 1), ("femnist", 20, 5)])
def test_handwriting_with_few_classes(data: str, parties: int, classes: int) -> None:
    study = RECIPES["fedplus-stragglers"](data=data)
    assert isinstance(study, Study)
    source = study.variants[f"fedavg-N{parties}"].experiment.data
    assert source.clients == parties
    held = [set(source.client(i)[1].tolist()) | set(source.client(i, "test")[1].tolist()) for i in range(10)]
    assert all(len(labels) == classes and labels <= set(range(10)) for labels in held)
    few = f"fedgeomed_plus-N{parties // 10}"
    runs, _ = run("fedplus-stragglers", few, data=data, rounds=2, epochs=2)
    assert runs[few][0].summary()["test"]["personal"] > 0.1


@NEEDS_DATA
def test_shifted_mnist_runs() -> None:
    runs, _ = run("fedplus-mnist", "robust-N10-fedgeomed_plus", rounds=2)
    (found,) = runs["robust-N10-fedgeomed_plus"]
    assert found.summary()["test"]["personal"] > 0.3
    assert found.metrics[-1]["aggregation"]["iterations"] >= 1


@NEEDS_DATA
def test_the_table_of_attacks() -> None:
    runs, (table,) = run("byzantine", clients=8, rounds=1)
    assert len(runs) == len(aggregators(2)) * len(attacks())
    assert len(table.rows) == len(aggregators(2))
    assert all(len(row) == 1 + len(attacks()) for row in table.rows)
    clients = runs["mean-sign_flip"][0].clients
    assert sum(row["byzantine"] for row in clients) == 2


@NEEDS_DATA
def test_ffgg_on_real_data_runs() -> None:
    some = ("ffgg-output", "ffgg-output-random")
    runs, _ = run("ffgg-real", *some, clients=4, rounds=1, personal_rounds=1, epochs=1)
    assert set(runs) == {"fedavg", *some}
    assert all(runs[name][0].summary()["test"]["personal"] is not None for name in some)


def test_the_tables_of_privacy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of ten clients: a cell for each method and ε, and the charts have all of them."""
    digits = data.digits(clients=10, validation=0.2)
    monkeypatch.setattr(privacy.data, "real", lambda name, **options: digits)  # noqa: ARG005
    monkeypatch.setattr(privacy, "network", lambda size, seed: models.mlp(64, 16, 10, seed=seed))  # noqa: ARG005
    for constant, fewer in (
        ("EPSILONS", (0.5, 8.0)),
        ("CLIPS", dict.fromkeys((0.5, 8.0), (0.1, 1.0))),
        ("RATES", (0.4,)),
    ):
        monkeypatch.setattr(privacy, constant, fewer)
    runs, tables = run("privacy-utility", clients=10, rounds=1)
    scores, losing, costs, chosen = tables
    methods = list(privacy.TITLES.values())
    assert [row[0] for row in scores.rows] == [row[0] for row in losing.rows] == methods
    assert len(costs.rows) == 2 * len(methods)
    assert scores.columns[1:] == ("ε = 0.5", "ε = 8", "no noise")
    for row in chosen.rows:
        assert set(row[1:3]) <= {"0.1", "1"}
        assert row[3] == "0.4"
    for name, seeds in runs.items():
        (record,) = seeds
        level = name.rsplit("-", 2)[1]
        account = record.summary().get("privacy")
        assert (account is None) == (level == privacy.NONE)
        assert account is None or 0.98 * float(level) < account["epsilon"] <= float(level)
    utility, by_size = privacy.charts(runs)
    (panel,) = utility.panels
    assert [line.name for line in panel.series] == [*methods, "alone"]
    assert all(len(line.x) == 3 for line in panel.series[:-1])
    assert [len(panel.series) for panel in by_size.panels] == [len(methods)] * 2


class Scored:
    """Of a run: what each client has, and how many samples."""

    def __init__(self, scores: list[float], samples: list[int] | None = None) -> None:
        self._scores, self._samples = np.array(scores), np.array(samples or [1] * len(scores))
        self.table = self

    def scores(self, model: str) -> np.ndarray:
        assert model == "personal"
        return self._scores

    def numbers(self, column: str) -> np.ndarray:
        assert column == "n_train"
        return self._samples


def test_the_cost_of_privacy_is_of_a_third_of_the_clients() -> None:
    """The third with the fewest samples loses 0.1 and 0.3; one of the others has no test samples."""
    samples = [50, 1, 60, 2, 70, 80]
    plain = Scored([0.5, 0.6, 0.7, 0.9, math.nan, 0.8], samples)
    private = Scored([0.4, 0.5, 0.5, 0.6, math.nan, 0.4], samples)
    assert privacy.cost(private, plain, 0) == pytest.approx(-0.2)
    assert privacy.cost(private, plain, 1) == pytest.approx(-0.15)
    assert privacy.cost(private, plain, 2) == pytest.approx(-0.4)


def test_who_would_rather_be_alone() -> None:
    alone = Scored([0.5, 0.6, math.nan, 0.8])
    assert privacy._losing(Scored([0.4, 0.7, math.nan, 0.8]), alone) == pytest.approx(1 / 3)
    assert privacy._losing(alone, alone) == 0


@NEEDS_DATA
@pytest.mark.slow
def test_the_table_of_bytes() -> None:
    """One round: what a run sends is what its compressor says, and the figure has all of it."""
    runs, (table,) = run("bytes-utility", clients=6, rounds=1)
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == list(runs)
    fewer = {name: float(row[3]) for name, row in rows.items()}
    assert fewer["half"] == 2
    assert 31 < fewer["quantize-1"] * 1.06 < 34
    assert fewer["topk-0.1-quantize-8"] > fewer["topk-0.1"] > 1
    assert [rows[name][-1] for name in ("dense", "half", "topk-0.1")] == ["", "-", "-"]
    assert rows["topk-0.01"][-1] in ("yes", "no")
    chart = frontier(runs)
    (panel,) = chart.panels
    assert sum(len(line.x) for line in panel.series) == len(runs)
    assert all(0 < x < 1 for line in panel.series for x in line.x)
