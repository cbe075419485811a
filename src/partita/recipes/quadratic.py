"""Partially Personalized Federated Learning on quadratics: Mishchenko et al. (2023), Figures 1 to 4.

    error(θ) = ‖F(θ)‖ / ‖F(θ⁰)‖,   F(θ) = mean_m ∇₁f_m(θ, w_m*(θ)) with the exact w_m*

The problems are those of section 5.1 and appendix E, in float64; FFGG takes the largest steps that Theorem 1
allows, 1/ℓ and 1/L_w, also with Byzantine clients (Theorem 8 allows at most a quarter of that, which is as
many times slower), and 1/(ℓM) along each gradient asynchronously (Theorem 7 allows 1/(2ℓ√(2Mτ_max))).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from partita import aggregate, attack, data
from partita.algorithms import fedavg, ffgg, ffgg_robust, l2gd, scaffold
from partita.algorithms import ffgg_async as stale_ffgg
from partita.algorithms.local.solvers import cg, exact, gd
from partita.core.parts import Algorithm
from partita.data import Quadratic
from partita.engine.record import Record
from partita.measures import gradient_norm
from partita.recipes.experiment import Experiment
from partita.recipes.sizes import by_size
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, mean_std
from partita.report.charts import Chart, Panel, Series, curve
from partita.schedule import asynchronous, delays, gamma, lognormal, synchronous

ZETAS, TAUS = (20, 40, 80), (100, 200, 500)
STEPS = (2, 5, 10, 20, 30, 40)
LAM = 0.1  # of L2GD
POINTS = 100  # evaluations
RIVALS = {"ffgg": "FFGG", "scaffold": "Scaffold", "local-gd": "Local GD", "l2gd": "L2GD"}
INSTANCES = {"same": "one θ* for all", "own": "a θ* for each"}
SENT = {"honest": "none Byzantine", "flip": "flip", "flip4": "flip, four times as long"}
ERROR = "‖F(θ)‖ / ‖F(θ⁰)‖"
L2GD_AXIS = (
    "A round of L2GD is a meeting and the local steps until the next one; the authors count each local step."
)
Panels = Mapping[str, Mapping[str, str]]
"""For each panel of a chart, by its title, the variants that are drawn, by their labels."""


def ffgg_solver(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """How exactly must clients solve for their part? FFGG with 2 to 40 conjugate gradient steps (Fig. 1a).

    The paper has 5 to 40; with two there is a difference to be seen.

    size    small (n = 500 rows, 8 clients) or paper (n = 10000, 32 clients)
    rounds  number of rounds; default: 200 or 2850 by size
    """
    problem = _problem(size, "uniform", seed)
    rounds = rounds or by_size(size, 200, 2850)
    variants = {
        f"cg-{tau}": _variant(problem, ffgg("w", problem.constants.gamma_theta, cg(tau)), rounds, seed)
        for tau in STEPS
    }
    panels = {"": {f"τ = {tau}": f"cg-{tau}" for tau in STEPS}}
    return _study(variants, "FFGG by steps of conjugate gradients (Figure 1a)", panels)


def ffgg_methods(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """Does local work help? FFGG, Scaffold, Local GD and L2GD with 100, 200 and 500 local steps (Fig. 1b-d).

    size    small (n = 500 rows, 8 clients, 10 to 50 steps) or paper (n = 10000, 32 clients)
    rounds  number of rounds; default: 30 or 150 by size
    """
    problem = _problem(size, "uniform", seed)
    rounds = rounds or by_size(size, 30, 150)
    taus = [by_size(size, tau // 10, tau) for tau in TAUS]
    variants = {}
    for tau in taus:
        for name, (method, work) in rivals(problem, tau).items():
            variants[f"{name}-{tau}"] = _variant(problem, method, rounds, seed, **work)
    panels = {f"τ = {tau}": {label: f"{name}-{tau}" for name, label in RIVALS.items()} for tau in taus}
    return _study(variants, "Methods by local steps (Figure 1b-d)", panels, L2GD_AXIS)


def ffgg_heterogeneity(size: str = "small", rounds: int = 150, tau: int = 20, seed: int = 0) -> Study:
    """Do different data slow training down? FFGG and its rivals at heterogeneity ζ = 20, 40 and 80 (Fig. 2).

    FFGG also with twice as many local steps: a fresh random w leaves an error of the order (1 − μ_w/L_w)^τ.

    size    small (8 clients) or paper (32 clients); n = 1000 rows
    rounds  number of rounds
    tau     local steps
    """
    variants = {}
    for zeta in ZETAS:
        problem = _problem(size, "heterogeneous", seed, zeta=float(zeta))
        methods = {**rivals(problem, tau), f"ffgg-tau{2 * tau}": (_descending(problem, 2 * tau), {})}
        for name, (method, work) in methods.items():
            variants[f"{name}-zeta{zeta}"] = _variant(problem, method, rounds, seed, **work)
    drawn = {**RIVALS, f"ffgg-tau{2 * tau}": f"FFGG, τ = {2 * tau}"}
    panels = {f"ζ = {z}": {label: f"{name}-zeta{z}" for name, label in drawn.items()} for z in ZETAS}
    return _study(variants, f"Error by heterogeneity, τ = {tau} (Figure 2)", panels, L2GD_AXIS)


def ffgg_byzantine(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """Can Byzantine clients stop it? 10 of 42 flip the sign of their gradient; all solve exactly (Fig. 4).

    `same`: one θ* fits all clients, each with a w* of its own (Assumption 2, which Theorem 4 needs); `own`:
    every client has its own θ*, so that honest gradients never agree and an error remains. `flip4` is a flip
    of four times the length: under a plain flip the mean still gives (32 − 10)/42 of the right step.

    size    small (matrices of appendix E.1, n = 1000 rows) or paper (section 5.1, n = 10000); 42 clients
    rounds  number of rounds; default: 100 or 2500 by size
    """
    rounds = rounds or by_size(size, 100, 2500)
    zeta = by_size(size, 20.0, None)  # as hard as the paper's, but well conditioned
    aggregators = {
        "mean": aggregate.mean(),
        "median": aggregate.bucketing(2, aggregate.coordinate_median()),
    }
    scales = {"honest": 0.0, "flip": 1.0, "flip4": 4.0}
    variants = {}
    for name, kind in (("same", "overpersonalized"), ("own", "disagreeing")):
        problem = _problem(size, kind, seed, clients=42, zeta=zeta)
        for flip, scale in scales.items():
            if name == "own" and flip == "flip4":
                continue
            attacked = {"attack": attack.sign_flip(scale), "byzantine": range(32, 42)} if scale else {}
            for rule, aggregator in aggregators.items():
                method = ffgg_robust("w", problem.constants.gamma_theta, exact(), aggregate=aggregator)
                variants[f"{name}-{flip}-{rule}"] = _variant(problem, method, rounds, seed, **attacked)
    panels = {
        label: {
            f"{SENT[flip]}, {rule}": f"{name}-{flip}-{rule}"
            for flip in scales
            for rule in aggregators
            if f"{name}-{flip}-{rule}" in variants
        }
        for name, label in INSTANCES.items()
    }
    return _study(variants, "Ten of 42 clients flip signs (Figure 4)", panels)


def ffgg_async(
    size: str = "small", directions: int | None = None, factor: float = 1.0, seed: int = 0
) -> Study:
    """What do stale gradients cost? FFGG synchronously and asynchronously, 5 to 200 local steps (Fig. 3).

    Asynchronously all clients are in flight, and the server takes a step of γ_θ/M on every arrival;
    synchronously it takes one of γ_θ along the mean of M gradients: as much for each gradient. Clients differ
    in speed. The paper's delays are those of its own machine. `same`: one θ* fits all clients (Assumption 2,
    which Theorem 7 needs); `own`: every client has its own, so that slow clients count less and an error
    remains.

    size        small (10 clients, d_θ = 100) or paper (40 clients, d_θ = 400); n = 1000 rows, ζ = 10
    directions  gradients that the server receives in all; default: 600 or 4000 by size
    factor      of the asynchronous step (the paper picks from 1/4 to 4)
    """
    clients, d_theta = by_size(size, (10, 100), (40, 400))
    count = directions or by_size(size, 600, 4000)
    lengths = delays(compute=gamma(0.01), speed=lognormal(1.0, 0.5))
    variants = {}
    for name, kind, taus in (("same", "overpersonalized", (5, 10, 50, 200)), ("own", "heterogeneous", (50,))):
        problem = data.quadratic(clients, kind=kind, n=1000, d_theta=d_theta, zeta=10.0, seed=seed)
        step = factor * problem.constants.gamma_theta / clients
        for tau in taus:
            variants[f"{name}-sync-{tau}"] = _variant(
                problem,
                _descending(problem, tau),
                count // clients,
                seed,
                schedule=synchronous(delays=lengths),
            )
            stale = stale_ffgg("w", step, gd(tau, problem.constants.gamma_w))
            variants[f"{name}-async-{tau}"] = _variant(
                problem, stale, count, seed, schedule=asynchronous(delays=lengths)
            )
    return Study(
        variants,
        tables=lambda runs: [_directions(runs, clients)],
        charts=lambda runs: _directions_charts(runs, clients),
    )


# ---- problems and methods


def rivals(problem: Quadratic, tau: int) -> dict[str, tuple[Algorithm, dict[str, Any]]]:
    """Return FFGG by gradient descent and the paper's rivals with its step sizes, all with τ local steps."""
    c, clients = problem.constants, problem.data.clients
    p = 1 / tau
    # section 5.2 prints (2M)⁻¹ max{...}; a step is the inverse of a smoothness (Hanzely & Richtárik, 2020)
    alpha = clients / (2 * max(c.L_f / (1 - p), LAM / p))
    return {
        "ffgg": (_descending(problem, tau), {}),
        "scaffold": (scaffold(1 / (c.L_f * tau), server_lr=0.5), {"steps": tau}),
        "local-gd": (fedavg(1 / (c.L_f * tau), weighting="uniform"), {"steps": tau}),
        "l2gd": (l2gd(alpha, LAM, p), {}),
    }


def _descending(problem: Quadratic, tau: int) -> Algorithm:
    """Return FFGG whose clients solve by τ steps of gradient descent."""
    return ffgg("w", problem.constants.gamma_theta, gd(tau, problem.constants.gamma_w))


def _problem(
    size: str, kind: str, seed: int, clients: int | None = None, zeta: float | None = None
) -> Quadratic:
    rows = 1000 if zeta is not None else by_size(size, 500, 10000)
    return data.quadratic(clients or by_size(size, 8, 32), kind=kind, n=rows, zeta=zeta, seed=seed)


def _variant(problem: Quadratic, method: Algorithm, rounds: int, seed: int, **settings: Any) -> Variant:
    """Train with full batches and all clients in every round, and measure ‖F(θ)‖ a hundred times.

    Its value at the start is noted in config.json, with the source of the data.
    """
    model = problem.model(seed)
    honest = [m for m in range(problem.data.clients) if m not in settings.get("byzantine", ())]
    start = float(problem.F(model.theta)[honest].mean(0).norm())
    return Variant(
        Experiment(
            model=model,
            data=replace(problem.data, source={**problem.data.source, "gradient_norm_at_start": start}),
            algorithm=method,
            rounds=rounds,
            seed=seed,
            loss=problem.loss,
            metric="loss",
            baselines=False,
            evaluate_every=max(1, rounds // POINTS),
            checkpoint_every=0,
            measures=[gradient_norm("w", exact())],
            **settings,
        )
    )


def _study(variants: dict[str, Variant], title: str, panels: Panels, note: str = "") -> Study:
    return Study(
        variants,
        tables=lambda runs: [error_table(runs, title)],
        charts=lambda runs: [_errors(runs, title, panels, note)],
    )


# ---- tables


def errors(run: Record) -> np.ndarray:
    """Return ‖F(θ)‖ relative to the start, at each evaluation."""
    totals = [row["measures"]["gradient_norm"]["total"] for row in run.metrics]
    relative: np.ndarray = np.array([np.inf if t is None else t for t in totals]) / _start(run)
    return relative


def _start(run: Record) -> float:
    return float(run.config["data"]["source"]["gradient_norm_at_start"])


def _rounds_to(runs: Sequence[Record], level: float, scale: int = 1) -> str:
    """Return the rounds to the first evaluation below this error, times `scale`."""
    below = [np.flatnonzero(errors(run) <= level) for run in runs]
    rounds = [run.metrics[b[0]]["round"] * scale if len(b) else np.nan for run, b in zip(runs, below)]
    return mean_std(rounds, digits=0)


def error_table(runs: Runs, title: str) -> Table:
    """Return the last error of each variant, and the rounds to some errors."""
    rows = []
    for name, seeds in runs.items():
        last = np.log10([np.clip(errors(run)[-1], 1e-300, 1e300) for run in seeds])
        norm = np.median([errors(run)[-1] * _start(run) for run in seeds])
        values = map(_short, (10 ** last.mean(), 10 ** last.max(), float(norm)))
        rows.append((name, *values, *(_rounds_to(seeds, level) for level in (1e-4, 1e-6, 1e-10))))
    columns = ("variant", "last error", "worst seed", "last ‖F‖", "rounds to 1e-4", "to 1e-6", "to 1e-10")
    note = (
        "Error: ‖F(θ)‖ relative to the start, the geometric mean over seeds; ‖F‖: the median over seeds; "
        "rounds: to the first of about a hundred evaluations below it, - if there is none."
    )
    return Table(title, columns, rows, note)


def _directions(runs: Runs, clients: int) -> Table:
    """Return errors by the number of gradients that the server has received; staleness and time."""
    rows = []
    for name, seeds in runs.items():
        gradients = clients if "-sync-" in name else 1  # per round
        last = 10 ** np.mean([np.log10(max(errors(run)[-1], 1e-300)) for run in seeds])
        reached = [_rounds_to(seeds, level, gradients) for level in (1e-1, 1e-2, 1e-4)]
        clock = [run.summary()["clock"] for run in seeds]
        age = [mean_std([c["staleness"][k] for c in clock], digits=0) for k in ("mean", "max")]
        rows.append((name, _short(last), *reached, *age, mean_std([c["time"] for c in clock], digits=0)))
    columns = ("variant", "error", "to 1e-1", "to 1e-2", "to 1e-4", "stale", "most", "time")
    note = (
        "Error: ‖F(θ)‖ relative to the start, at the end; to: gradients that the server had received by the "
        "first of about a hundred evaluations below it; stale, most: mean and largest staleness."
    )
    return Table("Synchronously and asynchronously (Figure 3)", columns, rows, note)


def _short(value: float) -> str:
    return f"{value:.1e}" if value < 1e100 else "diverged"


# ---- charts


def _errors(runs: Runs, title: str, panels: Panels, note: str) -> Chart:
    """Return the errors over the rounds."""
    drawn = [
        Panel(
            name,
            "communication rounds",
            ERROR,
            [_descent(label, runs[variant]) for label, variant in labels.items()],
            log="y",
        )
        for name, labels in panels.items()
    ]
    return Chart(title, drawn, note)


def _descent(name: str, seeds: Sequence[Record], gradients: int = 1) -> Series:
    """Return the error from its start at 1, over rounds or gradients: the geometric mean over the seeds."""
    by_round: dict[int, list[float]] = {0: [1.0]}
    for run in seeds:
        for row, error in zip(run.metrics, errors(run)):
            by_round.setdefault(row["round"] * gradients, []).append(float(error))
    usable = {t: v for t, v in sorted(by_round.items()) if min(v) > 0 and max(v) < np.inf}
    return Series(name, list(usable), [float(np.exp(np.log(v).mean())) for v in usable.values()])


def _directions_charts(runs: Runs, clients: int) -> list[Chart]:
    """Return both lines of Figure 3: errors by the gradients received, and the delays of the updates."""
    first, second = [], []
    for name in runs:
        instance, how, tau = name.split("-")
        if how == "async":
            title, stale = f"τ = {tau}, {INSTANCES[instance]}", runs[name]
            pair = [
                _descent("synchronous", runs[f"{instance}-sync-{tau}"], clients),
                _descent("asynchronous", stale),
            ]
            first.append(Panel(title, "update directions", ERROR, pair, log="y"))
            ages = curve("asynchronous", stale, lambda row: row["staleness"])
            second.append(Panel(title, "update directions", "delay, server steps", [ages]))
    note = f"The mean delay of the updates between two evaluations; {clients} clients are at work."
    return [
        Chart("Synchronously and asynchronously (Figure 3, first line)", first),
        Chart("Delays of updates (Figure 3, second line)", second, note),
    ]
