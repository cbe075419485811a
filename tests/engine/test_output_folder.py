"""The output folder, to the letter: names, fields, columns, keys, and numbers that agree with each other."""

from __future__ import annotations

import csv
import io
import json
import platform
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from rich.console import Console
from torch import nn

import partita as pt
from partita import cli
from partita.algorithms.baselines import baselines
from partita.cli import tables
from partita.engine.record import personal_part

METRICS = [
    "round",
    "time",
    "seconds",
    "train_loss",
    *["validation.global", "validation.personal", "validation.loss"],
    *["test.global", "test.personal", "test.loss"],
    "active",
    "staleness",
    "late",
    "lost",
    "abandoned",
    "excluded",
    "bytes_up",
    "bytes_down",
]
CLIENTS = [
    *[
        "client",
        "n_train",
        "n_validation",
        "n_test",
        "class",
        "capacity",
        "memory",
        "byzantine",
        "local",
        "global",
        "personal",
    ],
    *["local_validation", "global_validation", "personal_validation"],
    *["local_train", "global_train", "personal_train"],
    *["vs_global_low", "vs_global_high", "vs_global_p", "vs_local_low", "vs_local_high", "vs_local_p"],
    *["hurt_vs_global", "hurt_vs_local", "distance", "label_shift", "input_z", "label_z"],
    *["reports", "epochs", "delay", "late", "lost", "newcomer"],
]
SUMMARY = [
    "algorithm",
    "seed",
    "rounds",
    "clients",
    "metric",
    "test",
    "validation",
    "metrics",
    "undefined",
    "majority",
    "hurt",
    "seconds",
    "client_steps_per_second",
    "phases",
    "bytes_up",
    "bytes_down",
    "clock",
    "excluded",
    "excluded_why",
    "byzantine",
    "privacy",
    "chance",
    "intervals",
    "unusual",
    "diverged",
    "training",
    "baselines",
]
DOCUMENTED_EXTRA = {"deployed", "scored", "higher_is_better", "parameters", "client_memory", "peak_memory"}
DOCUMENTED_EXTRA |= {"classes", "personal_part", "ended", "newcomers", "choice"}
ROUNDS, COHORT, STEPS, SEED = 6, 3, 4, 7
SIZES = (12, 9, 1, 0, 20)


def data() -> pt.data.FederatedData:
    """Five clients that differ; 'dora' has nothing to train on, 'cleo' nothing to test with."""
    g = torch.Generator().manual_seed(0)
    tests = (4, 3, 0, 2, 6)
    n, m = sum(SIZES), sum(tests)
    x, y = torch.randn(n + m, 6, generator=g), torch.randint(0, 3, (n + m,), generator=g)
    ends, test_ends = np.cumsum(SIZES), n + np.cumsum(tests)
    train = [(int(e) - s, s) for e, s in zip(ends, SIZES)]
    test = [(int(e) - s, s) for e, s in zip(test_ends, tests)]
    names = ["anna", "ben, jr.", "cleo", "dora", "émile"]
    return pt.data.FederatedData.make(x, y, train, test, names=names, source={"name": "made up"})


class Folder:
    """The files of one run, parsed."""

    def __init__(self, path: Path, run: pt.Run) -> None:
        self.path, self.run = path, run
        self.config = json.loads((path / "config.json").read_text())
        self.summary = json.loads((path / "summary.json").read_text())
        self.metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        with (path / "clients.csv").open(newline="") as f:
            table = list(csv.reader(f))
        self.columns, self.rows = table[0], [dict(zip(table[0], r)) for r in table[1:]]

    def weighted(self, kind: str) -> float:
        """Σ n_test · score / Σ n_test over the table."""
        pairs = [(int(r["n_test"]), float(r[kind])) for r in self.rows if r[kind] != ""]
        return sum(n * s for n, s in pairs) / sum(n for n, _ in pairs)


METHODS = {
    "fedavg": pt.fedavg(lr=0.1),
    "fedalt": pt.fedalt("output", lr=pt.optim.halving(0.2, 3), momentum=0.5),
    "local": pt.local(lr=0.1),
    "pipeline": pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=4),
        pt.stage(pt.fedsim("output", lr=0.1), rounds=2),
    ),
}


@pytest.fixture(scope="module", params=list(METHODS))
def folder(request, tmp_path_factory) -> Folder:
    path = tmp_path_factory.mktemp("files") / "deep" / request.param
    run = pt.federate(
        pt.models.mlp(6, 5, 3),
        data(),
        METHODS[request.param],
        rounds=None if request.param == "pipeline" else ROUNDS,
        cohort=COHORT,
        steps=STEPS,
        batch=4,
        seed=SEED,
        evaluate_every=2,
        out=path,
    )
    return Folder(path, run)


def test_names_of_the_files(folder: Folder) -> None:
    there = {p.name for p in folder.path.iterdir()}
    assert there - {"baselines"} == {
        "config.json",
        "metrics.jsonl",
        "clients.csv",
        "summary.json",
        "samples.safetensors",
        "checkpoint",
        "report.html",
    }
    for baseline in folder.path.glob("baselines/*"):
        assert {p.name for p in baseline.iterdir()} == there - {"baselines", "report.html"}
    assert not [p for p in folder.path.rglob("*") if p.name.startswith(".") or p.suffix == ".tmp"]


def test_nothing_is_pickled(folder: Folder) -> None:
    kinds = {p.suffix for p in folder.path.rglob("*") if p.is_file()}
    assert kinds <= {".json", ".jsonl", ".csv", ".safetensors", ".bin", ".html"}


def test_checkpoints_are_safetensors_and_json(folder: Folder) -> None:
    found = sorted(p for p in (folder.path / "checkpoint").iterdir() if p.name.isdecimal())
    assert 1 <= len(found) <= 2
    assert int(found[-1].name) == folder.summary["rounds"]
    for path in found:
        assert {p.name for p in path.iterdir()} == {"tensors.safetensors", "state.json", "manifest.json"}
        json.loads((path / "state.json").read_text())
    with safetensors.safe_open(found[-1] / "tensors.safetensors", "pt") as f:
        for k, x in folder.run.shared.items():
            assert torch.equal(f.get_tensor(f"server/shared/{k}"), x)


def test_fields_of_metrics(folder: Folder) -> None:
    assert all(list(row) == METRICS for row in folder.metrics)
    # every second round, and the last of each stage
    assert [row["round"] for row in folder.metrics] == [2, 4, 6]
    assert [row["time"] for row in folder.metrics] == [2.0, 4.0, 6.0]
    assert [row["staleness"] for row in folder.metrics] == [0.0] * 3
    assert [row["active"] for row in folder.metrics] == [COHORT / 5] * 3
    assert [(row["late"], row["lost"]) for row in folder.metrics] == [(0, 0)] * 3
    assert [row["excluded"] for row in folder.metrics] == [[]] * 3
    for field in ("seconds", "bytes_up", "bytes_down"):
        values = [row[field] for row in folder.metrics]
        assert values == sorted(values)
    for row in folder.metrics:
        assert type(row["round"]) is type(row["bytes_up"]) is type(row["bytes_down"]) is int
        assert 0 < row["train_loss"] < 10
        assert 0 <= row["test.personal"] <= 1
        assert 0 <= row["test.global"] <= 1
    assert folder.run.metrics == folder.metrics


def test_columns_of_clients(folder: Folder) -> None:
    assert folder.columns == CLIENTS
    source = data()
    assert [r["client"] for r in folder.rows] == list(source.names)
    assert [int(r["n_train"]) for r in folder.rows] == source.sizes("train").tolist()
    assert [int(r["n_test"]) for r in folder.rows] == source.sizes("test").tolist()
    assert {float(r["capacity"]) for r in folder.rows} == {1.0}
    assert {r["byzantine"] for r in folder.rows} == {"0"}
    assert sum(int(r["reports"]) for r in folder.rows) == ROUNDS * COHORT
    assert {(r["delay"], r["late"], r["lost"]) for r in folder.rows} <= {("1.0", "0", "0"), ("", "0", "0")}
    for r in folder.rows:
        for kind in ("local", "global", "personal"):
            assert (r[kind] == "") == (r["client"] == "cleo")  # she has no test samples


def test_the_personal_part_is_named(folder: Folder) -> None:
    """In full in config.json, stage by stage; for people in the summary, in the table of the command, and on
    the page."""
    head = {
        "personal": ["output.linear.weight", "output.linear.bias"],
        "parameters": {"shared": 35, "personal": 18},
    }
    every = list(folder.config["model"]["tensors"])
    nothing = {"personal": [], "parameters": {"shared": 53, "personal": 0}}
    everything = {"personal": every, "parameters": {"shared": 0, "personal": 53}}
    method = folder.summary["algorithm"]
    assert (
        folder.config["partition"]
        == {
            "fedavg": nothing,
            "fedalt": head,
            "local": everything,
            "pipeline": [nothing, head],
        }[method]
    )
    mine = "output.linear.weight, output.linear.bias (18 of 53 parameters, 34 %)"
    shown = {"fedavg": "", "local": "everything (53 parameters)"}.get(method, mine)
    console = Console(width=120, file=io.StringIO())
    console.print(tables.scores(folder.run, folder.run.summary()))
    texts = {
        f"personal: {shown}": (str(folder.run.summary()), console.file.getvalue()),
        f"Personal part: {shown}.": ((folder.path / "report.html").read_text(),),
    }
    for words, places in texts.items():
        for text in places:
            assert words in text if shown else "ersonal: " not in text.partition("<script")[0]


def test_a_personal_part_in_words() -> None:
    part = {"names": [f"layer{i}.weight" for i in range(7)], "parameters": 70, "of": 100_000}
    words = personal_part({"personal_part": part, "parameters": {"shared": 99_930}})
    assert words == (
        "layer0.weight, layer1.weight, layer2.weight, layer3.weight and 3 more "
        "(70 of 100,000 parameters, 0.07 %)"
    )
    whole = {"names": ["w"], "parameters": 5, "of": 5}
    both = {"personal_part": whole, "parameters": {"shared": 5, "personal": 5}}
    assert personal_part(both) == "a copy of everything (5 parameters)"
    for none in ({}, {"personal_part": None}, {"personal_part": {"names": [], "parameters": 0, "of": 5}}):
        assert personal_part(none) == ""


def _beginning_with(word: str) -> Callable[[str], bool]:
    def chosen(name: str) -> bool:  # the same name whatever the word
        return name.startswith(word)

    return chosen


def test_a_run_is_resumed_with_the_same_personal_part(tmp_path: Path) -> None:
    def run(word: str, **how: bool) -> pt.Run:
        method = pt.fedalt(_beginning_with(word), lr=0.1)
        model = pt.models.mlp(6, 5, 3)
        return pt.federate(
            model, data(), method, rounds=2, out=tmp_path, baselines=False, report=False, **how
        )

    run("output")
    with pytest.raises(ValueError, match=r"its algorithm \(personal: .*chosen"):
        run("hidden1", resume=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["partition"]  # as an older run left it
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json .* has no partition"):
        run("output", resume=True)


def test_keys_of_the_summary(folder: Folder) -> None:
    s = folder.summary
    assert [k for k in s if k not in DOCUMENTED_EXTRA] == SUMMARY
    assert list(s["test"]) == ["local", "global", "personal"]
    assert sorted(s["hurt"]) == ["vs_global", "vs_local"]
    assert (s["algorithm"], s["seed"], s["rounds"], s["clients"]) == (folder.path.name, SEED, ROUNDS, 5)
    assert s["metric"] == "accuracy"
    assert s["clock"] == {
        "time": float(ROUNDS),
        "updates_per_time": 1.0,
        "active": COHORT / 5,
        "staleness": {"mean": 0.0, "max": 0, "counts": [[0, ROUNDS * COHORT]]},
        "delay": {"mean": 1.0, "max": 1.0, "counts": [[1.0, 2**0.25, ROUNDS * COHORT]]},
        "late": 0,
        "lost": 0,
        "abandoned": 0,
    }
    assert s["excluded"] == []
    assert s["excluded_why"] == {}
    assert s["byzantine"] is None
    assert s["scored"] == 4
    assert s["higher_is_better"] is True
    assert s["seconds"] > 0
    assert s["client_steps_per_second"] > 0
    assert dict(folder.run.summary()) == s


def test_the_numbers_agree(folder: Folder) -> None:
    s, last = folder.summary, folder.metrics[-1]
    for kind in ("local", "global", "personal"):
        assert folder.weighted(kind) == pytest.approx(s["test"][kind])
        table = [None if r[kind] == "" else float(r[kind]) for r in folder.rows]
        assert table == [r[kind] for r in folder.run.clients]
        np.testing.assert_array_equal(folder.run.scores(kind), np.array(table, dtype=float))
    assert last["test.personal"] == pytest.approx(s["test"]["personal"])
    assert last["test.global"] == pytest.approx(s["test"]["global"])
    assert (last["bytes_up"], last["bytes_down"]) == (s["bytes_up"], s["bytes_down"])
    for key in ("global", "local"):
        worse = [float(r["personal"]) < float(r[key]) for r in folder.rows if r["personal"] != ""]
        assert s["hurt"][f"vs_{key}"] == sum(worse)


def test_bytes_are_the_shared_part_of_every_cohort(folder: Folder) -> None:
    whole = {"hidden1": (6 + 1) * 5, "output": (5 + 1) * 3}
    sent = {
        "fedavg": ROUNDS * sum(whole.values()),
        "fedalt": ROUNDS * whole["hidden1"],
        "local": 0,
        "pipeline": 4 * sum(whole.values()) + 2 * whole["hidden1"],
    }[folder.path.name]
    assert folder.summary["bytes_up"] == folder.summary["bytes_down"] == 4 * COHORT * sent


def test_scores_are_those_of_the_models(folder: Folder) -> None:
    source = data()
    for i, r in enumerate(folder.rows):
        x, y = source.client(i, "test")
        if len(y):
            with torch.no_grad():
                right = (folder.run.client(i).model()(x).argmax(1) == y).float().mean().item()
            assert float(r["personal"]) == pytest.approx(right)


def test_config_is_enough_to_run_it_again(folder: Folder) -> None:
    c = folder.config
    assert {"algorithm", "settings", "loss", "metric", "model", "data", "executor", "versions"} <= set(c)
    assert c["algorithm"]["name"] == folder.path.name
    wanted = {"cohort": COHORT, "steps": STEPS, "epochs": None, "batch": 4, "seed": SEED, "state": "keep"}
    assert wanted.items() <= c["settings"].items()
    assert c["settings"]["evaluate_every"] == 2
    assert (c["loss"], c["metric"]) == ("cross_entropy", "accuracy")
    assert c["model"]["class"] == "Blocks"
    assert c["model"]["tensors"] == {
        "hidden1.linear.weight": [5, 6],
        "hidden1.linear.bias": [5],
        "output.linear.weight": [3, 5],
        "output.linear.bias": [3],
    }
    assert c["data"] == {"clients": 5, "fingerprint": data().fingerprint(), "source": {"name": "made up"}}


def test_config_has_the_options_of_the_method(folder: Folder) -> None:
    said = folder.config["algorithm"]
    if folder.path.name == "fedalt":
        assert said["personal"] == "output"
        assert said["lr"] == {"name": "halving", "lr": 0.2, "every": 3}
        assert said["momentum"] == 0.5
    elif folder.path.name == "pipeline":
        assert [s["algorithm"]["name"] for s in said["stages"]] == ["fedavg", "fedsim"]
        assert [s["rounds"] for s in said["stages"]] == [4, 2]
    else:
        assert said["lr"] == 0.1


def test_versions(folder: Folder) -> None:
    assert folder.config["versions"] == {
        "python": platform.python_version(),
        "partita": version("partita"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": version("safetensors"),
    }
    assert pt.__version__ == version("partita")


def test_picks(folder: Folder) -> None:
    said = folder.config["executor"]
    assert said["requested"] == folder.config["settings"]["executor"] == "auto"
    stages = 2 if folder.path.name == "pipeline" else 1
    assert {f"training, stage {i}" for i in range(stages)} <= set(said["picks"])
    for pick in said["picks"].values():
        assert set(pick) == {"picked", "why"}
        assert pick["picked"] in ("loop", "vmap")


def test_baselines_are_the_methods_they_say(folder: Folder) -> None:
    expected = {
        "fedavg": {"local": "local"},
        "fedalt": {"local": "local", "global": "fedavg"},
        "local": {"global": "fedavg"},
        "pipeline": {"local": "local"},
    }[folder.path.name]
    found = {p.name: json.loads((p / "config.json").read_text()) for p in folder.path.glob("baselines/*")}
    assert {k: c["algorithm"]["name"] for k, c in found.items()} == expected
    for kind, config in found.items():
        for field in ("steps", "batch", "seed", "evaluate_every"):
            assert config["settings"][field] == folder.config["settings"][field]
        everyone = None if kind == "local" else folder.config["settings"]["cohort"]
        assert config["settings"]["cohort"] == everyone
        assert config["settings"]["rounds"] == ROUNDS
        assert config["data"] == folder.config["data"]
        score = json.loads((folder.path / "baselines" / kind / "summary.json").read_text())["test"]
        own = score["personal" if kind == "local" else "global"]
        assert folder.summary["test"][kind] == pytest.approx(own)


def test_baselines_have_the_momentum_of_the_method(folder: Folder) -> None:
    if folder.path.name != "fedalt":
        pytest.skip("has no options of its own")
    for p in folder.path.glob("baselines/*"):
        said = json.loads((p / "config.json").read_text())["algorithm"]
        assert said["momentum"] == 0.5
        assert said["lr"] == {"name": "halving", "lr": 0.2, "every": 3}


def test_the_global_baseline_has_the_server_of_the_method() -> None:
    adam = pt.optim.adam(0.01, eps=1e-8)
    first = pt.stage(pt.fedsim("output", lr=0.1, server=adam), rounds=2)
    for method in (pt.fedalt("output", lr=0.1, server=adam), pt.pipeline(first)):
        assert baselines(method)["global"].options["server"] == adam
    assert baselines(pt.fedalt("output", lr=0.1))["global"].options["server"] is None
    assert (
        baselines(pt.fedadam(lr=0.1))["global"].options["server"] is None
    )  # it has a global model of its own


def test_local_and_global_of_their_own_methods(folder: Folder) -> None:
    test = folder.summary["test"]
    if folder.path.name == "fedavg":
        assert test["personal"] == test["global"]
        assert folder.summary["hurt"]["vs_global"] == 0
    if folder.path.name == "local":
        assert test["personal"] == test["local"]
        assert folder.summary["hurt"]["vs_local"] == 0


def test_files_are_plain_utf8_and_strict_json(folder: Folder) -> None:
    def strict(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for path in (folder.path / "config.json", folder.path / "summary.json"):
        text = path.read_bytes().decode("utf-8")
        assert text.endswith("}\n")
        json.loads(text, parse_constant=strict)
    assert "émile" in (folder.path / "clients.csv").read_text("utf-8")
    for line in (folder.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=strict)


def test_local_is_the_baseline_even_where_the_last_stage_sends_nothing(tmp_path) -> None:
    """A global model that clients go on with alone is not the same as always having been alone."""
    out = tmp_path / "run"
    stages = pt.pipeline(pt.stage(pt.fedavg(lr=0.5), rounds=6), pt.stage(pt.local(lr=0.01), rounds=1))
    run = pt.federate(pt.models.mlp(6, 5, 3), data(), stages, batch=4, metric="loss", out=out)
    alone = json.loads((out / "baselines" / "local" / "summary.json").read_text())["test"]["personal"]
    assert run.summary()["test"]["local"] == pytest.approx(alone)
    assert run.summary()["test"]["personal"] != pytest.approx(alone)


# ---- what the folder does not hold


def test_without_baselines(tmp_path) -> None:
    out = tmp_path / "run"
    run = pt.federate(
        pt.models.mlp(6, 5, 3), data(), METHODS["fedalt"], rounds=2, batch=4, baselines=False, out=out
    )
    folder = Folder(out, run)
    assert not (out / "baselines").exists()
    assert folder.summary["test"]["local"] is folder.summary["test"]["global"] is None
    assert folder.summary["hurt"] == {"vs_global": None, "vs_local": None}
    assert folder.summary["test"]["personal"] is not None
    assert [row["test.global"] for row in folder.metrics] == [None, None]
    assert {r["local"] for r in folder.rows} == {r["global"] for r in folder.rows} == {""}


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    pt.federate(pt.models.mlp(6, 5, 3), data(), METHODS["fedalt"], rounds=2, batch=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rounds", [1, 2, 6])
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_trace_of_some_rounds(rounds: int, tmp_path) -> None:
    """Of short runs too."""
    options = {"rounds": rounds, "steps": 2, "batch": 4, "baselines": False, "report": False}
    pt.federate(
        pt.models.mlp(6, 4, 3), data(), pt.fedavg(lr=0.1), profile=True, out=tmp_path / "run", **options
    )
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    names = [e["name"] for e in events if e.get("name", "").startswith("ProfilerStep")]
    assert len(set(names)) == min(2, max(1, rounds - 1))
    assert any(e.get("name") == "aten::mm" for e in events)


def test_a_score_that_is_not_finite_is_empty(tmp_path) -> None:
    """NaN and infinity are no JSON: the field is there, without a number."""
    out = tmp_path / "run"
    source = data()
    x, (begin, length) = source.x.clone(), source.test[0].tolist()
    x[begin : begin + length] *= 1e30
    far = pt.data.FederatedData.make(x, source.y.float(), source.train, source.test, names=source.names)
    common = {"rounds": 1, "batch": 4, "baselines": False, "out": out}
    folder = Folder(out, pt.federate(pt.models.mlp(6, 1), far, pt.fedavg(lr=0.1), **common))
    assert folder.summary["metric"] == "mse"
    assert folder.summary["test"]["personal"] is None
    assert [r["personal"] == "" for r in folder.rows] == [True, False, True, False, False]
    assert list(folder.metrics[-1]) == METRICS
    assert folder.metrics[-1]["test.personal"] is None


# ---- names that a spreadsheet would compute

FORMULAS = ["=1+1", "+a", "-5", "@x", "\tz", "\rq", "'=x", "''-y", "'tis", "＝cmd", "'"]


def test_names_are_never_formulas(tmp_path) -> None:
    """Client names and classes of devices come from users' data; a table of clients is opened by others."""
    n = 8 * len(FORMULAS)
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(n, 4)).astype("float32"), np.array(FORMULAS * 8)
    source = pt.data.from_arrays(x, (x[:, 0] > 0).astype(int), client)

    def score(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -nn.functional.cross_entropy(output, target)

    run = pt.federate(
        pt.models.mlp(4, 3, 2),
        source,
        pt.fedavg(lr=0.1),
        rounds=1,
        baselines=False,
        metric=pt.Metric(score, higher_is_better=True),
        capacity=pt.capacity.depth({"=strong": 0, "@weak": 1}),
        out=tmp_path / "run",
    )
    rows = Folder(tmp_path / "run", run).rows
    assert not [row for row in rows if row["client"][0] in "=+-@\t\r\n＝" or row["class"][0] in "=@"]
    assert {row["class"] for row in rows} == {"'=strong", "'@weak"}
    assert all(float(row["personal"]) < 0 for row in rows)  # a number, and no text
    assert sorted(run.names) == sorted(FORMULAS)
    loaded = pt.load(tmp_path / "run")
    assert loaded.names == run.names
    assert loaded.clients == run.clients


def test_folders_of_before_keep_their_names(tmp_path) -> None:
    """What is written with a quote by hand, or was, and is no formula."""
    run = pt.federate(pt.models.mlp(6, 5, 3), data(), pt.local(lr=0.1), rounds=1, out=tmp_path / "run")
    path = tmp_path / "run" / "clients.csv"
    path.write_text(path.read_text("utf-8").replace("anna", "'anna").replace("cleo", "=cleo"), "utf-8")
    assert pt.load(tmp_path / "run").names == ["'anna", "ben, jr.", "=cleo", *run.names[3:]]


# ---- JSON that every parser takes


def strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_strict_wherever_it_is_written_or_printed(tmp_path, monkeypatch, capsys) -> None:
    """A score, a loss and a setting that are not finite."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np, partita as pt\n"
        "from partita.recipes import Experiment\n"
        "def far_loss(output, target):\n"
        "    return (output[:, 0].abs() * 1e30 * 1e30).mean()\n"
        "def experiment():\n"
        "    x, client = np.random.default_rng(0).normal(size=(60, 3)).astype('float32'), np.arange(60) % 3\n"
        "    data = pt.data.from_arrays(x, (x[:, 0] > 0).astype(int), client)\n"
        "    return Experiment(pt.models.mlp(3, 2), data, pt.fedavg(lr=0.1), rounds=2, baselines=False,\n"
        "                      metric=pt.Metric(far_loss, higher_is_better=False))\n"
    )
    monkeypatch.chdir(tmp_path)
    commands = [
        ["run", "mine.py", "--json", "--out", "one"],
        ["compare", "mine.py", "--algorithms", "fedprox(mu=0.1)", "--json", "--out", "two", "--quiet"],
        ["report", "one", "--json"],
        ["list", "--json"],
        ["show", "fedalt", "--json"],
    ]
    printed = []
    for words in commands:
        monkeypatch.setattr("sys.argv", ["partita", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        printed.append(strictly(capsys.readouterr().out))
    assert printed[0]["test"]["personal"] is None  # it was infinite
    for path in [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.jsonl")]:
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            strictly(line)
    for path in tmp_path.rglob("*.html"):
        (figures,) = re.findall(
            r'<script type="application/json" id="figures">(.*?)</script>', path.read_text()
        )
        strictly(figures)


def test_when_it_is_evaluated() -> None:
    def rounds(method, total, every) -> list[int]:
        run = pt.federate(
            pt.models.mlp(6, 3), data(), method, rounds=total, batch=4, baselines=False, evaluate_every=every
        )
        return [row["round"] for row in run.metrics]

    assert rounds(METHODS["fedavg"], 5, None) == [1, 2, 3, 4, 5]
    assert rounds(METHODS["fedavg"], 25, None) == [*range(2, 25, 2), 25]
    assert rounds(METHODS["fedavg"], 5, 3) == [3, 5]
    stages = pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=3), pt.stage(pt.fedavg(lr=0.1), rounds=2))
    assert rounds(stages, None, 2) == [2, 3, 4, 5]
