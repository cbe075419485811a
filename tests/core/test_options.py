"""A function or a dataclass that declares its options: checked, described, and its own constructor."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated

import pytest

from partita.core.check import Refused
from partita.core.options import Option, checked, declared, signature

Scale = Annotated[float, Option("the scale", low=0, example=2.0)]


@checked("part ")
@dataclass(frozen=True)
class Scaled:
    """Times a number."""

    scale: Scale
    _: KW_ONLY
    shift: Annotated[int | None, Option("what is added", low=1)] = None


scaled = Scaled


def test_a_class_is_its_own_constructor() -> None:
    part = scaled(2, shift=3)
    assert isinstance(part, Scaled)
    assert repr(part) == "Scaled(scale=2.0, shift=3)"
    assert part == pickle.loads(pickle.dumps(part)) == replace(scaled(1, shift=3), scale=2)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((-1,), "part scale"), ((1, "x"), "scaled"), (("1",), "part scale"), ((), "part scale")],
)
def test_wrong_arguments_are_refused(arguments: tuple[object, ...], field: str) -> None:
    with pytest.raises(Refused) as error:
        scaled(*arguments)  # type: ignore[arg-type]
    assert error.value.field == field


def test_a_copy_with_another_field_is_checked_too() -> None:
    with pytest.raises(Refused, match="part shift=0"):
        replace(scaled(1), shift=0)


def test_its_signature_has_words_and_options() -> None:
    assert str(inspect.signature(scaled)) == "(scale: 'float', *, shift: 'int | None' = None)"
    found = signature(scaled).parameters
    assert declared(found["scale"].annotation)[1].example == 2.0
    assert found["shift"].kind is inspect.Parameter.KEYWORD_ONLY
