"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita import cli
from partita.api import federate
from partita.engine.callbacks import Callback, Event
from partita.recipes import RECIPES, Experiment
from partita.recipes.digits import digits
from partita.recipes.offices import offices
from support import Command, each

pytestmark = pytest.mark.usefixtures("brief_baselines")

QUICK = ["--set", "rounds=3", "--set", "clients=6", "--set", "baselines=False", "--quiet"]


@pytest.fixture
def small_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes of most commands with little to do: what they write is the same."""

    def small(clients: int = 8, classes: int = 3, test: float = 0.4, seed: int = 0) -> Experiment:
        return replace(digits(clients, classes, test, seed, validation=0), rounds=3, steps=1)

    def few(seed: int = 0) -> Experiment:
        return replace(offices(clients=8, codes=2, new=2, seed=seed), rounds=3, until=None, steps=1)

    monkeypatch.setitem(RECIPES, "digits", small)
    monkeypatch.setitem(RECIPES, "offices", few)


@pytest.mark.usefixtures("longer_baselines")
def test_demo_shows_local_global_and_personal_with_personal_highest(tmp_path: Path, partita: Command) -> None:
    done = partita("demo", "--out", str(tmp_path / "demo"), "--quiet")
    assert done.returncode == 0, done.stderr
    for words in ("each client alone", "one global model", "personal models", "Who gains and who loses"):
        assert words in done.stdout
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    test = summary["test"]
    assert test["personal"] > test["local"]
    assert test["personal"] > test["global"]
    chance = summary["chance"]["vs_global"]
    assert chance["better_beyond_chance"] == 6  # the offices with a code
    assert {f"new-{i}" for i in range(1, 5)} <= set(chance["clients"])  # those with few samples
    assert not any(name.startswith("code") for name in chance["clients"])


def test_run_writes_and_resumes(tmp_path: Path, partita: Command) -> None:
    out = str(tmp_path / "run")
    first = partita("run", "digits", *QUICK, "--out", out)
    assert first.returncode == 0, first.stderr
    again = partita("run", "digits", *QUICK, "--out", out)
    assert again.returncode == 2
    assert "resume" in again.stderr
    assert partita("run", "digits", *QUICK, "--out", out, "--resume", "--json").returncode == 0


def test_json_is_all_that_is_printed(partita: Command) -> None:
    done = partita("run", "digits", *QUICK, "--json", "--set", "algorithm=fedavg", "--seed", "3")
    summary = json.loads(done.stdout)
    assert (summary["algorithm"], summary["seed"], summary["rounds"]) == ("fedavg", 3, 3)


def test_set_changes_the_method_and_its_options(tmp_path: Path, partita: Command) -> None:
    out = tmp_path / "run"
    done = partita("run", "digits", *QUICK, "--set", "algorithm.lr=0.05", "--out", str(out))
    assert done.returncode == 0, done.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["algorithm"]["lr"] == 0.05
    assert config["settings"]["rounds"] == 3


def test_a_users_file_is_a_recipe(tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import partita as pt\n"
        "from partita.recipes import Experiment\n"
        "def experiment(clients=4):\n"
        "    stages = pt.pipeline(pt.stage(pt.fedavg(lr=0.1), rounds=2),\n"
        "                         pt.stage(pt.finetune(personal='output', lr=0.1), epochs=1))\n"
        "    return Experiment(pt.models.mlp(64, 10), pt.data.digits(clients), stages, batch=16)\n"
    )
    done = partita("run", "mine.py", "--json", "--set", "clients=5", "--set", "algorithm.1.lr=0.2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clients"] == 5


@each(
    ("arguments", "words"),
    [
        (["run", "digit"], ["digit", "did you mean 'digits'?"]),
        (["run", "missing.py"], ["missing.py", "exists"]),
        (["run", "digits", "--set", "roundz=3"], ["roundz", "did you mean 'rounds'?"]),
        (["run", "digits", "--set", "rounds"], ["rounds", "key=value"]),
        (["run", "digits", "--set", "rounds=0"], ["rounds=0", "from 1"]),
        (["run", "digits", "--set", "algorithm=fedalt2"], ["fedalt2", "did you mean 'fedalt'?"]),
        (["run", "digits", "--set", "algorithm.lrr=1"], ["lrr", "did you mean 'lr'?"]),
        (["run", "digits", "--set", "algorithm.lr=-1"], ["lr=-1", "from 0"]),
        (["run", "digits", "--set", "algorithm.personal=outputs"], ["outputs", "did you mean 'output'?"]),
        (["run", "digits", "--device", "cudaa"], ["device='cudaa'", "cpu"]),
        (["run", "digits", "--executor", "vmapp"], ["vmapp", "did you mean 'vmap'?"]),
        (["run", "digits", "--memory", "8 apples"], ["memory='8 apples'", "8GiB"]),
        (["run", "digits", "--out", "/proc/nothing"], ["/proc/nothing"]),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    partita: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = partita(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr
    assert not list(tmp_path.iterdir())


def test_help_teaches(partita: Command) -> None:
    text = partita("run", "--help").stdout
    for word in ("recipe", "--set", "--resume", "--device", "Example"):
        assert word.lower() in text.lower()


def test_the_installed_command_fails_cleanly() -> None:
    command = [str(Path(sys.executable).with_name("partita")), "run", "digit"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_another_method_with_an_option_that_it_must_have(partita: Command) -> None:
    chosen = ["--set", "algorithm=fedadam", "--set", "algorithm.server_lr=0.1"]
    done = partita("run", "digits", *QUICK, *chosen, "--json")
    assert json.loads(done.stdout)["algorithm"] == "fedadam"


def test_a_users_file_imports_its_neighbours(
    tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_me.py").write_text("CLIENTS = 3\n")
    (tmp_path / "mine.py").write_text(
        "import partita as pt\n"
        "from beside_me import CLIENTS\n"
        "from partita.recipes import Experiment\n"
        "def experiment():\n"
        "    return Experiment(pt.models.mlp(64, 10), pt.data.digits(CLIENTS), pt.fedavg(lr=0.1), rounds=1)\n"
    )
    assert partita("run", str(tmp_path / "mine.py"), "--json").returncode == 0


def test_ctrl_c_says_how_to_go_on(partita: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("partita.recipes.experiment.federate", stop)
    done = partita("run", "digits", "--out", str(tmp_path / "run"))
    assert done.returncode == 130
    assert "--resume" in done.stderr


class Send(Callback):
    """Sends a signal to this process after a round of a run."""

    def __init__(self, number: int, what: str, round: int) -> None:
        self.number, self.what, self.at = number, what, round

    def round(self, event: Event) -> None:
        if event.round == self.at and event.what == self.what:
            os.kill(os.getpid(), self.number)


@pytest.mark.usefixtures("small_recipes")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("words", [["run", "digits"], ["compare", "digits", "--algorithms", "fedalt"]])
def test_a_signal_leaves_a_checkpoint_and_says_how_to_go_on(
    words: list[str],
    number: int,
    code: int,
    partita: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def signalled(*arguments: Any, **options: Any) -> Any:
        return federate(*arguments, **{**options, "callbacks": [Send(number, "fedalt", 2)]})

    monkeypatch.setattr("partita.recipes.experiment.federate", signalled)
    before = signal.getsignal(number)
    out = tmp_path / "out"
    done = partita(*words, "--out", str(out), "--quiet")
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == f"partita: stopped by a signal; go on with --out {out} --resume"
    assert signal.getsignal(number) is before
    folder = out if words[0] == "run" else out / "fedalt" / "seed-0"
    assert max(p.name for p in (folder / "checkpoint").iterdir()) == "00000002"
    monkeypatch.setattr("partita.recipes.experiment.federate", federate)
    assert partita(*words, "--out", str(out), "--quiet", "--resume").returncode == 0
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 3


@pytest.mark.slow
def test_a_terminal_that_is_gone_ends_a_run_with_its_checkpoint(tmp_path: Path) -> None:
    """There is nobody left to tell, and a progress bar without a place: still the exit code is SIGHUP's."""
    out = tmp_path / "run"
    words = ["run", "digits", "--set", "rounds=1000000", "--set", "baselines=False", "--out", str(out)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "partita.cli", *words])
    while not (out / "config.json").exists() or len(list((out / "checkpoint").glob("0*"))) == 0:
        os.read(terminal, 1 << 16)
    os.read(terminal, 1 << 16)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert max(int(p.name) for p in (out / "checkpoint").glob("0*")) > 0


@pytest.mark.usefixtures("small_recipes")
@pytest.mark.parametrize("words", [["run", "digits"], ["compare", "digits", "--algorithms", "fedalt"]])
def test_max_time_ends_with_its_own_exit_code_and_goes_on(
    words: list[str], partita: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    wanted = [*words, "--out", str(out), "--quiet", "--max-time"]
    found = [partita(*wanted, "1e-9")]
    while found[-1].returncode == 124:
        assert found[-1].stdout == ""
        last = found[-1].stderr.splitlines()[-1]
        assert last.startswith("partita: stopped ")
        assert last.endswith(f" after --max-time 1e-9; go on with --out {out} --resume")
        found.append(partita(*wanted, "1e-9", "--resume"))
    assert found[-1].returncode == 0, found[-1].stderr
    assert len(found) > 3
    assert "fedalt at round 2 of 3 after" in " ".join(done.stderr for done in found)


def test_max_time_needs_a_folder_and_a_time(partita: Command, tmp_path: Path) -> None:
    done = partita("run", "digits", *QUICK, "--max-time", "2h")
    assert (done.returncode, done.stderr) == (
        2,
        "partita: max_time='2h': expected out=, the folder for its checkpoint\n",
    )
    done = partita("compare", "digits", "--max-time", "soon", "--out", str(tmp_path / "x"))
    assert done.returncode == 2
    assert "max_time='soon': expected seconds above 0, or such as" in done.stderr
    assert not (tmp_path / "x").exists()
    assert "--max-time" in partita("run", "--help").stdout


@pytest.mark.usefixtures("small_recipes")
def test_the_examples_in_the_help_work_as_printed(
    tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [command.name or command.callback.__name__ for command in cli.app.registered_commands]
    found = ["demo", "run", "compare", "tune", "split", "personalize", "report", "list", "show", "bench"]
    assert commands == found
    # in this order: the report is one of the runs before it; two have their own data in tests of their own
    for command in [c for c in commands if c not in ("tune", "personalize")]:
        text = " ".join(partita(command, "--help").stdout.replace("│", " ").split())
        example = re.search(r"Example: (partita .*?)(?: ╭| Options|$)", text)
        assert example, text
        words = shlex.split(example[1])[1:]
        assert words[0] == command
        done = partita(*words)
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.html")}
    assert written >= {
        "runs/demo/report.html",
        "runs/digits/report.html",
        "runs/methods/report.html",
        "runs/split/report.html",
        "both.html",
    }


def test_compare_marks_the_best_and_pairs_the_clients(tmp_path: Path, partita: Command) -> None:
    out = tmp_path / "methods"
    wanted = ["--algorithms", "fedalt,fedalt(personal=input)", "--seeds", "2", "--out", str(out)]
    short = ["--set", "rounds=3", "--set", "clients=4"]
    done = partita("compare", "digits", *wanted, *short, "--quiet")
    assert done.returncode == 0, done.stderr
    for words in ("local", "fedavg", "fedalt", "±", "client by client", "too early"):
        assert words in done.stdout
    assert (out / "clients_by_method.csv").read_text().startswith("client,train,test,local,fedavg,fedalt,")
    found = json.loads(partita("report", str(out), "--json").stdout)
    assert [row["label"] for row in found["table"]] == ["local", "fedavg", "fedalt", "fedalt-personal=input"]
    assert [row["best"] for row in found["table"]].count(True) == 1
    best = max(found["table"], key=lambda row: row["personal"]["mean"])
    assert best["best"]
    assert {row["against"] for row in found["paired"]} == {best["label"]}
    assert all(row["better"] + row["equal"] + row["worse"] == 8 for row in found["paired"])  # 4 of each seed
    again = partita("compare", "digits", *wanted, *short, "--quiet")
    assert again.returncode == 2
    assert "resume" in again.stderr
    assert partita("compare", "digits", *wanted, *short, "--resume", "--json").returncode == 0
    for name in (
        "fedavg",
        "fedalt",
    ):  # the same data and initial weights for all, other ones for the other seed
        runs = [json.loads((out / name / f"seed-{s}" / "config.json").read_text()) for s in (0, 1)]
        assert runs[0]["data"]["fingerprint"] != runs[1]["data"]["fingerprint"]
    prints = {json.loads(p.read_text())["data"]["fingerprint"] for p in out.glob("*/seed-0/config.json")}
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("schedule", "local", "fedavg", "fedasync"),
    [
        (None, "synchronous random", "synchronous random", "asynchronous random"),
        ("asynchronous(2, order='same')", "synchronous random", *["asynchronous same"] * 2),
        ("synchronous", "synchronous random", "synchronous random", "synchronous random"),
        ("preferred(delays(upload=2.0))", "synchronous random", "synchronous random", "asynchronous random"),
    ],
)
def test_compare_under_a_schedule(
    schedule: str | None, local: str, fedavg: str, fedasync: str, tmp_path: Path, partita: Command
) -> None:
    """All under the same, or each under what it wants, perhaps with the same delays; alone, without any."""
    chosen = [] if schedule is None else ["--set", f"schedule={schedule}"]
    short = ["--set", "rounds=1", "--set", "clients=4", "--set", "cohort=2", "--set", "steps=1"]
    short += ["--set", "validation=0"]
    wanted = ["--algorithms", "fedasync", "--out", str(tmp_path / "out"), "--executor", "loop", "--json"]
    done = partita("compare", "digits", *wanted, *short, *chosen)
    assert done.returncode == 0, done.stderr
    for name, expected in {"local": local, "fedavg": fedavg, "fedasync": fedasync}.items():
        folder = tmp_path / "out" / name / "seed-0"
        found = json.loads((folder / "config.json").read_text())["schedule"]
        assert f"{found['name']} {found['order']}" == expected
        clock = json.loads((folder / "summary.json").read_text())["clock"]
        delayed = schedule and "delays" in schedule and name != "local"
        assert clock["time"] == (2.0 if delayed else 1.0)


def test_finetune_by_its_name_is_trained_first(partita: Command) -> None:
    short = ["--set", "rounds=20", "--set", "clients=8", "--set", "cohort=4"]
    done = partita("run", "digits", "--set", "algorithm=finetune", *short, "--json")
    assert done.returncode == 0, done.stderr
    assert "untrained" not in done.stderr
    summary = json.loads(done.stdout)
    assert summary["algorithm"] == "finetune"
    assert summary["test"]["global"] > 0.5


def test_run_under_a_schedule(tmp_path: Path, partita: Command) -> None:
    text = (
        'asynchronous(concurrency=4, buffer=2, staleness="sqrt", delays=delays(download=exponential(1), '
        "upload=scaled(exponential(1), uniform(4, 6)), dropout=0.05))"
    )
    out = tmp_path / "run"
    done = partita("run", "digits", *QUICK, "--set", f"schedule={text}", "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    clock = json.loads(done.stdout)["clock"]
    assert clock["time"] > 0
    config = json.loads((out / "config.json").read_text())["schedule"]
    assert (config["name"], config["buffer"], config["delays"]["dropout"]) == ("asynchronous", 2, 0.05)
    assert config["delays"]["upload"]["factor"] == {"name": "uniform", "low": 4.0, "high": 6.0}
    again = partita(
        "run", "digits", *QUICK, "--set", f"schedule={text}", "--json", "--out", str(out), "--resume"
    )
    assert json.loads(again.stdout)["clock"] == clock
    other = text.replace("uniform(4, 6)", "uniform(4, 7)")
    done = partita("run", "digits", *QUICK, "--set", f"schedule={other}", "--out", str(out), "--resume")
    assert "its schedule (delays.upload.factor.high: 6.0 -> 7.0)" in done.stderr


def test_run_with_several_seeds_is_a_study(partita: Command) -> None:
    found = json.loads(partita("run", "digits", *QUICK[:-1], "--seeds", "2", "--json").stdout)
    assert [(row["label"], row["seeds"]) for row in found["table"]] == [
        ("local", 2),
        ("fedavg", 2),
        ("fedalt", 2),
    ]


def test_a_study_of_figures_alone(tmp_path: Path, partita: Command) -> None:
    done = partita("run", "partial-memory", "--size", "small", "--out", str(tmp_path / "m"))
    assert done.returncode == 0, done.stderr
    assert "Memory of training" in done.stdout
    assert "| spoken digits ResNet-20 |" in (tmp_path / "m" / "tables.md").read_text()


def test_report_of_several_runs(tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out, seed, rounds in (("a", 0, 3), ("b", 1, 3), ("c", 0, 2)):
        short = [*QUICK[2:], "--set", f"rounds={rounds}", "--seed", str(seed)]
        assert partita("run", "digits", *short, "--out", out).returncode == 0
    found = json.loads(partita("report", "a", "b", "c", "--json").stdout)
    # a and b differ by their seed alone
    assert {row["label"]: row["seeds"] for row in found["table"]} == {"fedalt": 2, "fedalt (c)": 1}
    assert found["report"] == "report.html"
    assert (tmp_path / "report.html").exists()
    assert partita("report", "a", "--quiet").stdout == ""


def test_track_writes_what_tensorboard_reads(tmp_path: Path, partita: Command) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'partita[track]'")
    out = tmp_path / "run"
    assert partita("run", "digits", *QUICK, "--out", str(out), "--track", "tensorboard").returncode == 0
    assert list((out / "tensorboard").rglob("events.*"))


@pytest.mark.usefixtures("small_recipes")
def test_the_demo_leaves_a_page(tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "partita-demo.html" in partita("demo", "--quiet").stdout
    assert "plotly" in (tmp_path / "partita-demo.html").read_text()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str, partita: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "partita show feda"
    given = {
        "COMP_WORDS": words,
        "COMP_CWORD": "2",
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    for name, value in {**given, "_PARTITA_COMPLETE": f"complete_{shell}"}.items():
        monkeypatch.setenv(name, value)
    done: Any
    if shell == "bash":  # one of them by the installed command
        command = str(Path(sys.executable).with_name("partita"))
        done = subprocess.run([command], capture_output=True, text=True, check=False)
    else:
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # as a script, whose name counts
        done = partita()
    assert {"fedavg", "fedalt", "fedadam"} <= set(re.findall(r"[a-z]+", done.stdout)), done


def test_a_wrong_tool_or_variant(tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, words in [
        (["run", "digits", "--track", "tensorbord"], ["tensorbord", "did you mean 'tensorboard'?"]),
        (["run", "digits", "--only", "fedalt"], ["--only", "no variants"]),
        (["run", "digits", "--size", "small"], ["size", "one of"]),
        (["run", "partial-memory", "--size", "smal"], ["smal", "did you mean 'small'?"]),
        (["run", "partial-memory", "--set", "rounds=3"], ["rounds", "size"]),
        (["run", "digits", "--data-dir", "nowhere"], ["--data-dir", "nowhere", "exists"]),
        (["run", "digits", "--seeds", "0"], ["--seeds", "0"]),
        (["compare", "partial-memory"], ["partial-memory", "partita run"]),
        (["compare", "digits", "--algorithms", "fedalt,fedprx(mu=1)"], ["fedprx", "did you mean 'fedprox'?"]),
        (["report", "nowhere"], ["nowhere", "finished run"]),
        (["list", "method"], ["method", "did you mean 'methods'?"]),
        (["show", "fedalta"], ["fedalta", "did you mean 'fedalt'?"]),
    ]:
        done = partita(*arguments)
        assert done.returncode == 2, arguments
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert all(word in done.stderr for word in words), done.stderr
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_folder_says_that_nothing_is_kept(tmp_path: Path, partita: Command) -> None:
    short = ["--set", "rounds=1", "--set", "clients=4", "--quiet"]
    assert "Nothing is kept" in partita("run", "digits", *short).stdout
    assert "Nothing is kept" not in partita("run", "digits", *short, "--out", str(tmp_path / "r")).stdout
