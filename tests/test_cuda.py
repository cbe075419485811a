"""What changes on a GPU: nothing but the speed. Run with PARTITA_TEST_CUDA=1 on a machine that has one."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import partita as pt
from partita.cli.bench.workloads import METHODS
from partita.core.device import HostCopy, arithmetic, put
from partita.core.types import RoundContext, Work
from partita.engine.execute.cuda import replayed
from partita.engine.execute.cuda.captured import CAPTURED, IMPLICIT, Captured
from partita.engine.execute.cuda.compiled import compiled
from partita.engine.execute.cuda.implicit import Implicit, implicit_count
from partita.engine.execute.cuda.replayed import Replayed
from partita.engine.execute.graph import Graph
from partita.engine.execute.plan import draw
from partita.engine.lockstep.runs import in_lockstep
from partita.engine.model.functions.attention import FASTER_FROM

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device and PARTITA_TEST_CUDA=1"
)


DEVICES = ("cpu", "cuda")
OPTIONS = {"rounds": 2, "cohort": 4, "epochs": 1, "batch": 4, "baselines": False, "precision": "fp32"}
METHOD = pt.fedalt(personal="output", lr=0.05, momentum=0.5)
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str | None]] = {
    "mlp": (lambda: pt.models.mlp(12, 8, 4), (12,), None),
    "norm": (
        lambda: pt.models.resnet20(4, width=0.25).double(),
        (3, 8, 8),
        "global",
    ),  # sensitive to rounding
    "dropout": (lambda: pt.models.mnist_cnn(4), (28, 28), None),
}


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """Begin every test with the same initial weights: how far roundings grow depends on them."""
    torch.manual_seed(0)


def make_data(shape: tuple[int, ...], clients: int = 6) -> pt.data.FederatedData:
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(clients), np.arange(7, 7 + clients))
    x = rng.normal(size=(len(client), *shape)).astype("float32")
    return pt.data.from_arrays(x, rng.integers(0, 4, len(client)), client, test=0.3)


def of_kind(kind: str) -> tuple[nn.Module, pt.data.FederatedData, str | None]:
    """A model, its samples in its precision, and what becomes of its statistics."""
    make, shape, norm = KINDS[kind]
    model, data = make(), make_data(shape)
    return model, replace(data, x=data.x.to(next(model.parameters()).dtype)), norm


def test_the_same_draws() -> None:
    data = make_data((3,))
    context = RoundContext(1, 2, 0, 2, 5, Work(epochs=2, batch=4))
    here = draw(data, np.arange(6), context.work, 0, context)
    there = draw(data.to("cuda"), np.arange(6), context.work, 0, context)
    assert torch.equal(here.rows, there.rows.cpu())
    assert torch.equal(here.keys, there.keys.cpu())


@pytest.mark.parametrize("executor", ["loop", "vmap", "graph", "auto"])
@pytest.mark.parametrize("kind", ["mlp", "norm", "dropout"])
def test_the_same_result_as_on_the_cpu(kind: str, executor: str, tmp_path: object) -> None:
    model, data, norm = of_kind(kind)
    cpu = pt.federate(model, data, METHOD, executor="loop", device="cpu", norm=norm, **OPTIONS)
    gpu = pt.federate(
        model, data, METHOD, executor=executor, device="cuda", norm=norm, out=f"{tmp_path}/run", **OPTIONS
    )
    for name, value in cpu.shared.items():
        torch.testing.assert_close(gpu.shared[name].cpu(), value, atol=1e-3, rtol=1e-3)
    loaded = pt.load(f"{tmp_path}/run", model=model)
    x = data.client(3)[0]
    torch.testing.assert_close(
        loaded.client(3).model()(x), gpu.client(3).model()(x.cuda()).cpu(), atol=2e-4, rtol=1e-3
    )


@pytest.mark.parametrize("kind", ["mlp", "norm", "dropout"])
def test_a_compiled_step_computes_the_same(kind: str) -> None:
    model, data, norm = of_kind(kind)
    cpu = pt.federate(model, data, METHOD, executor="loop", device="cpu", norm=norm, **OPTIONS)
    gpu = pt.federate(model, data, METHOD, executor="compiled", device="cuda", norm=norm, **OPTIONS)
    for name, value in cpu.shared.items():
        torch.testing.assert_close(gpu.shared[name].cpu(), value, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("executor", ["loop", "vmap", "graph"])
@pytest.mark.parametrize("kind", ["mlp", "norm", "dropout"])
def test_repeatable_bit_for_bit(kind: str, executor: str) -> None:
    model, data, norm = of_kind(kind)
    options = {**OPTIONS, "precision": "tf32", "norm": norm, "deterministic": True}
    first, second = (
        pt.federate(model, data, METHOD, executor=executor, device="cuda", **options) for _ in range(2)
    )
    for name, value in first.shared.items():
        assert torch.equal(second.shared[name], value), name


@pytest.mark.parametrize("executor", ["loop", "vmap", "graph"])
def test_half_precision_keeps_single_weights(executor: str) -> None:
    model, data, _ = of_kind("mlp")
    exact, half = (
        pt.federate(model, data, METHOD, executor=executor, device="cuda", **{**OPTIONS, "precision": p})
        for p in ("fp32", "bf16")
    )
    for name, value in exact.shared.items():
        assert half.shared[name].dtype == torch.float32
        torch.testing.assert_close(half.shared[name], value, atol=0.05, rtol=0.05)


class Strict(pt.callbacks.Callback):
    """After two rounds, which record, each wait of the host for the device is an error until the last."""

    def __init__(self, last: int) -> None:
        self.last, self.rounds = last, 0

    def round(self, event: pt.callbacks.Event) -> None:
        self.rounds = event.round
        torch.cuda.set_sync_debug_mode("error" if 2 <= event.round < self.last - 1 else "default")


@pytest.mark.parametrize("name", ["fedavg", "fedalt", "fedplus", "pfedme", "scaffold", "persafl_me"])
def test_rounds_wait_for_the_device_at_the_end_of_their_steps_alone(name: str, monkeypatch) -> None:
    """For what comes back then, once; all other reads and plain copies are errors."""
    model, data, _ = of_kind("mlp")
    method, strict = METHODS[name], Strict(6)
    reads = []
    read = HostCopy.read
    monkeypatch.setattr(HostCopy, "read", lambda coming: reads.append(strict.rounds) or read(coming))
    work = {**OPTIONS, "rounds": 6, "cohort": 6, "evaluate_every": 6}
    try:
        pt.federate(
            model,
            data,
            method.algorithm(),
            executor="graph",
            device="cuda",
            callbacks=[strict],
            **work,
            **method.settings(6),
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert strict.rounds == 6
    assert max(Counter(reads).values()) == 1


@pytest.mark.parametrize("case", ["excluded", "gaussian", "all parties"])
def test_the_server_finds_everything_where_it_computes(case: str) -> None:
    """Metrics and numbers of clients are on the host, the rest is on the device."""
    model, data, _ = of_kind("mlp")
    given: dict[str, Any] = {
        "excluded": {"attack": pt.attack.malformed("shape"), "byzantine": [1]},
        "gaussian": {"attack": pt.attack.gaussian(0.1), "byzantine": [1]},
        "all parties": {},
    }[case]
    method = pt.fedplus(pt.psi.avg(0.1), lr=0.05, sigma=1.0, over="all") if case == "all parties" else METHOD
    common = {**OPTIONS, "rounds": 3, "cohort": 4, "executor": "vmap", **given}
    cpu, gpu = (pt.federate(model, data, method, device=device, **common) for device in DEVICES)
    for name, value in cpu.shared.items():
        torch.testing.assert_close(gpu.shared[name].cpu(), value, atol=1e-3, rtol=1e-3)
    assert [r["excluded"] for r in cpu.metrics] == [r["excluded"] for r in gpu.metrics]


UPLOADS: dict[str, list[Any]] = {
    "topk, quantize": [pt.transforms.topk(0.2), pt.transforms.quantize(8, stochastic=False)],
    "low rank": [pt.transforms.low_rank(2)],
    "gaussian": [pt.privacy.gaussian(noise=0.5, clip=0.05, quantile=0.5)],
    "banded": [pt.privacy.banded(noise=0.5, clip=0.05)],
    "gaussian, half": [pt.privacy.gaussian(noise=0.5, clip=0.05), pt.transforms.half()],
}


@pytest.mark.parametrize("executor", ["vmap", "graph", "replayed"])
@pytest.mark.parametrize("kind", UPLOADS)
def test_uploads_pass_transforms_as_one_client_after_another(
    kind: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In double precision, where no entry is so near to the next level that it would be rounded there.

    Clients, their residuals included, and the server are those of the loop on the same device and of the CPU.
    """
    data = make_data((12,))
    data = replace(data, x=data.x.double())
    common = {**OPTIONS, "rounds": 4, "uploads": UPLOADS[kind]}

    def run(executor: str, device: str) -> pt.Run:
        torch.manual_seed(0)
        model = pt.models.mlp(12, 8, 4).double()
        return pt.federate(model, data, METHOD, executor=executor, device=device, **common)

    if executor == "replayed":
        executor = "graph"
        monkeypatch.setattr(replayed, "RECORDING_SECONDS", -1.0)
        monkeypatch.setattr(replayed, "REPLAY_SECONDS", -1.0)
    alone, other, cpu = run("loop", "cuda"), run(executor, "cuda"), run("loop", "cpu")
    for reference in (alone, cpu):
        for name, value in reference.shared.items():
            torch.testing.assert_close(other.shared[name].cpu(), value.cpu(), atol=1e-8, rtol=1e-6)
        for i in range(data.clients):
            ours, theirs = (r.client(i).personal | r.client(i).memory for r in (other, reference))
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name].cpu(), value.cpu(), atol=1e-8, rtol=1e-6)
        assert other.summary()["bytes_up"] == reference.summary()["bytes_up"]
        account = reference.summary().get("privacy") or {}
        assert (other.summary().get("privacy") or {}) == pytest.approx(account, rel=1e-6)


# ---- functions that are replayed


def looks_at_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


def makes_a_list(x: torch.Tensor) -> torch.Tensor:
    return x.new_tensor(x.tolist())


def takes_some(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].sum()


def sends_numbers(x: torch.Tensor) -> torch.Tensor:
    return x + put(np.arange(3.0), x.device)


def makes_a_tensor(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0], device=x.device)


def makes_a_number(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor(2.0, device=x.device)


def multiplies(x: torch.Tensor) -> torch.Tensor:
    return (x[:, None] @ x[None]).sum(0) + torch.arange(3, device=x.device)


def test_functions_are_replayed_where_that_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the GPU, or reads the host, stays as it is, and spoils no recording after it."""
    monkeypatch.setattr(replayed, "OURS", (f"{__name__}.",))
    monkeypatch.setattr(replayed, "RECORDING_SECONDS", -1.0)
    monkeypatch.setattr(replayed, "REPLAY_SECONDS", -1.0)
    found = Replayed("a function")
    functions = looks_at_a_value, makes_a_list, takes_some, sends_numbers, makes_a_tensor, makes_a_number
    for fn in (*functions, multiplies):
        for i in range(6):
            x = torch.randn(3, generator=torch.Generator().manual_seed(i)).cuda()
            torch.testing.assert_close(found.function(fn, x), fn(x))
            assert torch.cuda.get_sync_debug_mode() == 0
    recorded = {key[0].__name__ for key, known in found.known.items() if known.recording is not None}
    assert recorded == {"multiplies"}


SERVERS: dict[str, pt.Algorithm] = {
    "mean": METHOD,
    "adam": pt.fedavg(lr=0.05, server=pt.optim.adam(lr=0.1)),
    "scaffold": pt.scaffold(lr=0.05),
    "plus": pt.fedplus(pt.psi.geomed(0.1), lr=0.05, sigma=1.0),
    "trimmed": pt.fedavg(lr=0.05, aggregate=pt.aggregate.trimmed_mean(1)),
    "krum": pt.fedavg(lr=0.05, aggregate=pt.aggregate.krum(1)),
    "geometric": pt.fedavg(lr=0.05, aggregate=pt.aggregate.geometric_median()),
    "bucketing": pt.fedavg(lr=0.05, aggregate=pt.aggregate.bucketing(2, pt.aggregate.coordinate_median())),
}


@pytest.mark.parametrize("kind", ["alone", "lockstep"])
@pytest.mark.parametrize("name", SERVERS)
def test_a_replayed_server_does_the_same(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, _ = of_kind("mlp")
    monkeypatch.setattr(replayed, "RECORDING_SECONDS", -1.0)
    monkeypatch.setattr(replayed, "REPLAY_SECONDS", -1.0)

    def run(seed: int) -> pt.Run:
        settings = {**OPTIONS, "rounds": 6, "cohort": 6, "seed": seed}
        return pt.federate(model, data, SERVERS[name], executor="graph", device="cuda", **settings)

    def runs() -> list[pt.Run]:
        both = [partial(run, seed) for seed in range(2)]
        return in_lockstep(both) if kind == "lockstep" else [each() for each in both]

    found = runs()
    monkeypatch.setattr(replayed, "DEVICES", ())
    for ours, theirs in zip(found, runs(), strict=True):
        for name_, value in theirs.shared.items():
            torch.testing.assert_close(ours.shared[name_], value, atol=1e-6, rtol=1e-5)
        for i in range(data.clients):
            for name_, value in theirs.client(i).personal.items():
                torch.testing.assert_close(ours.client(i).personal[name_], value, atol=1e-6, rtol=1e-5)


def test_clips_hold_where_products_of_matrices_have_ten_bits() -> None:
    """The server moves by no more than the clip of each client over how many come."""
    model, data, _ = of_kind("mlp")
    start = {k: v.detach().clone() for k, v in model.state_dict().items()}
    found = pt.federate(
        model, data, pt.fedavg(lr=0.5, weighting="uniform"), rounds=1, steps=4, batch=4, baselines=False,
        executor="vmap", device="cuda", precision="tf32", schedule=pt.schedule.synchronous(),
        uploads=[pt.privacy.gaussian(noise=1e-9, clip=0.01)],
    )  # fmt: skip
    squares = [(found.shared[k].cpu() - v).double().square().sum() for k, v in start.items()]
    assert 0 < float(sum(squares)) ** 0.5 <= 0.01 * (1 + 1e-4)


def test_deltas_that_are_added_up() -> None:
    model, data, _ = of_kind("mlp")
    whole, parts = (
        pt.federate(model, data, METHOD, executor="graph", device="cuda", memory=memory, **OPTIONS)
        for memory in ("1GiB", "8KiB")
    )
    for name, value in whole.shared.items():
        torch.testing.assert_close(parts.shared[name], value, atol=1e-5, rtol=1e-4)


def on_the_clock() -> pt.schedule.Schedule:
    delays = pt.schedule.delays(download=1.0, upload=pt.schedule.exponential(2.0))
    return pt.schedule.asynchronous(concurrency=4, buffer=2, delays=delays)


def test_the_clock_runs_as_on_the_cpu() -> None:
    model, data, method = (
        pt.models.mlp(12, 8, 4),
        make_data((12,)),
        pt.persafl_me(lr=0.1, lam=5.0, inner_lr=0.05, inner_steps=3),
    )
    options = {
        "rounds": 9,
        "steps": 2,
        "batch": 4,
        "schedule": on_the_clock(),
        "baselines": False,
        "precision": "fp32",
    }
    cpu, gpu = (pt.federate(model, data, method, device=d, **options) for d in ("cpu", "cuda"))
    assert [row["time"] for row in cpu.metrics] == [row["time"] for row in gpu.metrics]
    for name, value in cpu.shared.items():
        torch.testing.assert_close(gpu.shared[name].cpu(), value, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("executor", ["loop", "vmap", "graph"])
@pytest.mark.parametrize("norm", ["global", "static"])
@pytest.mark.parametrize("kind", ["depth", "width", "fjord"])
def test_devices_of_different_capacity_as_on_the_cpu(kind: str, norm: str, executor: str) -> None:
    kinds = ["strong", "weak", "weak", "strong", "weak", "weak"]
    capacity = {
        "depth": lambda: pt.capacity.depth({"strong": 0, "weak": 7}, kinds),
        "width": lambda: pt.capacity.width({"strong": 1.0, "weak": 0.5}, kinds),
        "fjord": lambda: pt.capacity.fjord({"strong": 1.0, "weak": 0.5}, kinds),
    }[kind]()
    model, data = pt.models.resnet20(4, width=0.25), make_data((3, 8, 8))
    options = {
        "rounds": 2,
        "steps": 1,
        "batch": 4,
        "norm": norm,
        "capacity": capacity,
        "baselines": False,
        "precision": "fp32",
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "capacity: narrow models")
        cpu, gpu = (
            pt.federate(
                model, data, pt.fedavg(lr=0.05), executor=executor, device=d, progress=False, **options
            )
            for d in DEVICES
        )
    for name, value in cpu.shared.items():
        torch.testing.assert_close(gpu.shared[name].cpu(), value, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("schedule", [None, on_the_clock()], ids=["rounds", "asynchronous"])
@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("executor", ["vmap", "graph"])
def test_resume_has_the_same_bits(
    executor: str, store: str, schedule: pt.schedule.Schedule, tmp_path: object
) -> None:
    class Stop(pt.callbacks.Callback):
        def round(self, event: pt.callbacks.Event) -> None:
            if event.round == 3:
                raise InterruptedError

    options = {**OPTIONS, "rounds": 5, "cohort": 3, "device": "cuda"}
    options |= {"executor": executor, "store": store, "checkpoint_every": 1, "schedule": schedule}
    model, data, method = pt.models.mlp(12, 8, 4), make_data((12,)), pt.fedsim(personal="output", lr=0.1)
    straight = pt.federate(model, data, method, out=f"{tmp_path}/a", **options)
    with pytest.raises(InterruptedError):
        pt.federate(model, data, method, out=f"{tmp_path}/b", callbacks=[Stop()], **options)
    resumed = pt.federate(model, data, method, out=f"{tmp_path}/b", resume=True, **options)
    for name, value in straight.shared.items():
        assert torch.equal(resumed.shared[name], value)
    for i in range(6):
        for name, value in straight.client(i).personal.items():
            assert torch.equal(resumed.client(i).personal[name], value)


class Drawing(nn.Module):
    """Draws by itself, recomputes its first block, and normalizes with an activation."""

    def __init__(self, checkpointed: bool, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed, self.p = checkpointed, p
        self.block = nn.Sequential(nn.Linear(12, 8), _NormAct(8), nn.Linear(8, 8))
        self.output = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        found: torch.Tensor = self.output(nn.functional.dropout(h, self.p, self.training and self.p > 0))
        return found


class _NormAct(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_draws_of_the_model_are_those_of_the_seed() -> None:
    """On the GPU, too, and its generator is left as it was."""
    model, runs = Drawing(checkpointed=True, p=0.5), []
    for other in (1, 2):
        torch.manual_seed(other)
        before = torch.cuda.get_rng_state()
        runs.append(
            pt.federate(
                model, make_data((12,)), METHOD, norm="static", executor="loop", device="cuda", **OPTIONS
            )
        )
        assert torch.equal(torch.cuda.get_rng_state(), before)
    for name, value in runs[0].shared.items():
        assert torch.equal(runs[1].shared[name], value)


@pytest.mark.parametrize("norm", ["global", "static"])
def test_recomputed_blocks_and_subclasses_of_batchnorm_as_on_the_cpu(norm: str) -> None:
    data = make_data((12,))
    start = Drawing(False, 0.0)
    cpu = pt.federate(start, data, METHOD, norm=norm, executor="loop", device="cpu", **OPTIONS)
    for checkpointed, executor in ((True, "loop"), (False, "loop"), (False, "vmap"), (False, "graph")):
        model = Drawing(checkpointed, 0.0)
        model.load_state_dict(start.state_dict())
        gpu = pt.federate(model, data, METHOD, norm=norm, executor=executor, device="cuda", **OPTIONS)
        for name, value in cpu.shared.items():
            torch.testing.assert_close(gpu.shared[name].cpu(), value, atol=1e-3, rtol=1e-3)


class Long(nn.Module):
    """Attention among so many places that stacked clients take the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.output = nn.Linear(1, 48), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x.unsqueeze(-1)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2).mean(1))
        return found


@pytest.mark.parametrize("executor", ["vmap", "graph", "compiled"])
def test_long_attention_as_on_the_cpu(executor: str) -> None:
    places = FASTER_FROM["efficient"][4]
    model, data = Long(), make_data((places,))
    runs = [
        pt.federate(model, data, METHOD, executor=e, device=d, **OPTIONS)
        for e, d in (("loop", "cpu"), (executor, "cuda"))
    ]
    for name, value in runs[0].shared.items():
        torch.testing.assert_close(runs[1].shared[name].cpu(), value, atol=1e-4, rtol=1e-4)


# ---- convolutions as implicit products


CONVOLUTIONS = [(3, 16, 3, 1, 1), (16, 16, 3, 1, 1), (32, 32, 3, 1, 1), (16, 32, 3, 2, 1), (16, 32, 1, 2, 0)]
CONVOLUTIONS += [(1, 32, 5, 1, 2), (64, 64, 3, 1, 1), (32, 64, 3, 2, 1)]


def convolved(
    x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, stride: int, padding: int
) -> tuple[torch.Tensor, ...]:
    """A convolution of three clients, and its gradients for g, as a stacked step has them."""
    y = torch.nn.functional.conv2d(x, w, None, stride, padding, 1, 3)
    return y, *torch.ops.aten.convolution_backward(
        g, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 3, [True, True, False]
    )[:2]


@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_implicit_products_are_convolutions(shape: tuple[int, ...]) -> None:
    """As exactly as TF32 is, the same bits each time, and in a recording that goes on with other numbers."""
    channels, out, kernel, stride, padding = shape
    x = torch.randn(5, 3 * channels, 11, 11, device="cuda")
    w = torch.randn(3 * out, channels, kernel, kernel, device="cuda")
    g = torch.randn_like(torch.nn.functional.conv2d(x, w, None, stride, padding, 1, 3))

    def close(results: Any, factor: float) -> None:
        wanted = convolved(factor * x.double(), w.double(), g.double(), stride, padding)
        for found, value in zip(results, wanted):
            assert (found.double() - value).abs().max() <= 4e-3 * value.abs().max()

    with arithmetic("tf32"), torch.no_grad():
        traced = make_fx(lambda *given: convolved(*given, stride, padding))(x, w, g)
        assert implicit_count(traced) == 1
        step = compiled(make_fx(Implicit(traced).run)(x, w, g), [x, w, g])
        first, second = step(x, w, g), step(x, w, g)
        close(first, 1.0)
        for found, again in zip(first, second):
            assert torch.equal(found, again)
        graph, place = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            recorded = step(place, w, g)
        place.copy_(2 * x)
        graph.replay()
        close(recorded, 2.0)


def test_a_step_with_implicit_products_computes_the_same() -> None:
    data, model = make_data((3, 8, 8)), pt.models.resnet20(4, norm="group")
    options = {**OPTIONS, "precision": "tf32", "rounds": 1, "epochs": None, "steps": 1}
    start = {k: v.detach().clone() for k, v in model.named_parameters()}
    alone = pt.federate(model, data, METHOD, executor="loop", device="cpu", **options)
    found = pt.federate(model, data, METHOD, executor="compiled", device="cuda", **options)
    assert any("implicit products" in pick["why"] for pick in found.config["executor"]["picks"].values())
    for name, value in alone.shared.items():
        change, wanted = found.shared[name].cpu() - start[name], value - start[name]
        assert (change - wanted).abs().max() <= 0.03 * wanted.abs().max() + 1e-6, name


def test_implicit_products_that_are_recorded_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that short runs have is as exact as the operations recorded as they are."""
    data, model = make_data((3, 8, 8)), pt.models.resnet20(4, norm="group")
    options = {**OPTIONS, "rounds": 1, "epochs": None, "steps": 2}
    monkeypatch.setattr("partita.engine.execute.graph.COMPILED_SAVING", 1e6)
    monkeypatch.setattr(Captured, "seconds", lambda recording: {CAPTURED: 1.0, IMPLICIT: 0.5}[recording.form])

    def run(form: str, precision: str) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(Graph, "_forms", lambda *_: [form])
        settings = {**options, "precision": precision}
        found = pt.federate(model, data, METHOD, executor="graph", device="cuda", **settings)
        assert found.config["executor"]["picks"]["steps of training, stage 0"]["picked"] == form
        return {k: v.cpu() for k, v in found.shared.items()}

    def largest_errors(found: dict[str, torch.Tensor]) -> torch.Tensor:
        """The largest error of each tensor, as a share of the largest change."""
        pairs = [((found[k] - exact[k]).abs().max(), (exact[k] - start[k]).abs().max()) for k in exact]
        return torch.stack([error / change for error, change in pairs])

    start = {k: v.detach().clone() for k, v in model.named_parameters()}
    exact = run(CAPTURED, "fp32")
    plain, products = (largest_errors(run(form, "tf32")) for form in (CAPTURED, IMPLICIT))
    assert 0 < products.mean() <= 2 * plain.mean()
    assert products.max() <= 3 * plain.max()


# ---- runs in lockstep


@pytest.mark.parametrize("executor", ["vmap", "graph", "auto"])
def test_runs_in_lockstep_are_those_of_each_alone(executor: str) -> None:
    data = make_data((12,))

    def run(i: int) -> pt.Run:
        model, method = pt.models.mlp(12, 8, 4, seed=i), pt.fedalt("output", lr=0.05 * (i + 1))
        return pt.federate(model, data, method, seed=i, executor=executor, device="cuda", **OPTIONS)

    together = in_lockstep([partial(run, i) for i in range(3)], precision="fp32")
    for i, found in enumerate(together):
        for name, value in run(i).shared.items():
            torch.testing.assert_close(found.shared[name], value, atol=1e-5, rtol=1e-4)


# ---- workers

SPREAD: dict[str, tuple[Any, dict[str, Any]]] = {
    "sums": (METHOD, {}),
    "all deltas": (pt.fedavg(lr=0.05, aggregate=pt.aggregate.trimmed_mean(1)), {}),
    "recorded": (METHOD, {"executor": "graph"}),
    "measured": (METHOD, {"executor": "auto"}),
    "asynchronous": (pt.fedbuff(lr=0.05), {"schedule": pt.schedule.asynchronous(buffer=2), "rounds": 4}),
    "weak devices": (
        pt.fedavg(lr=0.05),
        {"capacity": pt.capacity.width({"strong": 1.0, "weak": 0.5}), "executor": "vmap"},
    ),
}


@pytest.mark.parametrize("kind", SPREAD)
def test_two_workers_share_a_gpu(kind: str) -> None:
    method, settings = SPREAD[kind]
    model, data, _ = of_kind("mlp")
    settings = {**OPTIONS, "executor": "vmap", "device": "cuda", **settings}
    alone = pt.federate(model, data, method, **settings)
    spread = pt.federate(model, data, method, workers=2, **settings)
    for name, value in alone.shared.items():
        assert torch.allclose(value, spread.shared[name], atol=1e-5), name
    each = spread.config["executor"]["workers"]["each"]
    assert sum(worker["shares"] for worker in each) > 0
    assert any(torch.cuda.get_device_name() == worker["device"] for worker in each)
