"""Who reports when. The loop asks the schedule for the next cohort until it is done."""

from partita.schedule.activity import Activity, activity
from partita.schedule.asynchronous import Asynchronous, asynchronous
from partita.schedule.base import Running, Schedule, StageSpec
from partita.schedule.clock import Clock, ClockedSchedule
from partita.schedule.delay import (
    Delays,
    classes,
    constant,
    delays,
    exponential,
    gamma,
    lognormal,
    scaled,
    trace,
    uniform,
)
from partita.schedule.preferred import Preferred, preferred
from partita.schedule.staleness import hinge, polynomial
from partita.schedule.synchronous import Synchronous, synchronous

__all__ = [
    "Activity",
    "Asynchronous",
    "Clock",
    "ClockedSchedule",
    "Delays",
    "Preferred",
    "Running",
    "Schedule",
    "StageSpec",
    "Synchronous",
    "activity",
    "asynchronous",
    "classes",
    "constant",
    "delays",
    "exponential",
    "gamma",
    "hinge",
    "lognormal",
    "polynomial",
    "preferred",
    "scaled",
    "synchronous",
    "trace",
    "uniform",
]
