"""What the last blocks of a model take in training: Lee et al. (2024), section 4 and Tables 1 and 10.

    memory = 2p + 2a,    capacity = (2p + 2a) / (2P + 2A)

p parameters and a activations of the blocks that are trained, each with its gradient; P and A of all blocks.
Parameters are those that require gradients. Activations are what layers put out for a batch, found by running
one sample through the model; what is counted is what the paper counts:

| layer | activations |
| --- | --- |
| convolution, nn.Linear, nn.Bilinear | its output |
| nn.LSTM and its cell | 10 for each word, layer, direction and unit: 4 gates before and after σ, tanh; c; h |
| nn.GRU and its cell | 7: 3 gates before and after, h |
| nn.RNN and its cell | 2: h before and after |
| nn.MultiheadAttention | queries, keys, values and output, as of four linear layers |
| a module with a method `activations` | what that returns for the arguments of `forward`, all in all |
| others: embeddings, norms, nonlinearities, pooling, dropout | none |

So a module that computes with tensors of its own, and not by layers, needs a method `activations` to count.

The paper leaves out what a device holds while samples pass the frozen blocks, one piece after another and
forwards only:

    passing(piece) = its parameters + max over its blocks of (input + output of a batch)
    needed         = max(2p + 2a, passing(piece) of each frozen piece)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita.capacity.blocks import Part, block_names, check_sequence, still
from partita.core import check
from partita.core.inputs import call, each
from partita.core.types import Inputs

Shape = Sequence[int] | Tensor
"""The shape of one sample; or a sample, where zeros of the model's type would not do."""

_PLAIN = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear)


class Row(NamedTuple):
    """One block. A tensor that several blocks share is counted in the last of them."""

    name: str
    parameters: int
    activations: int


class Left(NamedTuple):
    """What is left to train after a cut, and its share of what the whole model takes."""

    parameters: int
    activations: int
    capacity: float


@dataclass(frozen=True)
class Memory:
    """Parameters and activations of each block.

    element  the size of a number in bytes
    passing  the numbers that a device holds while a batch passes one frozen block
    """

    rows: tuple[Row, ...]
    element: int = 4
    passing: tuple[int, ...] = ()

    @property
    def total(self) -> Left:
        """What the whole model takes."""
        return self.after(0)

    def after(self, cut: int) -> Left:
        """Return p, a and (2p + 2a) / (2P + 2A) without the first `cut` blocks."""
        check.integer("cut", cut, low=0, high=len(self.rows) - 1)
        (p, a), (whole_p, whole_a) = _sums(self.rows[cut:]), _sums(self.rows)
        return Left(p, a, (2 * p + 2 * a) / (2 * whole_p + 2 * whole_a))

    def bytes(self, cut: int = 0) -> int:
        """Return 2p + 2a without the first `cut` blocks, in bytes: what training the others takes."""
        p, a, _ = self.after(cut)
        return self.element * (2 * p + 2 * a)

    def needed(self, cut: int = 0) -> int:
        """Return what a device needs that leaves out the first `cut` blocks, in bytes.

        It trains the others, and before that its samples pass the frozen blocks, one at a time.
        """
        return max(self.bytes(cut), self.element * max(self.passing[:cut], default=0))

    def __str__(self) -> str:
        lines = [("block", "parameters", "activations", "from here: capacity", "bytes to train", "needed")]
        for cut, (name, p, a) in enumerate(self.rows):
            share, train, needed = self.after(cut).capacity, self.bytes(cut), self.needed(cut)
            lines.append((name, f"{p:,}", f"{a:,}", f"{share:.3f}", f"{train:,}", f"{needed:,}"))
        lines.append(("all", f"{self.total.parameters:,}", f"{self.total.activations:,}", "", "", ""))
        first, *others = (max(map(len, column)) for column in zip(*lines))
        return "\n".join(
            "  ".join([name.ljust(first), *(c.rjust(w) for c, w in zip(cells, others))]).rstrip()
            for name, *cells in lines
        )


def memory(
    model: nn.Module, input_shape: Shape, batch: int = 1, blocks: Sequence[str] | None = None
) -> Memory:
    """Count parameters and activations of each block of any model, as EmbracingFL does.

    input_shape  of one sample, (3, 32, 32); or a sample, where zeros of the model's type would not do
    batch        samples in a training step
    blocks       the blocks of a model that is no nn.Sequential, see `block_names`

    >>> print(memory(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,), batch=10))
    block  parameters  activations  from here: capacity  bytes to train  needed
    0              15           30                1.000             584     584
    1               0            0                0.384             224     340
    2               8           20                0.384             224     340
    all            23           50
    """
    return measured(model, input_shape, batch, blocks).memory


def fit(
    model: nn.Module,
    budget: int | str,
    input_shape: Shape,
    batch: int = 1,
    blocks: Sequence[str] | None = None,
) -> int:
    """Return the smallest cut for a device of so many bytes: it trains as many of the last blocks as it can.

    Both must fit: 2p + 2a of what it trains, and each frozen block on its own while samples pass (`pieces`).
    The budget is a number of bytes, '500MB' or '1MiB'; for the other arguments see `memory`.
    """
    return measured(model, input_shape, batch, blocks).fit("budget", budget)


def pieces(
    model: nn.Module,
    cut: int,
    budget: int | str | None,
    input_shape: Shape,
    batch: int = 1,
    blocks: Sequence[str] | None = None,
) -> tuple[tuple[str, ...], ...]:
    """Return the frozen blocks before a cut in consecutive pieces that a device can hold one at a time.

        size(piece) = parameters + max over its blocks of (input + output of a batch)

    Forwards only, without gradients; all parameters are there, whether or not they require any. As many
    blocks go into a piece as the budget allows; None is what the trained part takes, 2p + 2a.
    """
    return measured(model, input_shape, batch, blocks).pieces("budget", cut, budget)


def footprint(model: nn.Module, x: Inputs) -> tuple[int, int]:
    """Return p and a of any model on one sample (a batch of one), of whatever it is made of."""
    with torch.no_grad():
        activations, _ = _count(still(model), each(Tensor.clone, x), call)
    return sum(p.numel() for p in model.parameters() if p.requires_grad), activations


def passing(piece: nn.Module, x: Any, batch: int) -> tuple[int, Any]:
    """Return the numbers that a device holds while a batch passes a frozen piece, and what x becomes."""
    names = piece._names if type(piece) is Part else ("",)
    piece, most = still(piece), 0
    with torch.no_grad():
        for name in names:
            before = _numbers(x)
            x = piece.get_submodule(name)(x)
            most = max(most, before + _numbers(x))
    return sum(p.numel() for p in piece.parameters()) + batch * most, x


class _Block(NamedTuple):
    """A block as it was run.

    held  the numbers in each of its parameters, by identity: blocks may share some
    flow  the numbers in its input and output, for a batch
    """

    row: Row
    held: Mapping[int, int]
    flow: int


class Measured(NamedTuple):
    """All blocks of a model, and the size of a number in bytes."""

    blocks: tuple[_Block, ...]
    element: int

    @property
    def memory(self) -> Memory:
        rows = tuple(block.row for block in self.blocks)
        return Memory(rows, self.element, tuple(self.numbers([block]) for block in self.blocks))

    @property
    def cuts(self) -> range:
        """The cuts that leave parameters to train."""
        return range(1 + max(i for i, block in enumerate(self.blocks) if block.row.parameters))

    def fit(self, field: str, budget: int | str) -> int:
        """Return the smallest cut for a device of so many bytes."""
        limit = check.size(field, budget)
        needs = {cut: self.memory.needed(cut) for cut in self.cuts}
        fitting = [cut for cut, need in needs.items() if need <= limit]
        if fitting:
            return fitting[0]
        cut = min(needs, key=lambda c: needs[c])
        frozen, most = self.largest(cut)
        raise check.fail(
            field,
            budget,
            f"at least {needs[cut]} bytes, for cut={cut}: {self.memory.bytes(cut)} to train the rest"
            + (f", {most} to pass the frozen block {frozen!r}" if cut else ""),
        )

    def pieces(
        self, field: str, cut: int, budget: int | str | None, most_blocks: int | None = None
    ) -> tuple[tuple[str, ...], ...]:
        """Return the frozen blocks in consecutive pieces of at most so many bytes, and blocks."""
        trained = self.memory.bytes(cut)
        limit = trained if budget is None else check.size(field, budget)
        name, most = self.largest(cut)
        if most > limit:
            told = f" (the trained part takes {trained})" if budget is None else ""
            raise check.fail(field, budget, f"at least {most} bytes to pass the frozen block {name!r}{told}")
        consecutive: list[list[_Block]] = []
        for block in self.blocks[:cut]:
            fits = consecutive and len(consecutive[-1]) < (most_blocks or cut)
            if fits and self.passing([*consecutive[-1], block]) <= limit:
                consecutive[-1].append(block)
            else:
                consecutive.append([block])
        return tuple(tuple(block.row.name for block in piece) for piece in consecutive)

    def passing(self, piece: Sequence[_Block]) -> int:
        """Return the bytes of a piece while samples pass it, forwards only."""
        return self.element * self.numbers(piece)

    def numbers(self, piece: Sequence[_Block]) -> int:
        """Return the numbers in a piece: parameters, input and output."""
        held = {key: n for block in piece for key, n in block.held.items()}
        return sum(held.values()) + max(block.flow for block in piece)

    def largest(self, cut: int) -> tuple[str, int]:
        """Return the frozen block that takes most, and how many bytes."""
        each = [(block.row.name, self.passing([block])) for block in self.blocks[:cut]]
        return max(each, key=lambda named: named[1], default=("", 0))


def measured(model: nn.Module, input_shape: Shape, batch: int, declared: Sequence[str] | None) -> Measured:
    """Return all blocks of a model as they were run on one sample."""
    check.integer("batch", batch, low=1)
    names = block_names(model, declared)
    if not any(p.requires_grad for p in model.parameters()):
        raise check.fail("model", type(model).__name__, "a model with parameters that require gradients")
    runs = _run(model, names, _sample(model, names, input_shape))
    last = {id(p): name for name in names for p in model.get_submodule(name).parameters()}
    rows = []
    for name, (activations, flow) in zip(names, runs):
        parameters = list(model.get_submodule(name).parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad and last[id(p)] == name)
        row = Row(name, trained, batch * activations)
        rows.append(_Block(row, {id(p): p.numel() for p in parameters}, batch * flow))
    return Measured(tuple(rows), max(p.element_size() for p in model.parameters()))


def _sample(model: nn.Module, names: Sequence[str], shape: Any) -> Tensor:
    """Return a batch of one sample: zeros of the model's type, or of words if an embedding comes first."""
    like = next(p for p in model.parameters() if p.requires_grad)
    if isinstance(shape, Tensor):
        return shape.detach().clone().unsqueeze(0).to(like.device)
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise check.fail("input_shape", shape, "the shape of one sample, such as (3, 32, 32), or a sample")
    for n in shape:
        check.integer("input_shape", n, low=1)
    layers = [m for name in names for m in model.get_submodule(name).modules() if not [*m.children()]]
    first = next((m for m in layers if [*m.parameters()]), None)
    words = isinstance(first, nn.Embedding | nn.EmbeddingBag)
    return torch.zeros(1, *shape, dtype=torch.int64 if words else like.dtype, device=like.device)


def _run(model: nn.Module, names: Sequence[str], x: Any) -> list[tuple[int, int]]:
    """Return for each block the activations, and the numbers in its input and output."""
    model, runs = still(model), []
    with torch.no_grad():
        try:
            model(x.clone())
        except Exception as error:
            raise check.fail(
                "input_shape",
                tuple(x.shape[1:]),
                f"the shape of one sample, or a sample; the model does not take it: {error}",
            ) from error
        check_sequence(model, names, x)
        for name in names:
            before = _numbers(x)
            activations, x = _count(model.get_submodule(name), x)
            runs.append((activations, before + _numbers(x)))
    return runs


def _count(block: nn.Module, x: Any, run: Callable[..., Any] = nn.Module.__call__) -> tuple[int, Any]:
    """Return the activations of a block of a model that nobody else uses, and its output."""
    counts: list[tuple[nn.Module, Any]] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        counts.append((module, _activations(module, args, kwargs, output)))

    inside = {m for outer in block.modules() if _declares(outer) for m in outer.modules() if m is not outer}
    for module in block.modules():
        if module not in inside:
            module.register_forward_hook(hook, with_kwargs=True)
    output = run(block, x)
    return sum(check.integer(f"{type(m).__name__}.activations", n, low=0) for m, n in counts), output


def _activations(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Return the activations of one call of one layer, without those of other layers inside of it."""
    if _declares(module):
        return module.activations(*args, **kwargs)  # type: ignore[operator]
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _recurrent(module, *args, **kwargs)
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, *args, **kwargs)
    return _numbers(output) if isinstance(module, _PLAIN) else 0


def _declares(module: nn.Module) -> bool:
    """Return whether its class has a method `activations`, and not a list or a layer of that name."""
    return callable(getattr(type(module), "activations", None))


def _recurrent(module: nn.RNNBase | nn.RNNCellBase, input: Any, *_: Any, **__: Any) -> int:
    """LSTM: 4 gates before and after, c, h. GRU: 3 before and after, h. RNN: h before and after."""
    lstm, gru = isinstance(module, nn.LSTM | nn.LSTMCell), isinstance(module, nn.GRU | nn.GRUCell)
    word = module.hidden_size * (10 if lstm else 7 if gru else 2)
    if isinstance(module, nn.RNNBase):
        word = (word + module.proj_size) * module.num_layers * (2 if module.bidirectional else 1)
    return _numbers(input) // module.input_size * word


def _attention(module: nn.MultiheadAttention, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Each of query, key and value becomes `embed_dim` numbers a word, and so does what comes out."""
    inputs = ((query, module.embed_dim), (key, module.kdim), (value, module.vdim))
    words: list[int] = [_numbers(x) // width for x, width in inputs]
    return (words[0] + sum(words)) * int(module.embed_dim)


def _numbers(value: Any) -> int:
    """Return how many numbers are in a tensor, or in all tensors of what a layer takes or returns."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return _numbers(value.data)
    if isinstance(value, Mapping):
        value = value.values()
    return sum(map(_numbers, value)) if isinstance(value, Iterable) and not isinstance(value, str) else 0


def _sums(rows: Sequence[Row]) -> tuple[int, int]:
    return sum(row.parameters for row in rows), sum(row.activations for row in rows)
