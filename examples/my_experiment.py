"""An experiment for the command line: partita run examples/my_experiment.py --set rounds=20"""

import partita as pt
from partita.recipes import Experiment


def experiment(seed: int = 0, clients: int = 30) -> Experiment:
    """Rotated digits: what differs among the clients is how they see the same classes."""
    data = pt.data.digits(clients, shift=pt.data.rotation(), seed=seed)
    return Experiment(
        model=pt.models.mlp(64, 64, 10, seed=seed),
        data=data,
        algorithm=pt.fedalt(personal="input", lr=0.1),
        rounds=60,
        cohort=10,
        epochs=5,
        batch=16,
        seed=seed,
    )
