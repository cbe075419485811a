"""`partita tune` and `partita compare --tune`."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import partita as pt
from partita.cli.tune import wishes
from partita.engine import settings
from partita.recipes.experiment import Experiment
from partita.recipes.study import read_study
from partita.recipes.tuning import APART
from support import Command, each

pytest.importorskip("optuna")

MINE = """
import partita as pt
import torch
from partita.recipes import Experiment

def experiment(seed=0):
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    data = pt.data.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(60) % 3, test=0.3, validation=0.2)
    method = pt.fedalt(personal="output", lr=0.1)
    return Experiment(model=pt.models.mlp(5, 4, 2), data=data, algorithm=method, rounds=2, steps=2, seed=seed)
"""
SMALL = ["--executor", "vmap"]
RUN = Experiment.run


class Outcome:
    higher_is_better = True

    def __init__(self, score: float) -> None:
        self._score = score

    def summary(self) -> dict[str, Any]:
        return {"metric": "accuracy", "validation": {"personal": self._score}}


@pytest.fixture(autouse=True)
def trials(monkeypatch: pytest.MonkeyPatch, home: Path) -> list[int]:
    """In place of training in trials, a score that is best at lr = 0.02; other runs are as they are."""
    seeds: list[int] = []
    (home / "mine.py").write_text(MINE)
    monkeypatch.setattr(settings, "MOST_ROUNDS", 4)  # of every client alone

    def run(self: Experiment, **options: Any) -> Any:
        if options["baselines"] is not False:
            return RUN(self, **options)
        seeds.append(self.seed)
        return Outcome(1 / (1 + math.log10(self.algorithm.options["lr"] / 0.02) ** 2))

    monkeypatch.setattr(Experiment, "run", run)
    return seeds


def test_tune_ends_with_the_line_to_run_next(partita: Command, trials: list[int]) -> None:
    done = partita(
        "tune",
        "mine.py",
        "--algorithms",
        "fedalt(personal=input),ditto",
        "--budget",
        "6",
        *SMALL,
        "--out",
        "found",
    )
    assert done.returncode == 0, done.stderr
    assert len(trials) == 12
    assert "ditto 6/6" in done.stderr
    line = next(x.strip() for x in done.stdout.splitlines() if x.strip().startswith("partita compare"))
    words = shlex.split(line)
    algorithms = words[words.index("--algorithms") + 1]
    assert "personal=input" in algorithms
    lr = float(re.findall(r"ditto\(lr=([^,]+),", algorithms)[0])
    assert 0.005 < lr < 0.1
    assert (Path("found") / "report.html").exists()
    trials.clear()
    again = partita(
        *["tune", "mine.py", "--budget", "6", "--out", "found", "--resume", "--json", "--algorithms"],
        "fedalt(personal=input),ditto",
        *SMALL,
    )
    assert trials == []
    content = json.loads(again.stdout)
    assert content["best"]["ditto"] in algorithms
    assert len(content["trials"]) == 12
    following = partita(*words[1 : words.index("--seeds")], "--executor", "vmap", "--quiet")
    assert following.returncode == 0, following.stderr


def test_compare_tunes_every_method_first(partita: Command, trials: list[int]) -> None:
    done = partita(
        "compare", "mine.py", "--algorithms", "ditto", "--tune", "5", "--seeds", "2", *SMALL, "--out", "both"
    )
    assert done.returncode == 0, done.stderr
    assert len(trials) == 15, "the two baselines have the same budget"
    runs = read_study(Path("both"))
    assert set(trials) == {APART}
    assert [run.summary()["seed"] for run in runs["ditto"]] == [0, 1]
    found = [json.loads(line) for line in Path("both/tuning/trials.jsonl").read_text().splitlines()]
    for label, seeds in runs.items():
        best = max((row for row in found if row["label"] == label), key=lambda row: row["score"])
        for run in seeds:
            assert run.config["algorithm"]["lr"] == best["options"]["lr"]
    assert len({run.config["algorithm"]["lr"] for seeds in runs.values() for run in seeds}) == 3
    trials.clear()
    again = partita(
        "compare",
        "mine.py",
        "--algorithms",
        "ditto",
        "--tune",
        "5",
        "--seeds",
        "2",
        *SMALL,
        "--out",
        "both",
        "--resume",
        "--json",
    )
    assert (again.returncode, trials) == (0, [])
    assert {row["label"] for row in json.loads(again.stdout)["table"]} == set(runs)


@each(
    ("text", "wish"),
    [
        ("lr=0.01:1:log", {"lr": pt.Range(0.01, 1.0, log=True)}),
        ("momentum=0:0.9", {"momentum": pt.Range(0.0, 0.9)}),
        ("fedalt.personal=input|output", {"fedalt.personal": ["input", "output"]}),
        ("inner_steps=1|5|10", {"inner_steps": [1, 5, 10]}),
        ("momentum=yes", {"momentum": True}),
        ("lam=no", {"lam": False}),
    ],
)
def test_what_search_means(text: str, wish: dict[str, Any]) -> None:
    assert wishes([text]) == wish


@each(
    ("arguments", "word"),
    [
        ("tune digits --search lr", "--search='lr'"),
        ("tune digits --search lr=a:b", "--search='lr=a:b'"),
        ("tune digits --search lr=0.1:1:cubic", "cubic"),
        ("tune digits --search lr=1:0.1", "high=0.1"),
        ("tune digits --search speed=yes", "search='speed'"),
        ("tune digits --budget 0", "budget=0"),
        ("tune digits --seeds 3", "--seeds=3"),
        ("tune digits --algorithms fedavgg", "fedavg"),
        ("tune digits --resume", "resume"),
        ("compare digits --search lr=no", "--tune"),
        ("compare digits --tune 0", "budget=0"),
        ("tune ffgg-methods", "recipe"),
    ],
)
def test_a_wrong_request_is_one_line(arguments: str, word: str, partita: Command) -> None:
    assert word in partita(*arguments.split()).refusal
