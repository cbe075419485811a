"""Clients that are elsewhere: the loop of a simulation among machines that each keep their own data."""
