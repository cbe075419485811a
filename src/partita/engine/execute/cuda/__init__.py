"""Recorded steps on a GPU, their fused kernels and their convolutions, for `partita.engine.execute.graph`."""
