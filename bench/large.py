"""Memory of federated LoRA on a large frozen base: what a run takes beside the model.

    python bench/large.py --device cuda --billions 8 --executors loop vmap

The base has random weights, the same in every block: nothing is learned, and memory is what it would be.
"Beside the model" is the peak of what is allocated during a run, less the model; on a CPU it is the peak of
the process.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import resource
import time

import numpy as np
import torch

import partita as pt
from partita.core import tree

VOCABULARY = 32_000


def base(billions: float, length: int, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """Return a causal transformer of about so many parameters, frozen."""
    width = 4096 if billions >= 2 else 1024 if billions >= 0.05 else 256
    hidden = 4 * width
    block = 4 * width**2 + 2 * width * hidden
    depth = max(1, round((billions * 1e9 - VOCABULARY * width) / block))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        small = pt.models.transformer(
            VOCABULARY, length=length, width=width, hidden=hidden, depth=1, heads=width // 64
        ).to(device)
    finally:
        torch.set_default_dtype(before)
    # weights are drawn on the CPU, which takes minutes for billions: all blocks begin with those of the first
    parts = dict(small.named_children())
    blocks = {f"block{i}": copy.deepcopy(parts["block0"]) for i in range(depth)}
    model = pt.models.Blocks(
        {"embed": parts["embed"], **blocks, "head": parts["head"]},
        input_part=["block0"],
        output_part=[f"block{depth - 1}"],
    )
    return model.requires_grad_(False)


def samples(clients: int, length: int, batch: int) -> pt.FederatedData:
    """Return texts of random tokens."""
    rng = np.random.default_rng(0)
    n = 2 * batch
    ids = rng.integers(0, VOCABULARY, (clients * n, length))
    test = np.tile(np.arange(n) >= n - 2, clients)
    return pt.data.from_arrays(ids, ids, np.repeat(np.arange(clients), n), test=test, validation=0)


def peak(device: str) -> int:
    """Return the most bytes that were allocated so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--billions", type=float, default=0.1, help="parameters of the base")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--memory", default=None, help="for stacked clients, such as 20GiB")
    parser.add_argument("--executors", nargs="+", default=["loop", "vmap"])
    options = parser.parse_args()
    frozen = base(options.billions, options.length, options.device, getattr(torch, options.dtype))
    model = pt.models.add_adapters(frozen, "lora", rank=options.rank, where=["*.query", "*.value"])
    data = samples(options.clients, options.length, options.batch)
    size = tree.nbytes(dict(model.named_parameters()))
    adapters = tree.nbytes({k: p for k, p in model.named_parameters() if p.requires_grad})
    count = sum(math.prod(p.shape) for p in model.parameters())
    print(f"base {count / 1e9:.2f} billion parameters, {size / 1e9:.2f} GB; adapters {adapters / 1e6:.1f} MB")
    federate = functools.partial(
        pt.federate, model, data, pt.fedavg(lr=1e-3, optimizer=pt.optim.adamw()), rounds=2, steps=2,
        batch=options.batch, loss="next_token", metric="perplexity", device=options.device,
        memory=options.memory, baselines=False, progress=False,
    )  # fmt: skip
    for executor in options.executors:
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = size if options.device == "cuda" else peak(options.device)
        begin = time.perf_counter()
        run = federate(executor=executor)
        seconds = time.perf_counter() - begin
        trained = peak(options.device) - start
        models = [run.client(i).model() for i in range(options.clients)]
        whole = peak(options.device) - start
        print(
            f"{executor:5} beside the model {trained / 1e9:.2f} GB = {trained / size:.2f} of it; with the "
            f"models of {len(models)} clients {whole / size:.2f}; {seconds:.0f} s, {run.config['executor']}"
        )


if __name__ == "__main__":
    main()
