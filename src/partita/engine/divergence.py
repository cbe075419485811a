"""Divergence: which clients' training diverged, since when, and what a user should do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from partita.engine.counters import Times

DIVERGED = "DIVERGED."
"""How every headline about divergence begins."""
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
    """Return what summary.json says of a run in which training diverged; None where it did not.

    excluded   honest clients whose uploads were set aside: an upload, a loss or a state was not finite
    clients    the number of honest clients
    uploads    the number of their uploads
    finite     whether the server's model is finite
    algorithm  the description of the method
    baselines  what their own summaries say
    """
    diverged = {kind: facts for kind, facts in baselines.items() if facts and _facts(facts)}
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
    """Yield the learning rates of a method by the names that set them: `lr`, `server.lr`, `1.lr`."""
    if isinstance(options, list):  # stages of a pipeline, or numbers such as the rounds of a rate
        stages = (stage if isinstance(stage, Mapping) else {} for stage in options)
        options = {str(i): stage.get("algorithm") for i, stage in enumerate(stages)}
    if not isinstance(options, Mapping):
        return
    for key, value in options.items():
        if key == "stages" and "lr" in options:  # stages have the rate of the pipeline
            continue
        path = key if not name else name if key == "lr" and _is_rate(name) else f"{name}.{key}"
        if isinstance(value, Mapping | list):
            yield from rates(value, "" if key == "stages" else path)
        elif _is_rate(key) and isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value


def _is_rate(name: str) -> bool:
    return name.rpartition(".")[2] == "lr" or name.endswith("_lr")


# ---- in words


class Summarized(Protocol):
    """A run with a summary."""

    def summary(self) -> Mapping[str, Any]:
        """Return what summary.json holds."""


def learned_nothing(runs: Iterable[Summarized]) -> bool:
    """Return whether one of the runs ended with the initial model, or with one that is not finite."""
    return any((run.summary().get("diverged") or {}).get("nothing_learned") for run in runs)


def sentences(diverged: Mapping[str, Any] | None) -> list[str]:
    """Return what happened, what it means and what to do, a sentence each; none if nothing diverged."""
    if not diverged:
        return []
    facts = _facts(diverged)
    texts = [*facts, advice(diverged)] if facts else []
    for kind, other in diverged["baselines"].items():
        extent = f"{other['clients']:,} of {other['of']:,} clients" if other["finite"] else "its model"
        texts.append(
            f"The baseline '{BASELINES[kind]}' diverged ({extent}): a comparison with it says little."
        )
    return texts


def headlines(runs: Mapping[str, Sequence[Summarized]]) -> list[str]:
    """Return a paragraph for each label with a run that diverged: about the run in which most clients did."""
    paragraphs = []
    for label, seeds in runs.items():
        diverged = [run.summary() for run in seeds if run.summary().get("diverged")]
        if diverged:
            worst = max(diverged, key=lambda facts: facts["diverged"]["clients"])
            name = f"{label}: " if len(runs) > 1 else ""
            seed = f" This is seed {worst.get('seed')}; {len(diverged)} of {len(seeds)} seeds diverged."
            words = " ".join(sentences(worst["diverged"]))
            paragraphs.append(f"{DIVERGED} {name}{words}{seed if len(seeds) > 1 else ''}")
    return paragraphs


def _facts(diverged: Mapping[str, Any]) -> list[str]:
    clients = [who(diverged)] if diverged["clients"] else []
    if not diverged["finite"]:
        return [*clients, "The server's model is not finite: it is of no use."]
    if diverged["nothing_learned"]:
        return [*clients, "Nothing was learned: no upload was usable, the model is the initial one."]
    return clients


def who(diverged: Mapping[str, Any]) -> str:
    """Say how many clients diverged, in which rounds, how many uploads, and what was wrong with them."""
    first, last = diverged["first"], diverged["last"]
    when = f"in round {first:,}" if first == last else f"from round {first:,} to round {last:,}"
    aside = f"{diverged['set_aside']:,} of {diverged['uploads']:,} uploads were set aside"
    faults = " or ".join(diverged["why"])
    return f"{diverged['clients']:,} of {diverged['of']:,} clients diverged {when}: {aside} ({faults})."


def advice(diverged: Mapping[str, Any]) -> str:
    """Say what to change: where most uploads are usable, the data of the others may be the reason."""
    highest_first = sorted(diverged["rates"].items(), key=lambda rate: -rate[1])
    named = ", ".join(f"{name}={value:g}" for name, value in highest_first)
    lower = f"lower {named}" if named else "lower the learning rate"
    few = 2 * diverged["set_aside"] < diverged["uploads"] and 2 * diverged["clients"] < diverged["of"]
    if few and diverged["finite"]:
        return f"Look at the data of these clients, {lower}, or limit steps by max_grad_norm."
    return f"The learning rate is probably too high: {lower}, or limit steps by max_grad_norm."
