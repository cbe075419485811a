"""Personalized federated learning among clients that differ.

import partita as pt

data = pt.data.digits(clients=20, partition=pt.data.label_skew(classes=3), seed=0)
run = pt.federate(pt.models.mlp(64, 64, 10), data, pt.fedalt(personal="output", lr=0.1),
                  rounds=50, cohort=10, steps=10, batch=32, seed=0)
print(run.summary())
"""

import logging as _logging
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

import partita.core.early as _early  # noqa: F401 (before what takes its time to load)
from partita import (
    aggregate,
    attack,
    augment,
    capacity,
    data,
    measures,
    models,
    optim,
    privacy,
    schedule,
    theory,
    track,
    transforms,
    workers,
)
from partita.algorithms import (
    apfl,
    coordinate_median_fedavg,
    ditto,
    fedadagrad,
    fedadam,
    fedalt,
    fedasync,
    fedavg,
    fedavg_plus,
    fedavgm,
    fedbuff,
    fedcomed_plus,
    fedgeomed_plus,
    fedplus,
    fedproto,
    fedprox,
    fedrod,
    fedsim,
    fedyogi,
    ffgg,
    ffgg_async,
    ffgg_local,
    ffgg_robust,
    finetune,
    l2gd,
    moon,
    perfedavg,
    persafl_maml,
    persafl_me,
    pfedme,
    pipeline,
    psi,
    rfa,
    scaffold,
    stage,
    tuned,
)
from partita.algorithms.alone import local
from partita.algorithms.base import Common, Lr, Part, compose, method, settings
from partita.algorithms.local.solvers import Solver, adam, cg, exact, gd
from partita.algorithms.psi import Penalty
from partita.api import Personalized, Run, federate, load
from partita.attack.base import by_tensor, crowd, each_sends, everyone_sends, honest
from partita.core import draws, tree
from partita.core.check import Refused
from partita.core.metrics import Metric
from partita.core.options import Option, Range, checked
from partita.core.parts import (
    Aggregator,
    Algorithm,
    Attack,
    Capacity,
    Combined,
    LocalRule,
    Measure,
    Optimizer,
    Personalize,
    Phase,
    Probe,
    Problem,
    Program,
    Release,
    ServerRule,
    Share,
    Taken,
    Transform,
)
from partita.core.terms import of_output, with_term
from partita.core.types import (
    Batch,
    ClientState,
    Cohort,
    Download,
    Group,
    Message,
    Partition,
    RoundContext,
    ServerState,
    Tensors,
    Upload,
    Work,
)
from partita.engine import callbacks
from partita.engine.execute import EXECUTORS, Task
from partita.engine.stopping import Stop, Stopped
from partita.measures.ended import ended
from partita.measures.probe import probed
from partita.optim.rates import as_rate
from partita.schedule import Clock, ClockedSchedule, Delays, StageSpec

if TYPE_CHECKING:
    from partita.recipes.comparison import Comparison, SplitComparison, compare, split
    from partita.recipes.membership import membership
    from partita.recipes.tuning import Tuning, tune

__version__ = "0.1.0"
# what runs are made of
_logging.getLogger("partita").addHandler(_logging.NullHandler())

__all__ = [
    "Comparison",
    "Metric",
    "Personalized",
    "Range",
    "Refused",
    "Run",
    "SplitComparison",
    "Stop",
    "Stopped",
    "Tuning",
    "adam",
    "aggregate",
    "apfl",
    "attack",
    "augment",
    "callbacks",
    "capacity",
    "cg",
    "compare",
    "coordinate_median_fedavg",
    "data",
    "ditto",
    "exact",
    "fedadagrad",
    "fedadam",
    "fedalt",
    "fedasync",
    "fedavg",
    "fedavg_plus",
    "fedavgm",
    "fedbuff",
    "fedcomed_plus",
    "federate",
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
    "gd",
    "l2gd",
    "load",
    "local",
    "measures",
    "membership",
    "models",
    "moon",
    "optim",
    "perfedavg",
    "persafl_maml",
    "persafl_me",
    "pfedme",
    "pipeline",
    "privacy",
    "psi",
    "rfa",
    "scaffold",
    "schedule",
    "split",
    "stage",
    "theory",
    "track",
    "transforms",
    "tune",
    "tuned",
    "workers",
]
# what a method, an aggregator, an attack, a schedule or a measure of your own is made of
__all__ += [
    "EXECUTORS",
    "Aggregator",
    "Algorithm",
    "Attack",
    "Batch",
    "Capacity",
    "ClientState",
    "Clock",
    "ClockedSchedule",
    "Cohort",
    "Combined",
    "Common",
    "Delays",
    "Download",
    "Group",
    "LocalRule",
    "Lr",
    "Measure",
    "Message",
    "Optimizer",
    "Option",
    "Part",
    "Partition",
    "Penalty",
    "Personalize",
    "Phase",
    "Probe",
    "Problem",
    "Program",
    "Release",
    "RoundContext",
    "ServerRule",
    "ServerState",
    "Share",
    "Solver",
    "StageSpec",
    "Taken",
    "Task",
    "Tensors",
    "Transform",
    "Upload",
    "Work",
    "as_rate",
    "by_tensor",
    "checked",
    "compose",
    "crowd",
    "draws",
    "each_sends",
    "ended",
    "everyone_sends",
    "honest",
    "method",
    "of_output",
    "probed",
    "settings",
    "tree",
    "with_term",
]


_LATER = {  # names of modules that load when they are used
    "Comparison": "partita.recipes.comparison",
    "SplitComparison": "partita.recipes.comparison",
    "compare": "partita.recipes.comparison",
    "split": "partita.recipes.comparison",
    "membership": "partita.recipes.membership",
    "Tuning": "partita.recipes.tuning",
    "tune": "partita.recipes.tuning",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'partita' has no attribute {name!r}")
    return getattr(_import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
