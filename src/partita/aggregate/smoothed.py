"""Fed+'s aggregators: Kundu et al., *Robustness and Personalization in Federated Learning* (2022).

Both smoothed medians minimize Σ_k w_k Ψ̂(Δ_k − w̃), Ψ̂ the Moreau envelope of δ‖·‖₂ (geometric) or δ‖·‖₁
(coordinate), by

    θ_k ← prox(Δ_k − w̃),   w̃ ← mean(Δ_k) − mean(θ_k)
    geometric:   prox(x) = max(0, 1 − δ/‖x‖₂) x        (all names are one vector)
    coordinate:  prox(x) = sign(x) max(0, |x| − δ)

from the mean until a step is at most `tolerance` times δ, which is the most that a step can be. Equation (12)
of the paper writes the second prox without the sign outside, which is wrong for negative x.

A step is w̃ ← w̃ + mean(x_k − prox(x_k)) with x_k = Δ_k − w̃: what is below δ counts in full, the rest as δ.
Attackers can put the mean so far away that steps of δ do not lead back. Where it is a hundred δ away from the
coordinate's median, or the cap is reached, the iteration therefore begins at a point that a minority cannot
move: that median, or where Weiszfeld's iteration with ν = δ ends, whose fixed points are the same.

For any other penalty, `proximal_center` takes the same steps with its proximal map (Equation 13): they are
those of gradient descent, of size 1, on the mean φ of the envelopes, whose gradients x − prox(x), the pulls
of the clients, are 1-Lipschitz. As the mean of pulls may be short and the way long, a step that went well is
followed by one twice as large. By convexity, φ(w̃) ≥ φ(w̃⁺) + s ⟨∇φ(w̃), ∇φ(w̃⁺)⟩ for a step of any size s: it
does not go up where the product is not negative, as with s = 1 it never is; else a smaller one is tried. The
start is robust as above, tensor by tensor, with the mean length of the pulls in place of δ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.aggregate.coordinate_median import medians, middle
from partita.aggregate.geometric_median import weiszfeld
from partita.aggregate.gram import Array, distances_to, length, products
from partita.aggregate.sorting import ordered
from partita.aggregate.stack import (
    Stack,
    aggregator,
    combination,
    from_rule,
    note,
    per_block,
    restored,
    whole,
)
from partita.core import check, tree
from partita.core.options import Option
from partita.core.parts import Aggregator, Combined
from partita.core.types import Tensors

FAR = 100  # times δ: a mean further away from the median is no place to start from
SHRINK, ROUNDING = 16, 1e-13  # after so many steps, columns whose step is nothing but rounding are left out

Delta = Annotated[float, Option("δ: differences below it count in full", low=0, open_low=True, example=0.1)]
Tolerance = Annotated[float, Option("the last step in units of δ", low=0)]
Iterations = Annotated[int, Option("the most steps from one start", low=1)]


@aggregator
def smoothed_geometric_median(
    delta: Delta, tolerance: Tolerance = 1e-6, iterations: Iterations = 1000
) -> Aggregator:
    """Fed+'s δ-approximation of the geometric median.

    Use it with Fed+, or when honest deltas within δ of the centre should be averaged.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:  # noqa: ARG001
        g, share = products(stack).cpu().numpy(), stack.share.cpu().numpy()
        a, used, moved = _geometric(g, share, share, delta, tolerance, iterations)
        if moved > tolerance:
            start, more = weiszfeld(g, share, tolerance, iterations, nu=delta)
            a, last, moved = _geometric(g, share, start, delta, tolerance, iterations)
            used += more + last
        notes = {"iterations": note(used, stack.share), "moved": note(moved, stack.share)}
        return Combined(combination(stack, torch.from_numpy(a)), notes)

    options = {"delta": delta, "tolerance": tolerance, "iterations": iterations}
    return from_rule("smoothed_geometric_median", rule, options)


def _geometric(
    g: Array, share: Array, a: Array, delta: float, tolerance: float, iterations: int
) -> tuple[Array, int, float]:
    """Return the coefficients of w̃ = Σ_k a_k Δ_k, the number of steps, and the last one in units of δ."""
    moved, used = 1.0, 0
    while used < iterations and (moved > tolerance or not used):
        c = share * delta / np.maximum(distances_to(g, a), delta)
        step = c - c.sum() * a  # not the difference of two w̃: far away, that is nothing but rounding
        moved, a, used = length(g, step) / delta, a + step, used + 1
    return a, used, moved


@aggregator
def smoothed_coordinate_median(
    delta: Delta, tolerance: Tolerance = 1e-6, iterations: Iterations = 1000
) -> Aggregator:
    """Fed+'s δ-approximation of the coordinate median.

    Use it with Fed+, or when honest values within δ of the centre should be averaged.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:  # noqa: ARG001
        steps_of: list[tuple[int, Tensor]] = []

        def solve(x: Tensor) -> Tensor:
            w, used, moved = _solved(x, stack, delta, tolerance, iterations)
            steps_of.append((used, moved))
            return w

        medians = whole(stack, per_block(stack, solve))
        if not steps_of:  # tensors without entries
            return Combined(medians)
        steps = note(max(used for used, _ in steps_of), stack.share)
        return Combined(medians, {"iterations": steps, "moved": torch.stack([m for _, m in steps_of]).max()})

    options = {"delta": delta, "tolerance": tolerance, "iterations": iterations}
    return from_rule("smoothed_coordinate_median", rule, options)


def _solved(
    block: Tensor, stack: Stack, delta: float, tolerance: float, iterations: int
) -> tuple[Tensor, int, Tensor]:
    """Return w̃ of every column, the number of steps, and the longest last one in units of δ."""
    x, share = block.double(), stack.share
    median, mean = middle(*ordered(x, None if stack.equal else share)), share @ x
    # from far away each step is one of δ at most: begin at once where a minority cannot have moved it
    start = torch.where((mean - median).abs() > FAR * delta, median, mean)
    w, used, moved = _coordinates(x, share, start, delta, tolerance, iterations)
    late = (moved > tolerance).nonzero().squeeze(1)
    if len(late):
        again = _coordinates(x[:, late], share, median[late], delta, tolerance, iterations)
        w[late], more, moved[late] = again
        used += more
    return w, used, moved.max()


def _coordinates(
    x: Tensor, share: Tensor, w: Tensor, delta: float, tolerance: float, iterations: int
) -> tuple[Tensor, int, Tensor]:
    """Return w̃ of every column, the number of steps, and each column's last one in units of δ."""
    solution, last, used = w.clone(), torch.ones_like(w), 0
    left, moved = torch.arange(len(w), device=w.device), torch.ones_like(w)
    while used < iterations and (not used or bool((moved > tolerance).any())):
        step = share @ (x - w).clamp_(-delta, delta)
        moved, w, used = step.abs() / delta, w + step, used + 1
        solution[left], last[left] = w, moved
        if used % SHRINK == 0:  # go on with the columns that move at all
            more = moved > ROUNDING
            x, w, left, moved = x[:, more], w[more], left[more], moved[more]
    return solution, used, last


def proximal_center(
    prox: Callable[[Tensors], Tensors], tolerance: float = 1e-6, iterations: int = 1000
) -> Aggregator:
    """Return the aggregator of a penalty with this proximal map: w̃ = argmin_w Σ_k share_k Ψ̂(w_k − w).

    It ends when in each tensor the mean of the clients' pulls x − prox(x), which is a step of size 1, is at
    most `tolerance` times their mean length. Where it does not, it warns.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:  # noqa: ARG001
        deltas = stack.deltas if stack.rows is None else tree.rows(stack.deltas, stack.rows)
        rows = {k: v.double() for k, v in deltas.items()}  # pulls are small next to how far outliers are
        start = {k: torch.tensordot(stack.share, v, 1) for k, v in rows.items()}
        at = _pulled(prox, rows, stack.share, start)
        if at.moved > tolerance:
            median = {k: v.double() for k, v in medians(stack).items()}
            far = {k: (v - median[k]).norm() > FAR * at.lengths[k] for k, v in start.items()}
            start = {
                k: median[k] if far[k] and at.steps[k] > tolerance * at.lengths[k] else v
                for k, v in start.items()
            }
            at = _pulled(prox, rows, stack.share, start)
        size, used = 1.0, 1
        while used < iterations and at.moved > tolerance:
            there = _pulled(prox, rows, stack.share, tree.axpy(-size, at.gradient, at.center))
            used += 1
            if size == 1 or _product(at.gradient, there.gradient) >= 0:
                at, size = there, 2 * size
            else:
                size = max(1.0, size / 4)
        if at.moved > tolerance:
            check.warn(
                f"pt.psi.penalty: after iterations={iterations} the aggregate is not found to "
                f"tolerance={tolerance:g}, and the server goes on with where it is; use more iterations or a "
                "larger tolerance",
            )
        notes = {"iterations": note(used, stack.share), "moved": note(at.moved, stack.share)}
        return Combined({k: restored(v, stack.deltas[k]) for k, v in at.center.items()}, notes)

    options = {"prox": prox, "tolerance": tolerance, "iterations": iterations}
    return from_rule("proximal_center", rule, options)


class _Pulled(NamedTuple):
    """A centre, the gradient there, and in each tensor its length and the mean length of the pulls."""

    center: Tensors
    gradient: Tensors
    steps: dict[str, float]
    lengths: dict[str, float]

    @property
    def moved(self) -> float:
        """The longest step of size 1, in units of the pulls that it is the mean of."""
        return max((step / self.lengths[k] for k, step in self.steps.items() if step), default=0.0)


def _pulled(prox: Callable[[Tensors], Tensors], rows: Tensors, share: Tensor, center: Tensors) -> _Pulled:
    # a delta is w̃ᵗ − w_k: with Δ for the new w̃, the difference w_k − w̃ that Ψ charges is Δ − Δ_k
    x = {k: center[k] - v for k, v in rows.items()}
    theta = torch.func.vmap(prox)(x)
    pulls = {k: v - theta[k] for k, v in x.items()}
    gradient = {k: torch.tensordot(share, v, 1) for k, v in pulls.items()}
    lengths = {k: _mean_length(v, share) for k, v in pulls.items()}
    rounding = {k: torch.finfo(v.dtype).eps * _mean_length(v, share) for k, v in x.items()}
    steps = {k: float(v.norm()) for k, v in gradient.items()}
    steps = {k: v if v > 4 * rounding[k] else 0.0 for k, v in steps.items()}
    return _Pulled(center, gradient, steps, lengths)


def _mean_length(rows: Tensor, share: Tensor) -> float:
    """Return the mean of ‖x_k‖ over the rows."""
    return float(share @ rows.reshape(len(rows), -1).norm(dim=1))


def _product(a: Tensors, b: Tensors) -> float:
    return float(torch.stack([(x * b[k]).sum() for k, x in a.items()]).sum())
