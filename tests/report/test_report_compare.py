"""The numbers of a comparison, against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
from report_rows import client, fake

from partita.engine.record import Record
from partita.report.compare import paired, table
from partita.report.ranking import sentence, standing


def test_a_row_of_the_table_by_hand() -> None:
    run = fake(
        client("a", 0.9, 0.8, 0.7, n_test=10),
        client("b", 0.5, 0.6, 0.6, n_test=30),
        client("c", 0.4, 0.4, 0.3, n_test=60),
        client("no test", None, None, None, n_test=0),
        seconds=4.0,
        client_steps_per_second=50.0,
        bytes_up=7,
        bytes_down=9,
    )
    [row] = table({"fedalt": [run]})
    assert row["label"] == "fedalt"
    assert (row["seeds"], row["metric"], row["higher_is_better"]) == (1, "accuracy", True)
    assert row["personal"] == {"mean": pytest.approx((9 + 15 + 24) / 100), "std": 0.0}
    assert row["global"]["mean"] == pytest.approx((8 + 18 + 24) / 100)
    assert row["local"]["mean"] == pytest.approx((7 + 18 + 18) / 100)
    # sorted 0.4, 0.5, 0.9: a tenth of the way from the first to the last is 0.2 of the first gap
    assert row["worst_tenth"]["mean"] == pytest.approx(0.42)
    assert (row["hurt_vs_global"], row["hurt_vs_local"], row["scored"]) == (1, 1, 3)
    assert (row["seconds"], row["client_steps_per_second"]) == (4.0, 50.0)
    assert (row["bytes_up"], row["bytes_down"]) == (7, 9)
    assert row["best"] is True


def test_the_summary_knows_better_than_the_rows() -> None:
    run = fake(client("a", 0.9), test={"local": None, "global": 0.5, "personal": 0.75}, scored=12)
    [row] = table({"x": [run]})
    assert row["personal"]["mean"] == 0.75
    assert row["global"]["mean"] == 0.5
    assert row["local"] is None
    assert row["scored"] == 12


def test_seeds_have_a_mean_and_a_sample_deviation() -> None:
    seeds = [
        fake(client("a", 0.6, 0.7), client("b", 0.6, 0.7), seed=0, seconds=1),
        fake(client("a", 0.8, 0.7), client("b", 0.8, 0.9), seed=1, seconds=2),
    ]
    [row] = table({"x": seeds})
    assert row["seeds"] == 2
    assert row["personal"] == {"mean": pytest.approx(0.7), "std": pytest.approx(math.sqrt(0.02))}
    assert row["hurt_vs_global"] == 1.5  # two, then one
    assert row["hurt_vs_local"] is None
    assert row["seconds"] == 1.5


@pytest.mark.parametrize(("higher", "best"), [(True, "large"), (False, "small")])
def test_the_best_label_follows_the_metric(higher: bool, best: str) -> None:
    small, large = (fake(client("a", x, 2.0), higher_is_better=higher, metric="m") for x in (1.0, 3.0))
    rows = table({"small": [small], "large": [large]})
    assert [row["label"] for row in rows if row["best"]] == [best]
    hurt = {row["label"]: row["hurt_vs_global"] for row in rows}
    assert hurt == ({"small": 1, "large": 0} if higher else {"small": 0, "large": 1})


def test_the_worst_tenth_of_errors_is_the_largest() -> None:
    clients = [client(str(i), float(i)) for i in range(11)]
    assert table({"x": [fake(*clients, higher_is_better=False)]})[0]["worst_tenth"]["mean"] == 9.0
    assert table({"x": [fake(*clients)]})[0]["worst_tenth"]["mean"] == 1.0


def test_nan_none_and_missing_scores_are_no_scores() -> None:
    run = fake(client("a", float("nan"), 0.5), client("b", None, 0.5), {"client": "c"}, client("d", 0.5, 0.6))
    [row] = table({"x": [run]})
    assert row["personal"]["mean"] == 0.5
    assert row["scored"] == 1
    assert row["hurt_vs_global"] == 1
    assert row["bytes_up"] is None


def test_without_any_score_nothing_is_best() -> None:
    [row] = table({"x": [fake(client("a", None))]})
    assert row["best"] is False
    assert row["personal"] is None
    assert row["worst_tenth"] is None
    assert paired({"x": [fake(client("a", None))], "y": [fake(client("a", None))]})[0]["clients"] == 0


def test_paired_by_hand() -> None:
    names = "abcdef"
    better = fake(*(client(n, x) for n, x in zip(names, (0.9, 0.8, 0.7, 0.6, 0.5, 0.1))))
    worse = fake(*(client(n, x) for n, x in zip(names, (0.8, 0.6, 0.4, 0.2, 0.5, 0.6))))
    [row] = paired({"worse": [worse], "better": [better]})
    assert (row["label"], row["against"], row["clients"]) == ("worse", "better", 6)
    assert (row["better"], row["equal"], row["worse"]) == (1, 1, 4)
    # differences −0.1 −0.2 −0.3 −0.4 0 +0.5
    assert row["median"] == pytest.approx(-0.15)
    assert row["mean"] == pytest.approx(-0.5 / 6)
    # ranks 1..5 without the zero, W+ = 5: of the 32 signs 10 have a sum of at most 5, and as many of 10 up
    assert row["p"] == pytest.approx(20 / 32)


def test_paired_honours_errors_and_the_label_asked_for() -> None:
    low = fake(client("a", 1.0), client("b", 2.0), higher_is_better=False, metric="mse")
    high = fake(client("a", 3.0), client("b", 5.0), higher_is_better=False, metric="mse")
    [row] = paired({"low": [low], "high": [high]}, against="high")
    assert (row["label"], row["better"], row["median"]) == ("low", 2, 2.5)
    assert paired({"low": [low], "high": [high]})[0]["label"] == "high"


def test_pairs_are_clients_by_name_and_seed() -> None:
    a = [fake(client("x", 0.5), seed=0), fake(client("x", 0.9), client("only here", 0.2), seed=7)]
    b = [fake(client("x", 0.4), client("nor here", 0.3), seed=0)]
    [row] = paired({"a": a, "b": b}, against="b")
    assert (row["clients"], row["median"]) == (1, pytest.approx(0.1))  # seed 7 has no partner
    b[0].facts["seed"] = 3  # now none has one: all combinations
    assert paired({"a": a, "b": b}, against="b")[0]["median"] == pytest.approx(0.3)


def test_numbered_clients_of_other_data_are_units_by_seed() -> None:
    def runs(first: float, second: float, name: str = "3") -> list[Record]:
        made = [fake(client(name, x), seed=seed) for seed, x in enumerate((first, second))]
        for seed, run in enumerate(made):
            run.config["data"] = {"fingerprint": f"data {seed}"}
        return made

    [row] = paired({"a": runs(0.5, 0.9), "b": runs(0.4, 0.95)}, against="b")
    assert (row["clients"], row["better"], row["worse"]) == (2, 1, 1)
    [row] = paired({"a": runs(0.5, 0.9, "Hamlet/HAMLET"), "b": runs(0.4, 0.95, "Hamlet/HAMLET")}, against="b")
    assert (row["clients"], row["median"]) == (1, pytest.approx(0.025))
    # no seed in common and other data: nobody to compare
    [row] = paired({"a": runs(0.5, 0.9)[:1], "b": runs(0.4, 0.95)[1:]}, against="b")
    assert (row["clients"], row["p"]) == (0, None)


@pytest.mark.parametrize(("other", "pairs"), [("d1", 1), ("d2", 0)])
def test_clients_of_other_data_are_not_ranked_together(other: str, pairs: int) -> None:
    """Client 3 of one data set has nothing to do with client 3 of another: nothing is said of them."""

    def run(digest: str, gain: float) -> Record:
        found = fake(*[client(str(i), 0.5 + 0.01 * i + gain) for i in range(20)])
        found.config["data"] = {"fingerprint": digest}
        return found

    runs = {"one": [run("d1", 0.1)], "two": [run(other, 0.0)]}
    where = standing(runs)
    assert len(where.pairs) == pairs
    assert where.means["one"].mean == pytest.approx(0.695)
    assert ("have different data" in sentence(where, "accuracy", runs)) == (not pairs)


def test_rounding_is_no_difference() -> None:
    a = [fake(client("x", 0.1 + 0.2), seed=0), fake(client("x", 0.6), seed=1)]
    b = [fake(client("x", 0.6), seed=0), fake(client("x", 0.3), seed=1)]
    [row] = paired({"a": a, "b": b}, against="b")
    assert (row["equal"], row["median"], row["p"]) == (1, 0.0, None)
    tiny = [fake(client("x", 1e-12)), fake(client("x", 3e-12))]
    assert paired({"a": tiny[:1], "b": tiny[1:]})[0]["worse"] == 1


def test_bad_input_is_named() -> None:
    run = fake(client("a", 0.5))
    with pytest.raises(ValueError, match="at least one label"):
        table({})
    with pytest.raises(ValueError, match=r"runs\['x'\].*at least one run"):
        table({"x": []})
    with pytest.raises(ValueError, match=r"metric of runs=.*accuracy.*mse.*one metric"):
        table({"x": [run], "y": [fake(client("a", 0.5), metric="mse")]})
    with pytest.raises(ValueError, match=r"against='fedalt2'.*did you mean 'fedalt'"):
        paired({"fedalt": [run], "y": [run]}, against="fedalt2")


def test_rounding_does_not_break_ties() -> None:
    stats = pytest.importorskip("scipy.stats")
    scores = ((0.3, 0.2), (0.8, 0.7), (0.2, 0.3), (0.5, 0.3), (0.9, 0.6))  # 0.1 comes out three times over
    a, b = (fake(*(client(n, pair[side]) for n, pair in zip("abcde", scores))) for side in (0, 1))
    [row] = paired({"a": [a], "b": [b]}, against="b")
    assert row["p"] == pytest.approx(stats.wilcoxon([1, 1, -1, 2, 3]).pvalue)
