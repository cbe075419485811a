"""Settings as they are written on the command line: `rounds=100`, `algorithm.lr=linear(0.1)`, `attack=alie`.

Values are Python literals, words, or calls of the library's own functions; nothing else is ever called.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from partita import aggregate, attack, augment, capacity, measures, optim, privacy, schedule, transforms
from partita.algorithms import known, psi
from partita.algorithms.local import solvers
from partita.core import check
from partita.core.options import bind, constructors, signature

Functions = dict[str, Callable[..., Any]]


CAPACITIES = ("depth", "fjord", "heterofl", "rank", "shallow", "width")
MECHANISMS = ("banded", "gaussian")
SCHEDULES = ("asynchronous", "synchronous", "preferred")
MODULES = {
    "optim": constructors(optim),
    "aggregate": constructors(aggregate),
    "psi": constructors(psi),
    "solver": constructors(solvers),
    "attack": constructors(attack),
    "augment": constructors(augment),
    "capacity": {n: f for n, f in constructors(capacity).items() if n in CAPACITIES},
    "measures": constructors(measures),
    "schedule": {n: f for n, f in constructors(schedule).items() if f is not schedule.activity},
    "transforms": constructors(transforms),
    "privacy": {n: f for n, f in constructors(privacy).items() if n in MECHANISMS},
}
"""The functions that a setting may call, by the word before their names: `optim.adam`, `attack.alie`."""
TAKES = {
    "server": "optim",
    "optimizer": "optim",
    "evaluate": "solver",
}  # options whose functions are those of another word
FIELDS = {word: (word,) for word in MODULES} | {
    "uploads": ("transforms", "privacy"),
    "downloads": ("transforms",),
}
"""The words of the functions that a field of an experiment may be."""
LISTS = ("measures", "uploads", "downloads")
DEEPEST = 50  # nesting of what is written on the command line


def parse(assignments: list[str]) -> dict[str, Any]:
    """Return the settings that 'key=value' texts assign.

    A value is a Python literal, a call such as `linear(0.1)` for an option of the method, or a word.
    """
    settings: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise check.fail("--set", text, "key=value, such as rounds=100 or algorithm.lr=0.05")
        settings[key.strip()] = _value(key.strip(), value.strip())
    return settings


def expression(field: str, text: str) -> ast.expr | None:
    """Return a text as Python, None if it is a word; refuse what is nested too deep."""
    try:
        node = ast.parse(text, mode="eval").body
    except (ValueError, SyntaxError):
        return None
    except (RecursionError, MemoryError):
        node = None
    level: list[ast.AST] = [] if node is None else [node]
    depth = 0
    while level and depth <= DEEPEST:
        level, depth = [child for parent in level for child in ast.iter_child_nodes(parent)], depth + 1
    if node is None or level:
        raise check.fail(field, text, f"an expression that is nested at most {DEEPEST} deep")
    return node


def part(field: str, value: Any) -> Any:
    """Return a field of an experiment from its text: `sign_flip`, `sign_flip(scale=2)`, or a list of such."""
    if field not in FIELDS or not isinstance(value, str):
        return value
    node = expression(field, value)
    if node is None:
        raise check.fail(field, value, _call_of(field))
    if isinstance(node, ast.List | ast.Tuple):
        return [_named_call(n, field) for n in node.elts]
    made = _named_call(node, field)
    return [made] if field in LISTS else made


def literal(node: ast.expr, option: str) -> Any:
    """Return the value of a literal, a call, or a bare word."""
    return node.id if isinstance(node, ast.Name) else _argument(node, option)


def methods(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the methods that a text names, each with its options: one, or the stages of a pipeline.

    `fedalt`, `fedprox(mu=0.1)`, `fedavg(lr=0.1, rounds=50) > finetune(lr=0.01, epochs=5)`.
    """
    node = expression("algorithm", text.strip())
    if isinstance(node, ast.Compare) and all(isinstance(then, ast.Gt) for then in node.ops):
        return [_method(part, text) for part in (node.left, *node.comparators)]
    return [_method(node, text)]


def _method(node: ast.expr | None, text: str) -> tuple[str, dict[str, Any]]:
    call = ast.Call(node, [], []) if isinstance(node, ast.Name) else node
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)
        or call.args
        or any(word.arg is None for word in call.keywords)
    ):
        allowed = (
            "a method's name, a call such as fedprox(mu=0.1) or fedalt(personal='head.*'), or several joined "
            "by '>', such as fedavg(lr=0.1) > finetune(lr=0.01, epochs=5)"
        )
        raise check.fail("algorithm", text, allowed)
    name = known.method("algorithm", call.func.id)
    return name, {word.arg: literal(word.value, word.arg) for word in call.keywords if word.arg}


def _value(key: str, text: str) -> Any:
    node = expression(key, text)
    if node is None:
        return text
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        if not key.startswith("algorithm.") or not isinstance(node, ast.Call):
            return text
    try:
        return _call(node, key.rpartition(".")[2])
    except check.Refused as error:
        raise error.within(key) from None


def _named_call(node: ast.expr, field: str) -> Any:
    """Return what a call makes; a name alone is called without arguments."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name | ast.Attribute):
        raise check.fail(field, ast.unparse(node), _call_of(field))
    name = re.sub(rf"^((partita|pt)\.)?(({'|'.join(FIELDS[field])})\.)?", "", ast.unparse(call.func))
    check.choice(field, name, _names(field))
    try:
        return _call(call, field)
    except check.Refused as error:
        raise error.within(field) from None


def _call_of(field: str) -> str:
    return f"a call such as {next(iter(_names(field)))}()"


def _names(field: str) -> Sequence[str]:
    """Return the functions that a field may be: a schedule, but no delay."""
    return SCHEDULES if field == "schedule" else [name for word in FIELDS[field] for name in MODULES[word]]


def _call(node: ast.Call, option: str, prefix: str = "") -> Any:
    """Call one of the allowed functions with literals.

    In errors about its arguments, `prefix` comes before the argument.
    """
    full, short = _allowed(option)
    written = re.sub(r"^(partita|pt)\.", "", ast.unparse(node.func))
    function = full.get(written) or short[check.choice("function", written, short)]
    name = written.rpartition(".")[2]
    args = [_argument(a, option, name) for a in node.args]
    if any(k.arg is None for k in node.keywords):
        raise check.fail("argument", ast.unparse(node), "arguments by their names, without **")
    kwargs = {str(k.arg): _argument(k.value, option, name) for k in node.keywords}
    bound = bind(name, signature(function), args, kwargs, prefix)
    return function(*bound.args, **bound.kwargs)


def _allowed(option: str) -> tuple[Functions, Functions]:
    """Return the functions that this option may call, as `schedule.delays` and as `delays`.

    A name alone is of the modules that the option takes, else of the first that has it.
    """
    modules = {"schedule": MODULES["schedule"]} if option == "schedule" else MODULES
    full = {f"{word}.{name}": f for word, functions in modules.items() for name, f in functions.items()}
    short = {name.partition(".")[2]: f for name, f in reversed(full.items())}
    for word in reversed(FIELDS.get(option, (TAKES.get(option, option),))):
        short |= modules.get(word, {})
    return full, dict(sorted(short.items()))


def _argument(node: ast.expr, option: str, function: str = "") -> Any:
    """Return the value of a literal or a call; `function` is the one whose argument it is."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        return _call(node, option, f"{name} " if function else "")
    if isinstance(node, ast.Dict) and all(node.keys):
        pairs = [(_argument(k, option, function), v) for k, v in zip(node.keys, node.values) if k]
        if not all(isinstance(k, Hashable) for k, _ in pairs):
            raise check.fail("argument", ast.unparse(node), "names or numbers as keys")
        return {k: _argument(v, option, function) for k, v in pairs}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise check.fail("argument", ast.unparse(node), "a number, a word in quotes or a list") from None
