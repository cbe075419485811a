"""Hash the results of many short runs, so that a change of the machinery can be shown to change no bit.

    python tests/golden.py record golden.json      before the change
    python tests/golden.py compare golden.json     after it, on the same machine

Hashes depend on the machine and on the number of threads, so they are never committed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import partita as pt

TIMES = ("seconds",)


class Normalized(nn.Module):
    """A small convolutional network with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(4 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x.view(-1, 1, 8, 8))))
        return self.fc(self.drop(x.flatten(1)))


def data() -> pt.data.FederatedData:
    """Twelve clients with three digits each."""
    return pt.data.digits(clients=12, partition=pt.data.label_skew(classes=3), validation=0, seed=1)


def mlp() -> nn.Module:
    return pt.models.mlp(64, 16, 10)


def wide() -> nn.Module:
    return pt.models.mlp(64, 32, 16, 10)


def delays() -> Any:
    """Slow and fast clients, of whom some drop out."""
    return pt.schedule.delays(
        compute=pt.schedule.exponential(1.0), upload=pt.schedule.uniform(0.1, 0.5), dropout=0.1
    )


def runs(**all_of_them: Any) -> dict[str, Callable[[Path], pt.Run]]:
    """The runs by name; each gets an empty folder. `all_of_them` are settings of every run."""
    made: dict[str, Callable[[Path], pt.Run]] = {}

    def add(name: str, algorithm: Any, model: Callable[[], nn.Module] = mlp, **given: Any) -> None:
        settings = {
            "rounds": 4, "cohort": 6, "steps": 3, "batch": 8, "seed": 3, "executor": "vmap", "device": "cpu",
            "baselines": False, "evaluate_every": 2, "progress": False, "report": False, **given,
            **all_of_them,
        }  # fmt: skip
        made[name] = lambda out: pt.federate(
            model,
            data(),
            algorithm,
            **({**settings, "out": out} if settings.pop("keep", False) else settings),
        )

    methods = {
        "local": pt.local(lr=0.1),
        "fedavg": pt.fedavg(lr=0.1, momentum=0.9),
        "fedprox": pt.fedprox(lr=0.1, mu=0.1),
        "fedadam": pt.fedadam(lr=0.1, server_lr=0.01),
        "fedsim": pt.fedsim(personal="output", lr=0.1),
        "fedalt": pt.fedalt(personal="output", lr=0.1),
        "ditto": pt.ditto(lr=0.1, lam=0.1),
        "pfedme": pt.pfedme(lr=0.1, lam=5.0, inner_steps=3, inner_lr=0.05),
        "perfedavg": pt.perfedavg(lr=0.1, alpha=0.05),
        "apfl": pt.apfl(lr=0.1),
        "l2gd": pt.l2gd(lr=0.1, lam=0.1, p=0.3),
        "scaffold": pt.scaffold(lr=0.1),
        "fedplus": pt.fedavg_plus(lr=0.1, sigma=0.1),
        "rfa": pt.rfa(lr=0.1),
        "ffgg": pt.ffgg(personal="output", lr=0.1, solver=pt.gd(lr=0.1, steps=5)),
        "pipeline": pt.pipeline(
            pt.stage(pt.fedavg(lr=0.1), rounds=2), pt.stage(pt.finetune(personal="all", lr=0.05), epochs=1)
        ),
    }
    for name, algorithm in methods.items():
        add(f"{name}, vmap", algorithm)
    for executor in ("loop", "pool", "graph"):
        add(f"fedalt, {executor}", methods["fedalt"], executor=executor)
        add(f"scaffold, {executor}", methods["scaffold"], executor=executor)
    add("fedalt, BatchNorm", methods["fedalt"], Normalized)
    add("fedavg, BatchNorm, loop", methods["fedavg"], Normalized, executor="loop")
    add("fedavg, BatchNorm, static", methods["fedavg"], Normalized, norm="static")
    add("ditto, BatchNorm, personal", methods["ditto"], Normalized, norm="personal")
    for name in ("fedasync", "fedbuff"):
        add(
            f"{name}, asynchronous",
            getattr(pt, name)(lr=0.1),
            schedule=pt.schedule.asynchronous(delays=delays()),
            rounds=12,
        )
    add(
        "fedalt, asynchronous",
        methods["fedalt"],
        schedule=pt.schedule.asynchronous(buffer=3, delays=delays()),
        rounds=8,
    )
    add(
        "persafl, asynchronous",
        pt.persafl_me(lr=0.1, lam=5.0, inner_steps=3, inner_lr=0.05),
        rounds=8,
        schedule=pt.schedule.asynchronous(delays=delays()),
    )
    add(
        "fedavg, deadline",
        methods["fedavg"],
        schedule=pt.schedule.synchronous(deadline=4.0, quorum=2, late="apply", delays=delays()),
    )
    add("fedavg, depth", methods["fedavg"], wide, capacity=pt.capacity.depth({"strong": 0, "weak": 1}))
    add("fedalt, width", methods["fedalt"], wide, capacity=pt.capacity.width({"strong": 1.0, "weak": 0.5}))
    add("fedavg, fjord", methods["fedavg"], wide, capacity=pt.capacity.fjord({"strong": 1.0, "weak": 0.5}))
    robust = pt.aggregate.bucketing(2, pt.aggregate.trimmed_mean(1))
    add(
        "sign flip, bucketing",
        pt.fedavg(lr=0.1, aggregate=robust),
        attack=pt.attack.sign_flip(),
        byzantine=0.25,
        cohort=None,
    )
    add(
        "gaussian, layerwise",
        pt.fedalt(personal="output", lr=0.1, aggregate=pt.aggregate.krum(2)),
        cohort=None,
        attack=pt.attack.gaussian(1.0),
        byzantine=[0, 1],
    )
    add("measures", methods["fedalt"], measures=[pt.measures.gradient_norm()])
    add("baselines", methods["fedalt"], baselines=True)
    add("disk", methods["ditto"], store="disk", keep=True)

    def killed(out: Path, algorithm: Any, **given: Any) -> pt.Run:
        class Kill(pt.callbacks.Callback):
            def round(self, event: Any) -> None:
                if event.round == 3:
                    raise KeyboardInterrupt

        settings = {
            "rounds": 6, "cohort": 6, "steps": 3, "batch": 8, "seed": 3, "executor": "vmap", "device": "cpu",
            "baselines": False, "evaluate_every": 2, "progress": False, "report": False,
            "checkpoint_every": 2, "out": out, **given, **all_of_them,
        }  # fmt: skip
        try:
            pt.federate(mlp, data(), algorithm, callbacks=[Kill()], **settings)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("nobody stopped it")
        return pt.federate(mlp, data(), algorithm, resume=True, **settings)

    made["fedalt, killed"] = lambda out: killed(out, methods["fedalt"], store="disk")
    made["fedbuff, killed"] = lambda out: killed(
        out, pt.fedbuff(lr=0.1), schedule=pt.schedule.asynchronous(delays=delays()), rounds=12
    )
    return made


def digest(run: pt.Run) -> str:
    """Hash all that a run found: weights, clients' models, scores and counts, but no times."""
    found = hashlib.sha256()

    def tensors(some: dict[str, torch.Tensor]) -> None:
        for name in sorted(some):
            found.update(name.encode() + some[name].detach().cpu().contiguous().numpy().tobytes())

    tensors(run.shared)
    for client in range(len(run.clients)):
        tensors(run.client(client).personal)
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in run.metrics]
    summary = run.summary()
    scores = {k: summary[k] for k in ("test", "hurt", "bytes_up", "bytes_down", "excluded")}
    found.update(json.dumps([rows, scores], sort_keys=True, default=str).encode())
    return found.hexdigest()[:16]


def main(verb: str, path: str) -> int:
    """Record the hashes, or compare them with those that were recorded."""
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    before = json.loads(Path(path).read_text()) if verb == "compare" else {}
    found = {}
    for name, run in runs().items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = digest(run(Path(folder) / "run"))
        print(f"{name:32} {found[name]} {'' if before.get(name, found[name]) == found[name] else 'DIFFERS'}")
    if verb == "record":
        Path(path).write_text(json.dumps(found, indent=1))
    different = [name for name in {**before, **found} if before and before.get(name) != found.get(name)]
    print(f"{len(found)} runs, {len(different)} differ: {different}")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
