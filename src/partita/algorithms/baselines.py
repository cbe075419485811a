"""What a method is compared with: every client alone, and one global model."""

from __future__ import annotations

from partita.algorithms.alone import local
from partita.algorithms.fedavg import fedavg
from partita.core.parts import Algorithm

SAME = (
    "lr",
    "optimizer",
    "momentum",
    "weight_decay",
    "max_grad_norm",
    "accumulate",
    "optimizer_state",
)


def baselines(algorithm: Algorithm) -> dict[str, Algorithm]:
    """`local` and `global` for a method, or for a pipeline by its first stage.

    The global one has the method's server too: models that are trained with Adam at the server should not be
    compared with averaged ones, nor those of an asynchronous server of small steps with one of full steps.
    """
    options = (algorithm.stages[0].algorithm if algorithm.stages else algorithm).options
    same = {k: options[k] for k in SAME if k in options}
    weighting, server = options.get("weighting", "samples"), options.get("server")
    return {"global": fedavg(**same, weighting=weighting, server=server), "local": local(**same)}
