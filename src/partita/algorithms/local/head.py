"""The last layer of a model, where it is linear in its input: logits = W h + b of the features h.

Logits of two such layers add up to those of the layer (W₁ + W₂, b₁ + b₂), and the class whose point C_k is
nearest to h has the largest logit of the layer with rows 2 C_k and biases −‖C_k‖².
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from partita.algorithms.partition import last_layer
from partita.core import check


def linear_head(model: nn.Module, names: Sequence[str], method: str) -> tuple[str, ...]:
    """Return the names of W and b, if it has one; refuse a model whose last layer is not of this kind."""
    layer = last_layer(model, names)
    kind = "several layers" if layer is None else type(model.get_submodule(layer)).__name__
    if layer is None or kind != nn.Linear.__name__:
        reason = f"the last layer of {type(model).__name__} is {kind}"
        raise check.fail(
            "model", type(model).__name__, f"a model that ends in nn.Linear, for {method}", reason
        )
    head = tuple(f"{layer}.{k}".lstrip(".") for k, _ in model.get_submodule(layer).named_parameters())
    frozen = [k for k in head if k not in names]
    if frozen:
        reason = f"{frozen[0]} is frozen, or is another layer's, too"
        raise check.fail(
            "model", type(model).__name__, f"a last layer of its own that is trained, for {method}", reason
        )
    return head
