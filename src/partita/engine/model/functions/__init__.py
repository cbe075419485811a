"""Functions of torch in a form that depends on their arguments alone, and that can be stacked over clients.

A model may draw random numbers in its forward pass (stochastic depth, dropout of attention, noise), and it
may call functions that `vmap` cannot run for several clients at once (attention on a CPU, recurrent layers).
While `Functions` are in force, draws come from the key of the batch, a function of (seed, round, client,
step), and those functions are taken apart into operations that can be stacked. A client gets the same numbers
whether it runs alone, in a stack, or in a captured graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from partita.core import draws
from partita.engine.model.functions.attention import attention
from partita.engine.model.functions.equivalent import FORMS as EQUIVALENT
from partita.engine.model.functions.random import FORMS as RANDOM
from partita.engine.model.functions.recurrent import FORMS as RECURRENT
from partita.engine.model.functions.transformers import announce_stacks

_COMPOSED = (F.multi_head_attention_forward, F.gumbel_softmax)
"""Functions of Python that call others of these: torch hides those from a mode."""
_PURPOSE = "functions"


class Functions(TorchFunctionMode):
    """Replaces functions while a batch passes through a model; each of its calls has draws of its own."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.calls, self.used = draws.branch(key, _PURPOSE), 0, False

    def __enter__(self) -> Functions:
        announce_stacks()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @property
    def stacked(self) -> bool:
        """Whether the pass is one for several clients."""
        return is_functorch_wrapped_tensor(self.key)

    def apart(self, *tensors: Tensor, noted: bool = True) -> bool:
        """Return whether a function of these tensors must be taken apart, and note that there is one.

        It must for several clients, and for second derivatives of one: kernels have none.
        """
        self.used = self.used or noted
        return self.stacked or any(map(is_functorch_wrapped_tensor, tensors))

    def draw(self) -> Tensor:
        """Return the key of the next call that draws."""
        self.calls += 1
        return draws.fold(self.key, self.calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = _FORMS.get(func)
        if form is None:
            return func(*args, **kwargs)
        result = form(self, func, *args, **kwargs)
        if result is NotImplemented:
            return func(*args, **kwargs)
        self.used = True
        return result


def _composed(mode: Functions, func: FunctionType, *args: Any, **kwargs: Any) -> Any:
    """Run the body of a function with the mode in force for what it calls."""
    with mode:
        return _body(func)(*args, **kwargs)


@functools.cache
def _body(func: FunctionType) -> Callable[..., Any]:
    """Return the function without the question at its start whether somebody replaces it."""
    never = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    body = FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


_FORMS: dict[Any, Callable[..., Any]] = {
    **RANDOM,
    **RECURRENT,
    **EQUIVALENT,
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys(_COMPOSED, _composed),
}
