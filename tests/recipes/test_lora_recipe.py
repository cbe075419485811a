"""The recipe of federated LoRA: who trains on what, what is shared, and what the tables say."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest
import torch

from partita import data
from partita.engine.model.probe import names_of
from partita.recipes import RECIPES, Study
from partita.recipes.lora import LENGTH, LETTERS, OTHERS
from partita.recipes.study import run_study
from partita.recipes.tables import Runs, Table

RECIPE = importlib.import_module("partita.recipes.lora")  # the package has a function of this name
SIZES = (9, 22, 14, 30, 11)
ADAPTING = ["role1", "role3"]  # those with most text
SHORT = {"clients": 2, "rounds": 2, "base_rounds": 1, "rank": 4}
VARIANTS = ["base", "alone", "shared", "ranks", "ffa", "fedsa", "personal", "ditto", "full"]


@pytest.fixture(autouse=True)
def roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five roles of made-up letters in place of Shakespeare's, and a base model that is soon trained."""
    draw = np.random.default_rng(0)
    text = draw.integers(0, LETTERS, (sum(SIZES), LENGTH + 1))
    names = np.repeat([f"role{i}" for i in range(len(SIZES))], SIZES)
    made = data.from_arrays(text[:, :-1], text[:, 1:], names, test=0.25)
    monkeypatch.setattr(data, "real", lambda name, **options: made)  # noqa: ARG005
    monkeypatch.setattr(RECIPE, "BASE_STEPS", 2)
    monkeypatch.setitem(RECIPE.SIZES, "small", RECIPE.Size(2, 16, 1, 1, 2))


def study(**settings: Any) -> Study:
    made = RECIPES["lora"](**{**SHORT, **settings})
    assert isinstance(made, Study)
    return made


def rows(x: Any) -> set[bytes]:
    return {row.numpy().tobytes() for row in torch.as_tensor(x).to(torch.int64)}


def test_the_base_model_has_not_read_what_is_adapted_to() -> None:
    variants = study().variants
    adapting, others = variants["shared"].experiment.data, variants["base"].experiment.data
    assert list(adapting.names) == ADAPTING
    assert set(others.names) == {OTHERS, *ADAPTING}
    sizes = dict(zip(others.names, others.sizes("train").tolist()))
    assert sizes == {OTHERS: sum(SIZES) - SIZES[1] - SIZES[3], **dict.fromkeys(ADAPTING, 0)}
    read = rows(others.client(others.names.index(OTHERS), "train")[0])
    for i, name in enumerate(ADAPTING):
        parts = [adapting.client(i, split)[0] for split in ("train", "validation", "test")]
        assert not read & rows(torch.cat(parts))  # type: ignore[arg-type]
        assert rows(others.client(others.names.index(name), "test")[0]) == rows(parts[2])


def test_what_is_shared_and_what_is_personal() -> None:
    found = {}
    for name, variant in study().variants.items():
        experiment = variant.experiment
        names = names_of(experiment.model, experiment.data)  # type: ignore[arg-type]
        split = experiment.algorithm.partition(experiment.model, names)  # type: ignore[arg-type]
        found[name] = tuple({_kind(n) for n in part} for part in (split.shared, split.personal))
    base, both = {"weight", "norm"}, {"A", "B"}
    assert found == {
        "base": (base, set()),
        "alone": (set(), both),
        "shared": (both, set()),
        "ranks": (both, set()),
        "ffa": ({"B"}, set()),
        "fedsa": ({"A"}, {"B"}),
        "personal": ({"norm"}, both),
        "ditto": (both, both),
        "full": (base, set()),
    }


def _kind(name: str) -> str:
    kinds = {"lora_A": "A", "lora_B": "B", "norm": "norm"}
    return next((kind for word, kind in kinds.items() if word in name), "weight")


@functools.cache
def _ran() -> tuple[Runs, list[Table]]:
    found, tables = run_study(
        lambda seed: study(seed=seed),
        [0],
        announce=lambda text: None,  # noqa: ARG005
        executor="loop",
        progress=False,
    )
    return found, list(tables)


def test_every_variant_begins_with_the_base_model() -> None:
    runs, _ = _ran()
    assert list(runs) == VARIANTS
    variants = study().variants
    for name, variant in variants.items():
        assert variant.start == (None if name == "base" else "base")
    assert variants["ditto"].baselines == {"local": "alone", "global": "shared"}


def test_the_tables_are_filled() -> None:
    runs, (overall, by_role) = _ran()
    cells = {row[0]: dict(zip(overall.columns, row)) for row in overall.rows}
    assert list(cells) == VARIANTS
    sent = {name: float(cells[name]["kB sent"]) for name in VARIANTS[1:]}
    assert sent["alone"] == 0
    assert sent["ffa"] + sent["fedsa"] == pytest.approx(sent["shared"], abs=0.2)
    assert sent["ditto"] == sent["shared"]
    assert sent["personal"] < sent["ffa"] < sent["ranks"] < sent["shared"] < sent["full"]
    for name, seeds in runs.items():
        means = seeds[0].summary()["metrics"]
        assert float(cells[name]["perplexity"]) == pytest.approx(
            means["perplexity"]["test"]["personal"], abs=1e-3
        )
        assert float(cells[name]["accuracy, %"]) == pytest.approx(
            100 * means["accuracy"]["test"]["personal"], abs=0.1
        )
    assert cells["shared"]["worse than shared"] == cells["alone"]["worse than alone"] == "-"
    better, than = (runs[name][0].scores("personal") for name in ("ditto", "alone"))
    assert int(cells["ditto"]["worse than alone"]) == int((better > than).sum())
    assert [row[0] for row in by_role.rows] == ADAPTING
    assert by_role.columns == ("role", *VARIANTS)
    assert float(by_role.rows[1][3]) == pytest.approx(runs["shared"][0].scores("personal")[1], abs=1e-3)


def test_somebody_has_to_be_left_for_the_base_model() -> None:
    with pytest.raises(ValueError, match=r"clients=5: expected .*4"):
        study(clients=5)
