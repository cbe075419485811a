"""The page as text: what is said, what is escaped, what happens when numbers are missing."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from report_rows import client, example, fake, record

from partita.engine.record import Record
from partita.report import page as pages
from partita.report.compare import table
from partita.report.cost import cost, visits
from partita.report.figures import MOST_POINTS
from partita.report.header import header, what_ran
from partita.report.html import data
from partita.report.hurt import MOST_ROWS, hurt, worst_first
from partita.report.page import page
from partita.report.rows import averages
from partita.report.settings import flat, settings
from support import each

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'"
SECTIONS = ("summary", "curves", "clients", "distribution", "hurt", "cost", "settings")


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plotly.js, whose megabytes have no part in these tests; the browser tests have it."""
    offline = SimpleNamespace(get_plotlyjs=lambda: "/* plotly */")
    monkeypatch.setattr(pages, "import_module", lambda _: offline)


def shown(markup: str) -> str:
    """The text that a reader sees."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup)).strip()


def top(runs: dict[str, list[Record]], title: str | None = None) -> str:
    return shown(header(runs, averages(runs), title))


def losers(run: Record) -> str:
    return hurt({"x": [run]}, averages({"x": [run]}))


# ---- the whole page


def test_all_sections_are_there() -> None:
    text = page({"fedalt": [example()]})
    assert [name for name in SECTIONS if f'id="{name}"' not in text] == []
    assert text.count("/* plotly */") == 1
    assert text.count("How to read this.") == 3


def test_several_labels_add_the_comparison() -> None:
    runs = {
        label: [example(label, seed, gain=gain) for seed in (0, 1)] for label, gain in (("a", 0), ("b", 0.1))
    }
    text = page(runs)
    assert 'id="comparison"' in text
    assert "b scores best: accuracy" in text
    assert "Client by client against b" in text
    assert "the others differ clearly from b" in shown(text)
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
    assert text.count("<script") == 3  # the data, plotly and ours
    assert "excluded: its uploads" in text


def test_figures_travel_as_json() -> None:
    text = page({"fedalt": [example()]})
    found = re.search(r'id="figures">(.*?)</script>', text, re.S)
    assert found is not None
    assert set(json.loads(found.group(1))) == {"curves", "losses", "clients", "violins"}
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


def test_three_numbers_and_the_verdict() -> None:
    rows = [client("a", 0.9, 0.8, 0.95), client("b", 0.7, 0.8, 0.6), client("c", 0.5, 0.5, 0.4)]
    run = fake(*rows, algorithm="fedalt", rounds=9, test={"local": 0.7, "global": 0.72345, "personal": 0.75})
    text = top({"fedalt": [run]})
    assert "Compared with one global model, personalization helps 1 of 3 clients and hurts 1." in text
    assert (
        "1 of 3 clients do worse with their personal model than with the global model; 1 of 3 than alone."
        in text
    )
    assert "one global model 0.7235 accuracy" in text
    assert "personal models best 0.7500" in text
    assert "fedalt on 3 clients: 9 rounds, seed 0." in text
    assert "But over all" not in text


def test_a_better_mean_elsewhere_is_said() -> None:
    run = fake(client("a", 0.9, 0.8), test={"local": 0.99, "global": 0.7, "personal": 0.9})
    text = top({"x": [run]})
    assert "Training alone is best here: accuracy 0.9900 against 0.9000 with personal models." in text
    assert "helps" not in text
    assert "over all test samples, training alone scores better than personal models" in text
    assert "each alone best 0.9900" in text
    run.facts["test"]["local"], run.facts["test"]["global"] = 0.5, 0.95
    expected = "One global model is best here: accuracy 0.9500 against 0.9000 with personal models."
    assert expected in top({"x": [run]})


def test_a_comparison_admits_that_training_alone_is_better() -> None:
    a, b = (fake(client("a", x, 0.7, 0.95)) for x in (0.9, 0.8))
    text = top({"a": [a], "b": [b]})
    assert "Training alone is best here: accuracy 0.9500 against 0.9000 with a." in text
    assert "Client by client, a is not clearly different from b" in text
    alone = fake(client("a", 0.95, None, 0.95))
    assert "local scores best: accuracy 0.9500." in top({"local": [alone], "a": [a]})


def test_without_a_personal_part_training_alone_is_the_measure() -> None:
    run = fake(client("a", 0.9, 0.9, 0.8), client("b", 0.7, 0.7, 0.8))
    expected = "Compared with training alone, training together helps 1 of 2 clients and hurts 1."
    assert expected in top({"fedavg": [run]})
    run = fake(client("a", 0.9, 0.9, 0.8), client("b", 0.7, 0.7, 0.9))
    expected = "Training alone is best here: accuracy 0.8500 against 0.8000 together."
    assert expected in top({"fedavg": [run]})


def test_lower_is_better_turns_everything() -> None:
    run = fake(
        client("a", 1.0, 2.0),
        client("b", 3.0, 2.0),
        client("c", 1.0, 4.0),
        higher_is_better=False,
        metric="mse",
    )
    text = top({"x": [run]})
    assert "Compared with one global model, personalization helps 2 of 3 clients and hurts 1." in text
    assert "personal models best 1.6667" in text


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
    assert "personalization helps 1 of 2 clients per seed and hurts 1." in text
    assert "On average, 1 of 2 clients per seed do worse with their personal model than with" in text
    both = top({"x": seeds, "y": [fake(client("a", 0.1, 0.6))]})
    assert "With x, on average, 1 of 2 clients per seed do worse" in both
    assert table({"x": seeds})[0]["hurt_vs_global"] == 1
    listed = shown(hurt({"x": seeds}, averages({"x": seeds})))
    assert "0 of 2 clients worse than with the global model, averaged over the seeds" in listed


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
    assert "2 of 4 clients worse than with the global model, all seeds together" in said
    assert "3 (seed 0) 20 10" in said
    assert "3 (seed 1) 21 10" in said
    assert said.count("It was excluded") == 1  # that of seed 1
    assert said.count("The seeds have different clients, so each client of each seed counts by itself.") == 2
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


def test_labels_that_are_close_are_named() -> None:
    a, b = example("a"), example("b")
    b.facts["test"] = {**b.facts["test"], "personal": 0.1}
    assert "not clearly different from b (p ≥ 0.05)" in top({"a": [a], "b": [b]})


# ---- who was hurt


def test_the_hurt_are_listed_worst_first() -> None:
    rows = [client("a", 0.5, 0.6), client("b", 0.2, 0.6), client("c", 0.9, 0.6), client("d", NAN, 0.6)]
    assert worst_first(fake(*rows), "global").tolist() == [1, 0]
    assert worst_first(fake(*rows, higher_is_better=False), "global").tolist() == [2]
    text = shown(losers(fake(*rows)))
    assert "2 of 3 clients worse than with the global model" in text
    assert "b 20 10 – 0.6000 0.2000 −0.4000 Nothing stands out" in text


def test_very_many_hurt_are_cut() -> None:
    rows = [client(str(i), 0.5, 0.6) for i in range(MOST_ROWS + 7)]
    text = losers(fake(*rows))
    assert text.count("<tr>") == 1 + MOST_ROWS
    assert "and 7 more" in text


def test_nobody_hurt_is_said() -> None:
    text = losers(fake(client("a", 0.9, 0.5, 0.5)))
    assert "Nobody was hurt." in text
    assert "<table" not in text


def test_both_references_have_their_list() -> None:
    text = shown(losers(fake(client("a", 0.5, 0.6, 0.4), client("b", 0.5, 0.4, 0.6))))
    assert "1 of 2 clients worse than with the global model" in text
    assert "1 of 2 clients worse than alone" in text


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
