"""The top of the page: what ran, the verdict, the numbers that matter most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partita.report import compare
from partita.report.html import Safe, join, section, table, tag
from partita.report.rows import (
    KINDS,
    NAMES,
    Means,
    Row,
    Runs,
    changes,
    first,
    higher_is_better,
    metric,
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
)

CLEAR = 0.05
MODELS = {"global": "with the global model", "local": "alone"}


def header(runs: Runs, means: Means, title: str | None) -> Safe:
    """What ran, what came of it, and the numbers: cards for one label, tables for several."""
    rows = compare.table(runs)
    best = next((row for row in rows if row["best"]), rows[0])
    clients, higher = means[best["label"]], higher_is_better(runs)
    name = title or ("Comparison of " + listed(list(runs)) if len(runs) > 1 else str(best["label"]))
    top = tag(
        "header",
        tag("p", "Partita report", tag("span", " · ", shorten(name, 120)), class_="eyebrow"),
        tag("h1", _verdict(runs, best, clients)),
        tag("p", what_ran(runs), class_="lead"),
        tag("p", *_who_loses(clients, higher, _of(runs, best)), class_="lead"),
        tag("p", _close(runs) if len(runs) > 1 else _overall(best), class_="lead"),
        _cards(best) if len(runs) == 1 else None,
        id="summary",
    )
    return top if len(runs) == 1 else join([top, _comparison(runs, rows)])


def what_ran(runs: Runs) -> str:
    """One sentence: the method, the clients, the rounds."""
    facts, config = first(runs).summary(), first(runs).config
    settings, source = config.get("settings") or {}, (config.get("data") or {}).get("source") or {}
    data = f" of {source['name']}" if isinstance(source, dict) and source.get("name") else ""
    names = listed(list(runs)) if len(runs) > 1 else str(facts.get("algorithm") or next(iter(runs)))
    words = f"{shorten(names, 200)} on {count(facts.get('clients', len(first(runs).clients)))} clients{data}"
    if facts.get("rounds") is not None:
        words += f": {_some(facts['rounds'], 'round')}"
        if settings.get("cohort") is not None:
            words += f" with {_some(settings['cohort'], 'client')} each"
    return f"{words}, {_seeds(runs)}."


def _seeds(runs: Runs) -> str:
    found = list(dict.fromkeys(r.summary().get("seed") for seeds in runs.values() for r in seeds))
    shown = [str(seed) for seed in found if seed is not None]
    if not shown:
        most = max(len(seeds) for seeds in runs.values())
        return "one run" if most == 1 else f"{most} runs"
    return f"seed {shown[0]}" if len(shown) == 1 else shorten(f"seeds {listed(shown)}", 60)


def _some(n: object, noun: str) -> str:
    return f"{count(n)} {noun}" + ("" if n == 1 else "s")


def _of(runs: Runs, best: Row) -> str:
    """Whose clients the next sentence is about."""
    parts = [f"with {best['label']}"] if len(runs) > 1 else []
    parts += ["averaged over the seeds"] if best["seeds"] > 1 else []
    words = ", ".join(parts)
    return f"{words[:1].upper()}{words[1:]}, " if parts else ""


def _verdict(runs: Runs, best: Row, clients: Sequence[Row]) -> str:
    """The one sentence to remember."""
    higher = higher_is_better(runs)
    if len(runs) > 1 and best["best"]:
        return f"{shorten(best['label'], 60)} scores best: {metric(runs)} {score(best['personal']['mean'])}."
    against = references(clients, higher)
    if not against:
        return "There is nothing to compare the personal models with."
    found = changes(clients, against[0], higher)
    helped, hurt = sum(x > 0 for x in found), sum(x < 0 for x in found)
    what = "Personalization" if against[0] == "global" else "Training together"
    return f"{what} helps {helped:,} of {_some(len(found), 'client')} and hurts {hurt or 'none'}."


def _overall(row: Row) -> str:
    """What the count of clients hides: that another kind of model is better on average."""
    known = {kind: row[kind]["mean"] for kind in KINDS if row[kind] is not None}
    if "personal" not in known:
        return ""
    choose = max if row["higher_is_better"] else min
    best = choose(known, key=lambda kind: known[kind])
    if known[best] == known["personal"]:
        return ""
    return f"But over all test samples, {NAMES[best]} scores better than personal models."


def _close(runs: Runs) -> str:
    """Which labels are not clearly worse than the best: a mean alone may be luck."""
    rows = compare.paired(runs)
    close = [row["label"] for row in rows if row["p"] is None or row["p"] >= CLEAR]
    if not close:
        return "Client by client, the others differ clearly from it (p < 0.05)."
    return f"Client by client, it is not clearly different from {listed(close)} (p ≥ 0.05)."


def _who_loses(rows: Sequence[Row], higher: bool, start: str) -> list[object]:
    """N of M clients do worse with their personal model than with the global model; K of M than alone."""
    parts = list[str]()
    for reference in ("global", "local"):
        found = changes(rows, reference, higher)
        if found:
            hurt, model = sum(x < 0 for x in found), MODELS[reference]
            with_own = "" if parts else " do worse with their personal model"
            parts.append(f"{hurt:,} of {_some(len(found), 'client')}{with_own} than {model}")
    if not parts:
        return ["No client has two scores to compare."]
    return [start, "; ".join(parts).replace("clients than alone", "than alone"), "."]


def _cards(row: Row) -> Safe:
    """Three big numbers, the best marked."""
    known = {kind: row[kind]["mean"] for kind in KINDS if row[kind] is not None}
    choose = max if row["higher_is_better"] else min
    # equal scores are all best: a method without a personal part is its global model
    best = choose(known.values()) if len(known) > 1 else None
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
    head += ["time", "sent"]
    note = (
        f"Test {metric(runs)}, {direction} is better; mean ± standard deviation over the seeds. Worst tenth: "
        "the personal score that nine clients in ten reach. Hurt: clients whose personal model is worse."
    )
    return section(
        "comparison",
        "Which method",
        table(head, [_line(row) for row in rows]),
        tag("p", note, class_="how"),
        *_paired(runs),
    )


def _line(row: Row) -> list[object]:
    marked = tag("b", row["label"], tag("span", "best", class_="badge"), class_="marked")
    label = marked if row["best"] else row["label"]
    shown: list[object] = [spread(row[kind], row["seeds"]) for kind in (*KINDS, "worst_tenth")]
    hurt = [_part(row[key], row["scored"]) for key in ("hurt_vs_global", "hurt_vs_local")]
    shown[2] = tag("b", shown[2]) if row["best"] else shown[2]
    sent = None if row["bytes_up"] is None else row["bytes_up"] + (row["bytes_down"] or 0)
    return [label, *shown, *hurt, seconds(row["seconds"]), bytes_(sent)]


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
        "Each client's personal score against its score under "
        f"{against}, averaged over the seeds; above zero is better than {against}. p: Wilcoxon signed-rank "
        "test over clients, two-sided, not corrected for several comparisons."
    )
    return [
        tag("h3", f"Client by client against {against}"),
        table(head, shown),
        tag("p", note, class_="how"),
    ]
