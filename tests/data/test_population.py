"""Names and counts of clients whose samples nobody has to hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from partita.core.check import Refused
from partita.data import FederatedData, Population


def test_a_population_of_data() -> None:
    data = FederatedData.make(np.ones((9, 2)), np.zeros(9, int), [(0, 2), (2, 4)], [(6, 3), (9, 0)])
    population = data.population
    assert (population.clients, population.largest) == (2, 1)
    assert population.names == data.names == ("0", "1")
    assert population.sizes().tolist() == [2, 4] == data.sizes().tolist()
    assert population.sizes("test").tolist() == [3, 0] == data.sizes("test").tolist()
    assert data.subset([1]).population.n_train.tolist() == [4]
    population.sizes()[0] = 7  # a copy
    assert data.sizes().tolist() == [2, 4]


def test_a_population_without_data() -> None:
    population = Population.make([3, 0, 5], names=["ann", "bob", "eve"])
    assert population.n_test.tolist() == [0, 0, 0]
    chosen = population.subset([2, 0])
    assert (tuple(chosen.names), chosen.n_train.tolist()) == (("eve", "ann"), [5, 3])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([],), "n_train"),
        (([1, -1],), "n_train"),
        (([0.5],), "n_train"),
        (([1, 2], [1]), "n_test"),
        (([1, 2], None, ["a", "a"]), "names"),
    ],
)
def test_what_is_refused(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(Refused) as error:
        Population.make(*arguments)
    assert error.value.field == field
