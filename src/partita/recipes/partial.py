"""Federated Learning with Partial Model Personalization: Pillutla et al. (2022).

    (a) fedavg                      a global model
    (b) fedalt or fedsim            u shared, v_i personal, from (a)'s model
    (c) fine-tuning                 v_i alone

`partial-splits` compares the personal parts and the methods (Tables 2, 4, 12-14, Figure 4), `partial-harm`
looks at every client's change (Figures 5-11).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Unpack

from partita import models
from partita.algorithms import METHODS, fedavg, finetune, pfedme, pipeline, stage
from partita.algorithms.pfedme import INNER_STEPS
from partita.core.options import Option, checked
from partita.core.parts import Algorithm
from partita.recipes.experiment import Experiment
from partita.recipes.partial_charts import harm_charts, splits_charts
from partita.recipes.partial_tables import harm_tables, splits_tables
from partita.recipes.study import Study, Variant
from partita.recipes.tasks import Task, TaskOptions, task, with_dropout

SPLITS = ("input", "output", "adapter")
PULLS = (0.001, 0.1, 1.0, 10.0)
DROPOUTS = (0.3, 0.6)


@checked()
def partial_splits(
    stateless: Annotated[
        bool, Option("also train clients that forget their personal part between rounds (Tables 13 and 14)")
    ] = False,
    seed: int = 0,
    **options: Unpack[TaskOptions],
) -> Study:
    """Which part should be personal, and how to train it? Partial against full personalization.

    "ditto" is fine-tuning with an ℓ2 pull, as in the paper.
    """
    t = task(seed, **options)
    variants = {
        "fedavg": Variant(first_stage(t, seed)),
        "finetune": later(t, seed, "all", tuned(t, "all")),
        "ditto": later(t, seed, "all", tuned(t, "all", t.ditto)),
        "pfedme": later(t, seed, "all", moreau(t)),
    }
    for part in SPLITS:
        variants[f"finetune-{part}"] = later(t, seed, part, tuned(t, part))
        for method in ("fedalt", "fedsim"):
            variants[f"{method}-{part}"] = later(t, seed, part, trained(t, method, part))
            if stateless:
                forgets = trained(t, method, part, state="reset")
                variants[f"{method}-{part}-stateless"] = later(t, seed, part, forgets)
    return Study(variants, tables=lambda runs: splits_tables(runs, SPLITS, stateless), charts=splits_charts)


@checked()
def partial_harm(
    every_part: Annotated[bool, Option("also a personal input part, and each part by FedSim")] = False,
    seed: int = 0,
    **options: Unpack[TaskOptions],
) -> Study:
    """Whom does personalization hurt? Each client's change on its training and its test data.

    Full fine-tuning, a personal output part and adapters; adapters also with a pull (μ/2)‖v_i − v⁰‖² on the
    personal part, the output part also with dropout in it, neither of which helped in the paper.
    """
    t = task(seed, **options)
    variants = {
        "fedavg": Variant(first_stage(t, seed)),
        "finetune": later(t, seed, "all", tuned(t, "all")),
    }
    for part in SPLITS if every_part else ("output", "adapter"):
        for method in ("fedalt", "fedsim") if every_part else ("fedalt",):
            variants[f"{method}-{part}"] = later(t, seed, part, trained(t, method, part))
    for mu in PULLS:
        pulled = trained(t, "fedalt", "adapter", personal_l2=mu)
        variants[f"fedalt-adapter-l2-{mu:g}"] = later(t, seed, "adapter", pulled)
    for p in DROPOUTS:
        dropped = replace(t, model=with_dropout(t.model, p))
        variants[f"fedalt-output-dropout-{p:g}"] = later(
            dropped, seed, "output", trained(t, "fedalt", "output")
        )
    return Study(variants, tables=harm_tables, charts=harm_charts)


# ---- the three stages


def first_stage(t: Task, seed: int) -> Experiment:
    """Return stage (a)."""
    return Experiment(
        model=t.model,
        data=t.data,
        algorithm=fedavg(t.lr[0], server=t.server[0], max_grad_norm=t.max_grad_norm),
        rounds=t.rounds[0],
        cohort=t.cohort,
        epochs=1,
        batch=t.batch,
        seed=seed,
        baselines=False,
        train_scores=True,
    )


def trained(t: Task, method: str, part: str, state: str = "keep", personal_l2: float = 0.0) -> Algorithm:
    """Return stage (b), and (c) on the same part."""
    train = METHODS[method](
        part, t.lr[1], personal_l2=personal_l2, server=t.server[1], max_grad_norm=t.max_grad_norm
    )
    return pipeline(
        stage(train, rounds=t.rounds[1], state=state), stage(tuned(t, part, personal_l2), epochs=t.epochs)
    )


def moreau(t: Task) -> Algorithm:
    """Return stage (b) by pFedMe, and (c) from the shared model that it ends with (appendix B.2).

    The paper gives λ alone. The inner steps have the client's rate of stage (b), and the outer one is
    η = 1/(λK): each moves w by the mean of its K inner steps. With η that rate too, η λ would be so small
    that w stays where it is.
    """
    train = pfedme(
        1 / (t.pfedme * INNER_STEPS),
        t.pfedme,
        inner_lr=t.lr[1],
        inner_steps=INNER_STEPS,
        weighting="samples",
        max_grad_norm=t.max_grad_norm,
    )
    return pipeline(
        # its clients begin each round with the shared model; forgetting θ̃ makes (c) begin with it too
        stage(train, rounds=t.rounds[1], state="reset"),
        stage(tuned(t, "all"), epochs=t.epochs),
    )


def tuned(t: Task, part: str, personal_l2: float = 0.0) -> Algorithm:
    """Return the method of stage (c)."""
    return finetune(part, t.lr[2], personal_l2, max_grad_norm=t.max_grad_norm)


def later(t: Task, seed: int, part: str, method: Algorithm) -> Variant:
    """Return what begins with stage (a)'s model and is compared with it."""
    experiment = replace(
        first_stage(t, seed),
        model=models.add_adapters(t.model, t.adapters, seed=seed) if part == "adapter" else t.model,
        algorithm=method if method.stages else pipeline(stage(method, epochs=t.epochs)),
        rounds=None,
        evaluate_every=max(1, t.rounds[1] // 5),
        baselines=True,
    )
    return Variant(experiment, start="fedavg", baselines={"global": "fedavg"})
