"""The same demands on every method. A new one joins with a line in CASES and a function in `plain.py`."""

from __future__ import annotations

import functools
import signal
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
import support
from partita.algorithms import METHODS
from partita.algorithms.l2gd import tails
from partita.algorithms.partition import Names
from partita.core import draws
from partita.core.parts import Algorithm
from partita.core.types import Cohort, RoundContext, ServerState, Work
from partita.data import FederatedData
from partita.engine.execute.plan import Plan, draw, start_keys
from partita.engine.store.files import read_jsonl
from partita.schedule import Running, StageSpec
from reference import plain, plain_fedplus, plain_ffgg, plain_full, plain_losses, plain_persafl
from support import Selected, each

# ---- the methods


class Rate(NamedTuple):
    """A learning rate over the rounds: the function of this name in `partita.optim` and in `plain`."""

    kind: str
    args: tuple[Any, ...]


class Psi(NamedTuple):
    """A penalty of Fed+: the function of this name in `partita.psi` and in `plain_fedplus`."""

    kind: str
    args: tuple[Any, ...] = ()


class Solver(NamedTuple):
    """What finds the personal part: the function of this name in `partita` and in `plain_ffgg`."""

    kind: str
    args: tuple[Any, ...] = ()


class Aggregator(NamedTuple):
    """The function of this name in `partita.aggregate` and in `plain_ffgg`."""

    kind: str
    args: tuple[Any, ...] = ()


# where the functions of these names are: in Partita, and plainly
PLACES: dict[type, tuple[Any, Any]] = {
    Rate: (pt.optim, plain),
    Psi: (pt.psi, plain_fedplus),
    Solver: (pt, plain_ffgg),
    Aggregator: (pt.aggregate, plain_ffgg),
}


class Alike(NamedTuple):
    """Two methods that agree in a part ("server", "client") of their models, under some settings."""

    one: Algorithm
    other: Algorithm
    part: str = ""
    settings: dict[str, Any] = {}  # noqa: RUF012
    atol: float | None = None  # None: to the bit


@dataclass(frozen=True)
class Case:
    """A method under test.

    options   what Partita and the plain implementation are both called with
    also      other options under which the two must agree
    equal     pairs of methods that must have the same bits
    alike     pairs that agree in part
    atol      how close the plain implementation comes
    classes   how many a client has where it must learn
    computed  a client's model is computed from its state or data: it is not (u, v_i), nor in a loaded run
    up, down  which tensors a client sends and receives in a round, or others of their sizes
    shared    the tensors that the server has (None: those that clients receive)
    """

    name: str
    options: dict[str, Any]
    also: tuple[dict[str, Any], ...] = ()
    equal: tuple[tuple[Algorithm, Algorithm], ...] = ()
    alike: tuple[Alike, ...] = ()
    atol: float = 1e-9
    classes: int = 3
    computed: bool = False
    up: tuple[str, ...] = plain.ALL
    down: tuple[str, ...] = plain.ALL
    shared: tuple[str, ...] | None = None


LR, OUT, IN = 0.3, plain.PARTS["output"], plain.PARTS["input"]
AVG, ADAPTIVE = pt.fedavg(LR), {"lr": LR, "server_lr": 0.03}
STAGES = (
    ("fedavg", {"lr": LR}, {"rounds": 2}),
    (
        "fedalt",
        {"personal": "output", "lr": LR, "personal_lr": 0.2, "personal_l2": 0.5},
        {"rounds": 2, "cohort": 4},
    ),
    ("finetune", {"personal": "all", "lr": 0.1, "personal_l2": 0.5}, {"epochs": 2}),
)
MIXED = (
    ("fedalt", {"personal": "output", "lr": LR}, {"rounds": 2, "steps": 3, "batch": 5}),
    ("fedsim", {"personal": "*.bias", "lr": Rate("linear", (LR, 0.5))}, {"rounds": 2, "state": "reset"}),
    ("fedadam", ADAPTIVE, {"rounds": 1, "cohort": 2}),
    ("fedadam", ADAPTIVE, {"rounds": 2}),
    ("local", {"lr": LR}, {"rounds": 1, "cohort": 3}),
)

SOLVED = {"personal": "output", "lr": 1.0, "solver": Solver("gd", (8, 0.3))}
HYBRID = Psi("layerwise", ({"hidden*": Psi("avg", (0.2,)), "*": Psi("comed", (0.05,))},))

HESSIANS = ("exact", "hf", "fo")
UNIFORM, BY_SAMPLES = {"weighting": "uniform"}, {"weighting": "samples"}
ROUNDS, COHORT, SEED = 3, 5, 3


def alone_by_coins(lr: float, p: float) -> Algorithm:
    """`local` with as many steps in each round as the coins of l2gd say, for 7 clients."""
    steps = [tails(RoundContext(SEED, t, 0, 0, 0, Work(steps=1)), p) for t in range(ROUNDS)]
    return pt.pipeline(*(pt.stage(pt.local(lr / (7 * (1 - p))), rounds=1, steps=(k,) * 7) for k in steps))


_CASES = (
    Case(
        "local",
        {"lr": LR},
        up=(),
        down=(),
        equal=((pt.local(LR), pt.fedsim("all", LR)), (pt.local(LR), pt.fedalt("all", LR))),
    ),
    Case(
        "fedavg",
        {"lr": LR},
        equal=(
            (pt.fedavg(LR, server=pt.optim.sgd(lr=1.0)), AVG),
            (pt.fedavg(LR, max_grad_norm=1e9), AVG),
            (pt.fedavg(pt.optim.stepped(LR, [])), AVG),
        ),
    ),
    Case("fedprox", {"lr": LR, "mu": 0.5}, equal=((pt.fedprox(LR, mu=0.0), AVG),)),
    Case(
        "fedavgm",
        {"lr": LR, "server_lr": 0.7, "server_momentum": 0.6},
        also=({"server_lr": 1.0},),
        equal=((pt.fedavgm(LR, server_momentum=0.0), AVG),),
    ),
    Case(
        "fedadam",
        ADAPTIVE,
        also=(
            {"beta1": 0.5, "beta2": 0.9, "tau": 0.1},
            {"eps": 1e-8},
            {"beta1": 0.5, "beta2": 0.9, "eps": 0.1},
        ),
        equal=((pt.fedadam(**ADAPTIVE), pt.fedavg(LR, server=pt.optim.adam(0.03))),),
    ),
    Case(
        "fedyogi",
        ADAPTIVE,
        also=({"beta1": 0.5, "beta2": 0.9, "tau": 0.1},),
        equal=((pt.fedyogi(**ADAPTIVE), pt.fedavg(LR, server=pt.optim.yogi(0.03))),),
    ),
    Case(
        "fedadagrad",
        ADAPTIVE,
        also=({"beta1": 0.5, "tau": 0.1},),
        equal=((pt.fedadagrad(**ADAPTIVE), pt.fedavg(LR, server=pt.optim.adagrad(0.03))),),
    ),
    Case(
        "fedsim",
        {"personal": "input", "lr": LR, "personal_lr": 0.2},
        up=OUT,
        down=OUT,
        also=(
            {"personal": "output"},
            {"personal_lr": None},
            {"personal": "*.bias", "personal_l2": 0.5},
            {"personal_l2": 0.5},
        ),
        equal=(
            (pt.fedsim("none", LR, personal_l2=0.5), AVG),
            (pt.fedsim("all", LR, personal_l2=0.5), pt.finetune("all", LR, personal_l2=0.5)),
        ),
    ),
    Case(
        "fedalt",
        {"personal": "output", "lr": LR, "personal_lr": 0.2},
        up=IN,
        down=IN,
        also=(
            {"personal": "input"},
            {"personal_lr": None},
            {"personal_steps": 4, "shared_steps": 2},
            {"personal_l2": 0.5},
        ),
        equal=(
            (pt.fedalt("none", LR, personal_l2=0.5), AVG),
            (pt.fedalt("all", LR, personal_l2=0.5), pt.finetune("all", LR, personal_l2=0.5)),
        ),
    ),
    Case(
        "finetune",
        {"personal": "output", "lr": LR, "personal_l2": 0.02},
        up=(),
        also=({"personal_l2": 0.0}, {"personal_l2": 0.5}, {"personal": "all"}),
        equal=((pt.finetune("all", LR), pt.local(LR)),),
    ),
    Case(
        "fedplus",
        {"psi": HYBRID, "lr": LR, "sigma": 0.3, "lam": 0.25},
        also=(
            {"psi": Psi("geomed", (0.3,)), "over": "all", "lam": 0.0},
            {"psi": HYBRID, "over": "all", "weighting": "samples"},
            {"psi": Psi("free"), "lam": 0.0},
            {"psi": Psi("fixed"), "lam": 1.0, "weighting": "samples"},
            {"psi": Psi("comed", (0.02,)), "sigma": 0.0, "lam": 0.5},
        ),
    ),
    Case(
        "fedavg_plus",
        {"lr": LR, "sigma": 0.3},
        also=({"delta": 2.0, "lam": 0.5}, {"over": "all"}),
        equal=((pt.fedavg_plus(LR, 0.3, 0.2), pt.fedplus(pt.psi.avg(0.2), LR, 0.3)),),
    ),
    Case(
        "fedgeomed_plus",
        {"lr": LR, "sigma": 0.3},
        also=({"delta": 0.5, "lam": 0.5}, {"over": "all"}),
        equal=((pt.fedgeomed_plus(LR, 0.3, 0.2), pt.fedplus(pt.psi.geomed(0.2), LR, 0.3)),),
    ),
    Case(
        "fedcomed_plus",
        {"lr": LR, "sigma": 0.3},
        also=({"delta": 0.02, "lam": 0.5}, {"over": "all"}),
        equal=((pt.fedcomed_plus(LR, 0.3, 0.2), pt.fedplus(pt.psi.comed(0.2), LR, 0.3)),),
    ),
    Case(
        "ffgg",
        SOLVED,
        up=IN,
        down=IN,
        computed=True,
        also=(
            {"personal": "input", "start": "model"},
            {"solver": Solver("gd", (None, Rate("linear", (0.3, 0.25))))},
            {"solver": Solver("adam", (5, 0.1))},
            {"solver": Solver("adam", (None, 0.1, 0.5, 0.9, 1e-3)), "weighting": "samples"},
            {"solver": Solver("cg", (3,)), "start": "model"},
            {"solver": Solver("exact"), "start": "model"},
            {"evaluate": Solver("gd", (3, 0.2)), "gradient": "batch"},
        ),
        equal=(
            (
                pt.ffgg("output", LR, pt.gd(4, 0.2)),
                pt.ffgg_robust("output", LR, pt.gd(4, 0.2), aggregate=pt.aggregate.mean()),
            ),
        ),
    ),
    Case(
        "ffgg_local",
        {"personal": "output", "lr": LR, "personal_lr": 0.2},
        up=IN,
        down=IN,
        computed=True,
        also=(
            {"personal": "input", "personal_lr": None},
            {"solver": Solver("gd", (3, 0.4)), "weighting": "samples"},
            {"solver": Solver("adam", (3, 0.1)), "start": "model"},
            {"lr": Rate("linear", (LR, 0.5)), "personal_lr": None, "evaluate": Solver("gd", (3, 0.2))},
        ),
    ),
    Case(
        "ffgg_robust",
        {**SOLVED, "aggregate": Aggregator("coordinate_median")},
        up=IN,
        down=IN,
        computed=True,
        also=({"aggregate": None}, {"aggregate": Aggregator("mean"), "gradient": "batch"}),
    ),
    Case(
        "ditto",
        {"lr": LR, "lam": 0.2, "personal_lr": 0.2},
        also=({"personal_lr": None}, {"lam": 0.0}, {"weighting": "uniform"}),
        alike=(
            Alike(pt.ditto(LR, 0.7), AVG, "server"),
            Alike(pt.ditto(LR, 0.0), pt.local(LR), "client", {"epochs": 3}),  # full batch: no draws
        ),
    ),
    Case(
        "pfedme",
        {"lr": 0.1, "lam": 5.0, "inner_lr": 0.05, "inner_steps": 3},
        also=({"beta": 1.5}, {"inner_steps": 1, "weighting": "samples"}, {"inner_steps": 9, "nu": 0.5}),
        alike=(
            Alike(pt.pfedme(0.1, 5.0, 0.4, 1), pt.fedavg(0.1 * 5.0 * 0.4, **UNIFORM), "server", {}, 1e-6),
        ),
    ),
    Case(
        "perfedavg",
        {"lr": LR, "alpha": 0.1},
        also=({"hessian": "hf"}, {"hessian": "hf", "hf_delta": 0.1}, {"hessian": "fo"}, BY_SAMPLES),
        equal=tuple((pt.perfedavg(LR, 0.0, h), pt.fedavg(LR, **UNIFORM)) for h in HESSIANS),
        computed=True,
    ),
    Case(
        "apfl",
        {"lr": LR},
        also=({"alpha": 0.1}, {"alpha": 0.9, "learn_alpha": False}, {"weighting": "samples"}),
        equal=((pt.apfl(LR, 0.0, False), pt.fedavg(LR, **UNIFORM)),),
        alike=(
            Alike(pt.apfl(LR, 1.0, False), pt.local(LR), "client"),
            Alike(pt.apfl(LR, 0.3), pt.fedavg(LR, **UNIFORM), "server"),
        ),
        computed=True,
    ),
    Case(
        "l2gd",
        {"lr": 2.0, "lam": 0.4, "p": 0.2},
        also=({"p": 0.7}, {"lam": 0.0}, {"weighting": "samples"}),
        alike=(Alike(pt.l2gd(1.5, 0.0, 0.3), alone_by_coins(1.5, 0.3), "client"),),
    ),
    Case(
        "scaffold",
        {"lr": LR},
        up=plain.ALL * 2,
        down=plain.ALL * 2,
        also=({"option": 1}, {"server_lr": 0.5}, {"weighting": "samples"}),
        alike=tuple(
            Alike(
                pt.scaffold(LR, option, 0.7),
                pt.fedavg(LR, server=pt.optim.sgd(0.7), **UNIFORM),
                settings={"rounds": 1},
            )
            for option in (1, 2)
        ),
    ),
    Case(
        "moon",
        {"lr": LR, "mu": 1.5},
        also=({"tau": 0.2}, {"mu": 0.5, "tau": 1.0, "weighting": "uniform"}),
        equal=((pt.moon(LR, mu=0.0), AVG),),
        alike=(Alike(pt.moon(LR, mu=3.0), AVG, settings={"rounds": 1}, atol=1e-6),),
    ),
    Case(
        "fedproto",
        {"lr": LR, "lam": 0.8},
        up=OUT,
        down=OUT,
        shared=(),
        also=({"predict": "classifier"}, {"lam": 3.0, "weighting": "uniform"}, {"lam": 0.0}),
        alike=(Alike(pt.fedproto(LR, 0.0, "classifier"), pt.local(LR), "client"),),
        computed=True,
    ),
    Case(
        "fedrod",
        {"lr": LR, "personal_lr": 0.2},
        also=({"personal_lr": None}, {"weighting": "uniform"}),
        computed=True,
    ),
    Case(
        "rfa",
        {"lr": LR},
        also=({"weighting": "uniform"},),
        equal=((pt.rfa(LR), pt.fedavg(LR, aggregate=pt.aggregate.geometric_median())),),
        atol=1e-5,  # both stop before the end of the iteration
    ),
    Case(
        "coordinate_median_fedavg",
        {"lr": LR},
        classes=6,  # a median overlooks what less than half of the clients know
        also=({"weighting": "samples"},),
        equal=(
            (
                pt.coordinate_median_fedavg(LR),
                pt.fedavg(LR, aggregate=pt.aggregate.coordinate_median(), **UNIFORM),
            ),
        ),
    ),
    Case(
        "fedasync",
        {"lr": LR, "server_lr": 0.8},
        also=({"server_lr": 1.2, "staleness": "inverse"}, UNIFORM, {"mixing": True, "rho": 0.3}),
        equal=(
            (pt.fedasync(LR), AVG),
            (pt.fedasync(LR, mixing=True, rho=0.2), pt.fedprox(LR, 0.2)),
            (pt.fedasync(LR, 0.7), pt.fedavg(LR, server=pt.optim.sgd(0.7))),
        ),
    ),
    Case(
        "fedbuff",
        {"lr": LR, "buffer": 3},
        also=({"server_lr": 0.7, "staleness": None}, BY_SAMPLES),
        equal=(
            (pt.fedbuff(LR), pt.fedavg(LR, **UNIFORM)),
            (pt.fedbuff(LR, 0.7, 1, None, **BY_SAMPLES), pt.fedasync(LR, 0.7)),
        ),
    ),
    Case(
        "persafl_maml",
        {"lr": LR, "alpha": 0.1, "server_lr": 0.8},
        also=({"hessian": "hf", "hf_delta": 0.1}, {"hessian": "fo", "server_lr": 1.2}, BY_SAMPLES),
        equal=(
            *((pt.persafl_maml(LR, 0.0, 0.7, h), pt.fedasync(LR, 0.7, **UNIFORM)) for h in HESSIANS),
            *(
                (
                    pt.persafl_maml(LR, 0.1, 0.7, h),
                    pt.perfedavg(LR, 0.1, h, server=pt.optim.sgd(0.7)),
                )
                for h in HESSIANS
            ),
        ),
        computed=True,
    ),
    Case(
        "persafl_me",
        {"lr": 0.1, "lam": 5.0, "inner_lr": 0.05, "inner_steps": 3},
        also=(
            {"server_lr": 1.2, "inner_steps": 1, "weighting": "samples"},
            {"inner_steps": None, "nu": 0.3},
            {"inner_steps": 3, "nu": 0.8},
            {"inner_lr": Rate("linear", (0.05, 0.5))},
        ),
        alike=(
            Alike(
                pt.persafl_me(0.1, 5.0, 0.05, 4, server_lr=0.7), pt.pfedme(0.1, 5.0, 0.05, 4, 0.7), "server"
            ),
            Alike(
                pt.persafl_me(0.1, 5.0, 0.4, 1),
                pt.fedasync(0.1 * 5.0 * 0.4, **UNIFORM),
                "server",
                atol=1e-6,
            ),
        ),
        computed=True,
    ),
    Case(
        "ffgg_async",
        SOLVED,
        up=IN,
        down=IN,
        computed=True,
        also=({"personal": "input", "start": "model"}, {"solver": Solver("cg", (3,)), "start": "model"}),
        equal=((pt.ffgg_async("output", LR, pt.gd(4, 0.2)), pt.ffgg("output", LR, pt.gd(4, 0.2))),),
    ),
    Case(
        "pipeline",
        {"stages": STAGES},
        also=({"stages": MIXED},),
        equal=(
            (pt.pipeline(pt.fedprox(LR, mu=0.5)), pt.fedprox(LR, mu=0.5)),
            (pt.pipeline(pt.stage(AVG, rounds=1), pt.stage(AVG, rounds=2)), AVG),
        ),
    ),
)
CASES = {case.name: case for case in _CASES}

RELATED = (
    *("fedavgm", "fedyogi", "fedadagrad", "rfa", "coordinate_median_fedavg"),
    *("fedavg_plus", "fedgeomed_plus", "fedcomed_plus", "ffgg_robust", "ffgg_async"),
)
"""Methods that are another one but for one part (an aggregator, a server's step, a penalty): what they
compute is compared every time, and what such a part has no say in by `make test-all`."""


def rarer(case: Case) -> bool:
    return case.name in RELATED


every_method = each("case", CASES.values(), ids=CASES)
most_methods = each("case", CASES.values(), ids=CASES, slow=rarer)
both_executors = each("executor", ["loop", "vmap"])
vmap_at_least = each("executor", ["loop", "vmap"], slow=lambda executor: executor == "loop")


PLAIN: dict[str, Any] = {
    k: v
    for module in (plain, plain_fedplus, plain_ffgg, plain_full, plain_losses, plain_persafl)
    for k, v in vars(module).items()
}


def make(name: str, options: Mapping[str, Any], **more: Any) -> Algorithm:
    """The method of Partita; `more` options go to every stage of a pipeline."""
    if name == "pipeline":
        return pt.pipeline(*(pt.stage(make(n, o, **more), **work) for n, o, work in options["stages"]))
    given = {**options, **more}
    return METHODS[name](**{k: made(v, 0) for k, v in given.items()})


def made(value: Any, side: int) -> Any:
    """What a spec stands for in Partita (0) or in the plain implementation (1); any other value is itself."""
    if isinstance(value, dict):
        return {k: made(v, side) for k, v in value.items()}
    if type(value) not in PLACES:
        return value
    return getattr(PLACES[type(value)][side], value.kind)(*(made(a, side) for a in value.args))


def test_every_method_has_a_case() -> None:
    assert set(METHODS) == set(CASES), "a method joins by a line in CASES"
    assert all(getattr(pt, name) is build for name, build in METHODS.items())


# ---- what they run on


def ragged(dtype: type) -> FederatedData:
    """Seven clients with 0 to 7 training samples of 4 classes; the same class looks different to each."""
    train, test = (5, 4, 1, 0, 7, 6, 3), (4, 3, 2, 1, 0, 5, 4)
    rng = np.random.default_rng(0)
    sizes = np.array([n for pair in zip(train, test) for n in pair])
    start = np.cumsum(sizes) - sizes
    ranges = np.stack([start, sizes], axis=1)
    y = rng.integers(0, 4, sizes.sum())
    client = np.repeat(np.repeat(np.arange(7), 2), sizes)
    x = (
        rng.normal(size=(4, 6))[y]
        + 0.7 * rng.normal(size=(7, 6))[client]
        + 0.5 * rng.normal(size=(len(y), 6))
    )
    return FederatedData.make(x.astype(dtype), y, ranges[::2], ranges[1::2])


SINGLE, DOUBLE = ragged(np.float32), ragged(np.float64)
STEPS = (4, 2, 3, 2, 1, 1, 5)
WORK: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 2, "batch": 4},
    "full batch": {"epochs": 3},
    "own steps": {"steps": STEPS, "batch": 4},
}


def federate(algorithm: Algorithm, data: FederatedData = SINGLE, **settings: Any) -> pt.Run:
    """A short run of a small model in the data's precision."""
    model = pt.models.mlp(6, 5, 4, seed=1).to(data.x.dtype)
    work = {} if {"steps", "epochs"} & set(settings) else WORK["epochs"]
    defaults = {"rounds": ROUNDS, "cohort": COHORT, "seed": SEED, "executor": "vmap", "evaluate_every": 1}
    defaults |= {"schedule": pt.schedule.synchronous()}  # asynchronous runs are compared elsewhere
    return pt.federate(
        model, data, algorithm, **{**defaults, **work, "baselines": False, "progress": False, **settings}
    )


@functools.cache
def default_run(name: str, executor: str = "vmap", data: FederatedData = DOUBLE) -> pt.Run:
    """The run of a case as it stands, which several tests compare with."""
    return federate(make(name, CASES[name].options), data, executor=executor)


def tensors(run: pt.Run) -> dict[str, Tensor]:
    """All tensors of a finished run: the server's and every client's, and the models they stand for."""
    return support.tensors(run) | models(run)


def models(run: pt.Run) -> dict[str, Tensor]:
    """The server's and every client's model."""
    found = {f"server {k}": v for k, v in run.model(personal="initial").state_dict().items()}
    for i in range(len(run.clients)):
        found |= {f"client {i} {k}": v for k, v in run.personalized(i).items()}
    return found


ROUNDED = ("train_loss", "test.loss", "validation.loss", "aggregation")  # other sums, other roundings


def rows(run: pt.Run, *without: str) -> list[dict[str, Any]]:
    """Metrics, but for the time they took."""
    return [{k: v for k, v in row.items() if k not in ("seconds", *without)} for row in run.metrics]


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


# ---- (a) learns


@every_method
def test_learns(case: Case) -> None:
    data = pt.data.digits(8, pt.data.label_skew(classes=case.classes), validation=0, seed=0)
    run = federate_digits(make(case.name, case.options), data)
    first, last = run.metrics[0]["train_loss"], run.metrics[-1]["train_loss"]
    assert last < 0.7 * first
    majority = np.mean(
        [np.bincount(data.client(i, "test")[1]).max() / data.sizes("test")[i] for i in range(8)]
    )
    assert run.metrics[-1]["test.personal"] > majority + 0.1  # better than each client's most frequent label


def federate_digits(algorithm: Algorithm, data: FederatedData, **settings: Any) -> pt.Run:
    fixed = {"rounds": 6, "steps": 12, "batch": 16, "executor": "vmap", "evaluate_every": 1}
    fixed |= {"schedule": pt.schedule.synchronous()}
    model = pt.models.mlp(64, 16, 10)
    return pt.federate(model, data, algorithm, **{**fixed, "baselines": False, "progress": False, **settings})


# ---- (b) clients one after another, or stacked


CLIENT_OPTIONS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "full batch": {"momentum": 0.9, "weight_decay": 0.05},
    "own steps": {"momentum": 0.5, "max_grad_norm": 0.5},
}


def same(case: Case, work: str, *executors: str) -> None:
    """Results of these executors against the loop's."""
    algorithm = make(case.name, case.options, **CLIENT_OPTIONS[work])
    loop, *others = (federate(algorithm, executor=e, **WORK[work]) for e in ("loop", *executors))
    for other in others:
        assert_close(tensors(loop), tensors(other), atol=1e-5)
        assert rows(loop, *ROUNDED) == rows(other, *ROUNDED)
        assert [r["train_loss"] for r in loop.metrics] == pytest.approx(
            [r["train_loss"] for r in other.metrics], abs=1e-5
        )


@most_methods
@pytest.mark.parametrize(
    "work", [pytest.param(w, marks=[pytest.mark.slow] * (w != "own steps")) for w in WORK]
)
def test_loop_equals_vmap_and_graph(case: Case, work: str) -> None:
    recorded = _recorded(case, work) and (Selected.slow or case.name in RECORDED)
    same(case, work, *("vmap", "graph") if recorded else ("vmap",))


RECORDED = ("fedalt", "ditto", "scaffold", "ffgg")  # every time
OPTIMIZED = ("fedavg", "fedalt", "ditto", "scaffold", "pfedme")
WITHOUT_KEPT_OPTIMIZER = ("ffgg", "ffgg_async", "ffgg_local", "ffgg_robust", "pfedme", "persafl_me")
BY_STEP = pt.optim.by_step(pt.optim.cosine(0.2, warmup=0.3))


def keeping(name: str) -> dict[str, Any]:
    """The option by which clients keep the state of their optimizers, where the method has it."""
    return {} if name in WITHOUT_KEPT_OPTIMIZER else {"optimizer_state": "keep"}


@each("name", OPTIMIZED)
def test_loop_equals_vmap_with_another_optimizer(name: str) -> None:
    same_with_adamw(CASES[name])


@every_method
@pytest.mark.slow
def test_loop_equals_vmap_with_another_optimizer_for_the_rest(case: Case) -> None:
    if case.name not in OPTIMIZED:
        same_with_adamw(case)


def same_with_adamw(case: Case) -> None:
    """Compare a rate by step, two batches for a step and a state that is kept, all of them together.

    It takes double precision: Adam steps as far for a gradient that is zero but for rounding.
    """
    options = {"optimizer": pt.optim.adamw(eps=1e-4), "max_grad_norm": 1.0, "lr": BY_STEP, "accumulate": 2}
    method = make(case.name, case.options, **options, **keeping(case.name))
    rarely = ("ditto", "scaffold", "ffgg_local") if Selected.slow else ()
    recorded = ("graph",) if case.name in ("fedalt", *rarely) else ()
    loop, *others = (federate(method, DOUBLE, executor=e) for e in ("loop", "vmap", *recorded))
    for other in others:
        assert_close(tensors(loop), tensors(other), atol=1e-7)
    by_sgd = models(default_run(case.name))
    assert any(not torch.equal(v, by_sgd[k]) for k, v in models(loop).items())


SERVERS_ALONE = ("fedavgm", "fedadam", "fedyogi", "fedadagrad", "rfa", "coordinate_median_fedavg")
"""Methods whose clients are fedavg's."""


@each("name", [name for name in CASES if name not in SERVERS_ALONE], slow=lambda name: name in RELATED)
def test_accumulated_batches_are_one_large_batch(name: str) -> None:
    method = make(name, CASES[name].options, accumulate=2)
    assert_close(tensors(federate(method, DOUBLE, epochs=2, batch=2)), tensors(default_run(name)), atol=1e-9)


def _recorded(case: Case, work: str) -> bool:
    """To record takes longest, most of all steps with steps inside; the others are for `make test-all`."""
    usual = work == "own steps" and case.name in ("fedavg", "fedalt", "ditto", "apfl", "l2gd", "fedplus")
    return usual or case.name in ("ffgg", "scaffold")


@every_method
@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
def test_loop_equals_graph_for_the_rest(case: Case, work: str) -> None:
    if not _recorded(case, work):  # those are compared by test_loop_equals_vmap_and_graph
        same(case, work, "graph")


# ---- (c) stopped and resumed


class Stop(pt.callbacks.Callback):
    """Stops the named run after a round, by an error or as Ctrl-C does; notes where runs begin."""

    def __init__(self, what: str = "", how: str = "", after: int = -1) -> None:
        self.what, self.how, self.after = what, how, after
        self.began: dict[str, int] = {}

    def start(self, what: str, round: int, rounds: int) -> None:  # noqa: ARG002
        self.began[what] = round

    def round(self, event: pt.callbacks.Event) -> None:
        if (event.what, event.round) == (self.what, self.after):
            if self.how == "ctrl-c":
                signal.raise_signal(signal.SIGINT)
            else:
                raise RuntimeError("stopped")


def stop_and_resume(
    algorithm: Algorithm, folder: Path, stop: Stop, **settings: Any
) -> tuple[pt.Run, dict[str, int]]:
    """The run after an interruption, and the rounds from which its parts went on."""
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        federate(algorithm, out=folder, callbacks=[stop], **settings)
    watch = Stop()
    run = federate(algorithm, out=folder, resume=True, callbacks=[watch], **settings)
    return run, watch.began


@functools.cache
def straight_run(name: str) -> tuple[Algorithm, dict[str, Any], pt.Run]:
    """A run without interruption: its method, its settings, what it gave."""
    options = {"momentum": 0.9, "max_grad_norm": 0.2, "lr": BY_STEP, **keeping(name)}
    algorithm = make(name, CASES[name].options, **options)
    settings = {"rounds": 5, "checkpoint_every": 2, "evaluate_every": 2, "steps": 2, "batch": 4}
    return algorithm, settings, federate(algorithm, **settings)


@most_methods
@pytest.mark.parametrize(("how", "begins"), [pytest.param("error", 2, marks=pytest.mark.slow), ("ctrl-c", 3)])
def test_resumed_equals_straight(case: Case, tmp_path: Path, how: str, begins: int) -> None:
    algorithm, settings, straight = straight_run(case.name)
    resumed, began = stop_and_resume(algorithm, tmp_path / "run", Stop(case.name, how, after=3), **settings)
    assert began == {case.name: begins}
    assert_same_bits(tensors(resumed), tensors(straight))
    assert rows(resumed) == rows(straight)
    assert resumed.clients == straight.clients
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == resumed.metrics


@pytest.mark.parametrize("name", ["fedalt", "pipeline"])
def test_resumed_equals_straight_with_states_on_disk(name: str, tmp_path: Path) -> None:
    algorithm, settings, straight = straight_run(name)
    stop = Stop(name, "error", after=3)
    resumed, _ = stop_and_resume(algorithm, tmp_path / "run", stop, store="disk", **settings)
    assert_same_bits(tensors(resumed), tensors(straight))
    assert rows(resumed) == rows(straight)


@pytest.mark.parametrize("what", ["baseline global", "baseline local", "fedalt"])
def test_resumed_equals_straight_with_baselines(what: str, tmp_path: Path) -> None:
    algorithm = make("fedalt", CASES["fedalt"].options)
    settings = {"checkpoint_every": 2, "baselines": True}
    straight = federate(algorithm, **settings)
    resumed, began = stop_and_resume(algorithm, tmp_path / "run", Stop(what, "error", 3), **settings)
    assert began[what] == 2
    assert rows(resumed) == rows(straight)
    assert resumed.clients == straight.clients


@most_methods
def test_a_run_is_loaded_as_it_ended(case: Case, tmp_path: Path) -> None:
    store = "disk" if case.name in ("fedalt", "pipeline") else "memory"
    run = federate(make(case.name, case.options), out=tmp_path / "run", store=store)
    read = pt.load(tmp_path / "run", model=pt.models.mlp(6, 5, 4))
    if case.computed:
        with pytest.raises(ValueError, match=rf"^client=1: {case.name} .*resume=True"):
            read.client(1).model()
        assert_same_bits(read.shared, run.shared)
        for mine, theirs in ((read.client(i), run.client(i)) for i in range(len(run.clients))):
            if case.name in KEEP_NOTHING:
                with pytest.raises(ValueError, match="resume=True"):
                    mine.personal  # noqa: B018
                assert "output.linear.weight" in repr(mine)
                continue
            assert_same_bits({**mine.personal, **mine.memory}, {**theirs.personal, **theirs.memory})
        again = federate(make(case.name, case.options), out=tmp_path / "run", store=store, resume=True)
        assert_same_bits(tensors(again), tensors(run))
    else:
        assert_same_bits(tensors(read), tensors(run))
    assert (read.metrics, read.clients, read.summary()) == (run.metrics, run.clients, run.summary())


KEEP_NOTHING = ("ffgg", "ffgg_async", "ffgg_local", "ffgg_robust")
WITHOUT_WHOLE = {
    "local": IN,
    "fedproto": IN,
    "fedsim": IN,
    **dict.fromkeys(("fedalt", "pipeline", *KEEP_NOTHING), OUT),
}
"""Whose server has trained no whole model, and what it lacks; the pipeline tunes fedalt's parts last."""


@every_method
def test_the_server_hands_out_what_it_has_trained(case: Case, tmp_path: Path) -> None:
    """Its model where that is whole; else it is refused, as long as nobody says what to put in its place."""
    run = default_run(case.name)
    run.save(tmp_path / "run")
    for one in (run, pt.load(tmp_path / "run", model=pt.models.mlp(6, 5, 4).double())):
        if case.name in WITHOUT_WHOLE:
            with pytest.raises(
                ValueError, match=r"^personal=None: expected .*run\.client\(i\)\.model"
            ) as told:
                one.model()
            assert ("'mean'" in str(told.value)) == (case.name not in KEEP_NOTHING)
            assert ", ".join(WITHOUT_WHOLE[case.name]) in str(told.value)
        else:
            assert_same_bits(dict(one.model().state_dict()), run.shared)
        assert_same_bits(dict(one.model(personal="initial").state_dict()), {**run.base, **run.shared})
        if case.name in KEEP_NOTHING:
            with pytest.raises(
                ValueError, match=r"^personal='mean': expected 'initial'.*keep no personal part"
            ):
                one.model(personal="mean")
            continue
        own = [c for c in map(one.client, range(len(run.clients))) if c.trained and run.holdings.own]
        sizes = [run.clients[c.number]["n_train"] for c in own]
        for name, value in one.model(personal="mean").state_dict().items():
            there = [n * c.personal[name] for n, c in zip(sizes, own) if name in c.personal]
            expected = sum(there) / sum(sizes) if there else run.shared[name]
            torch.testing.assert_close(value, expected)
    with pytest.raises(ValueError, match=r"^personal='server': expected one of 'mean', 'initial'"):
        run.model(personal="server")


@every_method
def test_a_clients_part_is_that_of_its_model(case: Case) -> None:
    """As it is kept, or, where nothing is, as it is computed."""
    run = default_run(case.name)
    for i in range(len(run.clients)):
        mine, model = run.client(i), run.personalized(i)
        assert set(mine.personal) == set(run.holdings.own)
        if case.name in KEEP_NOTHING or not case.computed:
            assert_same_bits(mine.personal, {k: model[k] for k in mine.personal})


def test_a_client_without_a_turn_says_so() -> None:
    run = federate(pt.fedalt("output", lr=0.1), rounds=1, cohort=1)
    late = next(c for c in map(run.client, range(len(run.clients))) if not c.trained)
    assert "never had a turn" in repr(late)
    for ask in (lambda: late.personal, late.model):
        with pytest.warns(UserWarning, match=f"client '{late.name}' never had a turn"):
            ask()
    early = next(c for c in map(run.client, range(len(run.clients))) if c.trained)
    assert "turn" not in repr(early)


# ---- (d) degenerate settings

PAIRS = [(f"{c.name} {n}", pair) for c in CASES.values() for n, pair in enumerate(c.equal)]


@vmap_at_least
@each("pair", [p for _, p in PAIRS], ids=[name for name, _ in PAIRS])
def test_degenerate_settings_equal_their_parent(pair: tuple[Algorithm, Algorithm], executor: str) -> None:
    special = federate(pair[0], executor=executor)
    is_average = pair[1] is AVG
    parent = default_run("fedavg", executor, SINGLE) if is_average else federate(pair[1], executor=executor)
    assert_same_bits(models(special), models(parent))
    assert [r["test.personal"] for r in special.metrics] == [r["test.personal"] for r in parent.metrics]


ALIKE = [(f"{c.name} {n}", pair) for c in CASES.values() for n, pair in enumerate(c.alike)]


@vmap_at_least
@each("pair", [p for _, p in ALIKE], ids=[name for name, _ in ALIKE])
def test_degenerate_settings_equal_a_part_of_their_parent(pair: Alike, executor: str) -> None:
    runs = [federate(method, executor=executor, **pair.settings) for method in pair[:2]]
    one, other = ({k: v for k, v in models(run).items() if k.startswith(pair.part)} for run in runs)
    assert one
    if pair.atol is not None:
        assert_close(one, other, pair.atol)
        return
    assert_same_bits(one, other)
    score = "test.global" if pair.part == "server" else "test.personal"
    assert [r[score] for r in runs[0].metrics] == [r[score] for r in runs[1].metrics]


@pytest.mark.parametrize("norm", ["global", "personal"])
def test_norm_changes_nothing_without_norm_layers(norm: str) -> None:
    assert_same_bits(tensors(federate(AVG, norm=norm)), tensors(default_run("fedavg", data=SINGLE)))


# ---- (e) the plain implementation

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "momentum, decay, reset": ({"momentum": 0.9, "weight_decay": 0.05}, {"state": "reset"}),
    "clipped, uniform": (
        {"max_grad_norm": 0.2, "weight_decay": 0.05, "momentum": 0.5, "weighting": "uniform"},
        {},
    ),
    "linear, full batch": ({"lr": Rate("linear", (0.3, 0.25))}, WORK["full batch"]),
    "halving, everyone": ({"lr": Rate("halving", (0.3, 2))}, {"cohort": None}),
    "stepped, own steps": ({"lr": Rate("stepped", (0.3, (1, 2), 0.3))}, WORK["own steps"]),
}
RARER = {"linear, full batch", "halving, everyone"}


@every_method
@vmap_at_least
def test_agrees_with_the_plain_implementation(case: Case, executor: str) -> None:
    agree(default_run(case.name, executor), case.name, case.options, {}, {})


@every_method
@pytest.mark.parametrize(
    ("more", "settings"),
    [pytest.param(*v, id=k, marks=[pytest.mark.slow] * (k in RARER)) for k, v in VARIANTS.items()],
)
def test_agrees_with_the_plain_implementation_under(
    case: Case, more: dict[str, Any], settings: dict[str, Any]
) -> None:
    run = federate(make(case.name, case.options, **more), DOUBLE, **settings)
    agree(run, case.name, case.options, more, settings)


ALSO = [(c.name, options) for c in CASES.values() for options in c.also]


@each(("name", "more"), ALSO, ids=[f"{name} {n}" for n, (name, _) in enumerate(ALSO)])
def test_agrees_with_the_plain_implementation_with(name: str, more: dict[str, Any]) -> None:
    options = {**CASES[name].options, **more}
    agree(federate(make(name, options), DOUBLE), name, options, {}, {})


def agree(
    run: pt.Run, name: str, options: Mapping[str, Any], more: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Models and personal parts at the end, losses and scores in every round, are those of the plain run."""
    start = {k: v.numpy() for k, v in pt.models.mlp(6, 5, 4, seed=1).double().state_dict().items()}
    worlds = list(plainly(name, options, more, settings, start))
    # clipping is at G/(‖g‖ + 1e-6), as in torch
    atol = 1e-5 if "max_grad_norm" in more else CASES[name].atol
    world = worlds[-1]
    for k, value in run.shared.items():
        np.testing.assert_allclose(value, world.model[k], rtol=0, atol=atol, err_msg=k)
    for i in range(DOUBLE.clients):
        model, expected = run.personalized(i), plain.client_model(world, i)
        assert model.keys() == expected.keys()
        for k, value in model.items():
            np.testing.assert_allclose(value, expected[k], rtol=0, atol=atol, err_msg=f"client {i}, {k}")
    assert [r["round"] for r in run.metrics] == list(range(1, len(worlds) + 1))
    assert [r["train_loss"] for r in run.metrics] == pytest.approx([w.loss for w in worlds], abs=atol)
    for row, after in zip(run.metrics, worlds):
        assert row["test.personal"] == pytest.approx(pooled_accuracy(after))
    scores = [None if not n else score for n, score in zip(DOUBLE.sizes("test"), accuracies(world))]
    assert [r["personal"] for r in run.clients] == pytest.approx(scores)


def accuracies(world: plain.World) -> list[float]:
    """Every client's test accuracy with its own model."""
    found = []
    for i in range(DOUBLE.clients):
        x, y = (t.numpy() for t in DOUBLE.client(i, "test"))
        found.append(plain.accuracy(plain.client_model(world, i), x, y) if len(y) else 0.0)
    return found


def pooled_accuracy(world: plain.World) -> float:
    """Over the test samples of all clients (appendix B.3)."""
    n = DOUBLE.sizes("test")
    return float((np.array(accuracies(world)) * n).sum() / n.sum())


def plainly(
    name: str,
    options: Mapping[str, Any],
    more: dict[str, Any],
    settings: dict[str, Any],
    start: plain.Params,
) -> Sequence[plain.World]:
    """The plain run on the random input that Partita draws."""
    parts = stages(name, options, settings, DOUBLE.clients)
    firsts = np.cumsum([0, *(p.rounds for p in parts)])
    todo = []
    for part in parts:
        given = {k: made(v, 1) for k, v in {**part.options, **more}.items()}
        todo.append(plain.Stage(PLAIN[part.name], given, part.rounds))

    def given(s: int, t: int) -> plain.Given:
        part, version = parts[s], int(firsts[s]) + t
        x, y = DOUBLE.x.numpy(), DOUBLE.y.numpy()

        def batches(client: int, phase: int, steps: int | None) -> list[np.ndarray]:
            work = part.work if steps is None else replace(part.work, steps=steps, epochs=None)
            plan = draw(DOUBLE, np.array([client]), work, phase, context(version, work))
            return [plan.rows[0, k, : plan.size[0, k]].numpy() for k in range(plan.steps[0])]

        def rows(client: int) -> np.ndarray:
            begin, n = DOUBLE.train[client]
            return np.arange(begin, begin + n)

        def noise(client: int) -> plain.Params:
            key = start_keys(np.array([client]), context(version, part.work), DOUBLE.x.device)[0]
            return {k: normals(key, k, v.shape) for k, v in start.items()}

        def order(n: int) -> np.ndarray:
            key = draws.key(SEED, "aggregation", version)
            return draws.fold(key, torch.arange(n)).argsort().numpy()

        return plain.Given(
            x,
            y,
            DOUBLE.sizes(),
            cohort(version, part.cohort),
            batches,
            t,
            part.rounds,
            part.keeps,
            rows=rows,
            noise=noise,
            order=order,
            after=lambda: given(s, t + 1),
            coins=lambda p: tails(context(version, part.work), p),
        )

    return list(plain.run(start, todo, given))


class Part(NamedTuple):
    """A stage of a run with all its settings; a method alone is a run of one."""

    name: str
    options: Mapping[str, Any]
    rounds: int
    cohort: int
    work: Work
    keeps: bool


def stages(name: str, options: Mapping[str, Any], settings: dict[str, Any], clients: int) -> list[Part]:
    """A stage's own settings, else the run's; epochs without rounds are one round of everyone."""
    work = {} if {"steps", "epochs"} & set(settings) else WORK["epochs"]
    run = {"rounds": ROUNDS, "cohort": COHORT, "state": "keep", "steps": None, "epochs": None, "batch": None}
    once = {"rounds": 1, "cohort": None, "state": "keep"}
    parts = []
    for method, given, own in options["stages"] if name == "pipeline" else [(name, options, {})]:
        its = {**run, **work, **settings}
        its |= once if "epochs" in own and "rounds" not in own else {}
        its |= {"steps": None, "epochs": None} if {"steps", "epochs"} & set(own) else {}
        its |= own
        amount = Work(steps=its["steps"], epochs=its["epochs"], batch=its["batch"])
        keeps = its["state"] == "keep"
        parts.append(Part(method, given, its["rounds"], its["cohort"] or clients, amount, keeps))
    return parts


def normals(key: Tensor, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A standard normal number for each entry of a tensor."""
    keys = draws.fold(draws.fold(key, zlib.crc32(name.encode())), torch.arange(int(np.prod(shape))))
    return draws.normal(keys).double().numpy().reshape(shape)


def context(version: int, work: Work) -> RoundContext:
    return RoundContext(SEED, version, 0, 0, 0, work)


def cohort(version: int, size: int) -> tuple[int, ...]:
    """Who takes part in a round."""
    turns = pt.schedule.synchronous().begin(
        StageSpec(DOUBLE.clients, size, version, rounds=1, seed=SEED, time=0.0, steps=lambda client: 1)  # noqa: ARG005
    )
    return turns.next(ServerState({}, {}, {}, version)).clients


# ---- (f) draws do not depend on the order of execution


def rows_of(plan: Plan, i: int) -> tuple[list[list[int]], list[int]]:
    """The rows of each step of the i-th client of a plan, and the keys of its forward passes."""
    steps = int(plan.steps[i])
    return [plan.rows[i, s, : plan.size[i, s]].tolist() for s in range(steps)], plan.keys[i, :steps].tolist()


@each("work", WORK.values(), ids=WORK)
def test_batches_do_not_depend_on_the_other_clients(work: dict[str, Any]) -> None:
    asked = Work(**work)
    everyone = draw(SINGLE, np.arange(7), asked, 1, context(2, asked))
    for some in ([3, 6, 0, 5, 1, 4, 2], [4, 0], [2], [5, 4, 3]):
        plan = draw(SINGLE, np.array(some), asked, 1, context(2, asked))
        for place, client in enumerate(some):
            assert rows_of(plan, place) == rows_of(everyone, client)


class Reversed:
    """The same cohorts in the opposite order."""

    def check(self, clients: int, cohort: int) -> None:
        """Any number fits."""

    def of(self, algorithm: Algorithm) -> Reversed:  # noqa: ARG002
        return self

    def begin(self, spec: StageSpec) -> Running:
        turns = pt.schedule.synchronous().begin(spec)
        forward = turns.next

        def backward(server: ServerState) -> Cohort:
            found = forward(server)
            return found._replace(clients=found.clients[::-1])

        turns.next = backward
        return turns


@most_methods
def test_the_order_of_the_cohort_does_not_matter(case: Case) -> None:
    forward = default_run(case.name)
    backward = federate(make(case.name, case.options), DOUBLE, schedule=Reversed())
    assert_close(tensors(forward), tensors(backward), atol=1e-9)


@pytest.mark.slow
@every_method
def test_the_size_of_chunks_does_not_matter(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []

    def watched(data: FederatedData, clients: np.ndarray, *rest: Any) -> Plan:
        chunks.append(len(clients))
        return draw(data, clients, *rest)

    monkeypatch.setattr("partita.engine.execute.plan.draw", watched)
    cut = federate(make(case.name, case.options), DOUBLE, memory=8_000)
    assert 1 < max(chunks) < COHORT
    for other in ("vmap", "loop"):
        assert_close(tensors(default_run(case.name, other)), tensors(cut), atol=1e-9)
        assert rows(default_run(case.name, other), *ROUNDED) == rows(cut, *ROUNDED)


@each("case", [c for c in CASES.values() if c.name != "pipeline"], ids=lambda c: c.name)
def test_a_client_never_seen_has_the_initial_state(case: Case) -> None:
    algorithm = make(case.name, case.options)
    run = federate(algorithm, rounds=1, cohort=1, seed=SEED)
    start = pt.models.mlp(6, 5, 4, seed=1).state_dict()
    model = pt.models.mlp(6, 5, 4)
    names = Names.of(model, lambda: SINGLE.x[:1], tuple(start))
    new = algorithm.init_client(start, algorithm.partition(model, names))
    for i in {0, 1, 2, 3, 4, 5, 6} - set(cohort(0, 1)):
        state = run.client(i)
        previous = {f"previous.{k}": v for k, v in start.items() if f"previous.{k}" in state.memory}
        assert_same_bits(state.memory, {**new.memory, **previous})
        if algorithm.stateful:  # else it is what the client would be evaluated with
            assert_same_bits(state.personal, {k: start[k] for k in state.personal})
        if not case.computed:
            assert_same_bits(run.personalized(i), {**start, **run.shared, **state.personal})


# ---- (g) what is sent


@every_method
def test_only_shared_tensors_are_sent(case: Case) -> None:
    run = default_run(case.name, data=SINGLE)
    size = {k: v.numel() for k, v in pt.models.mlp(6, 5, 4).state_dict().items()}
    up = down = 0
    for part in stages(case.name, case.options, {}, SINGLE.clients):
        talks = CASES[part.name]
        up += part.rounds * part.cohort * 4 * sum(size[k] for k in talks.up)
        down += part.rounds * part.cohort * 4 * sum(size[k] for k in talks.down)
    assert (run.metrics[-1]["bytes_up"], run.metrics[-1]["bytes_down"]) == (up, down)
    assert (run.summary()["bytes_up"], run.summary()["bytes_down"]) == (up, down)
    assert set(run.shared) == set(talks.down if talks.shared is None else talks.shared)


# ---- baselines


@pytest.mark.parametrize("name", ["local", "fedavg", "fedalt", "finetune", "pipeline"])
def test_baselines_say_who_is_hurt(name: str) -> None:
    run = federate(make(name, CASES[name].options), baselines=True)
    summary, found = run.summary(), run.clients
    n = np.array([r["n_test"] for r in found])
    for kind in ("local", "global", "personal"):
        score = np.array([r[kind] or 0.0 for r in found])
        assert all((r[kind] is None) == (r["n_test"] == 0) for r in found)
        assert summary["test"][kind] == pytest.approx((score * n).sum() / n.sum())
    for kind in ("local", "global"):
        worse = sum(r["personal"] < r[kind] for r in found if r["n_test"])
        assert summary["hurt"][f"vs_{kind}"] == worse


def test_baselines_are_the_methods_themselves() -> None:
    found = federate(make("fedalt", CASES["fedalt"].options), baselines=True)
    average = default_run("fedavg", data=SINGLE)
    alone = federate(make("local", CASES["local"].options), cohort=None)  # everyone trains in every round
    np.testing.assert_array_equal(found.scores("global"), average.scores("global"))
    np.testing.assert_array_equal(found.scores("local"), alone.scores("personal"))


def test_the_global_model_of_a_pipeline_is_the_one_that_was_trained_as_a_whole() -> None:
    """Once fedalt has moved u away from it, the old v is nobody's model: it must not stand for 'global'."""
    data = pt.data.digits(8, pt.data.label_skew(classes=3), validation=0, seed=0)
    avg, alt = pt.stage(AVG, rounds=3), pt.stage(pt.fedalt("output", LR), rounds=6)
    run = federate_digits(pt.pipeline(avg, alt, pt.stage(pt.finetune("output", LR), epochs=1)), data)
    trained = run.metrics[2]["test.global"]
    assert [row["test.global"] for row in run.metrics[2:]] == [trained] * (len(run.metrics) - 2)


def test_a_model_that_is_trained_as_a_whole_again_is_global_again() -> None:
    run = federate(pt.pipeline(pt.stage(pt.fedalt("output", LR), rounds=2), pt.stage(AVG, rounds=1)))
    last = run.metrics[-1]
    assert last["test.global"] == last["test.personal"] is not None


# ---- corners that all methods meet


class Scaled(nn.Module):
    """A model with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pt.models.mlp(6, 4, seed=1)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


@both_executors
@each(
    "algorithm",
    [AVG, pt.fedprox(LR, mu=0.5, momentum=0.9), pt.fedadam(**ADAPTIVE), pt.fedsim("scale", LR), pt.local(LR)],
    ids=lambda a: a.name,
)
def test_a_parameter_that_is_a_number_keeps_its_type(algorithm: Algorithm, executor: str) -> None:
    run = pt.federate(
        Scaled(), SINGLE, algorithm, rounds=2, batch=4, executor=executor, baselines=False, progress=False
    )
    found = tensors(run)
    assert {name: t.dtype for name, t in found.items()} == dict.fromkeys(found, torch.float32)
    assert not torch.equal(run.personalized(4)["scale"], torch.tensor(2.0))


@both_executors
@each("clip", [None, 1.0])
@each(
    ("build", "moves"),
    [
        (lambda **o: pt.fedalt("all", LR, **o), True),
        (lambda **o: pt.fedsim("all", LR, **o), True),
        (lambda **o: pt.finetune("none", LR, **o), False),
    ],
    ids=["fedalt all", "fedsim all", "finetune none"],
)
def test_a_phase_may_have_nothing_to_move(
    build: Callable[..., Algorithm], moves: bool, clip: float | None, executor: str
) -> None:
    run = federate(build(max_grad_norm=clip), executor=executor, cohort=None)
    start = pt.models.mlp(6, 5, 4, seed=1).state_dict()
    for i, n in enumerate(SINGLE.sizes()):
        same = all(torch.equal(v, start[k]) for k, v in run.personalized(i).items())
        assert same == (not moves or n == 0)


def test_the_training_loss_is_that_of_clients_that_train() -> None:
    """A client that takes no step has no loss: it must not count as a loss of zero."""
    settings = {"steps": (3, 0, 0, 3, 0, 0, 3), "batch": 4, "cohort": None}
    agree(federate(AVG, DOUBLE, **settings), "fedavg", {"lr": LR}, {}, settings)


class Spare(nn.Module):
    """A model with a head that its forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = pt.models.mlp(6, 5, 4, seed=1)
        self.spare = nn.Linear(3, 2)
        self.input_part = tuple(f"net.{k}" for k in self.net.input_part)
        self.output_part = tuple(f"net.{k}" for k in self.net.output_part)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


@most_methods
def test_what_the_model_does_not_use_stays(case: Case) -> None:
    """Its gradient is zero, alone and stacked."""
    model, work = Spare(), {"rounds": 1, "steps": 1, "batch": 4}
    work = work if case.name != "pipeline" else {"steps": 1, "batch": 4}
    method = make(case.name, case.options)
    for executor in ("loop", "vmap"):
        run = pt.federate(
            model,
            SINGLE,
            method,
            **work,
            executor=executor,
            schedule=pt.schedule.synchronous(),
            baselines=False,
            progress=False,
        )
        for i in (0, 1):
            found = dict(run.client(i).model().named_parameters())
            for name, value in model.spare.named_parameters(prefix="spare"):
                torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-6)


@both_executors
def test_weight_decay_does_not_ask_what_is_used(executor: str) -> None:
    """w ← w − η ω w, for each step."""
    model = Spare()
    options = {"rounds": 2, "steps": 3, "batch": 4, "baselines": False, "progress": False}
    run = pt.federate(model, SINGLE, pt.fedavg(0.1, weight_decay=0.5), executor=executor, **options)
    torch.testing.assert_close(run.shared["spare.weight"], model.spare.weight.detach() * (1 - 0.1 * 0.5) ** 6)


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


def dropping() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 4))


@each(
    "case",
    [CASES[k] for k in METHODS if k in {**vars(plain_full), **vars(plain_losses)}],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize(
    ("model", "norm"),
    [(normed, "global"), (normed, "personal"), (dropping, None)],
    ids=["normed", "own norms", "dropping"],
)
def test_statistics_and_dropout_are_those_of_each_client(
    case: Case, model: Callable[[], nn.Module], norm: str | None
) -> None:
    settings = {"rounds": 3, "batch": 4, "cohort": 5, "norm": norm, "baselines": False, "progress": False}
    for more in ({}, *case.also[:1]) if Selected.slow else ({},):
        algorithm = make(case.name, {**case.options, **more}, momentum=0.5)
        loop, vmap = (
            pt.federate(model().double(), DOUBLE, algorithm, executor=e, seed=SEED, **settings)
            for e in ("loop", "vmap")
        )
        assert_close(tensors(loop), tensors(vmap), atol=1e-9)
        start = model().double().state_dict()
        assert any(not torch.equal(v, start[k]) for k, v in vmap.personalized(0).items())
