"""Personalized Asynchronous Federated Learning: Toghani, Lee & Uribe (2022), Figure 2.

Thirty clients with some of the classes each, Q = 10 local steps of size 0.01. A client's upload takes 4 to 6
times as long as its download; computing takes no time. Synchronously, `cohort` clients report in a round and
the round lasts as long as the slowest of them. Asynchronously, a client that has reported asks again at once,
as in Algorithm 2, so that all of them are in flight unless `concurrency` says otherwise, and the server acts
on every arrival. All methods have the same virtual time.

All methods are evaluated after the same fine-tuning: ten steps of size 0.01 on the client's own data, from
the server's model (pfedme: from the client's own, of its last turn). scaffold is its option I (footnote 5).

Appendix D fixes η = 0.01 and picks β, the server's step, for each method. So does `tuning`, from one grid and
on validation samples. Its unit is a mean of the deltas of those at work: β = `step` synchronously, and
`step`/C asynchronously with C clients in flight, whose deltas do not know of each other and add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypedDict, Unpack

import numpy as np
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
from partita.core.options import Option, checked
from partita.core.parts import Algorithm
from partita.data import FederatedData, columns
from partita.engine.record import Record, number
from partita.optim import sgd
from partita.recipes.experiment import Experiment
from partita.recipes.sizes import by_size
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, mean_std, score
from partita.report.charts import Chart, Panel, Series, curve
from partita.schedule import Activity, activity, asynchronous, delays, scaled, synchronous, uniform

CLIENTS, Q, ETA, K = 30, 10, 0.01, 10
DELAYS = delays(download=uniform(0.5, 1.5), upload=scaled(uniform(0.5, 1.5), uniform(4, 6)))
"""On average a download takes 1, and an upload 4 to 6: a factor that each client keeps."""
ASYNCHRONOUS = ("fedasync", "persafl_maml", "persafl_me")
NAMES = ("fedavg", "fedprox", "scaffold", "perfedavg", "pfedme", *ASYNCHRONOUS)
POINTS = 10  # evaluations
MOST = 10**6  # server steps: time ends first


GRID = (1.0, 2.0, 4.0, 8.0)
"""Server steps among which `tuning` picks, for every method."""
VALIDATION = 0.1  # of the training samples, while tuning


class Images(NamedTuple):
    """A dataset of the paper.

    classes          those that each client has
    fraction         one in how many images is used at the small size
    mean, deviation  of its pixels in [0, 1]
    step             the server's step of each method where it is not 1; see docs/results.md
    """

    model: Callable[..., nn.Module]
    classes: int
    fraction: int
    mean: float
    deviation: float
    step: dict[str, float]


TUNED = {
    "fedavg": 2.0,
    "fedprox": 2.0,
    "scaffold": 2.0,
    "perfedavg": 4.0,
    "pfedme": 4.0,
    "fedasync": 2.0,
    "persafl_maml": 4.0,
    "persafl_me": 4.0,
}
"""What `tuning` picked for MNIST at the small size."""
IMAGES = {
    "mnist": Images(models.mnist_cnn, 5, 10, 0.1307, 0.3081, TUNED),
    "cifar10": Images(models.cifar_cnn, 3, 2, 0.473, 0.252, dict.fromkeys(ASYNCHRONOUS, 4.0)),
}


def _steps(field: str, value: Any) -> float | dict[str, float]:
    """Return the server's step of all methods, or of some by name."""
    if not isinstance(value, Mapping):
        return check.number(field, value, low=0, open_low=True)
    for method in value:
        check.choice(f"method of {field}", method, NAMES)
    return {k: check.number(f"{field} of {k}", v, low=0, open_low=True) for k, v in value.items()}


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
    step: Annotated[
        float | Mapping[str, float] | None,
        Option(
            "server's step β of synchronous methods, and β C of asynchronous ones with C clients in flight; "
            "default: each method's own; the paper picks β from 0.8 to 1.2",
            allowed='above 0, for all methods or by name: {"fedasync": 4, "fedavg": 2}',
            check=_steps,
        ),
    ]
    tuning: Annotated[
        bool, Option("run each method with several steps, scored on validation samples", default=False)
    ]
    inner_lr: Annotated[float, Option("step size of the inner steps of pfedme and persafl_me", default=0.03)]
    tune: Annotated[int, Option("steps of the fine-tuning before an evaluation", default=10)]
    cohort: Annotated[
        int, Option("clients in a round of the synchronous methods", low=1, high=CLIENTS, default=6)
    ]
    concurrency: Annotated[
        int | None,
        Option("clients in flight asynchronously; default: everyone", low=1, high=CLIENTS, default=None),
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
    lam: float, alpha: float, beta: Callable[[str], float], inner_lr: float, tune: int, mu: float = 0.1
) -> dict[str, Algorithm]:
    """Return the eight methods of Figure 2, with the server's step of each; the last three have no rounds."""
    rules = {
        "fedavg": fedavg(ETA, server=sgd(beta("fedavg"))),
        "fedprox": fedprox(ETA, mu=mu, server=sgd(beta("fedprox"))),
        "scaffold": scaffold(ETA, option=1, server_lr=beta("scaffold")),
        "perfedavg": perfedavg(ETA, alpha, server=sgd(beta("perfedavg"))),
        "pfedme": pfedme(ETA, lam, inner_lr, K, beta=beta("pfedme")),
        "fedasync": fedasync(ETA, server_lr=beta("fedasync")),
        "persafl_maml": persafl_maml(ETA, alpha, server_lr=beta("persafl_maml")),
        "persafl_me": persafl_me(ETA, lam, inner_lr, K, server_lr=beta("persafl_me")),
    }
    return {name: tuned(rule, lr=ETA, steps=tune) for name, rule in rules.items()}


def _study(name: str, lam: float, seed: int, **options: Unpack[Options]) -> Study:
    size, images, step = options["size"], IMAGES[name], options["step"] or {}
    steps = dict.fromkeys(NAMES, 1.0) | images.step
    steps |= step if isinstance(step, Mapping) else dict.fromkeys(NAMES, step)
    in_flight, tuning = options["concurrency"] or CLIENTS, options["tuning"]
    end = options["time"] or by_size(size, 150.0, 300.0)

    def rules(steps: Mapping[str, float]) -> dict[str, Algorithm]:
        def beta(method: str) -> float:
            return steps[method] / (in_flight if method in ASYNCHRONOUS else 1)

        return methods(lam, options["alpha"], beta, options["inner_lr"], options["tune"])

    base = Experiment(
        model=images.model(10, width=by_size(size, 0.25, 1.0), seed=seed),
        data=_dealt(name, by_size(size, images.fraction, 1), VALIDATION if tuning else 0.0, seed),
        algorithm=rules(steps)["fedavg"],
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
    arrivals = replace(base, schedule=asynchronous(concurrency=in_flight, delays=DELAYS, until=end))

    def variants(steps: Mapping[str, float], suffix: str = "") -> dict[str, Variant]:
        return {
            key + suffix: Variant(replace(arrivals if key in ASYNCHRONOUS else base, algorithm=method))
            for key, method in rules(steps).items()
        }

    if tuning:
        same = [(value, dict.fromkeys(NAMES, value)) for value in GRID]
        grid = {k: v for value, each in same for k, v in variants(each, f"-{value:g}").items()}
        return Study(grid, tables=lambda runs: [_tuning(runs)], charts=lambda runs: [_tuning_chart(runs)])
    return Study(
        variants(steps),
        tables=lambda runs: [_table(runs)],
        charts=lambda runs: [_figure(runs, name)],
    )


def _dealt(name: str, fraction: int, validation: float, seed: int) -> FederatedData:
    """Deal the images to 30 clients; at the small size those are the first of more, about 190 images each."""
    images = IMAGES[name]
    clients = CLIENTS * fraction
    dealt = data.real(
        name, clients=clients, partition=data.label_skew(images.classes), validation=validation, seed=seed
    )
    dealt = dealt.subset(range(CLIENTS)) if fraction > 1 else dealt
    x = columns.in_memory(dealt.x, name)
    return replace(dealt, x=(x.float() / 255 - images.mean) / images.deviation)


# ---- Figure 2


def _table(runs: Runs) -> Table:
    """Return the accuracy at the end of time, after the same fine-tuning, and the figures of the clock."""
    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        clock = [run.summary()["clock"] for run in seeds]
        uploading = [float(np.mean([part.uploading for part in _activity(run)])) for run in seeds]
        rows.append(
            (
                name,
                score(seeds),
                score(seeds, "global"),
                mean_std((run.summary()["rounds"] for run in seeds), digits=0),
                mean_std([c["active"] or 0.0 for c in clock], 100, 0),
                mean_std(uploading, 100, 0),
                mean_std([c["staleness"]["mean"] or 0.0 for c in clock], digits=1),
            )
        )
    columns = ("method", "tuned", "before", "steps", "active, %", "uploading, %", "stale")
    note = (
        "Tuned: after the common fine-tuning; before: the server's model; steps: of the server; active: mean "
        "share of the clients in flight, that is not idle; uploading: of all clients."
    )
    return Table("Test accuracy, %, in the same virtual time (Figure 2)", columns, rows, note)


def _figure(runs: Runs, name: str) -> Chart:
    """Return who is active, and the accuracy after the same fine-tuning, over virtual time."""
    shares = list[Series]()
    for kind, asynchronous_ones in (("asynchronous", True), ("synchronous", False)):
        of_kind = next((seeds for k, seeds in runs.items() if (k in ASYNCHRONOUS) is asynchronous_ones), [])
        played = [_activity(run) for run in of_kind]  # delays decide it: it is the same for all methods
        for what in ("active", "uploading"):
            values = 100 * np.array([[getattr(part, what) for part in parts] for parts in played])
            spread = values.std(0, ddof=1).tolist() if len(played) > 1 else ()
            if played:
                times = [part.time for part in played[0]]
                shares.append(Series(f"{kind}, {what}", times, values.mean(0).tolist(), spread))
    scores = [
        curve(k, seeds, lambda row: row["test.personal"], along="time", scale=100)
        for k, seeds in runs.items()
    ]
    panels = [
        Panel("(a) clients", "virtual time", "% of all clients", shares),
        Panel(f"({'b' if name == 'mnist' else 'c'}) {name}", "virtual time", "test accuracy, %", scores),
    ]
    note = "Active: in flight, downloading or uploading. Accuracy: after the same fine-tuning of all methods."
    return Chart("Clients at work, and accuracy in the same virtual time (Figure 2)", panels, note)


def _activity(run: Record) -> list[Activity]:
    """Return which share of the clients was active, from the delays of the run."""
    settings, method = run.config["settings"], run.config["algorithm"]["name"]
    clients, end = len(run.clients), run.config["schedule"]["until"]
    schedule = asynchronous if method in ASYNCHRONOUS else synchronous
    cohort = run.config["schedule"].get("concurrency") or settings["cohort"]
    return activity(
        schedule(delays=DELAYS), clients, end, cohort=cohort, seed=settings["seed"], points=POINTS
    )


# ---- the server's step of each method


def _tuning(runs: Runs) -> Table:
    """Return the validation accuracy at the end of time by the server's step; the best is picked.

    A step with which a seed diverged has no accuracy, and is not picked.
    """
    rows, picked = [], []
    for method, scores in _validation(runs).items():
        held = {step: values for step, values in scores.items() if np.isfinite(values).all()}
        best = max(held, key=lambda step: float(np.mean(held[step])), default=None)
        cells = (mean_std(scores[step], 100, 1) if step in held else "diverged" for step in scores)
        rows.append((method, *cells, "-" if best is None else f"{best:g}"))
        picked += [] if best is None else [f'"{method}": {best:g}']
    note = (
        "Validation samples of the clients, after the common fine-tuning. Diverged: under at least one seed. "
        f"Figure 2 with what was picked: `--set 'step={{{', '.join(picked)}}}'`."
    )
    return Table(
        "Validation accuracy, %, by the server's step", ("method", *map(str, GRID), "picked"), rows, note
    )


def _tuning_chart(runs: Runs) -> Chart:
    series = [
        Series(method, list(scores), [number(100 * np.mean(v)) for v in scores.values()])
        for method, scores in _validation(runs).items()
    ]
    panel = Panel(
        "", "server's step (times the clients in flight)", "validation accuracy, %", series, log="x"
    )
    return Chart("Server's step of each method, on validation samples", [panel])


def _validation(runs: Runs) -> dict[str, dict[float, list[float]]]:
    """Return by method and step the validation accuracy of each seed; that of a diverged run is NaN."""
    found: dict[str, dict[float, list[float]]] = {}
    for name, seeds in runs.items():
        method, _, step = name.rpartition("-")
        last = [run.metrics[-1]["validation.personal"] for run in seeds]
        found.setdefault(method, {})[float(step)] = [np.nan if v is None else v for v in last]
    return found
