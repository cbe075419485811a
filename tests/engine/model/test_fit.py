"""What a model, its outputs and its targets are told when they do not fit each other."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import partita as pt


class Reader(nn.Module):
    """Scores of the words at each position, from the word that stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.words(input_ids))
        return scores


def federate(ids: list[np.ndarray], labels: list[np.ndarray], **settings: Any) -> list[str]:
    """Return what a run on these sequences warns of."""
    data = pt.data.from_arrays({"input_ids": ids}, labels, np.repeat(np.arange(3), 20), test=0.25)
    work = {"rounds": 1, "steps": 1, "batch": 4, "baselines": False, "progress": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pt.federate(Reader, data, pt.fedavg(lr=0.1), **work, **settings)
    return [str(w.message) for w in told if "copy what it reads" in str(w.message)]


@pytest.mark.parametrize("marked", [False, True])
def test_labels_that_are_the_inputs_are_told(marked: bool) -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 20, n) for n in rng.integers(3, 9, 60)]
    labels = [np.where(np.arange(len(i)) == 0, -100, i) if marked else i for i in ids]
    (text,) = federate(ids, labels)
    assert "loss='next_token'" in text
    assert not federate(ids, labels, loss="next_token")
    assert not federate(ids, [(i + 1) % 20 for i in ids])
