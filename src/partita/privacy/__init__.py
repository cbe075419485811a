"""Differential privacy at the level of the client: `partita.privacy`.

A mechanism is a transform of uploads (`federate(uploads=[...])`): it bounds what a client sends, and adds
noise to what the server learns of all of them together. `epsilon` and `noise_for` are their account.
"""

from partita.privacy.accounting import epsilon, noise_for
from partita.privacy.banded import banded
from partita.privacy.gaussian import gaussian

__all__ = ["banded", "epsilon", "gaussian", "noise_for"]
