"""The same as byzfl 0.0.11, where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from unittest.mock import MagicMock

import pytest
import torch

from partita import aggregate as agg
from reference.definitions import combine

if importlib.util.find_spec("byzfl") is not None:
    for name in ("torchvision", "seaborn", "matplotlib"):  # its datasets and plots want them, we do not
        if importlib.util.find_spec(name) is None:
            sys.modules |= {name: MagicMock(), f"{name}.pyplot": MagicMock()}

byzfl = pytest.importorskip("byzfl", reason="byzfl is not installed: pip install --no-deps byzfl==0.0.11")
X = torch.randn(11, 40, generator=torch.Generator().manual_seed(0))


def ours(rule) -> torch.Tensor:
    return combine(rule, {"x": X}).delta["x"]


def test_coordinate_median_and_trimmed_mean() -> None:
    torch.testing.assert_close(ours(agg.coordinate_median()), byzfl.Median()(X))
    torch.testing.assert_close(ours(agg.trimmed_mean(3)), byzfl.TrMean(3)(X))


def test_geometric_median() -> None:
    torch.testing.assert_close(ours(agg.geometric_median()), byzfl.GeometricMedian(nu=1e-6, T=300)(X))


def test_krum() -> None:
    """byzfl counts one neighbour more: n − f − 1 others."""
    torch.testing.assert_close(ours(agg.krum(2)), byzfl.Krum(3)(X))


def test_mixing() -> None:
    torch.testing.assert_close(ours(agg.nnm(3, agg.coordinate_median())), byzfl.Median()(byzfl.NNM(3)(X)))


def test_one_step_of_clipping() -> None:
    theirs = byzfl.CenteredClipping(L=1, tau=4.0)
    theirs.m = X.median(0).values  # of an odd number: our start
    torch.testing.assert_close(ours(agg.centered_clipping(4.0, 1)), theirs(X))
