"""What augmentations have in common, and how several are one.

An augmentation is a pure function (x, key) -> x of ONE training sample, without an axis of samples: x is what
the model gets of it (a tensor, or a tuple or dictionary of them), and comes back in the same shapes and
types. The key is a whole number in a tensor, a function of (seed, round, client, step, place in the batch);
all draws are made from it (`partita.draws.uniform(key)`, and `partita.draws.fold(key, 1)` for the next), so
that a sample is changed in another way each time, in the same way in every run and by every executor. It runs
inside the stack of clients: no `if` on values of tensors, but `torch.where`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from partita.core import check, draws
from partita.core.inputs import tensors
from partita.core.options import Option, checked
from partita.core.types import Inputs
from partita.data.padding import real_entries

Augmentation = Callable[[Any, Tensor], Any]
"""(x, key) -> x, of one sample."""
FORM = "an augmentation such as partita.augment.flip(), or a function (x, key) -> x of one sample"


def augmentation(field: str, value: Any) -> Augmentation | None:
    """Return one augmentation for one, for a list of several, or for none."""
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return compose(*value)
    return check.takes(field, value, 2, f"{FORM}, or a list of such")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Composed:
    """Augmentations one after another, each with draws of its own."""

    steps: tuple[Augmentation, ...]

    def __call__(self, x: Any, key: Tensor) -> Any:
        return self.within(x, key, None)

    def within(self, x: Any, key: Tensor, real: Tensor | None) -> Any:
        """Return a sample changed where its entries are real."""
        for number, step in enumerate(self.steps):
            x = _applied(step, x, draws.fold(key, number), real)
        return x


def compose(*steps: Augmentation) -> Composed:
    """Apply augmentations one after another, each with draws of its own.

    Use it where one alone is not enough, as `compose(crop(4), flip())` for photographs.
    """
    if not steps:
        raise check.fail("steps", steps, f"at least one: {FORM}")
    return Composed(tuple([check.takes("steps", step, 2, FORM) for step in steps]))


def _place(field: str, value: Any) -> str | int:
    return value if isinstance(value, str) else check.integer(field, value, low=0)


@checked()
@dataclass(frozen=True)
class Of:
    """One of several inputs is augmented, and the others stay.

    Use it with a model that takes a dictionary or a tuple: `of("pixel_values", flip())`. Where the dictionary
    has the mask of this input, bands of time are placed among the entries that are no padding.
    """

    name: Annotated[str | int, Option("the name of the input, or its place", check=_place, example="image")]
    step: Annotated[Augmentation, Option("what happens to it", allowed=FORM, check=augmentation)]

    def __call__(self, x: Any, key: Tensor) -> Any:
        if isinstance(x, dict) and self.name in x:
            real = real_entries(x, str(self.name))
            return {**x, self.name: _applied(self.step, x[self.name], key, real)}
        if isinstance(x, tuple) and isinstance(self.name, int) and 0 <= self.name < len(x):
            return tuple([self.step(v, key) if i == self.name else v for i, v in enumerate(x)])
        if isinstance(x, Tensor):
            allowed = "the augmentation without of(...): x is a single input, without a name"
        else:
            names = map(repr, x) if isinstance(x, dict) else map(str, range(len(x)))
            allowed = f"one of the inputs: {', '.join(names)}"
        raise check.fail("augment: name", self.name, allowed)


of = Of


def _applied(step: Augmentation, x: Any, key: Tensor, real: Tensor | None) -> Any:
    """Return a sample changed by a step, which is told what is real if it has a method `within`."""
    within = getattr(step, "within", None)
    return step(x, key) if within is None else within(x, key, real)


def steps_of(augment: Augmentation, name: str | int | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield each step of an augmentation with the name of the input that it changes (None: all of x)."""
    if isinstance(augment, Composed):
        for step in augment.steps:
            yield from steps_of(step, name)
    elif isinstance(augment, Of):
        yield from steps_of(augment.step, augment.name)
    else:
        yield name, augment


def augmented(augment: Augmentation, x: Inputs, key: Tensor) -> Inputs:
    """Return the samples of a batch, each augmented with a key of its own by its place."""
    places = torch.arange(len(tensors(x)[0]), device=key.device)
    keys = draws.fold(draws.branch(key, "augment"), places)
    changed: Inputs = torch.func.vmap(augment)(x, keys)
    return changed


def one_tensor(who: str, x: Any, axes: int = 1, real: bool = True) -> Tensor:
    """Return a sample that is a tensor of so many axes or more, of real numbers; refuse another."""
    if not isinstance(x, Tensor):
        allowed = "one tensor, or of(name, ...) for one of several inputs"
        raise check.fail(f"augment: x of {who}", "several inputs", allowed)
    if x.dim() < axes or (real and not x.is_floating_point()):
        kind = f"{list(x.shape)} of {str(x.dtype).removeprefix('torch.')}"
        raise check.fail(f"augment: x of {who}", kind, f"real numbers in {axes} axes or more")
    return x
