"""The loop that anyone would write: load the state, make an optimizer, take the steps, add to the average."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn import functional as F

from partita.cli.bench.workloads import LR, Workload
from partita.data import FederatedData
from partita.data.columns import in_memory


def textbook(work: Workload, data: FederatedData, device: str, rounds: int) -> list[float]:
    """Return the seconds of each round. `data` are on the device."""
    model = work.model().to(device)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        total: dict[str, Tensor] = {}
        weight = 0
        for client in torch.randperm(work.clients, generator=generator)[: work.cohort].tolist():
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            first, n = data.train[client].tolist()
            x, y = in_memory(data.x, "the bench")[first : first + n], data.y[first : first + n]
            order = torch.randperm(n, generator=generator).to(device)
            for i in range(0, n, work.batch):
                index = order[i : i + work.batch]
                optimizer.zero_grad()
                F.cross_entropy(model(x[index]).flatten(0, -2), y[index].flatten()).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            weight += n
            for k, v in model.state_dict().items():
                total[k] = total[k] + v * n if k in total else v * n
        state = {k: v / weight for k, v in total.items()}
        wait(device)
        seconds.append(time.perf_counter() - begin)
    return seconds


def wait(device: str) -> None:
    """Wait until the GPU has done all its work."""
    if device != "cpu":
        torch.cuda.synchronize()
