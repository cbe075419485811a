"""A run as tensors and facts, and back: what a checkpoint holds of the server, the clients and the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from partita.core import check, tree
from partita.core.types import ServerState, Tensors

if TYPE_CHECKING:
    from partita.engine.federation import Federation

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


class Holdings(NamedTuple):
    """Who holds what at the end of a run.

    own        names of the personal part
    keeps      whether clients keep theirs; else it is made when it is asked for
    computed   whether a client's model is more than the server's with the client's part in place
    untrained  names that the server has not trained together with the rest of its model
    no_mean    why the clients' parts cannot be averaged ('': they can)
    """

    own: Sequence[str]
    keeps: bool
    computed: bool
    untrained: Sequence[str]
    no_mean: str

    @classmethod
    def of(cls, run: Federation) -> Holdings:
        """Of a run as it stands."""
        return cls(run.partition.personal, run.keeps_state, run.computed, run.untrained, run.no_mean)

    @classmethod
    def read(cls, known: dict[str, Any], parts: dict[str, Tensors]) -> Holdings:
        """Of a checkpoint; older ones say less."""
        if "holdings" in known:
            return cls(**known["holdings"])
        computed = known.get("computed", False)
        return cls(
            own=list(parts["personal"]),
            keeps=not computed,
            computed=computed,
            untrained=[k for k in parts["base"] if k not in parts["shared"]],
            no_mean="it is not known what the clients of this older run keep" if computed else "",
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
        "holdings": Holdings.of(run)._asdict(),
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
    _check_part(run, parts["personal"])
    run.schedule.restore(known["schedule"], parts["received"])
    run.ahead.restore(known["ahead"], parts["ahead"])
    run.server = ServerState(parts["shared"], parts["opt"], parts["extra"], known["version"])
    _check_alike(run.server, run.server_rule.init(tree.pick(run.base, run.partition.shared)))
    run.store.restore(parts["store"])


def _check_fits(run: Federation, base: Tensors) -> None:
    wrong = [k for k in run.names if k not in base or not _alike(base[k], run.base[k])]
    if wrong or len(base) != len(run.names):
        raise _another("model", wrong)


def _check_part(run: Federation, personal: Tensors) -> None:
    other = sorted(set(personal) ^ set(run.algorithm.init_client(run.base, run.partition).personal))
    if other:
        raise _another("personal part", other)


def _check_alike(server: ServerState, new: ServerState) -> None:
    """What the server holds has the names and shapes that it begins with."""
    for part in ("shared", "opt", "extra"):
        there, wanted = getattr(server, part), getattr(new, part)
        wrong = [k for k in {**there, **wanted} if k not in there or k not in wanted]
        wrong += [k for k in there if k in wanted and not _alike(there[k], wanted[k])]
        if wrong:
            raise _another(f"server state {part!r}", wrong)


def _another(part: str, names: Sequence[str]) -> check.Refused:
    """Return the error of a checkpoint that differs from the run in these tensors."""
    reason = f"the checkpoint holds another {part} (it differs in {', '.join(names[:3])})"
    return check.fail("resume", True, "the run that was saved, or another folder out=", reason)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def split(found: Tensors) -> dict[str, Tensors]:
    """The tensors of a checkpoint by part: what `tensors` wrote."""
    parts: dict[str, Tensors] = {p: {} for p in PARTS}
    for name, value in found.items():
        part, _, key = name.partition("/")
        if part not in parts or not key:
            raise check.fail("tensor of the checkpoint", name, f"a name such as {PARTS[0]}/NAME, of a run")
        parts[part][key] = value
    return parts
