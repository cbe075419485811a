"""Clients that train the last blocks only: EmbracingFL, Lee et al. (2024), Algorithms 1 and 2.

    ā_i  = y_t(x_i)                      the frozen blocks, piece by piece, over all of its data, once
    z_i  ← z_i − η ∇f(z_i; ā_i)          τ steps on what was recorded
    z    ← z − (1/m) Σ_i Δz_i            over all clients that trained z
    y    ← y − (1/s) Σ_{i strong} Δy_i   over those that trained y

A weak device never holds the whole model: it receives the input-side blocks in pieces, runs its samples
through each one, records what comes out, drops the piece, and trains the rest on the record. What is frozen
runs in evaluation mode: no dropout, and normalization by the running statistics that came with it (with
norm="static", which has none, by those of the client's own data).

A recurrent model can be cut in time, too (the last row of Table 1): of T words, each direction reads the
first k forwards only, with the received weights, and trains from the recorded state on.

    h_k  = the state after k of its words        recorded, no gradient
    z_i  ← z_i − η ∇f(z_i; h_k, words k+1 … T)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from torch import nn

from partita.capacity import words as in_time
from partita.capacity.assign import ALLOWED, Assign, assigned, check_assign
from partita.capacity.blocks import block_names, check_sequence, is_words, part
from partita.capacity.memory import Measured, measured
from partita.core import check
from partita.core.inputs import single
from partita.core.options import Option, checked
from partita.core.parts import Capacity, Share
from partita.core.types import Inputs

RECORDS = ("memory", "disk")
Assigned = Annotated[
    Assign, Option("who is in which class (None: as many in each)", allowed=ALLOWED, check=check_assign)
]


CUTS = "{'strong': 0, 'moderate': 4, 'weak': 7}"
PIECES = "2 or '20MB'"


def by_class(field: str, value: Any, allowed: str, most: int = 32) -> Mapping[Any, Any]:
    """Return something for each class of devices; refuse more than `most` classes."""
    if not isinstance(value, Mapping) or not value:
        raise check.fail(field, value, allowed)
    if len(value) > most:
        raise check.fail(field, f"{len(value)} classes", f"at most {most}")
    return value


def as_cuts(field: str, value: Any) -> dict[str, int]:
    """Return how many blocks each class leaves out."""
    value = by_class(field, value, f"blocks that each class leaves out, such as {CUTS}")
    return {str(k): check.integer(f"{field}[{k!r}]", n, low=0) for k, n in value.items()}


def _budgets(field: str, value: Any) -> dict[str, int | str]:
    value = by_class(field, value, "the memory of each class's devices, such as {'weak': '1MB'}")
    for k, size in value.items():
        check.size(f"{field}[{k!r}]", size)
    return {str(k): size for k, size in value.items()}


def _words(field: str, value: Any) -> dict[str, float]:
    value = by_class(
        field, value, "the share of the words that each class does not train, such as {'weak': 0.5}"
    )
    return {
        str(k): check.number(f"{field}[{k!r}]", n, low=0, high=1, open_low=True) for k, n in value.items()
    }


def _pieces(field: str, value: Any) -> int | str:
    try:
        check.size(field, value)
        fits = not (isinstance(value, str) and value.strip().isdigit())  # blocks, or bytes with their unit
    except ValueError:
        fits = False
    if not fits:
        raise check.fail(field, value, f"a whole number from 1 of blocks, or their bytes: {PIECES}")
    return value  # type: ignore[no-any-return]


def _blocks(field: str, value: Any) -> tuple[str, ...]:
    if not value or not is_words(value):
        raise check.fail(field, value, "names of modules, in order: ['features', 'head']")
    return tuple(value)


Blocks = Annotated[
    Sequence[str] | None,
    Option(
        "the model's blocks, for one that is no nn.Sequential",
        allowed="names of modules, in order",
        check=_blocks,
    ),
]


@checked("capacity ")
def depth(
    cuts: Annotated[
        Mapping[str, int] | None,
        Option(
            "how many of the model's first blocks each class does not train (None: {'strong': 0})",
            allowed=CUTS,
            check=as_cuts,
            example={"strong": 0, "weak": 1},
        ),
    ] = None,
    assign: Assigned = None,
    *,
    budget: Annotated[
        Mapping[str, int | str] | None,
        Option(
            "the memory of a class's devices, for classes whose cut and pieces are found from it",
            allowed="{'weak': '1MB'}",
            check=_budgets,
        ),
    ] = None,
    pieces: Annotated[
        int | str | None,
        Option(
            "frozen blocks that a device holds at a time, as a number of them or by their bytes, and within "
            "its budget (None: what that allows, or as many blocks as it trains)",
            allowed=PIECES,
            check=_pieces,
        ),
    ] = None,
    blocks: Blocks = None,
    words: Annotated[
        Mapping[str, float] | None,
        Option(
            "the share of the words, those read first, that a class does not train: for recurrent models",
            allowed="{'weak': 0.5}",
            check=_words,
        ),
    ] = None,
    state: Annotated[
        str,
        Option(
            "where training on the other words begins: in the state that the first ones left, or in a new "
            "one, as if they were not there",
            choices=in_time.STATES,
        ),
    ] = "recorded",
    record: Annotated[
        str, Option("where the output of the frozen blocks waits during a round", choices=RECORDS)
    ] = "memory",
) -> Capacity:
    """Weak clients train the last blocks of the model only, on what the first ones put out (EmbracingFL).

    Use it when some devices cannot hold the whole model: all clients see the same model, and each parameter
    is averaged over those that train it.
    """
    given = dict(cuts or {})
    budgets = dict(budget or {})
    if cuts is None and "strong" not in budgets:
        given = {"strong": 0}
    both = sorted(given.keys() & budgets.keys())
    if both:
        raise check.fail("capacity budget", budget, f"classes without a cut: {both[0]!r} has one")
    classes = (*given, *budgets)
    for name in words or ():
        check.choice("capacity words", name, classes)

    def shares(model: nn.Module, x: Inputs, batch: int = 1) -> tuple[Share, ...]:
        x = single(x, "capacity='depth'")
        names = block_names(model, blocks)
        check_sequence(model, names, x)
        sizes = measured(model, x[0], batch, blocks) if budgets or isinstance(pieces, str) else None
        found = []
        for name in classes:
            limit, cut = budgets.get(name), given.get(name)
            if cut is None:
                assert sizes is not None
                assert limit is not None
                cut = sizes.fit(f"capacity budget[{name!r}]", limit)
            share = _share(model, name, names, cut, pieces, limit, sizes)
            found.append(in_time.cut(share, model, names[cut:], x, (words or {}).get(name, 0.0), state))
        return tuple(found)

    options = {
        "cuts": given,
        "assign": assign,
        "pieces": pieces,
        "blocks": blocks,
        "record": record,
        **({"budget": budgets} if budgets else {}),
        **({"words": dict(words), "state": state} if words else {}),
    }
    return Capacity(
        "depth", classes, shares, lambda n, seed: assigned(assign, classes, n, seed), options, record
    )


def _share(
    model: nn.Module,
    name: str,
    names: Sequence[str],
    cut: int,
    pieces: int | str | None,
    limit: int | str | None,
    sizes: Measured | None,
) -> Share:
    """Return what a class trains after this cut; its frozen pieces are within `pieces` and `limit` bytes."""
    if cut == 0:
        return Share(name, model)
    if cut >= len(names):
        allowed = f"fewer than the {len(names)} blocks of the model ({', '.join(names[:4])}, ...)"
        raise check.fail(f"capacity cuts[{name!r}]", cut, allowed)
    trained = part(model, names[cut:])
    if not any(p.requires_grad for p in trained.parameters()):
        raise check.fail(f"capacity cuts[{name!r}]", cut, "a cut that leaves parameters to train")
    limits = [size for size in (limit, pieces if isinstance(pieces, str) else None) if size is not None]
    most = pieces if isinstance(pieces, int) else None
    if limits and sizes is not None:
        least = min(limits, key=lambda size: check.size("capacity pieces", size))
        frozen = sizes.pieces("capacity pieces", cut, least, most)
    else:
        size = most or len(names) - cut
        frozen = tuple(tuple(names[a : min(a + size, cut)]) for a in range(0, cut, size))
    return Share(name, trained, tuple(part(model, piece) for piece in frozen))
