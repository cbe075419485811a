"""Wrong settings are refused before any work: the field, the value and what is allowed, and no file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita.core import check
from partita.engine.description import describe
from partita.engine.settings import Settings, stage_work
from support import each

CLIENTS = 3


def data() -> pt.data.FederatedData:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 4, generator=g), torch.randint(0, 2, (24,), generator=g)
    return pt.data.from_arrays(x, y, np.repeat(np.arange(CLIENTS), 8))


def federate(out, **changed):
    """A good run but for what is changed."""
    given = {"model": pt.models.mlp(4, 2), "data": data(), "algorithm": pt.fedavg(lr=0.1), "rounds": 1}
    given |= {"batch": 4, "baselines": False, "out": out, **changed}
    return pt.federate(given.pop("model"), given.pop("data"), given.pop("algorithm"), **given)


def refused(tmp_path, field: str, value, allowed: str, **changed) -> None:
    out = tmp_path / "run"
    with pytest.raises(check.Refused) as error:
        federate(out, **changed or {field: value})
    assert error.value.field == field
    assert repr(value)[:60] in str(error.value)
    assert allowed in error.value.allowed
    assert not out.exists()


def test_the_good_run_runs(tmp_path) -> None:
    assert federate(tmp_path / "run").summary()["rounds"] == 1


@each("field", ["rounds", "cohort", "epochs", "batch"])
@each("value", [0, -1, 1.5, 2.0, "3", True, [1], float("nan")])
def test_counts(tmp_path, field, value) -> None:
    refused(tmp_path, field, value, "a whole number from 1")


def test_evaluations_by_rounds_or_by_virtual_time(tmp_path) -> None:
    for value in (0, -1, "3", True, [1]):
        refused(tmp_path, "evaluate_every", value, "a whole number from 1")
    for value in (0.0, -2.5, float("nan"), float("inf")):
        refused(tmp_path, "evaluate_every", value, "a number above 0")
    half = pt.schedule.synchronous(delays=pt.schedule.delays(upload=0.5))
    for every, rounds in ((2, [2, 4, 6]), (2.0, [4, 6]), (0.75, [2, 3, 5, 6]), (9.0, [6])):
        run = federate(None, rounds=6, evaluate_every=every, schedule=half)
        assert [row["round"] for row in run.metrics] == rounds


def test_cohort_is_at_most_everyone(tmp_path) -> None:
    refused(tmp_path, "cohort", 4, "from 1 up to 3")
    assert federate(tmp_path / "run", cohort=3).summary()["clients"] == 3


def test_rounds_are_needed(tmp_path) -> None:
    refused(tmp_path, "rounds", None, "a whole number from 1")


@each("value", [0, -2, 1.5, "3", False])
def test_steps(tmp_path, value) -> None:
    refused(tmp_path, "steps", value, "a whole number from 1")


def test_steps_for_each_client(tmp_path) -> None:
    refused(tmp_path, "steps", [1, 2], "one for each of the 3 clients")
    with pytest.raises(ValueError, match="steps=-1: expected a whole number from 0"):
        federate(tmp_path / "run", steps=[1, 2, -1])
    for good in ([1, 0, 2], (1, 0, 2), np.array([1, 0, 2]), torch.tensor([1, 0, 2])):
        run = federate(None, steps=good)
        assert run.summary()["client_steps_per_second"] > 0


@each("wrong", [1.5, "x", "2", [1], None, True])
def test_steps_of_one_client(tmp_path, wrong) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="steps") as error:
        federate(out, steps=[1, 1, wrong])
    assert "whole number" in str(error.value)
    assert not out.exists()


def test_steps_or_epochs(tmp_path) -> None:
    refused(tmp_path, "steps", 2, "not both", steps=2, epochs=1)


@each("value", [-1, 1.0, "0", None, True])
def test_seed(tmp_path, value) -> None:
    refused(tmp_path, "seed", value, "a whole number from 0")


def test_a_seed_of_63_bits_works(tmp_path) -> None:
    assert federate(tmp_path / "run", seed=2**63 - 1).summary()["seed"] == 2**63 - 1


@pytest.mark.parametrize("seed", [2**64, 2**70])
def test_a_seed_that_is_too_large(tmp_path, seed) -> None:
    """Keys have 64 bits."""
    refused(tmp_path, "seed", seed, "a whole number from 0 up to")


@each(
    ("field", "value", "allowed"),
    [
        ("state", "kept", "'keep', 'reset' (did you mean 'keep'?)"),
        ("state", None, "'keep', 'reset'"),
        ("norm", "globl", "'global', 'static', 'personal' (did you mean 'global'?)"),
        ("norm", True, "'global', 'static', 'personal'"),
        ("executor", "vmpa", "'auto', 'loop', 'pool', 'vmap', 'graph', 'compiled' (did you mean 'vmap'?)"),
        ("executor", None, "'auto', 'loop', 'pool', 'vmap', 'graph', 'compiled'"),
        ("store", "dsk", "'auto', 'memory', 'disk' (did you mean 'disk'?)"),
        ("store", None, "'auto', 'memory', 'disk'"),
        ("device", "gpu", "'auto', 'cpu' or 'cuda'"),
        ("device", None, "'auto', 'cpu' or 'cuda'"),
        ("device", "meta", "'auto', 'cpu' or 'cuda'"),
        ("device", 3.5, "'auto', 'cpu' or 'cuda'"),
        ("memory", "much", "'500MB'"),
        ("memory", "infGB", "'500MB'"),
        ("memory", "8 TB!", "'500MB'"),
        ("memory", 0, "a whole number from 1"),
        ("memory", 1.5, "a whole number from 1"),
    ],
)
def test_words(tmp_path, field, value, allowed) -> None:
    refused(tmp_path, field, value, allowed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_here(tmp_path) -> None:
    refused(tmp_path, "device", "cuda", "'auto' or 'cpu'")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there(tmp_path) -> None:
    refused(tmp_path, "device", "mps", "'cpu'")


def test_a_store_on_disk_needs_a_folder() -> None:
    with pytest.raises(ValueError) as error:
        federate(None, store="disk", algorithm=pt.fedalt("output", lr=0.1))
    assert str(error.value).startswith("store='disk': ")
    assert "out" in str(error.value)


@each("value", [None, 3, "digits", (torch.zeros(3, 4), torch.zeros(3))])
def test_data(tmp_path, value) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"(?s)^data=.*: expected a FederatedData, made by partita\.data\."):
        federate(out, data=value)
    assert not out.exists()


@each("value", [None, "fedavg", pt.fedavg, pt.stage(pt.fedavg(lr=0.1), rounds=1)])
def test_algorithm(tmp_path, value) -> None:
    refused(tmp_path, "algorithm", value, "a method such as partita.fedavg(lr=0.1)")


def test_data_and_algorithm_exchanged(tmp_path) -> None:
    refused(tmp_path, "data", pt.fedavg(lr=0.1), "a FederatedData", data=pt.fedavg(lr=0.1), algorithm=data())


# ---- models


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return {"first": self.linear(x), "second": x}


@each(
    ("model", "allowed"),
    [
        (3, "an nn.Module"),
        ("mlp", "an nn.Module"),
        (None, "an nn.Module"),
        (lambda: 3, "a function that returns an nn.Module"),
        (nn.Linear, "a function that returns an nn.Module"),  # a class, not an instance: it cannot be made
        (TwoOutputs(), "outputs of which one is the prediction, and output= names it"),
        (nn.Flatten(), "parameters that require gradients"),
        (pt.models.mlp(4, 2).requires_grad_(False), "parameters that require gradients"),
    ],
    ids=["number", "name", "nothing", "not a module", "class", "two outputs", "no parameters", "frozen"],
)
def test_model(tmp_path, model, allowed) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError) as error:
        federate(out, model=model)
    assert str(error.value).startswith("model=")
    assert allowed in str(error.value)
    assert not out.exists()


def test_a_model_that_does_not_fit_the_data(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"model=.*batch of \[4, 4\] float32"):
        federate(tmp_path / "run", model=pt.models.mlp(5, 2))
    with pytest.raises(ValueError, match="labels run from 0 to 1, but the model has 1 outputs"):
        federate(tmp_path / "run", model=pt.models.mlp(4, 1), loss="cross_entropy")
    assert not (tmp_path / "run").exists()


@each(
    ("field", "value", "part"),
    [
        ("loss", "cross-entropy", "did you mean 'cross_entropy'?"),
        ("loss", 3, "a function of (output, target)"),
        ("loss", lambda o, t: F_none(o, t), "one number for a batch"),
        ("loss", lambda o, t: (o.argmax(1) == t).float().mean(), "depends on the model's parameters"),
        ("loss", lambda o, t: 3.0, "one number for a batch"),  # noqa: ARG005
        ("loss", lambda o, t: o @ t, "cannot compare outputs of shape"),
        ("loss", lambda o, t: o.mean() / 0, "a finite value"),  # noqa: ARG005
        ("metric", "acuracy", "did you mean 'accuracy'?"),
        ("metric", 3, "a function of (output, target)"),
        ("metric", pt.Metric(lambda o, t: o, True), "one number for a client"),  # noqa: ARG005
    ],
)
def test_loss_and_metric(tmp_path, field, value, part) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError) as error:
        federate(out, **{field: value})
    assert str(error.value).startswith(f"{field}=")
    assert part in str(error.value)
    assert not out.exists()


def F_none(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none")


# ---- stages


@each(
    ("options", "start"),
    [
        ({"rounds": 0}, "rounds=0: expected a whole number from 1"),
        ({"cohort": 1.5}, "cohort=1.5: expected a whole number from 1"),
        ({"epochs": "2"}, "epochs='2': expected a whole number from 1"),
        ({"batch": -1}, "batch=-1: expected a whole number from 1"),
        ({"steps": 2, "epochs": 1}, "steps=2: expected"),
        ({"steps": 0}, "steps=0: expected"),
        ({"steps": "many"}, "steps='many': expected"),
        ({"state": "kept"}, "state='kept': expected one of 'keep', 'reset'"),
    ],
)
def test_a_stage(options, start) -> None:
    with pytest.raises(ValueError) as error:
        pt.stage(pt.fedavg(lr=0.1), **options)
    assert str(error.value).startswith(start)


@each("value", [None, "fedavg", pt.fedavg, pt.pipeline(pt.fedavg(lr=0.1))])
def test_a_stage_of_what(value) -> None:
    with pytest.raises(ValueError, match=r"^algorithm="):
        pt.stage(value)
    with pytest.raises(ValueError, match=r"^algorithm="):
        pt.pipeline(value)


def test_an_empty_pipeline() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        pt.pipeline()


def test_the_cohort_of_a_stage_is_at_most_everyone(tmp_path) -> None:
    method = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=1), pt.stage(pt.fedavg(lr=0.1), rounds=1, cohort=9)
    )
    refused(tmp_path, "cohort", 9, "up to 3", algorithm=method)


def test_every_stage_needs_rounds(tmp_path) -> None:
    method = pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=1), pt.fedavg(lr=0.1))
    refused(tmp_path, "rounds", None, "a whole number from 1", algorithm=method, rounds=None)


def test_a_wrong_split_in_a_late_stage(tmp_path) -> None:
    method = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=1), pt.stage(pt.fedalt("heads", lr=0.1), rounds=1)
    )
    refused(tmp_path, "personal", "heads", "a name pattern", algorithm=method)


# ---- what settings become


def checked(**changed) -> Settings:
    given = {
        "rounds": 4,
        "cohort": None,
        "steps": None,
        "epochs": None,
        "batch": None,
        "seed": 0,
        "state": "keep",
        "norm": None,
        "executor": "auto",
        "device": "cpu",
        "memory": None,
        "store": "auto",
        "evaluate_every": None,
        "checkpoint_every": None,
        "baselines": False,
        "train_scores": False,
    }
    return Settings(**{**given, **changed}).checked(CLIENTS)


def test_whole_numbers_of_numpy_count() -> None:
    got = checked(rounds=np.int64(3), batch=np.int32(2), seed=np.uint8(7), steps=np.array([1, 2, 3]))
    assert (got.rounds, got.batch, got.seed, got.steps) == (3, 2, 7, (1, 2, 3))
    assert all(type(x) is int for x in (got.rounds, got.batch, got.seed, *got.steps))


@each(
    ("text", "expected"),
    [
        (None, None),
        (500, 500),
        ("500", 500),
        ("500B", 500),
        ("2kB", 2000),
        ("1.5 MB", 1_500_000),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("3KiB", 3072),
        (" 1 GB ", 10**9),
    ],
)
def test_bytes(text, expected) -> None:
    assert Settings(memory=text).memory_bytes == expected


def test_a_plain_method_is_a_pipeline_of_one() -> None:
    (one,) = checked(steps=3, batch=2, cohort=2).stages(pt.fedavg(lr=0.1))
    assert (one.rounds, one.cohort, one.steps, one.epochs, one.batch, one.state) == (4, 2, 3, None, 2, "keep")


def test_stages_take_what_they_do_not_bring() -> None:
    method = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=2, steps=7),
        pt.stage(pt.fedalt("all", lr=0.1), cohort=1, state="reset", batch=8),
        pt.stage(pt.finetune("all", lr=0.1), epochs=5),
    )
    a, b, c = checked(epochs=2, batch=2, cohort=2).stages(method)
    assert (a.rounds, a.cohort, a.steps, a.epochs, a.batch, a.state) == (2, 2, 7, None, 2, "keep")
    assert (b.rounds, b.cohort, b.steps, b.epochs, b.batch, b.state) == (4, 1, None, 2, 8, "reset")
    # given epochs and no rounds: one round of everyone
    assert (c.rounds, c.cohort, c.steps, c.epochs, c.batch, c.state) == (1, None, None, 5, 2, "keep")


def test_one_pass_unless_said_otherwise() -> None:
    (one,) = checked().stages(pt.fedavg(lr=0.1))
    assert (stage_work(one).steps, stage_work(one).epochs, stage_work(one).batch) == (None, 1, None)
    (two,) = checked(steps=3).stages(pt.fedavg(lr=0.1))
    assert (stage_work(two).steps, stage_work(two).epochs) == (3, None)


def test_describe_writes_options_down() -> None:
    method = pt.fedalt(["output", "*.bias"], lr=pt.optim.halving(0.1, 3), server=pt.optim.adam(0.01))
    said = describe(method)
    assert said["name"] == "fedalt"
    assert said["personal"] == ["output", "*.bias"]
    assert said["lr"] == {"name": "halving", "lr": 0.1, "every": 3}
    assert said["server"]["name"] == "adam"
    assert said["server"]["lr"] == 0.01
    assert said["momentum"] == 0.0
    both = describe(pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=2), pt.fedavg(lr=0.2)))
    assert [s["algorithm"]["lr"] for s in both["stages"]] == [0.1, 0.2]
    assert both["stages"][0]["rounds"] == 2


@each("value", [-1, 1.5, "3", True])
def test_checkpoints_may_be_none(tmp_path, value) -> None:
    refused(tmp_path, "checkpoint_every", value, "a whole number from 0")


@each("value", [1, "yes", None])
def test_train_scores(tmp_path, value) -> None:
    refused(tmp_path, "train_scores", value, "True or False")
