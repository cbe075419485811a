"""Settings of all tests."""

from __future__ import annotations

import os

# Tests compare with numbers of the CPU; PARTITA_TEST_CUDA=1 lets tests/test_cuda.py see the GPU.
if not os.environ.get("PARTITA_TEST_CUDA"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

# One thread: the models are tiny, several test runs share a machine, and sums keep one order.
torch.set_num_threads(1)
