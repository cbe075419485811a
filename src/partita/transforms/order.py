"""In which order transforms may stand."""

from __future__ import annotations

from partita.core import check
from partita.core.parts import Transform


def in_order(uploads: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """Return the transforms of uploads; refuse an order in which one would undo what another has done.

    What is clipped or blurred after it was compressed would no longer be what compression has made of it, and
    the loss that clients remember would hold the noise.
    """
    lossy = ""
    for number, transform in enumerate(uploads):
        if lossy and transform.encode is not None and not transform.lossy:
            allowed = f"{transform.name!r} before {lossy!r}: first what limits or blurs, then what compresses"
            raise check.fail(f"uploads[{number}]", transform.name, allowed)
        lossy = transform.name if transform.lossy else lossy
    releasing = [transform.name for transform in uploads if transform.release is not None]
    if len(releasing) > 1:
        raise check.fail("uploads", releasing, "one transform that releases sums")
    return uploads
