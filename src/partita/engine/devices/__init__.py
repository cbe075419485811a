"""Clients that hold a part of the model: their classes, what they train, and who aggregates what."""
