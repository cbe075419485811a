"""Personalized federated learning among clients that differ."""
