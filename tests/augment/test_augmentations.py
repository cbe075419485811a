"""Each augmentation against a plain form for one sample, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import partita as pt
from partita import augment
from partita.augment.base import augmented
from partita.core import check, draws
from support import each

KEYS = [torch.tensor(k) for k in (3, 10**12, -5, 77, 1234)]
IMAGE = torch.arange(2 * 5 * 6, dtype=torch.float32).reshape(2, 5, 6)


def uniform(key: Tensor, *parts: int) -> float:
    for part in parts:
        key = draws.fold(key, part)
    return float(draws.uniform(key))


def test_crop_is_a_window_of_the_padded_image() -> None:
    places = set()
    for key in KEYS:
        padded = np.pad(IMAGE.numpy(), ((0, 0), (2, 2), (2, 2)), constant_values=9)
        top, left = (int(uniform(key, axis) * 5) for axis in (0, 1))
        expected = padded[:, top : top + 5, left : left + 6]
        assert np.array_equal(augment.crop(2, fill=9)(IMAGE, key).numpy(), expected)
        places.add((top, left))
    assert len(places) > 2


def test_every_place_of_a_crop_is_drawn_alike() -> None:
    keys = draws.fold(torch.tensor(1), torch.arange(9000))
    image = torch.zeros(1, 3, 3).index_put_(
        (torch.tensor(0), torch.tensor(1), torch.tensor(1)), torch.ones(())
    )
    moved = torch.func.vmap(lambda key: augment.crop(1)(image, key))(keys)[:, 0].mean(0)
    assert torch.allclose(moved, torch.full((3, 3), 1 / 9), atol=0.015)


def test_flip_is_the_mirror_image_as_often_as_asked() -> None:
    for key in KEYS:
        flipped = uniform(key) < 0.3
        expected = np.flip(IMAGE.numpy(), 1) if flipped else IMAGE.numpy()
        assert np.array_equal(augment.flip(0.3, axis=1)(IMAGE, key).numpy(), expected)
    assert torch.equal(augment.flip(1.0)(IMAGE, KEYS[0]), IMAGE.flip(-1))
    assert torch.equal(augment.flip(0.0)(IMAGE, KEYS[0]), IMAGE)


def test_noise_has_its_deviation_and_no_mean() -> None:
    noise = augment.noise(0.5)(torch.zeros(100, 100), KEYS[0])
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    assert augment.noise(0.5)(torch.zeros(3, dtype=torch.float64), KEYS[0]).dtype == torch.float64


@each(("make", "axis"), [(augment.time_mask, 2), (augment.frequency_mask, 1)])
def test_masks_replace_bands(make: Any, axis: int) -> None:
    widths = set()
    for key in KEYS:
        expected = np.moveaxis(IMAGE.numpy().copy(), axis, 0)
        for number in range(2):
            n = len(expected)
            width = int(uniform(key, number, 0) * (min(4, n) + 1))
            start = int(uniform(key, number, 1) * (n - width + 1))
            expected[start : start + width] = -1
            widths.add(width)
        got = make(4, count=2, value=-1.0)(IMAGE, key)
        assert np.array_equal(got.numpy(), np.moveaxis(expected, 0, axis))
    assert len(widths) > 2


def test_a_band_may_be_as_wide_as_the_axis() -> None:
    masked = [augment.time_mask(100)(torch.ones(2, 3), key) for key in draws.fold(KEYS[0], torch.arange(50))]
    assert {int(m[0].sum()) for m in masked} == {0, 1, 2, 3}


def test_composed_ones_follow_each_other_with_draws_of_their_own() -> None:
    both = augment.compose(augment.flip(), augment.flip())
    for key in KEYS:
        first = augment.flip()(IMAGE, draws.fold(key, 0))
        assert torch.equal(both(IMAGE, key), augment.flip()(first, draws.fold(key, 1)))


def test_one_of_several_inputs_is_changed() -> None:
    x = {"image": IMAGE, "mask": torch.ones(3)}
    changed = augment.of("image", augment.flip(1.0))(x, KEYS[0])
    assert torch.equal(changed["image"], IMAGE.flip(-1))
    assert changed["mask"] is x["mask"]
    pair = augment.of(1, augment.noise(1.0))((IMAGE, torch.zeros(4)), KEYS[0])
    assert torch.equal(pair[0], IMAGE)
    assert pair[1].abs().sum() > 0


REAL = torch.arange(8) < 5
LEFT = torch.arange(8) >= 3


@each("real", [REAL, LEFT])
def test_what_happens_along_time_leaves_padding_out(real: Tensor) -> None:
    frames = torch.arange(1.0, 17.0).reshape(8, 2)
    short, first = frames[real], int(real.long().argmax())
    for step in (
        augment.time_mask(3, axis=0),
        augment.flip(1.0, axis=0),
        augment.compose(augment.time_mask(2, count=2, axis=-2), augment.flip(axis=-2)),
    ):
        for key in KEYS:
            for x, name in (
                ({"src": frames, "src_key_padding_mask": ~real}, "src"),
                ({"frames": frames, "kind": torch.ones(2), "attention_mask": real.long()}, "frames"),
            ):
                changed = augment.of(name, step)(x, key)[name]
                assert torch.equal(changed[~real], frames[~real])
                assert torch.equal(changed[first : first + 5], step(short, key))


def test_a_mask_of_another_input_and_other_axes_do_not_matter() -> None:
    x = {"input_ids": torch.arange(8), "frames": torch.ones(8, 8), "attention_mask": REAL.long()}
    for key in KEYS:
        time = augment.time_mask(3, axis=0)
        assert torch.equal(augment.of("frames", time)(x, key)["frames"], time(x["frames"], key))
        features = augment.time_mask(3)
        other = {"src": x["frames"], "attention_mask": REAL.long()}
        assert torch.equal(augment.of("src", features)(other, key)["src"], features(other["src"], key))


def test_a_batch_is_augmented_sample_by_sample_whatever_comes_after() -> None:
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    both = augment.compose(augment.crop(2), augment.flip(), augment.noise(0.1), augment.time_mask(3))
    whole = augmented(both, x, KEYS[0])
    assert torch.equal(augmented(both, x[:4], KEYS[0]), whole[:4])
    stacked = torch.func.vmap(lambda x, key: augmented(both, x, key))(
        x.expand(5, *x.shape), torch.stack(KEYS)
    )
    for row, key in zip(stacked, KEYS):
        assert torch.equal(row, augmented(both, x, key))


@each(
    ("make", "message"),
    [
        (lambda: augment.crop(0), "padding=0"),
        (lambda: augment.flip(1.5), "p=1.5"),
        (lambda: augment.compose(), "at least one"),
        (lambda: augment.compose(3), "steps=3"),
        (lambda: augment.crop(1)({"a": IMAGE}, KEYS[0]), "of\\(name"),
        (lambda: augment.crop(1)(torch.ones(5), KEYS[0]), "2 axes or more"),
        (lambda: augment.noise(0.1)(torch.arange(3), KEYS[0]), "real numbers"),
        (lambda: augment.of("b", augment.flip())({"a": IMAGE}, KEYS[0]), "one of the inputs: 'a'"),
        (lambda: augment.of("b", augment.flip())((IMAGE, IMAGE), KEYS[0]), "one of the inputs: 0, 1"),
        (lambda: augment.of("b", augment.flip())(IMAGE, KEYS[0]), r"without of\(...\): x is a single input"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(check.Refused, match=message):
        make()


def test_they_are_settings_of_the_command_line() -> None:
    from partita.recipes.expressions import part

    assert part("augment", "crop(4)") == pt.augment.crop(4)
    assert part("augment", "compose(crop(4), flip())") == augment.compose(augment.crop(4), augment.flip())
    assert part("augment", "[crop(4), flip()]") == [augment.crop(4), augment.flip()]
