"""Federated fine-tuning with LoRA: which factors of the adapters to share, on text by role.

W x + (α/r) B A x        W is frozen; A begins at random, B at zero

base      the model that all others begin with, trained on the text of other roles
alone     A and B of each client alone
shared    A and B are averaged (FedIT, Zhang et al. 2024)
ranks     as shared, with a quarter of the rank for half of the clients (after HetLoRA, Cho et al. 2024)
ffa       B is averaged, A stays as it was drawn (FFA-LoRA, Sun et al. 2024)
fedsa     A is averaged, B is personal (FedSA-LoRA, Guo et al. 2024)
personal  A and B are personal; the normalization layers are trained as well, and averaged (FedSim)
ditto     A and B are averaged; each client has a pair of its own, pulled towards them (Ditto)
full      no adapters: all of W is trained and averaged (FedAvg)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partita import capacity, data, models, optim
from partita.algorithms import ditto, fedavg, fedsim
from partita.algorithms.alone import local
from partita.core import check
from partita.core.options import Option, checked
from partita.data import FederatedData, columns
from partita.engine.record import Record
from partita.models import Blocks
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, mean_std, score

LENGTH, LETTERS, SHORTEST = 80, 76, 5000  # characters of a sample, of the alphabet, and at least of a role
OTHERS, REFERENCES = "other roles", ("shared", "alone")
BASE_LR, BASE_STEPS, BASE_BATCH = 3e-3, 50, 16


class Size(NamedTuple):
    """The clients, the model, and the rounds for the base model and for the adapters."""

    clients: int
    width: int
    depth: int
    base_rounds: int
    rounds: int


SIZES = {"small": Size(12, 64, 2, 60, 12), "medium": Size(100, 192, 6, 200, 40)}


@checked()
def lora(
    size: Annotated[
        str,
        Option(
            "small: minutes on two cores, medium: a larger model and more roles, for a GPU",
            choices=tuple(SIZES),
        ),
    ] = "small",
    clients: Annotated[
        int | None, Option("roles that adapt the model (default: 12 or 100 by size)", low=1)
    ] = None,
    rank: Annotated[int, Option("rank of the adapters", low=1)] = 8,
    lr: Annotated[float, Option("step size of AdamW for what is shared", low=0, open_low=True)] = 3e-3,
    personal_lr: Annotated[
        float, Option("step size of AdamW for personal adapters", low=0, open_low=True)
    ] = 1e-3,
    full_lr: Annotated[
        float, Option("step size of AdamW where the whole model is trained", low=0, open_low=True)
    ] = 3e-4,
    lam: Annotated[
        float, Option("λ of Ditto: how strongly personal adapters are pulled to the shared ones", low=0)
    ] = 0.1,
    rounds: Annotated[int | None, Option("rounds with adapters (default: 12 or 40 by size)", low=1)] = None,
    base_rounds: Annotated[
        int | None, Option("rounds of 50 steps for the base model (default: 60 or 200 by size)", low=1)
    ] = None,
    seed: int = 0,
) -> Study:
    """Which factors of LoRA should clients share? Five ways to fine-tune a frozen model on text by role.

    The model predicts the next character, and was trained on Shakespeare's other roles before. All variants
    take as many local steps, Ditto as many for each of its two pairs; each keeps the model of the round with
    the best perplexity on validation samples.
    """
    amount = SIZES[size]
    adapting, others = _roles(clients or amount.clients)
    width = amount.width
    base = models.transformer(
        LETTERS, length=LENGTH, width=width, hidden=4 * width, depth=amount.depth, seed=seed
    )
    common = Experiment(
        model=base,
        data=adapting,
        algorithm=fedavg(full_lr, optimizer=optim.adamw()),
        rounds=rounds or amount.rounds,
        keep="best",
        evaluate_every=1,
        steps=10,
        batch=8,
        seed=seed,
        metric=["perplexity", "accuracy"],
        baselines=False,
    )
    before = replace(
        common,
        data=others,
        algorithm=fedavg(optim.linear(BASE_LR), optimizer=optim.adamw(), optimizer_state="keep"),
        rounds=base_rounds or amount.base_rounds,
        keep="last",
        evaluate_every=None,
        steps=BASE_STEPS,
        batch=BASE_BATCH,
    )
    return Study(
        {"base": Variant(before), **_variants(common, base, rank, lr, personal_lr, lam)},
        tables=lambda runs: [_overall(runs), _by_role(runs)],
    )


def _variants(
    common: Experiment, base: Blocks, rank: int, lr: float, personal_lr: float, lam: float
) -> dict[str, Variant]:
    """Return what begins with the base model, compared with shared adapters and with adapters alone."""
    adapted = models.add_adapters(base, "lora", rank=rank, seed=common.seed)
    adam = optim.adamw()
    lora_only = models.freeze(adapted, but="adapter")
    factors = replace(common, model=lora_only, algorithm=fedavg(lr, optimizer=adam))
    held = capacity.rank({"strong": rank, "weak": max(1, rank // 4)})
    experiments = {
        "alone": replace(factors, algorithm=local(personal_lr, optimizer=adam)),
        "shared": factors,
        "ranks": replace(factors, capacity=held),
        "ffa": replace(factors, model=models.freeze(lora_only, "*lora_A*")),
        "fedsa": replace(factors, algorithm=fedsim("*lora_B*", lr, personal_lr, optimizer=adam)),
        "personal": replace(
            factors,
            model=models.freeze(adapted, but=["adapter", "*norm*"]),
            algorithm=fedsim("adapter", lr, personal_lr, optimizer=adam),
        ),
        "ditto": replace(factors, algorithm=ditto(lr, lam, personal_lr, optimizer=adam)),
        "full": common,
    }
    references = {"local": "alone", "global": "shared"}
    made: dict[str, Variant] = {}
    for name, experiment in experiments.items():
        known = {kind: other for kind, other in references.items() if other in made}
        made[name] = Variant(experiment, start="base", baselines=known)
    return made


# ---- data


def _roles(clients: int) -> tuple[FederatedData, FederatedData]:
    """Return the roles with most text, which adapt the model, and the data of the base model.

    The latter is the text of all other roles as one client, beside the test samples of the adapting ones.
    """
    everyone = data.real("shakespeare", min_characters=SHORTEST, length=LENGTH)
    x = columns.in_memory(everyone.x, "Shakespeare")
    check.integer("clients", clients, low=1, high=everyone.clients - 1)  # the base model needs others
    order = np.argsort(-everyone.sizes("train"), kind="stable")
    adapting, rest = np.sort(order[:clients]), np.sort(order[clients:])
    read = [_rows(everyone, i, split) for i in rest for split in ("train", "validation", "test")]
    tests = [_rows(everyone, i, "test") for i in adapting]
    rows = np.concatenate([*read, *tests])
    lengths = [sum(map(len, read)), *map(len, tests)]
    names = np.repeat([OTHERS, *(everyone.names[i] for i in adapting)], lengths)
    held_out = np.arange(len(rows)) >= lengths[0]
    source = {**everyone.source, "name": "shakespeare, other roles", "adapting": adapting.tolist()}
    others = data.from_arrays(x[rows], everyone.y[rows], names, test=held_out, validation=0, source=source)
    return everyone.subset(adapting.tolist()), others


def _rows(everyone: FederatedData, client: int, split: str) -> NDArray[np.int64]:
    start, length = everyone.ranges(split)[client]
    return np.arange(start, start + length)


# ---- tables


def _overall(runs: Runs) -> Table:
    """Return a row for each variant: scores, who is worse off than with a reference, and what is sent."""
    rows = []
    for name, seeds in runs.items():
        worse = [_worse(seeds, runs[other]) if name not in ("base", other) else "-" for other in REFERENCES]
        sent = "-" if name == "base" else f"{_kilobytes(seeds[0]):.1f}"
        rows.append((name, score(seeds, scale=1, digits=3), _accuracy(seeds), *worse, sent))
    columns = ("variant", "perplexity", "accuracy, %", "worse than shared", "worse than alone", "kB sent")
    clients = len(runs["shared"][0].names)
    note = (
        f"Means over the test samples of {clients} roles. The perplexity is that of characters; lower is "
        "better. Worse: roles with a higher perplexity than with shared adapters, or with adapters alone. "
        "Sent: by a client in a round."
    )
    return Table("LoRA by what is shared", columns, rows, note)


def _by_role(runs: Runs) -> Table:
    """Return the perplexity of each role under each variant."""
    names = runs["shared"][0].names
    columns = [[_perplexity(run) for run in seeds] for seeds in runs.values()]
    rows = [
        (name, *(mean_std((scores[name] for scores in seeds), digits=3) for seeds in columns))
        for name in names
    ]
    return Table("Perplexity by role", ("role", *runs), rows)


def _perplexity(run: Record) -> dict[str, float]:
    return dict(zip(run.names, map(float, run.scores("personal"))))


def _accuracy(seeds: Sequence[Record]) -> str:
    return mean_std((run.summary()["metrics"]["accuracy"]["test"]["personal"] for run in seeds), 100, 1)


def _worse(seeds: Sequence[Record], references: Sequence[Record]) -> str:
    """Return how many roles have a higher perplexity than in the run of the same seed."""
    pairs = [(_perplexity(run), _perplexity(other)) for run, other in zip(seeds, references)]
    return mean_std((sum(own[name] > other[name] for name in other) for own, other in pairs), digits=0)


def _kilobytes(run: Record) -> float:
    """Return what a client sends in a round, when all take part."""
    facts = run.summary()
    sent: float = facts["bytes_up"] / facts["rounds"] / len(run.names)
    return sent / 1000
