"""The top of the page: what ran, the verdict, the numbers that matter most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.engine import verdict
from partita.engine.divergence import DIVERGED, headlines, learned_nothing
from partita.engine.record import MODELS, Record, further_metrics, lookup, numbers, spread
from partita.report import compare, ranking
from partita.report.html import Safe, join, section, table, tag
from partita.report.methods import REFERENCES, comparison, lengths
from partita.report.rows import (
    NAMES,
    Averages,
    Row,
    Runs,
    average,
    differs,
    federated,
    first,
    metric,
    references,
)
from partita.report.words import (
    count,
    counted,
    deviation,
    listed,
    score,
    shorten,
)
from partita.report.words import spread as spread_text


def header(runs: Runs, clients: Averages, title: str | None) -> Safe:
    """Return what ran, what came of it, and the numbers: cards for one label, tables for several.

    If training diverged, the page begins with that.
    """
    rows = compare.table(runs)
    winner = next((row for row in rows if row["best"]), rows[0])
    label, several = winner["label"], len(runs) > 1
    name = title or ("Comparison of " + listed(list(runs)) if several else str(label))
    said = _said(runs, winner, clients[label])
    top = tag(
        "header",
        _alert(runs),
        tag("p", "Partita report", tag("span", " · ", shorten(name, 120)), class_="eyebrow"),
        tag("h1", said[0]),
        *(tag("p", words, class_="lead") for words in said[1:]),
        tag("p", " ".join(filter(None, [what_ran(runs), byzantine(runs)])), class_="lead"),
        None if several else _cards(winner, mark=not learned_nothing(runs[label])),
        None if several else lengths([winner]),
        id="summary",
    )
    return join([top, comparison(runs, rows) if several else None, _other_metrics(runs)])


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


def said(runs: Runs) -> list[str]:
    """Return the sentence to remember, and what else must be known to read it; for pages and terminals."""
    rows = compare.table(runs)
    winner = next((row for row in rows if row["best"]), rows[0])
    return _said(runs, winner, average(list(runs[winner["label"]])))


def _said(runs: Runs, winner: Row, clients: Record) -> list[str]:
    if all(map(learned_nothing, ([run] for seeds in runs.values() for run in seeds))):
        return ["Nothing was learned."]
    seeds = runs[winner["label"]]
    facts, name = seeds[0].facts, metric(runs)
    means = [winner[model] and winner[model]["mean"] for model in MODELS]
    best = verdict.best_of(means, winner["higher_is_better"])
    low = winner["interval"][0] if winner["interval"] and best == means[-1] else None
    first_of_all = verdict.majority_first(name, facts.get("majority"), best, low)
    line = "" if first_of_all else verdict.majority_line(name, facts.get("majority"))
    if len(runs) > 1:
        sentence = ranking.sentence(ranking.standing(runs), name, runs)
        losses = [_losers(winner, kind, f"With {shorten(winner['label'], 60)}, ") for kind in REFERENCES]
    else:
        sentence = _of_one(seeds, winner, clients)
        losses = [_losers(winner, kind) for kind in REFERENCES]
    start = [f"{first_of_all}.", sentence] if first_of_all else [sentence]
    choice = verdict.choice(facts) if len(runs) == len(seeds) == 1 else ""
    return [*start, *filter(None, [line, " ".join(filter(None, losses)), choice, _undefined(runs)])]


def _of_one(seeds: Sequence[Record], row: Row, clients: Record) -> str:
    """Say how the personal models compare with the global one and with training alone."""
    kinds = references(clients)
    if not kinds and all(run.facts.get("deployed") for run in seeds):
        return _of_real_clients(row, seeds)
    if kinds and not any(differs(clients, kind) for kind in kinds):
        return f"Personal models score as {verdict.listed([REFERENCES[k] for k in kinds])}, for every client."
    same = "global" in kinds and not differs(clients, "global")
    kinds = [kind for kind in kinds if differs(clients, kind)]
    trainings = {kind: [ranking.of_baseline(run, kind) for run in seeds] for kind in kinds}
    trainings["run"] = [run.facts.get("training") for run in seeds]
    losses = verdict.losers(row[f"chance_vs_{kinds[0]}"], kinds[0], short=True) if kinds else ""
    return verdict.of_models(
        {kind: compare.change(seeds, kind) for kind in kinds},
        trainings,
        subject="one global model" if same else "personal models",
        losses=losses,
    )


def _of_real_clients(row: Row, seeds: Sequence[Record]) -> str:
    """Say how good the clients' own models are, as far as the clients tell: a deployment has no baselines."""
    own = f"{counted(seeds[0].facts['clients'], 'client')} have models of their own"
    if row["personal"] is None:
        return f"{own}; how good these are is known to the clients alone."
    return f"{own}, with {row['metric']} {score(row['personal']['mean'])} on average."


def _losers(row: Row, kind: str, start: str = "") -> str:
    """Say of how many clients lose the three things; of older runs what was counted."""
    words = verdict.losers(row[f"chance_vs_{kind}"], kind)
    if not words and row[f"hurt_vs_{kind}"] is not None:
        model = {"global": "with one global model", "local": "alone"}[kind]
        words = f"{count(row[f'hurt_vs_{kind}'])} of {_scored(row)} do worse than {model} in the sample"
        words += "; how many beyond chance is not known"
    return f"{start}{words}." if words else ""


def _scored(row: Row) -> str:
    """Say '40 clients'; where counts are means over seeds, '40 clients per seed'."""
    return counted(row["scored"], "client") + (" per seed" if row["seeds"] > 1 else "")


def _undefined(runs: Runs) -> str:
    """Say for how many clients a metric is undefined, and for whom."""
    undefined = first(runs).facts.get("undefined") or {}
    words = [
        f"{name} for {len(who)} clients ({shorten(', '.join(who), 80)})" for name, who in undefined.items()
    ]
    return f"Undefined, and in no mean: {'; '.join(words)}." if words else ""


# ---- the numbers


def _cards(row: Row, mark: bool) -> Safe:
    """Return three big numbers, the best marked if it means anything."""
    scores = {model: row[model]["mean"] for model in MODELS if row[model] is not None}
    # equal scores are all best: a method without a personal part is its global model
    best = (max if row["higher_is_better"] else min)(scores.values()) if len(scores) > 1 and mark else None
    cards = [_card(model, row, best is not None and scores.get(model) == best) for model in MODELS]
    return tag("div", *cards, class_="cards")


def _other_metrics(runs: Runs) -> Safe | None:
    """Return the scores by the metrics beyond the first; None where there is one metric."""
    names = dict.fromkeys(k for seeds in runs.values() for run in seeds for k in further_metrics(run.facts))
    rows = []
    for label, seeds in runs.items():
        found = [further_metrics(run.facts) for run in seeds]
        for name in names:
            means = [spread(lookup(each, name, model) for each in found) for model in MODELS]
            start = [label, name] if len(runs) > 1 else [name]
            rows.append([*start, *(spread_text(value, len(seeds)) for value in means)])
    head = [*["method"] * (len(runs) > 1), "metric", *NAMES.values()]
    words = tuple(range(len(head) - len(MODELS)))
    return section("other-metrics", "Other metrics", table(head, rows, words=words)) if names else None


def _card(model: str, row: Row, best: bool) -> Safe:
    value = row[model]
    several = value is not None and row["seeds"] > 1
    unit = row["metric"] if value else "not measured"
    unit += f", mean of {row['seeds']} seeds" if several else ""
    badge = tag("span", f"{'highest' if row['higher_is_better'] else 'lowest'} mean", class_="badge")
    return tag(
        "div",
        tag("p", NAMES[model], badge if best else None, class_="name"),
        tag(
            "p",
            score(value and value["mean"]),
            tag("span", f"± {deviation(value)}", class_="deviation") if several else None,
            class_="big",
        ),
        tag("p", unit, class_="unit"),
        class_="card best" if best else "card",
    )
