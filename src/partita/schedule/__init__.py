"""Who reports when. The loop asks the schedule for the next cohort until it is done."""

from partita.schedule.activity import Activity, activity
from partita.schedule.asynchronous import Asynchronous, asynchronous
from partita.schedule.available import Availability, day_night, intermittent, windows
from partita.schedule.base import Running, Schedule, StageSpec
from partita.schedule.choice import Choice, by_loss, by_size, least_chosen, power_of_choice
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
from partita.schedule.known import Known
from partita.schedule.preferred import Preferred, preferred
from partita.schedule.staleness import hinge, polynomial
from partita.schedule.synchronous import Synchronous, synchronous

__all__ = [
    "Activity",
    "Asynchronous",
    "Availability",
    "Choice",
    "Clock",
    "ClockedSchedule",
    "Delays",
    "Known",
    "Preferred",
    "Running",
    "Schedule",
    "StageSpec",
    "Synchronous",
    "activity",
    "asynchronous",
    "by_loss",
    "by_size",
    "classes",
    "constant",
    "day_night",
    "delays",
    "exponential",
    "gamma",
    "hinge",
    "intermittent",
    "least_chosen",
    "lognormal",
    "polynomial",
    "power_of_choice",
    "preferred",
    "scaled",
    "synchronous",
    "trace",
    "uniform",
    "windows",
]
