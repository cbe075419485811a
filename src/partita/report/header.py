"""The top of the page: what ran, the verdict, the numbers that matter most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.engine.divergence import DIVERGED, headlines, learned_nothing
from partita.report import compare
from partita.report.html import Safe, join, section, table, tag
from partita.report.rows import (
    KINDS,
    NAMES,
    Means,
    Result,
    Row,
    Runs,
    changes,
    difference,
    federated,
    first,
    higher_is_better,
    mean,
    metric,
    numbers,
    over_seeds,
    references,
)
from partita.report.words import (
    bytes_,
    count,
    deviation,
    listed,
    p_value,
    score,
    seconds,
    shorten,
    signed,
    spread,
    units,
)

CLEAR = 0.05
MODELS = {"global": "with the global model", "local": "alone"}
TITLES = {"global": "One global model", "local": "Training alone"}


def header(runs: Runs, means: Means, title: str | None) -> Safe:
    """What ran, what came of it, and the numbers: cards for one label, tables for several.

    Before all that, if training diverged, that it did.
    """
    rows = compare.table(runs)
    best = next((row for row in rows if row["best"]), rows[0])
    name = title or ("Comparison of " + listed(list(runs)) if len(runs) > 1 else str(best["label"]))
    top = tag(
        "header",
        _alert(runs),
        tag("p", "Partita report", tag("span", " · ", shorten(name, 120)), class_="eyebrow"),
        tag("h1", _verdict(runs, rows, best, means[best["label"]])),
        tag("p", " ".join(filter(None, [what_ran(runs), who_lies(runs)])), class_="lead"),
        tag("p", _who_loses(best, len(runs) > 1), class_="lead"),
        tag("p", _close(runs, best["label"]) if len(runs) > 1 else _overall(best), class_="lead"),
        _cards(best, mark=not learned_nothing(runs[best["label"]])) if len(runs) == 1 else None,
        id="summary",
    )
    return top if len(runs) == 1 else join([top, _comparison(runs, rows)])


def _alert(runs: Runs) -> Safe | None:
    told = [tag("p", tag("b", DIVERGED), words.removeprefix(DIVERGED)) for words in headlines(runs)]
    return tag("div", *told, class_="alert", role="alert") if told else None


def what_ran(runs: Runs) -> str:
    """One sentence: the method, the clients, the rounds."""
    facts, config = first(runs).summary(), first(runs).config
    source = (config.get("data") or {}).get("source") or {}
    name = str(source.get("name") or "") if isinstance(source, dict) else ""
    # a function that takes any data is no name for them
    data = "" if not name or name == "split" or name.startswith("from_") else f" of {name}"
    names = listed(list(runs)) if len(runs) > 1 else str(facts.get("algorithm") or next(iter(runs)))
    words = f"{shorten(names, 200)} on {count(facts.get('clients', len(first(runs).clients)))} clients{data}"
    work = _rounds(runs)
    return f"{words}: {work}, {_seeds(runs)}." if work else f"{words}, {_seeds(runs)}."


def _rounds(runs: Runs) -> str:
    """50 rounds with 20 clients each; without rounds, steps of the server. From the fewest to the most."""
    runs = federated(runs)
    everyone = [run for seeds in runs.values() for run in seeds]
    found = sorted(set(numbers(run.summary().get("rounds") for run in everyone)))
    if not found:
        return ""
    noun = "server step" if any(map(_asynchronous, everyone)) else "round"
    if len(found) > 1:
        return f"{count(found[0])} to {count(found[-1])} {noun}s"
    cohort = (first(runs).config.get("settings") or {}).get("cohort")
    each = f" with {_some(cohort, 'client')} each" if cohort is not None and noun == "round" else ""
    return _some(found[0], noun) + each


def _asynchronous(run: Result) -> bool:
    schedule = run.config.get("schedule")
    some = schedule if isinstance(schedule, list) else [schedule]
    return any(isinstance(one, Mapping) and one.get("name") == "asynchronous" for one in some)


def who_lies(runs: Runs) -> str:
    """10 of 42 clients lie (sign_flip); scores are of the honest ones. Empty where all are honest."""
    found = {label: _liars(seeds[0].summary()) for label, seeds in runs.items()}
    if not any(found.values()):
        return ""
    if len(set(found.values())) == 1:
        words = next(iter(found.values()))
    else:
        words = "; ".join(f"{shorten(label, 60)}: {lie or 'nobody lies'}" for label, lie in found.items())
    return f"{words}; scores are of the honest ones."


def _liars(facts: Mapping[str, Any]) -> str:
    block = facts.get("byzantine")
    if not isinstance(block, Mapping) or not block.get("clients"):
        return ""
    lie = "lies" if block["clients"] == 1 else "lie"
    who = f"{count(block['clients'])} of {count(facts.get('clients'))} clients {lie}"
    return f"{who} ({shorten(str(block['attack']), 60)})" if block.get("attack") else who


def _seeds(runs: Runs) -> str:
    found = list(dict.fromkeys(r.summary().get("seed") for seeds in runs.values() for r in seeds))
    shown = [str(seed) for seed in found if seed is not None]
    if not shown:
        most = max(len(seeds) for seeds in runs.values())
        return "one run" if most == 1 else f"{most} runs"
    return f"seed {shown[0]}" if len(shown) == 1 else shorten(f"seeds {listed(shown)}", 60)


def _some(n: object, noun: str) -> str:
    return f"{count(n)} {noun}" + ("" if n == 1 else "s")


def _verdict(runs: Runs, rows: Sequence[Row], best: Row, clients: Sequence[Row]) -> str:
    """The one sentence to remember."""
    if all(map(learned_nothing, ([run] for seeds in runs.values() for run in seeds))):
        return "Nothing was learned."
    higher, label = higher_is_better(runs), shorten(best["label"], 60)
    several, against = len(runs) > 1 and best["best"], references(clients, higher)
    better = _better(rows, best)
    if better is not None:
        kind, value = better
        together = kind == "local" and against[:1] == ["local"]
        ours = "together" if together else "with personal models"
        ours = f"with {label}" if several else ours
        own = score(best["personal"]["mean"])
        return f"{TITLES[kind]} is best here: {metric(runs)} {score(value)} against {own} {ours}."
    if several:
        return f"{label} scores best: {metric(runs)} {score(best['personal']['mean'])}."
    if not against:
        return "There is nothing to compare the personal models with."
    found = [changes(run.clients, against[0], higher) for run in runs[best["label"]]]
    helped = count(mean(sum(x > 0 for x in seed) for seed in found if seed))
    hurt = best[f"hurt_vs_{against[0]}"]
    what = "personalization" if against[0] == "global" else "training together"
    return (
        f"Compared with {NAMES['global'] if against[0] == 'global' else 'training alone'}, {what} helps "
        f"{helped} of {_scored(best)} and hurts {count(hurt) if hurt else 'none'}."
    )


def _scored(row: Row) -> str:
    """40 clients; where counts are means over seeds, 40 clients per seed."""
    return _some(row["scored"], "client") + (" per seed" if row["seeds"] > 1 else "")


def _better(rows: Sequence[Row], best: Row) -> tuple[str, float] | None:
    """The kind of model, with its score, that is better on average than the best personal models."""
    known = [(kind, row[kind]["mean"]) for row in rows for kind in TITLES if row[kind] is not None]
    if best["personal"] is None or not known:
        return None
    higher, own = best["higher_is_better"], best["personal"]["mean"]
    found = (max if higher else min)(known, key=lambda pair: pair[1])
    return found if difference(own, found[1], higher) < 0 else None


def _overall(row: Row) -> str:
    """What the count of clients hides: that another kind of model is better on average."""
    better = _better([row], row)
    return (
        f"But over all test samples, {NAMES[better[0]]} scores better than personal models." if better else ""
    )


def _close(runs: Runs, best: str) -> str:
    """Which labels are not clearly worse than the best: a mean alone may be luck."""
    rows = [row for row in compare.paired(runs, best) if row["clients"]]
    close = [row["label"] for row in rows if row["p"] is None or row["p"] >= CLEAR]
    if not rows:
        return "The labels have no client in common."
    if not close:
        return f"Client by client, the others differ clearly from {best} (p < 0.05)."
    return f"Client by client, {best} is not clearly different from {listed(close)} (p ≥ 0.05)."


def _who_loses(row: Row, several: bool) -> str:
    """N of M clients do worse with their personal model than with the global model; K of M than alone."""
    parts = list[str]()
    for reference, model in MODELS.items():
        hurt = row[f"hurt_vs_{reference}"]
        if hurt is not None:
            who = f"{count(row['scored'])}" if parts else f"{_scored(row)} do worse with their personal model"
            parts.append(f"{count(hurt)} of {who} than {model}")
    if not parts:
        return "No client has two scores to compare."
    start = [f"with {row['label']}"] * several + ["on average"] * (row["seeds"] > 1)
    words = ", ".join([*start, "; ".join(parts)])
    return f"{words[:1].upper()}{words[1:]}."


def _cards(row: Row, mark: bool) -> Safe:
    """Three big numbers, the best marked if it means anything."""
    known = {kind: row[kind]["mean"] for kind in KINDS if row[kind] is not None}
    choose = max if row["higher_is_better"] else min
    # equal scores are all best: a method without a personal part is its global model
    best = choose(known.values()) if len(known) > 1 and mark else None
    return tag(
        "div",
        *(_card(NAMES[kind], row[kind], row, best is not None and known.get(kind) == best) for kind in KINDS),
        class_="cards",
    )


def _card(name: str, value: dict[str, float] | None, row: Row, best: bool) -> Safe:
    several = value is not None and row["seeds"] > 1
    spread_ = tag("span", f"± {deviation(value)}", class_="deviation") if value and several else None
    below = f"{row['metric']}" if value else "not measured"
    below += f", mean of {row['seeds']} seeds" if several else ""
    return tag(
        "div",
        tag("p", name, tag("span", "best", class_="badge") if best else None, class_="name"),
        tag("p", score(value and value["mean"]), spread_, class_="big"),
        tag("p", below, class_="unit"),
        class_="card best" if best else "card",
    )


def _comparison(runs: Runs, rows: Sequence[Row]) -> Safe:
    """One row per label, and each label against the best, client by client."""
    direction = "higher" if higher_is_better(runs) else "lower"
    head = ["", "alone", "global", "personal", "worst tenth", "hurt vs global", "hurt vs alone"]
    virtual = any(row["virtual_time"] is not None for row in rows)
    head += ["time", *["virtual time"] * virtual, "sent"]
    note = (
        f"Test {metric(runs)}, {direction} is better; mean ± standard deviation over the seeds. Worst tenth: "
        "the personal score that nine clients in ten reach. Hurt: clients whose personal model is worse, "
        "the mean over the seeds."
    )
    return section(
        "comparison",
        "Which method",
        table(head, [_line(row, virtual) for row in rows]),
        tag("p", note, class_="how"),
        *_paired(runs),
    )


def _line(row: Row, virtual: bool) -> list[object]:
    gone = tag("span", "diverged", class_="badge diverged") if row["diverged"] else None
    marked = tag("b", row["label"], tag("span", "best", class_="badge"), class_="marked")
    label = join([marked if row["best"] else row["label"], gone])
    shown: list[object] = [spread(row[kind], row["seeds"]) for kind in (*KINDS, "worst_tenth")]
    hurt = [_part(row[key], row["scored"]) for key in ("hurt_vs_global", "hurt_vs_local")]
    shown[2] = tag("b", shown[2]) if row["best"] else shown[2]
    sent = None if row["bytes_up"] is None else row["bytes_up"] + (row["bytes_down"] or 0)
    times = [seconds(row["seconds"]), *[units(row["virtual_time"])] * virtual]
    return [label, *shown, *hurt, *times, bytes_(sent)]


def _part(hurt: Any, scored: Any) -> str:
    return count(hurt) if hurt is None else f"{count(hurt)} of {count(scored)}"


def _paired(runs: Runs) -> list[Safe]:
    rows = compare.paired(runs)
    against = rows[0]["against"]
    shown = [
        [
            row["label"],
            *(count(row[key]) for key in ("clients", "better", "equal", "worse")),
            signed(row["median"]),
            signed(row["mean"]),
            p_value(row["p"]),
        ]
        for row in rows
    ]
    head = ["", "clients", "better", "equal", "worse", "median change", "mean change", "p"]
    note = (
        f"Each client's personal score against its score under {against}; above zero is better than it."
        f"{over_seeds(runs)} p: Wilcoxon signed-rank test over clients, two-sided, not corrected for several "
        "comparisons."
    )
    return [
        tag("h3", f"Client by client against {against}"),
        table(head, shown),
        tag("p", note, class_="how"),
    ]
