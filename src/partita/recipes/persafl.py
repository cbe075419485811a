"""Personalized Asynchronous Federated Learning: Toghani, Lee & Uribe (2022), Figure 2.

Thirty clients with some of the classes each, Q = 10 local steps of size 0.01. A client's upload takes 4 to 6
times as long as its download; computing takes no time. Synchronously, `cohort` clients report in a round and
the round lasts as long as the slowest of them; asynchronously, 24 clients are in flight at any time and the
server acts on every arrival. All methods have the same virtual time.

All methods are evaluated after the same fine-tuning: ten steps of size 0.01 on the client's own data, from
the server's model (pfedme: from the client's own, of its last turn). Asynchronous servers take a tenth or a
fifth of each delta, whatever is best for each method, as in the paper; with β near 1, as there, the sum of
the deltas of 24 clients that do not know of each other goes too far here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, NamedTuple, TypedDict, Unpack

from torch import nn

from partita import data, models
from partita.algorithms import (
    fedasync,
    fedavg,
    fedprox,
    perfedavg,
    persafl_maml,
    persafl_me,
    pfedme,
    scaffold,
    tuned,
)
from partita.core.options import Option, checked
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.recipes.experiment import Experiment
from partita.recipes.sizes import by_size
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, mean_std, score
from partita.schedule import asynchronous, delays, scaled, synchronous, uniform

CLIENTS, Q, ETA, K = 30, 10, 0.01, 10
DELAYS = delays(download=uniform(0.5, 1.5), upload=scaled(uniform(0.5, 1.5), uniform(4, 6)))
"""On average a download takes 1, and an upload 4 to 6: a factor that each client keeps."""
POINTS = 10  # evaluations
MOST = 10**6  # server steps: time ends first


class Images(NamedTuple):
    """A dataset of the paper.

    classes          those that each client has
    fraction         one in how many images is used at the small size
    mean, deviation  of its pixels in [0, 1]
    beta             the server's step: picked among a few at the paper's size on seed 0; see docs/results.md
    """

    model: Callable[..., nn.Module]
    classes: int
    fraction: int
    mean: float
    deviation: float
    beta: dict[str, float]


IMAGES = {
    "mnist": Images(
        models.mnist_cnn, 5, 10, 0.1307, 0.3081, {"fedasync": 0.1, "persafl_maml": 0.2, "persafl_me": 0.2}
    ),
    "cifar10": Images(
        models.cifar_cnn, 3, 2, 0.473, 0.252, {"fedasync": 0.1, "persafl_maml": 0.1, "persafl_me": 0.2}
    ),
}


class Options(TypedDict, total=False):
    """The arguments of both recipes."""

    size: Annotated[
        str,
        Option(
            "small (about 190 images each, a quarter of the width) or paper",
            choices=("small", "paper"),
            default="small",
        ),
    ]
    time: Annotated[
        float | None,
        Option("end of the virtual clock; default: 150 for small, 300 for paper", low=0, open_low=True),
    ]
    alpha: Annotated[
        float, Option("α of perfedavg and persafl_maml; the paper picks 0.002, 0.005 or 0.01", default=0.01)
    ]
    beta: Annotated[
        float | None,
        Option(
            "server's step of asynchronous methods; default: the best of each; the paper picks 0.8 to 1.2"
        ),
    ]
    inner_lr: Annotated[float, Option("step size of the inner steps of pfedme and persafl_me", default=0.03)]
    tune: Annotated[int, Option("steps of the fine-tuning before an evaluation", default=10)]
    cohort: Annotated[
        int, Option("clients in a round of the synchronous methods", low=1, high=CLIENTS, default=6)
    ]
    batch: Annotated[int | None, Option("samples in a step; default: 16 for small, 32 for paper")]


Lam = Annotated[float, Option("λ of pfedme and persafl_me; the paper picks 20, 25 or 30")]


@checked()
def persafl_mnist(lam: Lam = 20.0, seed: int = 0, **options: Unpack[Options]) -> Study:
    """Does waiting cost accuracy? Eight methods on MNIST in the same virtual time, five digits per client."""
    return _study("mnist", lam, seed, **options)


@checked()
def persafl_cifar(lam: Lam = 30.0, seed: int = 0, **options: Unpack[Options]) -> Study:
    """Does waiting cost accuracy? Eight methods on CIFAR-10 in the same time, three classes per client."""
    return _study("cifar10", lam, seed, **options)


def methods(
    lam: float, alpha: float, beta: Mapping[str, float], inner_lr: float, tune: int, mu: float = 0.1
) -> dict[str, Algorithm]:
    """Return the eight methods of Figure 2; the last three run asynchronously."""
    rules = {
        "fedavg": fedavg(ETA),
        "fedprox": fedprox(ETA, mu=mu),
        "scaffold": scaffold(ETA),
        "perfedavg": perfedavg(ETA, alpha),
        "pfedme": pfedme(ETA, lam, inner_lr, K),
        "fedasync": fedasync(ETA, server_lr=beta["fedasync"]),
        "persafl_maml": persafl_maml(ETA, alpha, server_lr=beta["persafl_maml"]),
        "persafl_me": persafl_me(ETA, lam, inner_lr, K, server_lr=beta["persafl_me"]),
    }
    return {name: tuned(rule, lr=ETA, steps=tune) for name, rule in rules.items()}


def _study(name: str, lam: float, seed: int, **options: Unpack[Options]) -> Study:
    size, images, beta = options["size"], IMAGES[name], options["beta"]
    steps = images.beta if beta is None else dict.fromkeys(images.beta, beta)
    rules = methods(lam, options["alpha"], steps, options["inner_lr"], options["tune"])
    end = options["time"] or by_size(size, 150.0, 300.0)
    base = Experiment(
        model=images.model(10, width=by_size(size, 0.25, 1.0), seed=seed),
        data=_dealt(name, by_size(size, images.fraction, 1), seed),
        algorithm=rules["fedavg"],
        rounds=MOST,
        cohort=options["cohort"],
        steps=Q,
        batch=options["batch"] or by_size(size, 16, 32),
        seed=seed,
        schedule=synchronous(delays=DELAYS, until=end),
        evaluate_every=end / POINTS,
        baselines=False,
        checkpoint_every=0,
    )
    arrivals = replace(base, schedule=asynchronous(concurrency=int(0.8 * CLIENTS), delays=DELAYS, until=end))
    variants = {
        key: Variant(replace(base if method.asynchronous is None else arrivals, algorithm=method))
        for key, method in rules.items()
    }
    return Study(variants, tables=lambda runs: [_table(runs)])


def _dealt(name: str, fraction: int, seed: int) -> FederatedData:
    """Deal the images to 30 clients; at the small size those are the first of more, about 190 images each."""
    images = IMAGES[name]
    clients = CLIENTS * fraction
    dealt = data.real(
        name, clients=clients, partition=data.label_skew(images.classes), validation=0, seed=seed
    )
    dealt = dealt.subset(range(CLIENTS)) if fraction > 1 else dealt
    return replace(dealt, x=(dealt.x.float() / 255 - images.mean) / images.deviation)


def _table(runs: Runs) -> Table:
    """Return the accuracy at the end of time, after the same fine-tuning, and the figures of the clock."""
    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        clock = [run.summary()["clock"] for run in seeds]
        rows.append(
            (
                name,
                score(seeds),
                score(seeds, "global"),
                mean_std((run.summary()["rounds"] for run in seeds), digits=0),
                mean_std([c["active"] or 0.0 for c in clock], 100, 0),
                mean_std([c["staleness"]["mean"] or 0.0 for c in clock], digits=1),
            )
        )
    columns = ("method", "tuned", "before", "steps", "active, %", "stale")
    note = "Tuned: after the common fine-tuning; before: the server's model; steps: of the server."
    return Table("Test accuracy, %, in the same virtual time (Figure 2)", columns, rows, note)
