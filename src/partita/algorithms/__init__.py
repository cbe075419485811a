"""One short file per paper or method: equation, hyper-parameters, composition."""

from partita.algorithms.base import METHODS
from partita.algorithms.fedalt import fedalt
from partita.algorithms.fedavg import fedavg
from partita.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from partita.algorithms.fedprox import fedprox
from partita.algorithms.fedsim import fedsim
from partita.algorithms.finetune import finetune
from partita.algorithms.local import local
from partita.algorithms.pipeline import pipeline, stage

__all__ = [
    "METHODS",
    "fedadagrad",
    "fedadam",
    "fedalt",
    "fedavg",
    "fedavgm",
    "fedprox",
    "fedsim",
    "fedyogi",
    "finetune",
    "local",
    "pipeline",
    "stage",
]
