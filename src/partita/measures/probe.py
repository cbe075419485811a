"""The samples of a probe, as a client sees them."""

from __future__ import annotations

from torch import Tensor

from partita.core.types import Download

PROBE = "probe"


def probed(download: Download) -> tuple[Tensor, Download]:
    """Return the samples of the probe, and what the client received beside them."""
    extra = {k: v for k, v in download.extra.items() if k != PROBE}
    return download.extra[PROBE], download._replace(extra=extra)
