"""The top of the page: what ran, the verdict, the numbers that matter most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.engine.divergence import DIVERGED, headlines, learned_nothing
from partita.engine.record import MODELS, Record, gain, lookup, mean, numbers
from partita.report import compare
from partita.report.html import Safe, join, note, section, table, tag
from partita.report.rows import (
    NAMES,
    Averages,
    Row,
    Runs,
    federated,
    first,
    metric,
    over_seeds,
    references,
)
from partita.report.words import (
    bytes_,
    count,
    counted,
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
REFERENCES = {"global": "with the global model", "local": "alone"}
TITLES = {"global": "One global model", "local": "Training alone"}


def header(runs: Runs, clients: Averages, title: str | None) -> Safe:
    """Return what ran, what came of it, and the numbers: cards for one label, tables for several.

    If training diverged, the page begins with that.
    """
    rows = compare.table(runs)
    winner = next((row for row in rows if row["best"]), rows[0])
    label, several = winner["label"], len(runs) > 1
    pairs = compare.paired(runs, label)
    name = title or ("Comparison of " + listed(list(runs)) if several else str(label))
    top = tag(
        "header",
        _alert(runs),
        tag("p", "Partita report", tag("span", " · ", shorten(name, 120)), class_="eyebrow"),
        tag("h1", _verdict(runs, rows, winner, clients[label])),
        tag("p", " ".join(filter(None, [what_ran(runs), byzantine(runs)])), class_="lead"),
        tag("p", _who_loses(winner, several), class_="lead"),
        tag("p", _close(pairs, label) if several else _overall(winner), class_="lead"),
        None if several else _cards(winner, mark=not learned_nothing(runs[label])),
        id="summary",
    )
    return join([top, _comparison(runs, rows, pairs)]) if several else top


def _alert(runs: Runs) -> Safe | None:
    paragraphs = [tag("p", tag("b", DIVERGED), words.removeprefix(DIVERGED)) for words in headlines(runs)]
    return tag("div", *paragraphs, class_="alert", role="alert") if paragraphs else None


# ---- what ran


def what_ran(runs: Runs) -> str:
    """Say in one sentence the method, the clients, the rounds."""
    run = first(runs)
    source = str(lookup(run.config, "data", "source", "name") or "")
    # a function that takes any data is no name for them
    data = "" if not source or source == "split" or source.startswith("from_") else f" of {source}"
    names = listed(list(runs)) if len(runs) > 1 else str(run.facts.get("algorithm") or next(iter(runs)))
    words = f"{shorten(names, 200)} on {count(run.facts.get('clients', len(run.clients)))} clients{data}"
    work = _rounds(runs)
    return f"{words}: {work}, {_seeds(runs)}." if work else f"{words}, {_seeds(runs)}."


def _rounds(runs: Runs) -> str:
    """Say '50 rounds with 20 clients each', or from the fewest to the most; asynchronous runs have steps."""
    runs = federated(runs)
    everyone = [run for seeds in runs.values() for run in seeds]
    rounds = sorted(set(numbers(run.facts.get("rounds") for run in everyone)))
    if not rounds:
        return ""
    noun = "server step" if any(map(_asynchronous, everyone)) else "round"
    if len(rounds) > 1:
        return f"{count(rounds[0])} to {count(rounds[-1])} {noun}s"
    cohort = lookup(first(runs).config, "settings", "cohort")
    each = f" with {counted(cohort, 'client')} each" if cohort is not None and noun == "round" else ""
    return counted(rounds[0], noun) + each


def _asynchronous(run: Record) -> bool:
    schedule = run.config.get("schedule")
    stages = schedule if isinstance(schedule, list) else [schedule]
    return any(lookup(stage, "name") == "asynchronous" for stage in stages)


def byzantine(runs: Runs) -> str:
    """Say how many clients are Byzantine, and whose scores the page has; nothing where all are honest."""
    attacks = {label: _attack(seeds[0].facts) for label, seeds in runs.items()}
    if not any(attacks.values()):
        return ""
    if len(set(attacks.values())) == 1:
        words = next(iter(attacks.values()))
    else:
        words = "; ".join(f"{shorten(label, 60)}: {attack or 'none'}" for label, attack in attacks.items())
    return f"{words}; scores are those of the honest clients."


def _attack(facts: Mapping[str, Any]) -> str:
    """Say '10 of 42 clients are Byzantine (sign_flip)'."""
    clients, attack = (lookup(facts, "byzantine", key) for key in ("clients", "attack"))
    if not clients:
        return ""
    verb = "is" if clients == 1 else "are"
    words = f"{count(clients)} of {count(facts.get('clients'))} clients {verb} Byzantine"
    return f"{words} ({shorten(str(attack), 60)})" if attack else words


def _seeds(runs: Runs) -> str:
    seeds = dict.fromkeys(run.facts.get("seed") for seeds in runs.values() for run in seeds)
    names = [str(seed) for seed in seeds if seed is not None]
    if not names:
        most = max(len(seeds) for seeds in runs.values())
        return "one run" if most == 1 else f"{most} runs"
    return f"seed {names[0]}" if len(names) == 1 else shorten(f"seeds {listed(names)}", 60)


# ---- the verdict


def _verdict(runs: Runs, rows: Sequence[Row], winner: Row, clients: Record) -> str:
    """Say the one sentence to remember."""
    if all(map(learned_nothing, ([run] for seeds in runs.values() for run in seeds))):
        return "Nothing was learned."
    label = shorten(winner["label"], 60)
    several, against = len(runs) > 1 and winner["best"], references(clients)
    better = _better(rows, winner)
    if better is not None:
        kind, value = better
        ours = "together" if kind == "local" and against[:1] == ["local"] else "with personal models"
        ours = f"with {label}" if several else ours
        personal = score(winner["personal"]["mean"])
        return f"{TITLES[kind]} is best here: {metric(runs)} {score(value)} against {personal} {ours}."
    if several:
        return f"{label} scores best: {metric(runs)} {score(winner['personal']['mean'])}."
    if not against:
        return "There is nothing to compare the personal models with."
    reference, seeds = against[0], runs[winner["label"]]
    helped = mean((run.gains(reference) > 0).sum() for run in seeds if run.hurt(reference) is not None)
    hurt = winner[f"hurt_vs_{reference}"]
    other = "one global model" if reference == "global" else "training alone"
    what = "personalization" if reference == "global" else "training together"
    return (
        f"Compared with {other}, {what} helps {count(helped)} of {_scored(winner)} "
        f"and hurts {count(hurt) if hurt else 'none'}."
    )


def _scored(row: Row) -> str:
    """Say '40 clients'; where counts are means over seeds, '40 clients per seed'."""
    return counted(row["scored"], "client") + (" per seed" if row["seeds"] > 1 else "")


def _better(rows: Sequence[Row], winner: Row) -> tuple[str, float] | None:
    """Return the kind of model, with its score, that is better on average than the best personal models."""
    others = [(kind, row[kind]["mean"]) for row in rows for kind in TITLES if row[kind] is not None]
    if winner["personal"] is None or not others:
        return None
    higher = winner["higher_is_better"]
    other = (max if higher else min)(others, key=lambda pair: pair[1])
    return other if gain(winner["personal"]["mean"], other[1], higher) < 0 else None


def _overall(row: Row) -> str:
    """Say what the count of clients hides: that another kind of model is better on average."""
    better = _better([row], row)
    if better is None:
        return ""
    model = "one global model" if better[0] == "global" else "training alone"
    return f"But over all test samples, {model} scores better than personal models."


def _close(pairs: Sequence[Row], winner: str) -> str:
    """Say which labels are not clearly worse than the best: a mean alone may be luck."""
    pairs = [row for row in pairs if row["clients"]]
    close = [row["label"] for row in pairs if row["p"] is None or row["p"] >= CLEAR]
    if not pairs:
        return "The labels have no client in common."
    if not close:
        return f"Client by client, the others differ clearly from {winner} (p < 0.05)."
    return f"Client by client, {winner} is not clearly different from {listed(close)} (p ≥ 0.05)."


def _who_loses(row: Row, several: bool) -> str:
    """Say 'N of M clients do worse with their personal model than with the global one; K of M than alone'."""
    parts = list[str]()
    for reference, model in REFERENCES.items():
        hurt = row[f"hurt_vs_{reference}"]
        if hurt is not None:
            who = f"{count(row['scored'])}" if parts else f"{_scored(row)} do worse with their personal model"
            parts.append(f"{count(hurt)} of {who} than {model}")
    if not parts:
        return "No client has two scores to compare."
    start = [f"with {row['label']}"] * several + ["on average"] * (row["seeds"] > 1)
    words = ", ".join([*start, "; ".join(parts)])
    return f"{words[:1].upper()}{words[1:]}."


# ---- the numbers


def _cards(row: Row, mark: bool) -> Safe:
    """Return three big numbers, the best marked if it means anything."""
    scores = {model: row[model]["mean"] for model in MODELS if row[model] is not None}
    # equal scores are all best: a method without a personal part is its global model
    best = (max if row["higher_is_better"] else min)(scores.values()) if len(scores) > 1 and mark else None
    cards = [_card(model, row, best is not None and scores.get(model) == best) for model in MODELS]
    return tag("div", *cards, class_="cards")


def _card(model: str, row: Row, best: bool) -> Safe:
    value = row[model]
    several = value is not None and row["seeds"] > 1
    unit = row["metric"] if value else "not measured"
    unit += f", mean of {row['seeds']} seeds" if several else ""
    return tag(
        "div",
        tag("p", NAMES[model], tag("span", "best", class_="badge") if best else None, class_="name"),
        tag(
            "p",
            score(value and value["mean"]),
            tag("span", f"± {deviation(value)}", class_="deviation") if several else None,
            class_="big",
        ),
        tag("p", unit, class_="unit"),
        class_="card best" if best else "card",
    )


def _comparison(runs: Runs, rows: Sequence[Row], pairs: Sequence[Row]) -> Safe:
    """Return one row per label, and each label against the best, client by client."""
    direction = "higher" if first(runs).higher_is_better else "lower"
    virtual = any(row["virtual_time"] is not None for row in rows)
    head = ["", "alone", "global", "personal", "worst tenth", "hurt vs global", "hurt vs alone"]
    head += ["time", *["virtual time"] * virtual, "sent"]
    words = (
        f"Test {metric(runs)}, {direction} is better; mean ± standard deviation over the seeds. Worst tenth: "
        "the personal score that nine clients in ten reach. Hurt: clients whose personal model is worse, "
        "the mean over the seeds."
    )
    return section(
        "comparison",
        "Which method",
        table(head, [_line(row, virtual) for row in rows]),
        note(words),
        *_paired(runs, pairs),
    )


def _line(row: Row, virtual: bool) -> list[object]:
    diverged = tag("span", "diverged", class_="badge diverged") if row["diverged"] else None
    best = tag("b", row["label"], tag("span", "best", class_="badge"), class_="marked")
    scores: list[object] = [spread(row[key], row["seeds"]) for key in (*MODELS, "worst_tenth")]
    scores[2] = tag("b", scores[2]) if row["best"] else scores[2]
    hurt = [row[key] for key in ("hurt_vs_global", "hurt_vs_local")]
    sent = None if row["bytes_up"] is None else row["bytes_up"] + (row["bytes_down"] or 0)
    return [
        join([best if row["best"] else row["label"], diverged]),
        *scores,
        *(count(n) if n is None else f"{count(n)} of {count(row['scored'])}" for n in hurt),
        seconds(row["seconds"]),
        *[units(row["virtual_time"])] * virtual,
        bytes_(sent),
    ]


def _paired(runs: Runs, pairs: Sequence[Row]) -> list[Safe]:
    against = pairs[0]["against"]
    rows = [
        [
            row["label"],
            *(count(row[key]) for key in ("clients", "better", "equal", "worse")),
            signed(row["median"]),
            signed(row["mean"]),
            p_value(row["p"]),
        ]
        for row in pairs
    ]
    head = ["", "clients", "better", "equal", "worse", "median change", "mean change", "p"]
    words = (
        f"Each client's personal score against its score under {against}; above zero is better than it."
        f"{over_seeds(runs)} p: Wilcoxon signed-rank test over clients, two-sided, not corrected for several "
        "comparisons."
    )
    return [tag("h3", f"Client by client against {against}"), table(head, rows), note(words)]
