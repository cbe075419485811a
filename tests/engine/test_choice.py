"""The choice between the personal and the global model, on validation samples (Pillutla et al. 2022, C.3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita.engine.record import Record, Summary, read
from partita.engine.table import Table
from partita.engine.verdict import choice

pytestmark = pytest.mark.usefixtures("brief_baselines")


def record(higher: bool = True, **columns: list[float]) -> Record:
    """A run of four clients, the last of them Byzantine."""
    given: dict[str, Any] = {
        "client": ["a", "b", "c", "d"],
        "n_train": [1] * 4,
        "n_test": [10, 10, 20, 10],
        "byzantine": [0, 0, 0, 1],
        "personal": [0.5, 0.8, 0.6, 0.0],
        "global": [0.7, 0.6, 0.7, 0.9],
        "personal_validation": [0.4, 0.9, 0.5, 0.1],
        "global_validation": [0.6, 0.5, 0.5, 0.9],
        **columns,
    }
    return Record(
        [],
        Table(4, {k: np.array(v) if k != "client" else v for k, v in given.items()}),
        {},
        Summary({"higher_is_better": higher}),
    )


def test_by_hand() -> None:
    run = record()
    assert run.better() == ["global", "personal", "personal", "global"]  # a tie stays personal
    # a takes 0.7, b keeps 0.8, c keeps 0.6 and is worse off than with the global 0.7; d does not count
    assert run.choice() == {
        "global": 1,
        "of": 3,
        "test": pytest.approx((0.7 * 10 + 0.8 * 10 + 0.6 * 20) / 40),
        "worse": 1,
    }


def test_lower_may_be_better() -> None:
    assert record(higher=False).better() == ["personal", "global", "personal", "personal"]


def test_a_client_without_validation_samples_keeps_its_own() -> None:
    nan = float("nan")
    run = record(personal_validation=[nan, 0.9, 0.5, 0.1])
    assert run.better()[0] == "personal"
    found = run.choice()
    assert found is not None
    assert found["of"] == 2


def test_without_validation_nothing_is_chosen() -> None:
    run = record(personal_validation=[float("nan")] * 4)
    assert run.choice() is None
    with pytest.raises(ValueError, match="validation samples"):
        run.better()


def test_in_words() -> None:
    facts: dict[str, Any] = {"metric": "accuracy", "test": {"personal": 0.81}, "hurt": {"vs_global": 9}}
    facts["choice"] = {"global": 7, "of": 30, "test": 0.83, "worse": 3}
    words = choice(facts)
    assert "7 of 30 would take the global one" in words
    assert "accuracy 0.8300 instead of 0.8100, and 3 instead of 9 worse" in words
    assert choice({**facts, "choice": {**facts["choice"], "global": 0}}) == ""
    assert choice({"metric": "accuracy", "test": {}}) == ""


def test_the_better_model_of_a_run(tmp_path: Path) -> None:
    """Clients of the same distribution: for some the global model is better, and it is handed out."""
    data = pt.data.digits(12, validation=0.3, seed=1)
    model = pt.models.mlp(64, 8, 10)
    arguments: dict[str, Any] = {"rounds": 12, "steps": 10, "batch": 8, "seed": 0}
    run = pt.federate(model, data, pt.fedalt("output", lr=0.3), out=tmp_path / "run", **arguments)
    chosen = run.better()
    assert set(chosen) == {"personal", "global"}
    loaded = pt.load(tmp_path / "run", model=model)
    assert loaded.better() == chosen
    facts = run.summary()["choice"]
    assert facts == run.choice() == read(tmp_path / "run").summary()["choice"]
    baseline = pt.load(tmp_path / "run" / "baselines" / "global", model=model).model()
    for i in (chosen.index("global"), chosen.index("personal")):
        expected = baseline if chosen[i] == "global" else run.client(i).model()
        for one in (run, loaded):
            kept = one.client(i).model("better").state_dict()
            assert all(torch.equal(kept[k], v) for k, v in expected.state_dict().items())
    x, y = data.client(chosen.index("global"), "test")
    with torch.inference_mode():
        right = (run.client(chosen.index("global")).model("better")(x).argmax(1) == y).float().mean()
    assert float(right) == pytest.approx(run.scores("global")[chosen.index("global")])


def test_a_method_with_a_global_model_of_its_own() -> None:
    data = pt.data.digits(6, seed=0)
    run = pt.federate(pt.models.mlp(64, 8, 10), data, pt.ditto(lr=0.1, lam=1.0), rounds=3, steps=3, batch=8)
    whole, own = run.client(0).model("global").state_dict(), run.model().state_dict()
    assert all(torch.equal(whole[k], v) for k, v in own.items())
    with pytest.raises(ValueError, match="which"):
        run.client(0).model("best")


def test_no_global_model_is_refused() -> None:
    data = pt.data.digits(6, seed=0)
    method = pt.fedalt("output", lr=0.1)
    run = pt.federate(pt.models.mlp(64, 8, 10), data, method, rounds=2, steps=2, batch=8, baselines=False)
    assert run.summary()["choice"] is None
    with pytest.raises(ValueError, match="has not trained"):
        run.client(0).model("global")
