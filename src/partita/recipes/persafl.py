"""Personalized Asynchronous Federated Learning: Toghani, Lee & Uribe (2022), Figure 2.

Thirty clients with some of the classes each, Q = 10 local steps of size 0.01. A client's upload takes 4 to 6
times as long as its download; computing takes no time. In step, `cohort` clients report in a round and the
round lasts as long as the slowest of them; asynchronously 24 clients, a setting, are at work at any time and
the server acts on every arrival. All methods have the same virtual time.

All methods are evaluated after the same fine-tuning: ten steps of size 0.01 on the client's own data, from
the server's model (pfedme: from the client's own, of its last turn). Asynchronous servers take a tenth or a
fifth of each delta, whatever is best for each method, as in the paper; with β near 1, as there, the sum of
what 24 clients find who do not know of each other goes too far here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from partita.core import check
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.engine.record import Record
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Table, Variant, mean_std
from partita.schedule import (
    Schedule,
    asynchronous,
    delays,
    scaled,
    synchronous,
    uniform,
)

Runs = Mapping[str, Sequence[Record]]
SIZES = ("small", "paper")
CLIENTS, Q, ETA, K = 30, 10, 0.01, 10
DELAYS = delays(download=uniform(0.5, 1.5), upload=scaled(uniform(0.5, 1.5), uniform(4, 6)))
"""On average a download takes 1, and an upload 4 to 6: a factor that each client keeps."""
BETA = {
    "mnist": {"fedasync": 0.1, "persafl_maml": 0.2, "persafl_me": 0.2},
    "cifar10": {"fedasync": 0.1, "persafl_maml": 0.1, "persafl_me": 0.2},
}
"""The server's step: picked among a few at the paper's size on seed 0; docs/results.md says how."""
POINTS = 10  # evaluations
MOST = 10**6  # server steps: time ends first


def methods(
    lam: float, alpha: float, beta: Mapping[str, float], inner_lr: float, tune: int, mu: float = 0.1
) -> dict[str, Algorithm]:
    """The eight of Figure 2; the last three run asynchronously."""
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


def persafl_mnist(
    size: str = "small",
    time: float | None = None,
    lam: float = 20.0,
    alpha: float = 0.01,
    beta: float | None = None,
    inner_lr: float = 0.03,
    tune: int = 10,
    cohort: int = 6,
    batch: int | None = None,
    seed: int = 0,
) -> Study:
    """Does waiting cost accuracy? Eight methods on MNIST in the same virtual time, five digits per client.

    size      small (a tenth of the digits, a network of a quarter of the width) or paper
    time      how long, on the virtual clock
    lam       λ of pfedme and persafl_me (the paper picks 20, 25 or 30)
    alpha     α of perfedavg and persafl_maml (the paper picks 0.002, 0.005 or 0.01)
    beta      the server's step, of all asynchronous methods (None: what was best for each; the paper picks
              0.8, 1 or 1.2)
    inner_lr  step size of the inner steps of pfedme and persafl_me
    tune      steps of the fine-tuning before an evaluation
    cohort    clients in a round of the synchronous methods
    batch     samples in a step
    """
    few = check.choice("size", size, SIZES) == "small"
    source = _dealt("mnist", 5, few, seed)
    model = models.mnist_cnn(10, width=0.25 if few else 1.0, seed=seed)
    rules = methods(lam, alpha, _steps("mnist", beta), inner_lr, tune)
    end = time or (150.0 if few else 300.0)
    return _study(model, source, rules, end, cohort, batch or (16 if few else 32), seed)


def persafl_cifar(
    size: str = "small",
    time: float | None = None,
    lam: float = 30.0,
    alpha: float = 0.01,
    beta: float | None = None,
    inner_lr: float = 0.03,
    tune: int = 10,
    cohort: int = 6,
    batch: int | None = None,
    seed: int = 0,
) -> Study:
    """The same on CIFAR-10 with three classes per client.

    size      small (half of the images, a network of a quarter of the width) or paper
    time      how long, on the virtual clock
    lam       λ of pfedme and persafl_me (the paper picks 20, 25 or 30)
    alpha     α of perfedavg and persafl_maml (the paper picks 0.002, 0.005 or 0.01)
    beta      the server's step, of all asynchronous methods (None: what was best for each; the paper picks
              0.8, 1 or 1.2)
    inner_lr  step size of the inner steps of pfedme and persafl_me
    tune      steps of the fine-tuning before an evaluation
    cohort    clients in a round of the synchronous methods
    batch     samples in a step
    """
    few = check.choice("size", size, SIZES) == "small"
    source = _dealt("cifar10", 3, few, seed)
    model = models.cifar_cnn(10, width=0.25 if few else 1.0, seed=seed)
    rules = methods(lam, alpha, _steps("cifar10", beta), inner_lr, tune)
    end = time or (150.0 if few else 300.0)
    return _study(model, source, rules, end, cohort, batch or (16 if few else 32), seed)


def _steps(name: str, beta: float | None) -> dict[str, float]:
    """The same for all, or each method's own."""
    return BETA[name] if beta is None else dict.fromkeys(BETA[name], beta)


def _dealt(name: str, classes: int, few: bool, seed: int) -> FederatedData:
    """To 30 clients; for the small size the first 30 of more, with about 190 images to train on."""
    share = 1 if not few else 10 if name == "mnist" else 2
    everyone = data.real(name, clients=CLIENTS * share, partition=data.label_skew(classes), seed=seed)
    some = everyone.subset(range(CLIENTS)) if share > 1 else everyone
    mean, deviation = (0.1307, 0.3081) if name == "mnist" else (0.473, 0.252)  # of pixels in [0, 1]
    return replace(some, x=(some.x.float() / 255 - mean) / deviation)


def _study(
    model: nn.Module,
    source: FederatedData,
    rules: Mapping[str, Algorithm],
    time: float,
    cohort: int,
    batch: int,
    seed: int,
) -> Study:
    end = check.number("time", time, low=0, open_low=True)
    in_step = synchronous(delays=DELAYS, until=end)
    at_once = asynchronous(concurrency=int(0.8 * CLIENTS), delays=DELAYS, until=end)

    def variant(rule: Algorithm) -> Variant:
        schedule: Schedule = in_step if rule.asynchronous is None else at_once
        return Variant(
            Experiment(
                model=model,
                data=source,
                algorithm=rule,
                rounds=MOST,
                cohort=check.integer("cohort", cohort, low=1, high=CLIENTS),
                steps=Q,
                batch=batch,
                seed=seed,
                schedule=schedule,
                evaluate_every=end / POINTS,
                baselines=False,
                checkpoint_every=0,
            )
        )

    return Study({name: variant(rule) for name, rule in rules.items()}, tables=lambda runs: [_table(runs)])


def _table(runs: Runs) -> Table:
    """Accuracy at the end of time, after the same fine-tuning, and what the clock says."""
    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        clock = [r.summary()["clock"] for r in seeds]
        rows.append(
            (
                name,
                mean_std([r.summary()["test"]["personal"] for r in seeds], 100, 1),
                mean_std([r.summary()["test"]["global"] for r in seeds], 100, 1),
                mean_std([r.summary()["rounds"] for r in seeds], 1, 0),
                mean_std([c["active"] or 0.0 for c in clock], 100, 0),
                mean_std([c["staleness"]["mean"] or 0.0 for c in clock], 1, 1),
            )
        )
    columns = ("method", "tuned", "before", "steps", "active, %", "stale")
    note = "Tuned: after the common fine-tuning; before: the server's model; steps: of the server."
    return Table("Test accuracy, %, in the same virtual time (Figure 2)", columns, rows, note)
