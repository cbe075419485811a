"""Partially Personalized Federated Learning on quadratics: Mishchenko et al. (2023), Figures 1 to 4.

    error(θ) = ‖F(θ)‖ / ‖F(θ⁰)‖,   F(θ) = mean_m ∇₁f_m(θ, w_m*(θ)) with the exact w_m*

The problems are those of section 5.1 and appendix E, in float64; FFGG takes the largest steps that Theorem 1
allows, 1/ℓ and 1/L_w, also with liars (Theorem 8 allows a quarter of that, and is as many times slower).
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
from partita.core import check
from partita.core.parts import Algorithm
from partita.data import Quadratic
from partita.engine.record import Record
from partita.measures import gradient_norm
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Table, Variant, mean_std
from partita.schedule import asynchronous, delays, gamma, lognormal, synchronous

SIZES = ("small", "paper")
Runs = Mapping[str, Sequence[Record]]
ZETAS, TAUS = (20, 40, 80), (100, 200, 500)
STEPS = (2, 5, 10, 20, 30, 40)
LAM = 0.1  # of L2GD
POINTS = 100  # evaluations


def ffgg_solver(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """How exactly must clients solve for their part? FFGG with 2 to 40 conjugate gradient steps (Fig. 1a).

    The paper has 5 to 40; with two there is a difference to be seen.

    size    small (n = 500 rows, 8 clients) or paper (n = 10000, 32 clients)
    rounds  how many
    """
    problem = _problem(size, "uniform", seed)
    rule = {f"cg-{tau}": ffgg("w", problem.constants.gamma_theta, cg(tau)) for tau in STEPS}
    variants = {k: _variant(problem, v, rounds or _more(size, 200, 2850), seed) for k, v in rule.items()}
    return Study(
        variants, tables=lambda runs: [error_table(runs, "FFGG by steps of conjugate gradients (Figure 1a)")]
    )


def ffgg_methods(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """Does local work help? FFGG, Scaffold, Local GD and L2GD with 100, 200 and 500 local steps (Fig. 1b-d).

    size    small (n = 500 rows, 8 clients, 10 to 50 steps) or paper (n = 10000, 32 clients)
    rounds  how many
    """
    problem = _problem(size, "uniform", seed)
    variants = {}
    for tau in TAUS:
        steps = tau if size == "paper" else tau // 10
        for name, rule, work in rivals(problem, steps):
            variants[f"{name}-{steps}"] = _variant(
                problem, rule, rounds or _more(size, 30, 150), seed, **work
            )
    title = "Methods by local steps (Figure 1b-d)"
    return Study(variants, tables=lambda runs: [error_table(runs, title)])


def ffgg_heterogeneity(size: str = "small", rounds: int = 150, tau: int = 20, seed: int = 0) -> Study:
    """Do different data slow training down? FFGG and its rivals at heterogeneity ζ = 20, 40 and 80 (Fig. 2).

    FFGG also with twice as many local steps: a fresh random w leaves an error of the order (1 − μ_w/L_w)^τ.

    size    small (8 clients) or paper (32 clients); n = 1000 rows
    rounds  how many
    tau     local steps
    """
    variants = {}
    for zeta in ZETAS:
        problem = _problem(size, "heterogeneous", seed, zeta=float(zeta))
        longer = _descending(problem, 2 * tau)
        for name, rule, work in (*rivals(problem, tau), (f"ffgg-tau{2 * tau}", longer, {})):
            variants[f"{name}-zeta{zeta}"] = _variant(problem, rule, rounds, seed, **work)
    title = f"Error by heterogeneity, τ = {tau} (Figure 2)"
    return Study(variants, tables=lambda runs: [error_table(runs, title)])


def ffgg_byzantine(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """Can liars stop it? 10 of 42 clients flip the sign of their gradient; clients solve exactly (Fig. 4).

    `same`: one θ* fits all clients, each with a w* of its own (Assumption 2, which Theorem 4 needs); `own`:
    every client has its own θ*, so that honest gradients never agree and an error remains. `flip4` is a flip
    of four times the length: to a plain flip the mean still gives (32 − 10)/42 of the right step.

    size    small (matrices of appendix E.1, n = 1000 rows) or paper (section 5.1, n = 10000); 42 clients
    rounds  how many
    """
    variants = {}
    median = aggregate.bucketing(2, aggregate.coordinate_median())
    for name, kind in (("same", "overpersonalized"), ("own", "disagreeing")):
        zeta = 20.0 if size == "small" else None  # as hard as the paper's, but well conditioned
        problem = _problem(size, kind, seed, clients=42, zeta=zeta)
        for lie, scale in (("honest", 0.0), ("flip", 1.0), ("flip4", 4.0))[: 3 if name == "same" else 2]:
            lying = {"attack": attack.sign_flip(scale), "byzantine": range(32, 42)} if scale else {}
            for rule, combine in (("mean", aggregate.mean()), ("median", median)):
                method = ffgg_robust("w", problem.constants.gamma_theta, exact(), aggregate=combine)
                count = rounds or _more(size, 100, 2500)
                variants[f"{name}-{lie}-{rule}"] = _variant(problem, method, count, seed, **lying)
    title = "Ten of 42 clients flip signs (Figure 4)"
    return Study(variants, tables=lambda runs: [error_table(runs, title)])


def ffgg_async(
    size: str = "small", directions: int | None = None, factor: float = 1.0, seed: int = 0
) -> Study:
    """What do stale gradients cost? FFGG in step and asynchronously, 5 to 200 local steps (Fig. 3).

    Asynchronously all clients are at work, and the server takes a step of γ_θ/M on every arrival; in step it
    takes one of γ_θ along the mean of M gradients: as much for each gradient. Clients differ in speed. The
    paper's delays are those of its own machine. `same`: one θ* fits all clients (Assumption 2, which Theorem
    7 needs); `own`: every client has its own, so that slow clients count less and an error remains.

    size        small (10 clients, d_θ = 100) or paper (40 clients, d_θ = 400); n = 1000 rows, ζ = 10
    directions  gradients that the server receives in all
    factor      of the asynchronous step (the paper picks from 1/4 to 4)
    """
    few = check.choice("size", size, SIZES) == "small"
    clients, d_theta = (10, 100) if few else (40, 400)
    count = directions or (600 if few else 4000)
    lengths = delays(compute=gamma(0.01), speed=lognormal(1.0, 0.5))
    variants = {}
    for name, kind, taus in (("same", "overpersonalized", (5, 10, 50, 200)), ("own", "heterogeneous", (50,))):
        problem = data.quadratic(clients, kind=kind, n=1000, d_theta=d_theta, zeta=10.0, seed=seed)
        gamma_theta = problem.constants.gamma_theta
        for tau in taus:
            solver = gd(tau, problem.constants.gamma_w)
            in_step, stale = (
                ffgg("w", gamma_theta, solver),
                stale_ffgg("w", factor * gamma_theta / clients, solver),
            )
            variants[f"{name}-sync-{tau}"] = _variant(
                problem, in_step, count // clients, seed, schedule=synchronous(delays=lengths)
            )
            variants[f"{name}-async-{tau}"] = _variant(
                problem, stale, count, seed, schedule=asynchronous(delays=lengths)
            )
    return Study(variants, tables=lambda runs: [_directions(runs, clients)])


def rivals(problem: Quadratic, tau: int) -> list[tuple[str, Algorithm, dict[str, Any]]]:
    """FFGG by gradient descent and the paper's rivals with its step sizes, all with τ local steps."""
    c, clients = problem.constants, problem.data.clients
    p = 1 / tau
    # section 5.2 prints (2M)⁻¹ max{...}; a step is the inverse of a smoothness (Hanzely & Richtárik, 2020)
    alpha = clients / (2 * max(c.L_f / (1 - p), LAM / p))
    return [
        ("ffgg", _descending(problem, tau), {}),
        ("scaffold", scaffold(1 / (c.L_f * tau), server_lr=0.5), {"steps": tau}),
        ("local-gd", fedavg(1 / (c.L_f * tau), weighting="uniform"), {"steps": tau}),
        ("l2gd", l2gd(alpha, LAM, p), {}),
    ]


def _descending(problem: Quadratic, tau: int) -> Algorithm:
    c = problem.constants
    return ffgg("w", c.gamma_theta, gd(tau, c.gamma_w))


def _problem(size: str, kind: str, seed: int, clients: int = 32, zeta: float | None = None) -> Quadratic:
    paper = check.choice("size", size, SIZES) == "paper"
    rows = 1000 if zeta is not None else (500, 10000)[paper]
    count = clients if paper or clients != 32 else 8
    return data.quadratic(count, kind=kind, n=rows, zeta=zeta, seed=seed)


def _variant(problem: Quadratic, rule: Algorithm, rounds: int, seed: int, **more: Any) -> Variant:
    """Full batches, everyone in every round, ‖F(θ)‖ a hundred times; that of the start is in config.json."""
    model = problem.model(seed)
    honest = [m for m in range(problem.data.clients) if m not in more.get("byzantine", ())]
    start = float(problem.F(model.theta)[honest].mean(0).norm())
    source = replace(problem.data, source={**problem.data.source, "gradient_norm_at_start": start})
    return Variant(
        Experiment(
            model=model,
            data=source,
            algorithm=rule,
            rounds=rounds,
            seed=seed,
            loss=problem.loss,
            metric="loss",
            baselines=False,
            evaluate_every=max(1, rounds // POINTS),
            checkpoint_every=0,
            measures=[gradient_norm("w", exact())],
            **more,
        )
    )


def _more(size: str, small: int, paper: int) -> int:
    return paper if size == "paper" else small


def errors(run: Record) -> np.ndarray:
    """‖F(θ)‖ relative to the start, at each evaluation."""
    start = run.config["data"]["source"]["gradient_norm_at_start"]
    totals = [row["measures"]["gradient_norm"]["total"] for row in run.metrics]
    found: np.ndarray = np.array([np.inf if t is None else t for t in totals]) / start
    return found


def error_table(runs: Runs, title: str) -> Table:
    def first(run: Record, level: float) -> float:
        below = np.flatnonzero(errors(run) <= level)
        return float(run.metrics[below[0]]["round"]) if len(below) else float("nan")

    rows = []
    for name, seeds in runs.items():
        last = np.log10([np.clip(errors(run)[-1], 1e-300, 1e300) for run in seeds])
        norms = [errors(run)[-1] * run.config["data"]["source"]["gradient_norm_at_start"] for run in seeds]
        reached = [mean_std([first(run, level) for run in seeds], digits=0) for level in (1e-4, 1e-6, 1e-10)]
        rows.append(
            (name, _short(10 ** last.mean()), _short(10 ** last.max()), _short(np.median(norms)), *reached)
        )
    columns = ("variant", "last error", "worst seed", "last ‖F‖", "rounds to 1e-4", "to 1e-6", "to 1e-10")
    note = (
        "Error: ‖F(θ)‖ relative to the start, the geometric mean over seeds; ‖F‖: the median over seeds; "
        "rounds: to the first of about a hundred evaluations below it, - if there is none."
    )
    return Table(title, columns, rows, note)


def _directions(runs: Runs, clients: int) -> Table:
    """Errors by the number of gradients that the server has received; staleness and time."""
    rows = []
    for name, seeds in runs.items():
        each = clients if "-sync-" in name else 1
        last = 10 ** np.mean([np.log10(max(errors(run)[-1], 1e-300)) for run in seeds])
        found = []
        for level in (1e-1, 1e-2, 1e-4):
            below = [np.flatnonzero(errors(run) <= level) for run in seeds]
            at = [run.metrics[b[0]]["round"] * each if len(b) else np.nan for run, b in zip(seeds, below)]
            found.append(mean_std(at, digits=0))
        clock = [run.summary()["clock"] for run in seeds]
        age = [mean_std([c["staleness"][k] for c in clock], digits=0) for k in ("mean", "max")]
        rows.append((name, _short(last), *found, *age, mean_std([c["time"] for c in clock], digits=0)))
    columns = ("variant", "error", "to 1e-1", "to 1e-2", "to 1e-4", "stale", "most", "time")
    note = (
        "Error: ‖F(θ)‖ relative to the start, at the end; to: gradients that the server had received by the "
        "first of about a hundred evaluations below it; stale, most: mean and largest staleness."
    )
    return Table("In step and asynchronously (Figure 3)", columns, rows, note)


def _short(value: float) -> str:
    return f"{value:.1e}" if value < 1e100 else "diverged"
