"""Machinery: the loop, what it binds and keeps, how rules run for many clients, what is written down."""
