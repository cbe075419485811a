"""Asynchronous methods: PersA-FL, FedAsync and FedBuff against each other; which must be synchronous."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.algorithms import METHODS
from partita.cli.catalogue import needed
from partita.core.options import declared
from partita.core.parts import Algorithm
from partita.engine.store import durable
from reference.plain_persafl import in_order_of_arrival
from support import each

LAM, INNER, LR = 4.0, 0.1, 0.05
LATE = pt.schedule.delays(upload=pt.schedule.exponential(5.0))
STALE = {"rounds": 12, "schedule": pt.schedule.asynchronous(concurrency=4, delays=LATE)}
SYNCHRONOUS = {"rounds": 3, "cohort": 4, "schedule": pt.schedule.synchronous()}
both_executors = each("executor", ["loop", "vmap"])
all_executors = each("executor", ["loop", "vmap", "graph"])


def arrays() -> pt.data.FederatedData:
    """Six clients of 8 to 18 samples, 4 classes that look different to each."""
    rng = np.random.default_rng(1)
    client = np.repeat(np.arange(6), [8, 10, 12, 14, 16, 18])
    y = rng.integers(0, 4, len(client))
    x = (
        rng.normal(size=(4, 6))[y]
        + 0.6 * rng.normal(size=(6, 6))[client]
        + 0.4 * rng.normal(size=(len(y), 6))
    )
    return pt.data.from_arrays(torch.from_numpy(x), y, client, test=0.3, validation=0, seed=0)


DATA = arrays()


def federate(method: Algorithm, model: nn.Module | None = None, **settings: Any) -> pt.Run:
    given = {"steps": 3, "batch": 4, "seed": 1, "executor": "vmap", "baselines": False, "progress": False}
    own = pt.models.mlp(6, 5, 4, seed=1).double() if model is None else model
    return pt.federate(own, DATA, method, **{**given, **settings})


def models(run: pt.Run) -> dict[str, Tensor]:
    """The server's and every client's."""
    found = {f"server {k}": v for k, v in run.shared.items()}
    for i in range(DATA.clients):
        found |= {f"client {i} {k}": v for k, v in run.personalized(i).items()}
    return found


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)).double()


# ---- option A, and Xie et al.


@both_executors
@each("mixing", [False, True])
def test_stale_models_are_mixed_as_xie_et_al_do(executor: str, mixing: bool) -> None:
    """Against the paper's two threads, written plainly: clients of different speed, on all of their data."""
    turn, steps, eta, rho, alpha = (1.0, 1.7, 2.9, 4.3, 0.61, 7.1), 3, 0.3, 0.5, 0.6
    method = pt.fedasync(eta, alpha, "inverse", mixing, rho)
    schedule = pt.schedule.asynchronous(order="same", delays=pt.schedule.delays(upload=turn))
    run = federate(method, smooth(), rounds=25, steps=steps, batch=None, schedule=schedule, executor=executor)
    assert run.summary()["clock"]["staleness"]["max"] > 5

    def solve(i: int, received: np.ndarray) -> np.ndarray:
        """A few steps on f_i(x) + (ρ/2) ‖x − x_τ‖², from x_τ."""
        x = received
        for _ in range(steps):
            x = x - eta * (slope(x, i) + rho * (x - received))
        return x

    first = np.concatenate([p.detach().numpy().ravel() for p in smooth().parameters()])
    plainly = in_order_of_arrival(first, solve, turn, 25, alpha, lambda age: 1 / (1 + age), mixing)
    found = np.concatenate([run.shared[k].numpy().ravel() for k in ("weight", "bias")])
    np.testing.assert_allclose(found, plainly, atol=1e-12)


def slope(theta: np.ndarray, client: int) -> np.ndarray:
    """∇f_i over all training data of the client, of the weights of `smooth` in a row."""
    x, y = (t.numpy() for t in DATA.client(client, "train"))
    weight, bias = theta[:24].reshape(4, 6), theta[24:]
    z = np.exp(x @ weight.T + bias)
    dz = (z / z.sum(1, keepdims=True) - np.eye(4)[y]) / len(y)
    return np.concatenate([(dz.T @ x).ravel(), dz.sum(0)])


def test_what_is_not_stale_is_not_mixed_otherwise() -> None:
    schedule = pt.schedule.asynchronous(concurrency=1)
    runs = [federate(pt.fedasync(0.2, 0.5, mixing=m), rounds=6, schedule=schedule) for m in (False, True)]
    assert apart(*map(models, runs)) == 0.0


def test_a_device_that_holds_a_part_cannot_mix() -> None:
    halves = pt.capacity.width({"strong": 1.0, "weak": 0.5})
    with pytest.raises(ValueError, match="mixing=True"):
        federate(pt.fedasync(0.2, mixing=True), capacity=halves, **STALE)


# ---- option B


@pytest.mark.parametrize(
    ("hessian", "executor"),
    [
        *product(("exact", "hf", "fo"), ("loop", "vmap")),
        pytest.param("exact", "graph", marks=pytest.mark.slow),
    ],
)
def test_without_a_step_of_its_own_maml_is_fedasync(hessian: str, executor: str) -> None:
    for staleness in (None, "sqrt"):
        maml = pt.persafl_maml(0.2, 0.0, 0.5, hessian, staleness=staleness)
        plainly = pt.fedasync(0.2, 0.5, staleness)
        one, other = (federate(m, executor=executor, **STALE) for m in (maml, plainly))
        assert max(row["staleness"] for row in one.metrics) > 1
        assert apart(models(one), models(other)) == 0.0
        assert [r["test.personal"] for r in one.metrics] == [r["test.personal"] for r in other.metrics]


def test_without_a_step_of_its_own_maml_leaves_statistics_alone() -> None:
    settings = {**STALE, "norm": "global", "executor": "loop"}
    one, other = (federate(m, normed(), **settings) for m in (pt.persafl_maml(0.2, 0.0), pt.fedasync(0.2)))
    assert apart(models(one), models(other)) == 0.0


def test_synchronous_maml_is_perfedavg() -> None:
    one, other = (federate(m, **SYNCHRONOUS) for m in (pt.persafl_maml(0.2, 0.1), pt.perfedavg(0.2, 0.1)))
    assert apart(models(one), models(other)) == 0.0
    assert [r["test.personal"] for r in one.metrics] == [r["test.personal"] for r in other.metrics]


def test_differences_come_close_to_the_hessian() -> None:
    """With the δ of (D1) in place of 2 δ they would be as far off as leaving it out, on the other side."""
    runs = {h: models(federate(pt.persafl_maml(0.2, 0.3, hessian=h), **STALE)) for h in ("exact", "hf", "fo")}
    assert apart(runs["exact"], runs["hf"]) < 1e-2 * apart(runs["exact"], runs["fo"])
    coarse = models(federate(pt.persafl_maml(0.2, 0.3, hessian="hf", hf_delta=1e-2), **STALE))
    assert apart(runs["exact"], runs["hf"]) < apart(runs["exact"], coarse)


# ---- option C


def me(**changed: Any) -> Algorithm:
    return pt.persafl_me(**{"lr": LR, "lam": LAM, "inner_lr": INNER, "inner_steps": 5, **changed})


def smooth() -> nn.Module:
    """Where the gradient of h̃ goes to zero; at a kink of ReLU it need not."""
    torch.manual_seed(1)
    return nn.Linear(6, 4).double()


def length(theta: dict[str, Tensor], w: dict[str, Tensor], client: int) -> float:
    """‖∇f_i(θ) + λ (θ − w)‖ over all training data of the client."""
    at, near = (np.concatenate([p[k].numpy().ravel() for k in ("weight", "bias")]) for p in (theta, w))
    return float(np.linalg.norm(slope(at, client) + LAM * (at - near)))


@both_executors
def test_the_accuracy_is_reached_in_evaluation(executor: str) -> None:
    """Of all clients, those that never took part as well, near the server's model as it is now."""
    for nu in (0.3, 1e-3, 1e-6):
        settings = {**STALE, "rounds": 2, "executor": executor}
        run = federate(me(inner_steps=None, nu=nu), smooth(), **settings)
        found = [length(run.personalized(i), run.shared, i) for i in range(DATA.clients)]
        assert 0.1 * nu < max(found) <= nu  # and not much more is done


@both_executors
def test_the_accuracy_is_reached_in_training(executor: str) -> None:
    """One step of one client on all of its data: w⁺ = w − η λ (w − θ̃)."""
    begin = {k: v.detach() for k, v in smooth().named_parameters()}
    for nu in (0.3, 1e-3):
        run = pt.federate(
            smooth(),
            DATA.subset([3]),
            me(inner_steps=None, nu=nu),
            rounds=1,
            steps=1,
            executor=executor,
            baselines=False,
            progress=False,
        )
        theta = {k: w - (w - run.shared[k]) / (LR * LAM) for k, w in begin.items()}
        assert 0.1 * nu < length(theta, begin, 3) <= nu * (1 + 1e-6)


def test_inner_steps_bound_the_accuracy() -> None:
    bounded, three = (federate(me(inner_steps=3, nu=nu), **STALE) for nu in (1e-12, None))
    assert apart(models(bounded), models(three)) == 0.0
    stays = federate(me(nu=1e9), **STALE)  # any θ will do, w itself as well
    start = pt.models.mlp(6, 5, 4, seed=1).double().state_dict()
    assert apart(stays.shared, start) == 0.0


UNREACHED = "nu=1e-09 was not reached in 100% of the local steps"


@both_executors
@each("build", [pt.pfedme, pt.persafl_me])
def test_who_misses_the_accuracy_is_counted(build: Any, executor: str) -> None:
    """Of each client's three steps, those that took all inner steps."""
    schedule = pt.schedule.synchronous()

    def share(nu: float | None, inner_steps: int) -> Any:
        method = build(LR, LAM, INNER, inner_steps, nu=nu)
        run = federate(method, smooth(), rounds=2, schedule=schedule, executor=executor, evaluate_every=1)
        return [row.get("unsolved") for row in run.metrics]

    assert share(None, 3) == [None, None]
    with pytest.warns(UserWarning, match=UNREACHED):
        assert share(1e-9, 3) == [1.0, 1.0]
    assert share(1e9, 3) == [0.0, 0.0]
    assert share(1e-3, 100) == [0.0, 0.0]
    some = share(0.65, 2)  # of six clients with three steps each
    assert all(0 < s < 1 for s in some)
    assert some[0] * 18 == pytest.approx(round(some[0] * 18))


def test_stacked_clients_stop_where_single_ones_do() -> None:
    runs = [federate(me(inner_steps=None, nu=0.2), executor=e, **STALE) for e in ("loop", "vmap")]
    assert apart(models(runs[0]), models(runs[1])) < 1e-12


def test_the_server_of_synchronous_me_is_that_of_pfedme() -> None:
    one = federate(me(server_lr=0.7), **SYNCHRONOUS)
    other = federate(pt.pfedme(LR, LAM, INNER, 5, beta=0.7), **SYNCHRONOUS)
    assert apart(one.shared, other.shared) == 0.0
    assert [r["train_loss"] for r in one.metrics] == [r["train_loss"] for r in other.metrics]


def test_clients_keep_nothing() -> None:
    run = federate(me(), **STALE)
    for i in range(DATA.clients):
        assert run.client(i).personal == run.client(i).memory == {}


@both_executors
def test_clients_may_keep_their_norm_layers(executor: str) -> None:
    run = federate(me(), normed(), executor=executor, norm="personal", **STALE)
    kept = run.client(1).personal
    assert {"1.weight", "1.bias", "1.running_mean"} <= set(kept)
    assert {"0.weight", "0.bias", "3.weight", "3.bias"} == set(run.shared)
    assert np.isfinite(run.metrics[-1]["test.personal"])


def test_a_rate_lasts_until_the_end() -> None:
    """A linear rate is zero after the last round, when clients look for their models."""
    run = federate(me(inner_lr=pt.optim.linear(INNER)), **STALE)
    assert min(apart(run.personalized(i), run.shared) for i in range(DATA.clients)) > 1e-4


@each(
    ("given", "start"),
    [
        ({"inner_steps": 0}, "inner_steps=0: expected a whole number from 1"),
        ({"nu": -1.0}, "nu=-1.0: expected a number from 0"),
        (
            {"staleness": "sqr"},
            "staleness='sqr': expected one of 'constant', 'sqrt', 'inverse' (did you mean 'sq",
        ),
    ],
)
def test_refusals(given: dict[str, Any], start: str) -> None:
    with pytest.raises(ValueError) as error:
        me(**given)
    assert str(error.value).startswith(start)


# ---- how far the server goes


@each(
    ("method", "options", "step"),
    [
        (pt.fedasync(0.01), {}, "server_lr from 1 to about 0.17"),
        (pt.fedbuff(0.01, 3.0, 1, "constant"), {}, "server_lr from 3 to about 0.17"),
        (pt.fedavg(0.01, server=pt.optim.sgd(2.0)), {"buffer": 2}, "step of server= from 2 to about 0.33"),
        (pt.pfedme(0.01), {}, "beta from 1 to about 0.17"),
        (pt.fedasync(0.01, 0.5), {}, None),
        (pt.fedasync(0.01), {"staleness": "inverse"}, None),
        (pt.fedasync(0.01), {"concurrency": 2}, None),
        (pt.fedasync(0.01), {"buffer": 6}, None),
        (pt.fedasync(0.01, mixing=True), {}, None),
        (pt.ffgg_async("output", 0.1, pt.exact()), {}, None),
        (pt.ffgg_local("output", 0.1), {}, "step of server= from 1 to about 0.17"),
        (pt.fedplus(pt.psi.avg(0.1), 0.1), {}, "step of server= from 1 to about 0.17"),
        (pt.fedavgm(0.01, 0.1, 0.9), {}, "server_lr from 0.1 to about 0.017"),  # as a step of 1
        (pt.fedavgm(0.01, 0.1, 0.5), {}, None),
        (pt.fedadam(0.01, 1.0), {}, None),
        (pt.fedyogi(0.01, 1.0), {}, None),
        (pt.fedadagrad(0.01, 1.0), {}, None),
        (pt.fedavg(0.01, server=pt.optim.adam(1.0)), {}, None),
    ],
)
def test_too_long_a_step_of_the_server_is_told(
    method: Algorithm, options: dict[str, Any], step: str | None
) -> None:
    """With six clients in flight."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = pt.schedule.asynchronous(**options)
        federate(method, rounds=1, steps=1, schedule=schedule, norm="global", evaluate_every=10)
    told = [str(w.message) for w in caught if "do not know of each other" in str(w.message)]
    assert len(told) == (step is not None)
    assert step is None or step in told[0]


# ---- who runs how


def test_what_methods_want_of_a_schedule() -> None:
    ages = pt.schedule.hinge(2.0, 3.0)
    assert pt.fedasync(0.1, staleness=ages).asynchronous == {"buffer": 1, "staleness": ages}
    assert pt.fedbuff(0.1, buffer=3).asynchronous == {"buffer": 3, "staleness": "sqrt"}
    assert pt.persafl_maml(0.1, 0.1).asynchronous == me().asynchronous == {"buffer": 1, "staleness": None}
    assert pt.ffgg_async("output", 0.1, pt.exact()).asynchronous == {"buffer": 1}
    assert pt.fedavg(0.1).asynchronous is None


TWINS = (
    (pt.fedasync(0.2, 0.7), pt.fedavg(0.2, server=pt.optim.sgd(0.7))),
    (pt.fedasync(0.2, 0.7, mixing=True, rho=0.3), pt.fedprox(0.2, 0.3, server=pt.optim.sgd(0.7))),
    (pt.fedbuff(0.2), pt.fedavg(0.2, weighting="uniform")),
    (pt.persafl_maml(0.2, 0.1), pt.perfedavg(0.2, 0.1)),
    (pt.ffgg_async("output", 0.2, pt.gd(3, 0.2)), pt.ffgg("output", 0.2, pt.gd(3, 0.2))),
)


@each(("method", "twin"), TWINS, ids=[m.name for m, _ in TWINS])
@each("clients", [1, DATA.clients])
def test_who_waits_for_everyone_at_work_is_the_synchronous_twin(
    method: Algorithm, twin: Algorithm, clients: int
) -> None:
    """One client at a time, or all of them and equally fast."""
    together = pt.schedule.asynchronous(concurrency=clients, buffer=clients)
    one = federate(method, rounds=4, schedule=together)
    other = federate(twin, rounds=4, cohort=clients, schedule=pt.schedule.synchronous())
    assert apart(models(one), models(other)) == 0.0


ALONE = [name for name in METHODS if name != "pipeline"]
SYNCHRONOUS_ONLY = {"local": "send nothing", "finetune": "send nothing", "l2gd": "one coin"}


@each("name", ALONE)
def test_methods_run_asynchronously_or_say_why_not(name: str) -> None:
    given = {p.name: declared(p.annotation)[1].example for p in needed(METHODS[name])}
    method = METHODS[name](**given, **({"buffer": 3} if name == "fedbuff" else {}))
    if name in SYNCHRONOUS_ONLY:
        assert SYNCHRONOUS_ONLY[name] in method.synchronous_only
        with pytest.raises(ValueError, match=f"{name}.*{SYNCHRONOUS_ONLY[name]}"):
            federate(method, **STALE)
    else:
        assert not method.synchronous_only
        assert np.isfinite(federate(method, **{**STALE, "rounds": 2}).metrics[-1]["test.personal"])


def test_the_last_models_of_all_need_rounds() -> None:
    for build in (pt.fedavg_plus, pt.fedgeomed_plus, pt.fedcomed_plus):
        assert "stale" in build(0.1, 0.1, over="all").synchronous_only
    with pytest.raises(ValueError, match="fedavg_plus: with over='all'"):
        federate(pt.fedavg_plus(0.1, 0.1, over="all"), **STALE)


@pytest.mark.parametrize("option", [1, 2])
def test_the_control_variate_of_stale_clients_is_the_mean_of_theirs(option: int, tmp_path: Path) -> None:
    """c stays (1/N) Σ c_i: a stale c cancels in c_i⁺ of option II, and staleness scales no Δc_i."""
    stale = pt.schedule.asynchronous(concurrency=4, delays=LATE, staleness="inverse")
    run = federate(pt.scaffold(0.1, option), **{**STALE, "schedule": stale, "out": tmp_path / "run"})
    saved = durable.read(tmp_path / "run" / "checkpoint")
    assert saved is not None
    c = {k: saved.tensors[f"server/extra/{k}"] for k in run.shared}
    own = [run.client(i).memory for i in range(DATA.clients)]
    assert apart(c, {k: sum(m[k] for m in own) / len(own) for k in c}) < 1e-12
    assert max(float(x.abs().max()) for x in c.values()) > 1e-3


@pytest.mark.parametrize("method", [pt.fedasync(0.1), pt.persafl_maml(0.1, 0.1), me()], ids=lambda m: m.name)
def test_baselines_of_an_asynchronous_run(method: Algorithm) -> None:
    run = federate(method, **{**STALE, "baselines": True})
    assert all(np.isfinite(run.summary()["test"][kind]) for kind in ("local", "global", "personal"))
