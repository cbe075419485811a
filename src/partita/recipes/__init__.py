"""Experiments ready to run: each is a function that returns an `Experiment` or a `Study`.

To add one, write a file with its function here, and a line in RECIPES. A user's own Python file with a
function `experiment()` works in the same way.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from partita.core import check
from partita.recipes.bytes import bytes_utility
from partita.recipes.byzantine import byzantine
from partita.recipes.digits import digits
from partita.recipes.embracing import embracing_capacity
from partita.recipes.experiment import Experiment, blamed
from partita.recipes.fedplus import (
    fedplus_collapse,
    fedplus_mnist,
    fedplus_regression,
    fedplus_stragglers,
    fedplus_synthetic,
)
from partita.recipes.lora import lora
from partita.recipes.memory import partial_memory
from partita.recipes.offices import offices
from partita.recipes.partial import partial_harm, partial_splits
from partita.recipes.persafl import persafl_cifar, persafl_mnist
from partita.recipes.privacy import privacy_utility
from partita.recipes.quadratic import (
    ffgg_async,
    ffgg_byzantine,
    ffgg_heterogeneity,
    ffgg_methods,
    ffgg_solver,
)
from partita.recipes.real import ffgg_real
from partita.recipes.similarity import embracing_svcca
from partita.recipes.step_time import embracing_time
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Table
from partita.recipes.weak import embracing_mix, embracing_norm, embracing_scaling

Recipe = Callable[..., Experiment | Study]
RECIPES: dict[str, Recipe] = {
    "digits": digits,
    "offices": offices,
    "byzantine": byzantine,
    "bytes-utility": bytes_utility,
    "lora": lora,
    "privacy-utility": privacy_utility,
    "partial-splits": partial_splits,
    "partial-harm": partial_harm,
    "partial-memory": partial_memory,
    "ffgg-solver": ffgg_solver,
    "ffgg-methods": ffgg_methods,
    "ffgg-heterogeneity": ffgg_heterogeneity,
    "ffgg-async": ffgg_async,
    "ffgg-byzantine": ffgg_byzantine,
    "ffgg-real": ffgg_real,
    "persafl-mnist": persafl_mnist,
    "persafl-cifar": persafl_cifar,
    "fedplus-mnist": fedplus_mnist,
    "fedplus-regression": fedplus_regression,
    "fedplus-synthetic": fedplus_synthetic,
    "fedplus-stragglers": fedplus_stragglers,
    "fedplus-collapse": fedplus_collapse,
    "embracing-capacity": embracing_capacity,
    "embracing-scaling": embracing_scaling,
    "embracing-mix": embracing_mix,
    "embracing-norm": embracing_norm,
    "embracing-svcca": embracing_svcca,
    "embracing-time": embracing_time,
}

TASK = ("femnist", "shakespeare", "free_spoken_digits")  # the first is the default
NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "byzantine": ("", ("femnist",)),
    "bytes-utility": ("", ("femnist",)),
    "lora": ("", ("shakespeare",)),
    "privacy-utility": ("", ("femnist",)),
    "partial-splits": ("data", TASK),
    "partial-harm": ("data", TASK),
    "ffgg-real": ("data", TASK),
    "persafl-mnist": ("", ("mnist",)),
    "persafl-cifar": ("", ("cifar10",)),
    "fedplus-mnist": ("", ("mnist",)),
    "fedplus-stragglers": ("data", ("mnist", "femnist")),
    "embracing-scaling": ("", ("cifar10",)),
    "embracing-mix": ("task", ("cifar10", "femnist", "imdb")),
    "embracing-norm": ("", ("cifar10",)),
    "embracing-svcca": ("task", ("cifar10", "femnist", "imdb")),
}
"""The real datasets of recipes; of several, the argument that is named first chooses one."""

__all__ = ["NEEDS", "RECIPES", "Experiment", "Recipe", "Study", "Table", "Variant", "find"]


def find(name: str) -> Recipe:
    """Return the recipe of this name, or the function `experiment` of this Python file."""
    if name in RECIPES:
        return RECIPES[name]
    path = Path(name)
    if path.suffix != ".py":
        names = ", ".join(RECIPES)
        raise check.fail("recipe", name, f"one of {names}, or a Python file{check.meant(name, RECIPES)}")
    if not path.is_file():
        raise check.fail("recipe", name, "a Python file that exists")
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does
    with blamed(name):
        recipe = runpy.run_path(str(path)).get("experiment")
    if not callable(recipe):
        raise check.fail("recipe", name, "a file with a function experiment() that returns an Experiment")
    return recipe  # type: ignore[no-any-return]
