"""In which order transforms may stand."""

from __future__ import annotations

from partita.core import check
from partita.core.parts import Transform


def in_order(uploads: tuple[Transform, ...], field: str = "uploads") -> tuple[Transform, ...]:
    """Return the transforms of uploads or downloads; refuse an order in which one undoes another's work.

    What is clipped or blurred after it was compressed would no longer be what compression has made of it, and
    the loss that clients remember would hold the noise. With feedback,

        e ← (x + e) − C(x + e)

    stays bounded where ‖x − C(x)‖² ≤ (1 − δ) ‖x‖² for some δ > 0, at least on average, and may grow without
    end where C, all of the compressors together, loses more (Karimireddy et al., 2019).
    """
    feeding = next((transform.name for transform in uploads if transform.feedback), "")
    lossy = ""
    for number, transform in enumerate(uploads):
        if lossy and transform.encode is not None and not transform.lossy:
            allowed = f"{transform.name!r} before {lossy!r}: first what limits or blurs, then what compresses"
            raise check.fail(f"{field}[{number}]", transform.name, allowed)
        if feeding and transform.expands:
            allowed = f"{transform.name} that loses less than it is given, or {feeding}(..., feedback=False)"
            reason = f"what clients keep for {feeding} would grow: {transform.expands}"
            raise check.fail(f"{field}[{number}]", transform.name, allowed, reason)
        lossy = transform.name if transform.lossy else lossy
    releasing = [transform.name for transform in uploads if transform.release is not None]
    if len(releasing) > 1:
        raise check.fail(field, releasing, "one transform that releases sums")
    return uploads
