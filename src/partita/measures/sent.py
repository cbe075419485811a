"""What the server sees of a client's upload, as a measure of it has it."""

from __future__ import annotations

from partita.core.types import Download, Tensors

SENT, MADE = "sent/", "made/"


def sent(download: Download) -> Tensors:
    """Return the delta that the server saw, by name: after all transforms, and before it is aggregated."""
    return {k.removeprefix(SENT): v for k, v in download.extra.items() if k.startswith(SENT)}


def made(download: Download) -> Tensors:
    """Return the model that the server has made of the round, by name."""
    return {k.removeprefix(MADE): v for k, v in download.extra.items() if k.startswith(MADE)}


def unseen(download: Download) -> Download:
    """Return what the client itself has received."""
    extra = {k: v for k, v in download.extra.items() if not k.startswith((SENT, MADE))}
    return download._replace(extra=extra)
