"""Flower as a transport, for those who run a federation of it already. It is imported where it is used."""

from partita.deploy.flower.door import Door
from partita.deploy.flower.transport import FlowerTransport

__all__ = ["Door", "FlowerTransport"]
