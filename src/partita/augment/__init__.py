"""Augmentation: training samples that are changed anew each time, as functions of a sample and a key."""

from partita.augment.base import compose, of
from partita.augment.images import crop, flip
from partita.augment.noise import noise
from partita.augment.spectra import frequency_mask, time_mask

__all__ = ["compose", "crop", "flip", "frequency_mask", "noise", "of", "time_mask"]
