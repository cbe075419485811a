"""`partita split`: which splits are tried, what is measured, what is recommended and why."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partita as pt
from partita.engine.record import Record, Summary
from partita.recipes import Experiment
from partita.recipes.advice import TEST_DECIDES, Advice, advice, figures, table, text
from partita.recipes.gradient_left import left
from partita.recipes.splits import candidates, names, splits
from support import Command, each

# ---- the recommendation, of made-up runs

SHARES = {"fedavg": 0.0, "input": 0.8, "output": 0.2, "local": 1.0}
PARTS = {"fedavg": "none", "input": "input", "output": "output", "local": "all"}
FACTS: dict[str, Any] = {"metric": "accuracy", "higher_is_better": True, "client_memory": 1000}
CONVERGED = {"rounds": 40, "ended": "converged", "rising": False, "epochs": {"mean": 120.0}}
RISING = {"rounds": 40, "ended": "rounds", "rising": True, "epochs": {"mean": 30.0}}
UNKNOWN = {**RISING, "rising": None}
LEVEL = {**RISING, "rising": False}


def run(
    label: str,
    scores: Sequence[float | None],
    *,
    seed: int = 0,
    n_test: int = 20,
    norms: Any = (1.0, 1.0),
    training: Any = CONVERGED,
) -> Record:
    rows = [{"client": str(i), "n_train": 9, "n_test": n_test, "personal": x} for i, x in enumerate(scores)]
    there = [x for x in scores if x is not None and math.isfinite(x)]
    mean = sum(there) / len(there) if there else None
    personal = int(100 * SHARES[label])
    facts = {"seed": seed, "test": {"personal": mean}, "scored": len(there), "training": training, **FACTS}
    facts["parameters"] = {"shared": 100 - personal, "personal": personal}
    start, end = ({"mean": x, "mean/input": 1.0, "mean/output": 1.0} for x in norms)
    measures = {} if label == "local" else {"gradient_norm_start": start, "gradient_norm": end}
    return Record([{"measures": measures}], rows, {}, Summary(facts))


def judged(scores: Mapping[str, Sequence[float | None]], **options: Any) -> Advice:
    runs = {label: [run(label, some, **options)] for label, some in scores.items()}
    rows = figures(runs, {label: part for label, part in PARTS.items() if label in runs})
    return advice(runs, rows)


def around(mean: float, step: float = 0.0) -> list[float]:
    """Twelve clients; those of one mean have the same scores."""
    return [mean + step * (-1) ** i for i in range(12)]


def test_the_best_mean_is_taken() -> None:
    found = judged({"local": around(0.7), "fedavg": around(0.6), "input": around(0.8), "output": around(0.9)})
    assert found.part == "output"
    for words in (
        "20.0% of the parameters",
        "0.9000",
        "0.6000 with one",
        "0.7000 alone",
        "input with 0.8000",
    ):
        assert words in found.reason
    assert "of 12 clients 0 would do better with the global model and 0 would do better alone" in found.reason


def test_within_the_noise_the_smaller_part_is_taken() -> None:
    close = [x + 0.001 for x in around(0.9, 0.05)[::-1]]  # ahead by 0.001, client by client ±0.1
    found = judged({"local": around(0.5), "fedavg": around(0.6), "input": close, "output": around(0.9, 0.05)})
    assert found.part == "output"
    assert "input (0.9010) is ahead by no more than the noise" in found.reason
    assert "makes more personal (80.0% against 20.0% of the parameters)" in found.reason


def test_a_sure_lead_counts_however_small() -> None:
    ahead = [x + 0.001 for x in around(0.9, 0.05)]  # the same for every client
    found = judged({"local": around(0.5), "fedavg": around(0.6), "input": ahead, "output": around(0.9, 0.05)})
    assert found.part == "input"


def test_a_smaller_part_comes_before_fewer_hurt() -> None:
    harmed = [0.5, *around(0.94)[1:]]  # one client is worse than alone, and than with the global model
    found = judged({"local": around(0.7), "fedavg": around(0.6), "input": around(0.91), "output": harmed})
    assert found.part == "output"
    assert "of 12 clients 1 would do better with the global model and 1 would do better alone" in found.reason
    assert "input (0.9100) is ahead by no more than the noise, and makes more personal" in found.reason


def test_equal_splits_by_share() -> None:
    found = judged({"local": around(0.7), "fedavg": around(0.9), "input": around(0.9), "output": around(0.9)})
    assert found.part == "none"
    assert found.reason.startswith("Do not personalize: one global model has a test accuracy of 0.9000")


def test_better_off_alone() -> None:
    found = judged({"local": around(0.9), "fedavg": around(0.5), "output": around(0.8)})
    assert found.part == "all"
    assert found.reason.startswith("Clients are better off alone")
    assert "0 would do better with the global model" in found.reason
    assert "would do better alone" not in found.reason


def test_lower_is_better_for_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTS, "higher_is_better", False)
    found = judged({"local": around(0.7), "fedavg": around(0.6), "input": around(0.2), "output": around(0.3)})
    assert found.part == "input"


def test_a_split_without_scores_is_not_taken() -> None:
    for nothing in ([None] * 12, [math.nan] * 12):
        found = judged({"local": around(0.4), "fedavg": around(0.3), "input": nothing, "output": around(0.5)})
        assert found.part == "output"
        assert "nan" not in text(found)
    assert judged(dict.fromkeys(("local", "fedavg", "output"), [None] * 12)).part is None


def test_nothing_left_for_the_shared_part() -> None:
    scores = {"local": around(0.7), "fedavg": around(0.6), "output": around(0.9)}
    assert not any("ersonalize less" in note for note in judged(scores).notes)
    runs = {label: [run(label, some)] for label, some in scores.items()}
    for norms, words in (((0.02, 0.01), "Personalize less"), ((0.5, 0.01), "a smaller personal part may do")):
        found = {**runs, "output": [run("output", scores["output"], norms=norms)]}
        rows = figures(found, {k: v for k, v in PARTS.items() if k in found})
        assert any(words in note and note.startswith("output") for note in advice(found, rows).notes)


def test_too_few_to_tell() -> None:
    few = {"local": [0.5] * 4, "fedavg": [0.4] * 4, "output": [0.6] * 4}
    notes = judged(few, n_test=5).notes
    assert any("Only 4 clients" in note for note in notes)
    assert any("5 test samples or fewer" in note for note in notes)
    assert any("One seed" in note for note in notes)
    many = {"local": around(0.5), "fedavg": around(0.4), "output": around(0.6)}
    runs = {label: [run(label, some, seed=s) for s in (0, 1)] for label, some in many.items()}
    assert advice(runs, figures(runs, {k: PARTS[k] for k in ("fedavg", "output", "local")})).notes == [
        TEST_DECIDES
    ]


@each("training, early", [(RISING, True), (UNKNOWN, True), (None, True), (LEVEL, False), (CONVERGED, False)])
def test_nothing_is_recommended_while_a_candidate_rises(training: Any, early: bool) -> None:
    """Clients alone have converged and are ahead, which says nothing of candidates that are cut short."""
    scores = {"local": around(0.9), "fedavg": around(0.8), "output": around(0.7)}
    runs = {label: [run(label, some, seed=s) for s in (0, 1)] for label, some in scores.items()}
    runs["output"][1] = run("output", scores["output"], seed=1, training=training)  # one seed suffices
    rows = figures(runs, {k: v for k, v in PARTS.items() if k in runs})
    found = advice(runs, rows)
    assert found.part == (None if early else "all")
    assert ("too early to recommend" in found.reason and "output" in found.reason) == early
    assert ("raise rounds, or use until='converged'" in text(found)) == early
    assert any("→" in row[0] for row in table(runs, rows, found).rows) != early


def test_validation_samples_decide_without_a_note() -> None:
    scores = {"local": around(0.9), "fedavg": around(0.8), "output": around(0.7)}
    runs = {label: [run(label, some)] for label, some in scores.items()}
    for label, (record,) in runs.items():
        record.facts["validation"] = {"personal": 0.9 if label == "output" else 0.5}
    found = advice(runs, figures(runs, {k: v for k, v in PARTS.items() if k in runs}))
    assert found.part == "output"
    assert TEST_DECIDES not in found.notes


def test_the_table_has_a_row_for_each_split() -> None:
    scores = {"local": around(0.7), "fedavg": [None] * 12, "output": around(0.9)}
    runs = {label: [run(label, some)] for label, some in scores.items()}
    rows = figures(runs, {k: PARTS[k] for k in ("fedavg", "output", "local")})
    shown = table(runs, rows, advice(runs, rows))
    assert [row[0] for row in shown.rows] == ["none", "→ output", "all"]
    assert shown.rows[0][1] == "-"
    assert shown.rows[1] == (
        "→ output",
        "0.9000",
        "0.9000",
        "-",
        "0",
        "120",
        "20.0%",
        "1.0 kB",
        "1.000",
        "1.000",
    )
    assert "Recommended: output" in shown.markdown()


# ---- candidates


def experiment(model: nn.Module | None = None, **changed: Any) -> Experiment:
    given: dict[str, Any] = {"data": pt.data.digits(5, pt.data.label_skew(3), test=0.4, seed=0)}
    given |= {"algorithm": pt.fedalt("output", lr=0.1), "rounds": 2, "steps": 2, "batch": 8}
    return Experiment(model or pt.models.mlp(64, 8, 10), **{**given, **changed})


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 10))


def test_the_usual_splits_are_those_that_the_model_has() -> None:
    found, remarks = candidates(experiment())
    assert [c.part for c in found] == ["input", "output", "adapter"]
    assert found[2].model is not None
    assert any("adapters of rank 2 were added" in r for r in remarks)
    assert any(r.startswith("norm: left out") for r in remarks)
    found, _ = candidates(experiment(normed()))
    assert [c.part for c in found] == ["input", "output", "adapter", "norm"]
    adapted = pt.models.add_adapters(pt.models.mlp(64, 8, 10), "lora", rank=2)
    found, remarks = candidates(experiment(adapted))
    assert found[2].part == "adapter"
    assert found[2].model is None
    assert not any(r.startswith("adapter") for r in remarks)


def test_adapters_of_the_kind_that_suits_the_model() -> None:
    for model, kind in (
        (pt.models.resnet20(10, norm="group", channels=1), "residual"),
        (pt.models.transformer(10, length=8, width=16, hidden=16, depth=1), "bottleneck"),
    ):
        _, remarks = candidates(experiment(model), ["adapter"])
        assert f"{kind!r} adapters" in remarks[0]
    _, remarks = candidates(experiment(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))))
    assert any(r.startswith("adapter: left out") for r in remarks)


def test_equal_parts_are_tried_once() -> None:
    found, remarks = candidates(experiment(), ["output", "output.*", "*", "none", "all", "input+output"])
    assert [c.part for c in found] == ["output"]
    assert [r.partition(":")[0] for r in remarks] == ["output.*", "*", "input+output"]
    assert "'all' (each alone)" in remarks[1]


def test_labels_can_be_folders_and_are_not_mixed_up() -> None:
    found, _ = candidates(experiment(normed()), ["*.bias", "1.*", "1.[w]*", "1.?eight", "2.*+4.*"])
    labels = [c.label for c in found]
    assert labels == ["_.bias", "1._", "1._w_", "2._+4._"]  # 1.[w]* and 1.?eight are the same
    assert names(found) == {"fedavg": "none", **{c.label: c.part for c in found}, "local": "all"}


def test_a_part_that_fits_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'output'"):
        candidates(experiment(), ["outputs"])
    with pytest.raises(ValueError, match="no layer to add them to"):
        candidates(experiment(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), ["adapter"])


def test_methods_and_their_options() -> None:
    made = splits(experiment(), ["output"], method="ffgg(solver=gd(3, 0.2))", rounds=7).variants
    assert list(made) == ["local", "fedavg", "output"]
    rule = made["output"].experiment.algorithm
    assert (rule.name, rule.options["lr"], rule.options["personal"]) == ("ffgg", 0.1, ["output"])
    assert {v.experiment.rounds for v in made.values()} == {7}
    for wrong, words in {
        "fedavg": "with a personal part",
        "fedal": "did you mean 'fedalt'",
        "fedalt(personal=input)": "which the parts decide",
        "fedalt(": "a method's name",
    }.items():
        with pytest.raises(ValueError, match=words):
            splits(experiment(), ["output"], method=wrong)


# ---- what is left for the shared part


def gradients(model: nn.Module, e: Experiment, wanted: Callable[[str], bool]) -> float:
    """mean_m ‖∇f_m‖ by the wanted parameters, written out."""
    norms = []
    for begin, size in e.data.train:
        x, y = e.data.x[begin : begin + size], e.data.y[begin : begin + size]
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        some = [
            p.grad.square().sum() for n, p in model.named_parameters() if wanted(n) and p.grad is not None
        ]
        norms.append(math.sqrt(sum(map(float, some))))
    return sum(norms) / len(norms)


def test_norms_are_those_of_the_gradients_of_the_same_parameters() -> None:
    e = experiment(evaluate_every=1)
    made = splits(e, ["output"]).variants
    base = made["fedavg"].experiment.run(baselines=False)
    assert [set(row["measures"]["gradient_norm"]) for row in base.metrics] == [set(), {"mean", "mean/output"}]
    last, whole = base.metrics[-1]["measures"], pt.models.mlp(64, 8, 10)
    for key, wanted in (("mean", lambda n: True), ("mean/output", lambda n: not n.startswith("output"))):  # noqa: ARG005
        assert last["gradient_norm_start"][key] == pytest.approx(gradients(whole, e, wanted), rel=1e-4)
    end = base.client(0).model()
    assert last["gradient_norm"]["mean"] == pytest.approx(gradients(end, e, lambda n: True), rel=1e-4)  # noqa: ARG005
    own = made["output"].experiment.run(baselines=False)
    found = left(own.metrics[-1], base.metrics[-1], "output")
    assert found is not None
    assert (
        found["end"]
        == own.metrics[-1]["measures"]["gradient_norm"]["mean"] / last["gradient_norm"]["mean/output"]
    )
    ones = left(base.metrics[-1], base.metrics[-1], None)
    assert ones is not None
    assert (ones["start"], ones["end"]) == (1.0, 1.0)
    assert left({"measures": {}}, base.metrics[-1], "output") is None
    lost = {"measures": {name: {"mean": math.nan} for name in last}}
    assert left(lost, base.metrics[-1], "output") is None


def test_a_personal_part_that_fits_everyone_leaves_nothing() -> None:
    x, client = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4
    data = pt.data.from_arrays(x, client[:, None].float(), client, test=0.25, seed=0)  # a bias fits it
    e = experiment(pt.models.mlp(3, 2, 1), data=data, loss="mse", batch=None)
    found = {}
    for steps in (1, 200):
        made = splits(e, ["output", "input"], solver_steps=steps).variants
        runs = {k: [v.experiment.run(baselines=False)] for k, v in made.items()}
        rows = figures(runs, {"fedavg": "none", "output": "output", "input": "input", "local": "all"})
        found[steps] = advice(runs, rows).notes[0], rows[1].left
    assert found[200][1] is not None
    assert found[200][1]["start"] < 0.05
    assert found[200][0].startswith("output: even beside an untrained shared part")
    assert not found[1][0].startswith("output")


def test_statistics_of_normalization_layers_are_no_gradients() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    e = experiment(model(), norm="personal")
    found, _ = candidates(e, ["norm", "output"])
    assert [sorted(c.rest) for c in found] == [
        ["1.bias", "1.weight", "4.bias", "4.weight"],
        ["1.bias", "1.weight"],
    ]
    variants = splits(e, ["output"]).variants
    base = variants["fedavg"].experiment.run(baselines=False)
    wanted = gradients(model(), e, lambda n: n.startswith("1."))
    assert base.metrics[-1]["measures"]["gradient_norm_start"]["mean/output"] == pytest.approx(
        wanted, rel=0.2
    )


# ---- the command

SHORT = ["--set", "clients=6", "--rounds", "2", "--solver-steps", "2", "--executor", "vmap"]


def test_split_from_end_to_end(partita: Command, tmp_path: Path) -> None:
    out = tmp_path / "split"
    code, printed, said = partita("split", "digits", *SHORT, "--out", str(out))
    assert code == 0, said
    for words in (
        "Candidate splits: test accuracy, 6 clients",
        "output",
        "epochs",
        "No recommendation. It is too early",
        "Only 6 clients",
    ):
        assert words in " ".join(printed.split())
    assert "→" not in printed
    assert "norm: left out" in said
    about = json.loads((out / "study.json").read_text())
    assert about["variants"] == ["local", "fedavg", "input", "output", "adapter"]
    assert (about["method"], about["rounds"]) == ("fedalt", 2)
    assert (out / "report.html").exists()
    assert "No recommendation. " in (out / "tables.md").read_text()
    assert partita("report", str(out), "--json")[0] == 0

    code, _, said = partita("split", "digits", *SHORT, "--out", str(out))
    assert (code, "--resume" in said) == (2, True)
    (out / "output" / "seed-0" / "summary.json").unlink()  # as if it had been stopped there
    code, again, said = partita("split", "digits", *SHORT, "--out", str(out), "--resume", "--json")
    assert (code, said) == (0, "")
    found = json.loads(again)
    assert [row["part"] for row in found["splits"]] == ["none", "input", "output", "adapter", "all"]
    assert found["recommendation"]["part"] is None
    assert all(row["epochs"] > 0 for row in found["splits"])
    for row in found["splits"][:-1]:
        assert row["left"]["start"] > 0
        assert row["left"]["end"] > 0
    assert found["splits"][-1]["left"] is None
    code, _, said = partita("split", "digits", *SHORT, "--out", str(out), "--resume", "--parts", "input")
    assert (code, "other" in said) == (2, True)


def test_split_over_seeds_with_another_method(partita: Command) -> None:
    chosen = ["--parts", "output,input+output", "--method", "fedsim(personal_lr=0.2)", "--seeds", "2"]
    code, printed, said = partita("split", "digits", *SHORT, *chosen, "--json")
    assert (code, said) == (0, "")
    found = json.loads(printed)
    assert [row["part"] for row in found["splits"]] == ["none", "output", "all"]
    assert "input+output: the same parameters" in found["remarks"][0]
    assert not any("One seed" in note for note in found["recommendation"]["notes"])


@each(
    ("arguments", "words"),
    [
        (["digits", "--parts", "outputs"], "did you mean 'output'"),
        (["digits", "--parts", "norm"], "matches none"),
        (["digits", "--parts", "input+"], "input+norm"),
        (["digits", "--method", "fedavg"], "with a personal part"),
        (["digits", "--rounds", "0"], "rounds=0"),
        (["digits", "--solver-steps", "0"], "solver_steps=0"),
        (["partial-memory"], "partita run"),
    ],
)
def test_a_wrong_word_is_one_line_and_nothing_else(
    arguments: list[str], words: str, partita: Command, tmp_path: Path
) -> None:
    code, printed, said = partita("split", *arguments, "--out", str(tmp_path / "out"))
    assert (code, printed) == (2, "")
    assert len(said.strip().splitlines()) == 1
    assert words in said
    assert not list(tmp_path.iterdir())


def test_ctrl_c_says_how_to_go_on(partita: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("partita.recipes.experiment.federate", stop)
    code, _, said = partita("split", "digits", "--quiet", "--out", str(tmp_path / "run"))
    assert (code, "--resume" in said) == (130, True)
