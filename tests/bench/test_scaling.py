"""The model of bench/scaling.py at its limits, and that its commands and its simulation run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

import partita as pt
import scaling
import simulated
from drawing import speedup as drawing
from partita.cli.bench.workloads import WORKLOADS
from scaling import COHORT, GBIT, GPUS, NODE, WAYS, Costs
from support import each

FREE = math.inf  # a link
COSTS = Costs(
    client=1e-3,
    floor=5e-3,
    model=1 << 20,
    message=1e-4,
    sum=2e-4,
    row=2e-4,
    state=3e-4,
    place=1e-4,
    place_row=5e-5,
    fixed=1e-3,
    each=1e-6,
)
ONLY_GPUS = Costs(client=1e-3, floor=5e-3, model=1 << 20)


def test_a_round_of_one_worker_is_the_plain_sum() -> None:
    expected = 1000 * 1e-3 + 1e-4 + (1e-4 + 2e-4) + 1e-3 + 1000 * 1e-6
    assert scaling.seconds(COSTS, 1, 1000, 1.0) == pytest.approx(expected)  # it is beside the driver
    assert scaling.speedup(COSTS, 1, 1000, 1.0) == 1.0


def test_all_deltas_cost_a_row_for_each_client() -> None:
    expected = 1000 * 1e-3 + 1000 * 5e-5 + 1e-4 + 1000 * 2e-4 + 1e-3 + 1000 * 1e-6
    assert scaling.seconds(COSTS, 1, 1000, 1.0, "deltas") == pytest.approx(expected)


@each("way", list(WAYS))
def test_a_faster_link_never_slows_a_round(way: str) -> None:
    for gpus in GPUS:
        slow, fast = (scaling.seconds(COSTS, gpus, COHORT, link * GBIT, way) for link in (25, 50))
        assert fast <= slow
        assert (fast < slow) == (gpus > NODE)


def test_without_link_and_driver_the_speedup_is_the_number_of_gpus_up_to_the_floor() -> None:
    for gpus in (1, 2, 4, 8, 20, 100, 200):
        assert scaling.speedup(ONLY_GPUS, gpus, 1000, FREE) == pytest.approx(gpus)
    for gpus in (250, 500, 1000, 2000):
        assert scaling.speedup(ONLY_GPUS, gpus, 1000, FREE) == pytest.approx(200)


def test_more_gpus_than_clients_are_idle() -> None:
    found = [scaling.seconds(COSTS, gpus, 10, 25 * GBIT) for gpus in (10, 11, 1000)]
    assert found[0] == found[1] == found[2]


def test_the_bytes_that_cross_the_link() -> None:
    """Machines beside the driver's receive the model once; their shares or clients send back."""
    one = float(COSTS.model)
    expected = {"sums": 1 + 8, "deltas": 1 + 500, "states": 1 + 8 + 2 * 500}
    for way, models in expected.items():
        assert scaling.terms(COSTS, NODE, 1000, 1.0, way)["link"] == 0.0
        assert scaling.terms(COSTS, 2 * NODE, 1000, 1.0, way)["link"] == pytest.approx(models * one)


@each(
    ("name", "costs", "gpus", "link"),
    [
        ("local work", ONLY_GPUS, 4, FREE),
        ("launches", ONLY_GPUS, 500, FREE),
        ("copies", ONLY_GPUS._replace(place=1.0), 500, FREE),
        ("link", ONLY_GPUS, 64, 1e6),
        ("driver", ONLY_GPUS._replace(sum=0.1), 64, FREE),
        ("driver", ONLY_GPUS._replace(message=0.1), 64, FREE),
        ("round", ONLY_GPUS._replace(fixed=1.0), 64, FREE),
        ("round", ONLY_GPUS._replace(each=0.1), 64, FREE),
    ],
)
def test_the_bottleneck_has_its_name(name: str, costs: Costs, gpus: int, link: float) -> None:
    assert scaling.bottleneck(costs, gpus, 1000, link) == name


def test_the_fastest_number_of_gpus_is_where_work_and_driver_are_equal() -> None:
    """The smallest n c / W + W s is at W = √(n c / s)."""
    costs = Costs(client=1e-3, floor=0.0, model=0, sum=1e-4)
    assert scaling.best(costs, 10_000, FREE, most=1000) == pytest.approx(math.sqrt(10 / 1e-4), rel=0.05)


@each("name", list(scaling.STEPS_PER_SECOND))
def test_what_is_known_of_workloads_is_whole(name: str) -> None:
    costs = scaling.known_costs(name, {})
    assert all(value > 0 for value in costs)
    assert costs.model == sum(x.nbytes for x in WORKLOADS[name].model().parameters())
    for gpus in GPUS:
        for way in WAYS:
            assert 0 < scaling.speedup(costs, gpus, COHORT, 25 * GBIT, way) <= gpus


def test_costs_of_a_file_replace_those_that_are_known(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"leaf_cnn": {"sum": 1.5, "take": 3.0}}))
    known, changed = (scaling.known_costs("leaf_cnn", c) for c in ({}, scaling.read_costs(file)))
    assert changed == known._replace(sum=1.5)
    file.write_text(json.dumps({"leaf": {}}))
    with pytest.raises(ValueError, match=r"^--costs='leaf': .*leaf_cnn"):
        scaling.read_costs(file)
    with pytest.raises(SystemExit, match="2"):
        scaling.main(["table", "--costs", str(tmp_path / "missing.json")])


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    scaling.main(["table", "--gpus", "1", "1000", "--links", "25", "--workloads", "leaf_cnn"])
    printed = capsys.readouterr().out
    for way in ("sums", "deltas"):
        assert f"Cohorts of 1,000, 25 Gbit/s: {WAYS[way]}\n\n| GPUs | CNN of LEAF |" in printed
    assert printed.count("1×, 100 %, ") == printed.count("\n| 1,000 | ") == printed.count("| fastest | ") == 2


@each(
    ("gpus", "shown"),
    [
        (1, "1/s, 1×, 100 %, local work"),
        (100, "24/s, 24×, 24 %, driver"),
        (1000, "3.3/s, 3.3×, 0.33 %, driver"),
    ],
)
def test_a_cell_of_the_table(gpus: int, shown: str) -> None:
    assert scaling.cell(COSTS, gpus, 1000, FREE, "sums") == shown


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scaling.svg"
    for _ in range(2):  # it may be drawn again
        scaling.main(["draw", "--out", str(file)])
    assert "wrote" in capsys.readouterr().out
    words = " ".join(ElementTree.fromstring(file.read_text()).itertext())
    for text in ("CNN of LEAF", "ResNet-20", "logistic regression", "GPUs", "1,000", "ideal"):
        assert text in words


def test_names_at_the_same_height_are_drawn_apart() -> None:
    assert drawing._apart([50.0, 51.0, 200.0]) == [50.0, 50.0 + drawing.GAP, 200.0]


def test_a_share_of_few_clients_takes_as_long_as_that_of_all() -> None:
    for workers in (2, 4, 8):
        few = scaling.standing_for(COSTS, 1000, workers, workers)
        works = [scaling.terms(c, workers, n, FREE) for c, n in ((few, workers), (COSTS, 1000))]
        assert works[0]["local work"] == pytest.approx(works[1]["local work"])


def test_workers_wait_for_cores_only_where_they_are_more() -> None:
    costs = COSTS._replace(host=1.0)
    alone = scaling.seconds(costs, 2, 1000, FREE)
    assert scaling.here(costs, 2, 1000, "sums", 2) == pytest.approx(alone + 1.0)
    crowded = scaling.seconds(costs, 8, 1000, FREE) + 3 * costs.place + 4.0
    assert scaling.here(costs, 8, 1000, "sums", 2) == pytest.approx(crowded)


@each("way", ["sums", "deltas"])
def test_clients_that_sleep_send_what_clients_send(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: nothing is timed here, and workers have tests of their own."""
    monkeypatch.setattr(pt.workers, "processes", lambda count, threads: None)  # noqa: ARG005
    taken, overhead = simulated.rounds("logistic", 2, 4, way, client=1e-4, floor=1e-3, count=2)
    assert taken > 0
    assert overhead > 0


def test_states_are_not_simulated() -> None:
    with pytest.raises(SystemExit, match="2"):
        scaling.main(["simulate", "--ways", "states"])


def test_pieces_are_timed() -> None:
    found = simulated.pieces("logistic", repeats=1)
    assert found.model == 31400
    assert all(value > 0 for value in found)
