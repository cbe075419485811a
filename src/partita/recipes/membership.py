"""`partita.membership`: does the released model tell who has trained it? A test with shadow runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.api import Run
from partita.core import check
from partita.core.device import arithmetic
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.engine.evaluate import scored
from partita.engine.initial import own_copy
from partita.engine.lockstep.runs import in_lockstep
from partita.engine.newcomers import among, arrive, usual_effort
from partita.engine.state import has_global
from partita.privacy.membership import (
    Array,
    Share,
    advantage,
    auc,
    auc_interval,
    decided,
    halves,
    most_true_positives,
    true_positives,
)
from partita.recipes.comparison import Model, aligned, as_html, described
from partita.recipes.experiment import Experiment
from partita.recipes.in_lockstep import can_be_joined
from partita.recipes.tables import Table

LEAST_RUNS, LEAST_CLIENTS = 6, 8
FALSE_POSITIVES = (0.1, 0.01)
TESTS = ("loss", "calibrated", "ratio")


@dataclass(frozen=True, eq=False, repr=False)
class Membership:
    """What `partita.membership` returns: how well each test tells members from others.

    names    of the clients that have training samples
    score    [runs, clients], −(mean loss) under the model that each run has released
    member   [runs, clients], who took part
    found    [runs, clients] of each test: 'loss', 'calibrated' and 'ratio'; larger for members
    privacy  what the runs say of their privacy, such as {'epsilon': 2.0}; empty where they do not
    """

    names: list[str]
    score: Array
    member: NDArray[np.bool_]
    found: dict[str, Array]
    privacy: dict[str, float]

    def decisions(self, test: str = "ratio") -> tuple[Array, Array]:
        """Return what a test says of members and of others, all runs together."""
        found = self.found[check.choice("test", test, TESTS)]
        return found[self.member], found[~self.member]

    def auc(self, test: str = "ratio") -> Share:
        """Return the chance that a member is above another client, 0.5 for a test that knows nothing.

        The interval is as wide as if every client had been decided on once: what several runs say of a client
        is not independent.
        """
        value, clients = auc(*self.decisions(test)).value, len(self.names) / 2
        return Share(value, *auc_interval(value, clients, clients))

    def advantage(self, test: str = "ratio") -> float:
        """Return TPR − FPR where half of the clients are called members."""
        return advantage(*self.decisions(test)).value

    def true_positives(self, fpr: float, test: str = "ratio") -> float | None:
        """Return the share of members found with at most this share of false ones (None: too few clients)."""
        return true_positives(*self.decisions(test), check.number("fpr", fpr, low=0, high=1))

    def bound(self, fpr: float, epsilon: float | None = None, delta: float | None = None) -> float:
        """Return the largest share of members that any test finds under (ε, δ), by default the runs' own."""
        known = self.privacy.get("epsilon")
        if epsilon is None and known is None:
            raise check.fail("epsilon", None, "a number: the runs have no account of their privacy")
        chosen = known if epsilon is None else check.number("epsilon", epsilon, low=0)
        assert chosen is not None
        return most_true_positives(fpr, chosen, self.privacy.get("delta", 0.0) if delta is None else delta)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each test, with plain numbers."""
        rows = []
        for test in TESTS:
            area = self.auc(test)
            row = {"test": test, "auc": area.value, "auc_low": area.low, "auc_high": area.high}
            row["advantage"] = self.advantage(test)
            rows.append(row | {f"tpr_at_{fpr:g}": self.true_positives(fpr, test) for fpr in FALSE_POSITIVES})
        return rows

    def _figure(self) -> Table:
        head = (
            "test",
            "AUC",
            "95 % interval",
            "advantage",
            *(f"TPR at {f:.0%} FPR" for f in FALSE_POSITIVES),
        )
        lines = []
        for row in self.table():
            shares = [row[f"tpr_at_{f:g}"] for f in FALSE_POSITIVES]
            cells = [f"{row['auc']:.3f}", f"{row['auc_low']:.3f} to {row['auc_high']:.3f}"]
            cells += [f"{row['advantage']:+.3f}", *("-" if x is None else f"{x:.3f}" for x in shares)]
            lines.append((row["test"], *cells))
        if "epsilon" in self.privacy:
            bounds = [f"{self.bound(f):.3f}" for f in FALSE_POSITIVES]
            lines.append((f"most by ε = {self.privacy['epsilon']:.3g}", "-", "-", "-", *bounds))
        runs, clients = self.member.shape
        note = "a test that knows nothing has AUC 0.5, advantage 0, and finds as many members as others"
        return Table(
            f"Who took part? {runs} runs, {clients} clients, each in half of them", head, lines, note
        )

    def __str__(self) -> str:
        return aligned(self._figure())

    def __repr__(self) -> str:
        return f"Membership of {len(self.names)} clients\n{self}"

    def _repr_html_(self) -> str:
        return as_html(self._figure())


@check.each_warning_once()
def membership(
    model: Model,
    data: FederatedData,
    algorithm: Algorithm,
    *,
    runs: int = 8,
    alone: bool = False,
    **settings: Any,
) -> Membership:
    """Test whether the released model tells which clients have trained it, by the likelihood ratio of LiRA.

    Each of `runs` trains with half of the clients, drawn by chance, so that every client is in half of the
    runs. Each run in turn is attacked, with the others as shadows, by who knows the samples of a client, the
    method and the initial weights, and sees the model at the end: another client, a user, or the server.
    Where clients keep a part of the model, the attacker finds one for each client by the method's own rule,
    as `Run.personalize` does.

    runs      how many, an even number from 6 on; more make the likelihoods more certain
    alone     make one run after another; by default they train as one batch
    settings  further arguments of `federate`, for runs with half of the clients

        found = pt.membership(model, data, pt.fedavg(lr=0.1), rounds=30, steps=5, batch=16)
        print(found)
        print(found.auc("ratio"))
    """
    if check.integer("runs", runs, low=LEAST_RUNS) % 2:
        raise check.fail("runs", runs, "an even number: every client is in half of the runs")
    if "newcomers" in settings:
        raise check.fail("newcomers", settings["newcomers"], "none: half of the clients are held out")
    if not isinstance(algorithm, Algorithm):
        raise check.fail("algorithm", algorithm, "a method such as partita.fedavg(lr=0.1)")
    able = _with_samples(data)
    experiment, options = described(model, data, {"method": algorithm}, settings)
    listen, _ = options.pop("listen"), options.pop("announce", None)
    experiment = replace(experiment, model=own_copy(experiment.model, experiment.seed))
    member = halves(able.clients, runs, experiment.seed)
    tasks: list[Callable[[], tuple[Array, dict[str, float]]]] = []
    for number, chosen in enumerate(member):
        seed = experiment.seed + number
        own = replace(experiment, data=able.subset(np.flatnonzero(chosen).tolist()), seed=seed)
        shown = {} if not number else {"progress": False}  # one bar for all
        arguments = {"callbacks": listen(None), **options, **shown}
        tasks.append(functools.partial(_released, own, able, arguments))
    if not alone and can_be_joined(runs, listen, options):
        exactly = {k: options[k] for k in ("precision", "deterministic") if k in options}
        results = in_lockstep(tasks, **exactly)
    else:
        results = [task() for task in tasks]
    score = np.stack([of_run for of_run, _ in results])
    if not np.isfinite(score).all():
        reason = "the loss of a client under a released model is not finite"
        raise check.fail("lr", "these step sizes", "smaller ones, so that no run diverges", reason)
    return Membership(list(able.names), score, member, decided(score, member), results[0][1])


def _with_samples(data: Any) -> FederatedData:
    """Return the clients with training samples; refuse too few of them."""
    if not isinstance(data, FederatedData):
        raise check.fail("data", data, "a FederatedData, made by partita.data.from_arrays(...) or the like")
    able = np.flatnonzero(data.sizes() > 0)
    if len(able) < LEAST_CLIENTS:
        reason = f"{len(able)} clients have training samples, half of which take part"
        raise check.fail("data", f"{data.clients} clients", f"at least {LEAST_CLIENTS} with samples", reason)
    return data if len(able) == data.clients else data.subset(able.tolist())


def _released(
    experiment: Experiment, everyone: FederatedData, arguments: dict[str, Any]
) -> tuple[Array, dict[str, float]]:
    """Train with some of the clients; return the score of all of them, and what the run says of privacy."""
    run = experiment.run(baselines=False, report=False, **arguments)
    account = run.metrics[-1].get("privacy") or {} if run.metrics else {}
    privacy = {k: float(v) for k, v in account.items() if isinstance(v, int | float)}
    for transform in experiment.uploads:
        if "delta" in transform.options and transform.options["delta"] is not None:
            privacy.setdefault("delta", float(transform.options["delta"]))
    return -_losses(run, everyone), privacy


def _losses(run: Run, everyone: FederatedData) -> Array:
    """Return the mean loss of each client's training samples under the model that a run has released."""
    assert run.outcome is not None
    stage, state = run.outcome.stage, run.outcome.state
    settings = stage.setup.settings
    with arithmetic(settings.precision, settings.deterministic):
        if has_global(stage, state):
            stage, state = among(stage, state, everyone)
            return scored(stage, state, "global", "train").loss
        stage, state, *_ = arrive(stage, state, everyone, usual_effort(stage, state))
        return scored(stage, state, "personal", "train").loss
