"""What a method's name stands for where it is chosen by that alone: on the command line, in a comparison.

Most names are functions that make the method. Fine-tuning needs a trained model, so by its name it is

    (a) fedavg      as many rounds as the run has
    (b) finetune    every client, five passes over its data

A model that was trained elsewhere is fine-tuned by `partita.finetune(...)` in Python. A personal part or a
penalty that nobody has chosen is the one of the examples: the output layer, `psi.avg(0.1)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from partita.algorithms.base import METHODS
from partita.algorithms.fedavg import fedavg
from partita.algorithms.finetune import finetune
from partita.algorithms.pipeline import pipeline, stage
from partita.core.options import declared, signature
from partita.core.parts import Algorithm

EPOCHS = 5  # as in Pillutla et al. (2022), appendix B; more of them hardly change the score of the digits


def by_name(name: str, **options: Any) -> Algorithm:
    """Return the method of this name with these options."""
    if name == finetune.__name__:
        return after_fedavg(**options)
    return METHODS[name](**{**_examples(METHODS[name]), **options})


def _examples(method: Callable[..., Algorithm]) -> dict[str, Any]:
    """Return examples of what is needed and no number: those depend on the data."""
    needed = {
        k: declared(p.annotation)[1]
        for k, p in signature(method).parameters.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }
    return {k: option.example for k, option in needed.items() if option.search is None}


def after_fedavg(**options: Any) -> Algorithm:
    """Return fedavg followed by fine-tuning with these options of `finetune`, which both share.

    Without `personal`, the whole model is tuned. It keeps the name and the options of `finetune`.
    """
    tuned = finetune(**{"personal": "all", **options})
    known = inspect.signature(fedavg).parameters
    trained = fedavg(**{k: v for k, v in tuned.options.items() if k in known})
    both = pipeline(trained, stage(tuned, epochs=EPOCHS))
    return replace(both, name=tuned.name, options={**tuned.options, **both.options})
