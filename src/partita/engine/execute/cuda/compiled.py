"""Fused kernels for a list of operations, by inductor: compiled once, and kept on disk for other runs."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

MAX_KERNELS = 32
_kernels: dict[str, Callable[..., Any]] = {}
"""Those of this process, by the fingerprint of what was compiled."""


def compiled(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Return the same function of tensors of these shapes, in fewer and larger kernels."""
    key = fingerprint(graph, inputs)
    if key not in _kernels:
        while len(_kernels) >= MAX_KERNELS:
            del _kernels[next(iter(_kernels))]
        _kernels[key] = _compile(graph, inputs)
    return _kernels[key]


def was_compiled(graph: GraphModule, inputs: Sequence[Tensor], form: str) -> bool:
    """Return whether a note says that this was compiled before on this machine: then it takes little time."""
    return (_notes() / _name(graph, inputs, form)).exists()


def note_compiled(graph: GraphModule, inputs: Sequence[Tensor], form: str) -> None:
    """Note that the kernels are on disk now; without a place for notes they count as new."""
    try:
        _notes().mkdir(parents=True, exist_ok=True)
        (_notes() / _name(graph, inputs, form)).touch()
    except OSError:
        return


def loaded_from_disk() -> int:
    """Return how often this process has found kernels on disk that it would have compiled."""
    try:
        return int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
    except (AttributeError, KeyError, TypeError):  # another version counts otherwise
        return 0


def _name(graph: GraphModule, inputs: Sequence[Tensor], form: str) -> str:
    return f"{fingerprint(graph, inputs)}-{form.replace(', ', '-')}"


def fingerprint(graph: GraphModule, inputs: Sequence[Tensor]) -> str:
    """Return a hash of what kernels depend on: operations, constants, shapes, device, version."""
    digest = hashlib.sha256(graph.code.encode())
    for x in inputs:
        digest.update(repr((x.shape, x.stride(), x.dtype, x.device)).encode())
    for name in sorted({str(n.target) for n in graph.graph.nodes if n.op == "get_attr"}):
        value = functools.reduce(getattr, name.split("."), graph)
        digest.update(repr((getattr(value, "dtype", None), getattr(value, "shape", value))).encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    device = torch.cuda.get_device_name(inputs[0].device) if inputs[0].is_cuda else "cpu"
    products = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    repeatable = torch.are_deterministic_algorithms_enabled()
    digest.update(repr((torch.__version__, device, products, repeatable)).encode())
    return digest.hexdigest()[:32]


def _compile(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # inductor finds kernels that it made before only where shapes have an environment, and where its own
    # store is not left to torch.compile
    shapes = TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))
    with torch.no_grad(), warnings.catch_warnings(), tracing(shapes), _own_store():
        warnings.simplefilter("ignore")
        kernels: Callable[..., Any] = torch._inductor.compile(graph, list(inputs))
        return kernels


def _own_store() -> Any:
    from torch._functorch import config as functorch_config

    if not hasattr(functorch_config, "bundled_autograd_cache"):
        return warnings.catch_warnings()  # an older version: nothing to change
    return functorch_config.patch(bundled_autograd_cache=False)


def _notes() -> Path:
    from torch._inductor.runtime.runtime_utils import cache_dir  # type: ignore[attr-defined]

    return Path(cache_dir()) / "partita"
