"""The recipes of EmbracingFL: who is there, what they hold, what the tables say."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita.engine.record import Record, Summary
from partita.recipes import RECIPES, Study, similarity, step_time, weak

NEEDS_DATA = pytest.mark.skipif("PARTITA_DATA" not in os.environ, reason="needs the data of PARTITA_DATA")
WAYS = ("depth", "width")
FEW: dict[str, Any] = {"clients": 8, "rounds": 1}


def study(name: str, **options: Any) -> Study:
    made = RECIPES[name](**options)
    assert isinstance(made, Study)
    return made


@NEEDS_DATA
def test_weak_clients_are_added_to_the_same_strong_ones() -> None:
    made = study("embracing-scaling", **FEW)
    assert list(made.variants) == [
        "strong-only",
        *(f"{kind}-{added}" for added in (16, 32, 64, 112) for kind in ("depth", "width")),
    ]
    everyone = made.variants["depth-112"].experiment.data
    assert (everyone.train[:, 1] > 0).all()
    for added in (0, 16, 32, 64, 112):
        name = f"depth-{added}" if added else "strong-only"
        experiment = made.variants[name].experiment
        present = 1 + added // 16
        assert (experiment.data.train[:, 1] > 0).sum() == present
        assert (experiment.data.train[:present] == everyone.train[:present]).all()
        assert (experiment.data.test == everyone.test).all()
        assert experiment.cohort is None
        assert experiment.capacity is not None
        assert list(experiment.capacity.assign(8, 0)) == [0] + [1] * 7
        assert experiment.norm == "global"
    assert made.variants["width-16"].experiment.norm == "static"


@NEEDS_DATA
def test_mixes_have_the_papers_shares() -> None:
    made = study("embracing-mix", cases=(1, 8), narrow=7, clients=32, rounds=5)
    assert list(made.variants) == ["depth-1", "depth-8", "width-7"]
    found = {}
    for name, variant in made.variants.items():
        capacity = variant.experiment.capacity
        assert capacity is not None
        numbers = np.asarray(capacity.assign(32, 0))
        found[name] = {c: int((numbers == i).sum()) for i, c in enumerate(capacity.classes)}
        assert variant.experiment.cohort == 8
    assert found == {
        "depth-1": {"strong": 32},
        "depth-8": {"strong": 8, "moderate": 8, "weak": 16},
        "width-7": {"strong": 4, "weak": 28},
    }


@NEEDS_DATA
def test_it_runs_and_the_table_has_the_paper_beside_it() -> None:
    made = study("embracing-norm", **FEW)
    runs = {}
    for name in ("width-static", "depth-global"):
        experiment = made.variants[name].experiment
        runs[name] = [experiment.run(progress=False, executor="loop", batch=4, steps=1)]
        classes = runs[name][0].summary()["classes"]
        assert {k: v["clients"] for k, v in classes.items()} == {"strong": 1, "weak": 7}
    table = weak._norms({**runs, "width-global": runs["width-static"], "depth-static": runs["depth-global"]})
    assert [row[0] for row in table.rows] == list(weak.PAPER_NORM)
    assert [row[2] for row in table.rows] == ["64.01", "19.21", "74.49", "77.34"]


@NEEDS_DATA
def test_two_writers_to_a_client() -> None:
    writers = pt.data.real("femnist", clients=6, seed=0)
    paired = weak._paired(writers, 3)
    for i in range(3):
        for split in ("train", "test"):
            x, y = paired.client(i, split)
            both = [writers.client(j, split) for j in (2 * i, 2 * i + 1)]
            assert torch.equal(x, torch.cat([b[0] for b in both]))
            assert torch.equal(y, torch.cat([b[1] for b in both]))
    assert paired.names == tuple(f"{a}+{b}" for a, b in zip(writers.names[::2], writers.names[1::2]))


def test_weak_readers_train_the_second_half_of_the_words() -> None:
    model = pt.models.bilstm(20, embedding=4, hidden=3).eval()
    held = weak._capacity("imdb", "depth", {"strong": 1, "moderate": 1, "weak": 1})
    x = torch.randint(0, 20, (2, 6))
    shares = {s.name: s for s in held.shares(model, x, 1)}
    assert [len(shares[k].pieces) for k in ("strong", "moderate", "weak")] == [0, 1, 2]
    assert shares["weak"].model._words == 3
    seen = nn.Sequential(*shares["weak"].pieces)(x)
    torch.testing.assert_close(shares["weak"].model.eval()(seen), model(x))


def options(**given: Any) -> Any:
    none: dict[str, Any] = {"clients": None, "width": None, "rounds": None, "lr": None}
    return {"size": "small", "weighting": "uniform", **none, **given}


def test_fewer_clients_must_keep_the_shares() -> None:
    with pytest.raises(ValueError, match=r"^clients=20: expected 128, 64, 32, 16 or 8$"):
        weak.settled("cifar10", options(clients=20))
    assert [weak.settled("cifar10", options(clients=n)).fewer for n in (128, 16)] == [1, 8]


@pytest.mark.parametrize(
    ("task", "rounds", "lr"), [("cifar10", 1000, 0.4), ("femnist", 200, 0.04), ("imdb", 400, 0.1)]
)
def test_the_size_of_the_paper_and_settings_that_replace_it(task: str, rounds: int, lr: float) -> None:
    paper = weak.settled(task, options(size="paper"))
    assert paper == (task, 128, 1.0, rounds, lr, "uniform")
    changed = weak.settled(task, options(size="paper", rounds=120, lr=0.1, weighting="samples"))
    assert changed == (task, 128, 1.0, 120, 0.1, "samples")
    assert weak.settled(task, options()).rounds == 30


@NEEDS_DATA
def test_all_cases_at_the_size_of_the_paper() -> None:
    made = study("embracing-mix", size="paper", clients=8, width=0.25, rounds=1)
    assert list(made.variants) == [
        *(f"depth-{c}" for c in range(1, 11)),
        *(f"width-{c}" for c in range(2, 11)),
    ]


def test_wrong_cases_and_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^cases=11: expected a whole number from 1 up to 10$"):
        study("embracing-mix", cases=[1, 11])
    with pytest.raises(ValueError, match=r"^task='cifar': expected"):
        study("embracing-svcca", task="cifar")


@NEEDS_DATA
@pytest.mark.parametrize("name", ["embracing-scaling", "embracing-mix", "embracing-norm", "embracing-svcca"])
def test_clients_count_alike_unless_asked(name: str) -> None:
    """Equations (4) and (5): 1/s and 1/m, whatever the number of samples."""
    for given, expected in (({}, "uniform"), ({"weighting": "samples"}, "samples")):
        made = study(name, **FEW, **given)
        methods = [v.experiment.algorithm for k, v in made.variants.items() if k != "alone"]
        assert {m.options["weighting"] for m in methods} == {expected}


def record(*accuracies: float) -> Record:
    rows = [{"round": 10 * (i + 1), "test.global": a} for i, a in enumerate(accuracies)]
    return Record(rows, [], {}, {})  # type: ignore[arg-type]


def test_the_target_is_what_narrow_models_reach() -> None:
    """Table 7: 2 seeds; the mean over them decides, and the last accuracy of narrow models rounded down."""
    runs = {
        "depth-1": [record(0.2, 0.29)],
        "width-5": [record(0.3, 0.40, 0.52), record(0.3, 0.50, 0.53)],
        "depth-5": [record(0.5, 0.6, 0.7), record(0.56, 0.6, 0.7)],
        "depth-7": [record(0.5)],  # without narrow models there is no target
    }
    table = weak._targets(runs)
    assert table.rows == [
        ("1", "128/0/0", "29", "20", "20", "80", "890", "890"),
        ("5", "64/0/64", "52", "30", "10", "72", "813", "811"),
    ]


def test_curves_are_laid_out_as_figure_4() -> None:
    runs = {f"{kind}-{n}": [record(0.1, 0.2)] for n in (16, 32, 64, 112) for kind in ("depth", "width")}
    chart = weak._curves(runs)
    assert [panel.title for panel in chart.panels] == [f"16 strong, {n} weak" for n in (16, 32, 64, 112)]
    line = chart.panels[0].series[0]
    assert (line.name, list(line.x), list(line.y)) == ("EmbracingFL", [10, 20], [10.0, 20.0])


def tiny() -> pt.data.FederatedData:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 3, 8, 8)).astype("float32")
    return pt.data.from_arrays(x, rng.integers(0, 4, 32), np.repeat(np.arange(4), 8), test=0.25)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_half_of_the_channels_are_everyones(executor: str) -> None:
    model = pt.models.resnet20(4, width=0.25)
    method = similarity.half_channels(0.05, model, 0.5)
    run = pt.federate(
        model,
        tiny(),
        method,
        rounds=2,
        steps=1,
        batch=4,
        norm="global",
        baselines=False,
        progress=False,
        executor=executor,
    )
    masks = similarity._masks(model, 0.5)
    models = [dict(run.client(i).model().state_dict()) for i in range(4)]
    for name in ("stem.conv.weight", "block4.conv1.weight", "output.linear.bias"):
        mask = masks[name]
        assert all(torch.equal(m[name][mask], run.shared[name][mask]) for m in models)
        if not mask.all():
            assert not torch.equal(models[0][name][~mask], models[1][name][~mask])
    assert masks["output.linear.bias"].all()
    assert not masks["block4.conv1.weight"].all()


@NEEDS_DATA
def test_similarity_layer_by_layer() -> None:
    made = study("embracing-svcca", clients=8, rounds=1, images=8)
    runs = {
        name: [made.variants[name].experiment.run(progress=False, executor="loop", steps=1, batch=2)]
        for name in ("alone", "first-half")
    }
    shown = similarity.SHOWN["cifar10"]
    table = similarity._table(runs, shown)
    assert [row[0] for row in table.rows] == ["alone", "first-half"]
    assert table.rows[1][1:3] == ("1.00", "1.00")  # the first half is the same for all
    assert float(table.rows[0][5]) < 1.0
    compared = similarity._compared({**runs, "second-half": runs["alone"], "half-channels": runs["alone"]})
    assert [len(chart.panels) for chart in compared] == [5, 5]
    lines = {line.name: line for line in compared[1].panels[0].series}
    assert list(lines["first half"].x) == [similarity.TAU]
    assert lines["first half"].y[0] == pytest.approx(1.0)
    assert "channel-wise" in {line.name for line in compared[0].panels[4].series}


def test_models_that_nobody_trained_are_not_compared() -> None:
    """Where all uploads were set aside, all clients have the initial model, which says nothing."""
    rows = [{"round": 1, "measures": {"svcca": {"block1": value}}} for value in (0.5, 1.0)]
    trained = Record(rows[:1], [], {}, Summary(diverged=None))
    lost = Record(rows[1:], [], {}, Summary(diverged={"nothing_learned": True}))
    ended = Record([{"round": 1}], [], {}, Summary())
    runs = {"alone": [trained, lost], "first-half": [lost], "second-half": [ended]}
    table = similarity._table(runs, {"block1": "conv 3"})
    assert [row[1] for row in table.rows] == ["0.50 (1 of 2)", "-", "-"]
    line, *_ = similarity._alone(runs, "cifar10").panels[0].series
    assert list(line.y) == [0.5]


@NEEDS_DATA
@pytest.mark.parametrize(("task", "layers"), [("femnist", 4), ("imdb", 3)])
def test_layers_of_other_models_stay_alike(task: str, layers: int) -> None:
    """Figure 1: layers have names and values for each task, and clients are alone."""
    made = study("embracing-svcca", task=task, clients=8, rounds=1, images=4)
    assert list(made.variants) == ["alone"]
    experiment = made.variants["alone"].experiment
    if task == "imdb":  # as good, and much less work
        words = replace(experiment.data, x=experiment.data.x[:, :6])
        model = pt.models.bilstm(10_000, embedding=4, hidden=4)
        experiment = replace(experiment, data=words, model=model)
    runs = {"alone": [experiment.run(progress=False, executor="loop", steps=1, batch=2)]}
    lines = similarity._alone(runs, task).panels[0].series
    assert len(lines) == layers
    assert all(0 < line.y[-1] <= 1 for line in lines if line.y[-1] is not None)
    assert all(len(line.y) == 1 for line in lines)


def test_frozen_blocks_take_no_time_backwards() -> None:
    """Table 8: forwards all blocks are timed, backwards those after the cut, of a narrow model all."""
    calls: list[str] = []

    class Block(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.weight = name, nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(f"{self.name} {'train' if torch.is_grad_enabled() else 'pass'}")
            return self.weight * x

    frozen, trained = Block("frozen"), nn.Sequential(Block("trained"), nn.Flatten())
    times = step_time._timed(frozen, trained, torch.rand(2, 10), repeats=1)
    assert calls == ["frozen pass", "trained train"] * (step_time.WARM + 1)
    assert frozen.weight.grad is None
    assert trained[0].weight.grad is not None
    assert min(times) > 0
    made = {
        kind: [step_time.Times(2.0, 8.0), step_time.Times(2.0, 4.0), step_time.Times(2.0, 2.0)]
        for kind in WAYS
    }
    rows = step_time._table(made, "cpu").rows
    assert rows[1][:5] == ("forward", "moderate", "2.00", "1.00", "1.00")  # all pass all blocks
    assert rows[5] == ("backward", "weak", "2.00", "0.25", "0.20", "2.00", "0.25", "0.45")


def test_times_are_measured_for_each_class() -> None:
    (table,) = study("embracing-time", size="small", repeats=1, device="cpu").tables({})
    assert [row[1] for row in table.rows] == ["strong", "moderate", "weak"] * 2
