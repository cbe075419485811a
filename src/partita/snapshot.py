"""A run as tensors and facts, and back: what a checkpoint holds of the server, the clients and the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita import check, tree
from partita.types import ServerState, Tensors

if TYPE_CHECKING:
    from partita.federation import Federation

PARTS = (
    "base",
    "shared",
    "opt",
    "extra",
    "personal",
    "memory",
    "store",
    "scores",
    "turns",
    "received",
    "ahead",
)


def tensors(run: Federation) -> Tensors:
    """All tensors of the run, by name."""
    new = run.algorithm.init_client(run.base, run.partition)
    parts: dict[str, Tensors] = {
        "base": run.base,
        "shared": run.server.shared,
        "opt": run.server.opt,
        "extra": run.server.extra,
        "personal": new.personal,
        "memory": new.memory,
        "store": run.store.snapshot(run.server.version),
        "received": run.schedule.tensors(),
        "ahead": run.ahead.tensors(),
    }
    return {f"{part}/{k}": v for part, some in parts.items() for k, v in some.items()}


def facts(run: Federation) -> dict[str, Any]:
    """The rest of a checkpoint."""
    return {
        "stage": run.stage,
        "first": run.first,
        "version": run.server.version,
        "picks": run.picks,
        "whole": run.whole,
        "computed": run.computed,
        "schedule": run.schedule.facts(),
        "ahead": run.ahead.facts(),
        "phases": run.phases.seconds,
    }


def restore(run: Federation, found: Tensors, known: dict[str, Any]) -> None:
    """Be where the checkpoint was."""
    device = run.settings.device
    parts = {part: some if part == "store" else tree.to(some, device) for part, some in split(found).items()}
    _check_fits(run, parts["base"])
    run.base = parts["base"]
    run.picks.update(known["picks"])
    run.whole = known["whole"]
    run.phases.seconds.update(known["phases"])
    run.prepare(known["stage"], known["first"], 0.0)
    run.schedule.restore(known["schedule"], parts["received"])
    run.ahead.restore(known["ahead"], parts["ahead"])
    run.server = ServerState(parts["shared"], parts["opt"], parts["extra"], known["version"])
    run.store.restore(parts["store"])


def _check_fits(run: Federation, base: Tensors) -> None:
    wrong = [k for k in run.names if k not in base or base[k].shape != run.base[k].shape]
    if wrong or len(base) != len(run.names):
        raise ValueError(f"model: the checkpoint holds another model (differs in {', '.join(wrong[:3])})")


def split(found: Tensors) -> dict[str, Tensors]:
    """The tensors of a checkpoint by part: what `tensors` wrote."""
    parts: dict[str, Tensors] = {p: {} for p in PARTS}
    for name, value in found.items():
        part, _, key = name.partition("/")
        if part not in parts or not key:
            raise check.fail("tensor of the checkpoint", name, f"a name such as {PARTS[0]}/NAME, of a run")
        parts[part][key] = value
    return parts
