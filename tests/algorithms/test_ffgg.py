"""FFGG: what it equals, and how its clients begin. Its theorems are in `tests/theory`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partita as pt
from partita.core.parts import Algorithm
from support import each

both_executors = each("executor", ["loop", "vmap"])
SYNCHRONOUS = {"schedule": pt.schedule.synchronous()}
DIGITS = pt.data.digits(5, pt.data.label_skew(classes=3), seed=0)


def federate(algorithm: Algorithm, **settings: Any) -> pt.Run:
    model = pt.models.mlp(64, 8, 10, seed=1)
    defaults = {"rounds": 3, "epochs": 1, "executor": "vmap", "baselines": False, "progress": False}
    return pt.federate(model, DIGITS, algorithm, **{**defaults, **settings})


# ---- what equals what


@both_executors
def test_without_a_personal_part_it_is_gradient_descent(executor: str) -> None:
    """Bit for bit: one step of fedavg on the full batch."""
    one = federate(pt.ffgg("none", 0.3, pt.gd(5, 0.1), weighting="samples"), executor=executor)
    other = federate(pt.fedavg(0.3), executor=executor)
    for name, value in other.shared.items():
        assert torch.equal(one.shared[name], value)
    assert [r["train_loss"] for r in one.metrics] == pytest.approx([r["train_loss"] for r in other.metrics])


@both_executors
def test_the_gradient_is_that_of_all_data(executor: str) -> None:
    """In batches of any size: their gradients are averaged by their numbers of samples."""
    method = pt.ffgg("output", 0.3, pt.cg(3))
    whole, parts = (federate(method, executor=executor, batch=b) for b in (None, 7))
    for name, value in whole.shared.items():
        torch.testing.assert_close(parts.shared[name], value, rtol=0, atol=1e-6)


def test_with_gradient_descent_from_the_model_it_is_fedalt_without_state() -> None:
    """On full batches; fedalt with one step on u (section 3 of the paper, last paragraph)."""
    alt = pt.fedalt("output", 0.3, 0.2, personal_steps=4, shared_steps=1, weighting="uniform")
    one = federate(pt.ffgg("output", 0.3, pt.gd(4, 0.2), start="model"))
    with pytest.warns(UserWarning, match="state='reset'"):
        other = federate(alt, state="reset")
    for name, value in other.shared.items():
        torch.testing.assert_close(one.shared[name], value, rtol=0, atol=1e-6)


def test_one_local_step_is_one_of_fedalt_as_well() -> None:
    """Algorithm 4 with K = 1 and a solver of s steps is Algorithm 2 of FedAlt with s + 1 and 1."""
    alt = pt.fedalt("output", 0.3, 0.2, personal_steps=4, shared_steps=1, weighting="uniform")
    one = federate(pt.ffgg_local("output", 0.3, 0.2, pt.gd(3, 0.2), start="model"))
    with pytest.warns(UserWarning, match="state='reset'"):
        other = federate(alt, state="reset")
    for name, value in other.shared.items():
        torch.testing.assert_close(one.shared[name], value, rtol=0, atol=1e-6)


def test_with_a_server_step_the_upload_is_the_gradient_itself() -> None:
    """γ_θ before or after the aggregation is the same for a mean, but not for a length to clip at."""
    clip = pt.aggregate.centered_clipping(0.05)
    for aggregate, alike in ((None, True), (clip, False)):
        one, other = (
            federate(pt.ffgg("output", lr, pt.cg(3), start="model", aggregate=aggregate, server=server))
            for lr, server in ((0.3, None), (1.0, pt.optim.sgd(lr=0.3)))
        )
        close = [torch.allclose(v, other.shared[k], rtol=0, atol=1e-6) for k, v in one.shared.items()]
        assert all(close) is alike


@both_executors
def test_a_gradient_over_one_batch(executor: str) -> None:
    """All samples where the run has no batches, else some of them."""
    full, batch = (pt.ffgg("none", 0.3, weighting="samples", gradient=g) for g in ("full", "batch"))
    one, other = (federate(method, executor=executor) for method in (full, batch))
    assert all(torch.equal(v, other.shared[k]) for k, v in one.shared.items())
    sampled = federate(batch, executor=executor, batch=8, rounds=1)
    assert sampled.metrics[-1]["train_loss"] != pytest.approx(one.metrics[0]["train_loss"], rel=1e-3)


# ---- evaluation has a solver of its own


def test_batches_and_evaluation_stacked_equal_those_of_clients_alone() -> None:
    method = pt.ffgg("output", 0.3, pt.gd(3, 0.2), evaluate=pt.gd(epochs=2, lr=0.2), gradient="batch")
    loop, stacked = (federate(method, executor=e, batch=7, rounds=2) for e in ("loop", "vmap"))
    for i in range(5):
        for name, value in loop.personalized(i).items():
            torch.testing.assert_close(stacked.personalized(i)[name], value, rtol=0, atol=1e-6)
    assert [r["train_loss"] for r in loop.metrics] == pytest.approx(
        [r["train_loss"] for r in stacked.metrics]
    )


@both_executors
def test_evaluation_may_solve_more_exactly_than_training(executor: str) -> None:
    """θ is that of the training solver, w that of the other one from the same start."""
    few, many = pt.gd(2, 0.1), pt.gd(epochs=6, lr=0.2)
    for method in (pt.ffgg, pt.ffgg_local, pt.ffgg_robust, pt.ffgg_async):
        made = {
            name: method("output", 0.3, solver=few, evaluate=other)
            for name, other in {"same": None, "own": many}.items()
        }
        runs = {name: federate(m, executor=executor, rounds=2, **SYNCHRONOUS) for name, m in made.items()}
        same, own = runs["same"], runs["own"]
        assert all(torch.equal(v, own.shared[k]) for k, v in same.shared.items())
        assert own.metrics[-1]["test.personal"] > same.metrics[-1]["test.personal"] + 0.1


def test_a_large_part_is_refused_for_the_solver_of_evaluation() -> None:
    model, method = pt.models.mlp(64, 40, 10), pt.ffgg("all", 0.1, pt.gd(1, 0.1), evaluate=pt.exact())
    with pytest.raises(ValueError, match=r"up to 2000 parameters for exact\(\)"):
        method.partition(model, list(model.state_dict()))


# ---- clients keep nothing


def test_nothing_is_kept_and_every_round_begins_anew() -> None:
    run = federate(pt.ffgg("output", 0.0, pt.gd(1, 0.0)))
    start = pt.models.mlp(64, 8, 10, seed=1).state_dict()
    name = "output.linear.weight"
    for i in range(5):
        assert torch.equal(run.store.load([i]).personal[name][0], start[name])
        assert torch.equal(run.client(i).personal[name], run.personalized(i)[name])  # made when asked for
        assert run.client(i).memory == {}
    drawn = [run.personalized(i)[name] for i in range(5)]
    assert not torch.equal(drawn[0], drawn[1])
    later = federate(pt.ffgg("output", 0.0, pt.gd(1, 0.0)), rounds=4).personalized(0)[name]
    assert not torch.equal(drawn[0], later)
    assert torch.equal(drawn[0], run.personalized(0)[name])
    assert not torch.equal(
        drawn[0], federate(pt.ffgg("output", 0.0, pt.gd(1, 0.0)), seed=1).personalized(0)[name]
    )


def test_a_decaying_rate_is_not_zero_at_the_last_evaluation() -> None:
    solver = pt.gd(5, pt.optim.linear(0.5))
    run = federate(pt.ffgg("output", 0.1, solver, start="model"))
    start = pt.models.mlp(64, 8, 10, seed=1).state_dict()["output.linear.weight"]
    assert not torch.equal(run.personalized(0)["output.linear.weight"], start)


def test_a_stage_of_a_pipeline() -> None:
    method = pt.pipeline(
        pt.stage(pt.fedavg(0.3), rounds=2),
        pt.stage(pt.ffgg("output", 0.3, pt.gd(5, 0.3), start="model"), rounds=2),
        pt.stage(pt.finetune("output", 0.3), epochs=2),
    )
    run = federate(method, batch=16, rounds=None)
    assert run.metrics[-1]["train_loss"] < run.metrics[0]["train_loss"]
    assert not torch.equal(
        run.client(0).personal["output.linear.weight"], run.client(1).personal["output.linear.weight"]
    )
