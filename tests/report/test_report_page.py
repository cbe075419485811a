"""The page as text: what is said, what is escaped, what happens when numbers are missing."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib
from html import unescape
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from report_rows import attacked, client, example, fake, record

from partita.engine.record import Record
from partita.engine.samples import Samples
from partita.engine.table import Table
from partita.report import page as pages
from partita.report.compare import table
from partita.report.cost import cost, visits
from partita.report.figures import MOST_POINTS
from partita.report.header import header, what_ran
from partita.report.html import data
from partita.report.hurt import MOST_ROWS, hurt, worst_first
from partita.report.page import page
from partita.report.rows import averages, checked
from partita.report.settings import flat, settings
from support import each

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'"
SECTIONS = ("summary", "curves", "clients", "distribution", "hurt", "cost", "settings")
LEVEL = {"rounds": 50, "ended": "rounds", "rising": False, "epochs": {"mean": 25.0, "min": 3.0, "max": 40.0}}
RISING = {**LEVEL, "rising": True}
CONVERGED = {**LEVEL, "ended": "converged"}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plotly.js, whose megabytes have no part in these tests; the browser tests have it."""
    offline = SimpleNamespace(get_plotlyjs=lambda: "/* plotly */")
    monkeypatch.setattr(pages, "import_module", lambda _: offline)


def shown(markup: str) -> str:
    """The text that a reader sees."""
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup)).strip())


def top(runs: dict[str, list[Record]], title: str | None = None) -> str:
    return shown(header(runs, averages(runs), title))


def losers(run: Record) -> str:
    return hurt({"x": [run]}, averages({"x": [run]}))


# ---- the whole page


def test_all_sections_are_there() -> None:
    text = page({"fedalt": [example()]})
    assert [name for name in SECTIONS if f'id="{name}"' not in text] == []
    assert text.count('id="plotly"') == 1
    assert text.count("How to read this.") == 4


def test_the_tables_of_a_study_are_on_its_page_with_what_they_advise() -> None:
    advice = (
        "Candidate splits",
        ("part", "score"),
        [("→ output", "0.9000")],
        "Recommended: output.\n\nshare: of all",
    )
    text = shown(page({"fedalt": [example()]}, tables=[advice]))
    assert "Candidate splits part score → output 0.9000 Recommended: output. share: of all" in text


def test_a_page_of_many_clients_and_methods_stays_small() -> None:
    runs = {name: [example(name, clients=100)] for name in "abcd"}
    assert len(page(runs)) < 150_000  # beside plotly.js, of 1.84 million


def test_every_client_is_in_the_table() -> None:
    runs = {name: [example(name, clients=300)] for name in "ab"}
    rows = json.loads(embedded_text(page(runs), "rows"))
    assert rows["names"] == ["client", "train", "test", "a", "b", "one global model", "training alone"]
    assert [row[0] for row in rows["rows"]] == [f"client {i}" for i in range(300)]
    assert rows["rows"][7][3] == pytest.approx(runs["a"][0].clients[7]["personal"], rel=1e-4)
    one = json.loads(embedded_text(page({"a": [example(clients=4)]}), "rows"))
    assert "change vs global" in one["names"]
    assert "worse vs alone beyond chance" in one["names"]


def test_several_labels_add_the_comparison() -> None:
    runs = {
        label: [example(label, seed, gain=gain) for seed in (0, 1)] for label, gain in (("a", 0), ("b", 0.1))
    }
    text = page(runs)
    assert 'id="comparison"' in text
    assert "It is too early to say which method is best" in shown(text)
    assert 'class="ranks"' in text
    assert 'class="card' not in text


def test_no_text_of_users_becomes_markup() -> None:
    run = example(clients=6)
    for row in run.clients:
        row.update(client=EVIL, personal=0.1, label_shift=None)
    run.facts.update({"algorithm": EVIL, "metric": EVIL, "excluded": [EVIL]})
    run.config.clear()
    run.config.update(
        {
            EVIL: EVIL,
            "executor": {"picks": {EVIL: {"picked": EVIL, "why": EVIL}}},
            "versions": {EVIL: EVIL},
        }
    )
    text = page({EVIL: [run], EVIL + "2": [run]}, title=EVIL)
    assert "alert(1)</script>" not in text.replace("&lt;/script&gt;", "")
    assert "<img" not in text
    assert text.count("<script") == 4  # the figures, the table, plotly and ours
    assert "excluded: its uploads" in text


def embedded_text(text: str, name: str) -> str:
    """What script.js reads."""
    found = re.search(rf'<script type="([^"]+)" id="{name}">(.*?)</script>', text, re.S)
    assert found is not None
    if found[1] == "application/json":
        return found[2]
    return zlib.decompress(base64.b85decode(found[2].translate(str.maketrans(".:,", "<>&")))).decode()


def test_figures_travel_as_json() -> None:
    text = page({"fedalt": [example()]})
    assert set(json.loads(embedded_text(text, "figures"))) == {"curves", "losses", "clients", "violins"}
    assert json.loads(data({"a": EVIL})) == {"a": EVIL}
    assert not set("<>&") & set(data({"a": EVIL}))


def test_only_our_scripts_may_run_and_nothing_is_fetched() -> None:
    text = page({"fedalt": [example()]})
    policy = re.search(r'Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy.group(1)
    assert policy.group(1).count("'sha256-") == 2
    assert "https://" not in text.replace("https://www.w3.org", "")


NAN = float("nan")
ODD: dict[str, Record] = {
    "nothing at all": record([]),
    "one client": fake(client("only", 0.5, 0.4, 0.3)),
    "no reference": fake(client("a", 0.5), client("b", 0.6)),
    "no score": fake(client("a", None), client("b", NAN)),
    "no test data": fake(client("a", None, n_test=0), client("b", 0.6, 0.5, n_test=3)),
    "bare rows": fake({"client": "a"}, {"client": "b", "personal": 0.5, "global": 0.5}),
    "no training data": fake(client("a", 0.5, 0.4, n_train=0), client("b", 0.5, 0.4, n_train=None)),
    "infinite": fake(client("a", float("inf"), 0.4), client("b", 0.5, -float("inf"))),
    "regression": fake(
        client("a", 1234.5, 2000.0), client("b", 3.0, 1e-7), higher_is_better=False, metric="mse"
    ),
    "odd config": record([client("a", 0.5)], config={"settings": None, "data": None, "executor": "loop"}),
    "odd metrics": record(
        [], metrics=[{}, {"round": 1, "test.personal": NAN}, {"round": 2, "train_loss": 1}]
    ),
}


@each("name", ODD)
def test_odd_runs_have_a_page(name: str) -> None:
    for runs in ({"x": [ODD[name]]}, {"x": [ODD[name]], "y": [ODD[name], ODD[name]]}):
        text = page(runs)
        assert [s for s in SECTIONS if f'id="{s}"' not in text] == []
        assert "nan" not in shown(text.split("<main>")[1].split("<footer>")[0]).lower().split()


def test_a_random_selection_is_admitted() -> None:
    rows = [client(str(i), 0.9, 0.5) for i in range(MOST_POINTS + 1)]
    assert "Of 5,001 clients, the figures show 5,000 chosen at random" in page({"x": [fake(*rows)]})
    assert "chosen at random" not in page({"x": [fake(*rows[1:])]})


# ---- the header


def judged(run: Record, training: Any = CONVERGED, **baselines: Any) -> Record:
    """The run, with how it and its baselines have trained."""
    run.facts.update(training=training, baselines={"local": CONVERGED, "global": CONVERGED, **baselines})
    return run


def title(run: Record) -> str:
    return shown(re.search("<h1>(.*?)</h1>", header({"x": [run]}, averages({"x": [run]}), None))[1])  # type: ignore[index]


def gaining(by: float, alone: float = 0.5, clients: int = 12, **facts: Any) -> Record:
    """Clients whose personal models are better than the global one by about so much."""
    rows = [client(str(i), 0.7 + by + 0.01 * (i % 3 - 1), 0.7, alone) for i in range(clients)]
    return judged(fake(*rows, **facts))


def test_three_numbers_and_what_ran() -> None:
    rows = [client("a", 0.9, 0.8, 0.95), client("b", 0.7, 0.8, 0.6), client("c", 0.5, 0.5, 0.4)]
    run = fake(*rows, algorithm="fedalt", rounds=9, test={"local": 0.7, "global": 0.72345, "personal": 0.75})
    text = top({"fedalt": [run]})
    assert "1 of 3 clients do worse than with one global model in the sample" in text
    assert "how many beyond chance is not known" in text
    assert "one global model 0.7235 accuracy" in text
    assert "personal models highest mean 0.7500" in text
    assert "fedalt on 3 clients: 9 rounds, seed 0." in text


def test_a_clear_gain_is_called_so_with_its_interval() -> None:
    found = title(gaining(0.1))
    assert found.startswith("On average personal models are better than one global model by 0.100 (0.09")
    assert "and better than training alone by 0.300" in found
    assert "better" in title(gaining(0.1, higher_is_better=True))
    turned = title(gaining(0.1, higher_is_better=False, metric="mse"))
    assert turned.startswith("On average personal models are worse than one global model by 0.100")


def test_what_is_within_chance_is_not_called_better() -> None:
    run = gaining(0.0, alone=0.6)
    assert title(run).startswith(
        "On average personal models are not clearly different from one global model: 0"
    )
    assert "better than training alone" in title(run)


@each("training", [RISING, {**LEVEL, "rising": None}, None])
def test_nothing_is_better_before_both_have_trained_enough(training: Any) -> None:
    for run in (
        judged(gaining(0.1), training),
        judged(gaining(0.1), **{"global": training, "local": training}),
    ):
        found = title(run)
        assert found.startswith(
            "It is too early to say whether personal models are better than one global model"
        )
        assert "raise rounds, or use until='converged'" in found
    assert "still improve" in title(judged(gaining(0.1), RISING))
    partly = title(judged(gaining(0.1), local=training))
    assert partly.startswith("On average personal models are better than one global model by")
    assert "too early to say whether personal models are better than training alone" in partly
    assert title(judged(gaining(0.1), LEVEL)) == title(gaining(0.1))


def test_accuracy_below_the_majority_is_said_first() -> None:
    run = gaining(0.1, majority={"everyone": 0.85, "own": 0.6})
    assert title(run).startswith(
        "Accuracy says little here: always predicting everyone's most frequent class"
    )
    assert "metric='auc' or 'balanced_accuracy'" in title(run)
    assert "better than one global model" in top({"x": [run]})  # but not in the title
    better = gaining(0.1, majority={"everyone": 0.65, "own": 0.6})
    assert title(better).startswith("On average")
    assert "Classes are imbalanced: always predicting everyone's most frequent" in top({"x": [better]})
    assert "imbalanced" not in top({"x": [gaining(0.1, majority={"everyone": 0.3, "own": 0.4})]})
    by_auc = gaining(0.1, metric="auc", majority={"everyone": 0.95, "own": 0.95})
    assert title(by_auc).startswith("On average")
    assert "imbalanced" in top({"x": [by_auc]})


CHANCE = {
    "worse": 9,
    "beyond_chance": 2,
    "clients": ["1", "2"],
    "estimate": 5.2,
    "low": 2,
    "high": 7,
    "of": 12,
}


def test_who_loses_is_three_things() -> None:
    run = gaining(0.1, chance={"vs_global": CHANCE, "vs_local": {**CHANCE, "beyond_chance": 1}})
    assert title(run).endswith("2 of 12 clients are worse off than with one global model beyond chance.")
    both = gaining(0.1, chance={"vs_global": {**CHANCE, "better_beyond_chance": 1}})
    words = "1 of 12 clients is better off and 2 worse off than with one global model beyond chance."
    assert title(both).endswith(words)
    text = top({"x": [run]})
    three = "9 of 12 clients do worse than with one global model; beyond chance 2"
    assert f"{three}; estimate of those who truly lose: 5 (2 to 7)." in text
    assert "than alone; beyond chance 1" in text
    both = header({"x": [run], "y": [run]}, averages({"x": [run], "y": [run]}), None)
    assert "truly lose vs global" in both
    assert shown(both).count("5 (2 to 7)") == 2 + 4  # said of the best, and in the table of both


def of_methods(*pairs: tuple[str, float], **training: Any) -> str:
    runs = {name: [gaining(by)] for name, by in pairs}
    for name, facts in training.items():
        judged(runs[name][0], facts)
    return shown(header(runs, averages(runs), None).split("</h1>")[0].split("<h1>")[1])


def test_the_best_of_several_is_named_only_where_it_is_clear() -> None:
    methods = (("a", 0.1), ("b", 0.05))
    assert of_methods(*methods).startswith("a is better than the other methods on average, by 0.05")
    assert of_methods(("a", 0.1), ("b", 0.1)).startswith("No clear difference between a and b: 0")
    three = of_methods(("a", 0.1), ("b", 0.1), ("c", 0.1))
    assert three.startswith("a has the best mean, but is not clearly better than b and c: 0")
    assert of_methods(*methods, a=RISING).startswith(
        "It is too early to say which method is best: a still improves at the last round: raise rounds"
    )
    behind = of_methods(*methods, b=RISING)
    assert behind.startswith("a is better than one global model and training alone on average")
    assert "too early to say of b: b still improves at the last round" in behind


def test_training_alone_may_be_the_best_of_a_comparison() -> None:
    runs = {name: [gaining(by, alone=0.95)] for name, by in (("a", 0.1), ("b", 0.05))}
    assert "training alone is better than the other methods on average" in top(runs)


def test_without_a_personal_part_training_alone_is_the_measure() -> None:
    rows = [client(str(i), 0.9, 0.9, 0.8 + 0.01 * (i % 2)) for i in range(9)]
    assert title(judged(fake(*rows))).startswith(
        "On average one global model is better than training alone by"
    )


def test_how_long_each_has_trained_is_shown() -> None:
    run = judged(gaining(0.1), RISING, local=CONVERGED)
    text = top({"x": [run]})
    assert "x 25 3 40 stopped after 50 rounds, still rising" in text
    assert "training alone 25 3 40 converged at round 50" in text


def test_seeds_are_averaged_and_said() -> None:
    runs = {"x": [fake(client("a", 0.5, 0.6), seed=3), fake(client("a", 0.9, 0.6), seed=5)]}
    text = top(runs, "My title")
    assert "My title" in text
    assert "0.7000 ± 0.2828" in text
    assert "seeds 3 and 5" in text


def test_the_hurt_are_counted_as_in_the_table() -> None:
    # averaged over the seeds neither is hurt; in each seed one of them is
    scores = ((0.5, 0.9), (0.9, 0.5))
    seeds = [fake(client("a", x, 0.6), client("b", y, 0.6), seed=i) for i, (x, y) in enumerate(scores)]
    text = top({"x": seeds})
    assert "1 of 2 clients per seed do worse than with one global model in the sample" in text
    both = top({"x": seeds, "y": [fake(client("a", 0.1, 0.6))]})
    assert "With x, 1 of 2 clients per seed do worse" in both
    assert table({"x": seeds})[0]["hurt_vs_global"] == 1
    listed = shown(hurt({"x": seeds}, averages({"x": seeds})))
    assert "0 of 2 clients in the sample, averaged over the seeds" in listed


def other_clients(*names: str, seeds: int = 2) -> list[Record]:
    """Runs on different data: the first client of each is hurt."""
    runs = [fake(*(client(n, 0.9 - 0.4 * (n == names[0]), 0.6) for n in names), seed=s) for s in range(seeds)]
    for seed, run in enumerate(runs):
        run.config["data"] = {"fingerprint": f"data {seed}"}
        run.clients[0] |= {"n_train": 20 + seed}
    return runs


def test_numbered_clients_of_other_data_are_not_averaged() -> None:
    runs = {"x": other_clients("3", "4")}
    runs["x"][1].facts["excluded"] = ["3"]
    text = page(runs)
    said = shown(text.split("<main>")[1].split("<footer>")[0])
    assert "2 of 4 clients in the sample, all seeds together" in said
    assert "3 (seed 0) 20 10" in said
    assert "3 (seed 1) 21 10" in said
    assert said.count("It was excluded") == 1  # that of seed 1
    assert said.count("The seeds have different clients, so each client of each seed counts by itself.") == 3
    assert "means over the seeds" not in said.split("What it cost")[0]
    runs["x"][0].facts["seed"] = 1  # the seeds do not tell them apart
    assert averages(runs)["x"].names == [
        "3 (run 1)",
        "4 (run 1)",
        "3 (run 2)",
        "4 (run 2)",
    ]


def test_clients_with_names_or_the_same_data_are_averaged() -> None:
    same, unknown = other_clients("3", "4"), other_clients("3", "4")
    same[1].config.update(same[0].config)
    unknown[1].config.clear()
    for seeds in (other_clients("f1234_56", "4"), same, unknown):
        rows = averages({"x": seeds})["x"].clients
        assert [row["client"] for row in rows] == [row["client"] for row in seeds[0].clients]
        assert rows[0]["n_train"] == 20.5
        assert "means over the seeds." in hurt({"x": seeds}, averages({"x": seeds}))


def pressed(text: str, choice: str) -> list[str]:
    found = rf'data-choice="{choice}" data-value="(\w+)" aria-pressed="true"'
    return list(dict.fromkeys(re.findall(found, text)))


def test_the_clients_figure_starts_with_changes() -> None:
    alone = fake(client("a", 0.8, None, 0.8), client("b", 0.7, None, 0.7))
    worse, best = (fake(client("a", x, 0.7, 0.8), client("b", 0.7, 0.7, 0.7)) for x in (0.75, 0.9))
    text = page({"local": [alone], "worse": [worse], "best": [best]})
    assert (pressed(text, "label"), pressed(text, "reference")) == (["2"], ["global"])
    # the best has nothing but zeros: the first that has something
    text = page({"first": [alone], "local": [alone], "worse": [worse]})
    assert (pressed(text, "label"), pressed(text, "reference")) == (["2"], ["global"])
    assert pressed(page({"local": [alone], "again": [alone]}), "label") == ["0"]


def test_what_ran_reads_the_configuration() -> None:
    assert (
        what_ran({"x": [example()]})
        == "fedalt on 40 clients of digits: 50 rounds with 20 clients each, seed 0."
    )


@each("name", ["from_arrays", "from_torch", "split"])
def test_a_function_is_no_name_of_data(name: str) -> None:
    run = example()
    run.config["data"]["source"]["name"] = name
    assert what_ran({"x": [run]}).startswith("fedalt on 40 clients: 50 rounds")


# ---- who was hurt


def test_the_hurt_are_listed_worst_first() -> None:
    rows = [client("a", 0.5, 0.6), client("b", 0.2, 0.6), client("c", 0.9, 0.6), client("d", NAN, 0.6)]
    assert worst_first(fake(*rows), "global").tolist() == [1, 0]
    assert worst_first(fake(*rows, higher_is_better=False), "global").tolist() == [2]
    text = shown(losers(fake(*rows)))
    assert "Worse than with one global model 2 of 3 clients in the sample; how many beyond chance" in text
    assert "b 20 10 – 0.6000 0.2000 −0.4000" in text


def test_those_worse_beyond_chance_come_first_with_their_interval() -> None:
    ends = {"vs_global_low": -0.5, "vs_global_high": -0.2, "vs_global_p": 0.001}
    rows = [
        client("lost", 0.3, 0.6, hurt_vs_global=1, **ends),
        client("unlucky", 0.2, 0.6, hurt_vs_global=0, **ends),
        client("well", 0.9, 0.6, hurt_vs_global=0, **ends),
    ]
    run = fake(*rows, chance={"vs_global": CHANCE}, unusual={"lost": ["its inputs are unlike"]})
    before, _, after = losers(run).partition("<details>")
    assert (
        "2 of 3 clients in the sample; 1 beyond chance; estimate of those who truly lose: 5 (2 to 7)."
        in before
    )
    assert "−0.3000 −0.5000 to −0.2000 Its inputs are unlike" in shown(before)
    assert "unlucky" not in before
    assert "1 more are worse in the sample, which may be chance" in after
    assert "unlucky" in after
    assert "well" not in after


def test_very_many_hurt_are_cut() -> None:
    rows = [client(str(i), 0.5, 0.6) for i in range(MOST_ROWS + 7)]
    text = losers(fake(*rows))
    assert text.count("<tr>") == 1 + MOST_ROWS
    assert "and 7 more" in text


def test_nobody_hurt_is_said() -> None:
    text = losers(fake(client("a", 0.9, 0.5, 0.5)))
    assert "0 of 1 clients in the sample" in text
    assert "<table" not in text


def test_both_references_have_their_list() -> None:
    text = shown(losers(fake(client("a", 0.5, 0.6, 0.4), client("b", 0.5, 0.4, 0.6))))
    assert "Worse than with one global model 1 of 2 clients" in text
    assert "Worse than alone 1 of 2 clients" in text


# ---- cost and settings


def test_cost_in_human_units() -> None:
    text = shown(cost({"x": [example()]}))
    assert "time 1 min 23 s" in text
    assert "client steps per second 5,310" in text
    assert "sent up 20.0 MB" in text
    assert "up per client and round 20.0 kB" in text  # 50 rounds of 20 clients
    assert "peak memory 512.0 MB" in text
    assert "memory a client needs 3.4 MB" in text
    assert "shared parameters 4,160" in text


def test_what_was_not_recorded_is_left_out() -> None:
    text = shown(cost({"x": [fake(client("a", 0.5), seconds=1.0)]}))
    assert "time 1.0 s" in text
    assert "memory" not in text
    assert "per client" not in text


def test_shares_of_the_time() -> None:
    phases = {"steps": 6.0, "evaluation": 1.0, "states": 0.5, "files": 0.5}
    text = shown(cost({"x": [fake(client("a", 0.5), seconds=9.0, phases=phases)]}))
    assert "of that, local steps 75" in text
    assert "of that, evaluation 12" in text


def test_visits_need_one_cohort_for_all_rounds() -> None:
    run = example()
    assert visits(run) == 1000
    run.config["settings"]["cohort"] = None  # everyone
    assert visits(run) == 50 * 40
    run.config["algorithm"]["stages"] = [{}]
    assert visits(run) is None


def test_settings_are_flat_and_short() -> None:
    nested: dict[str, Any] = {
        "a": {"b": {"c": 0.1}, "d": None},
        "e": [64, 64],
        "f": True,
        "g": "x" * 500,
        "h": {},
    }
    found = dict(flat(nested))
    assert found["a.b.c"] == "0.1"
    assert (found["a.d"], found["e"], found["f"], found["h"]) == ("none", "64, 64", "yes", "{}")
    assert len(found["g"]) == 120
    assert list(flat({str(i): i for i in range(45)}))[-1] == ("…", "and 5 more")


def test_settings_show_picks_and_versions() -> None:
    text = settings({"x": [example()]})
    assert "<details>" in text
    assert "training vmap 2 ms" in shown(text)
    assert "python 3.11.7, torch 2.13.0" in text
    assert "algorithm.lr 0.1" in shown(text)


# ---- training that diverged


def diverged(clients: int, **more: Any) -> dict[str, Any]:
    facts = {"clients": clients, "of": 40, "first": 3, "last": 9, "set_aside": 100, "uploads": 200}
    facts |= {"why": {"too large": clients}, "finite": True, "nothing_learned": False}
    return {**facts, "rates": {"lr": 5.0}, "baselines": {}, **more}


def test_a_page_begins_with_what_diverged() -> None:
    run = example()
    run.facts["diverged"] = diverged(30)
    assert top({"x": [run]}).startswith(
        "DIVERGED. 30 of 40 clients diverged from round 3 to round 9: 100 of 200 uploads were set aside "
        "(too large). The learning rate is probably too high: lower lr=5, or limit steps by max_grad_norm. "
        "Partita report"
    )
    assert "DIVERGED" not in top({"x": [example()]})


def test_a_comparison_names_the_labels_that_diverged() -> None:
    runs = {label: [example(label, seed) for seed in (0, 1)] for label in ("good", EVIL)}
    runs[EVIL][1].facts["diverged"] = diverged(30)
    text = header(runs, averages(runs), None)
    assert text.index("DIVERGED") < text.index("Partita report")
    assert "alert(1)</p>" not in text
    assert "<script>" not in text
    assert "This is seed 1; 1 of 2 seeds diverged." in shown(text)
    assert text.count("badge diverged") == 1
    assert [row["diverged"] for row in table(runs)] == [0, 15]


# ---- further metrics, clients that came later


def test_the_other_metrics_are_shown() -> None:
    metrics = {
        name: {"higher_is_better": True, "test": {"local": 0.1, "global": 0.2, "personal": personal}}
        for name, personal in (("accuracy", 0.3), ("f1_macro", 0.4321))
    }
    run = fake(client("a", 0.3, 0.2, 0.1), client("b", 0.3, 0.2, 0.1), metrics=metrics)
    assert "Other metrics metric each alone one global model personal models f1_macro 0.1000" in top(
        {"x": [run]}
    )
    assert "y f1_macro 0.1000 0.2000 0.4321" in top({"x": [run], "y": [run]})
    assert "Other metrics" not in top({"x": [example()]})


def with_newcomers(run: Record) -> Record:
    """The run with two clients that were held out, of which one has no score."""
    columns = {"client": ["late <1>", "late 2"], "n_train": [7, 8], "n_test": [5, 0]}
    columns |= {"local": [0.5, None], "global": [0.7, None], "personal": [0.6125, None]}
    test = {"local": 0.5, "global": 0.7, "personal": 0.6125}
    hurt = {"vs_global": 1, "vs_local": 0}
    run.facts["newcomers"] = {"clients": 2, "scored": 1, "test": test, "hurt": hurt}
    return dataclasses.replace(run, newcomers=Table(2, columns))


def test_clients_that_came_later_have_a_section() -> None:
    one, two = with_newcomers(example()), with_newcomers(example(seed=1))
    text = shown(page({"fedalt": [one]}))
    assert "fedalt 2 0.5000 0.7000 0.6125 1 of 1 0 of 1" in text
    assert "late <1> 7 5 0.5000 0.7000 0.6125 late 2 8 0 – – –" in text
    assert "late <1> 7 5 0.5000 0.7000 0.6125" in shown(page({"a": [one, two], "b": [example()]}))
    assert 'id="newcomers"' not in page({"fedalt": [example()]})


def test_honest_clients_keep_their_samples_and_the_newcomers() -> None:
    sizes = np.arange(40)
    owner = torch.from_numpy(np.repeat(sizes, sizes))
    samples = Samples(sizes, owner, {"personal": {"accuracy": owner + 0.5}})
    run = dataclasses.replace(with_newcomers(attacked()), samples=samples)
    [kept] = checked({"x": [run]})["x"]
    assert kept.newcomers is run.newcomers
    assert kept.samples is not None
    assert len(kept.samples.sizes) == len(kept.clients) == 30
    assert set(kept.samples.targets.tolist()) == {i for i in range(40) if i % 4}
    assert torch.equal(kept.samples.of("personal", "accuracy"), kept.samples.targets + 0.5)
