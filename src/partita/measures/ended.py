"""The model that a client ended its local work with, as a measure of a cohort sees it."""

from __future__ import annotations

from partita.core.types import Download, Tensors

ENDED = "ended/"


def ended(download: Download) -> Tensors:
    """Return the model that the client ended with, by name, as far as it sent it."""
    return {k.removeprefix(ENDED): v for k, v in download.extra.items() if k.startswith(ENDED)}


def received(download: Download) -> Download:
    """Return what the client would receive now, without that model."""
    extra = {k: v for k, v in download.extra.items() if not k.startswith(ENDED)}
    return download._replace(extra=extra)
