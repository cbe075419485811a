"""Parts of a run among real clients: transforms, weak devices, norms, aggregators, samples of all forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deployed import (
    Recorded,
    assert_same,
    bits_of_deployment,
    bits_of_simulation,
    clients_of,
    deployed,
    experiment,
    simulated,
    without_times,
)
from torch import Tensor, nn

import partita as pt
import small
from algorithms.test_every_algorithm import CASES, SINGLE, make
from partita.core import draws
from partita.core.parts import Release, Transform
from partita.core.secret import Secret
from partita.core.types import Message, Tensors, Upload
from partita.deploy import Client, Local, serve
from partita.deploy.wire import part_of, unpack
from partita.engine.store.addresses import Addresses
from support import each

T, LR = pt.transforms, 0.1


def same(made: Any, folder: Path, **options: Any) -> pt.Run:
    """Compare a run with its simulation: bits, rows, and the model of each client."""
    run, clients = deployed(made, folder, out=None, **options)
    alone = simulated(made)
    assert_same(bits_of_simulation(alone), bits_of_deployment(run, clients))
    assert without_times(alone) == without_times(run)
    for i, client in enumerate(clients.values()):
        assert_same(alone.personalized(i), client.model())
    return run


# ---- transforms


def clipped(limit: float) -> Transform:
    """Clip uploads, and release their sum with noise: what privacy does, in a few lines."""

    def shortened(message: Message) -> Message:
        total = torch.stack([(x * x).sum() for x in message.numbers.values()]).sum().sqrt()
        scale = (limit / total).clamp(max=1.0)
        return Message({k: x * scale for k, x in message.numbers.items()}, message.rest)

    def release(given: Release) -> tuple[Upload, Tensors, Tensors]:
        def noisy(name: str, x: Tensor) -> Tensor:
            key = draws.branch(given.key, name)
            return x + 0.01 * draws.normal(draws.places(key, x.shape)).to(x.dtype)

        total = given.total
        delta = {k: noisy(k, x) for k, x in total.delta.items()}
        return total._replace(delta=delta), {}, {}

    return Transform(
        "clipped",
        {"limit": limit},
        encode=lambda message, public, key: shortened(message),  # noqa: ARG005
        accept=lambda message, public: shortened(message),  # noqa: ARG005
        release=release,
        lossy=False,
        for_sums="it is released",
    )


UPLOADS = {
    "topk": [T.topk(0.3)],
    "quantize": [T.quantize(bits=4)],
    "half": [T.half()],
    "low rank": [T.low_rank(1)],
    "randk": [T.randk(0.3)],
    "two": [T.topk(0.3), T.half()],
    "released": [clipped(0.05)],
    "private": [pt.privacy.gaussian(noise=1.0, clip=0.1)],
    "private and short": [pt.privacy.gaussian(noise=1.0, clip=0.1), T.topk(0.4, feedback=False)],
}


@each("name", UPLOADS, slow=lambda name: name in ("half", "low rank", "randk", "two"))
def test_uploads_are_sent_as_their_transforms_encode_them(name: str, tmp_path: Path) -> None:
    transports: list[Recorded] = []

    def made(clients: Mapping[str, Client]) -> Recorded:
        transports.append(Recorded(clients))
        return transports[-1]

    run = same(experiment(uploads=UPLOADS[name]), tmp_path, transport=made, secret=0)  # the seed
    assert run.outcome is not None
    uploads = [m for m in transports[0].messages if unpack(m, 1 << 30)[0]["kind"] == "upload"]
    sizes = {len(unpack(m, 1 << 30)[1]["sent"]) for m in uploads}
    assert sizes == {run.outcome.stage.bytes_up[0]}
    assert not any(part_of(unpack(m, 1 << 30)[1], "delta") for m in uploads)


def test_noise_is_a_secret_of_the_server(tmp_path: Path) -> None:
    """It does not follow from the seed, which clients have; a resumed run draws the same."""
    made = experiment(uploads=[pt.privacy.gaussian(noise=1.0, clip=0.1)], checkpoint_every=1)
    poisson = replace(made, schedule=pt.schedule.synchronous("poisson"), cohort=1, rounds=8)
    runs = [deployed(made, tmp_path / str(i))[0] for i in range(2)]
    with pytest.raises(AssertionError):
        assert_same(runs[0].shared, runs[1].shared)
    kept = (tmp_path / "0" / "out" / "deployment" / "run.json").read_text()
    assert runs[0].outcome is not None
    secret = runs[0].outcome.stage.setup.secret
    assert isinstance(secret, Secret)
    assert secret.bit_length() > 200
    assert str(secret) in kept
    others = [p for p in (tmp_path / "0").rglob("*") if p.is_file() and p.name != "run.json"]
    assert not any(str(secret).encode() in p.read_bytes() for p in others)
    again, _ = deployed(made, tmp_path / "again", secret=secret)
    assert_same(again.shared, runs[0].shared)
    resumed, _ = deployed(replace(made, rounds=3), tmp_path / "0", resume=True)
    assert resumed.outcome is not None
    assert resumed.outcome.stage.setup.secret == secret
    several = (1, 2, 1 << 200, (1 << 200) + 1)  # not random ones: two cohorts may be alike by chance
    turns = []
    for i, number in enumerate(several):
        run, _ = deployed(poisson, tmp_path / f"p{i}", secret=number)
        turns.append((run.column("reports").tolist(), [row["bytes_up"] for row in run.metrics]))
    for i in range(4):
        assert turns[i] not in turns[:i]  # nor does it follow from the seed who takes part
    plain, _ = deployed(experiment(), tmp_path / "plain")
    assert plain.outcome is not None
    assert plain.outcome.stage.setup.secret is None


def test_what_transforms_cannot_have_sent_is_set_aside(tmp_path: Path) -> None:
    from test_faults import edited, lying

    def longer(head: dict[str, Any], tensors: Tensors) -> None:  # noqa: ARG001
        tensors["sent"] = torch.cat([tensors["sent"], tensors["sent"][:1]])

    def beyond(head: dict[str, Any], tensors: Tensors) -> None:  # noqa: ARG001
        tensors["sent"] = torch.full_like(tensors["sent"], 255)

    for edit in (longer, beyond):
        made = experiment(uploads=[T.topk(0.3)])
        run, _ = deployed(made, tmp_path / edit.__name__, lying(edited(edit)), out=None)
        assert list(run.facts["excluded_why"]) == ["bob"], edit
        assert "what it sent" in run.facts["excluded_why"]["bob"]


def test_downloads_pass_their_transforms(tmp_path: Path) -> None:
    transports: list[Recorded] = []

    def made(clients: Mapping[str, Client]) -> Recorded:
        transports.append(Recorded(clients))
        return transports[-1]

    same(experiment(downloads=[T.half()], rounds=2), tmp_path, transport=made)
    trained = [m for m in transports[0].messages if unpack(m, 1 << 30)[0]["kind"] == "train"]
    assert all(set(unpack(m, 1 << 30)[1]) == {"sent"} for m in trained)


# ---- weak devices


CAPACITIES = {
    "width": pt.capacity.width({"strong": 1.0, "weak": 0.5}),
    "depth": pt.capacity.depth({"strong": 0, "weak": 1}),
}
ON_DEVICES = {"fedavg": pt.fedavg(LR), "fedalt": small.method(), "scaffold": pt.scaffold(LR)}


@each("name", ON_DEVICES, slow=lambda name: name == "scaffold")
@pytest.mark.parametrize("kind", CAPACITIES)
def test_a_weak_device_trains_its_part(kind: str, name: str, tmp_path: Path) -> None:
    transports: list[Recorded] = []

    def made(clients: Mapping[str, Client]) -> Recorded:
        transports.append(Recorded(clients))
        return transports[-1]

    run = same(experiment(capacity=CAPACITIES[kind], algorithm=ON_DEVICES[name]), tmp_path, transport=made)
    assert run.outcome is not None
    classes = run.outcome.stage.setup.devices.class_of
    sizes: dict[int, set[int]] = {}
    for message in transports[0].messages:
        head, tensors = unpack(message, 1 << 30)
        if head["kind"] == "train":
            numbers = sum(x.numel() for x in tensors.values())
            sizes.setdefault(int(classes[head["number"]]), set()).add(numbers)
    if kind == "width":
        assert max(sizes[1]) < min(sizes[0])  # the weak ones receive less


@pytest.mark.slow
def test_a_weak_device_with_an_own_copy_of_the_whole_model(tmp_path: Path) -> None:
    for kind, capacity in CAPACITIES.items():
        same(experiment(capacity=capacity, algorithm=pt.ditto(LR)), tmp_path / kind)
        packed = experiment(capacity=capacity, uploads=[T.topk(0.4)])
        same(packed, tmp_path / f"{kind} packed")


# ---- everything else that a run may be composed of


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(1, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.as_tensor(self.a(a) + self.b(b))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(9, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.output(self.embedding(x).mean(1)))


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.as_tensor(nn.functional.cross_entropy(output, target, label_smoothing=0.1))


def composed() -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    arrays = small.arrays()
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 9, n).astype(np.int64) for n in rng.integers(2, 7, 24)]
    two = {**arrays, "x": {"a": arrays["x"], "b": arrays["x"][:, :1]}}
    return {
        "norm global": {"model": normed(), "algorithm": pt.fedavg(LR), "norm": "global"},
        "norm personal": {"model": normed(), "algorithm": pt.fedavg(LR), "norm": "personal"},
        "median": {"algorithm": pt.fedavg(LR, aggregate=pt.aggregate.coordinate_median())},
        "krum": {"algorithm": pt.fedavg(LR, aggregate=pt.aggregate.krum(0))},
        "server": {"algorithm": pt.fedadam(LR, server_lr=0.05)},
        "loss": {"loss": own_loss},
        "metrics": {"metric": ["accuracy", "auc"]},
        "augment": {"augment": lambda x, key: x + 0.1 * draws.uniform(key)},
        "dropout": {
            "model": nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)),
            "algorithm": pt.fedavg(LR),
        },
        "validation": {"data": small.data(validation=0.3)},
        "converged": {"data": small.data(validation=0.3), "until": "converged", "patience": 1, "rounds": 4},
        "double": {"data": small.data(x=arrays["x"].double()), "model": small.model().double()},
        "two inputs": {"model": TwoInputs(), "data": pt.data.from_arrays(**two), "algorithm": pt.fedavg(LR)},
        "words": {
            "model": Words(),
            "data": pt.data.from_arrays(**{**arrays, "x": texts}),
            "algorithm": pt.fedavg(LR),
        },
        "own steps": {"steps": (1, 3, 2)},
        "factory": {"model": small.model, "seed": 5},
        "names of classes": {"data": small.data(y=np.where(arrays["y"].numpy() == 0, "no", "yes"))},
        "training scores": {"train_scores": True},
    }


@each("name", composed())
def test_parts_do_what_they_do_in_a_simulation(name: str, tmp_path: Path) -> None:
    same(experiment(**{"rounds": 2, **composed()[name]}), tmp_path)


# ---- what leaves a client


PRIVATE: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": make(name, case.options)} for name, case in CASES.items()},
    "with feedback": {"algorithm": pt.fedalt("output", LR), "uploads": [T.topk(0.3)]},
    "quantized": {"algorithm": pt.ditto(LR), "uploads": [T.quantize(bits=8)]},
    "in stages": {
        "algorithm": pt.pipeline(
            pt.stage(pt.fedavg(LR), rounds=1),
            pt.stage(pt.fedalt("output", LR), rounds=1),
            pt.stage(pt.ditto(LR), rounds=1),
            pt.stage(pt.finetune("all", LR), epochs=1),
        ),
        "rounds": None,
    },
}
"""Every method, and what transforms and stages keep at a client."""


@each("name", PRIVATE)
def test_no_64_bytes_of_a_personal_part_are_in_any_message(name: str, tmp_path: Path) -> None:
    """In none that a client sends, and in none that the server sends after the part was saved.

    What the server had sent before is no secret: a part begins as the server's model, and where nothing has
    trained it, in units that are never active for example, it still is. Zeros are nobody's.
    """
    from partita.deploy.states import States

    transports: list[Recorded] = []
    secret: list[tuple[Tensor, int]] = []  # with the number of messages that there were when it was saved
    save = States.save

    def made(clients: Mapping[str, Client]) -> Recorded:
        transports.append(Recorded(clients))
        return transports[-1]

    def saving(self: States, address: Any, state: Any) -> None:
        kept = [*state.personal.values()]
        if (
            name != "scaffold"
        ):  # the change of its control variate is what it sends, and the first is all of it
            kept += state.memory.values()
        secret.extend((value.clone(), len(transports[0].messages)) for value in kept)
        save(self, address, state)

    shape = {"model": pt.models.mlp(6, 24, 4, seed=1), "data": SINGLE, "rounds": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(States, "save", saving)
        deployed(experiment(**{**shape, **PRIVATE[name]}), tmp_path / name, made, out=None)
    replies = transports[0].arrived
    sent = _windows(b"\n".join(replies)) - {bytes(64)}
    own: dict[bytes, int] = {}
    for value, when in secret:
        own |= dict.fromkeys(_windows(_bytes(value), 4) - own.keys() - {bytes(64)}, when)
    assert not own.keys() & sent
    known = set(replies)
    for number, message in enumerate(transports[0].messages):
        if message not in known:  # the server's
            shown = own.keys() & _windows(message)
            assert all(own[window] > number for window in shown), (number, unpack(message, 1 << 30)[0])
            for window in shown:  # it is known now
                own[window] = len(transports[0].messages)
    bodies = [x for m in replies for x in unpack(m, 1 << 30)[1].values() if x.nbytes >= 64 and x.any()]
    assert all(_bytes(x)[:64] in {*sent, bytes(64)} for x in bodies)  # it would be found
    assert bool(bodies) == (name not in ("local", "finetune"))  # which send nothing


def _bytes(x: Tensor) -> bytes:
    return bytes(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _windows(blob: bytes, step: int = 1) -> set[bytes]:
    """All runs of 64 bytes."""
    return {blob[i : i + 64] for i in range(0, len(blob) - 63, step)}


class Nothing:
    """A site that lets no number leave."""

    def allows(self, number: str) -> bool:  # noqa: ARG002
        return False


class NoTest:
    def allows(self, number: str) -> bool:
        return number != "test"


@each("site, told", [(Nothing(), 0), (NoTest(), 1)])
def test_numbers_leave_only_as_the_site_allows(site: Any, told: int, tmp_path: Path) -> None:
    made = experiment()
    clients = clients_of(made, tmp_path)
    clients["bob"] = Client(made, "bob", made.data, tmp_path / "clients" / "1", site=site)
    run = serve(made, list(clients), Local(clients), None, report=False)
    alone = simulated(made)
    assert_same(bits_of_simulation(alone), bits_of_deployment(run, clients))  # training goes on as ever
    scores = run.scores("personal")
    assert np.isnan(scores).tolist() == [False, True, False]
    losses = run.outcome.state.counters.clock.turns.loss if run.outcome else np.zeros(3)
    assert np.isnan(losses).tolist() == [False, not told, False]
    assert run.metrics[-1]["train_loss"] is not None


def test_a_client_exports_its_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = experiment()
    run, clients = deployed(made, tmp_path)
    again = clients_of(made, tmp_path)["bob"]  # another process, later
    path = again.export(tmp_path / "bob.safetensors")
    assert path.stat().st_mode & 0o777 == 0o600
    assert_same(load_file(path), simulated(made).personalized(1))
    assert isinstance(run.store, Addresses)
    with pytest.raises(pt.Refused, match="when its run ended"):
        Client(made, "bob", made.data, tmp_path / "nobody").export(tmp_path / "x.safetensors")
    other = Client(experiment(seed=3), "bob", made.data, clients["bob"].folder)
    with pytest.raises(pt.Refused, match="that of the run"):
        other.export(tmp_path / "x.safetensors")


def test_nothing_is_computed_on_a_server(tmp_path: Path) -> None:
    run, _ = deployed(experiment(), tmp_path, out=None)
    with pytest.raises(pt.Refused, match="never has a client's personal part"):
        run.evaluate(small.data(), "global")
    unknown = ("distance", "label_shift", "input_z", "label_z")
    assert all(run.column(name) is None for name in unknown)
    assert run.facts["majority"] is None
