"""Several runs in lockstep: what their clients compute, they compute as one batch.

A single run of a small model leaves a device idle. The runs of a study differ in numbers alone (seed, initial
weights, learning rates, data), so their cohorts can be one stack:

    meeting   lets runs go on in turn, each until it needs its clients, and answers all that wait together
    joint     the clients of several runs as those of one: their data, their draws, their rates
    member    the executor of a run among others

A run knows nothing of the others. It has the draws that it has alone, and its own folder, metrics and
checkpoints.
"""

from partita.engine.lockstep.meeting import Meeting, Seat, once, seat

__all__ = ["Meeting", "Seat", "once", "seat"]
