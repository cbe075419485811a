"""Every method among real clients has the bits of its simulation: shared, personal and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from deployed import (
    Recorded,
    assert_same,
    bits_of_deployment,
    bits_of_simulation,
    deployed,
    experiment,
    simulated,
    without_times,
)

import partita as pt
from algorithms.test_every_algorithm import CASES, COHORT, DOUBLE, SEED, SINGLE, WORK, Case, make
from partita.data import FederatedData
from partita.deploy import Client
from partita.deploy.facts import facts_of
from partita.deploy.wire import unpack
from partita.recipes.experiment import Experiment
from support import each


def settings(case: Case, data: FederatedData = SINGLE, work: str = "epochs") -> dict[str, Any]:
    model = pt.models.mlp(6, 5, 4, seed=1).to(data.x.dtype)
    schedule = pt.schedule.synchronous()
    given = {"model": model, "data": data, "algorithm": make(case.name, case.options), "schedule": schedule}
    return {**given, "rounds": 2, "cohort": COHORT, "seed": SEED, **WORK[work]}


def same(made: Experiment, folder: Path) -> None:
    alone, transports = simulated(made), list[Recorded]()

    def recorded(clients: Mapping[str, Client]) -> Recorded:
        transports.append(Recorded(clients))
        return transports[0]

    run, clients = deployed(made, folder, recorded, out=None)
    as_announced(made, len(clients), transports[0].messages)
    assert_same(bits_of_simulation(alone), bits_of_deployment(run, clients))
    assert without_times(alone) == without_times(run)
    for i, client in enumerate(clients.values()):
        assert_same(alone.personalized(i), client.model())


def as_announced(made: Experiment, clients: int, messages: list[bytes]) -> None:
    """Compare what has been sent and received for turns with what `partita deploy check` says."""
    stages, at = facts_of(made, clients).stages, dict[str, int]()
    for head, tensors in [unpack(message, 1 << 30) for message in messages]:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if head["kind"] == "train":
            at[head["id"]] = head["stage"]
            assert shapes == stages[head["stage"]].received
        if head["kind"] == "upload":
            assert shapes == stages[at[head["id"]]].sent
    assert set(at.values()) == set(range(len(stages)))


@each("case", CASES.values(), ids=CASES)
def test_deployed_equals_simulated(case: Case, tmp_path: Path) -> None:
    same(experiment(**settings(case)), tmp_path)


@each("case", CASES.values(), ids=CASES)
@pytest.mark.slow
@pytest.mark.parametrize("work", ["own steps", "full batch"])
def test_deployed_equals_simulated_in_double_precision(case: Case, work: str, tmp_path: Path) -> None:
    same(experiment(**settings(case, DOUBLE, work)), tmp_path)
