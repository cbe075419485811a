"""Options: what an argument means and which values it takes, said once, where the argument is declared.

    mu: Annotated[float, Option("μ, the weight of the pull to the global model", low=0)]

`partita show` prints it and `checked` refuses all other values, so the two cannot differ.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType, NoneType, UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from partita.core import check

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The values of a number among which `partita.tune` searches.

    log    whether it searches on a logarithmic scale
    asked  whether it searches only when asked for: options that few users tune
    """

    low: float
    high: float
    log: bool = False
    asked: bool = False

    def __post_init__(self) -> None:
        low = check.number("low", self.low)
        check.number("high", self.high, low=low, open_low=True)
        if check.boolean("log", self.log):
            check.number("low", low, low=0, open_low=True)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}{', log' if self.log else ''}"


@dataclass(frozen=True, repr=False)
class Option:
    """The meaning of an argument and, beyond its type, the values it takes.

    low, high  the ends of its range; `open_low` excludes the lower one
    choices    the words it may be
    allowed    what else it may be, in words
    check      (field, value) -> value, or a ValueError: where type and range do not say it all
    default    for a field of a TypedDict, which has no other place for it
    example    a value for the examples of `partita show`, if there is no default
    search     the values among which `partita.tune` searches; words and flags need none
    like       the option whose value it has where it is None
    """

    text: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    choices: tuple[str, ...] = ()
    allowed: str = ""
    check: Callable[[str, Any], Any] | None = None
    default: Any = None
    example: Any = None
    search: Range | tuple[float, ...] | None = None
    like: str = ""

    @property
    def range(self) -> str:
        """The values that it takes in words; empty if its type says it all."""
        ends = [] if self.low is None else [f"{'above' if self.open_low else 'from'} {self.low:g}"]
        ends += [] if self.high is None else [f"up to {self.high:g}"]
        words = [" ".join(ends), ", ".join(map(repr, self.choices)), self.allowed]
        return ", or ".join(w for w in words if w)

    @property
    def searched(self) -> str:
        """The values among which `partita.tune` searches, in words; empty if it does not."""
        if isinstance(self.search, Range):
            return f"{self.search}{' (if asked)' if self.search.asked else ''}"
        return f"{', '.join(map(str, self.search))} (if asked)" if self.search else ""

    def __repr__(self) -> str:
        return repr(f"{self.text}; {self.range}" if self.range else self.text)


def checked(prefix: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Check the arguments of a function or of a dataclass against the options that it declares.

    Errors name `prefix` + option. A frozen dataclass that is checked is its own constructor: its fields are
    its options, and a lower-case alias is what users call.

        @checked("delay ")
        @dataclass(frozen=True)
        class Exponential:
            mean: Annotated[float, Option("the mean", low=0)]

        exponential = Exponential
    """

    def decorate(build: Callable[P, T]) -> Callable[P, T]:
        return _checked_class(build, prefix) if isinstance(build, type) else _checked_function(build, prefix)

    return decorate


def _checked_function(build: Callable[P, T], prefix: str) -> Callable[P, T]:
    arguments = signature(build)

    @functools.wraps(build)
    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = bind(build.__name__, arguments, args, kwargs, prefix)
        return build(*bound.args, **bound.kwargs)

    make.__signature__ = readable(arguments)  # type: ignore[attr-defined]
    return make


def _checked_class(kind: Any, prefix: str) -> Any:
    arguments, assign = signature(kind), kind.__init__

    @functools.wraps(assign)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = bind(called(kind), arguments, args, kwargs, prefix)
        assign(self, *bound.args, **bound.kwargs)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [itself, *readable(arguments).parameters.values()]
    init.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    kind.__init__ = init
    return kind


def called(kind: type) -> str:
    """Return the name that users call a class by: power_of_choice for PowerOfChoice."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def given(number: Any) -> bool:
    """Return whether a term has a weight; one that differs between clients is a tensor, and not zero."""
    return not isinstance(number, int | float) or bool(number)


def constructors(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return what users call of a package, by name: its functions, and classes under lower-case names."""
    public = {name: getattr(module, name) for name in module.__all__}
    return {n: p for n, p in public.items() if n.islower() and isinstance(p, FunctionType | type)}


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the arguments of a function or class, types resolved and `Unpack[...]` spelled out."""
    function = inspect.unwrap(function)
    hints = get_type_hints(function, include_extras=True)
    written = inspect.signature(function)
    parameters = []
    for p in written.parameters.values():
        hint = hints.get(p.name, p.annotation)
        if p.kind is p.VAR_KEYWORD and get_origin(hint) is Unpack:
            fields = get_type_hints(get_args(hint)[0], include_extras=True)
            parameters += [
                inspect.Parameter(k, p.KEYWORD_ONLY, default=declared(h)[1].default, annotation=h)
                for k, h in fields.items()
            ]
        else:
            parameters.append(p.replace(annotation=hint))
    return written.replace(parameters=parameters)


def readable(arguments: inspect.Signature) -> inspect.Signature:
    """Return the signature with types in words, for help and notebooks."""
    parameters = arguments.parameters.values()
    return arguments.replace(
        parameters=[p.replace(annotation=words(declared(p.annotation)[0])) for p in parameters]
    )


def words(kind: Any) -> str:
    """Return a type as it is written in a signature."""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("Callable[[int, int], float]", "Rate")
    return text.replace("Callable[[int], float]", "Staleness")


def declared(hint: Any) -> tuple[Any, Option]:
    """Return the plain type of an argument and its option, an empty one if nothing is declared."""
    if get_origin(hint) is not Annotated:
        return hint, Option("")
    plain, *notes = get_args(hint)
    return plain, next((n for n in notes if isinstance(n, Option)), Option(""))


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types that a union allows, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def bind(
    name: str, arguments: inspect.Signature, args: Iterable[Any], kwargs: Mapping[str, Any], prefix: str = ""
) -> inspect.BoundArguments:
    """Return all arguments of a call, checked; the error names the first wrong one."""
    names = arguments.parameters
    try:
        bound = arguments.bind(*args, **kwargs)
    except TypeError as error:
        raise _unbound(name, arguments, kwargs, prefix, error) from None
    bound.apply_defaults()
    for field, value in bound.arguments.items():
        kind, option = declared(names[field].annotation)
        if option.text:
            bound.arguments[field] = verify(f"{prefix}{field}", value, kind, option)
    return bound


def _unbound(
    name: str, known: inspect.Signature, kwargs: Mapping[str, Any], prefix: str, error: TypeError
) -> check.Refused:
    """Return the error of a call that does not fit the signature: an argument unknown, missing or twice."""
    parameters = known.parameters
    unknown = [k for k in kwargs if k not in parameters]
    if unknown:
        reason = f"{name} has no such argument{check.meant(unknown[0], parameters)}"
        allowed = f"one of {', '.join(parameters)}" if parameters else "none"
        return check.fail(f"{prefix}{unknown[0]}", kwargs[unknown[0]], allowed, reason)
    missing = re.match("missing a required .*argument: '(.*)'", str(error))
    if missing:
        needed = [
            k
            for k, p in parameters.items()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        allowed = f"{name}({', '.join(f'{k}=...' for k in needed)})"
        return check.fail(f"{prefix}{missing[1]}", check.MISSING, allowed, f"{name} needs this argument")
    return check.fail(name, check.MISSING, f"arguments by name: {', '.join(parameters)}", str(error))


def verify(field: str, value: Any, kind: Any, option: Option) -> Any:
    """Return the value as its type, or raise a ValueError that says what is allowed."""
    kinds = members(kind)
    if value is None and NoneType in kinds:
        return None
    if option.check:
        return option.check(field, value)
    if option.choices:
        return check.choice(field, value, option.choices)
    functions = [k for k in kinds if get_origin(k) is Callable]
    if functions and callable(value):
        return check.takes(field, value, len(get_args(functions[0])[0]), option.allowed)
    if isinstance(value, tuple) and any(get_origin(k) is tuple for k in kinds):
        return value  # the run knows how many there must be
    if float in kinds or int in kinds:
        return _number(field, value, float in kinds, option)
    if any(isinstance(value, k) for k in kinds if isinstance(k, type)):
        return value
    raise check.fail(field, value, option.allowed or words(kind))


def _number(field: str, value: Any, real: bool, option: Option) -> float:
    ends: dict[str, Any] = {k: v for k in ("low", "high") if (v := getattr(option, k)) is not None}
    try:
        if real:
            return check.number(field, value, open_low=option.open_low, **ends)
        return check.integer(field, value, **ends)
    except check.Refused as error:
        if not option.allowed:
            raise
        raise check.fail(field, value, f"{error.allowed}, or {option.allowed}") from None
