"""Augmentation in runs: the same for all executors, only in training, and never the same draw twice."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.augment.base import augmented
from partita.core import check, draws
from partita.data import FederatedData
from partita.engine.model import augmenting
from support import each

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 1, 6, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 40)
AUGMENT = pt.augment.compose(pt.augment.crop(1), pt.augment.flip(), pt.augment.noise(0.1))
FIXED: dict[str, Any] = {"baselines": False, "progress": False, "seed": 3}


def data() -> FederatedData:
    return pt.data.from_arrays(X, Y, RNG.permutation(np.arange(40) % 3), validation=0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def test_every_executor_sees_the_same_samples() -> None:
    samples = data()
    runs = [
        pt.federate(
            model(),
            samples,
            pt.fedavg(lr=0.2),
            rounds=3,
            epochs=2,
            batch=4,
            augment=AUGMENT,
            executor=executor,
            **FIXED,
        )
        for executor in ("loop", "vmap", "graph")
    ]
    for run in runs[1:]:
        assert all(torch.allclose(run.shared[k], v, atol=1e-6) for k, v in runs[0].shared.items())
    plain = pt.federate(model(), samples, pt.fedavg(lr=0.2), rounds=3, epochs=2, batch=4, **FIXED)
    assert not torch.allclose(plain.shared["1.weight"], runs[0].shared["1.weight"], atol=1e-3)


def test_steps_are_gradients_on_augmented_samples_and_scores_are_not() -> None:
    samples, seen = data(), []

    def recorded(x: Tensor, key: Tensor) -> Tensor:
        seen.append(1)
        return AUGMENT(x, key)

    run = pt.federate(
        model(), samples, pt.fedavg(lr=0.2), rounds=1, steps=2, augment=recorded, executor="loop", **FIXED
    )
    start, ends = model(), []
    for client in range(3):
        x, y = samples.client(client)
        key = draws.keys(3, "batches", 0, 0, np.array([client]))
        keys = torch.from_numpy(draws.fold(draws.fold(key, -1)[:, None], np.arange(2)))[0]
        own = model()
        for step in range(2):
            loss = nn.functional.cross_entropy(own(augmented(AUGMENT, x, keys[step])), y)
            gradient = torch.autograd.grad(loss, list(own.parameters()))
            with torch.no_grad():
                for p, g in zip(own.parameters(), gradient):
                    p -= 0.2 * g
        ends.append(dict(own.named_parameters()))
    weight = samples.sizes() / samples.sizes().sum()
    for name, _ in start.named_parameters():
        mean = sum(w * end[name] for w, end in zip(weight.tolist(), ends))
        assert torch.allclose(run.shared[name], mean, atol=1e-6)
    before = len(seen)
    scores = [
        float((run.model()(x).argmax(1) == y).float().mean())
        for x, y in (samples.client(i, "test") for i in range(3))
    ]
    expected = float(np.average(scores, weights=samples.sizes("test")))
    assert run.summary()["test"]["global"] == pytest.approx(expected)
    assert len(seen) == before


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    given: dict[str, Any] = {"steps": 2, "batch": 4, "augment": AUGMENT, **FIXED}
    samples = data()
    whole = pt.federate(model(), samples, pt.fedavg(lr=0.2), rounds=4, **given)
    pt.federate(model(), samples, pt.fedavg(lr=0.2), rounds=2, out=tmp_path, **given)
    with pytest.raises(check.Refused, match="augment"):
        pt.federate(
            model(),
            samples,
            pt.fedavg(lr=0.2),
            rounds=4,
            out=tmp_path,
            resume=True,
            **{**given, "augment": pt.augment.flip()},
        )
    resumed = pt.federate(model(), samples, pt.fedavg(lr=0.2), rounds=4, out=tmp_path, resume=True, **given)
    assert all(torch.equal(resumed.shared[k], v) for k, v in whole.shared.items())


def impure(x: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
    impure.calls = getattr(impure, "calls", 0) + 1  # type: ignore[attr-defined]
    return x + impure.calls  # type: ignore[attr-defined]


@each(
    ("augment", "message"),
    [
        (3, "augment=3"),
        (lambda x: x, "augment"),
        (lambda x, _: x[..., :3], "same shapes and types"),
        (lambda x, _: x.double(), "same shapes and types"),
        (lambda x, _: {"x": x}, "same shapes and types"),
        (lambda x, _: x + torch.randn_like(x), "from the key"),
        (lambda x, key: -x if key > 0 else x, "when samples are stacked"),
        (impure, "two results for one key"),
        (pt.augment.of("image", pt.augment.flip()), "x is a single input"),
    ],
)
def test_what_is_no_augmentation_is_refused_before_any_work(augment: Any, message: str) -> None:
    with pytest.raises(check.Refused, match=message):
        pt.federate(model(), data(), pt.fedavg(lr=0.2), rounds=1, augment=augment, **FIXED)


def test_devices_that_keep_what_frozen_blocks_made_refuse_it() -> None:
    deep = pt.models.mlp(36, 8, 8, 3)
    capacity = pt.capacity.depth({"strong": 0, "weak": 1})
    with pytest.raises(check.Refused, match="frozen blocks"):
        pt.federate(deep, data(), pt.fedavg(lr=0.2), rounds=1, augment=AUGMENT, capacity=capacity, **FIXED)


def test_sequences_have_one_width_so_that_draws_do_not_depend_on_others() -> None:
    frames = [RNG.normal(size=(n, 3)).astype(np.float32) for n in RNG.integers(2, 9, 24)]

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(3, 3)

        def forward(self, src: Tensor, src_key_padding_mask: Tensor) -> Tensor:
            return self.output((src * ~src_key_padding_mask.unsqueeze(-1)).sum(-2))

    torch.manual_seed(0)
    net, samples = Last(), pt.data.from_arrays({"src": frames}, Y[:24], np.arange(24) % 3)
    mask = pt.augment.of("src", pt.augment.time_mask(2, axis=0))
    runs = [
        pt.federate(
            net,
            samples,
            pt.fedavg(lr=0.1),
            rounds=2,
            epochs=1,
            batch=3,
            augment=mask,
            executor=executor,
            **FIXED,
        )
        for executor in ("loop", "vmap")
    ]
    assert torch.allclose(runs[0].shared["output.weight"], runs[1].shared["output.weight"], atol=1e-6)


class Frames(nn.Module):
    """A model that takes a mask."""

    def forward(self, frames: Tensor, attention_mask: Tensor) -> Tensor:
        return frames.sum((-2, -1)) / attention_mask.sum(-1)


def test_bands_of_time_lie_within_short_sequences() -> None:
    frames = [np.ones((n, 1), np.float32) for n in np.where(np.arange(200) % 2, 100, 5)]
    samples = pt.data.from_arrays({"frames": frames}, np.arange(200) % 3, np.zeros(200, int))
    mask = pt.augment.of("frames", pt.augment.time_mask(3, axis=0))
    x, _ = augmenting.prepared(mask, samples.masked_for(Frames())).client(0)
    length = x["attention_mask"].sum(1)
    left = [augmented(mask, x, torch.tensor(key))["frames"].sum((1, 2)) for key in range(5)]
    for n in (5, 100):
        hidden = torch.cat([row[length == n] < n for row in left]).double().mean()
        assert float(hidden) == pytest.approx(0.75, abs=0.06)  # a band has 0 to 3 steps


def test_the_mask_itself_is_an_input() -> None:
    frames = [np.ones((n, 1), np.float32) for n in (2, 5, 3, 9)]
    samples = pt.data.from_arrays({"frames": frames}, [0, 1, 0, 1], [0, 0, 1, 1], test=0, validation=0)
    augmenting.prepared(pt.augment.of("attention_mask", pt.augment.flip()), samples.masked_for(Frames()))


def test_sequences_without_a_mask_are_told_of() -> None:
    frames = [np.ones((n, 2), np.float32) for n in (2, 5, 3, 9)]
    samples = pt.data.from_arrays(frames, [0, 1, 0, 1], [0, 0, 1, 1], test=0, validation=0)
    for step, warned in ((pt.augment.time_mask(2, axis=0), True), (pt.augment.time_mask(1), False)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            augmenting.prepared(pt.augment.compose(step), samples)
        assert any("reaches into the padding" in str(w.message) for w in said) == warned
