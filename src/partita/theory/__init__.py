"""Step sizes and bounds of the papers' theorems, for constants that you know: `partita.theory`."""

from partita.theory.embracing import embracing_bound, embracing_floor, embracing_lr

__all__ = ["embracing_bound", "embracing_floor", "embracing_lr"]
