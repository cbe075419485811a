"""Settings of all tests."""

from __future__ import annotations

import os

# Tests compare with numbers of the CPU; PARTITA_TEST_CUDA=1 lets tests/test_cuda.py see the GPU.
if not os.environ.get("PARTITA_TEST_CUDA"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import hypothesis
import pytest
import torch

# A test may draw as it likes: module level and each test begin from one seed, on every machine, so that
# what passes here passes there. `make test-all` lets hypothesis search anew.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")
torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)


# One thread: the models are tiny, several test runs share a machine, and sums keep one order.
torch.set_num_threads(1)
