"""What there is: methods, recipes, models, data and the other parts, described by their own code.

The line, the equation, the paper and the advice are taken from docstrings, the options from signatures: what
is said here is what is run.
"""

from __future__ import annotations

import inspect
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from partita import (
    aggregate,
    attack,
    capacity,
    data,
    measures,
    models,
    optim,
    schedule,
)
from partita.algorithms import METHODS, finetune, psi, stage, tuned
from partita.algorithms.base import ABOUT
from partita.algorithms.known import KNOWN, Known
from partita.algorithms.local import solvers
from partita.core import check
from partita.core.options import constructors, declared, signature, words
from partita.data.real import READERS, real
from partita.recipes import RECIPES

Facts = dict[str, Any]
Parts = Mapping[str, Callable[..., Any]]

RUN = """import partita as pt

data = pt.data.digits(clients=10, partition=pt.data.label_skew(classes=3))
method = {}
run = pt.federate(pt.models.mlp(64, 64, 10), data, method, rounds=20, steps=5, batch=16)
print(run.summary())"""
LEAST_SQUARES = """import partita as pt

problem = pt.data.quadratic(clients=8, kind="overpersonalized", n=200, d_theta=20, d_w=10)
method = {}
run = pt.federate(
    problem.model(), problem.data, method, rounds=20, loss=problem.loss, metric="loss", baselines=False
)
print(run.summary())"""
LYING = """import partita as pt

data = pt.data.digits(clients=10, partition=pt.data.label_skew(classes=3))
method = pt.fedavg(lr=0.1, aggregate=pt.aggregate.coordinate_median())
run = pt.federate(
    pt.models.mlp(64, 64, 10), data, method, rounds=20, steps=5, batch=16, attack={}, byzantine=0.2
)
print(run.summary())"""
MEASURED = """import partita as pt

data = pt.data.digits(clients=10, partition=pt.data.label_skew(classes=3))
method = pt.fedalt(personal="output", lr=0.1)
run = pt.federate(
    pt.models.mlp(64, 64, 10), data, method, rounds=20, steps=5, batch=16, measures=[{}]
)
print(run.metrics[-1]["measures"])"""
TIMED = """import partita as pt
from partita.schedule import {}

data = pt.data.digits(clients=10, partition=pt.data.label_skew(classes=3))
method = pt.fedalt(personal="output", lr=0.1)
schedule = {}
run = pt.federate(
    pt.models.mlp(64, 64, 10), data, method, rounds=20, cohort=5, steps=5, batch=16, schedule=schedule
)
print(run.summary()["clock"])"""
WEAK = """import partita as pt

data = pt.data.digits(clients=10, partition=pt.data.label_skew(classes=3))
method = pt.fedalt(personal="output", lr=0.1)
run = pt.federate(
    pt.models.mlp(64, 64, 10), data, method, rounds=20, steps=5, batch=16, capacity={}
)
print(run.clients[0]["class"], run.summary()["classes"])"""
DATA = "import partita as pt\n\ndata = {}\nprint(data)"
MODEL = "import partita as pt\n\nmodel = {}\nprint(model)"
STAGES = """pt.pipeline(
    pt.stage(pt.fedavg(lr=0.1), rounds=10),
    pt.stage(pt.fedalt(personal="output", lr=0.1), rounds=10),
    pt.stage(pt.finetune(personal="output", lr=0.01), epochs=1),
)"""
FINETUNED = """pt.pipeline(
    pt.stage(pt.fedavg(lr=0.1), rounds=20),
    pt.stage(pt.finetune(personal="output", lr=0.1), epochs=5),
)"""
TUNED = "pt.tuned(pt.fedavg(lr=0.1), lr=0.05, steps=10)"
AROUND = ("pipeline", "stage", "tuned")  # methods that are made of methods: written in Python only
# calls that say more than their arguments' examples, as the command line has them
CALLS = {
    "asynchronous": "asynchronous(concurrency=5, buffer=2, delays=delays(upload=exponential(2.0)))",
    "synchronous": "synchronous(delays=delays(upload=exponential(2.0)), deadline=3.0, quorum=0.5)",
    "preferred": "preferred(delays=delays(upload=exponential(2.0)), until=30.0)",
    "delays": "delays(download=0.5, upload=lognormal(1.0, sigma=1.0), dropout=0.05)",
    "classes": "delays(compute=0.2, speed=classes([(0.9, 1), (0.1, 10)]))",
    "scaled": "delays(upload=scaled(exponential(1.0), uniform(4.0, 6.0)))",
}
# arguments that have no default, for the examples
GIVEN: dict[str, Any] = {
    "alpha": 0.5,
    "classes": 3,
    "fraction": 0.5,
    "inputs": 64,
    "scale": 0.1,
    "widths": (64, 32, 10),
}


class Kind(NamedTuple):
    """One chapter of the catalogue.

    parts    what is in it, by name
    example  a program with a place for the call
    call     how a part is called, `{}` being its name and arguments
    command  the settings of `partita run digits` that use it
    within   what a call stands in
    """

    title: str
    parts: Callable[[], Parts]
    example: str = ""
    call: str = "{}"
    command: str = ""
    within: str = "{}"


def _public(module: ModuleType, *files: str) -> Parts:
    """What a package offers to call, of some of its files."""
    return {n: f for n, f in constructors(module).items() if not files or _file(f).stem in files}


def _datasets() -> Parts:
    others = {*_public(data, "partitioners", "shifts")}
    return {n: f for n, f in _public(data).items() if n not in others} | READERS


KINDS = {
    "methods": Kind("methods", lambda: {**METHODS, "stage": stage, "tuned": tuned}, RUN, "pt.{}"),
    "recipes": Kind("recipes", lambda: RECIPES),
    "models": Kind("models", lambda: _public(models), MODEL, "pt.models.{}"),
    "datasets": Kind("datasets", _datasets, DATA, "pt.data.{}"),
    "partitioners": Kind(
        "partitioners",
        lambda: _public(data, "partitioners"),
        DATA,
        "pt.data.digits(clients=20, partition=pt.data.{})",
    ),
    "shifts": Kind(
        "feature shifts",
        lambda: _public(data, "shifts"),
        DATA,
        "pt.data.digits(clients=20, shift=pt.data.{})",
    ),
    "aggregators": Kind(
        "aggregators",
        lambda: _public(aggregate),
        RUN,
        "pt.fedavg(lr=0.1, aggregate=pt.aggregate.{})",
        "algorithm.aggregate={}",
    ),
    "optimizers": Kind(
        "optimizers",
        lambda: _public(optim, "optimizers"),
        RUN,
        "pt.fedavg(lr=0.01, optimizer=pt.optim.{})",
        "algorithm.lr=0.01' --set 'algorithm.optimizer={}",
    ),
    "solvers": Kind(
        "solvers of FFGG",
        lambda: _public(solvers),
        LEAST_SQUARES,
        'pt.ffgg(personal="w", lr=problem.constants.gamma_theta, solver=pt.{})',
        "algorithm=ffgg' --set 'algorithm.solver={}",
    ),
    "penalties": Kind(
        "penalties of Fed+",
        lambda: _public(psi),
        RUN,
        "pt.fedplus(psi=pt.psi.{}, lr=0.1, sigma=0.1)",
    ),
    "rates": Kind(
        "learning-rate schedules",
        lambda: _public(optim, "rates"),
        RUN,
        "pt.fedavg(lr=pt.optim.{})",
        "algorithm.lr={}",
    ),
    "schedules": Kind(
        "schedules",
        lambda: _public(schedule, "asynchronous", "synchronous", "preferred"),
        TIMED,
        "{}",
        "schedule={}",
    ),
    "delays": Kind(
        "delays",
        lambda: _public(schedule, "delay"),
        TIMED,
        "asynchronous(delays={})",
        "schedule=asynchronous(delays={})",
        "delays(upload={})",
    ),
    "staleness": Kind(
        "staleness functions",
        lambda: _public(schedule, "staleness"),
        RUN,
        "pt.fedbuff(lr=0.1, staleness=pt.schedule.{})",
        "algorithm=fedbuff' --set 'algorithm.staleness={}",
    ),
    "attacks": Kind(
        "attacks",
        lambda: _public(attack),
        LYING,
        "pt.attack.{}",
        "attack={}' --set 'byzantine=0.2",
    ),
    "capacities": Kind(
        "capacities of devices",
        lambda: _public(capacity, "depth", "width"),
        WEAK,
        "pt.capacity.{}",
        "capacity={}",
    ),
    "measures": Kind(
        "measures",
        lambda: _public(measures),
        MEASURED,
        "pt.measures.{}",
        "measures=[{}]",
    ),
}


ELSEWHERE = "methods by other names"
"""Title of the methods that are expressions of others; there is nothing more to be shown of them."""


def known() -> list[Facts]:
    """Methods of the literature, and the expressions under which they run here."""
    return [
        {"name": name, **one._asdict(), "line": f"{_written(one)}: {one.note}. {one.paper}"}
        for name, one in KNOWN.items()
    ]


def _written(one: Known) -> str:
    return one.expression + (f" with {one.settings}" if one.settings else "")


def entries(kind: str | None = None) -> list[Facts]:
    """Kind, name and one line of everything, or of one kind."""
    chosen = KINDS if kind is None else {kind: KINDS[check.choice("kind", kind, KINDS)]}
    return [
        {"kind": k, "name": name, "line": _line(name, part)}
        for k, chapter in chosen.items()
        for name, part in chapter.parts().items()
    ]


def facts(name: str) -> list[Facts]:
    """Everything about a name: an entry for each kind that has it, most often one."""
    names = [entry["name"] for entry in entries()]
    if name not in names:
        raise check.fail("name", name, f"a name that `partita list` prints{check.meant(name, names)}")
    found = [(k, c, c.parts()[name]) for k, c in KINDS.items() if name in c.parts()]
    return [_facts(kind, chapter, name, part) for kind, chapter, part in found]


def options(part: Callable[..., Any]) -> list[Facts]:
    """The arguments of a function: name, type, default, range and meaning."""
    written = inspect.signature(part).parameters  # types as the author wrote them
    told = _told(_doc(part), part)
    found = []
    for p in signature(part).parameters.values():
        kind, option = declared(p.annotation)
        found.append(
            {
                "name": p.name,
                "type": words(kind if option.text else written[p.name].annotation),
                "required": p.default is p.empty and p.kind is not p.VAR_KEYWORD,
                "default": None if p.default is p.empty else _plain(p.default),
                "range": option.range,
                "text": option.text or told.get(p.name, ""),
            }
        )
    return found[1:] if _is_real(part) else found  # the path is `real`'s own business


def call(name: str, part: Callable[..., Any]) -> str | None:
    """The call with an example for every argument that must be given; None if there is none for one."""
    arguments = []
    for p in needed(part):
        example = declared(p.annotation)[1].example
        example = GIVEN.get(p.name) if example is None else example
        if example is None:
            return None
        if p.kind is p.VAR_POSITIONAL:
            arguments += [repr(x) for x in example]
        else:
            arguments.append(f"{p.name}={_quoted(example)}")
    return f"{name}({', '.join(arguments)})"


def needed(part: Callable[..., Any]) -> list[inspect.Parameter]:
    """The arguments that an example must give: those without a default, or with None and an example."""
    found = [p for p in signature(part).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return [
        p
        for p in found
        if p.default is p.empty or (p.default is None and declared(p.annotation)[1].example is not None)
    ]


def _facts(kind: str, chapter: Kind, name: str, part: Callable[..., Any]) -> Facts:
    text, module = _doc(part), inspect.getdoc(inspect.getmodule(inspect.unwrap(part))) or ""
    when = re.search(r"^Use it .*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    own = ABOUT.get(name) if kind == "methods" else None
    about_module = kind not in ("models", "datasets", "partitioners", "shifts", "rates")
    return {
        "kind": kind,
        "name": name,
        "line": _line(name, part),
        "about": "" if _is_real(part) else _about(text, part),
        "when": own.use if own else " ".join(when[0].split()) if when else None,
        "equation": _equation(module, name if kind == "delays" else "") if about_module else None,
        "paper": own.paper if own else _paper(module) if about_module else None,
        "options": options(part),
        "file": str(_file(part)),
        "python": _python(chapter, name, part),
        "command": _command(kind, chapter, name, part),
    }


def _python(chapter: Kind, name: str, part: Callable[..., Any]) -> str | None:
    if name == "tuned":
        return chapter.example.format(TUNED)
    if name in AROUND or part is finetune:
        stages = FINETUNED if part is finetune else STAGES
        return chapter.example.replace(" rounds=20,", "").format(stages)
    made = f'real("{name}", clients=4)' if _is_real(part) else _call(chapter, name, part)
    if made is None or not chapter.example:
        return None
    made = chapter.call.format(made)
    if chapter.example == TIMED:
        return TIMED.format(", ".join(sorted({*re.findall(r"\w+(?=\()", made)})), made)
    return chapter.example.format(made)


def _call(chapter: Kind, name: str, part: Callable[..., Any]) -> str | None:
    """As the command line has it."""
    if part is getattr(schedule, name, None) and name in CALLS:
        return CALLS[name]
    made = call(name, part)
    return made and chapter.within.format(made)


def _command(kind: str, chapter: Kind, name: str, part: Callable[..., Any]) -> str | None:
    """A line for the shell, where there is one."""
    if kind == "recipes":
        return f"partita run {name}"
    if kind == "methods" and name not in AROUND:
        given = [f"algorithm.{p.name}={declared(p.annotation)[1].example}" for p in needed(part)]
        settings = [shlex.quote(s) for s in (f"algorithm={name}", *given)]
        return " ".join(["partita run digits", *(f"--set {s}" for s in settings)])
    made = _call(chapter, name, part)
    return f"partita run digits --set '{chapter.command.format(made)}'" if made and chapter.command else None


def _equation(module: str, name: str) -> str | None:
    """The indented lines of a module's docstring; with a name, only those that begin with it."""
    lines = [line for line in module.splitlines() if re.match(rf"    {name and rf'{name} '}", line)]
    return textwrap.dedent("\n".join(lines)) or None


def _paper(module: str) -> str | None:
    """The first line of a module's docstring, if it refers to a paper or says that there is none."""
    line = module.partition("\n")[0]
    return line.replace("*", "").rstrip(".") if re.search(r"\((19|20)\d\d\)|no paper", line) else None


def _line(name: str, part: Callable[..., Any]) -> str:
    """The first sentence of the docstring; for real data, what `real` says about its clients."""
    if _is_real(part):
        row = re.search(rf"^{name} +(\w+)", inspect.getdoc(real) or "", re.MULTILINE)
        return f"Real data; clients of its own: {row[1] if row else 'none'}."
    return " ".join(_doc(part).partition("\n\n")[0].split())


def _about(text: str, part: Callable[..., Any]) -> str:
    """The rest of a docstring: without its first sentence, the advice, doctests and lists of arguments."""
    rest = [p for p in text.split("\n\n")[1:] if not p.startswith(("Use it", ">>>")) and not _told(p, part)]
    return "\n\n".join(rest)


def _told(text: str, part: Callable[..., Any]) -> dict[str, str]:
    """Meanings from a docstring's lists of arguments: `name   meaning` or `name, name`, and what is below."""
    known = inspect.signature(part).parameters
    found: dict[str, str] = {}
    for paragraph in text.split("\n\n"):
        rows: list[tuple[str, str]] = []
        for line in paragraph.splitlines():
            row = re.match(r"(\w+(?:, \w+)*)(?:(?:: +| {2,})(\S.*)|$)", line)
            if row and all(name in known for name in row[1].split(", ")):
                rows.append((row[1], row[2] or ""))
            elif rows and line.startswith(" "):
                rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}".strip())
            else:
                rows = []
                break
        found |= {name: meaning for names, meaning in rows for name in names.split(", ")}
    return found


def _doc(part: Callable[..., Any]) -> str:
    return inspect.getdoc(part) or ""


def _file(part: Callable[..., Any]) -> Path:
    """Relative to the package."""
    return Path(inspect.getfile(inspect.unwrap(part))).relative_to(Path(__file__).parents[1])


def _is_real(part: Callable[..., Any]) -> bool:
    """Whether it reads one of the datasets of `real`."""
    return part.__name__.startswith("_") and part.__module__ == real.__module__


def _quoted(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_quoted(k)}: {_quoted(v)}' for k, v in value.items())}}}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return list(value) if isinstance(value, list | tuple) else repr(value)
