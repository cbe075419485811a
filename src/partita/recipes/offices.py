"""Offices that sort handwritten digits: some write them in a code of their own, some have just opened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from partita import data, models
from partita.algorithms import fedalt
from partita.core import check, draws
from partita.data import FederatedData
from partita.recipes.experiment import Experiment


def offices(
    clients: int = 20, codes: int = 6, new: int = 4, samples: int = 8, test: float = 0.4, seed: int = 0
) -> Experiment:
    """Scikit-learn's digits in offices of which it is known who should gain and who should lose.

    clients  offices; all see the ten digits
    codes    of them, those that label the digits by a code of their own: no global model can know it
    new      of them, those that have just opened and have few labelled `samples` to learn anything from

    The output layer is personal: it can learn a code, but only from the samples of its own office.
    """
    check.integer("codes", codes, low=0, high=clients)
    check.integer("new", new, low=0, high=clients - codes)
    check.integer("samples", samples, low=1)
    dealt = data.digits(clients, data.iid(), test=test, seed=seed)
    return Experiment(
        model=models.mlp(64, 64, 10, seed=seed),
        data=_told_apart(dealt, codes, new, samples, seed),
        algorithm=fedalt(personal="output", lr=0.1, personal_lr=0.3),
        rounds=500,
        until="converged",
        evaluate_every=10,
        cohort=max(1, clients // 2),
        steps=5,
        batch=16,
        seed=seed,
    )


def _told_apart(dealt: FederatedData, codes: int, new: int, samples: int, seed: int) -> FederatedData:
    """Give the first offices a code each, and leave the next ones few samples."""
    y, train, classes = dealt.y.clone(), dealt.train.copy(), int(dealt.y.max()) + 1
    for office in range(codes):
        code = draws.generator(seed, "code", office).permutation(classes)
        for start, length in (dealt.ranges(split)[office] for split in ("train", "validation", "test")):
            rows = slice(int(start), int(start + length))
            y[rows] = torch.from_numpy(code).to(y.dtype)[y[rows].long()]
    opened = slice(codes, codes + new)
    train[opened, 1] = np.minimum(train[opened, 1], samples)
    plain = dealt.clients - codes - new
    kinds = {"code": codes, "new": new, "plain": plain}
    names = [f"{kind}-{i + 1}" for kind, number in kinds.items() for i in range(number)]
    about = {"name": "offices", "codes": codes, "new": new, "samples": samples, "digits": dealt.source}
    return replace(dealt, y=y, train=train, names=tuple(names), source=about)
