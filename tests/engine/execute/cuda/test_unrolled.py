"""Convolutions as products of matrices against PyTorch's own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import partita as pt
from partita.engine.execute import graph
from partita.engine.execute.cuda import captured
from partita.engine.execute.cuda.unrolled import Unrolled, patch_bytes
from support import each


def step(groups: int, padding: tuple[int, int], stride: int = 1, bias: bool = True):
    """A convolution, what follows from it, and its gradients."""

    def run(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        def loss(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
            y = torch.conv2d(x, w, b if bias else None, stride=stride, padding=padding, groups=groups)
            return torch.conv2d(y.tanh(), v, groups=groups).square().sum()

        return torch.func.grad(loss, (0, 1, 2, 3) if bias else (0, 1, 3))(x, w, b, v)

    return run


SHAPES = itertools.product([(0, 0), (1, 2), (3, 3)], [(3, 3), (1, 1), (2, 5)], [True, False])


@each(
    ("padding", "kernel", "bias"),
    SHAPES,
    slow=lambda padding, kernel, bias: bias != (padding[0] == kernel[0] % 2),
)
def test_same_as_torch(padding, kernel, bias) -> None:
    """Values and all gradients, with a second convolution behind the first."""
    g = torch.Generator().manual_seed(0)
    groups, channels, out = 3, 2, 4
    x = torch.randn(5, groups * channels, 7, 6, generator=g, dtype=torch.float64)
    w = torch.randn(groups * out, channels, *kernel, generator=g, dtype=torch.float64)
    b = torch.randn(groups * out, generator=g, dtype=torch.float64)
    v = torch.randn(groups * 2, out, 2, 2, generator=g, dtype=torch.float64)
    run = step(groups, padding, bias=bias)
    traced = make_fx(run)(x, w, b, v)
    patches = channels * groups * kernel[0] * kernel[1] * 5 * (7 + 2 * padding[0] - kernel[0] + 1)
    patches *= 6 + 2 * padding[1] - kernel[1] + 1
    assert patch_bytes(traced) > 8 * patches
    other = make_fx(Unrolled(traced).run)(x, w, b, v)
    targets = [str(node.target) for node in other.graph.nodes]
    assert not any("convolution" in t for t in targets)
    assert sum("bmm" in t for t in targets) == 6
    for mine, theirs in zip(other(x, w, b, v), run(x, w, b, v), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (3, 2)])
def test_what_is_left_alone(groups, stride) -> None:
    """A single client, or steps of two places."""
    x, w = torch.randn(2, groups * 2, 8, 8), torch.randn(groups, 2, 3, 3)
    traced = make_fx(lambda x, w: torch.conv2d(x, w, stride=stride, groups=groups))(x, w)
    assert patch_bytes(traced) == 0
    assert torch.equal(Unrolled(traced).run(x, w), traced(x, w))


def test_without_convolutions() -> None:
    """There is nothing to choose between."""
    assert not patch_bytes(make_fx(lambda x: x @ x)(torch.eye(3)))


# ---- the choice between the forms of a step


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 3))


def federate(executor: str, model=None, **options) -> pt.Run:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(23, 1, 5, 5, generator=g), torch.randint(0, 3, (23,), generator=g)
    ranges = np.array([[0, 5], [5, 11], [16, 7]])
    data = pt.data.FederatedData.make(x, y, ranges, ranges)
    common = {"rounds": 2, "epochs": 1, "batch": 4, "baselines": False}
    return pt.federate(model or small_cnn(), data, pt.fedavg(lr=0.1), executor=executor, **common, **options)


@pytest.fixture
def times(monkeypatch) -> dict[str, float]:
    """Forms take as long as these say, and a compiler that leaves everything as it is."""
    found = {
        captured.CAPTURED: 3.0,
        captured.COMPILED: 2.0,
        captured.UNROLLED: 1.0,
        captured.IMPLICIT: 1.5,
        captured.COMPILED_IMPLICIT: 1.0,
    }
    monkeypatch.setattr(captured, "compiled", lambda graph, given: graph)  # noqa: ARG005
    monkeypatch.setattr(captured, "note_compiled", lambda graph, given, form: None)  # noqa: ARG005
    monkeypatch.setattr(captured, "was_compiled", lambda graph, given, form: False)  # noqa: ARG005
    monkeypatch.setattr(captured.Captured, "seconds", lambda made: found[made.form])
    return found


@pytest.mark.parametrize(
    "best", [pytest.param(captured.CAPTURED, marks=pytest.mark.slow), captured.COMPILED, captured.UNROLLED]
)
def test_the_fastest_form_is_kept_and_computes_the_same(best, times, monkeypatch) -> None:
    """All are tried where there is much to do."""
    monkeypatch.setattr(graph, "COMPILED_SAVING", 1e6)
    times[best] = 0.5
    loop, found = federate("loop"), federate("graph")
    pick = found.config["executor"]["picks"]["steps of training, stage 0"]
    assert pick["picked"] == best
    assert "3000.00 ms a step" in pick["why"] or best == captured.CAPTURED
    for name, value in loop.shared.items():
        torch.testing.assert_close(found.shared[name], value, atol=1e-6, rtol=1e-5)


def wide_cnn() -> nn.Module:
    """One whose convolutions have channels enough for implicit products."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 2), nn.Flatten(), nn.Linear(32, 3))


@pytest.fixture
def products(monkeypatch) -> None:
    """A device that has implicit products; on a CPU the same operations are torch's own convolutions."""
    monkeypatch.setattr(captured, "missing", lambda device: "")  # noqa: ARG005


@pytest.mark.parametrize("best", [captured.IMPLICIT, captured.COMPILED_IMPLICIT])
def test_implicit_products_where_a_device_has_them(best, products, times, monkeypatch) -> None:  # noqa: ARG001
    """They compute the same, compiled as a whole or not."""
    monkeypatch.setattr(graph, "COMPILED_SAVING", 1e6)
    times[best] = 0.5
    loop, found = federate("loop", wide_cnn()), federate("graph", wide_cnn())
    pick = found.config["executor"]["picks"]["steps of training, stage 0"]
    assert pick["picked"] == best
    assert "1500.00 ms a step with implicit products" in pick["why"] or best == captured.IMPLICIT
    for name, value in loop.shared.items():
        torch.testing.assert_close(found.shared[name], value, atol=1e-6, rtol=1e-5)


def test_a_short_run_has_implicit_products_without_a_compiler(products, times, monkeypatch) -> None:  # noqa: ARG001
    """Two convolutions cost two seconds, fused kernels more than ten: these few steps pay for the first."""
    monkeypatch.setattr(captured, "compiled", None)  # nobody calls it
    pick = federate("graph", wide_cnn()).config["executor"]["picks"]["steps of training, stage 0"]
    assert pick["picked"] == captured.IMPLICIT
    assert "to compile" in pick["why"]


def test_what_was_compiled_before_costs_less(products, monkeypatch) -> None:  # noqa: ARG001
    """The kernels of convolutions are the same in both forms that have them."""
    made, known = [], set()
    record = captured.Captured.record
    monkeypatch.setattr(captured.Captured, "record", lambda self: made.append(self) or record(self))
    monkeypatch.setattr(captured, "was_compiled", lambda graph, given, form: form in known)  # noqa: ARG005
    federate("graph", wide_cnn())
    first = {form: made[0].cost(form) for form in (captured.IMPLICIT, captured.COMPILED_IMPLICIT)}
    known.add(captured.IMPLICIT)
    assert made[0].cost(captured.IMPLICIT) == pytest.approx(captured.CACHED_SHARE * 2)
    saved = first[captured.COMPILED_IMPLICIT] - made[0].cost(captured.COMPILED_IMPLICIT)
    assert saved == pytest.approx((1 - captured.CACHED_SHARE) * first[captured.IMPLICIT])
    known.add(captured.COMPILED_IMPLICIT)
    assert made[0].cost(captured.COMPILED_IMPLICIT) == pytest.approx(
        captured.CACHED_SHARE * first[captured.COMPILED_IMPLICIT]
    )


def test_nothing_is_compiled_for_a_short_run(times) -> None:
    """Unless one asks for it: then even a slower form."""
    times[captured.CAPTURED] = 0.1
    role = "steps of training, stage 0"
    assert federate("graph").config["executor"]["picks"][role]["picked"] == captured.CAPTURED
    assert federate("compiled").config["executor"]["picks"][role]["picked"] == captured.UNROLLED


def test_repeatable_runs_do_not_choose_by_the_clock(times, monkeypatch) -> None:  # noqa: ARG001
    """A form decides roundings."""
    monkeypatch.setattr(graph, "COMPILED_SAVING", 1e6)
    role = "steps of training, stage 0"
    found = {
        e: federate(e, deterministic=True).config["executor"]["picks"][role] for e in ("graph", "compiled")
    }
    assert found["graph"]["picked"] == captured.CAPTURED
    assert found["compiled"]["picked"] == captured.COMPILED


def test_a_compiler_that_fails(times, monkeypatch) -> None:  # noqa: ARG001
    """The run goes on with the step as it was recorded, and says so."""

    def fails(graph: object, given: object) -> None:  # noqa: ARG001
        raise RuntimeError("no compiler")

    monkeypatch.setattr(captured, "compiled", fails)
    monkeypatch.setattr(graph, "COMPILED_SAVING", 1e6)
    with pytest.warns(UserWarning, match="no compiler"):
        found = federate("graph")
    pick = found.config["executor"]["picks"]["steps of training, stage 0"]
    assert pick["picked"] == captured.CAPTURED
    assert "no compiler" in pick["why"]
