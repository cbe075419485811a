"""Step sizes and bounds of the papers' theorems, for constants that you know: `partita.theory`."""
