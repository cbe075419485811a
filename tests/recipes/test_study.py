"""Studies: several runs compared, from the same data and initial weights, resumable, and their tables."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita.engine.record import Record, Summary, read
from partita.recipes import Experiment, Study, Variant
from partita.recipes.memory import memory_tables
from partita.recipes.partial import SPLITS
from partita.recipes.partial_charts import harm_charts, splits_charts
from partita.recipes.partial_tables import harm_tables, splits_tables
from partita.recipes.study import read_study, run_study
from partita.recipes.tables import Table, mean_std
from partita.recipes.tasks import task, with_dropout
from partita.recipes.versus import separate, versus
from support import each

pytestmark = pytest.mark.usefixtures("brief_baselines")

CLIENTS = 7  # of two seeds, more than those few whose order scipy's Wilcoxon permutes in all ways


def experiment(seed: int = 0, **changed: Any) -> Experiment:
    data = pt.data.digits(CLIENTS, pt.data.label_skew(3), test=0.4, seed=seed)
    given: dict[str, Any] = {"algorithm": pt.fedalt("output", lr=0.1), "rounds": 4, "cohort": 3, "steps": 3}
    return Experiment(pt.models.mlp(64, 8, 10, seed=seed), data, batch=8, seed=seed, **{**given, **changed})


def quiet(text: str) -> None:
    del text


# ---- variants


def test_every_variant_begins_with_the_same_weights_and_data() -> None:
    study = versus(experiment(), ["fedalt", "fedprox(mu=0)"])
    assert list(study.variants) == ["local", "fedavg", "fedalt", "fedprox-mu=0"]
    runs, _ = run_study(lambda seed: versus(experiment(seed), ["fedprox(mu=0)"]), [0], announce=quiet)
    # μ = 0 is fedavg bit for bit, if and only if both began alike and drew alike
    assert runs["fedprox-mu=0"][0].metrics[-1]["test.global"] == runs["fedavg"][0].metrics[-1]["test.global"]
    assert runs["fedprox-mu=0"][0].config["data"] == runs["fedavg"][0].config["data"]


def test_a_variant_starts_from_what_another_has_trained() -> None:
    still = experiment(algorithm=pt.pipeline(pt.stage(pt.finetune("output", lr=0.0), epochs=1)))
    study = Study(
        {
            "fedavg": Variant(experiment(algorithm=pt.fedavg(lr=0.1), baselines=False)),
            "still": Variant(still, start="fedavg"),
        }
    )
    runs, _ = run_study(lambda _: study, [0], announce=quiet)
    assert runs["still"][0].scores("personal") == pytest.approx(runs["fedavg"][0].scores("global"), abs=0)


def test_adapters_are_added_to_a_trained_model() -> None:
    model = pt.models.mlp(64, 16, 10)
    adapted = pt.models.add_adapters(model, "lora", rank=2)
    data = experiment().data
    study = Study(
        {
            "fedavg": Variant(
                Experiment(model, data, pt.fedavg(lr=0.1), rounds=3, steps=3, batch=8, baselines=False)
            ),
            "adapter": Variant(
                Experiment(adapted, data, pt.finetune("adapter", lr=0.0), rounds=1, steps=1, batch=8),
                start="fedavg",
            ),
        }
    )
    runs, _ = run_study(lambda _: study, [0], announce=quiet)
    assert runs["adapter"][0].scores("personal") == pytest.approx(runs["fedavg"][0].scores("global"))


def test_given_baselines_are_compared_with_and_not_trained(tmp_path: Path) -> None:
    e = experiment()
    one = experiment(algorithm=pt.fedavg(lr=0.1)).run(baselines=False)
    run = e.run(baselines={"global": one}, out=tmp_path / "run")
    assert not (tmp_path / "run" / "baselines").exists()
    assert run.scores("global") == pytest.approx(one.scores("global"))
    assert np.isnan(run.scores("local")).all()
    assert run.summary()["hurt"]["vs_global"] == int((run.scores("personal") < one.scores("global")).sum())
    for key in ("validation.global", "test.global"):
        assert [row[key] for row in run.metrics] == [row[key] for row in one.metrics]
    longer = experiment(rounds=5).run(baselines={"global": one})
    assert {row["validation.global"] for row in longer.metrics} == {one.metrics[-1]["validation.global"]}
    assert longer.metrics[-1]["test.global"] == one.summary()["test"]["global"]


@pytest.mark.parametrize(
    ("baselines", "words"),
    [
        ({"globl": None}, ["globl", "did you mean 'global'"]),
        ({"global": 3}, ["baselines['global']=3", "a run"]),
        ("yes", ["baselines='yes'", "True, False"]),
    ],
)
def test_wrong_baselines(baselines: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        experiment().run(baselines=baselines)
    assert all(word in str(error.value) for word in words)


def test_baselines_of_other_clients_are_refused() -> None:
    other = Experiment(
        pt.models.mlp(64, 10), pt.data.digits(3), pt.fedavg(lr=0.1), rounds=1, steps=1, baselines=False
    )
    with pytest.raises(ValueError, match="same clients"):
        experiment().run(baselines={"global": other.run()})


@pytest.mark.parametrize(
    ("variants", "word"),
    [
        ({"b": Variant(experiment(), start="a")}, "a"),
        ({"b": Variant(experiment(), baselines={"global": "c"})}, "c"),
        ({"x/y": Variant(experiment())}, "x/y"),
    ],
)
def test_wrong_names_of_variants(variants: dict[str, Variant], word: str) -> None:
    with pytest.raises(ValueError, match=repr(word)):
        run_study(lambda _: Study(variants), [0], announce=quiet)


# ---- methods on the command line


def test_methods_with_options() -> None:
    assert separate("fedavg, fedprox(mu=0.1, lr=0.2),fedalt") == [
        "fedavg",
        "fedprox(mu=0.1, lr=0.2)",
        "fedalt",
    ]
    nested = ["ffgg(lr=0.1, solver=adam(5, 0.1))", "fedplus(psi=layerwise({'a*': avg(), '*': free()}))"]
    assert separate(",".join(nested)) == nested
    solved = versus(experiment(), nested[:1]).variants["ffgg-lr=0.1,solver=adam5,0.1"]
    assert solved.experiment.algorithm.options["solver"] == pt.adam(5, 0.1)
    made = versus(experiment(), ["fedsim(personal=input, lr=linear(0.2, warmup=0.1))"]).variants
    rule = made["fedsim-personal=input,lr=linear0.2,warmup=0.1"].experiment.algorithm
    assert rule.options["personal"] == "input"
    assert rule.options["lr"](9, 10) == pt.optim.linear(0.2, warmup=0.1)(9, 10)


@each(
    ("method", "words"),
    [
        ("fedalt2", ["fedalt2", "did you mean 'fedalt'?"]),
        ("fedprox(weight_deca=1)", ["weight_deca", "did you mean 'weight_decay'?"]),
        ("fedprox(0.1)", ["fedprox(0.1)", "a call such as"]),
        ("fedprox(mu=-1)", ["mu=-1", "from 0"]),
        ("__import__('os')", ["a call such as"]),
        ("fedalt(personal=__import__('os'))", ["function"]),
    ],
)
def test_wrong_methods(method: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        versus(experiment(), [method])
    assert all(word in str(error.value) for word in words), error.value


# ---- folders


def build(seed: int) -> Study:
    return versus(experiment(seed), ["fedalt"])


def test_a_study_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, _ = run_study(build, [0, 1], out=tmp_path / "whole", announce=quiet)
    out = tmp_path / "parts"
    run_study(build, [0, 1], out=out, only=["local"], announce=quiet)
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == ["local"]
    untouched = (out / "local" / "seed-1" / "summary.json").stat().st_mtime_ns
    parts, _ = run_study(build, [0, 1], out=out, resume=True, announce=quiet)
    assert (out / "local" / "seed-1" / "summary.json").stat().st_mtime_ns == untouched
    for name, runs in whole.items():
        for a, b in zip(runs, parts[name], strict=True):
            assert a.clients == b.clients
    assert {k: len(v) for k, v in read_study(out).items()} == {"local": 2, "fedavg": 2, "fedalt": 2}
    assert list(out.rglob("report.html")) == [out / "report.html"]  # one page for all of them


def test_only_also_runs_what_is_needed(tmp_path: Path) -> None:
    run_study(build, [0], out=tmp_path / "s", only=["fed*lt"], announce=quiet)
    assert set(read_study(tmp_path / "s")) == {"local", "fedavg", "fedalt"}
    with pytest.raises(ValueError, match="did you mean 'fedalt'"):
        run_study(build, [0], only=["fedal"], announce=quiet)


def test_runs_that_train_together_end_together_when_time_is_up(tmp_path: Path) -> None:
    stops = []

    def once(seed: int) -> Study:
        each = replace(experiment(seed), rounds=2)
        return Study({"first": Variant(each), "second": Variant(each, baselines={"local": "first"})})

    for _ in range(4):
        try:
            runs, _ = run_study(once, [0, 1], out=tmp_path, resume=True, max_time=1e-9, announce=quiet)
        except pt.Stopped as stop:
            stops.append(stop.where)
    assert stops == [
        "in fedalt at round 1 of 2",
        "before second, seeds 0 to 1 together",
        "in fedalt at round 1 of 2",
    ]
    assert [len(seeds) for seeds in runs.values()] == [2, 2]


def test_only_some_runs_are_held_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("partita.recipes.in_lockstep.MOST_TOGETHER", 2)
    said: list[str] = []

    def once(seed: int) -> Study:
        return Study({"only": Variant(replace(experiment(seed), rounds=2))})

    runs, _ = run_study(once, [0, 1, 2], out=tmp_path, announce=said.append)
    alone, _ = run_study(once, [0, 1, 2], alone=True, announce=quiet)
    assert said == ["1/3  only, seeds 0 to 1 together", "3/3  only, seed 2"]
    for a, b in zip(runs["only"], alone["only"]):
        assert a.summary()["test"]["personal"] == pytest.approx(b.summary()["test"]["personal"], abs=0.02)


def test_a_study_ends_when_its_time_is_up(tmp_path: Path) -> None:
    """Before the next run, or within one; a run that leaves no checkpoint is not cut short."""
    stops, settings = [], {"out": tmp_path / "s", "resume": True, "max_time": 1e-9, "alone": True}

    def once(seed: int) -> Study:
        whole = replace(experiment(seed), checkpoint_every=0, rounds=2)
        some = {"no checkpoints": Variant(whole), "checkpoints": Variant(replace(experiment(seed), rounds=2))}
        return Study(some)

    for _ in range(6):
        try:
            runs, _ = run_study(once, [0, 1], announce=quiet, **settings)
        except pt.Stopped as stop:
            stops.append(stop.where)
    assert stops == [
        "before checkpoints, seed 0",
        "in fedalt at round 1 of 2",
        "before no checkpoints, seed 1",
        "before checkpoints, seed 1",
        "in fedalt at round 1 of 2",
    ]
    assert {name: len(seeds) for name, seeds in runs.items()} == {"no checkpoints": 2, "checkpoints": 2}
    with pytest.raises(ValueError, match=r"^max_time=60: expected out="):
        run_study(once, [0], max_time=60, announce=quiet)


def test_another_study_or_a_run_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "s"
    run_study(build, [0], out=out, only=["fedavg"], announce=quiet)
    before = (out / "study.json").read_text()
    with pytest.raises(ValueError, match="--resume"):
        run_study(build, [0], out=out, announce=quiet)
    with pytest.raises(ValueError, match="other seeds"):
        run_study(build, [0, 1], out=out, resume=True, announce=quiet)
    assert (out / "study.json").read_text() == before
    with pytest.raises(ValueError, match="holds a single run"):
        run_study(build, [0], out=out / "fedavg" / "seed-0", resume=True, announce=quiet)


# ---- figures


def test_distance_and_label_shift_by_hand() -> None:
    run = experiment().run(baselines=False)
    own = [torch.cat([t.flatten() for t in run.client(i).personal.values()]).double() for i in range(CLIENTS)]
    trained = run.store.touched
    centre = torch.stack([own[i] for i in trained]).mean(0)
    for i, row in enumerate(run.clients):
        if i in trained:
            assert row["distance"] == pytest.approx(float((own[i] - centre).norm()), rel=1e-5)
        else:
            assert row["distance"] is None
    data = experiment().data
    labels = [data.client(i)[1].numpy() for i in range(CLIENTS)]
    share = np.bincount(np.concatenate(labels), minlength=10) / sum(map(len, labels))
    for i, row in enumerate(run.clients):
        mine = np.bincount(labels[i], minlength=10) / len(labels[i])
        assert row["label_shift"] == pytest.approx(0.5 * np.abs(mine - share).sum())


def test_train_scores_are_those_of_the_models() -> None:
    e = experiment()
    run = e.run(train_scores=True)
    for i in range(CLIENTS):
        x, y = e.data.client(i)
        right = (run.client(i).model()(x).argmax(-1) == y).float().mean()
        assert run.scores("personal", "train")[i] == pytest.approx(float(right))
    assert not np.isnan(run.scores("global", "train")).any()  # of the fedavg baseline
    with pytest.raises(ValueError, match="split='tset'"):
        run.scores("personal", "tset")


def test_parameters_and_memory_in_the_summary() -> None:
    found = experiment().run(baselines=False).summary()
    u, v = 64 * 8 + 8, 8 * 10 + 10
    assert found["parameters"] == {"shared": u, "personal": v}
    backprop = found["client_memory"] - 4 * (3 * u + 2 * v)
    assert 4 * 8 < backprop < 4 * (64 + 8 + 8 + 10 + 10)  # between the hidden layer and everything twice
    assert found["peak_memory"] > 10_000_000


def test_without_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = experiment(checkpoint_every=0).run(baselines=False, out=out)
    assert not (out / "checkpoint").exists()
    assert read(out).clients == done.clients
    with pytest.raises(ValueError, match="checkpoint"):
        pt.load(out)
    with pytest.raises(ValueError, match="no checkpoint left"):
        experiment(checkpoint_every=0).run(baselines=False, out=out, resume=True)
    with pytest.raises(ValueError, match="checkpoint_every=0"):
        experiment(checkpoint_every=0).run(out=tmp_path / "disk", store="disk")


def test_mean_and_deviation() -> None:
    assert mean_std([0.5, 0.6, 0.7], 100) == "60.00 ± 10.00"
    assert mean_std([0.5], 100, 1) == "50.0"
    assert mean_std([]) == mean_std([float("nan")]) == "-"
    assert mean_std([0.5, float("nan")], 100, 1) == "50.0 (1 of 2)"
    assert mean_std([0.5, float("inf"), None, 0.6], 100, 1) == "55.0 ± 7.1 (2 of 4)"
    assert mean_std([float("inf"), None]) == "-"


def test_a_table_as_markdown() -> None:
    text = Table("T", ("a", "b"), [("x", "1")], "n").markdown()
    assert text == "**T**\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n\nn\n"


def record(sizes: list[int], before: list[float], after: list[float], train: list[float]) -> Record:
    rows = [
        {
            "client": str(i),
            "n_train": n,
            "n_test": 1 + i,
            "global": b,
            "personal": a,
            "global_train": 0.5,
            "personal_train": 0.5 + t,
        }
        for i, (n, b, a, t) in enumerate(zip(sizes, before, after, train))
    ]
    metrics = [{"test.personal": 0.5}, {"test.personal": 0.6}]
    facts = Summary(test={"personal": float(np.mean(after))}, personal_part={"parameters": 7})
    return Record(metrics, rows, {}, facts)


def test_harm_by_hand() -> None:
    some = record([10, 20, 30, 40], [0.5, 0.5, 0.5, 0.5], [0.4, 0.6, 0.7, 0.9], [0.1, 0.1, 0.2, 0.2])
    other = record([10, 20, 30, 40], [0.5, 0.5, 0.5, 0.5], [0.6, 0.6, 0.7, 0.9], [0.1, 0.1, 0.2, -0.2])
    (table,) = harm_tables({"fedavg": [some, other], "fedalt": [some, other]})
    assert [row[0] for row in table.rows] == ["fedalt"]
    train, test, worse_train, worse_test, small, large, undecided = table.rows[0][1:]
    assert (train, test) == ("10.00 ± 7.07", "17.50 ± 3.54")
    assert (worse_train, worse_test) == ("12.5 ± 17.7", "12.5 ± 17.7")
    assert (small, large, undecided) == ("25.0 ± 35.4", "0.0 ± 0.0", "25.0")


def test_splits_by_hand() -> None:
    one = record([10], [0.5], [0.9], [0.1])
    runs = {n: [one] for n in ("fedavg", "finetune", "ditto", "pfedme")}
    runs |= {f"{m}-{p}": [one] for p in SPLITS for m in ("finetune", "fedalt", "fedsim")}
    whole, methods, gain = splits_tables(runs, SPLITS, stateless=False)
    assert whole.rows == [("90.00",) * 7]
    assert methods.rows[1] == ("output", "90.00", "90.00", "90.00", "0.00")
    assert gain.rows[2] == ("adapter", "10.00", "10.00")
    ((figure,),) = [chart.panels for chart in splits_charts(runs)]
    assert [(s.name, s.x, s.y) for s in figure.series[:2]] == [
        ("Finetune", [7], [0.0]),
        ("Input", [7], [0.0]),
    ]
    assert figure.log == "x"


def test_fedalt_and_fedsim_are_compared_on_the_same_clients() -> None:
    scores = np.random.default_rng(0).uniform(0.2, 0.8, 40)  # clients spread far more than methods differ
    sizes = [10] * 40

    def seeds(ahead: float) -> list[Record]:
        return [record(sizes, scores, scores + ahead + 0.001 * seed, [0.0] * 40) for seed in range(3)]

    runs = {n: seeds(0.0) for n in ("fedavg", "finetune", "ditto", "pfedme")}
    runs |= {f"{m}-{p}": seeds(0.0) for p in SPLITS for m in ("finetune", "fedsim")}
    runs |= {f"fedalt-{p}": seeds(0.01) for p in SPLITS}
    _, methods, _ = splits_tables(runs, SPLITS, stateless=False)
    assert methods.rows[0][-1] == "1.00 (1.00 to 1.00)"
    noise = np.random.default_rng(1).normal(0, 0.2, 40)
    runs["fedalt-input"] = [record(sizes, scores, scores + noise, [0.0] * 40)] * 3
    cell = splits_tables(runs, SPLITS, False)[1].rows[0][-1]
    mean, low, high = map(float, re.findall(r"-?\d+\.\d+", cell))
    assert low < 0 < high
    assert low < mean < high
    assert mean == pytest.approx(100 * np.average(noise - 0.001, weights=1 + np.arange(40)), abs=0.01)


def test_figures_of_harm_by_hand() -> None:
    some = record([10, 20, 30, 40], [0.5] * 4, [0.4, 0.6, 0.7, 0.9], [0.1, 0.1, 0.2, 0.2])
    other = record([10, 20, 30, 40], [0.5] * 4, [0.6, 0.6, 0.7, 0.9], [0.1, 0.1, 0.2, float("nan")])
    names = ["fedavg", "finetune", "fedalt-output", "fedalt-adapter"]
    names += ["fedalt-adapter-l2-0.1", "fedalt-output-dropout-0.3"]
    scatter, sizes, violins, regularized, order = harm_charts({n: [some, other] for n in names})
    assert [p.title for p in scatter.panels][:2] == ["Finetune, train", "Output, train"]
    assert scatter.panels[3].series[0].x == [10, 20, 30, 40]
    assert scatter.panels[3].series[0].y == pytest.approx([0, 10, 20, 40])  # the mean over seeds
    assert scatter.panels[0].series[0].y == pytest.approx([10, 10, 20, 20])  # of the seeds that have one
    assert sum(sizes.panels[0].series[0].y) == 4
    assert [[s.name for s in p.series] for p in violins.panels[2:]] == [
        ["No reg.", "μ = 0.1"],
        ["No d/o", "d/o 0.3"],
    ]
    assert len(regularized.panels) == 4
    (mean,) = order.panels[0].series
    below = [low for low, _ in mean.spread]  # from the mean to the worst seed
    assert [y - low for y, low in zip(mean.y, below)] == pytest.approx([-10, 10, 20, 40])
    (alone,) = harm_charts({n: [some] for n in names})[-1].panels[0].series
    assert alone.spread == ()


@pytest.mark.slow
def test_memory_is_the_papers() -> None:
    counts, memory = memory_tables("paper", 0)
    personal = {(row[0], row[1]): row[2] for row in counts.rows}
    assert personal["EMNIST ResNet-18", "input"] == "704"  # Table 7: 0.7K, 0.03M, 1.4M
    assert personal["EMNIST ResNet-18", "output"] == "31,806"
    assert personal["EMNIST ResNet-18", "adapter"] == "1,392,640"
    assert personal["StackOverflow transformer", "output"] == "788,736"  # Table 5: 0.8M, 0.07M
    assert personal["StackOverflow transformer", "adapter"] == "67,712"
    for row in memory.rows[:2]:  # Table 10, to 5 %: the paper's backward buffers are an estimate too
        for cell in row[1:6]:
            ours, theirs = map(float, cell.split("/"))
            assert ours == pytest.approx(theirs, rel=0.06)


@pytest.mark.parametrize(
    "make", [lambda: pt.models.resnet18(4, width=0.125), lambda: pt.models.transformer(9, width=8)]
)
def test_dropout_for_a_trained_model(make: Any) -> None:
    model = make()
    x = (
        torch.rand(2, 28, 28)
        if "stem.conv.weight" in dict(model.named_parameters())
        else torch.ones(2, 5).long()
    )
    dropped = with_dropout(model, 0.5)
    active = [name for name, m in dropped.named_modules() if isinstance(m, torch.nn.Dropout) and m.p]
    assert active
    assert {name.split(".")[0] for name in active} == set(model.output_part)
    assert [n for n, _ in dropped.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert torch.equal(dropped.eval()(x), model.eval()(x))
    assert not torch.equal(dropped.train()(x), dropped.train()(x))


# ---- the recipes themselves


def test_all_seeds_of_a_study_have_the_same_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """`data_seed` draws them, and not the seed, so that methods can be compared client by client."""
    drawn: list[int] = []

    def real(name: str, *, seed: int, **options: Any) -> pt.data.FederatedData:  # noqa: ARG001
        drawn.append(seed)
        return pt.data.digits(clients=6)

    monkeypatch.setattr(pt.data, "real", real)
    for seed, data_seed in ((0, 0), (1, 0), (1, 5)):
        task(seed, data="free_spoken_digits", data_seed=data_seed)
    assert drawn == [0, 0, 5]


def test_the_server_of_text_has_the_adam_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 9's rates belong to ε = 1e-8 and bias correction, and not to τ = 1e-3."""
    monkeypatch.setattr(pt.data, "real", lambda name, **options: pt.data.digits(clients=6))  # noqa: ARG005
    for size in ("small", "medium", "paper"):
        servers = [server.options for server in task(data="shakespeare", size=size).server]
        assert [(of["lr"], of["eps"], "tau" in of) for of in servers] == [
            (5e-4, 1e-8, False),
            (5e-5, 1e-8, False),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["partial_splits", "partial_harm"])
@pytest.mark.parametrize("data", ["femnist", "shakespeare", "free_spoken_digits"])
def test_the_recipes_run(recipe: str, data: str, tmp_path: Path) -> None:
    from partita.recipes import partial

    if not Path(os.environ.get("PARTITA_DATA", "")).joinpath(f"{data}.npz").is_file():
        pytest.skip("PARTITA_DATA is not set to a folder with the data")
    make = getattr(partial, recipe)
    runs, tables = run_study(
        lambda seed: make(data=data, clients=3, rounds=1, personal_rounds=1, epochs=1, seed=seed),
        [0],
        out=tmp_path / "s",
        announce=quiet,
    )
    assert tables
    assert all("nan" not in cell for table in tables for row in table.rows for cell in row)
    assert json.loads((tmp_path / "s" / "study.json").read_text())["variants"] == list(runs)


def test_clients_that_choose_by_validation_have_a_table() -> None:
    """Appendix C.3: the share that takes the global model, and the mean score of what each deploys."""

    def trained(validation: float) -> pt.Run:
        data = pt.data.digits(clients=6, partition=pt.data.iid(), validation=validation, seed=0)
        method = pt.pipeline(
            pt.stage(pt.fedavg(lr=0.3), rounds=20), pt.stage(pt.finetune("output", lr=0.5), epochs=2)
        )
        model, options = pt.models.mlp(64, 8, 10), {"steps": 3, "batch": 8, "train_scores": True}
        return pt.federate(model, data, method, rounds=None, progress=False, **options)

    run, without = trained(0.3), trained(0.0)
    assert len(harm_tables({"fedavg": [without], "tuned": [without]})) == 1
    _, table = harm_tables({"fedavg": [run], "tuned": [run]})
    (row,) = table.rows
    chosen = [c == "global" for c in run.better()]
    weight = run.table.numbers("n_test")
    score = np.where(chosen, run.scores("global"), run.scores("personal"))
    assert row[0] == "tuned"
    assert row[1] == f"{100 * np.mean(chosen):.1f}"
    assert row[3] == f"{100 * (score * weight).sum() / weight.sum():.2f}"
    assert row[4] == f"{100 * np.mean(score < run.scores('global') - 1e-9):.1f}"
    assert 0 < sum(chosen) < 6  # else it would tell nothing


# ---- what a first look found


def stages() -> Any:
    return pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=3, cohort=4, steps=2),
        pt.stage(pt.finetune("output", lr=0.1), epochs=1),
    )


def test_a_pipeline_with_rounds_of_its_own_is_compared() -> None:
    study = versus(
        experiment(algorithm=stages(), rounds=None, cohort=None, steps=None),
        ["pipeline", "fedprox(mu=0.1, lr=0.1)"],
    )
    for name in ("fedavg", "fedprox-mu=0.1,lr=0.1"):
        made = study.variants[name].experiment
        assert (made.rounds, made.cohort, made.steps) == (4, 4, 2)
    alone = study.variants["local"].experiment
    assert (alone.until, alone.cohort, alone.steps) == ("converged", None, 2)  # everyone, as long as it takes
    assert study.variants["pipeline"].experiment.algorithm.stages
    runs, _ = run_study(lambda _: study, [0], announce=quiet)
    assert runs["pipeline"][0].summary()["rounds"] == 4


def test_baselines_of_a_comparison_are_those_of_a_run() -> None:
    wanted = experiment(
        algorithm=pt.fedalt("output", lr=0.1, weighting="uniform"), norm="personal", state="reset"
    )
    alone, everyone = (versus(wanted).variants[name].experiment for name in ("local", "fedavg"))
    assert {(e.norm, e.state) for e in (alone, everyone)} == {("global", "keep")}
    assert everyone.algorithm.options["weighting"] == "uniform"
    plain = experiment()
    single, compared = plain.run(), run_study(lambda _: versus(plain), [0], announce=quiet)[0]["fedalt"][0]
    for model in ("local", "global", "personal"):
        assert compared.scores(model) == pytest.approx(single.scores(model), nan_ok=True)
    assert compared.metrics[0]["test.global"] == single.metrics[0]["test.global"]  # round by round


def test_counters_are_no_distance() -> None:
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10)
    )
    e = experiment()
    steps = [1, 50, *[1] * (CLIENTS - 2)]  # the counter of steps alone would put client 1 at a distance of 40
    run = pt.federate(
        model, e.data, pt.fedavg(lr=0.01), rounds=1, steps=steps, batch=8, norm="personal", baselines=False
    )
    assert max(row["distance"] for row in run.clients) < 5


def test_train_scores_of_a_pipeline() -> None:
    method = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=3), pt.stage(pt.fedalt("output", lr=0.1), rounds=2)
    )
    run = experiment(algorithm=method, rounds=None).run(train_scores=True, baselines=False)
    model_of_stage_one = experiment(algorithm=pt.fedavg(lr=0.1), rounds=3).run(
        train_scores=True, baselines=False
    )
    assert not np.isnan(run.scores("global", "train")).any()
    assert run.scores("global", "train") == pytest.approx(model_of_stage_one.scores("global", "train"))


def test_nothing_to_compare_with_hurts_nobody() -> None:
    summary = experiment().run(baselines=False).summary()
    assert summary["hurt"] == {"vs_global": None, "vs_local": None}


def test_an_edited_study_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    run_study(build, [0], out=tmp_path / "s", announce=quiet)
    with pytest.raises(ValueError, match=r"its settings \(rounds: 4 -> 5\)"):
        run_study(lambda s: versus(experiment(s, rounds=5), ["fedalt"]), [0], out=tmp_path / "s", resume=True)


def test_a_wrong_part_is_refused_before_any_variant_ran(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'input'"):
        run_study(
            lambda s: versus(experiment(s), ["fedalt(personal=inpt)"]),
            [0],
            out=tmp_path / "s",
            announce=quiet,
        )
    assert not (tmp_path / "s").exists()


def test_tables_wait_for_all_runs(tmp_path: Path) -> None:
    def counted(seed: int) -> Study:
        made = build(seed)
        return Study(made.variants, tables=lambda runs: [Table("T", ("n",), [(str(len(runs)),)])])

    _, some = run_study(counted, [0], out=tmp_path / "s", only=["fedavg"], announce=quiet)
    assert some == ()
    _, all_ = run_study(counted, [0], out=tmp_path / "s", resume=True, announce=quiet)
    assert all_[0].rows == [("3",)]


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl", reason="no locks on this system")
    experiment(rounds=1).run(baselines=False, out=tmp_path / "run")
    handle = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # another process is at work
    with pytest.raises(ValueError, match="no other process"):
        experiment(rounds=1).run(baselines=False, out=tmp_path / "run", resume=True)
    os.close(handle)
    experiment(rounds=1).run(baselines=False, out=tmp_path / "run", resume=True)


def test_a_client_by_its_name() -> None:
    run = experiment(rounds=1).run(baselines=False)
    assert run.client("3").number == run.client(3).number == 3
    with pytest.raises(ValueError, match="client='x'"):
        run.client("x")


def test_runs_on_other_data_are_no_seeds_of_one_method(tmp_path: Path) -> None:
    from partita.cli.compare import _collect

    for name, seed, classes in (("a", 0, 3), ("b", 1, 3), ("c", 2, 5), ("d", 1, 3)):
        data = pt.data.digits(6, pt.data.label_skew(classes), seed=seed)
        made = Experiment(pt.models.mlp(64, 10), data, pt.fedavg(lr=0.1), rounds=1, steps=1, seed=seed)
        made.run(baselines=False, out=tmp_path / name)
    runs = _collect([tmp_path / name for name in "abcd"])
    assert sorted(map(len, runs.values())) == [1, 1, 2]
