"""Which method: the tables of a comparison, with what can be told apart and what cannot."""

from __future__ import annotations

from collections.abc import Sequence

from partita.engine import verdict
from partita.report import ranking
from partita.report.critical_difference import picture
from partita.report.html import Safe, join, note, section, table, tag
from partita.report.rows import Row, Runs, first, metric
from partita.report.words import MISSING, bytes_, count, p_value, rounded, score, seconds, spread, units

EPOCHS = ("epochs", "epochs_min", "epochs_max")
REFERENCES = {"global": "one global model", "local": "training alone"}


def lengths(rows: Sequence[Row]) -> Safe | None:
    """Return how long each method and baseline has trained: local epochs of a client, and how it ended."""
    parts = {row["label"]: row for row in rows}
    for kind, name in REFERENCES.items():
        beside = {row["label"]: row["baselines"][kind] for row in rows if kind in row["baselines"]}
        alike = all(facts == next(iter(beside.values())) for facts in beside.values())
        for label, facts in beside.items():
            parts[name if alike else f"{name} (beside {label})"] = facts
    lines = [
        [
            name,
            *(rounded(facts[f"epochs{end}"]) for end in ("", "_min", "_max")),
            facts["training"] or MISSING,
        ]
        for name, facts in parts.items()
        if facts["training"] or facts["epochs"] is not None
    ]
    if not lines:
        return None
    head = ["trained", "local epochs per client, mean", "least", "most", "how training ended"]
    return tag("div", table(head, lines, words=(0, 4)), class_="lengths")


def comparison(runs: Runs, rows: Sequence[Row]) -> Safe:
    """Return the tables of a comparison: scores, who loses, how long each trained, and every pair."""
    direction = "higher" if first(runs).higher_is_better else "lower"
    where = ranking.standing(runs)
    virtual = any(row["virtual_time"] is not None for row in rows)
    head = ["", "personal", "95 % interval", "alone", "global", "worst tenth", "average rank", "local epochs"]
    head += ["time", *["virtual time"] * virtual, "sent"]
    words = (
        f"Test {metric(runs)}, {direction} is better; mean ± standard deviation over the seeds. The "
        "interval is that of the personal mean when clients and seeds are drawn anew. Worst tenth: the "
        "personal score that nine clients in ten reach. Average rank: over the clients, 1 is best. Local "
        "epochs: of a mean client."
    )
    return section(
        "comparison",
        "Which method",
        table(head, [_line(row, virtual, where) for row in rows]),
        note(words),
        *_ranks(where),
        *_pairs(where),
        *_hurt(rows),
        tag("h3", "How long each has trained"),
        lengths(rows) or note("Not recorded."),
    )


def _line(row: Row, virtual: bool, where: ranking.Standing) -> list[object]:
    diverged = tag("span", "diverged", class_="badge diverged") if row["diverged"] else None
    best = tag("b", row["label"], tag("span", "best", class_="badge"), class_="marked")
    clear = row["label"] == where.clearly_best
    personal = spread(row["personal"], row["seeds"])
    sent = None if row["bytes_up"] is None else row["bytes_up"] + (row["bytes_down"] or 0)
    return [
        join([best if clear else row["label"], diverged]),
        tag("b", personal) if row["best"] else personal,
        " to ".join(map(score, row["interval"])) if row["interval"] else MISSING,
        *(spread(row[key], row["seeds"]) for key in ("local", "global", "worst_tenth")),
        units(where.ranks.get(row["label"])),
        rounded(row["epochs"]),
        seconds(row["seconds"]),
        *[units(row["virtual_time"])] * virtual,
        bytes_(sent),
    ]


def _ranks(where: ranking.Standing) -> list[Safe]:
    """Return the picture of average ranks, with a bar over methods that cannot be told apart."""
    if not where.ranks:
        return []
    words = (
        f"Average ranks over {count(where.clients)} clients, the best on the left. A bar joins methods of "
        "which no two differ beyond chance (Wilcoxon's signed-rank test, corrected for all pairs by "
        "Holm). CD: ranks farther apart than this differ by Nemenyi's test. That all are alike: p "
        f"{'' if where.p < 0.001 else '= '}{p_value(where.p)} (Friedman)."
    )
    return [tag("h3", "Average ranks"), picture(where), note(words)]


def _pairs(where: ranking.Standing) -> list[Safe]:
    if not where.pairs:
        return [note("Fewer than two clients have a score of every method: nothing can be compared.")]
    rows = [
        [
            pair.first,
            pair.second,
            str(pair.difference).split(" (")[0],
            pair.difference.interval(),
            p_value(pair.p_mean),
            p_value(pair.p_rank),
            "clear" if pair.clear else "too early" if pair.early else "not clear",
        ]
        for pair in where.pairs
    ]
    head = [
        "better on average",
        "than",
        "difference",
        "interval",
        "p of the mean",
        "p of the ranks",
        "verdict",
    ]
    words = (
        "Mean differences of the clients' personal scores, above zero is better for the first. The "
        "intervals hold for all pairs at once, and the p-values are corrected for all pairs. Too early: "
        "one of the two still improves, or nobody knows whether it does."
    )
    return [tag("h3", "Every pair"), table(head, rows, words=(0, 1, 6)), note(words)]


def _hurt(rows: Sequence[Row]) -> list[Safe]:
    """Return the three things about who loses, against each reference."""
    kinds = [kind for kind in REFERENCES if any(row[f"hurt_vs_{kind}"] is not None for row in rows)]
    if not kinds:
        return []
    head = [""]
    for kind in kinds:
        other = {"global": "global", "local": "alone"}[kind]
        head += [f"worse vs {other} (sample)", f"worse vs {other} beyond chance", f"truly lose vs {other}"]
    body = []
    for row in rows:
        line: list[object] = [row["label"]]
        for kind in kinds:
            hurt, chance = row[f"hurt_vs_{kind}"], row[f"chance_vs_{kind}"]
            line += [
                MISSING if hurt is None else f"{count(hurt)} of {count(row['scored'])}",
                count(chance and chance["beyond_chance"]),
                verdict.estimate(chance) or MISSING,
            ]
        body.append(line)
    words = (
        "Clients whose personal model scores less than the global one, or than training alone: in the "
        "sample; beyond chance, where at most one in ten of those counted is so by chance; and an "
        "estimate, with a 95 % interval, of how many would lose on test samples without end. Means over "
        "the seeds."
    )
    return [tag("h3", "Who is worse off"), table(head, body), note(words)]
