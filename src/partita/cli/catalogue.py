"""The catalogue of methods, recipes, models, data and other parts, described by their own code.

The line, the equation, the paper and the advice are taken from docstrings, the options from signatures: the
description is of what is run.
"""

from __future__ import annotations

import ast
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
    augment,
    capacity,
    data,
    measures,
    models,
    optim,
    privacy,
    schedule,
    transforms,
)
from partita.algorithms import METHODS, finetune, psi, stage, tuned
from partita.algorithms.base import ABOUT
from partita.algorithms.known import KNOWN, LORA, Known, find
from partita.algorithms.local import solvers
from partita.core import check
from partita.core.options import constructors, declared, signature, words
from partita.data.real import READERS, data_folder, real
from partita.recipes import NEEDS, RECIPES

Facts = dict[str, Any]
Parts = Mapping[str, Callable[..., Any]]

FEDALT = 'pt.fedalt(personal="output", lr=0.1)'


def _program(
    method: str = "{}",
    settings: str = "",
    printed: str = "run.summary()",
    before: tuple[str, ...] = (),
    model: str = "",
) -> str:
    """Return a program with a place for the call; `before` are lines above the run, `model` changes one."""
    widths = "64, 64, 32, 10" if "capacity" in settings else "64, 64, 10"  # blocks to leave out
    plain = f"pt.models.mlp({widths})"
    work = f"{'model' if model else plain}, data, method, rounds=20, steps=5, batch=16"
    lines = (
        "import partita as pt\n",
        "data = pt.data.digits(clients=10, partition=pt.data.label_skew(classes=3))",
        *((f"model = {plain}", f"model = {model}") if model else ()),
        f"method = {method}",
        *before,
        f"run = pt.federate(\n    {work}, {settings}\n)" if settings else f"run = pt.federate({work})",
        f"print({printed})",
    )
    return "\n".join(lines)


RUN = _program()
AUGMENTED = _program("pt.fedavg(lr=0.1)", "augment={}")
ATTACKED = _program(
    "pt.fedavg(lr=0.1, aggregate=pt.aggregate.coordinate_median())", "attack={}, byzantine=0.2"
)
MEASURED = _program(FEDALT, "measures=[{}]", 'run.metrics[-1]["measures"]')
INVERTED = _program("pt.fedavg(lr=0.1)", "measures=[{}]", 'run.metrics[-1]["measures"]').replace(
    "rounds=20, steps=5, batch=16", "rounds=4, steps=1, batch=1"
)
TOLD_APART = _program("pt.fedavg(lr=0.1)", "newcomers=0.5, measures=[{}]", 'run.metrics[-1]["measures"]')
SENT = _program(FEDALT, "uploads=[{}]", 'run.summary()["bytes_up"]')
PRIVATE = _program("pt.fedavg(lr=0.1)", "cohort=5, uploads=[{}]", 'run.summary()["privacy"]')
WEAK = _program(FEDALT, "capacity={}", 'run.clients[0]["class"], run.summary()["classes"]')
RANKED = _program(
    "pt.fedavg(lr=0.1)", "capacity={}", 'run.clients[0]["class"], run.summary()["classes"]', model=LORA
)
TIMED = _program(
    FEDALT, "cohort=5, schedule=schedule", 'run.summary()["clock"]', before=("schedule = {}",)
).replace("as pt\n", "as pt\nfrom partita.schedule import {}\n")
CHOSEN = TIMED.replace("lr=0.1", 'lr=0.1, weighting="uniform"').replace('"clock"', '"test"')
LEAST_SQUARES = """import partita as pt

problem = pt.data.quadratic(clients=8, kind="overpersonalized", n=200, d_theta=20, d_w=10)
method = {}
run = pt.federate(
    problem.model(), problem.data, method, rounds=20, loss=problem.loss, metric="loss", baselines=False
)
print(run.summary())"""
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
EACH = ("delays", "choices", "availability")  # kinds with several parts in a file, a line of equations each
DEEP = ("shallow", "rank")  # what the model of the recipe `digits` has too few blocks for, or no adapters
COMPOSED = ("pipeline", "stage", "tuned")  # made of methods: written in Python only
# calls that show more than examples of their arguments would
CALLS = {
    "asynchronous": "asynchronous(concurrency=5, buffer=2, delays=delays(upload=exponential(2.0)))",
    "synchronous": "synchronous(delays=delays(upload=exponential(2.0)), deadline=3.0, quorum=0.5)",
    "preferred": "preferred(delays=delays(upload=exponential(2.0)), until=30.0)",
    "delays": "delays(download=0.5, upload=lognormal(1.0, sigma=1.0), dropout=0.05)",
    "classes": "delays(compute=0.2, speed=classes([(0.9, 1), (0.1, 10)]))",
    "scaled": "delays(upload=scaled(exponential(1.0), uniform(4.0, 6.0)))",
    "standardize": "standardize(pt.data.digits(clients=20))",
    "penalty": "penalty(prox=lambda x: {name: v.clamp(-1, 1) for name, v in x.items()})",
}
# values for arguments without a default
VALUES: dict[str, Any] = {
    "alpha": 0.5,
    "classes": 3,
    "fraction": 0.5,
    "inputs": 64,
    "scale": 0.1,
    "widths": (64, 32, 10),
}


# parts that need other runs than the rest of their kind: a program, and the settings of a command
OTHER_RUNS: dict[Any, tuple[str, str]] = {
    measures.gradient_inversion: (
        INVERTED,
        "algorithm=fedavg' --set cohort=5 --set steps=1 --set batch=1 --set 'measures=[{}]",
    ),
    measures.membership: (
        TOLD_APART,
        "algorithm=fedavg' --set cohort=5 --set newcomers=0.5 --set 'measures=[{}]",
    ),
}


class Kind(NamedTuple):
    """One chapter of the catalogue.

    parts    its parts, by name
    example  a program with a place for the call
    call     how a part is called in it; `{}` is its name and arguments
    command  the settings of `partita run digits` that use it
    within   the call that a part stands in
    """

    title: str
    parts: Callable[[], Parts]
    example: str = ""
    call: str = "{}"
    command: str = ""
    within: str = "{}"


def _public(module: ModuleType, *files: str) -> Parts:
    """Return the functions that a package offers, of all or some of its files."""
    return {n: f for n, f in constructors(module).items() if not files or _file(f).stem in files}


def _datasets() -> Parts:
    others = {*_public(data, "partitioners", "shifts", "scale")}
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
    "scaling": Kind("scalings of features", lambda: _public(data, "scale"), DATA, "pt.data.{}"),
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
    "choices": Kind(
        "client choices",
        lambda: _public(schedule, "choice"),
        CHOSEN,
        "synchronous(choose={})",
        "cohort=5' --set 'algorithm.weighting=uniform' --set 'schedule=synchronous(choose={})",
    ),
    "availability": Kind(
        "availability",
        lambda: _public(schedule, "available"),
        TIMED,
        "synchronous(available={})",
        "schedule=synchronous(available={})",
    ),
    "staleness": Kind(
        "staleness functions",
        lambda: _public(schedule, "staleness"),
        RUN,
        "pt.fedbuff(lr=0.1, staleness=pt.schedule.{})",
        "algorithm=fedbuff' --set 'algorithm.staleness={}",
    ),
    "augmentations": Kind(
        "augmentations",
        lambda: _public(augment, "images", "noise", "spectra"),
        AUGMENTED,
        "pt.augment.{}",
        "augment={}",
    ),
    "attacks": Kind(
        "attacks",
        lambda: _public(attack),
        ATTACKED,
        "pt.attack.{}",
        "attack={}' --set 'byzantine=0.2",
    ),
    "capacities": Kind(
        "capacities of devices",
        lambda: _public(capacity, "depth", "rank", "shallow", "width"),
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
    "transforms": Kind(
        "compressors",
        lambda: _public(transforms),
        SENT,
        "pt.transforms.{}",
        "uploads=[{}]",
    ),
    "privacy": Kind(
        "privacy mechanisms",
        lambda: _public(privacy, "gaussian", "banded"),
        PRIVATE,
        "pt.privacy.{}",
        "cohort=5' --set 'uploads=[{}]",
    ),
}


ELSEWHERE = "methods by other names"
"""Title of the methods of the literature that are expressions of others here."""


def known() -> list[Facts]:
    """Return methods of the literature, and the expressions under which they run here."""
    return [
        {"name": name, **m._asdict(), "line": f"{m.here}: {m.note}. {m.paper}"} for name, m in KNOWN.items()
    ]


def entries(kind: str | None = None) -> list[Facts]:
    """Return kind, name and one line of all parts, or of one kind."""
    chosen = KINDS if kind is None else {kind: KINDS[check.choice("kind", kind, KINDS)]}
    return [
        {"kind": k, "name": name, "line": _line(name, part), "data": list(_data(k, name, part)[1])}
        for k, chapter in chosen.items()
        for name, part in chapter.parts().items()
    ]


def facts(name: str) -> list[Facts]:
    """Return everything about a name: an entry for each kind that has it, most often one."""
    names = [entry["name"] for entry in entries()]
    if name not in names and (elsewhere := find(name)) is not None:
        return [_known_facts(elsewhere, KNOWN[elsewhere])]
    if name not in names:
        raise check.fail("name", name, f"a name that `partita list` prints{check.meant(name, names)}")
    chapters = [(kind, chapter, chapter.parts()) for kind, chapter in KINDS.items()]
    return [_facts(kind, chapter, name, parts[name]) for kind, chapter, parts in chapters if name in parts]


def options(part: Callable[..., Any]) -> list[Facts]:
    """Return the arguments of a function: name, type, default, range, what is searched and meaning."""
    written = inspect.signature(part).parameters  # types as the author wrote them
    meanings = _meanings(_doc(part), part)
    rows = []
    for p in signature(part).parameters.values():
        kind, option = declared(p.annotation)
        rows.append(
            {
                "name": p.name,
                "type": words(kind if option.text else written[p.name].annotation),
                "required": p.default is p.empty and p.kind is not p.VAR_KEYWORD,
                "default": None if p.default is p.empty else _plain(p.default),
                "range": option.range,
                "search": option.searched,
                "text": option.text or meanings.get(p.name, ""),
            }
        )
    return rows[1:] if _is_real(part) else rows  # the path is `real`'s own business


def call(name: str, part: Callable[..., Any]) -> str | None:
    """Return the call with an example for every needed argument, or None where one has no example."""
    arguments = []
    for p in needed(part):
        example = declared(p.annotation)[1].example
        example = VALUES.get(p.name) if example is None else example
        if example is None:
            return None
        if p.kind is p.VAR_POSITIONAL:
            arguments += [repr(x) for x in example]
        else:
            arguments.append(f"{p.name}={_quoted(example)}")
    return f"{name}({', '.join(arguments)})"


def needed(part: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the arguments that an example must give: without a default, or with None and an example."""
    return [
        p
        for p in signature(part).parameters.values()
        if p.kind is not p.VAR_KEYWORD
        and (p.default is p.empty or (p.default is None and declared(p.annotation)[1].example is not None))
    ]


def _facts(kind: str, chapter: Kind, name: str, part: Callable[..., Any]) -> Facts:
    text, module = _doc(part), inspect.getdoc(inspect.getmodule(inspect.unwrap(part))) or ""
    when = re.search(r"^Use it .*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    method = ABOUT.get(name) if kind == "methods" else None
    about_module = kind not in ("models", "datasets", "partitioners", "shifts", "scaling", "rates")
    return {
        "kind": kind,
        "name": name,
        "line": _line(name, part),
        "about": "" if _is_real(part) else _about(text, part),
        "when": method.use if method else " ".join(when[0].split()) if when else None,
        "equation": _equation(module, name if kind in EACH else "") if about_module else None,
        "paper": method.paper if method else _paper(module) if about_module else None,
        "options": options(part),
        "file": str(_file(part)),
        "python": _python(chapter, name, part),
        "command": _command(kind, chapter, name, part),
        "data": list(_data(kind, name, part)[1]),
        "get": _get(*_data(kind, name, part)),
    }


def _known_facts(name: str, method: Known) -> Facts:
    """Return everything about a method of the literature that is an expression of others here."""
    word = method.expression.removeprefix("pt.").partition("(")[0]
    written = [f"algorithm={word}", *(f"algorithm.{text}" for text in _arguments(method.expression))]
    written += _arguments(f"dict({method.settings})")
    line = " ".join(["partita run digits", *(f"--set {shlex.quote(text)}" for text in written)])
    return {
        "kind": "methods",
        "name": name,
        "line": f"{method.note[0].upper()}{method.note[1:]}.",
        "about": f"Here it is {method.here}.",
        "when": None,
        "equation": None,
        "paper": method.paper,
        "options": [],
        "file": "algorithms/known.py",
        "python": _program(method.expression, method.settings, model=method.model),
        "command": None if word in COMPOSED or method.model or any(d in line for d in DEEP) else line,
        "data": [],
        "get": None,
    }


def _arguments(call: str) -> list[str]:
    """Return the named arguments of a call as `--set` takes them."""
    parsed = ast.parse(call, mode="eval").body
    texts = []
    for keyword in parsed.keywords if isinstance(parsed, ast.Call) else ():
        value = ast.get_source_segment(call, keyword.value) or ""
        if isinstance(keyword.value, ast.Constant):
            value = str(keyword.value.value)
        texts.append(f"{keyword.arg}={re.sub(r'pt[.](?:[a-z]+[.])?', '', value)}")
    return texts


def _data(kind: str, name: str, part: Callable[..., Any]) -> tuple[str, tuple[str, ...]]:
    """Return the real datasets that a part needs, after the argument that chooses one of them."""
    return NEEDS.get(name, ("", ())) if kind == "recipes" else ("", (name,) if _is_real(part) else ())


def _get(argument: str, names: tuple[str, ...]) -> str | None:
    """Return how to have the data that are needed, a line for each."""
    lines = []
    for name in names:
        notes = [f"for {argument}={name}{', the default' if name == names[0] else ''}"] if argument else []
        notes += ["here already"] if (data_folder() / f"{name}.npz").is_file() else []
        lines.append(f"partita data get {name}" + (f"  # {'; '.join(notes)}" if notes else ""))
    return "\n".join(lines) or None


def _python(chapter: Kind, name: str, part: Callable[..., Any]) -> str | None:
    if name == "tuned":
        return chapter.example.format(TUNED)
    if name in COMPOSED or part is finetune:
        stages = FINETUNED if part is finetune else STAGES
        return chapter.example.replace(" rounds=20,", "").format(stages)
    inner = f'real("{name}", clients=4)' if _is_real(part) else _call(chapter, name, part)
    if inner is None or not chapter.example:
        return None
    written = chapter.call.format(inner)
    if part is capacity.rank:
        return RANKED.format(written)
    if part in OTHER_RUNS:
        return OTHER_RUNS[part][0].format(written)
    if chapter.example in (TIMED, CHOSEN):
        return chapter.example.format(", ".join(sorted({*re.findall(r"\w+(?=\()", written)})), written)
    return chapter.example.format(written)


def _call(chapter: Kind, name: str, part: Callable[..., Any]) -> str | None:
    """Return the call of a part as the command line has it."""
    if name in CALLS and part in (getattr(schedule, name, None), data.standardize, psi.penalty):
        return CALLS[name]
    written = call(name, part)
    return written and chapter.within.format(written)


def _command(kind: str, chapter: Kind, name: str, part: Callable[..., Any]) -> str | None:
    """Return a line for the shell, or None where there is none."""
    if kind == "recipes":
        return f"partita run {name}"
    if kind == "methods" and name not in COMPOSED:
        options = [f"algorithm.{p.name}={declared(p.annotation)[1].example}" for p in needed(part)]
        settings = [f"--set {shlex.quote(s)}" for s in (f"algorithm={name}", *options)]
        return " ".join(["partita run digits", *settings])
    written = _call(chapter, name, part) if chapter.command and name not in DEEP else None
    other = OTHER_RUNS[part][1] if part in OTHER_RUNS else chapter.command
    return written and f"partita run digits --set '{other.format(written)}'"


def _equation(module: str, name: str) -> str | None:
    """Return the indented lines of a module's docstring; with a name, only those that begin with it."""
    lines = [line for line in module.splitlines() if re.match(rf"    {name and rf'{name} '}", line)]
    return textwrap.dedent("\n".join(lines)) or None


def _paper(module: str) -> str | None:
    """Return the first line of a module's docstring, if it refers to a paper or says that there is none."""
    line = module.partition("\n")[0]
    return line.replace("*", "").rstrip(".") if re.search(r"\((19|20)\d\d\)|no paper", line) else None


def _line(name: str, part: Callable[..., Any]) -> str:
    """Return the first sentence of the docstring; for real data, what `real` says about its clients."""
    if _is_real(part):
        row = re.search(rf"^{name} +(\w+)", inspect.getdoc(real) or "", re.MULTILINE)
        return f"Real data; clients of its own: {row[1] if row else 'none'}."
    return " ".join(_doc(part).partition("\n\n")[0].split())


def _about(text: str, part: Callable[..., Any]) -> str:
    """Return a docstring without its first sentence, the advice, doctests and lists of arguments."""
    rest = [
        p for p in text.split("\n\n")[1:] if not p.startswith(("Use it", ">>>")) and not _meanings(p, part)
    ]
    return "\n\n".join(rest)


def _meanings(text: str, part: Callable[..., Any]) -> dict[str, str]:
    """Read a docstring's lists of arguments: `name   meaning` or `name, name`, and the lines below."""
    parameters = inspect.signature(part).parameters
    meanings: dict[str, str] = {}
    for paragraph in text.split("\n\n"):
        rows: list[tuple[str, str]] = []
        for line in paragraph.splitlines():
            row = re.match(r"(\w+(?:, \w+)*)(?:(?:: +| {2,})(\S.*)|$)", line)
            if row and all(name in parameters for name in row[1].split(", ")):
                rows.append((row[1], row[2] or ""))
            elif rows and line.startswith(" "):
                rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}".strip())
            else:
                rows = []
                break
        meanings |= {name: meaning for names, meaning in rows for name in names.split(", ")}
    return meanings


def _doc(part: Callable[..., Any]) -> str:
    return inspect.getdoc(part) or ""


def _file(part: Callable[..., Any]) -> Path:
    """Return the file of a part, relative to the package."""
    return Path(inspect.getfile(inspect.unwrap(part))).relative_to(Path(__file__).parents[1])


def _is_real(part: Callable[..., Any]) -> bool:
    """Return whether a part reads one of the datasets of `real`."""
    return part.__name__.startswith("_") and part.__module__ == real.__module__


def _quoted(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_quoted(k)}: {_quoted(v)}' for k, v in value.items())}}}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _plain(value: Any) -> Any:
    """Return a default as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return list(value) if isinstance(value, list | tuple) else repr(value)
