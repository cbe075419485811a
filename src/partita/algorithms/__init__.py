"""One short file per paper or method: equation, hyper-parameters, composition."""

import partita.algorithms.alone as _alone  # noqa: F401 (its method has the name of a folder here)
from partita.algorithms.apfl import apfl
from partita.algorithms.base import METHODS
from partita.algorithms.coordinate_median_fedavg import coordinate_median_fedavg
from partita.algorithms.ditto import ditto
from partita.algorithms.fedalt import fedalt
from partita.algorithms.fedasync import fedasync, fedbuff
from partita.algorithms.fedavg import fedavg
from partita.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from partita.algorithms.fedplus import fedavg_plus, fedcomed_plus, fedgeomed_plus, fedplus
from partita.algorithms.fedproto import fedproto
from partita.algorithms.fedprox import fedprox
from partita.algorithms.fedrod import fedrod
from partita.algorithms.fedsim import fedsim
from partita.algorithms.ffgg import ffgg, ffgg_async, ffgg_local, ffgg_robust
from partita.algorithms.finetune import finetune
from partita.algorithms.l2gd import l2gd
from partita.algorithms.moon import moon
from partita.algorithms.perfedavg import perfedavg
from partita.algorithms.persafl import persafl_maml, persafl_me
from partita.algorithms.pfedme import pfedme
from partita.algorithms.pipeline import pipeline, stage
from partita.algorithms.rfa import rfa
from partita.algorithms.scaffold import scaffold
from partita.algorithms.tuned import tuned

__all__ = [
    "METHODS",
    "apfl",
    "coordinate_median_fedavg",
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedalt",
    "fedasync",
    "fedavg",
    "fedavg_plus",
    "fedavgm",
    "fedbuff",
    "fedcomed_plus",
    "fedgeomed_plus",
    "fedplus",
    "fedproto",
    "fedprox",
    "fedrod",
    "fedsim",
    "fedyogi",
    "ffgg",
    "ffgg_async",
    "ffgg_local",
    "ffgg_robust",
    "finetune",
    "l2gd",
    "moon",
    "perfedavg",
    "persafl_maml",
    "persafl_me",
    "pfedme",
    "pipeline",
    "rfa",
    "scaffold",
    "stage",
    "tuned",
]
