"""Attacks in runs: who lies, what the files say, and that all else stays as it is."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from algorithms.test_every_algorithm import CASES, make
from partita.algorithms import METHODS
from partita.core.parts import Algorithm, Attack
from partita.core.types import Cohort, ServerState, Upload
from partita.engine.settings import byzantine_clients
from partita.schedule import Running, StageSpec
from support import Stop, each, tensors

NAMES = ["ann", "bob", "cid", "dot", "eve", "fay"]
LR = 0.2
ATTACKS: dict[str, Attack] = {
    name: getattr(pt.attack, name)()
    for name in ("sign_flip", "alie", "ipm", "mimic", "gaussian", "nonfinite", "malformed", "label_flip")
}
every_attack = each("attack", ATTACKS.values(), ids=ATTACKS)


def data(sizes: tuple[int, ...] = (9, 7, 5, 8, 6, 4)) -> pt.data.FederatedData:
    """Six clients with 4 features, 3 classes and 5 test samples each."""
    rng = np.random.default_rng(0)
    n, clients = sum(sizes), len(sizes)
    y = rng.integers(0, 3, n + 5 * clients)
    x = rng.normal(size=(3, 4))[y] + 0.6 * rng.normal(size=(len(y), 4))
    ends = np.cumsum(sizes)
    train = [(int(e) - s, s) for e, s in zip(ends, sizes)]
    test = [(n + 5 * i, 5) for i in range(clients)]
    return pt.data.FederatedData.make(x.astype(np.float32), y, train, test, names=NAMES[:clients])


def federate(algorithm: Algorithm | None = None, model: nn.Module | None = None, **settings: Any) -> pt.Run:
    given: dict[str, Any] = {"rounds": 4, "batch": 4, "evaluate_every": 1, "executor": "loop"}
    given |= {"baselines": False, "progress": False, "byzantine": ["bob", "eve"], "report": False}
    given |= {"attack": ATTACKS["sign_flip"], **settings}
    source = given.pop("data", None) or data()
    model = model or pt.models.mlp(4, 5, 3, seed=1)
    return pt.federate(model, source, algorithm or pt.fedavg(LR), **given)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for k in a:
        assert torch.equal(a[k], b[k]), k


def rows(run: pt.Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in run.metrics]


# ---- who lies


def test_a_share_is_drawn_by_the_seed() -> None:
    names = [str(i) for i in range(40)]
    found = [byzantine_clients(0.25, ATTACKS["alie"], names, seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert [len(set(f)) for f in found] == [10, 10, 10]
    for share in (np.float32(0.25), np.float64(0.25), torch.tensor(0.25)):
        assert byzantine_clients(share, ATTACKS["alie"], names, 0) == found[0]


@each(
    "byzantine",
    [[1, 4], (4, 1), {1, 4}, ["bob", "eve"], ["eve", 1], np.array([1, 4]), [np.int64(4), 1, 1, "bob"]],
    ids=str,
)
def test_byzantine_clients_by_number_or_name(byzantine: Any) -> None:
    assert byzantine_clients(byzantine, ATTACKS["alie"], NAMES, 0) == (1, 4)


def test_a_share_counts_clients() -> None:
    run = federate(byzantine=0.34)
    assert sum(row["byzantine"] for row in run.clients) == 2
    assert run.config["settings"]["byzantine"] == [i for i, r in enumerate(run.clients) if r["byzantine"]]


# ---- what they change


def test_no_attack_is_the_run_without_byzantine_clients() -> None:
    """A Byzantine client that sends what it computed makes no difference."""
    honest = Attack("honest", lambda uploads, byzantine, key: {}, None, {})  # noqa: ARG005
    same = pt.attack.sign_flip(1.0)
    assert_same(tensors(federate(attack=honest)), tensors(federate(attack=None, byzantine=())))
    assert any(
        not torch.equal(a, b)
        for a, b in zip(federate(attack=same).shared.values(), federate(attack=honest).shared.values())
    )


def test_sign_flip_of_one_round_by_hand() -> None:
    """w¹ = w⁰ − Σ n_i s_i Δ_i / Σ n_i with s_i = −1 for Byzantine clients."""
    start = pt.models.mlp(4, 5, 3, seed=1).state_dict()
    sizes = data().sizes()
    ends = [federate(attack=None, byzantine=(), rounds=1, schedule=Only(i)).shared for i in range(6)]
    run = federate(rounds=1)
    for k, w in start.items():
        deltas = torch.stack([w - end[k] for end in ends]).double()
        signs = torch.tensor([1, -1, 1, 1, -1, 1.0]) * torch.as_tensor(sizes)
        expected = w - (deltas * signs.reshape(-1, *[1] * w.dim())).sum(0) / sizes.sum()
        torch.testing.assert_close(run.shared[k], expected.float(), rtol=1e-5, atol=1e-6)


class Only:
    """Rounds of one client."""

    def __init__(self, client: int) -> None:
        self.client = client

    def check(self, clients: int, cohort: int) -> None:
        """Any number fits."""

    def of(self, algorithm: Algorithm) -> Only:  # noqa: ARG002
        return self

    def begin(self, spec: StageSpec) -> Running:
        turns = pt.schedule.synchronous().begin(spec)
        whole = turns.next

        def one(server: ServerState) -> Cohort:
            found = whole(server)
            group = found.groups[0]._replace(positions=(0,))
            alone = {"staleness": (0,), "delays": found.delays[:1]}
            return found._replace(clients=(self.client,), groups=(group,), **alone)

        turns.next = one
        return turns


@every_attack
def test_what_happens_depends_on_the_seed_only(attack: Attack) -> None:
    torch.manual_seed(1)
    first = federate(attack=attack, cohort=4)
    torch.manual_seed(2)
    again, other = federate(attack=attack, cohort=4), federate(attack=attack, cohort=4, seed=7)
    assert_same(tensors(first), tensors(again))
    assert rows(first) == rows(again)
    assert rows(first) != rows(other)


@every_attack
def test_loop_equals_vmap(attack: Attack) -> None:
    for method in (pt.fedavg(LR), pt.fedalt("output", LR)):
        loop, vmap = (federate(method, attack=attack, cohort=4, executor=e) for e in ("loop", "vmap"))
        a, b = tensors(loop), tensors(vmap)
        for k in a:
            torch.testing.assert_close(a[k], b[k], atol=1e-5, rtol=0, msg=k)
        assert loop.summary()["excluded_why"] == vmap.summary()["excluded_why"]
        assert [r["train_loss"] for r in loop.metrics] == pytest.approx(
            [r["train_loss"] for r in vmap.metrics]
        )


@every_attack
def test_blocks_of_clients_make_no_difference(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byzantine clients know the whole cohort, also where it is trained in parts."""
    whole = federate(pt.fedalt("output", LR), attack=attack)
    monkeypatch.setattr("partita.engine.stage.BLOCK_CLIENTS", 2)
    assert_same(tensors(whole), tensors(federate(pt.fedalt("output", LR), attack=attack)))


@each("name", [name for name in METHODS if name in CASES])
def test_every_method_under_attack(name: str) -> None:
    run = federate(make(name, CASES[name].options), cohort=5, rounds=2)
    assert all(torch.isfinite(x).all() for x in tensors(run).values() if x.is_floating_point())
    assert run.summary()["byzantine"]["clients"] == 2
    assert run.summary()["test"]["personal"] is not None


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


@every_attack
@pytest.mark.parametrize("norm", ["global", "personal"])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_model_with_counters(attack: Attack, norm: str, executor: str) -> None:
    run = federate(model=with_norm(), attack=attack, norm=norm, executor=executor, rounds=2, batch=3)
    state = run.model(personal="mean" if norm == "personal" else None).state_dict()
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert int(state["1.num_batches_tracked"]) >= 0
    assert all(torch.isfinite(x).all() for x in state.values() if x.is_floating_point())


@every_attack
def test_a_cohort_of_byzantine_clients_only(attack: Attack) -> None:
    run = federate(attack=attack, byzantine=[0, 1, 2, 3, 4], cohort=1, rounds=6)
    assert run.summary()["rounds"] == run.metrics[-1]["round"] == 6
    scored = [row for row in run.clients if not row["byzantine"]]
    assert run.summary()["test"]["personal"] == scored[0]["personal"]


def test_a_share_of_nobody() -> None:
    with pytest.raises(
        ValueError, match=r"byzantine=0\.1: expected a share of at least one of the 4 clients"
    ):
        byzantine_clients(0.1, ATTACKS["alie"], NAMES[:4], 0)


def test_byzantine_clients_with_many_samples_are_not_called_greedy() -> None:
    large = data((2, 3000, 2, 2, 1500, 2))
    run = federate(data=large, attack=pt.attack.sign_flip(0.1), batch=512, rounds=2)
    assert run.summary()["excluded"] == []
    run = federate(data=large, attack=pt.attack.sign_flip(0.1), schedule=Only(1), batch=512, rounds=2)
    assert run.summary()["excluded"] == []


@every_attack
def test_clients_without_data(attack: Attack) -> None:
    run = federate(data=data((9, 7, 0, 8, 0, 4)), attack=attack)
    assert all(torch.isfinite(x).all() for x in run.shared.values())


def test_an_attack_sends_for_byzantine_clients_only() -> None:
    def everyone(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        broken = Upload({k: x[0] * float("nan") for k, x in uploads.delta.items()})
        return dict.fromkeys((*range(6), 77), broken)

    run = federate(attack=Attack("everyone", everyone, None, {}))
    assert run.summary()["excluded"] == ["bob", "eve"]


STRANGE: dict[str, Any] = {
    "nothing": None,
    "a number": 3,
    "a list": [1, 2],
    "a tuple": (1, 2, 3, 4, 5),
    "no names": Upload(None),  # type: ignore[arg-type]
    "a list of tensors": Upload([torch.zeros(2)]),  # type: ignore[arg-type]
}


@each("what", STRANGE)
def test_an_attack_may_send_anything(what: str) -> None:
    forge: Callable[..., Any] = lambda uploads, byzantine, key: dict.fromkeys(byzantine, STRANGE[what])  # noqa: ARG005, E731
    run = federate(attack=Attack("strange", forge, None, {}))
    assert run.summary()["excluded"] == ["bob", "eve"]
    assert all(run.summary()["excluded_why"].values())


# ---- what is told


def test_the_files_say_who_lies(tmp_path: Path) -> None:
    out = tmp_path / "run"
    attack = pt.attack.malformed("weight")
    run = federate(pt.fedalt("output", LR), out=out, attack=attack, baselines=True)
    with (out / "clients.csv").open(newline="") as f:
        assert [row["byzantine"] for row in csv.DictReader(f)] == list("010010")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["byzantine"]["clients"] == 2
    assert summary["byzantine"]["attack"] == "malformed"
    assert summary["excluded"] == ["bob", "eve"]
    assert summary["excluded_why"] == {"bob": "weight -1", "eve": "weight -1"}
    config = json.loads((out / "config.json").read_text())
    assert config["attack"] == {"name": "malformed", "how": "weight"}
    assert config["settings"]["byzantine"] == [1, 4]
    for name in ("global", "local"):
        below = json.loads((out / "baselines" / name / "config.json").read_text())
        assert below["attack"] == config["attack"]
        assert below["settings"]["byzantine"] == [1, 4]
    again = pt.load(out)
    assert [row["byzantine"] for row in again.clients] == [0, 1, 0, 0, 1, 0]
    assert again.summary() == run.summary()


def test_without_byzantine_clients_nothing_is_said() -> None:
    run = federate(attack=None, byzantine=())
    assert run.summary()["byzantine"] is None
    assert run.summary()["excluded_why"] == {}
    assert run.config["attack"] is None
    assert [row["byzantine"] for row in run.clients] == [0] * 6


@pytest.mark.parametrize("attack", [ATTACKS["sign_flip"], ATTACKS["label_flip"]], ids=lambda a: a.name)
def test_scores_are_of_the_honest(attack: Attack) -> None:
    run = federate(pt.fedalt("output", LR), attack=attack, baselines=True, train_scores=True)
    summary = run.summary()
    honest = [row for row in run.clients if not row["byzantine"]]
    dishonest = [row for row in run.clients if row["byzantine"]]
    assert summary["scored"] == 4
    for kind in ("local", "global", "personal"):
        assert summary["test"][kind] == pytest.approx(np.mean([row[kind] for row in honest]))
        assert summary["byzantine"]["test"][kind] == pytest.approx(np.mean([row[kind] for row in dishonest]))
    for kind in ("local", "global"):
        assert summary["hurt"][f"vs_{kind}"] == sum(row["personal"] < row[kind] for row in honest)
    assert run.metrics[-1]["test.personal"] == summary["test"]["personal"]


def test_the_training_loss_is_of_the_honest() -> None:
    """In the first round everyone starts from the same model, and Byzantine clients train as others do."""
    sizes, honest = data().sizes(), [0, 2, 3, 5]
    own = [
        federate(attack=None, byzantine=(), rounds=1, schedule=Only(i)).metrics[0]["train_loss"]
        for i in range(6)
    ]
    expected = np.average([own[i] for i in honest], weights=sizes[honest])
    assert federate(rounds=1).metrics[0]["train_loss"] == pytest.approx(expected)


def test_poisoned_labels_change_nothing_that_is_told_of_others() -> None:
    clean, run = federate(attack=None, byzantine=()), federate(attack=ATTACKS["label_flip"])
    assert [r["label_shift"] for r in run.clients] == [r["label_shift"] for r in clean.clients]
    assert run.config["data"]["fingerprint"] == clean.config["data"]["fingerprint"]
    assert not torch.equal(run.shared["output.linear.bias"], clean.shared["output.linear.bias"])


def test_baselines_are_under_the_same_attack() -> None:
    found = federate(pt.fedalt("output", LR), baselines=True)
    average = federate(pt.fedavg(LR))
    np.testing.assert_array_equal(found.scores("global"), average.scores("global"))
    clean = federate(pt.fedavg(LR), attack=None, byzantine=())
    assert not np.array_equal(found.scores("global"), clean.scores("global"))
    poisoned = federate(pt.fedalt("output", LR), baselines=True, attack=ATTACKS["label_flip"])
    turns = pt.schedule.synchronous(order="turns")
    alone = federate(pt.local(LR), attack=ATTACKS["label_flip"], schedule=turns)
    np.testing.assert_array_equal(poisoned.scores("local"), alone.scores("personal"))


# ---- stages and resumption

STAGES = pt.pipeline(
    pt.stage(pt.fedavg(LR), rounds=2),
    pt.stage(pt.fedalt("output", LR), rounds=3, cohort=3),
    pt.stage(pt.finetune("output", LR), epochs=1),
)


@every_attack
def test_stages_under_attack(attack: Attack) -> None:
    run = federate(STAGES, attack=attack)
    assert run.metrics[-1]["round"] == 6
    assert all(torch.isfinite(x).all() for x in tensors(run).values())
    if attack.name in ("nonfinite", "malformed"):
        assert run.summary()["excluded"] == ["bob", "eve"]


@every_attack
@pytest.mark.parametrize(
    ("method", "error"),
    [pytest.param(pt.fedalt("output", LR), RuntimeError, marks=pytest.mark.slow, id="alt"), (STAGES, None)],
)
def test_resumed_equals_straight(
    attack: Attack, method: Algorithm, error: type[BaseException] | None, tmp_path: Path
) -> None:
    same: dict[str, Any] = {"attack": attack, "checkpoint_every": 2, "rounds": 5, "cohort": 4}
    same |= {"byzantine": 0.34, "seed": 5}
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        federate(method, out=tmp_path / "run", callbacks=[Stop(3, error)], **same)
    resumed = federate(method, out=tmp_path / "run", resume=True, **same)
    straight = federate(method, **same)
    assert_same(tensors(resumed), tensors(straight))
    assert rows(resumed) == rows(straight)
    assert resumed.clients == straight.clients
    for key in ("excluded", "excluded_why", "byzantine", "test"):
        assert resumed.summary()[key] == straight.summary()[key]


def test_a_run_goes_on_under_the_same_attack_only(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        federate(out=tmp_path / "run", callbacks=[Stop(3, RuntimeError)], checkpoint_every=1)
    with pytest.raises(ValueError, match="its attack"):
        federate(out=tmp_path / "run", resume=True, attack=pt.attack.sign_flip(2.0))
    with pytest.raises(ValueError, match=r"its settings .*byzantine"):
        federate(out=tmp_path / "run", resume=True, byzantine=["bob"])
