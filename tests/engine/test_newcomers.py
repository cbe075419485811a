"""Clients that come after training: each method's own rule, against a plain form of it and training."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import partita as pt
from partita.core import check
from support import each, tensors

Params = dict[str, Tensor]
HEAD = ("output.linear.weight", "output.linear.bias")
LR, LAM, STEPS, TURNS = 0.2, 0.3, 3, 2


def samples(clients: int, seed: int) -> pt.data.FederatedData:
    """Return clients of 8 samples, two of them for testing, whose labels depend on one feature each."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(clients * 8, 4, generator=g)
    y = (x[torch.arange(len(x)), torch.arange(len(x)) // 8 % 4] > 0).long()
    test = torch.arange(len(x)) % 8 < 2
    names = [f"{'old' if seed == 0 else 'new'}{i // 8}" for i in range(len(x))]
    return pt.data.from_arrays(x, y, names, test=test.numpy())


def model() -> nn.Module:
    return pt.models.mlp(4, 3, 2, seed=0).double()


def trained(algorithm: pt.Algorithm, **changed: Any) -> pt.Run:
    given = {"rounds": 4, "steps": STEPS, "executor": "vmap", "baselines": False, **changed}
    return pt.federate(model(), doubles(samples(5, 0)), algorithm, **given)


def doubles(data: pt.data.FederatedData) -> pt.data.FederatedData:
    return pt.data.FederatedData.make(data.x.double(), data.y, data.train, data.test, names=data.names)


def new() -> pt.data.FederatedData:
    return doubles(samples(3, 1))


# ---- plainly: torch, one client after another, the full batch


class Plain:
    """f_i of a client, and its gradient."""

    def __init__(self, data: pt.data.FederatedData, client: int) -> None:
        self.x, self.y = data.client(client)
        self.net = model()

    def grad(self, w: Params) -> Params:
        moving = {k: v.detach().clone().requires_grad_() for k, v in w.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(self.net, moving, (self.x,)), self.y)
        return dict(zip(moving, torch.autograd.grad(loss, list(moving.values()))))

    def accuracy(self, w: Params, data: pt.data.FederatedData, client: int) -> float:
        x, y = data.client(client, "test")
        return float((torch.func.functional_call(self.net, w, (x,)).argmax(1) == y).double().mean())


def server(run: pt.Run) -> Params:
    return {**run.base, **run.shared}


def head_only(f: Plain, run: pt.Run) -> Params:
    w = server(run)
    for _ in range(STEPS * TURNS):
        g = f.grad(w)
        w = {k: v - LR * g[k] if k in HEAD else v for k, v in w.items()}
    return w


def near(f: Plain, run: pt.Run) -> Params:
    center, v = server(run), server(run)
    for _ in range(STEPS * TURNS):
        g = f.grad(v)
        v = {k: x - LR * (g[k] + LAM * (x - center[k])) for k, x in v.items()}
    return v


def inner(f: Plain, run: pt.Run) -> Params:
    center, v = server(run), server(run)
    for _ in range(STEPS * TURNS * 2):  # K = 2 for each of the steps
        g = f.grad(v)
        v = {k: x - LR * (g[k] + LAM * (x - center[k])) for k, x in v.items()}
    return v


def mixture(f: Plain, run: pt.Run) -> Params:
    w, v, alpha = server(run), server(run), torch.tensor(0.5, dtype=torch.float64)
    for _ in range(STEPS * TURNS):
        g = f.grad({k: alpha * v[k] + (1 - alpha) * w[k] for k in w})
        slope = sum((((v[k] - w[k]) * g[k]).sum() for k in w), torch.zeros((), dtype=torch.float64))
        v, alpha = {k: v[k] - LR * alpha * g[k] for k in w}, (alpha - LR * slope).clamp(0, 1)
    return {k: alpha * v[k] + (1 - alpha) * w[k] for k in w}


def pulled(f: Plain, run: pt.Run) -> Params:
    """FedAvg+ with δ = 0.1: θ = prox(w − w̃) once a turn, κ = 1/(1 + ησ)."""
    center, v = server(run), server(run)
    kappa = 1 / (1 + LR * LAM)
    for _ in range(TURNS):
        theta = pt.psi.avg(0.1).prox({k: v[k] - center[k] for k in v})
        for _ in range(STEPS):
            g = f.grad(v)
            v = {k: kappa * (v[k] - LR * g[k]) + (1 - kappa) * (center[k] + theta[k]) for k in v}
    return v


def one_step(f: Plain, run: pt.Run) -> Params:
    w = server(run)
    g = f.grad(w)
    return {k: v - 0.1 * g[k] for k, v in w.items()}


def envelope(f: Plain, run: pt.Run) -> Params:
    center, v = server(run), server(run)
    for _ in range(2):
        g = f.grad(v)
        v = {k: x - LR * (g[k] + LAM * (x - center[k])) for k, x in v.items()}
    return v


def solved(f: Plain, run: pt.Run) -> Params:
    w = server(run)
    for _ in range(7):
        g = f.grad(w)
        w = {k: v - LR * g[k] if k in HEAD else v for k, v in w.items()}
    return w


def alone(f: Plain, run: pt.Run) -> Params:
    w = dict(run.base)
    for _ in range(STEPS * TURNS):
        g = f.grad(w)
        w = {k: v - LR * g[k] for k, v in w.items()}
    return w


def unchanged(f: Plain, run: pt.Run) -> Params:
    del f
    return server(run)


FAMILIES: dict[str, tuple[pt.Algorithm, Callable[[Plain, pt.Run], Params]]] = {
    "fedalt": (pt.fedalt("output", lr=0.1, personal_lr=LR), head_only),
    "fedsim": (pt.fedsim("output", lr=0.1, personal_lr=LR), head_only),
    "finetune": (
        pt.pipeline(pt.fedavg(lr=0.1), pt.stage(pt.finetune("output", lr=LR), epochs=STEPS)),
        head_only,
    ),
    "ditto": (pt.ditto(lr=0.1, lam=LAM, personal_lr=LR), near),
    "pfedme": (pt.pfedme(lr=0.1, lam=LAM, inner_lr=LR, inner_steps=2), inner),
    "apfl": (pt.apfl(lr=LR), mixture),
    "fedavg_plus": (pt.fedavg_plus(lr=LR, sigma=LAM), pulled),
    "perfedavg": (pt.perfedavg(lr=0.1, alpha=0.1), one_step),
    "persafl_maml": (pt.persafl_maml(lr=0.1, alpha=0.1), one_step),
    "persafl_me": (pt.persafl_me(lr=0.1, lam=LAM, inner_lr=LR, inner_steps=2), envelope),
    "ffgg": (pt.ffgg("output", lr=0.1, solver=pt.gd(steps=7, lr=LR), start="model"), solved),
    "local": (pt.local(lr=LR), alone),
    "fedavg": (pt.fedavg(lr=0.1), unchanged),
    "scaffold": (pt.scaffold(lr=0.1), unchanged),
}


@pytest.mark.filterwarnings("ignore:finetune")
@each(
    ("executor", "family"),
    [(executor, family) for executor in ("loop", "vmap") for family in FAMILIES],
    slow=lambda executor, family: executor == "loop" and family not in ("finetune", "ffgg", "local"),
)
def test_each_method_has_its_own_rule(executor: str, family: str) -> None:
    algorithm, plain = FAMILIES[family]
    run, data = trained(algorithm, executor=executor), new()
    found = run.personalize(data, rounds=TURNS)
    for i in range(data.clients):
        f = Plain(data, i)
        wanted = plain(f, run)
        state = found.model(i).state_dict()
        for k, v in wanted.items():
            torch.testing.assert_close(state[k], v.detach(), rtol=1e-9, atol=1e-11)
        assert found.scores("personal")[i] == f.accuracy(wanted, data, i)
    again = run.personalize(data, rounds=TURNS)
    assert all(torch.equal(x, tensors_of(again)[k]) for k, x in tensors_of(found).items())


def tensors_of(found: pt.Personalized) -> Params:
    return {f"{i} {k}": v for i in range(len(found.clients)) for k, v in found.personalized(i).items()}


def test_l2gd_pulls_to_the_servers_model() -> None:
    """A huge λ ties the newcomer to x̄; a small one lets it train alone from there."""
    run, data = trained(pt.l2gd(lr=0.5, lam=1e-9, p=0.5)), new()
    far = run.personalize(data, rounds=5).model(0).state_dict()
    assert max(float((far[k] - v).abs().max()) for k, v in run.shared.items()) > 1e-3


def test_it_is_the_phase_of_training() -> None:
    """The clients of the first round of fedalt have solved for v with the initial u: so does a newcomer."""
    algorithm = pt.fedalt("output", lr=0.0, personal_lr=LR)  # u stays as it was
    data = doubles(samples(5, 0))
    once = trained(algorithm, rounds=1)
    found = once.personalize(data, rounds=1)
    for i in range(data.clients):
        ours, theirs = found.client(i).personal, once.client(i).personal
        assert all(torch.equal(ours[k], theirs[k]) for k in HEAD)
    assert np.array_equal(found.scores("personal"), once.scores("personal"))


def test_as_many_turns_as_the_clients_had() -> None:
    run = trained(pt.fedalt("output", lr=0.1), rounds=6, cohort=2)  # 12 turns of 5 clients
    assert run.personalize(new()).summary()["rounds"] == 2
    fine = pt.pipeline(pt.fedavg(lr=0.1), pt.stage(pt.finetune("output", lr=LR), epochs=2))
    assert trained(fine).personalize(new()).summary()["rounds"] == 1
    assert trained(pt.fedavg(lr=0.1)).personalize(new()).summary()["rounds"] == 0  # there is nothing to train


def test_work_and_seed_can_be_chosen() -> None:
    run, data = trained(pt.fedalt("output", lr=0.1, personal_lr=LR), batch=2), new()

    def head(**asked: Any) -> Tensor:
        return run.personalize(data, rounds=1, **asked).client("new0").personal[HEAD[0]]

    assert torch.equal(head(), head(steps=STEPS))
    others = [head(steps=1), head(epochs=2), head(batch=3), head(seed=7)]
    assert not any(torch.equal(head(), other) for other in others)
    run = trained(pt.fedalt("output", lr=0.1, personal_lr=LR), steps=[1, 1, 5, 5, 3])
    assert torch.equal(
        run.personalize(data).client(0).personal[HEAD[0]],
        run.personalize(data, steps=3).client(0).personal[HEAD[0]],
    )


@each(
    "given",
    [
        {"schedule": pt.schedule.asynchronous(concurrency=3, buffer=1)},
        {"attack": pt.attack.sign_flip(), "byzantine": [0]},
        {"capacity": pt.capacity.depth({"strong": 0, "weak": 1}), "algorithm": pt.ditto(lr=0.1, lam=0.1)},
        {"state": "reset"},
        {"norm": "personal"},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_with_every_schedule_attack_and_capacity(given: dict[str, Any]) -> None:
    given = dict(given)
    run = trained(given.pop("algorithm", pt.fedalt("output", lr=0.1)), **given)
    found = run.personalize(new(), rounds=1)
    assert np.isfinite(found.scores("personal")).all()
    assert not torch.equal(found.client(0).personal[HEAD[0]], found.client(1).personal[HEAD[0]])


def test_without_samples_it_starts_like_a_new_client() -> None:
    run, data = trained(pt.fedalt("output", lr=0.1)), new()
    train = data.train.copy()
    train[1] = (0, 0)
    found = run.personalize(pt.data.FederatedData.make(data.x, data.y, train, data.test, names=data.names))
    assert found.summary()["untrained"] == ["new1"]
    with pytest.warns(UserWarning, match="new1"):
        state = found.model(1).state_dict()
    assert all(torch.equal(state[k], v) for k, v in {**run.base, **run.shared}.items())
    assert found.client(0).trained
    assert not found.client(1).trained


def test_what_diverges_keeps_what_it_had() -> None:
    run, data = trained(pt.fedalt("output", lr=0.1, personal_lr=0.1)), new()
    x = data.x.clone()
    x[data.train[2, 0] : data.train[2].sum()] *= 1e300
    with pytest.warns(UserWarning, match="diverged"):
        found = run.personalize(
            pt.data.FederatedData.make(x, data.y, data.train, data.test, names=data.names)
        )
    assert found.summary()["diverged"] == ["new2"]
    assert all(torch.isfinite(v).all() for v in found.personalized(2).values())


def test_the_run_stays_as_it_was() -> None:
    run = trained(pt.fedalt("output", lr=0.1))
    before, config = tensors(run), json.dumps(run.config, default=str)
    run.personalize(new())
    assert all(torch.equal(x, before[k]) for k, x in tensors(run).items())
    assert json.dumps(run.config, default=str) == config


def test_it_is_written(tmp_path: Path) -> None:
    found = trained(pt.ditto(lr=0.1, lam=0.1)).personalize(new())
    assert "3 clients that came after training" in str(found.summary())
    folder = found.write(tmp_path / "new")
    rows = list(csv.DictReader((folder / "clients.csv").open()))
    assert [row["client"] for row in rows] == ["new0", "new1", "new2"]
    assert [float(row["personal"]) for row in rows] == found.scores("personal").tolist()
    assert json.loads((folder / "summary.json").read_text())["test"]["global"] is not None
    saved = load_file(folder / "models" / "1.safetensors")
    state = found.model("new1").state_dict()
    assert all(torch.equal(state[k], v) for k, v in saved.items())
    with pytest.raises(check.Refused) as refused:
        found.write(folder)
    assert refused.value.field == "folder"


@each("wrong, field", [("shape", "data: a sample of x"), ("label", "y of client"), ("kind", "data")])
def test_data_that_do_not_fit_are_refused(wrong: str, field: str) -> None:
    run, data = trained(pt.fedavg(lr=0.1)), new()
    given: Any = {
        "shape": lambda: pt.data.FederatedData.make(data.x[:, :3], data.y, data.train),
        "label": lambda: pt.data.FederatedData.make(data.x, data.y + 5, data.train),
        "kind": lambda: [1, 2],
    }[wrong]()
    with pytest.raises(check.Refused) as refused:
        run.personalize(given)
    assert field in refused.value.field


# ---- scores of given clients


def test_evaluate_scores_known_clients_on_new_samples() -> None:
    run = trained(pt.ditto(lr=0.1, lam=0.1))
    data = doubles(samples(5, 0))
    other = pt.data.FederatedData.make(
        data.x.flip(1), data.y, data.train[[3, 0]], data.test[[3, 0]], names=["old3", "stranger"]
    )
    table = run.evaluate(other)
    assert [row["model"] for row in table] == ["personal", "global"]
    f = Plain(other, 0)
    own, everyone = run.client("old3").model().state_dict(), run.model().state_dict()
    assert table[0]["score"] == f.accuracy(own, other, 0)
    assert table[1]["score"] == f.accuracy(everyone, other, 1)
    assert run.evaluate(other, "global")[0]["score"] == f.accuracy(everyone, other, 0)
    assert run.evaluate(data).numbers("score").tolist() == run.scores("personal").tolist()
    assert np.isfinite(run.evaluate(data, split="train").numbers("score")).all()


def test_evaluate_refuses_strangers_without_a_global_model() -> None:
    run = trained(pt.fedalt("output", lr=0.1))
    with pytest.raises(check.Refused) as refused:
        run.evaluate(new())
    assert (refused.value.field, refused.value.value) == ("data", "new0")


def test_a_run_that_was_read_says_how(tmp_path: Path) -> None:
    run = trained(pt.fedalt("output", lr=0.1), out=tmp_path / "run")
    for call in (pt.load(tmp_path / "run").personalize, pt.load(tmp_path / "run").evaluate):
        with pytest.raises(check.Refused) as refused:
            call(new())
        assert "resume=True" in refused.value.allowed
    again = trained(pt.fedalt("output", lr=0.1), out=tmp_path / "run", resume=True)
    assert np.array_equal(again.personalize(new()).scores(), run.personalize(new()).scores())


# ---- newcomers=: clients that are held out of training


def held_out(algorithm: pt.Algorithm, newcomers: Any, **changed: Any) -> pt.Run:
    given = {
        "rounds": 3,
        "steps": STEPS,
        "executor": "vmap",
        "report": False,
        "newcomers": newcomers,
        **changed,
    }
    return pt.federate(model(), doubles(samples(8, 0)), algorithm, **given)


@pytest.mark.filterwarnings("ignore:finetune")
@each("algorithm", [pt.fedalt("output", lr=0.1), pt.fedavg(lr=0.1), pt.local(lr=0.1)], ids=lambda a: a.name)
def test_newcomers_take_no_part_and_are_reported(tmp_path: Path, algorithm: pt.Algorithm) -> None:
    run = held_out(algorithm, [2, "old5"], out=tmp_path / "run")
    data = doubles(samples(8, 0))
    rest = data.subset([0, 1, 3, 4, 6, 7])
    others = pt.federate(model(), rest, algorithm, rounds=3, steps=STEPS, executor="vmap")
    assert run.names == list(rest.names)
    assert all(torch.equal(x, tensors(others)[k]) for k, x in tensors(run).items())
    assert run.facts["test"] == others.facts["test"]
    came = others.personalize(data.subset([2, 5]))
    assert run.newcomers.numbers("personal").tolist() == came.scores("personal").tolist()
    assert run.personalize().scores().tolist() == came.scores().tolist()
    told = run.facts["newcomers"]
    assert (told["clients"], told["scored"]) == (2, 2)
    assert told["test"]["personal"] == came.facts["test"]["personal"]
    assert None not in told["test"].values()  # alone and globally by the baselines
    assert "2 newcomers" in str(run.summary())
    rows = list(csv.DictReader((tmp_path / "run" / "clients.csv").open()))
    assert [row["newcomer"] for row in rows] == ["0"] * 6 + ["1"] * 2
    read = pt.load(tmp_path / "run")
    assert read.names == run.names
    assert [row["client"] for row in read.newcomers] == ["old2", "old5"]
    assert read.newcomers.numbers("local").tolist() == run.newcomers.numbers("local").tolist()


def test_a_share_of_newcomers_is_drawn_by_the_seed() -> None:
    runs = [held_out(pt.fedavg(lr=0.1), 0.25, seed=seed, baselines=False) for seed in (0, 0, 1, 2)]
    names = [tuple(row["client"] for row in run.newcomers) for run in runs]
    assert names[0] == names[1]
    assert len(set(names)) > 1
    assert all(len(some) == 2 for some in names)


@each(
    "given",
    [
        {"schedule": pt.schedule.asynchronous(concurrency=3, buffer=1)},
        {"attack": pt.attack.label_flip(), "byzantine": ["old0"]},
        {"capacity": pt.capacity.depth({"strong": 0, "weak": 1})},
        {"cohort": 6, "measures": [pt.measures.gradient_norm()], "train_scores": True},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_newcomers_with_every_schedule_attack_and_capacity(given: dict[str, Any]) -> None:
    run = held_out(pt.ditto(lr=0.1, lam=0.1), ["old7", "old6"], **given)
    assert all(np.isfinite(run.newcomers.numbers(k)).all() for k in ("local", "global", "personal"))


def test_a_longer_and_a_resumed_run_have_their_newcomers(tmp_path: Path) -> None:
    algorithm = pt.fedalt("output", lr=0.1)
    run = held_out(algorithm, 0.25, out=tmp_path / "run").extend(2)
    long = held_out(algorithm, 0.25, rounds=5)
    assert run.newcomers == long.newcomers
    again = held_out(algorithm, 0.25, rounds=5, out=tmp_path / "run", resume=True)
    assert again.newcomers == long.newcomers


@each("newcomers", [1.5, "old1", [9], ["nobody"], 0.01, list(range(8))])
def test_wrong_newcomers_are_refused(newcomers: Any) -> None:
    with pytest.raises(check.Refused) as refused:
        held_out(pt.fedavg(lr=0.1), newcomers)
    assert refused.value.field == "newcomers"


def test_labels_that_only_newcomers_have_are_refused_before_training() -> None:
    data = doubles(samples(8, 0))
    y = data.y.clone()
    y[data.train[2, 0]] = 2
    data = pt.data.FederatedData.make(data.x, y, data.train, data.test, names=data.names)
    with pytest.raises(check.Refused) as refused:
        pt.federate(model(), data, pt.fedavg(lr=0.1), rounds=1, newcomers=[2])
    assert "y of client" in refused.value.field


# ---- labels given as words


def worded(words: list[str], clients: int = 3, seed: int = 1) -> pt.data.FederatedData:
    """Return clients of 8 samples whose class i is called words[i]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(clients * 8, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    y[:: len(words)] = len(words) - 1
    return pt.data.from_arrays(x, np.array(words)[y], np.arange(len(x)) // 8, validation=0)


@pytest.fixture(scope="module")
def of_words() -> pt.Run:
    given: dict[str, Any] = {"rounds": 4, "steps": STEPS, "executor": "vmap", "baselines": False}
    model = pt.models.mlp(4, 3, 3, seed=0)
    data = worded(["sick", "well", "also"], clients=5, seed=0)
    return pt.federate(model, data, pt.fedalt("output", lr=LR), **given)


def test_labels_of_new_clients_have_the_numbers_of_training(of_words: pt.Run) -> None:
    """The classes of training are also, sick and well; new clients have no 'also', which shifts theirs."""
    new = worded(["sick", "well"])
    assert new.source["classes"] == ["sick", "well"]
    plain = pt.data.FederatedData.make(new.x, new.y + 1, new.train, new.test, names=new.names)
    with pytest.warns(UserWarning, match="labels of training were words"):
        wanted = of_words.personalize(plain)
    found = of_words.personalize(new)
    assert found.scores("personal").tolist() == wanted.scores("personal").tolist()
    assert all(map(torch.equal, found.model(0).parameters(), wanted.model(0).parameters()))
    with pytest.warns(UserWarning, match="labels of training were words"):
        scores = [row["score"] for row in of_words.evaluate(plain)]
    assert [row["score"] for row in of_words.evaluate(new)] == scores


def test_labels_that_training_did_not_have_are_refused(of_words: pt.Run) -> None:
    for use in (of_words.personalize, of_words.evaluate):
        with pytest.raises(check.Refused) as refused:
            use(worded(["sick", "dead"]))
        assert (refused.value.field, refused.value.value) == ("data: classes", ["dead"])
    with pytest.raises(check.Refused) as refused:
        trained(pt.fedavg(lr=LR)).evaluate(worded(["no", "yes"]))
    assert refused.value.field == "data: classes"
