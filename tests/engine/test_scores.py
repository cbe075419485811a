"""Scores of whole clients: by every executor, as computed by hand from the clients' models."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console
import sklearn.metrics as sk
import torch
from torch import Tensor, nn

import partita as pt
from partita.cli import tables
from partita.engine.record import undefined
from partita.engine.samples import Samples
from partita.engine.significance import right_wrong

SIZES = (300, 40, 7, 12)  # the first needs several batches of an evaluation


def clients(classes: int = 2, one_class: bool = True) -> pt.data.FederatedData:
    """Clients of several sizes; the last one has test samples of a single class."""
    draw = torch.Generator().manual_seed(3)
    x, y, train, test = [], [], [], []
    for i, n in enumerate(SIZES):
        features = torch.randn(n + 20, 5, generator=draw)
        labels = (features[:, :classes] + torch.randn(n + 20, classes, generator=draw)).argmax(1)
        if one_class and i == len(SIZES) - 1:
            labels[20:] = 0
        start = sum(map(len, x))
        x, y = [*x, features], [*y, labels]
        train, test = [*train, (start, 20)], [*test, (start + 20, n)]
    return pt.data.FederatedData.make(torch.cat(x), torch.cat(y), train, test, names=["a", "b", "c", "d"])


def federate(metric: Any, data: pt.data.FederatedData | None = None, **settings: Any) -> pt.Run:
    given = {"rounds": 3, "steps": 3, "batch": 8, "baselines": False, "executor": "vmap", **settings}
    model = pt.models.mlp(5, 6, given.pop("classes", 2))
    method = pt.fedalt(personal="output", lr=0.1)
    return pt.federate(model, data or clients(), method, metric=metric, progress=False, **given)


def by_hand(run: pt.Run, data: pt.data.FederatedData, client: int, score: Any) -> float:
    x, y = data.client(client, "test")
    with torch.no_grad():
        output = run.client(client).model()(x)
    return float(score(y.numpy(), output))


def auc(y: np.ndarray, output: Tensor) -> float:
    return sk.roc_auc_score(y, (output[:, 1] - output[:, 0]).numpy())


@pytest.mark.parametrize("executor", ["loop", "vmap", "pool"])
def test_a_metric_of_clients_as_by_hand(executor: str) -> None:
    data = clients()
    run = federate(["auc", "f1_macro", "log_loss"], data, executor=executor)
    for i in range(3):
        assert run.scores()[i] == pytest.approx(by_hand(run, data, i, auc), abs=1e-6)
        f1 = by_hand(run, data, i, lambda y, o: sk.f1_score(y, o.argmax(1).numpy(), average="macro"))
        assert run.clients[i]["personal.f1_macro"] == pytest.approx(f1, abs=1e-6)
        loss = by_hand(run, data, i, lambda y, o: nn.functional.cross_entropy(o, torch.from_numpy(y)))
        assert run.clients[i]["personal.log_loss"] == pytest.approx(loss, abs=1e-5)


def test_undefined_is_named_and_never_in_a_mean() -> None:
    run = federate(["auc", "accuracy"])
    summary = run.summary()
    assert summary["undefined"] == {"auc": ["d"]}
    assert math.isnan(run.scores()[3])
    assert run.clients[3]["personal"] is None
    weighted = sum(run.scores()[i] * SIZES[i] for i in range(3)) / sum(SIZES[:3])
    assert summary["test"]["personal"] == pytest.approx(weighted)
    assert run.metrics[-1]["test.personal"] == pytest.approx(weighted)
    every = sum(run.clients[i]["personal.accuracy"] * n for i, n in enumerate(SIZES)) / sum(SIZES)
    assert summary["metrics"]["accuracy"]["test"]["personal"] == pytest.approx(every)


def test_the_summary_and_the_terminal_show_all_metrics_and_who_has_none() -> None:
    summary = federate(["auc", "accuracy"]).summary()
    accuracy = summary["metrics"]["accuracy"]["test"]["personal"]
    printed = rich.console.Console(width=100, record=True, file=io.StringIO())
    for table in (tables.scores(federate(["auc", "accuracy"]), summary), tables.further(summary)):
        printed.print(table)
    for text in (str(summary), printed.export_text()):
        assert "auc is undefined for 1 client: d" in text
        assert "accuracy" in text
        assert f"{accuracy:.4f}" in text
    assert tables.further(federate("auc").summary()) is None
    assert undefined({"undefined": {"auc": list("abcdefg")}}) == [
        "auc is undefined for 7 clients: a, b, c, d, e and 2 more"
    ]


@pytest.mark.parametrize("method", [pt.fedalt("output", lr=0.1), pt.fedavg(lr=0.1), pt.local(lr=0.1)])
def test_clients_without_a_score_are_in_no_denominator(method: pt.Algorithm) -> None:
    model = pt.models.mlp(5, 6, 2)
    settings: dict[str, Any] = {"rounds": 3, "steps": 3, "batch": 8, "metric": "auc", "executor": "vmap"}
    summary = pt.federate(model, clients(), method, progress=False, **settings).summary()
    assert summary["scored"] == 3
    assert {chance["of"] for chance in summary["chance"].values()} == {3}


def test_a_users_function_that_fails_for_a_client() -> None:
    def strict(outputs: Tensor, targets: Tensor) -> float:
        if len(targets.unique()) < 2:
            raise RuntimeError("one class only")
        return auc(targets.numpy(), outputs)

    with pytest.warns(UserWarning, match="undefined for some clients: one class only"):
        run = federate(pt.Metric(strict, higher_is_better=True))
    assert run.summary()["undefined"] == {"strict": ["d"]}
    assert run.scores()[:3].tolist() == pytest.approx(federate("auc").scores()[:3].tolist())


def test_scikit_learns_function_as_it_is() -> None:
    data = clients()
    metric = pt.Metric(sk.matthews_corrcoef, higher_is_better=True, on="classes")
    run = federate(metric, data)
    expected = by_hand(run, data, 0, lambda y, o: sk.matthews_corrcoef(y, o.argmax(1).numpy()))
    assert run.scores()[0] == pytest.approx(expected)
    assert run.summary()["metric"] == "matthews_corrcoef"


def test_the_majority_class() -> None:
    data = clients(one_class=False)
    everyone = int(np.bincount(np.concatenate([data.client(i)[1].numpy() for i in range(4)])).argmax())
    right = [int((data.client(i, "test")[1] == everyone).sum()) for i in range(4)]
    own = [
        int((data.client(i, "test")[1] == int(np.bincount(data.client(i)[1].numpy()).argmax())).sum())
        for i in range(4)
    ]
    majority = federate("accuracy", data).summary()["majority"]
    assert majority == pytest.approx({"everyone": sum(right) / sum(SIZES), "own": sum(own) / sum(SIZES)})


def test_only_the_first_metric_is_watched_and_no_row_of_it_is_kept(tmp_path: Path) -> None:
    data = clients(one_class=False).hold_out(0.2)
    run = federate(["auc", "accuracy"], data, out=tmp_path / "run", report=False)
    names = next((tmp_path / "run" / "checkpoint").glob("*/state.json")).read_text()
    assert "validation/rows" not in names
    assert run.metrics[-1]["validation.personal"] == pytest.approx(run.summary()["validation"]["personal"])


# ---- every sample


def test_every_test_sample_is_kept(tmp_path: Path) -> None:
    data = clients(one_class=False)
    run = federate("accuracy", data, out=tmp_path / "run", report=False, baselines=True)
    read = pt.load(tmp_path / "run")
    for record in (run, read):
        samples = record.samples
        assert samples is not None
        assert samples.sizes.tolist() == list(SIZES)
        for model in ("local", "global", "personal"):
            rows = samples.of(model, "accuracy")
            assert rows is not None
            means = [part.mean().item() for part in torch.split(rows, list(SIZES))]
            assert means == pytest.approx(record.scores(model).tolist())
    x, y = data.client(1, "test")
    with torch.no_grad():
        right = (run.client(1).model()(x).argmax(1) == y).float()
    assert run.samples is not None
    assert torch.equal(torch.split(run.samples.of("personal", "accuracy"), list(SIZES))[1], right)


def test_chance_is_that_of_the_paired_samples() -> None:
    run = federate("accuracy", clients(one_class=False), baselines=True)
    assert run.samples is not None
    ours, theirs = (run.samples.of(model, "accuracy").numpy() > 0 for model in ("personal", "local"))
    starts = np.cumsum(SIZES) - SIZES
    changes = right_wrong(ours, theirs, np.stack([starts, SIZES], 1))
    facts = run.summary()["chance"]["vs_local"]
    assert facts["worse"] == int((changes.change < 0).sum()) == run.summary()["hurt"]["vs_local"]
    assert run.table.numbers("vs_local_p").tolist() == pytest.approx(changes.p_worse.tolist())
    assert run.table.numbers("vs_local_low").tolist() == pytest.approx(changes.low.tolist())
    assert facts["low"] <= facts["estimate"] <= facts["high"] <= facts["of"] == 4


def test_nobody_loses_against_the_same_model() -> None:
    data = clients(one_class=False)
    run = pt.federate(
        pt.models.mlp(5, 6, 2), data, pt.fedavg(lr=0.1), rounds=2, baselines=False, progress=False
    )
    facts = run.summary()["chance"]["vs_global"]
    assert (facts["worse"], facts["beyond_chance"], facts["low"], facts["high"]) == (0, 0, 0, 0)


def test_damaged_samples_are_refused(tmp_path: Path) -> None:
    federate("accuracy", out=tmp_path / "run", report=False)
    path = tmp_path / "run" / "samples.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"samples\.safetensors"):
        Samples.read(tmp_path / "run")


def test_sequences_and_large_clients_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many clients at once as their rows fit: the result is the same."""
    whole = federate(["auc", "accuracy"])
    monkeypatch.setattr("partita.engine.evaluate.STATE_BYTES", 4000)
    parts = federate(["auc", "accuracy"])
    assert parts.scores()[:3].tolist() == pytest.approx(whole.scores()[:3].tolist())
    assert parts.samples is not None
    assert whole.samples is not None
    assert torch.allclose(parts.samples.of("personal", "auc"), whole.samples.of("personal", "auc"))
