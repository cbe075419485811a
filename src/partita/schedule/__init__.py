"""Who reports when. The loop asks the schedule for the next cohort until it is done."""

from partita.schedule.asynchronous import Asynchronous, asynchronous
from partita.schedule.base import Schedule, Stint, Turns
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
from partita.schedule.staleness import hinge, polynomial
from partita.schedule.synchronous import Synchronous, synchronous
from partita.schedule.usual import Usual, usual

__all__ = [
    "Asynchronous",
    "Delays",
    "Schedule",
    "Stint",
    "Synchronous",
    "Turns",
    "Usual",
    "asynchronous",
    "classes",
    "constant",
    "delays",
    "exponential",
    "gamma",
    "hinge",
    "lognormal",
    "polynomial",
    "scaled",
    "synchronous",
    "trace",
    "uniform",
    "usual",
]
