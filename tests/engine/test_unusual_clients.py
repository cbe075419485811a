"""Who has inputs or labels unlike the others', at a bounded cost."""

from __future__ import annotations

import numpy as np
import torch

from partita.data import FederatedData
from partita.engine.unusual_clients import PER_CLIENT, _sampled, unusual_clients
from support import each


def data_of(x: torch.Tensor, clients: int) -> FederatedData:
    n = len(x) // clients
    ranges = np.stack([np.arange(clients) * n, np.full(clients, n)], axis=1)
    return FederatedData.make(x, torch.zeros(len(x), dtype=torch.int64), ranges)


@each("features", [5, 300])
def test_shifted_inputs_are_found_and_nobody_else(features: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20 * 30, features, generator=draw)
    assert unusual_clients(data_of(x, 20), None).sentences == {}
    x[3 * 30 : 4 * 30] += 2.0 * torch.randn(features, generator=draw)
    found = unusual_clients(data_of(x, 20), None)
    assert list(found.sentences) == ["3"]
    assert found.sentences["3"][0].startswith("its inputs are unlike")
    assert int(np.nanargmax(found.columns["input_z"])) == 3


def test_a_label_mix_of_its_own_is_found() -> None:
    counts = np.full((20, 4), 25)
    counts[7] = [97, 1, 1, 1]
    found = unusual_clients(data_of(torch.zeros(40, 2), 20), counts)
    assert list(found.sentences) == ["7"]
    assert found.columns["label_z"][7] > found.columns["label_z"][0]


def test_no_more_samples_are_read_than_needed_and_no_tokens() -> None:
    sampled = _sampled(data_of(torch.randn(2 * 1000, 3), 2))
    assert sampled is not None
    assert len(sampled[0]) == 2 * PER_CLIENT
    assert _sampled(data_of(torch.zeros(40, 3, dtype=torch.int64), 2)) is None
