"""The fused form of attention equals the plain one and torch's own, with all derivatives that are taken."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import partita as pt
from partita.engine.execute.cuda.compiled import compiled
from partita.engine.model.functions import Functions
from partita.engine.model.functions.fused import ALIGNMENT, Attention, Options, _aligned, fused
from support import each

forms = importlib.import_module("partita.engine.model.functions.attention")  # beside a function of that name
CLIENTS, B, H, T, S, D = 3, 2, 4, 5, 6, 8
ALWAYS = {2: 0, 4: 0, 8: 0}
FORMS: dict[str, dict[int, int]] = {"plain": {}, "fused": ALWAYS}


@pytest.fixture
def always(monkeypatch) -> None:
    monkeypatch.setitem(forms.FASTER_FROM, forms.CPU, ALWAYS)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hidden() -> Tensor:
    mask = drawn(T, S, seed=7) > -0.3
    mask[2] = False  # a place that sees nothing
    return mask


def numbers() -> Tensor:
    mask = drawn(T, S, seed=8)
    mask[1, :3] = mask[3] = -math.inf
    return mask


CASES = {
    "no mask": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": hidden()},
    "float": {"attn_mask": numbers()},
    "float of each head": {"attn_mask": drawn(H, T, S, seed=9)},
    "bool of each sample": {"attn_mask": drawn(B, 1, 1, S, seed=9) > -0.5},
    "bool of each sample and place": {"attn_mask": drawn(B, 1, T, S, seed=9) > -0.5},
    "a number for each place": {"attn_mask": drawn(T, 1, seed=9)},
    "shared heads": {"enable_gqa": True},
}


def inputs(case: dict, n: int = CLIENTS) -> list[Tensor]:
    heads = 2 if case.get("enable_gqa") else H
    shapes = (H, T), (heads, S), (heads, S), (H, T)
    return [drawn(n, B, *shape, D, seed=i) for i, shape in enumerate(shapes)]


def differentiated(case: dict, name: str | None = None):
    """Return the attention and its gradients as a function of one client's tensors and key."""

    def value(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        result = F.scaled_dot_product_attention(q, k, v, **case)
        return (result * w).sum(), result

    def one(q: Tensor, k: Tensor, v: Tensor, w: Tensor, key: Tensor):
        with Functions(key):
            gradients, result = grad(value, argnums=(0, 1, 2), has_aux=True)(q, k, v, w)
        return result, *gradients

    def counted(*args: Tensor):
        if name is None:
            return one(*args)
        with Calls() as calls:
            found = one(*args)
        mask = case.get("attn_mask")
        assert (calls.count > 0) == (name == "fused" and (mask is None or mask.dtype == torch.bool))
        return found

    return counted


class Calls:
    """Counts how often the fused form runs."""

    def __enter__(self) -> Calls:
        self.count, self.original = 0, forms.fused

        def count(*args):
            self.count += 1
            return self.original(*args)

        forms.fused = count
        return self

    def __exit__(self, *error: object) -> None:
        forms.fused = self.original


def by_torch(case: dict, tensors: list[Tensor]) -> list[Tensor]:
    """Return torch's own attention of each client and its gradients, as a stack."""
    rows = []
    for i in range(len(tensors[0])):
        own = [x[i].clone().requires_grad_() for x in tensors[:3]]
        result = F.scaled_dot_product_attention(*own, **case)
        rows.append((result.detach(), *torch.autograd.grad((result * tensors[3][i]).sum(), own)))
    return [torch.stack(x) for x in zip(*rows)]


@each("case", CASES.values(), ids=CASES)
@each("name", FORMS)
def test_stacked_clients_have_what_torchs_own_gives_each(case, name, monkeypatch) -> None:
    monkeypatch.setitem(forms.FASTER_FROM, forms.CPU, FORMS[name])
    tensors = inputs(case)
    stacked = vmap(differentiated(case, name))(*tensors, torch.arange(CLIENTS))
    for mine, theirs in zip(stacked, by_torch(case, tensors), strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@each(
    "case", [CASES["causal"], CASES["bool"], CASES["bool of each sample"]], ids=["causal", "bool", "sample"]
)
@each("least", FORMS.values(), ids=FORMS)
def test_results_do_not_depend_on_how_many_clients_are_stacked(case, least, monkeypatch) -> None:
    monkeypatch.setitem(forms.FASTER_FROM, forms.CPU, least)
    tensors, keys = inputs(case, 7), torch.arange(7)
    whole = vmap(differentiated(case))(*tensors, keys)
    for n in (1, 2, 4):
        some = vmap(differentiated(case))(*[x[:n] for x in tensors], keys[:n])
        for mine, theirs in zip(some, whole, strict=True):
            torch.testing.assert_close(mine, theirs[:n], rtol=1e-6, atol=1e-6)


@each("case", [CASES["causal"], CASES["bool"], CASES["float"]], ids=["causal", "bool", "float"])
@each("cast", ["tensors", "autocast"])
@each("least", FORMS.values(), ids=FORMS)
def test_bfloat16_within_its_rounding(case, cast, least, monkeypatch) -> None:
    monkeypatch.setitem(forms.FASTER_FROM, forms.CPU, least)
    tensors = [x.bfloat16().float() for x in inputs(case)]
    exact = vmap(differentiated(case))(*tensors, torch.arange(CLIENTS))
    half = {k: x.bfloat16() if k == "attn_mask" and x.dtype != torch.bool else x for k, x in case.items()}
    with torch.autocast("cpu", torch.bfloat16, cast == "autocast", cache_enabled=False):
        given = tensors if cast == "autocast" else [x.bfloat16() for x in tensors]
        rounded = vmap(differentiated(half))(*given, torch.arange(CLIENTS))
    assert rounded[0].dtype == torch.bfloat16
    assert rounded[1].dtype == given[0].dtype
    for mine, theirs in zip(rounded, exact, strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("always")
def test_a_place_that_sees_nothing_has_zeros_and_no_gradient() -> None:
    for mask, row in ((hidden(), 2), (numbers(), 3)):
        case = {"attn_mask": mask}
        result, of_query, _, _ = vmap(differentiated(case, "fused"))(*inputs(case), torch.arange(CLIENTS))
        assert (result[..., row, :] == 0).all()
        assert (of_query[..., row, :] == 0).all()


@pytest.mark.usefixtures("always")
def test_a_place_that_is_hidden_by_a_huge_number_sees_all_alike_as_alone() -> None:
    """Its scores are lost in the number, which a kernel of all clients would not do."""
    case = {"attn_mask": torch.zeros(T, S)}
    case["attn_mask"][1] = torch.finfo(torch.float32).min
    tensors = inputs(case)
    stacked, *_ = vmap(differentiated(case, "fused"))(*tensors, torch.arange(CLIENTS))
    torch.testing.assert_close(stacked, by_torch(case, tensors)[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stacked[..., 1, :], tensors[2].mean(-2), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("always")
@each("shape", [(), (4,), (3, 2, 4)], ids=str)
def test_any_number_of_axes_before_the_last_two(shape) -> None:
    mask = drawn(*shape, T, S, seed=5) > -1
    tensors = [drawn(CLIENTS, *shape, n, D, seed=i) for i, n in enumerate((T, S, S, T))]
    for case in ({}, {"attn_mask": mask}, {"attn_mask": mask[(0,) * len(shape)]}):
        stacked = vmap(differentiated(case, "fused"))(*tensors, torch.arange(CLIENTS))
        for mine, theirs in zip(stacked, by_torch(case, tensors), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


# ---- stacks


@pytest.mark.usefixtures("always")
@each("shared", ["query", "key", "value", "mask", "gradient"])
@each("shape", [(T, S), (B, 1, T, S), (1, H, 1, S), (B, H, T, S)], ids=str)
def test_what_clients_share_is_not_stacked(shared, shape) -> None:
    q, k, v, w = inputs({})
    mask = drawn(CLIENTS, *shape, seed=6) > -1
    tensors = dict(zip(("query", "key", "value", "gradient", "mask"), (q, k, v, w, mask)))
    tensors[shared] = tensors[shared][0]
    axes = tuple([None if name == shared else 0 for name in tensors])

    def one(q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor):
        return differentiated({"attn_mask": mask}, "fused")(q, k, v, w, torch.tensor(0))

    mine = vmap(one, axes)(*tensors.values())
    theirs = vmap(one)(
        *[x.expand(CLIENTS, *x.shape) if a is None else x for x, a in zip(tensors.values(), axes)]
    )
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("always")
def test_stacks_of_stacks_and_other_axes() -> None:
    tensors = [torch.stack([x, x.flip(0)]) for x in inputs({})]
    one, key = differentiated({"attn_mask": hidden()}, "fused"), torch.tensor(0)

    def two(*tensors: Tensor):
        return one(*tensors, key)

    nested = vmap(vmap(two))(*tensors)
    other = vmap(vmap(two, 2), 1, 1)(*[x.movedim((0, 1), (1, 3)) for x in tensors])
    outer = vmap(vmap(two, (0, None, 0, 0)), (None, 0, 0, 0))(tensors[0][0], tensors[1][:, 0], *tensors[2:])
    for i in range(2):
        for mine, theirs in zip(nested, vmap(two)(*[x[i] for x in tensors]), strict=True):
            torch.testing.assert_close(mine[i], theirs, rtol=1e-6, atol=1e-6)
        for j in range(CLIENTS):
            own = two(tensors[0][0, j], tensors[1][i, 0], tensors[2][i, j], tensors[3][i, j])
            for mine, theirs in zip(outer, own, strict=True):
                torch.testing.assert_close(mine[i, j], theirs, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(other, nested, strict=True):
        torch.testing.assert_close(mine.movedim(1, 0), theirs, rtol=1e-6, atol=1e-6)


@each("batch", [1, B])
def test_a_jacobian_stacks_the_gradients_alone(batch) -> None:
    q, k, v, _ = (x[0, :batch].double() for x in inputs({}))
    by_kernel = jacrev(lambda q: fused(q, k, v, hidden(), Options(forms.CPU, False, 0.3)))
    masked = torch.where(hidden(), 0.0, -math.inf)

    def by_formula(q: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * 0.3 + masked, -1).nan_to_num(0.0) @ v

    expected = jacrev(by_formula)(q).nan_to_num(0.0)
    torch.testing.assert_close(by_kernel(q), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("always")
def test_plain_autograd_below_a_stack() -> None:
    """As where blocks are computed again: `vmap` outside, and gradients of the tensors below it."""
    *tensors, weight = inputs({})
    mask = hidden()
    leaves = [x.clone().requires_grad_() for x in tensors]

    def one(q: Tensor, k: Tensor, v: Tensor, key: Tensor) -> Tensor:
        with Functions(key), Calls() as calls:
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert calls.count
        return result

    result = vmap(one)(*leaves, torch.arange(CLIENTS))
    gradients = torch.autograd.grad((result * weight).sum(), leaves)
    expected = by_torch({"attn_mask": mask}, [*tensors, weight])
    for mine, theirs in zip((result.detach(), *gradients), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


# ---- derivatives that a kernel does not have


def adapted(case: dict, key: Tensor):
    """Return the loss after one step on it, as Per-FedAvg has it, of one client's tensors."""

    def loss(*tensors: Tensor) -> Tensor:
        with Functions(key):
            return F.scaled_dot_product_attention(*tensors, **case).square().sum()

    def after(*tensors: Tensor) -> Tensor:
        moved = grad(loss, argnums=(0, 1, 2))(*tensors)
        return loss(*[x - 0.1 * g for x, g in zip(tensors, moved)])

    return grad(after, argnums=(0, 1, 2))


SECOND = {k: CASES[k] for k in ("no mask", "causal", "bool", "float", "shared heads")}


@each("case", SECOND.values(), ids=SECOND)
def test_second_order_gradients_are_those_of_the_plain_form(case, monkeypatch) -> None:
    tensors, key = [x.double() for x in inputs(case)[:3]], torch.tensor(0)
    case = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in case.items()}
    results = []
    for least in FORMS.values():
        monkeypatch.setitem(forms.FASTER_FROM, forms.CPU, least)
        alone = adapted(case, key)(*[x[0] for x in tensors])
        results.append((*vmap(adapted(case, key))(*tensors), *alone))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-12)
        assert plain.abs().max() > 0


@each("causal", [False, True])
@each("masked", [False, True])
@each("stacked", [False, True])
def test_the_gradient_of_the_fused_form_can_be_differentiated(causal, masked, stacked) -> None:
    """Where nobody could tell that it would be: `create_graph`, and by `torch.func`."""
    q, k, v, _ = (x.double() for x in inputs({}))
    mask = torch.where(drawn(1, 1, T, S, seed=3) > 1, -math.inf, 0.0).double() if masked else None
    seen = torch.ones(T, S, dtype=torch.bool).tril() if causal else torch.ones(T, S, dtype=torch.bool)

    def by_kernel(*tensors: Tensor) -> Tensor:
        return Attention.apply(Options(forms.CPU, causal, 0.4), *tensors, mask)[0]

    def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.4 + (0 if mask is None else mask)
        return torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v

    def derivatives(attend):
        first = grad(lambda *x: attend(*x).pow(3).sum(), argnums=(0, 1, 2))
        second = grad(lambda *x: sum(g.square().sum() for g in first(*x)), argnums=(0, 1, 2))
        third = grad(lambda *x: sum(g.sin().sum() for g in second(*x)), argnums=(0, 1, 2))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        result = vmap(attend)(*leaves) if stacked else attend(*[x[0] for x in leaves])
        graph = torch.autograd.grad(result.pow(3).sum(), leaves, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in graph), leaves)
        if stacked:
            return *twice, *vmap(second)(q, k, v), *vmap(third)(q, k, v)
        return *twice, *second(q[0], k[0], v[0]), *third(q[0], k[0], v[0])

    for mine, theirs in zip(derivatives(by_kernel), derivatives(by_formula), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("always")
def test_products_with_a_hessian_forward_and_reverse() -> None:
    q, k, v, d = (x.double() for x in inputs({}))

    def product(attend, q: Tensor, k: Tensor, v: Tensor, d: Tensor):
        gradient = grad(lambda q: attend(q, k, v).square().sum())
        return jvp(gradient, (q,), (d,))[1], vjp(gradient, q)[1](d)[0]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with Functions(torch.tensor(0)), Calls() as calls:
            result = F.scaled_dot_product_attention(q, k, v)
        assert not calls.count
        return result

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / math.sqrt(D), -1) @ v

    mine, theirs = (vmap(lambda *x, f=f: product(f, *x))(q, k, v, d) for f in (attend, plain))
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_forward_derivatives_of_the_kernel_are_refused() -> None:
    q, k, v, _ = (x[0] for x in inputs({}))
    with pytest.raises(RuntimeError, match="jvp"):
        jvp(lambda q: fused(q, k, v, None, Options(forms.CPU, False, 1.0)), (q,), (q,))


@pytest.mark.usefixtures("always")
def test_a_mask_with_a_gradient() -> None:
    """As learned biases of positions have one: by the plain form, whichever way it is taken."""
    q, k, v, _ = inputs({})
    bias = drawn(CLIENTS, H, T, S, seed=4)

    def value(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with Functions(torch.tensor(0)):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias * 2).square().sum()

    leaf = bias.clone().requires_grad_()
    below = torch.autograd.grad(vmap(value)(leaf, q, k, v).sum(), leaf)[0]
    stacked = vmap(grad(value))(bias, q, k, v)
    for i in range(CLIENTS):
        own = bias[i].clone().requires_grad_()
        result = F.scaled_dot_product_attention(q[i], k[i], v[i], attn_mask=own * 2)
        expected = torch.autograd.grad(result.square().sum(), own)[0]
        torch.testing.assert_close(stacked[i], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(below[i], expected, rtol=1e-5, atol=1e-5)


# ---- the choice


def test_which_form_is_chosen(monkeypatch) -> None:
    def chosen(shape, key=None, mask=None, causal=False, dtype=torch.float32, value=None) -> str:
        q = torch.zeros(shape, dtype=dtype)
        k = torch.zeros(key or shape, dtype=dtype)
        return forms.form(q, k, k if value is None else torch.zeros(value, dtype=dtype), mask, causal)

    long, short = (2, 4, 256, 8), (2, 4, 255, 8)
    assert chosen(long) == chosen(short, long) == chosen(long, causal=True) == forms.CPU
    assert chosen(short) == chosen(long, short) == forms.PLAIN
    assert chosen(long, dtype=torch.float64) == chosen((2, 4, 512, 8), dtype=torch.bfloat16) == forms.CPU
    assert chosen(long, dtype=torch.bfloat16) == forms.PLAIN
    assert chosen(long, mask=torch.ones(256, 256, dtype=torch.bool)) == forms.CPU
    for other in (
        {"dtype": torch.float16},
        {"value": (2, 4, 256, 16)},
        {"key": (1, 4, 256, 8)},
        {"mask": torch.ones(3, 2, 4, 256, 256)},
        {"mask": torch.ones(256, 256), "causal": True},
        {"mask": torch.ones(256, 256, requires_grad=True)},
    ):
        assert chosen(long, **other) == forms.PLAIN
    assert chosen((0, 4, 256, 8)) == forms.PLAIN
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
        assert chosen(long) == forms.PLAIN
    monkeypatch.setitem(forms.FASTER_FROM, forms.CPU, {})
    assert chosen(long) == forms.PLAIN


def test_which_form_is_chosen_on_a_gpu(monkeypatch) -> None:
    """By tensors without memory, which stand for those of a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(
        forms, "FASTER_FROM", {forms.CPU: ALWAYS, forms.EFFICIENT: ALWAYS, forms.FLASH: {2: 64}}
    )

    class OfGpu(torch.Tensor):
        device = torch.device("cuda")

    def chosen(shape, dtype=torch.bfloat16, mask=None, causal=False, key=None) -> str:
        q, k = (torch.empty(x, dtype=dtype, device="meta").as_subclass(OfGpu) for x in (shape, key or shape))
        return forms.form(q, k, k, mask, causal)

    assert chosen((2, 4, 64, 32)) == chosen((2, 4, 64, 32), causal=True) == forms.FLASH
    assert chosen((2, 4, 63, 32)) == forms.EFFICIENT
    assert chosen((2, 4, 64, 32), mask=torch.ones(64, dtype=torch.bool)) == forms.EFFICIENT
    assert chosen((2, 4, 64, 32), mask=torch.ones(64)) == forms.PLAIN
    assert chosen((2, 4, 64, 32), causal=True, key=(2, 4, 65, 32)) == forms.EFFICIENT
    assert chosen((2, 4, 64, 32), torch.float32) == forms.EFFICIENT
    assert chosen((2, 4, 64, 32), torch.float64) == forms.PLAIN
    assert chosen((2, 4, 64, 12)) == chosen((2, 4, 64, 256)) == forms.PLAIN
    assert chosen((1 << 16, 1, 64, 8)) == forms.PLAIN
    many = vmap(lambda _: torch.tensor(chosen((1 << 13, 1, 64, 8)) == forms.PLAIN))
    assert many(torch.zeros(8)).all()
    assert not many(torch.zeros(7)).any()


@each("name", [forms.EFFICIENT, forms.FLASH])
@each("masked", [False, True])
def test_kernels_of_a_gpu_take_what_they_are_given(name, masked) -> None:
    """By shapes alone: the signatures of torch's operations, and how a mask lies in memory."""
    if name == forms.FLASH and masked:
        return
    q, k, w = (torch.empty(CLIENTS, B, H, n, D, dtype=torch.bfloat16, device="meta") for n in (T, S, T))
    mask = torch.empty(B, 1, 1, S, dtype=torch.bfloat16, device="meta") if masked else None

    def one(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        options = Options(name, False, 1.0)
        result, back = vjp(lambda *x: Attention.apply(options, *x, mask)[0], q, k, k)
        return result, *back(w)

    shapes = [tuple(x.shape) for x in vmap(one)(q, k, w)]
    assert shapes == [tuple(x.shape) for x in (q, q, k, k)]


@each("width", [5, 8, 24])
def test_rows_of_a_mask_are_aligned(width) -> None:
    q, k = torch.zeros(3, 2, T, D), torch.zeros(3, 2, width, D)
    for shape in ((1, 1, T, width), (3, 1, 1, width), (3, 2, T, width)):
        mask = drawn(*shape)
        for given in (mask, mask.mT.contiguous().mT):
            aligned = _aligned(given, q, k)
            assert torch.equal(aligned, mask.expand(3, 2, T, width))
            assert aligned.stride(-1) == 1
            assert not any(step % ALIGNMENT for step in aligned.stride()[:-1])


# ---- steps that are traced and compiled


@pytest.mark.usefixtures("always")
@each("case", [{}, {"is_causal": True}, {"attn_mask": hidden()}], ids=["no mask", "causal", "bool"])
def test_a_traced_step_computes_the_same(case) -> None:
    args = [*inputs(case), torch.arange(CLIENTS)]
    step = vmap(differentiated(case, "fused"))
    graph = make_fx(step)(*args)
    assert any("flash_attention_for_cpu" in str(node.target) for node in graph.graph.nodes)
    others = [*[x.flip(0) for x in args[:4]], args[4]]
    for mine, theirs in zip(graph(*others), step(*others), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.usefixtures("always")
@pytest.mark.slow
def test_a_compiled_step_computes_the_same() -> None:
    args = [*inputs({}), torch.arange(CLIENTS)]
    step = vmap(differentiated({"attn_mask": hidden()}, "fused"))
    expected = step(*args)
    kernels = compiled(make_fx(lambda *x: list(step(*x)))(*args), args)
    for mine, theirs in zip(kernels(*args), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


class Encoder(nn.Module):
    """A classifier of short texts by one layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layer(self.embedding(x)).mean(1))


@pytest.mark.usefixtures("always")
@each("name", ["fedavg", "perfedavg"], slow=lambda name: name == "perfedavg")
def test_a_run_with_the_fused_form_is_the_run_of_one_client_after_another(name) -> None:
    """With more steps than it takes to trace one, and with second derivatives."""
    method = pt.fedavg(lr=0.1) if name == "fedavg" else pt.perfedavg(lr=0.1, alpha=0.1)
    x = torch.randint(0, 9, (72, 5), generator=torch.Generator().manual_seed(0))
    data = pt.data.from_arrays(x.numpy(), (x.sum(1) % 3).numpy(), np.repeat(list("abc"), 24), test=0.25)
    work = {"rounds": 1, "steps": 42, "batch": 2, "baselines": False, "progress": False}
    loop = pt.federate(Encoder(), data, method, executor="loop", **work)
    for executor in ("vmap", "graph"):
        with Calls() as calls:
            stacked = pt.federate(Encoder(), data, method, executor=executor, **work)
        assert calls.count
        for k, v in loop.shared.items():
            torch.testing.assert_close(stacked.shared[k], v, rtol=1e-3, atol=1e-5)
