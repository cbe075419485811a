"""What the server makes of the clients' deltas. An aggregator is one file with its definition."""

from partita.aggregate.mean import mean

__all__ = ["mean"]
