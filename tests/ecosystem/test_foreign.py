"""Foreign models run as they are: stacked as alone, the same seed the same run, resumed the same bits."""

from __future__ import annotations

import math
import re
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import table
import torch
from foreign import MODELS, Foreign
from torch import Tensor

import partita as pt
from partita.core import tree
from partita.engine.callbacks import Callback, Event

TOLERANCE = 1e-5
ALONE = {
    "T5, classes": r"the shape of a result depends on the values of a tensor \(aten::unique_consecutive\)",
}
"""Models whose clients cannot be stacked, and what the message must say."""


def run(foreign: Foreign, executor: str, **options: Any) -> pt.Run:
    """Return a run in which every client trains a model of its own, on its samples alone."""
    model, data = foreign.build(), foreign.samples()
    if foreign.double:
        model, data = model.double(), replace(data, x=tree.map_tensors(Tensor.double, data.x))
    given: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch": 3, "seed": 1}
    given |= {"baselines": False, "progress": False, "executor": executor, **foreign.settings, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(cannot be stacked|norm= was not chosen)")
        return pt.federate(model, data, pt.local(lr=0.05), **given)


def tensors(run: pt.Run, client: int) -> dict[str, Tensor]:
    return {k: v for k, v in run.client(client).personal.items() if v.is_floating_point()}


def difference(run: pt.Run, reference: pt.Run, start: dict[str, Tensor]) -> float:
    """Return how far updates of clients, losses in training and scores are apart, relative to their size."""
    apart = [
        _relative(r[kind], s[kind])
        for r, s in zip(run.metrics, reference.metrics, strict=True)
        for kind in ("train_loss", "test.personal")
    ]
    for i in range(len(run.clients)):
        mine, theirs = tensors(run, i), tensors(reference, i)
        update = {k: v - start[k] for k, v in theirs.items()}
        assert tree.norm(update) > 0
        apart.append(float(tree.norm(tree.sub(mine, theirs)) / tree.norm(update)))
    assert all(map(math.isfinite, apart)), apart
    return max(apart)


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / (abs(expected) or 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_stacked_is_alone(name: str, row: Any) -> None:
    """With dropout and stochastic depth, and with short batches: clients have 3 to 5 samples, batches 3."""
    foreign = MODELS[name]
    stacked, loop = run(foreign, "vmap"), run(foreign, "loop")
    start = {k: v.double() if foreign.double else v for k, v in foreign.build().state_dict().items()}
    apart = difference(stacked, loop, start)
    refusal = stacked.config["executor"]["picks"].get("fallback", {}).get("why", "")
    said = ", ".join(f"`{k}={v!r}`".replace("'", '"') for k, v in foreign.settings.items())
    row(
        name,
        package=foreign.package,
        executor="one by one" if refusal else "stacked",
        difference="none" if not apart else f"{apart:.0e}" + (" (float64)" if foreign.double else ""),
        say=said or "nothing",
    )
    assert apart <= TOLERANCE
    if name in ALONE:
        assert re.search(ALONE[name], refusal), refusal
    else:
        assert not refusal


def test_the_table_of_the_document_is_up_to_date(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write"):
        pytest.skip("it is written at the end")
    rows = table.read()
    assert list(rows) == list(MODELS)
    for name, foreign in MODELS.items():
        assert rows[name]["package"] == foreign.package
        assert rows[name]["executor"] == ("one by one" if name in ALONE else "stacked")
    assert len(rows) >= 30
    assert len(rows) - len(ALONE) >= 24


SEVERAL = ["vit", "timm vit_tiny", "efficientnet_b0", "BERT", "LoRA on Llama", "LSTM"]


class Stop(Callback):
    def round(self, event: Event) -> None:
        if event.round == 1:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_the_same_seed_and_a_resumed_run_have_the_same_bits(name: str, executor: str, tmp_path: Path) -> None:
    foreign, options = MODELS[name], {"rounds": 2, "checkpoint_every": 1, "out": tmp_path / "run"}
    straight = run(foreign, executor, rounds=2)
    torch.manual_seed(99)
    with pytest.raises(KeyboardInterrupt):
        run(foreign, executor, callbacks=[Stop()], **options)
    torch.manual_seed(100)
    resumed = run(foreign, executor, resume=True, **options)
    for i in range(len(straight.clients)):
        for k, v in tensors(straight, i).items():
            assert torch.equal(v, tensors(resumed, i)[k]), (i, k)
    assert [r["train_loss"] for r in straight.metrics] == [r["train_loss"] for r in resumed.metrics]


def test_another_seed_draws_other_masks() -> None:
    foreign = MODELS["timm vit_tiny"]
    first, second = (run(foreign, "vmap", seed=seed, batch=None) for seed in (1, 2))
    assert first.metrics[0]["train_loss"] != second.metrics[0]["train_loss"]
