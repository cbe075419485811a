"""What else one would do with the same samples: train ONE model on them, of all clients in one batch.

Not federated, and so no rival: it says what as many samples and steps cost where nothing differs by client.
On a GPU the model is compiled.
"""

from __future__ import annotations

import time
import warnings

import torch
from torch.nn import functional as F

from partita.cli.bench.textbook import wait
from partita.cli.bench.workloads import LR, Workload
from partita.data import FederatedData
from partita.data.columns import in_memory


def one_model(work: Workload, data: FederatedData, device: str, rounds: int) -> list[float]:
    """Return the seconds of each round after one that warms up. `data` are on the device."""
    model = work.model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = in_memory(data.x, "the bench"), data.y

    def loss(index: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x[index]).flatten(0, -2), y[index].flatten())

    compiled = torch.compile(loss) if device != "cpu" else loss
    generator = torch.Generator().manual_seed(0)
    seconds = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            clients = torch.randperm(work.clients, generator=generator)[: work.cohort]
            first, n = data.train[clients.numpy()].T
            order = torch.stack([torch.randperm(int(k), generator=generator) for k in n])
            rows = (order + torch.from_numpy(first)[:, None]).to(device)
            for i in range(work.steps):
                optimizer.zero_grad()
                compiled(rows[:, i * work.batch : (i + 1) * work.batch].reshape(-1)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            wait(device)
            seconds.append(time.perf_counter() - begin)
    return seconds[1:]
