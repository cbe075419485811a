"""Clients that train the last blocks only: EmbracingFL, Lee et al. (2024), Algorithms 1 and 2.

    ā_i  = y_t(x_i)                      the frozen blocks, piece by piece, over all of its data, once
    z_i  ← z_i − η ∇f(z_i; ā_i)          τ steps on what was recorded
    z    ← z − (1/m) Σ_i Δz_i            over all clients that trained z
    y    ← y − (1/s) Σ_{i strong} Δy_i   over those that trained y

A weak device never holds the whole model: it receives the input-side blocks in pieces, runs its samples
through each one, records what comes out, drops the piece, and trains the rest on the record. What is frozen
runs in evaluation mode: no dropout, and normalization by the running statistics that came with it (with
norm="static", which has none, by those of the client's own data).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from torch import Tensor, nn

from partita.capacity.assign import ALLOWED, Assign, assigned, check_assign
from partita.capacity.blocks import block_names, check_sequence, is_words, part
from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Capacity, Share

RECORDS = ("memory", "disk")
Assigned = Annotated[
    Assign, Option("who is in which class (None: as many in each)", allowed=ALLOWED, check=check_assign)
]


CUTS = "{'strong': 0, 'moderate': 4, 'weak': 7}"


def by_class(field: str, value: Any, allowed: str, most: int = 32) -> Mapping[Any, Any]:
    """Return something for each class of devices; refuse more than `most` classes."""
    if not isinstance(value, Mapping) or not value:
        raise check.fail(field, value, allowed)
    if len(value) > most:
        raise check.fail(field, f"{len(value)} classes", f"at most {most}")
    return value


def _cuts(field: str, value: Any) -> dict[str, int]:
    value = by_class(field, value, f"blocks that each class leaves out, such as {CUTS}")
    return {str(k): check.integer(f"{field}[{k!r}]", n, low=0) for k, n in value.items()}


def _blocks(field: str, value: Any) -> tuple[str, ...]:
    if not value or not is_words(value):
        raise check.fail(field, value, "names of modules, in order: ['features', 'head']")
    return tuple(value)


@checked("capacity ")
def depth(
    cuts: Annotated[
        Mapping[str, int],
        Option(
            "how many of the model's first blocks each class does not train",
            allowed=CUTS,
            check=_cuts,
            example={"strong": 0, "weak": 1},
        ),
    ],
    assign: Assigned = None,
    *,
    pieces: Annotated[
        int | None, Option("frozen blocks that a device holds at a time (None: as many as it trains)", low=1)
    ] = None,
    blocks: Annotated[
        Sequence[str] | None,
        Option(
            "the model's blocks, for one that is no nn.Sequential",
            allowed="names of modules, in order",
            check=_blocks,
        ),
    ] = None,
    record: Annotated[
        str, Option("where the output of the frozen blocks waits during a round", choices=RECORDS)
    ] = "memory",
) -> Capacity:
    """Weak clients train the last blocks of the model only, on what the first ones put out (EmbracingFL).

    Use it when some devices cannot hold the whole model: all clients see the same model, and each parameter
    is averaged over those that train it.
    """

    def shares(model: nn.Module, x: Tensor) -> tuple[Share, ...]:
        names = block_names(model, blocks)
        check_sequence(model, names, x)
        return tuple(_share(model, name, names, cut, pieces) for name, cut in cuts.items())

    classes = tuple(cuts)
    options = {"cuts": dict(cuts), "assign": assign, "pieces": pieces, "blocks": blocks, "record": record}
    return Capacity(
        "depth", classes, shares, lambda n, seed: assigned(assign, classes, n, seed), options, record
    )


def _share(model: nn.Module, name: str, names: Sequence[str], cut: int, pieces: int | None) -> Share:
    if cut == 0:
        return Share(name, model)
    if cut >= len(names):
        allowed = f"fewer than the {len(names)} blocks of the model ({', '.join(names[:4])}, ...)"
        raise check.fail(f"capacity cuts[{name!r}]", cut, allowed)
    trained = part(model, names[cut:])
    if not any(p.requires_grad for p in trained.parameters()):
        raise check.fail(f"capacity cuts[{name!r}]", cut, "a cut that leaves parameters to train")
    size = pieces or len(names) - cut
    frozen = [part(model, names[a : min(a + size, cut)]) for a in range(0, cut, size)]
    return Share(name, trained, tuple(frozen))
