"""Models of the package transformers: let them take the way that does not look at the data.

They leave a mask out where all of its entries say yes, which is decided by the data, and cannot be decided
for several clients at once. Where they know that they are traced, they do without: they ask
`is_tracing(tensor)`, and stacked clients are what it asks for.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch._C._functorch import is_functorch_wrapped_tensor

_MODULE, _QUESTION = "transformers.utils.import_utils", "is_fake_tensor"


def announce_stacks() -> None:
    """Let transformers, if it is there, know that tensors of several clients are traced; once is enough."""
    module = sys.modules.get(_MODULE)
    question = getattr(module, _QUESTION, None)
    if question is None or getattr(question, "knows_stacks", False):
        return

    @functools.wraps(question)
    def is_traced(tensor: Any) -> bool:
        return is_functorch_wrapped_tensor(tensor) or bool(question(tensor))

    is_traced.knows_stacks = True  # type: ignore[attr-defined]
    setattr(module, _QUESTION, is_traced)
