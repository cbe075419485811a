"""Shared pieces of local rules. What a client computes is composed of these, method by method."""
