"""Differential privacy at the level of the client: `partita.privacy`."""

__all__: list[str] = []
