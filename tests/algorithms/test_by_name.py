"""What a method's name stands for: `finetune` is fedavg first, since it needs a trained model."""

from __future__ import annotations

import shlex
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita.algorithms.base import ABOUT, METHODS
from partita.algorithms.by_name import EPOCHS, by_name
from partita.cli import catalogue
from partita.cli.run import NEXT
from partita.recipes import find
from partita.recipes.experiment import Experiment, build, changed
from partita.recipes.study import Study, Variant, run_study
from partita.recipes.versus import separate, versus
from support import each

FEDALT = pt.fedalt(personal="output", lr=0.3, personal_lr=0.1, max_grad_norm=1.0)


def experiment(algorithm: Any = FEDALT, **options: Any) -> Experiment:
    data = pt.data.digits(clients=8, partition=pt.data.label_skew(classes=3), test=0.4)
    usual = {"rounds": 40, "cohort": 4, "steps": 4, "batch": 16, "baselines": False, **options}
    return Experiment(pt.models.mlp(64, 16, 10), data, algorithm, **usual)


def test_by_its_name_finetune_comes_after_fedavg() -> None:
    """The fedavg of the same rounds, bit for bit, is its global model; clients tune what was trained."""
    rule = changed(FEDALT, {"": "finetune"})
    assert [stage.algorithm.name for stage in rule.stages] == ["fedavg", "finetune"]
    assert rule.name == "finetune"
    first, last = (stage.algorithm.options for stage in rule.stages)
    assert first["lr"] == last["lr"] == 0.3
    assert first["max_grad_norm"] == last["max_grad_norm"] == 1.0
    assert last["personal"] == "output"

    made, fedavg = (
        experiment(rule).run(executor="vmap"),
        experiment(pt.fedavg(lr=0.3, max_grad_norm=1.0)).run(executor="vmap"),
    )
    assert np.array_equal(made.scores("global"), fedavg.scores("global"))
    assert all(torch.equal(made.shared[k], v) for k, v in fedavg.shared.items())
    test = made.summary()["test"]
    assert test["personal"] > test["global"] > 0.5
    assert made.summary()["algorithm"] == "finetune"
    assert made.summary()["rounds"] == 41
    by_hand = pt.pipeline(
        pt.fedavg(lr=0.3, max_grad_norm=1.0),
        pt.stage(pt.finetune("output", lr=0.3, max_grad_norm=1.0), epochs=EPOCHS),
    )
    assert np.array_equal(made.scores(), experiment(by_hand).run(executor="vmap").scores())


def test_its_options_go_where_they_belong() -> None:
    rule = by_name("finetune", lr=0.1, personal_l2=0.5, server=pt.optim.adam(lr=0.01), weighting="uniform")
    first, last = (stage.algorithm.options for stage in rule.stages)
    assert (first["server"].name, first["weighting"]) == ("adam", "uniform")
    assert (last["personal_l2"], last["personal"]) == (0.5, "all")
    with pytest.raises(ValueError, match="lr"):
        by_name("finetune")
    again = changed(rule, {"personal_l2": 0.25})  # as --set algorithm.personal_l2=0.25
    assert [stage.algorithm.name for stage in again.stages] == ["fedavg", "finetune"]
    assert again.stages[1].algorithm.options["personal_l2"] == 0.25
    assert again.stages[0].algorithm.options["weighting"] == "uniform"


def test_compared_by_name() -> None:
    study = versus(experiment(), ["finetune", "finetune(personal_l2=0.1)", "finetune(personal=all)"])
    assert list(study.variants)[2:] == ["finetune", "finetune-personal_l2=0.1", "finetune-personal=all"]
    for label in list(study.variants)[2:]:
        stages = study.variants[label].experiment.algorithm.stages
        assert [stage.algorithm.name for stage in stages] == ["fedavg", "finetune"]
    assert study.variants["finetune-personal_l2=0.1"].experiment.algorithm.options["personal_l2"] == 0.1


def test_a_recipe_that_fine_tunes_a_model_of_its_own_goes_on_to_do_so() -> None:
    own = pt.finetune("output", lr=0.1)
    assert not changed(own, {"lr": 0.2}).stages
    assert not changed(own, {"": "finetune", "personal_l2": 0.2}).stages
    assert changed(own, {"": "fedavg"}).name == "fedavg"


def test_it_runs_under_an_asynchronous_schedule() -> None:
    """fedavg does; fine-tuning is one round of all."""
    schedule = pt.schedule.asynchronous(4, delays=pt.schedule.delays(upload=2.0))
    found = experiment(changed(FEDALT, {"": "finetune"}), schedule=schedule, rounds=20).run(executor="vmap")
    assert [part["name"] for part in found.config["schedule"]] == ["asynchronous", "synchronous"]


def test_what_the_demo_recommends() -> None:
    """Its command, word for word but for the size, compares methods that were trained."""
    words = shlex.split(NEXT)
    assert words[:3] == ["partita", "compare", "offices"]
    methods = separate(words[words.index("--algorithms") + 1])
    made = build(find("offices"), {"rounds": 60, "until": None})
    runs, _ = run_study(lambda seed: versus(made, methods), [0], about={}, out=None, executor="vmap")  # noqa: ARG005
    scores = {label: found[0].summary()["test"] for label, found in runs.items()}
    assert "finetune" in scores
    for label in methods:
        assert scores[label]["personal"] > 0.6, label
        assert scores[label]["global"] > 0.5, label  # six of twenty offices have codes that it cannot know


def test_the_catalogue_says_so() -> None:
    (facts,) = catalogue.facts("finetune")
    assert "fedavg for the rounds of the run" in " ".join(facts["about"].split())
    assert "pt.fedavg(lr=0.1)" in facts["python"]
    assert "algorithm=finetune" in facts["command"]


# ---- given directly


def untrained() -> nn.Module:
    return pt.models.mlp(64, 16, 10)


@pytest.mark.parametrize("model", [untrained, untrained()], ids=["function", "module"])
def test_fine_tuning_of_an_untrained_model_warns(model) -> None:
    made = experiment()
    with pytest.warns(UserWarning, match=r"commonest label.*seems to be untrained.*pipeline"):
        pt.federate(model, made.data, pt.finetune("output", lr=0.1), rounds=1, epochs=1, baselines=False)


def test_a_function_is_taken_for_untrained_where_nothing_can_be_guessed() -> None:
    x = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
    data = pt.data.from_arrays(x, x.sum(1, keepdims=True), np.repeat(np.arange(6), 10))
    method, short = pt.finetune("all", lr=0.01), {"rounds": 1, "baselines": False}
    with pytest.warns(UserWarning, match="seems to be untrained"):
        pt.federate(lambda: pt.models.mlp(5, 4, 1), data, method, **short)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pt.federate(pt.models.mlp(5, 4, 1), data, method, **short)


def test_no_warning_where_the_model_is_trained() -> None:
    """By the user, by a function that loads it, by an earlier stage, by the variant that it starts from."""
    made = experiment()
    trained = experiment(pt.fedavg(lr=0.3)).run(executor="vmap").model()
    tune, short = pt.finetune("output", lr=0.1), {"rounds": 1, "epochs": 1, "baselines": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pt.federate(trained, made.data, tune, **short)
        pt.federate(lambda: trained, made.data, tune, **short)
        experiment(pt.pipeline(pt.stage(pt.fedavg(lr=0.3), rounds=1), pt.stage(tune, epochs=1))).run(
            executor="vmap"
        )
        little = experiment(pt.fedavg(lr=1e-6), rounds=1)
        study = Study({"a": Variant(little), "b": Variant(experiment(tune, rounds=1), start="a")})
        run_study(lambda seed: study, [0], about={}, out=None, executor="vmap")  # noqa: ARG005


def test_a_name_is_registered_once_and_a_weighting_is_its_authors() -> None:
    @pt.method(paper="none", use="Use it here.")
    def of_ones_own(lr: pt.Lr, weighting: str = "uniform") -> pt.Algorithm:
        """Its own default."""
        return pt.fedavg(lr, weighting=weighting)

    try:
        assert of_ones_own(lr=0.1).options["weighting"] == "uniform"
        with pytest.raises(pt.Refused, match="method='fedavg': expected a new name"):

            @pt.method()
            def fedavg(lr: pt.Lr) -> pt.Algorithm:
                """The name of another."""
                return pt.local(lr)

        with pytest.raises(pt.Refused, match=r"brackets: @method\(\)"):
            pt.method(of_ones_own)
    finally:
        del METHODS["of_ones_own"], ABOUT["of_ones_own"]
    assert pt.scaffold(lr=0.1).options["weighting"] == "uniform"
    assert pt.fedalt("output", lr=0.1).options["weighting"] == "samples"


# ---- pipelines as they are written


def amounts(algorithm: pt.Algorithm) -> list[tuple[Any, ...]]:
    return [(s.algorithm.name, s.rounds, s.epochs, s.algorithm.options["lr"]) for s in algorithm.stages]


def test_a_pipeline_is_written_with_its_stages() -> None:
    text = "fedavg(lr=0.2, rounds=3) > fedalt(personal=input, cohort=2) > finetune(lr=0.01, epochs=2)"
    made = changed(FEDALT, {"": text})
    assert amounts(made) == [
        ("fedavg", 3, None, 0.2),
        ("fedalt", None, None, 0.3),
        ("finetune", None, 2, 0.01),
    ]
    assert made.stages[1].cohort == 2
    assert made.stages[1].algorithm.options["personal"] == "input"
    assert made.stages[2].algorithm.options["personal"] == "output"  # of the method that was there
    by_hand = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.2, max_grad_norm=1.0), rounds=2),
        pt.stage(pt.finetune("output", lr=0.01, max_grad_norm=1.0), epochs=2),
    )
    written = changed(FEDALT, {"": "fedavg(lr=0.2, rounds=2) > finetune(lr=0.01, epochs=2)"})
    ours, theirs = (experiment(m).run(executor="vmap") for m in (written, by_hand))
    assert np.array_equal(ours.scores(), theirs.scores())


def test_fine_tuning_has_its_usual_length() -> None:
    assert amounts(changed(FEDALT, {"": "fedavg > finetune"})) == [
        ("fedavg", None, None, 0.3),
        ("finetune", None, EPOCHS, 0.3),
    ]
    assert (
        changed(pt.fedavg(lr=0.1), {"": "fedavg > finetune"}).stages[1].algorithm.options["personal"] == "all"
    )
    assert changed(FEDALT, {"": "fedavg > finetune", "1.lr": 0.5}).stages[1].algorithm.options["lr"] == 0.5
    assert changed(FEDALT, {"": "fedprox(mu=0.7)"}).options["mu"] == 0.7


@each(
    "text, field",
    [
        ("fedavg >> finetune", "algorithm"),
        ("fedavg >", "algorithm"),
        ("fedavg < finetune", "algorithm"),
        ("fedavg(0.1) > finetune", "algorithm"),
        ("fedavg > finetun", "algorithm"),
        ("fedavg > finetune(epoch=3)", "option of finetune"),
        ("fedavg > finetune(epochs=0)", "finetune: epochs"),
        ("fedavg > finetune(epochs=2, steps=3)", "finetune: steps"),
        ("fedavg(lr=-1) > finetune", "fedavg: lr"),
    ],
)
def test_a_pipeline_that_is_none_is_refused(text: str, field: str) -> None:
    with pytest.raises(pt.Refused) as refused:
        changed(FEDALT, {"": text})
    assert refused.value.field == field


def test_pipelines_are_compared() -> None:
    methods = separate("fedavg(lr=0.1) > finetune(lr=0.01), fedalt, finetune")
    variants = versus(experiment(rounds=2), methods).variants
    assert list(variants) == ["local", "fedavg", "fedavg-lr=0.1+finetune-lr=0.01", "fedalt", "finetune"]
    stages = variants["fedavg-lr=0.1+finetune-lr=0.01"].experiment.algorithm.stages
    assert [s.algorithm.name for s in stages] == ["fedavg", "finetune"]
