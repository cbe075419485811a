"""How much faster do models with attention train when their clients are stacked?

Each model trains with 8 clients one after another and stacked, round by round in turn, so that both
see the load of the machine. Compared are the fastest rounds. BERT and Llama need the package transformers.

    python bench/attention.py
    python bench/attention.py encoder vit --device cuda --executors loop vmap graph
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import partita as pt
from partita.engine.callbacks import Callback, Event

CLASSES, VOCABULARY, LENGTH = 4, 64, 16


class Work(NamedTuple):
    """A small model with attention, inputs of so many samples, and what must be said beside."""

    model: Callable[[], nn.Module]
    inputs: Callable[[np.random.Generator, int], Any]
    settings: dict[str, Any] = {}  # noqa: RUF012


class Encoder(nn.Module):
    """nn.TransformerEncoder with a linear layer at its end."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.encoder(x).mean(1))
        return logits


class ViT(nn.Module):
    """A small vision transformer: patches, an encoder whose norms come first, the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.position = nn.Parameter(torch.randn(1, 16, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(32), enable_nested_tensor=False)
        self.output = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.output(self.encoder(tokens).mean(1))
        return logits


def bert() -> nn.Module:
    """BERT of two layers, for classes."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
        )
    )


def llama() -> nn.Module:
    """Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def numbers(*shape: int) -> Callable[[np.random.Generator, int], Any]:
    """Return a function that draws so many samples of this shape."""
    return lambda draw, n: draw.normal(size=(n, *shape)).astype(np.float32)


def tokens(draw: np.random.Generator, n: int) -> Any:
    """Return texts of different lengths with their mask."""
    length = draw.integers(LENGTH // 2, LENGTH + 1, n)
    real = np.arange(LENGTH) < length[:, None]
    ids = np.where(real, draw.integers(1, VOCABULARY, (n, LENGTH)), 0)
    return {"input_ids": ids, "attention_mask": real.astype(np.int64)}


WORK = {
    "encoder": Work(Encoder, numbers(LENGTH, 32)),
    "vit": Work(ViT, numbers(3, 32, 32)),
    "bert": Work(bert, tokens),
    "llama": Work(llama, tokens, {"loss": "model"}),
}
FOREIGN = ("bert", "llama")


class Rounds(Callback):
    """The seconds of each round."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self._before = device, list[float](), time.perf_counter()

    def round(self, event: Event) -> None:  # noqa: ARG002
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self._before = now


def samples(work: Work, clients: int, each: int) -> pt.FederatedData:
    """Return the samples of all clients."""
    draw = np.random.default_rng(0)
    n = clients * each
    x = work.inputs(draw, n)
    y = draw.integers(0, CLASSES, n)
    if work.settings.get("loss") == "model":
        y = np.where(x["attention_mask"] > 0, x["input_ids"], -100)
    return pt.data.from_arrays(x, y, np.repeat(np.arange(clients), each), test=0.1, validation=0)


def seconds(work: Work, data: pt.FederatedData, executor: str, options: argparse.Namespace) -> float:
    """Return the seconds of the fastest of a few rounds."""
    torch.manual_seed(0)
    times = Rounds(options.device)
    run = pt.federate(
        work.model(),
        data,
        pt.fedavg(lr=0.05),
        rounds=options.rounds,
        steps=options.steps,
        batch=options.batch,
        executor=executor,
        device=options.device,
        evaluate_every=options.rounds,
        baselines=False,
        progress=False,
        callbacks=[times],
        **work.settings,
    )
    fallback = run.config["executor"]["picks"].get("fallback")
    if executor != "loop" and fallback:
        raise SystemExit(f"{executor}: {fallback['why']}")
    return min(times.seconds[1:-1])  # the first compiles, the last is evaluated


def main() -> None:
    """A line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = [name for name in WORK if name not in FOREIGN or importlib.util.find_spec("transformers")]
    parser.add_argument("models", nargs="*", default=here, help=", ".join(WORK))
    parser.add_argument("--executors", nargs="+", default=["loop", "vmap"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    for name in options.models:
        data = samples(WORK[name], options.clients, 40)
        turns = [
            [seconds(WORK[name], data, e, options) for e in options.executors] for _ in range(options.turns)
        ]
        best = dict(zip(options.executors, map(min, zip(*turns))))
        first = options.executors[0]
        told = [
            f"{e} {x * 1e3:.0f} ms" + (f" ({best[first] / x:.1f} times)" if e != first else "")
            for e, x in best.items()
        ]
        print(
            f"{name}: a round of {options.clients} clients in {options.steps} steps: {', '.join(told)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
