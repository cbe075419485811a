"""What training needs on a client's device: Pillutla et al. (2022), appendix B.4.

memory = 3·size(u) + 2·size(v) + size(backprop)

u as received, u in training and its gradient; v in training and its gradient; what the forward pass keeps for
the backward pass of one sample.
"""

from __future__ import annotations


def client_memory(shared: int, personal: int, backprop: int) -> int:
    """Return the bytes on a client's device from those of u, of v and of the backward pass."""
    return 3 * shared + 2 * personal + backprop
