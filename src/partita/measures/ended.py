"""The model that a client ended its local work with, as a measure of a cohort sees it."""

from __future__ import annotations

from partita.core.types import Download, Tensors

ENDED = "ended/"


def ended(download: Download) -> Tensors:
    """By name, for what the client sent."""
    return {k.removeprefix(ENDED): v for k, v in download.extra.items() if k.startswith(ENDED)}


def received(download: Download) -> Download:
    """What the client would receive now, without that."""
    extra = {k: v for k, v in download.extra.items() if not k.startswith(ENDED)}
    return download._replace(extra=extra)
