"""`partita list` and `partita show`: what is said of every part is what it does."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import partita as pt
from partita import cli
from partita.algorithms import METHODS
from partita.algorithms.known import KNOWN, method
from partita.cli import listing as commands
from partita.cli.catalogue import KINDS, entries, facts, needed
from partita.core.options import Option, checked, declared, signature, words
from partita.recipes import RECIPES, find
from partita.recipes.experiment import build
from partita.recipes.expressions import SCHEDULES, parse
from support import each

pytestmark = pytest.mark.usefixtures("brief_baselines")

Flag = Annotated[bool, Option("a switch")]

APP = typer.Typer(pretty_exceptions_enable=False)
APP.command("list")(commands.list_)
APP.command("show")(commands.show)

PARTS = {f"{e['kind']}:{e['name']}": KINDS[e["kind"]].parts()[e["name"]] for e in entries()}
NAMES = sorted({e["name"] for e in entries()})
EVERY = {f"{entry['kind']}:{name}": entry for name in NAMES for entry in facts(name)}


def partita(*arguments: str) -> str:
    done = CliRunner().invoke(APP, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


# ---- what is said of methods


@each("name", [*METHODS, "stage", "tuned"])
def test_every_method_is_described(name: str) -> None:
    (entry,) = (e for e in facts(name) if e["kind"] == "methods")
    assert entry["line"]
    assert entry["when"].startswith("Use it")
    assert entry["equation"]
    assert entry["paper"]
    assert (Path(pt.__file__).parent / entry["file"]).is_file()
    assert entry["python"]
    assert entry["command"] or name in ("pipeline", "stage", "tuned")
    for option in entry["options"]:
        assert option["text"], option
        assert option["type"], option
        assert option["required"] or "default" in option


def test_the_equation_is_the_one_in_the_file() -> None:
    (entry,) = facts("fedprox")
    assert entry["equation"].splitlines() == [
        "client:  SGD on f_i(w) + (μ/2) ‖w − w^t‖²",
        "server:  the mean",
    ]
    assert entry["paper"] == "FedProx: Li et al., Federated Optimization in Heterogeneous Networks (2020)"
    mu = next(o for o in entry["options"] if o["name"] == "mu")
    assert mu == {
        "name": "mu",
        "type": "float",
        "required": False,
        "default": 0.1,
        "range": "from 0",
        "search": "0.001 to 1, log",
        "text": "μ, the weight of the pull to the global model",
    }


def test_the_documents_name_the_methods() -> None:
    assert {*METHODS, "stage", "tuned"} <= set(pt.__all__)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("## Methods")[2].partition("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in row.split("`")[1::2]
    }
    assert named == set(METHODS)


# ---- what is said of options is what is refused

DECLARED = {
    f"{label} {p.name}": (part, p.name)
    for label, part in PARTS.items()
    for p in signature(part).parameters.values()
    if declared(p.annotation)[1].text
    and p.kind is not p.VAR_POSITIONAL
    and not label.startswith("recipes:")  # they would load their data
}
every_option = each(("part", "name"), DECLARED.values(), ids=DECLARED)


def option_of(part: Any, name: str) -> tuple[list[str], Option]:
    kind, option = declared(signature(part).parameters[name].annotation)
    return words(kind).split(" | "), option


SLOW = pt.schedule.delays(upload=1.0)
# options that are good or bad only beside others
BESIDE: dict[Any, dict[str, Any]] = {
    (pt.schedule.uniform, "low"): {"high": 1e12},
    (pt.schedule.uniform, "high"): {"low": 0.0},
    (pt.schedule.synchronous, "deadline"): {"delays": SLOW},
    (pt.schedule.synchronous, "late"): {"delays": SLOW, "deadline": 1.0},
    **{(solver, "epochs"): {"steps": None} for solver in (pt.gd, pt.adam)},
    **{(pt.measures.gradient_inversion, name): {"lr": 0.1} for name in ("match", "steps")},
    **{(pt.schedule.windows, name): {"given": [[]]} for name in ("period", "unfinished")},
    (pt.schedule.synchronous, "staleness"): {"delays": SLOW, "deadline": 1.0, "late": "apply"},
}


def make(part: Any, name: str, value: Any) -> Any:
    """The part with examples for what it must be given, and this value."""
    given = {p.name: declared(p.annotation)[1].example for p in needed(part)} | BESIDE.get((part, name), {})
    if "algorithm" in given:
        given["algorithm"] = pt.fedavg(lr=0.1)
    if (part, name, value) == (pt.persafl_me, "inner_steps", None):  # one of the two is needed
        given["nu"] = 0.1
    if (part, name, value) == (pt.schedule.synchronous, "late", "partial"):  # they are who is late
        given = {"stragglers": 0.5}
    return part(**{**given, name: value})


def refused(part: Any, name: str, value: Any) -> None:
    with pytest.raises(pt.Refused) as error:
        make(part, name, value)
    assert error.value.field.split()[-1] == name  # `delay mean` is the mean of a delay
    option = option_of(part, name)[1]
    for allowed in option.choices or option.range.split(", or "):
        assert allowed in error.value.allowed


@every_option
def test_the_ends_of_every_range(part: Any, name: str) -> None:
    kinds, option = option_of(part, name)
    whole = "int" in kinds
    if option.low is not None:
        below = option.low - 1 if whole else math.nextafter(option.low, -math.inf)
        refused(part, name, option.low if option.open_low else below)
        make(part, name, option.low + (1e-9 if option.open_low else 0))
    if option.high is not None:
        refused(part, name, option.high + 1 if whole else math.nextafter(option.high, math.inf))
        make(part, name, option.high)
    for word in option.choices:
        make(part, name, word)


@every_option
def test_values_of_another_type(part: Any, name: str) -> None:
    kinds, option = option_of(part, name)
    if "None" in kinds or signature(part).parameters[name].default is None:
        make(part, name, None)
    else:
        refused(part, name, None)
    numbers = {"int", "float"} & set(kinds)
    if numbers:
        for value in (True, "1", math.nan, math.inf, [1], *([1.5] if "float" not in kinds else [])):
            refused(part, name, value)
    if option.choices:
        refused(part, name, option.choices[0][:-1])
    if "Rate" in kinds:
        make(part, name, lambda t, rounds: 0.1 * t / rounds)
        with pytest.raises(pt.Refused) as error:
            make(part, name, lambda: 0.1)
        assert error.value.field == name
        assert "a rate such as" in error.value.allowed


@every_option
def test_examples_and_defaults_are_allowed(part: Any, name: str) -> None:
    parameter = signature(part).parameters[name]
    option = declared(parameter.annotation)[1]
    if parameter.default is not parameter.empty:
        make(part, name, parameter.default)
    else:
        assert option.example is not None or name == "algorithm"


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith(("partial-s", "persafl"))])
def test_recipes_refuse_wrong_options_before_they_load_data(recipe: str) -> None:
    part = RECIPES[recipe]
    for name, parameter in signature(part).parameters.items():
        option = declared(parameter.annotation)[1]
        if option.choices:
            refused(part, name, option.choices[0][:-1])
        elif option.low is not None:
            refused(part, name, option.low - 1)


def test_a_suggestion_on_a_typo() -> None:
    with pytest.raises(ValueError, match=r"personal_rl=0.2: fedalt .*\(did you mean 'personal_lr'\?\)"):
        pt.fedalt("output", lr=0.1, personal_rl=0.2)
    with pytest.raises(ValueError, match=r"beta=0.2: adam .*\(did you mean 'beta"):
        pt.optim.adam(0.1, beta=0.2)


def test_numbers_are_recorded_as_what_they_are() -> None:
    options = pt.fedprox(lr=1, mu=2, momentum=0).options
    assert [(k, options[k], type(options[k])) for k in ("lr", "mu", "momentum")] == [
        ("lr", 1.0, float),
        ("mu", 2.0, float),
        ("momentum", 0.0, float),
    ]


def test_help_in_a_notebook_is_readable() -> None:
    shown = str(inspect.signature(pt.fedavg))
    assert "lr: 'float | Rate'" in shown
    assert "Annotated" not in shown


def test_an_option_without_a_range_is_of_its_type() -> None:
    @checked()
    def own(flag: Flag = False) -> bool:
        return flag

    assert own(True) is True
    with pytest.raises(ValueError, match="flag=1: expected bool"):
        own(1)


# ---- every name can be listed and shown


def test_list_prints_every_kind_and_name() -> None:
    text = partita("list")
    for kind in KINDS.values():
        assert kind.title in text
    found = json.loads(partita("list", "--json"))
    assert found == entries()
    assert all(e["line"] for e in found)
    for e in found:
        assert re.search(rf"^{re.escape(e['name'])} ", text, re.MULTILINE)
    assert partita("list", "--quiet").split() == [e["name"] for e in found]


def test_a_kind_alone() -> None:
    assert {e["kind"] for e in json.loads(partita("list", "optimizers", "--json"))} == {"optimizers"}
    assert partita("list", "recipes", "--quiet").split() == list(RECIPES)
    with pytest.raises(ValueError, match=r"kind='method'.*did you mean 'methods'"):
        partita("list", "method")


def test_the_kinds_hold_what_the_package_offers() -> None:
    def of(kind: str) -> set[str]:
        return {e["name"] for e in entries(kind)}

    assert of("methods") == {*METHODS, "stage", "tuned"}
    assert of("optimizers") | of("rates") == set(pt.optim.__all__)
    parts = ("schedules", "delays", "choices", "availability", "staleness")
    assert set().union(*map(of, parts)) == {
        n for n in pt.schedule.__all__ if n[0].islower() and n != "activity"
    }
    assert of("schedules") == {"asynchronous", "synchronous", "preferred"} == set(SCHEDULES)
    assert of("aggregators") == set(pt.aggregate.__all__)
    assert of("penalties") == set(pt.psi.__all__)
    assert of("attacks") == set(pt.attack.__all__)
    assert of("measures") == set(pt.measures.__all__)
    assert of("solvers") == {"gd", "adam", "cg", "exact"} <= set(pt.__all__)
    assert {"femnist", "digits", "from_npz"} <= of("datasets")
    offered = of("datasets") | of("partitioners") | of("shifts") | of("scaling")
    assert {n for n in pt.data.__all__ if n[0].islower()} <= offered
    assert {n for n in pt.models.__all__ if n[0].islower()} == of("models")


@each("name", NAMES)
def test_every_name_can_be_shown(name: str) -> None:
    found = json.loads(partita("show", name, "--json"))
    assert found == facts(name)
    assert {e["kind"] for e in found} == {e["kind"] for e in entries() if e["name"] == name}
    text = partita("show", name)
    squeezed = "".join(text.split())
    for entry in found:
        assert "".join(entry["line"].split()) in squeezed
        for copied in filter(None, (entry["equation"], entry["python"], entry["command"])):
            assert all(f"    {line}\n" in text for line in copied.splitlines() if line)
    quiet = partita("show", name, "--quiet").split("\n")
    assert [line.partition("=")[0] for line in quiet if line] == [
        o["name"] for e in found for o in e["options"]
    ]


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"name='fedaltt'.*did you mean 'fedalt'\?"):
        partita("show", "fedaltt")


@each("name, full", [("embracing", "EmbracingFL"), ("HETEROFL", "HeteroFL"), ("fed-rep", "FedRep")])
def test_methods_of_the_literature_are_found_by_their_names(name: str, full: str) -> None:
    (page,) = facts(name)
    assert page["name"] == full
    assert full in partita("list", "methods")
    assert KNOWN[full].expression in partita("show", name)
    with pytest.raises(ValueError, match=rf"algorithm='{name}': expected {re.escape(KNOWN[full].here)}"):
        method("algorithm", name)
    with pytest.raises(pt.Refused, match=re.escape(KNOWN[full].here)):
        pt.federate(pt.models.mlp(64, 10), pt.data.digits(clients=3), name, rounds=1)
    with pytest.raises(AttributeError, match=re.escape(f"no attribute {name!r}; use {KNOWN[full].here}")):
        getattr(pt, name)


def test_a_name_of_nothing_has_no_advice() -> None:
    for name in ("fedeverything", "_embracing"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
            getattr(pt, name)


@each("name", [name for name in KNOWN if facts(name)[0]["command"]])
def test_the_command_of_a_method_of_the_literature_is_its_expression(name: str) -> None:
    line = shlex.split(facts(name)[0]["command"])
    built = build(RECIPES["digits"], parse([text for text in line if "=" in text]))
    known = KNOWN[name]
    asked = eval(known.expression, {"pt": pt})
    assert (built.algorithm.name, built.algorithm.options["lr"]) == (asked.name, asked.options["lr"])
    assert built.algorithm.options.get("personal") == asked.options.get("personal")
    for key, value in eval(f"dict({known.settings})", {"pt": pt}).items():
        same = getattr(built, key)
        assert (
            (same.name, same.options) == (value.name, value.options) if key == "capacity" else same == value
        )


@pytest.mark.parametrize("command", ["list", "show"])
def test_help_has_an_example_that_works(command: str) -> None:
    text = partita(command, "--help")
    example = re.search(r"Example: `?partita (.*?)`?$", text, re.MULTILINE)
    assert example
    assert partita(*shlex.split(example[1].strip(" `")))


# ---- examples work as printed


STORED = ("real(", "mnist_shifted(")  # they read files of PARTITA_DATA


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the files are that the examples of `trace` and `windows` name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "windows.csv").write_text("phone,0,8\nphone,22,30\nlaptop,9,17\n")
    (tmp_path / "delays.csv").write_text("phone,3.5\nphone,2\nlaptop,0.5\n")


def programs(stored: bool) -> list[str]:
    texts = {k: e["python"] for k, e in EVERY.items() if e["python"]}
    return [k for k, text in texts.items() if any(word in text for word in STORED) is stored]


def by_kind(labels: Iterable[str]) -> dict[str, list[str]]:
    """Labels such as `methods:fedavg` by their kind."""
    groups = itertools.groupby(sorted(labels), lambda k: k.partition(":")[0])
    return {kind: list(names) for kind, names in groups}


SHORTER = {  # else as printed
    r"\brounds=\d+": "rounds=1",
    r"\bsteps=5\b": "steps=2",
    r"\bdata\.quadratic\(\)": "data.quadratic(clients=4)",
}


PROGRAMS = by_kind(programs(stored=False))


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.usefixtures("recorded")
def test_the_python_examples_run(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    @each("label", PROGRAMS[kind])
    def runs(label: str) -> None:
        program = EVERY[label]["python"]
        for long, short in SHORTER.items():
            program = re.sub(long, short, program)
        exec(compile(program, label, "exec"), {})
        assert capsys.readouterr().out

    runs()


@pytest.mark.skipif(not os.environ.get("PARTITA_DATA"), reason="no folder of real data")
@pytest.mark.parametrize("label", programs(stored=True))
def test_the_example_of_real_data_runs(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EVERY[label]["python"], label, "exec"), {})
    assert capsys.readouterr().out


LINES = {k: e["command"] for k, e in EVERY.items() if e["command"]}
QUICK = [
    word
    for setting in ("rounds=1", "baselines=False", "clients=10", "steps=2")
    for word in ("--set", setting)
]


COMMANDS = by_kind(k for k, line in LINES.items() if line.startswith("partita run digits"))


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.usefixtures("recorded")
def test_the_commands_run(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @each("label", COMMANDS[kind])
    def runs(label: str) -> None:
        monkeypatch.setattr(sys, "argv", [*shlex.split(LINES[label]), *QUICK, "--json"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        assert not stop.value.code, printed.err
        name = label.partition(":")[2]
        methods = {"methods": name, "solvers": "ffgg", "staleness": "fedbuff"}
        of_server = {"gradient_inversion": "fedavg", "membership": "fedavg"}  # what attacks need
        expected = of_server.get(name, methods.get(kind, "fedalt"))
        assert json.loads(printed.out)["algorithm"] == expected

    runs()


@each("name", RECIPES)
def test_the_command_of_a_recipe_names_it(name: str) -> None:
    assert LINES[f"recipes:{name}"] == f"partita run {name}"


# ---- what the shell completes


def test_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digest.py").touch()
    assert commands.complete_name("fedal") == ["fedalt"]
    assert commands.complete_kind("me") == ["methods", "measures"]
    assert commands.complete_recipe("dig") == ["digits", "digest.py"]
    assert commands.complete_set("algorithm.personal_") == [
        "algorithm.personal_l2=",
        "algorithm.personal_lr=",
        "algorithm.personal_steps=",
    ]
    assert commands.complete_set("algorithm=fedav") == [
        "algorithm=fedavg",
        "algorithm=fedavg_plus",
        "algorithm=fedavgm",
    ]
    assert commands.complete_set("rou") == ["rounds="]
    assert commands.complete_set("attack=sig") == ["attack=sign_flip"]
    assert commands.complete_set("schedule=as") == ["schedule=asynchronous"]
    assert commands.complete_set("nothing") == []


def test_every_completed_option_is_one() -> None:
    keys = commands.complete_set("algorithm.")
    assert {k.removeprefix("algorithm.").rstrip("=") for k in keys} == {
        name for part in METHODS.values() for name in inspect.signature(part).parameters if name != "stages"
    }


# ---- --set


def chosen(*assignments: str) -> dict[str, Any]:
    """The method's options after these settings of the digits recipe."""
    return dict(build(find("digits"), parse(["clients=6", *assignments])).algorithm.options)


@each(
    ("text", "expected"),
    [
        ("algorithm.lr=0.05", 0.05),
        ("algorithm.lr=1", 1.0),
        ("algorithm.lr=1e-3", 1e-3),
        ("algorithm.lr=linear(1.0,warmup=0.2)", pt.optim.linear(1.0, warmup=0.2)),
        ("algorithm.lr = partita.optim.linear(lr=1)", pt.optim.linear(1.0)),
        ("algorithm.lr=pt.optim.stepped(0.1, [3, 5])", pt.optim.stepped(0.1, [3, 5])),
        ("algorithm.lr=optim.halving(0.1, every=2)", pt.optim.halving(0.1, 2)),
        ("algorithm.personal=input", "input"),
        ("algorithm.personal='input'", "input"),
        ("algorithm.personal=hidden1.*", "hidden1.*"),
        ("algorithm.personal=['output', '*.bias']", ["output", "*.bias"]),
        ("algorithm.personal_lr=None", None),
        ("algorithm.personal_steps=3", 3),
        ("algorithm.weighting=uniform", "uniform"),
    ],
)
def test_set(text: str, expected: Any) -> None:
    name = text.partition("=")[0].strip().removeprefix("algorithm.")
    found = chosen(text)[name]
    assert found == expected
    assert type(found) is type(expected)


@each(
    "text",
    ["geomed(0.2)", "psi.comed(delta=0.2)", 'pt.psi.layerwise({"hidden*": avg(0.1), "*": psi.free()})'],
)
def test_set_a_penalty(text: str) -> None:
    found = chosen("algorithm=fedplus", "algorithm.sigma=0.1", f"algorithm.psi={text}")["psi"]
    assert found.name == re.sub(r"\(.*|.*\.(?=\w+\()", "", text.partition("{")[0])
    assert all(type(p) is type(found) for p in found.options.get("penalties", {}).values())


@each(
    ("text", "expected"),
    [
        ("gd(5, 0.1)", pt.gd(5, 0.1)),
        ("pt.gd(steps=None, lr=linear(0.1))", pt.gd(None, pt.optim.linear(0.1))),
        ("gd(epochs=5, lr=0.2)", pt.gd(epochs=5, lr=0.2)),
        ("adam(3, lr=0.1, beta2=0.9)", pt.adam(3, 0.1, beta2=0.9)),
        ("cg(10)", pt.cg(10)),
        ("exact()", pt.exact()),
    ],
)
def test_set_a_solver(text: str, expected: Any) -> None:
    """`adam` is a solver where one is expected, and an optimizer of the server elsewhere."""
    assert chosen("algorithm=ffgg", f"algorithm.solver={text}")["solver"] == expected
    assert chosen("algorithm=ffgg", f"algorithm.evaluate={text}")["evaluate"] == expected
    both = chosen("algorithm=ffgg", f"algorithm.solver={text}", "algorithm.server=adam(0.1)")
    assert both["solver"] == expected
    assert both["server"].name == "adam"


def test_set_a_solver_of_a_stage(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import partita as pt\n"
        "from partita.recipes import Experiment\n"
        "def experiment():\n"
        "    stages = [pt.stage(pt.ffgg('output', 0.1, pt.exact()), rounds=2)]\n"
        "    return Experiment(pt.models.mlp(64, 10), pt.data.digits(3), pt.pipeline(*stages))\n"
    )
    made = build(find(str(tmp_path / "mine.py")), parse(["algorithm.0.solver=adam(2, 0.1)"]))
    assert made.algorithm.stages[0].algorithm.options["solver"] == pt.adam(2, 0.1)


def test_set_a_server_optimizer_and_an_aggregator() -> None:
    options = chosen("algorithm.server=adam(lr=0.01, beta2=0.9)", "algorithm.aggregate=mean()")
    assert (options["server"].name, options["server"].options["beta2"]) == ("adam", 0.9)
    assert options["aggregate"].name == "mean"


def test_set_the_optimizer_of_clients() -> None:
    options = chosen("algorithm.optimizer=adamw(weight_decay=0.1)")
    assert (options["optimizer"].name, options["optimizer"].options["weight_decay"]) == ("adamw", 0.1)
    assert chosen("algorithm.optimizer=adam()")["optimizer"].options["eps"] == 1e-8  # not the solver


@pytest.mark.parametrize(
    "text", ["bucketing(2, coordinate_median())", "pt.aggregate.nnm(f=5, inner=aggregate.krum(f=5))"]
)
def test_set_an_aggregator_of_an_aggregator(text: str) -> None:
    found = chosen(f"algorithm.aggregate={text}")["aggregate"]
    assert found.options["inner"].name in ("coordinate_median", "krum")
    assert next(iter(found.options.values())) in (2, 5)


@each(
    ("text", "start"),
    [
        ("algorithm.lr=abc", "lr='abc': expected a number from 0, or a rate such as"),
        ("algorithm.lr=-1", "lr=-1: expected a number from 0"),
        ("algorithm.lr=nan", "lr='nan': expected a number"),
        ("algorithm.lr=True", "lr=True: expected a number"),
        ("algorithm.lr=linear", "lr='linear': expected a number"),
        ("algorithm.lr=linear(1", "lr='linear(1': expected a number"),
        ("algorithm.momentum=True", "momentum=True: expected a number from 0 up to 1"),
        ("algorithm.personal_steps=1.5", "personal_steps=1.5: expected a whole number from 1"),
        ("algorithm.personal=3", "personal=3: expected one of 'input', 'output'"),
        (
            "algorithm.weighting=unifrom",
            "weighting='unifrom': expected one of 'samples', 'uniform' (did you mean",
        ),
        ("algorithm.server=adam", "server='adam': expected a server optimizer such as"),
        ("algorithm.server=linear(0.1)", "server=pt.optim.linear(lr=0.1): expected a server optimizer"),
        ("algorithm.aggregate=sgd()", "aggregate=pt.optim.sgd("),
        ("algorithm.lr=lineer(1)", "algorithm.lr: function='lineer': expected one of"),
        ("algorithm.lr=linear(1, warmpu=0)", "algorithm.lr: warmpu=0: linear has no such argument (did you"),
        ("algorithm.lr=linear()", "algorithm.lr: lr: linear needs this argument"),
        ("algorithm.lr=linear(0)", "algorithm.lr: lr=0: expected a number above 0"),
        ("algorithm.lr=linear(x)", "algorithm.lr: argument='x': expected a number"),
        ("algorithm.lr=linear(1 + 1)", "algorithm.lr: argument='1 + 1': expected a number"),
        ("algorithm.lr=linear(*[1])", "algorithm.lr: argument='*[1]': expected a number"),
        (
            "algorithm.lr=linear(**{'lr': 1})",
            "algorithm.lr: argument=\"linear(**{'lr': 1})\": expected arguments by their",
        ),
        ("algorithm.optimizer=adamw", "optimizer='adamw': expected an optimizer without lr="),
        ("algorithm.optimizer=adamw(lr=0.1)", "optimizer=pt.optim.adamw(lr=0.1, "),
        ("algorithm.server=adam(lr=-1)", "algorithm.server: lr=-1: expected a number above 0"),
        ("algorithm.server=open('x')", "algorithm.server: function='open': expected one of"),
        ("algorithm.server=sgd().init({})", "algorithm.server: function='sgd().init': expected one of"),
        (
            "algorithm.server=__import__('os').abort()",
            "algorithm.server: function=\"__import__('os').abort\"",
        ),
        ("algorithm=pipeline", "algorithm='pipeline': expected the stages"),
        ("algorithm.lrr=1", "option of fedalt='lrr': expected one of"),
    ],
)
def test_set_refuses(text: str, start: str) -> None:
    with pytest.raises(ValueError) as error:
        chosen(text)
    assert str(error.value).startswith(start)


@each(
    ("text", "name", "options"),
    [
        ("sign_flip", "sign_flip", {"scale": 1.0}),
        ("sign_flip(scale=2)", "sign_flip", {"scale": 2.0}),
        ("pt.attack.alie(z=1)", "alie", {"z": 1.0}),
        ("attack.malformed('names')", "malformed", {"how": "names"}),
    ],
)
def test_set_an_attack(text: str, name: str, options: dict[str, Any]) -> None:
    made = build(find("digits"), parse(["clients=6", f"attack={text}", "byzantine=[1, 2]"]))
    assert (made.attack.name, dict(made.attack.options), made.byzantine) == (name, options, [1, 2])


def test_set_measures() -> None:
    text = "[aggregation_change, line_loss(points=5), pt.measures.gradient_norm('output', gd(3, lr=0.1))]"
    made = build(find("digits"), parse(["clients=6", f"measures={text}"])).measures
    assert [m.name for m in made] == ["aggregation_change", "line_loss", "gradient_norm"]
    assert made[1].options["points"] == 5
    assert made[2].options["solver"] == pt.gd(3, 0.1)
    (one,) = build(find("digits"), parse(["clients=6", "measures=line_loss"])).measures
    assert one.name == "line_loss"


@each(
    ("text", "start", "end"),
    [
        ("attack=sign_flp", "attack='sign_flp': expected one of 'alie', ", "(did you mean 'sign_flip'?)"),
        ("attack=mean()", "attack='mean': expected one of 'alie', ", "'sign_flip'"),
        ("attack=sign_flip(", "attack='sign_flip(': expected a call such as alie()", ""),
        ("attack=sign_flip()()", "attack='sign_flip()()': expected a call such as alie()", ""),
        ("attack=__import__('os').abort()", "attack=\"__import__('os').abort\": expected one of", ""),
        ("attack=sign_flip(scal=2)", "attack: scal=2: sign_flip has no such argument", "one of scale"),
        ("attack=sign_flip(-1)", "attack: scale=-1: expected a number above 0", ""),
        ("measures=[line_los()]", "measures='line_los': expected one of", "(did you mean 'line_loss'?)"),
        ("measures=[line_loss(points=1)]", "measures: points=1: expected a whole number from 2", ""),
        ("measures=[1 + x]", "measures='1 + x': expected a call such as aggregation_change()", ""),
    ],
)
def test_set_refuses_attacks_and_measures(text: str, start: str, end: str) -> None:
    with pytest.raises(ValueError) as error:
        build(find("digits"), parse(["clients=6", text]))
    assert str(error.value).startswith(start)
    assert str(error.value).endswith(end)


# ---- --set schedule


def scheduled(text: str) -> Any:
    return build(find("digits"), parse(["clients=6", f"schedule={text}"])).schedule


S = pt.schedule


@each(
    ("text", "expected"),
    [
        ("None", None),
        ("asynchronous", S.asynchronous()),
        ("synchronous('turns')", S.synchronous("turns")),
        ("pt.schedule.preferred(until=9)", S.preferred(until=9)),
        (
            'asynchronous(concurrency=16, buffer=4, staleness="sqrt", delays=delays(download=exponential(1), '
            "upload=scaled(exponential(1), uniform(4, 6)), dropout=0.05))",
            S.asynchronous(
                16,
                4,
                "sqrt",
                S.delays(S.exponential(1), S.scaled(S.exponential(1), S.uniform(4, 6)), dropout=0.05),
            ),
        ),
        (
            "schedule.synchronous(delays=pt.schedule.delays(compute=[1, 2, 3, 4, 5, 6]), deadline=0, "
            "quorum=0.5, late='apply', staleness=polynomial(0.5))",
            S.synchronous(
                delays=S.delays(compute=[1, 2, 3, 4, 5, 6]),
                deadline=0,
                quorum=0.5,
                late="apply",
                staleness=pt.schedule.polynomial(0.5),
            ),
        ),
        (
            "asynchronous(order='same', staleness=pt.schedule.hinge(a=10, b=4), max_staleness=3, "
            "delays=delays(constant(2), compute=1, speed=classes([(0.9, 1), (0.1, 10)])))",
            S.asynchronous(
                order="same",
                staleness=pt.schedule.hinge(10, 4),
                max_staleness=3,
                delays=S.delays(S.constant(2), compute=1, speed=S.classes([(0.9, 1), (0.1, 10)])),
            ),
        ),
    ],
)
def test_set_a_schedule(text: str, expected: Any) -> None:
    """`constant` is a delay here, and a rate elsewhere."""
    assert scheduled(text) == expected
    assert chosen("algorithm.lr=constant(2)")["lr"] == pt.optim.constant(2)


def test_set_a_schedule_in_every_recipe_of_one_experiment(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import partita as pt\n"
        "from partita.recipes import Experiment\n"
        "def experiment():\n"
        "    return Experiment(pt.models.mlp(64, 10), pt.data.digits(3), pt.fedavg(lr=0.1), rounds=2,\n"
        "                      schedule=pt.schedule.synchronous('turns'))\n"
    )
    recipe = find(str(tmp_path / "mine.py"))
    assert build(recipe, {}).schedule == S.synchronous("turns")
    assert build(recipe, parse(["schedule=asynchronous(2)"])).schedule == S.asynchronous(2)
    assert build(recipe, parse(["schedule=None"])).schedule is None


@each(
    ("text", "start", "end"),
    [
        ("asynchronus", "schedule='asynchronus': expected one of 'asynchronous', ", "(did you mean 'async"),
        ("exponential(1)", "schedule='exponential': expected one of 'asynchronous', 'synchronous', ", ""),
        ("delays(upload=1)", "schedule='delays': expected one of 'asynchronous', 'synchronous', ", ""),
        ("asynchronous(", "schedule='asynchronous(': expected a call such as asynchronous()", ""),
        ("asynchronous()()", "schedule='asynchronous()()': expected a call such as", ""),
        ("__import__('os').abort()", "schedule=\"__import__('os').abort\": expected one of", ""),
        ("asynchronous(bufer=2)", "schedule: bufer=2: ", "(did you mean 'buffer'?)"),
        ("asynchronous(1, 2, 'sqrt', None, 5)", "schedule: asynchronous: too many positional", "order"),
        ("asynchronous(buffer=0)", "schedule: buffer=0: expected a whole number from 1", ""),
        ("asynchronous(staleness='sqr')", "schedule: staleness='sqr': expected one of", "mean 'sqrt'?)"),
        ("asynchronous(staleness=sqrt)", "schedule: argument='sqrt': expected a number, a word in qu", ""),
        ("asynchronous(staleness=polynomal(1))", "schedule: function='polynomal': ", "'polynomial'?)"),
        ("asynchronous(staleness=polynomial(-1))", "schedule: polynomial a=-1: expected a number from 0", ""),
        ("asynchronous(staleness=adam(0.1))", "schedule: function='adam': expected one of 'asynchr", ""),
        ("asynchronous(delays=exponential(1))", "schedule: delays=Exponential(mean=1.0): ", "delays(downl"),
        ("asynchronous(delays=delays(uplod=1))", "schedule: delays uplod=1: ", "(did you mean 'upload'?)"),
        ("asynchronous(delays=delays(upload=-1))", "schedule: delays upload=-1: ", "a number from 0"),
        ("preferred(delays(upload=exponental(1)))", "schedule: function='exponental': ", "'exponential'?)"),
        ("preferred(delays(upload=exponential(-1)))", "schedule: exponential mean=-1: ", "a number from 0"),
        ("preferred(delays(upload=exponential()))", "schedule: exponential mean: ", "exponential(mean=...)"),
        ("preferred(delays(upload=open('x')))", "schedule: function='open': expected one of 'asynchr", ""),
        ("preferred(delays(upload=1 + 1))", "schedule: argument='1 + 1': expected a number", ""),
        ("preferred(delays(upload=trace('no.csv')))", "schedule: delay path='no.csv': expected a rea", ""),
        ("synchronous(quorum=2.5)", "schedule: quorum=2.5: expected a number of clients from 1", ""),
        ("synchronous(deadline=1)", "schedule: deadline=1.0: expected None without delays=", ""),
    ],
)
def test_set_refuses_schedules(text: str, start: str, end: str) -> None:
    with pytest.raises(ValueError) as error:
        scheduled(text)
    assert str(error.value).startswith(start)
    assert end in str(error.value)


def test_a_call_is_only_a_call_where_a_method_takes_it() -> None:
    assert parse(["loss=mine(1)", "note=a(b"]) == {"loss": "mine(1)", "note": "a(b"}


def test_set_the_options_of_a_stage(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import partita as pt\n"
        "from partita.recipes import Experiment\n"
        "def experiment():\n"
        "    stages = [pt.stage(pt.fedavg(lr=0.1), rounds=2), pt.stage(pt.fedavg(lr=0.1), rounds=2)]\n"
        "    return Experiment(pt.models.mlp(64, 10), pt.data.digits(3), pt.pipeline(*stages))\n"
    )
    recipe = find(str(tmp_path / "mine.py"))
    for same in ([], ["algorithm=pipeline"]):
        made = build(recipe, parse([*same, "algorithm.1.lr=linear(0.2)", "algorithm.0.momentum=0.5"]))
        first, second = (s.algorithm.options for s in made.algorithm.stages)
        assert (first["lr"], first["momentum"], second["lr"]) == (0.1, 0.5, pt.optim.linear(0.2))
    with pytest.raises(ValueError, match="momentum=2: expected a number from 0 up to 1"):
        build(recipe, parse(["algorithm.0.momentum=2"]))
    assert build(recipe, parse(["algorithm=fedavg", "algorithm.lr=0.3"])).algorithm.options["lr"] == 0.3
