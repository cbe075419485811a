"""Models that recompute activations (torch.utils.checkpoint), and other gradients out of the ordinary."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import partita as pt
from partita.core.types import Batch, Partition
from partita.data import FederatedData
from partita.engine.execute import Task, make_executor
from partita.engine.execute.stack import Stack, lift
from partita.engine.model.checkpointing import Pass
from partita.engine.model.probe import examine
from partita.engine.model.problem import ModelProblem

SIZES = (9, 7, 1, 5)


@pytest.fixture
def cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def data(dtype: torch.dtype = torch.float32) -> FederatedData:
    g = torch.Generator().manual_seed(0)
    n, ends = sum(SIZES), np.cumsum(SIZES)
    ranges = [(int(e) - n, n) for e, n in zip(ends, SIZES)]
    x = torch.randn(n, 6, generator=g).to(dtype)
    return FederatedData.make(x, torch.randint(0, 4, (n,), generator=g), ranges, ranges)


def tokens() -> FederatedData:
    g = torch.Generator().manual_seed(0)
    ends = np.cumsum(SIZES)
    ranges = [(int(e) - n, n) for e, n in zip(ends, SIZES)]
    x = torch.randint(0, 7, (sum(SIZES), 5), generator=g)
    return FederatedData.make(x, torch.randint(0, 4, (sum(SIZES),), generator=g), ranges, ranges)


class Deep(nn.Module):
    """Two blocks whose activations may be recomputed, with a buffer that each pass replaces."""

    def __init__(self, how: str, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(p))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 8))
        self.output = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        for block in (self.first, self.second):
            x = (
                block(x)
                if self.how == "plain"
                else checkpoint(block, x, use_reentrant=self.how == "reentrant")
            )
        found: Tensor = self.output(x)
        return found


def federate(model: nn.Module, executor: str = "loop", samples: FederatedData | None = None, **options: Any):
    given: dict[str, Any] = {"rounds": 3, "epochs": 1, "batch": 4, "baselines": False, "metric": "loss"}
    given |= {"evaluate_every": 1, "norm": "global", "progress": False, "executor": executor, **options}
    method = given.pop("method", pt.fedalt("output.*", lr=0.1, momentum=0.5))
    return pt.federate(model, data() if samples is None else samples, method, **given)


def assert_same(a: pt.Run, b: pt.Run, tolerance: float = 0.0) -> None:
    assert a.shared.keys() == b.shared.keys()
    for k, v in a.shared.items():
        torch.testing.assert_close(v, b.shared[k], atol=tolerance, rtol=tolerance)
    for i in range(len(a.clients)):
        for k, v in a.client(i).personal.items():
            torch.testing.assert_close(v, b.client(i).personal[k], atol=tolerance, rtol=tolerance)
    losses = [[r["train_loss"] for r in run.metrics] for run in (a, b)]
    assert losses[0] == pytest.approx(losses[1], rel=max(1e-6, tolerance))


def problem_of(model: nn.Module, samples: FederatedData) -> tuple[ModelProblem, dict[str, Tensor], Any]:
    profile = examine(model, samples, None, None)
    names = tuple(k for k, _ in model.named_parameters())
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    params = {k: there[k].detach() for k in (*names, *profile.buffers)}
    partition = Partition((*names, *profile.buffers), ())
    runner = make_executor("loop", Task(model, samples, partition, profile, params))
    return runner.bound.problem, params, names


# ---- checkpointing


@pytest.mark.parametrize("executor", ["loop", "pool", "vmap"])
@pytest.mark.parametrize(("norm", "how"), [("global", "checkpointed"), ("static", "reentrant")])
def test_the_same_as_without(executor, norm, how, cores) -> None:  # noqa: ARG001
    """Statistics, buffers and draws follow the forward pass once."""
    for dropped in (0.0, 0.5):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is stacked
            plain, less = (federate(Deep(h, dropped), executor, norm=norm) for h in ("plain", how))
        assert_same(plain, less, 0.0 if executor in ("loop", "pool") else 1e-6)
        assert not torch.equal(plain.shared["first.0.weight"], Deep("plain").first[0].weight)
        assert plain.shared["seen"] != 0


@pytest.mark.parametrize("method", [pt.scaffold(lr=0.1), pt.ditto(lr=0.1), pt.pfedme(lr=0.1)])
def test_stacked_as_alone(method: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = [federate(Deep("checkpointed", 0.3), executor, method=method) for executor in ("loop", "vmap")]
    assert_same(*runs, 1e-5)


def test_many_steps_are_traced() -> None:
    """The trace has the operations of blocks that are computed again."""
    work = {"rounds": 15, "epochs": 2, "evaluate_every": 15, "samples": data(torch.float64)}
    runs = [federate(Deep("checkpointed", 0.3).double(), executor, **work) for executor in ("loop", "vmap")]
    assert_same(*runs, 1e-9)


class Counted(nn.Module):
    """Blocks within a block, which count how often they are called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.calls = nn.Linear(6, 6), nn.Linear(6, 4), list[str]()

    def _inner(self, x: Tensor) -> Tensor:
        self.calls.append("inner")
        return torch.tanh(self.inner(x))

    def _outer(self, x: Tensor) -> Tensor:
        self.calls.append("outer")
        return torch.sin(checkpoint(self._inner, x, use_reentrant=False))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(checkpoint(self._outer, x, use_reentrant=False))
        return found


def bound(model: nn.Module, samples: FederatedData) -> tuple[Task, dict[str, Tensor]]:
    profile = examine(model, samples, None, None)
    params = {k: v.detach() for k, v in model.named_parameters()}
    return Task(model, samples, Partition(tuple(params), ()), profile, params), params


def gradient_of_two(problem: ModelProblem, params: dict[str, Tensor], samples: FederatedData) -> Any:
    """Return the gradients of two stacked clients with three samples each."""
    x, y = samples.gather(torch.arange(6).view(2, 3))
    batches = Stack.of(Batch(x, y, None, torch.arange(2)), 2, rows=True)
    models = Stack.of(params, 2, rows=False)
    return lift(lambda p, b: problem.grad(p, b, tuple(params))[1], models, batches).full()


@pytest.mark.parametrize("stacked", [False, True])
def test_blocks_are_computed_again(stacked: bool) -> None:
    samples = data(torch.float64)
    task, params = bound(Counted().double(), samples)
    assert task.profile.behaviour.checkpoints
    assert not task.profile.behaviour.recomputes
    problem = task.together if stacked else task.alone
    x, y = samples.gather(torch.arange(3, 6))
    problem.training.calls = calls = []
    if stacked:
        gradient = {k: v[1] for k, v in gradient_of_two(problem, params, samples).items()}
    else:
        gradient = problem.grad(params, Batch(x, y, None, torch.tensor(1)), tuple(params))[1]
    assert calls.count("outer") == 2
    assert calls.count("inner") == 3  # once, again with the block around it, and again by itself
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    hidden = torch.sin(torch.tanh(x @ leaves["inner.weight"].T + leaves["inner.bias"]))
    F.cross_entropy(hidden @ leaves["outer.weight"].T + leaves["outer.bias"], y).backward()
    for k, v in leaves.items():
        torch.testing.assert_close(gradient[k], v.grad)


class Long(nn.Module):
    """Blocks with many activations and few parameters."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.input, self.output = how, nn.Linear(6, 64), nn.Linear(64, 4)

    def block(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(x) * 1.1
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        for _ in range(10):
            x = self.block(x) if self.how == "plain" else checkpoint(self.block, x, use_reentrant=False)
        found: Tensor = self.output(x)
        return found


class Living(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known:
                size = t.untyped_storage().nbytes()
                self.bytes += size
                self.most = max(self.most, self.bytes)
                weakref.finalize(t.untyped_storage(), self._gone, size)
        return result

    def _gone(self, size: int) -> None:
        self.bytes -= size


def test_stacked_clients_keep_the_inputs_of_blocks() -> None:
    most = {}
    for how in ("plain", "checkpointed"):
        task, params = bound(Long(how), data())
        with Living() as living:
            gradient_of_two(task.together, params, data())
        most[how] = living.most
    assert most["checkpointed"] < 0.5 * most["plain"]


class Written(nn.Module):
    """Writes into the input of a block after the block, which is allowed where nothing is computed again."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.output = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.block.requires_grad_(False)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = checkpoint(lambda h: torch.sin(self.block(h)), h, use_reentrant=False)
        if self.in_place:
            h += y
        else:
            h = h + y
        found: Tensor = self.output(h)
        return found


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_inputs_of_a_block_that_are_written_into_are_refused(executor) -> None:
    with pytest.raises(pt.Refused, match="written into since"):
        federate(Written(True), executor, norm=None)
    federate(Written(False), executor, norm=None)


def test_writing_is_noticed_below_vmap() -> None:
    samples = data()
    task, params = bound(Written(False), samples)
    task.together.training.in_place = True
    trained = {k: v for k, v in params.items() if "block" not in k}
    with pytest.raises(RuntimeError, match="written into since"):
        gradient_of_two(task.together, trained, samples)


class Forgetful(nn.Module):
    """Computes something else in its block each second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 4), 0

    def _block(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.sin(self.layer(x)) if self.calls % 2 else self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self._block, x, use_reentrant=False)
        return found


def test_a_block_that_computes_something_else_is_refused() -> None:
    with pytest.raises(pt.Refused, match="something else the second time"):
        federate(Forgetful(), norm=None)


class Mixed(nn.Module):
    """Chooses the precision of its block itself."""

    def __init__(self, how: str, half: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.half = how, half
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.output = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, self.half):
            x = self.block(x) if self.how == "plain" else checkpoint(self.block, x, use_reentrant=False)
        found: Tensor = self.output(x.float())
        return found


@pytest.mark.parametrize(("half", "precision"), [(True, "fp32"), (False, "bf16")])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_block_is_computed_again_in_the_precision_that_it_had(executor, half, precision) -> None:
    options = {"norm": None, "precision": precision}
    plain, less = (federate(Mixed(how, half), executor, **options) for how in ("plain", "checkpointed"))
    assert_same(plain, less, 0.0 if executor == "loop" else 2e-2)


def test_older_forms_of_torchs_function(monkeypatch) -> None:
    """Before torch 2.8 it has no `early_stop`: the arguments of the block begin one place earlier."""
    current = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    def older(fn, preserve=True, context_fn=None, determinism_check="default", debug=False, *args, **kwargs):
        yield from current(fn, preserve, context_fn, determinism_check, debug, True, *args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", older)
    called = []
    with Pass(nn.Linear(2, 2), torch.tensor(0)):
        generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator
        x = torch.ones(3, requires_grad=True)
        block = generator(lambda x: called.append(x) or torch.sin(x), True, None, "default", False, x)
        next(block)
        y = torch.sin(x)
        assert next(block, None) is None
        torch.autograd.grad(y.sum(), x)
    assert called == [x]


def test_bytes_of_a_sample_are_those_of_inputs_and_one_block() -> None:
    plain, less = (examine(Long(how), data(), None, None).sample_bytes for how in ("plain", "checkpointed"))
    inputs, block = 10 * 64 * 4, 10 * 64 * 4  # ten inputs of 64 numbers; ten activations of one block
    assert inputs + block <= less <= inputs + 2 * block + 4 * (64 + 6 + 4)
    assert less < plain / 2


class OwnWay(torch.autograd.Function):
    """Computes a layer again in the backward pass, without torch.utils.checkpoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            again = ctx.layer(x)
        return torch.autograd.grad(again, x, grad)[0], grad.T @ x.detach(), None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.output = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.output(OwnWay.apply(x, self.layer.weight, self.layer))
        return found


@pytest.mark.parametrize("executor", ["vmap", "auto"])
def test_other_ways_are_not_stacked_and_it_says_why(executor) -> None:
    with pytest.warns(UserWarning, match=r"cannot be stacked.*backward pass runs parts of the forward pass"):
        fallen = federate(Reversible(), executor, norm=None)
    assert_same(fallen, federate(Reversible(), norm=None), 1e-6)


def test_torchs_own_functions_are_put_back() -> None:
    before = vars(torch.utils.checkpoint).copy()
    federate(Deep("checkpointed"), "vmap")
    with pytest.raises(pt.Refused):
        federate(Deep("checkpointed"), loss="no such loss")
    assert {k for k, v in vars(torch.utils.checkpoint).items() if before.get(k) is not v} == set()


def test_second_derivatives() -> None:
    found = []
    for how in ("plain", "checkpointed"):
        samples = data(torch.float64)
        problem, params, names = problem_of(Deep(how).double(), samples)
        batch = Batch(*samples.gather(torch.arange(6)), None, torch.tensor(3))
        found.append(problem.hvp(params, batch, {k: torch.ones_like(params[k]) for k in names}))
    for k, v in found[0].items():
        torch.testing.assert_close(found[1][k], v)


def test_a_method_with_hessians_runs() -> None:
    method = pt.ffgg("output.*", 0.1, pt.cg(3), start="model")
    runs = [federate(Deep(how), method=method, rounds=1) for how in ("plain", "checkpointed")]
    assert_same(*runs, 1e-4)


def test_what_is_dropped_is_dropped_again() -> None:
    """Else the gradient would be that of another network: here it is that of differences."""
    samples = data(torch.float64)
    problem, params, names = problem_of(Deep("checkpointed", 0.5).double(), samples)
    batch = Batch(*samples.gather(torch.arange(6)), None, torch.tensor(3))
    g = torch.Generator().manual_seed(1)
    d = {k: torch.randn(params[k].shape, generator=g, dtype=torch.float64) for k in names}
    value, gradient, _ = problem.grad(params, batch, names)
    moved = [
        problem.grad({**params, **{k: params[k] + s * 1e-6 * d[k] for k in names}}, batch, names)[0]
        for s in (1, -1)
    ]
    along = sum((gradient[k] * d[k]).sum() for k in names)
    torch.testing.assert_close(along, (moved[0] - moved[1]) / 2e-6, rtol=1e-6, atol=1e-8)
    quiet, *_ = problem_of(Deep("checkpointed").double(), samples)
    assert not torch.equal(value, quiet.grad(params, batch, names)[0])


def test_dropout_inside_has_the_bits_of_the_seed() -> None:
    runs = []
    for other in (1, 2):
        model = Deep("checkpointed", 0.5)
        torch.manual_seed(other)
        runs.append(federate(model))
    assert_same(*runs)


# ---- gradients that are sparse, or missing


class Bag(nn.Module):
    def __init__(self, sparse: bool, function: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        if self.function:
            e = F.embedding(x, self.embedding.weight, sparse=self.embedding.sparse)
        else:
            e = self.embedding(x)
        found: Tensor = self.output(e.mean(1))
        return found


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_sparse_gradients_of_an_embedding(executor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = [federate(Bag(sparse), executor, tokens(), norm=None) for sparse in (True, False)]
    assert_same(*runs)


def test_sparse_gradients_of_a_function() -> None:
    runs = [federate(Bag(sparse, function=True), "loop", tokens(), norm=None) for sparse in (True, False)]
    assert_same(*runs)


def test_a_layer_that_writes_to_its_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(20, 4))
    with pytest.raises(
        ValueError, match=r"^model='Sequential': .* it writes to 0\.weight \(because of max_norm"
    ):
        federate(model, samples=tokens())


# ---- what a model returns, and in which precision


class Two(nn.Module):
    """A main and an auxiliary output in one of its modes."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.output, self.aux, self.mode = nn.Linear(6, 4), nn.Linear(6, 4), mode

    def forward(self, x: Tensor) -> Any:
        return (self.output(x), self.aux(x)) if self.training is self.mode else self.output(x)


@pytest.mark.parametrize("mode", [True, False])
def test_the_first_of_several_outputs_is_the_prediction(mode) -> None:
    class One(Two):
        def forward(self, x: Tensor) -> Any:
            return self.output(x)

    torch.manual_seed(0)
    model = Two(mode)
    one = One(mode)
    one.load_state_dict(model.state_dict())
    assert_same(federate(model), federate(one))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_samples_in_16_bits(dtype, executor) -> None:
    """They are stored so, and computed with in single precision."""
    rounded = data(dtype)
    wide = FederatedData.make(rounded.x.float(), rounded.y, rounded.train, rounded.test)
    runs = [federate(pt.models.mlp(6, 8, 4), executor, samples) for samples in (rounded, wide)]
    assert_same(*runs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_16_bits_is_refused_with_what_to_do(dtype) -> None:
    allowed = r"expected torch\.float32 or torch\.float64 .* model\.float\(\); precision='bf16'"
    for samples in (data(), data(dtype)):
        with pytest.raises(ValueError, match=rf"^dtype of hidden1\.linear\.weight='{dtype}': {allowed}"):
            federate(pt.models.mlp(6, 8, 4).to(dtype), samples=samples)
