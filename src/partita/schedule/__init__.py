"""Who reports when. The loop asks the schedule for the next cohort until it is done."""

from partita.schedule.synchronous import Schedule, Synchronous, synchronous

__all__ = ["Schedule", "Synchronous", "synchronous"]
