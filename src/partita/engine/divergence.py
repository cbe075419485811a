"""Clients whose training diverged: who, since when, and what a user is told before anything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from partita.engine.counters import Times

DIVERGED = "DIVERGED."
"""What it begins with wherever it is said."""
BASELINES = {"local": "each client alone", "global": "one global model"}


def divergence(
    excluded: Mapping[int, Times],
    *,
    clients: int,
    uploads: int,
    finite: bool,
    algorithm: Mapping[str, Any],
    baselines: Mapping[str, Any],
) -> dict[str, Any] | None:
    """What summary.json says of a run in which training diverged; None where it did not.

    excluded   honest clients whose uploads were set aside: these, a loss or a state were not finite
    clients    how many honest clients there are
    uploads    how many uploads of theirs arrived in all
    finite     whether the server's model is
    algorithm  the description of the method
    baselines  what their own summaries say
    """
    diverged = {kind: found for kind, found in baselines.items() if found and _facts(found)}
    if not excluded and finite and not diverged:
        return None
    aside = sum(times.number for times in excluded.values())
    first = min((times.first for times in excluded.values()), default=None)
    return {
        "clients": len(excluded),
        "of": clients,
        "first": first,
        "last": max((times.last for times in excluded.values()), default=None),
        "set_aside": aside,
        "uploads": uploads,
        "why": dict(Counter(times.why for times in excluded.values())),
        "finite": finite,
        "nothing_learned": not finite or (aside > 0 and aside == uploads),
        # the server has taken no step before the first round: its rate is not to blame
        "rates": {k: v for k, v in rates(algorithm) if first != 1 or "server" not in k},
        "baselines": diverged,
    }


def rates(options: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The learning rates of a method by the names under which they are set: `lr`, `server.lr`, `1.lr`."""
    if isinstance(options, list):  # the stages of a pipeline
        options = {str(i): stage.get("algorithm") for i, stage in enumerate(options)}
    if not isinstance(options, Mapping):
        return
    for key, value in options.items():
        if key == "stages" and "lr" in options:  # they have it from the whole
            continue
        path = key if not name else name if key == "lr" and _is_rate(name) else f"{name}.{key}"
        if isinstance(value, Mapping | list):
            yield from rates(value, "" if key == "stages" else path)
        elif _is_rate(key) and isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value


def _is_rate(name: str) -> bool:
    return name.rpartition(".")[2] == "lr" or name.endswith("_lr")


# ---- in words


class Told(Protocol):
    """A run, as far as it is told of here."""

    def summary(self) -> Mapping[str, Any]:
        """What summary.json holds."""


def learned_nothing(runs: Iterable[Told]) -> bool:
    """Whether one of the runs ended with a model that is the initial one, or no model at all."""
    return any((run.summary().get("diverged") or {}).get("nothing_learned") for run in runs)


def sentences(diverged: Mapping[str, Any] | None) -> list[str]:
    """What happened, what it means, what to do; nothing where nothing happened."""
    if not diverged:
        return []
    found = _facts(diverged)
    found += [advice(diverged)] if found else []
    for kind, other in diverged["baselines"].items():
        many = f"{other['clients']:,} of {other['of']:,} clients" if other["finite"] else "its model"
        found.append(f"The baseline '{BASELINES[kind]}' diverged ({many}): a comparison with it says little.")
    return found


def headlines(runs: Mapping[str, Sequence[Told]]) -> list[str]:
    """A paragraph for each label of which a run diverged: of the run in which most clients did."""
    found = []
    for label, seeds in runs.items():
        told = [run.summary() for run in seeds if run.summary().get("diverged")]
        if told:
            worst = max(told, key=lambda facts: facts["diverged"]["clients"])
            name = f"{label}: " if len(runs) > 1 else ""
            seed = f" This is seed {worst.get('seed')}; {len(told)} of {len(seeds)} seeds diverged."
            words = " ".join(sentences(worst["diverged"]))
            found.append(f"{DIVERGED} {name}{words}{seed if len(seeds) > 1 else ''}")
    return found


def _facts(diverged: Mapping[str, Any]) -> list[str]:
    found = [who(diverged)] if diverged["clients"] else []
    if not diverged["finite"]:
        return [*found, "The server's model is not finite: it is of no use."]
    if diverged["nothing_learned"]:
        return [*found, "Nothing was learned: no upload was usable, the model is the initial one."]
    return found


def who(diverged: Mapping[str, Any]) -> str:
    """How many clients, in which rounds, how many uploads, and what was wrong with them."""
    first, last = diverged["first"], diverged["last"]
    when = f"in round {first:,}" if first == last else f"from round {first:,} to round {last:,}"
    aside = f"{diverged['set_aside']:,} of {diverged['uploads']:,} uploads were set aside"
    why = " or ".join(diverged["why"])
    return f"{diverged['clients']:,} of {diverged['of']:,} clients diverged {when}: {aside} ({why})."


def advice(diverged: Mapping[str, Any]) -> str:
    """What to change: where most uploads are sound, the others' data may be to blame."""
    highest_first = sorted(diverged["rates"].items(), key=lambda rate: -rate[1])
    shown = ", ".join(f"{name}={value:g}" for name, value in highest_first)
    lower = f"lower {shown}" if shown else "lower the learning rate"
    few = 2 * diverged["set_aside"] < diverged["uploads"] and 2 * diverged["clients"] < diverged["of"]
    if few and diverged["finite"]:
        return f"Look at the data of these clients, {lower}, or limit steps by max_grad_norm."
    return f"The learning rate is probably too high: {lower}, or limit steps by max_grad_norm."
