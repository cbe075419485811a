"""Settings of all tests."""

from __future__ import annotations

import torch

# One thread: the models are tiny, several test runs share a machine, and sums keep one order.
torch.set_num_threads(1)
