"""What only the command line can get wrong: exit code 2, one line that names the word, nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from support import Command, each, files_of

RECIPE = """
import partita as pt
from partita.recipes import Experiment

def experiment(clients=4):
    stages = pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=1))
    return Experiment(pt.models.mlp(64, 10), pt.data.digits(clients), stages)
"""
RETURNS = "def experiment():\n    "


class Mistyped(NamedTuple):
    """Arguments, and what the line names. With a `file`, that is the text of mine.py."""

    arguments: str
    words: tuple[str, ...]
    file: str = ""


def command(arguments: str, *words: str, file: str = "") -> Mistyped:
    return Mistyped(arguments, words, file)


def sets(setting: str, *words: str) -> Mistyped:
    return Mistyped(f"run digits --out run --set {setting}", words)


def recipe(text: str, *words: str) -> Mistyped:
    return Mistyped("run mine.py --out run", words, text)


COMMANDS = [
    command("run digit", "recipe='digit'", "mean 'digits'"),
    command("run yours.py", "recipe='yours.py'"),
    command("rnu digits", "rnu"),
    command("run", "recipe"),
    command("run digits --sed 1", "--sed", "--seed"),
    command("run digits --device", "--device"),
    command("demo digits", "digits"),
    command("run digits --seed one", "--seed"),
    command("run digits --seed -1", "seed=-1"),
    command("run digits --device cudaa", "device='cudaa'", "'cuda'"),
    command("demo --executor lop", "executor='lop'", "mean 'loop'"),
    command("run digits --memory 8apples", "memory='8apples'", "'8GiB'"),
    command("run digits --out /proc/nothing", "/proc/nothing"),
    command("run digits --set rounds=1 --set baselines=False --resume", "resume=True", "out"),
    command(
        "compare digits --algorithms fedbuff,l2gd(lam=1,p=0.5) --out run --set schedule=asynchronous",
        "schedule='asynchronous'",
        "synchronous",
        "l2gd",
    ),
    command("run mine.py --set algorithm.3.lr=1", "--set='algorithm.3.lr'", file=RECIPE),
    command("run mine.py --set algorithm.lr=1", "--set='algorithm.lr'", "algorithm.0.lr", file=RECIPE),
    command("run mine.py --set algorithm.0.lrr=1", "'lrr'", "mean 'lr'", file=RECIPE),
]

SETTINGS = [
    sets("rounds", "--set='rounds'"),
    sets("=3", "--set='=3'"),
    sets("rounds=", "rounds=''"),
    sets("roundz=3", "--set='roundz'", "mean 'rounds'"),
    sets("rounds=many", "rounds='many'"),
    sets("rounds=2.5", "rounds=2.5"),
    sets("baselines=maybe", "baselines='maybe'"),
    sets("batch=[4]", "batch=[4]"),
    sets("epochs=2", "steps=5", "epochs"),
    sets("cohort=99", "cohort=99", "up to 40"),
    sets("byzantine=0.2", "byzantine=0.2", "attack="),
    sets("byzantine=1.5", "byzantine=1.5"),
    sets("byzantine=[99]", "byzantine=99", "up to 39"),
    sets("attack=sign_flp", "attack='sign_flp'", "mean 'sign_flip'"),
    sets("attack=sign_flip", "byzantine=()", "0.25"),
    sets("attack=2", "attack=2"),
    sets("attack=[alie()]", "attack=[Attack("),
    sets("attack=ipm(epsilon=0)", "attack: epsilon=0"),
    sets("schedule=asynchronos", "schedule='asynchronos'", "mean 'asynchronous'"),
    sets("schedule=2", "schedule=2"),
    sets("schedule=[synchronous()]", "schedule=[Synchronous("),
    sets("schedule=gamma(1)", "schedule='gamma'", "'asynchronous'"),
    sets("schedule=asynchronous(buffer=0)", "schedule: buffer=0"),
    sets("schedule=preferred(untl=1)", "schedule: untl=1", "mean 'until'"),
    sets("schedule=asynchronous(99)", "concurrency=99", "up to 40"),
    sets("schedule=preferred(delays(gama(1)))", "schedule: function='gama'", "mean 'gamma'"),
    sets("schedule=preferred(delays(gamma(-1)))", "schedule: gamma mean=-1"),
    sets("schedule=preferred(delays(trace('x')))", "delay path='x'"),
    sets("schedule=asynchronous(staleness='sqt')", "staleness='sqt'", "mean 'sqrt'"),
    sets("schedule=preferred(delays(open('x')))", "schedule: function='open'"),
    sets("evaluate_every=-2.5", "evaluate_every=-2.5"),
    sets("measures=[line_los()]", "measures='line_los'", "mean 'line_loss'"),
    sets("measures=3", "measures=3"),
    sets("measures=[line_loss(),line_loss()]", "measures=['line_loss', "),
    sets("loss=mes", "loss='mes'", "mean 'mse'"),
    sets("algorithm=fedalt2", "algorithm='fedalt2'", "mean 'fedalt'"),
    sets("algorithm.lrr=1", "'lrr'", "mean 'lr'"),
    sets("algorithm.lr=fast", "lr='fast'"),
    sets("algorithm.server=adam", "server='adam'"),
    sets("algorithm.personal=3", "personal=3"),
    sets("algorithm.personal=outputs", "personal='outputs'", "mean 'output'"),
    sets("clients=0", "clients=0"),
    sets("classes=99", "classes=99", "10"),
    sets("test=some", "test='some'"),
]

RECIPES = [
    recipe("x = 1", "recipe='mine.py'", "experiment()"),
    recipe("experiment = 3", "recipe='mine.py'", "experiment()"),
    recipe(RETURNS + "return 3", "recipe="),
    recipe("def experiment(:", "recipe='mine.py'", "line 1"),
    recipe("\0", "recipe='mine.py'", "Python"),
    recipe("import nowhere", "recipe='mine.py'", "nowhere"),
    recipe("1 / 0", "recipe='mine.py'", "division by zero"),
    recipe(RETURNS + "1 / 0", "recipe=", "division by zero"),
    recipe("def experiment(a): ...", "recipe=", "'a'"),
    recipe(RETURNS + "raise ValueError('a\\nb')", "a b"),
    recipe(RETURNS + "raise ValueError", "ValueError"),
    recipe(RETURNS + "open('nowhere')", "nowhere"),
]


@pytest.mark.parametrize("table", [COMMANDS, SETTINGS, RECIPES], ids=["commands", "settings", "recipes"])
def test_mistyped(table: list[Mistyped], home: Path, partita: Command) -> None:
    @each("case", table)
    def refused(case: Mistyped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        if case.file:
            (tmp_path / "mine.py").write_text(case.file)
        before = files_of(tmp_path)
        line = partita(*case.arguments.split()).refusal
        assert [word for word in case.words if word.lower() not in line.lower()] == [], line
        assert files_of(tmp_path) == before

    refused(tmp_path=home, monkeypatch=None)
