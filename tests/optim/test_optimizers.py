"""Optimizers: of the server against Algorithm 2 of Reddi et al. (2021) in NumPy, of clients against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import partita as pt
from partita import optim
from support import each

SHAPES = {"a": (3, 2), "b": (), "c": (4,)}


def deltas(n: int = 5) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{k: rng.normal(size=s) for k, s in SHAPES.items()} for _ in range(n)]


def tensors(x: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {k: torch.as_tensor(v) for k, v in x.items()}


def run(optimizer, steps=None) -> dict[str, Tensor]:
    """x after all deltas, from ones."""
    x = {k: torch.ones(s, dtype=torch.float64) for k, s in SHAPES.items()}
    opt = optimizer.init(x)
    for d in steps or deltas():
        x, opt = optimizer.update(x, tensors(d), opt, dict.fromkeys(x, optimizer.options["lr"]))
    return x


def adaptive(kind: str, lr: float, beta1: float, beta2: float, tau: float) -> dict[str, np.ndarray]:
    x = {k: np.ones(s) for k, s in SHAPES.items()}
    m = {k: np.zeros(s) for k, s in SHAPES.items()}
    v = {k: np.full(s, tau**2) for k, s in SHAPES.items()}
    for d in deltas():
        for k in x:
            pseudo = -d[k]  # the paper's Δ_t points where x should go
            m[k] = beta1 * m[k] + (1 - beta1) * pseudo
            square = pseudo**2
            if kind == "adagrad":
                v[k] = v[k] + square
            elif kind == "yogi":
                v[k] = v[k] - (1 - beta2) * square * np.sign(v[k] - square)
            else:
                v[k] = beta2 * v[k] + (1 - beta2) * square
            x[k] = x[k] + lr * m[k] / (np.sqrt(v[k]) + tau)
    return x


@each(("beta1", "beta2", "tau"), [(0.9, 0.99, 1e-3), (0.0, 0.5, 0.1), (0.3, 0.999, 1.0)])
@each("kind", ["adagrad", "yogi", "adam"])
def test_adaptive(kind, beta1, beta2, tau) -> None:
    options = {"beta1": beta1, "tau": tau} | ({} if kind == "adagrad" else {"beta2": beta2})
    got = run(getattr(optim, kind)(0.3, **options))
    for k, x in adaptive(kind, 0.3, beta1, beta2, tau).items():
        np.testing.assert_allclose(got[k].numpy(), x, rtol=1e-12)


def test_defaults_are_the_papers() -> None:
    for kind, beta1, beta2 in (("adagrad", 0.0, 0.0), ("yogi", 0.9, 0.99), ("adam", 0.9, 0.99)):
        got = run(getattr(optim, kind)(0.1))
        for k, x in adaptive(kind, 0.1, beta1, beta2, 1e-3).items():
            np.testing.assert_allclose(got[k].numpy(), x, rtol=1e-12)


def test_plain_averaging() -> None:
    expected = {k: 1 - sum(d[k] for d in deltas()) for k in SHAPES}
    for k, x in run(optim.sgd(1.0)).items():
        np.testing.assert_allclose(x.numpy(), expected[k], rtol=1e-12)
    assert optim.sgd().init({"a": torch.ones(2)}) == {}


def test_momentum() -> None:
    x, m = dict.fromkeys(SHAPES, 1.0), dict.fromkeys(SHAPES, 0.0)
    for d in deltas():
        m = {k: 0.8 * m[k] + d[k] for k in SHAPES}
        x = {k: x[k] - 0.5 * m[k] for k in SHAPES}
    for k, got in run(optim.sgd(0.5, momentum=0.8)).items():
        np.testing.assert_allclose(got.numpy(), x[k], rtol=1e-12)


@each(
    "optimizer",
    [
        optim.sgd(0.5, 0.9),
        optim.sgd(0.5, 0.9, nesterov=True),
        optim.adam(0.1),
        optim.adam(),
        optim.adamw(),
        optim.lion(weight_decay=0.1),
        optim.yogi(0.1),
        optim.adagrad(0.1),
    ],
)
def test_old_state_is_untouched(optimizer) -> None:
    x = {k: torch.ones(s) for k, s in SHAPES.items()}
    opt = optimizer.init(x)
    before = {k: v.clone() for k, v in opt.items()}
    new, moments = optimizer.update(
        x, {k: torch.ones(s) for k, s in SHAPES.items()}, opt, dict.fromkeys(x, 0.1)
    )
    assert all(torch.equal(opt[k], before[k]) for k in before)
    assert all(bool((v == 1).all()) for v in x.values())
    assert moments.keys() == opt.keys()
    assert all(v.shape == x[k].shape and v.dtype == x[k].dtype for k, v in new.items())


@each(
    ("make", "field"),
    [
        (lambda: optim.sgd(0.0), "optimizer lr=0.0"),
        (lambda: optim.sgd(-1), "optimizer lr=-1"),
        (lambda: optim.sgd("1"), "optimizer lr='1'"),
        (lambda: optim.sgd(True), "optimizer lr=True"),
        (lambda: optim.sgd(1.0, 1.5), "optimizer momentum=1.5"),
        (lambda: optim.adam(float("nan")), "optimizer lr=nan"),
        (lambda: optim.adam(0.1, beta1=-0.1), "optimizer beta1=-0.1"),
        (lambda: optim.adam(0.1, beta2=2), "optimizer beta2=2"),
        (lambda: optim.yogi(0.1, tau=0), "optimizer tau=0"),
        (lambda: optim.adamw(weight_decay=-1), "optimizer weight_decay=-1"),
        (lambda: optim.adam(tau=1e-3, eps=1e-8), "optimizer tau=0.001"),
        (lambda: optim.sgd(nesterov=True), "optimizer nesterov=True: expected False, or momentum= above 0"),
        (lambda: optim.lion(beta1=1.5), "optimizer beta1=1.5"),
        (lambda: pt.fedavg(lr=0.1, accumulate=0), "accumulate=0"),
        (lambda: pt.fedavg(lr=0.1, optimizer_state="kept"), "optimizer_state='kept'"),
        (lambda: pt.fedadam(lr=0.1, server_lr=-1), "server_lr=-1"),
        (lambda: pt.fedavg(lr=0.1, server="adam"), "server='adam'"),
        (lambda: pt.fedavg(lr=0.1, optimizer="adam"), "optimizer='adam'"),
    ],
)
def test_refusals(make, field) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(field)
    assert "expected" in str(error.value)


@pytest.mark.parametrize(
    ("options", "field", "advice"),
    [
        ({"optimizer": optim.adamw(lr=0.1)}, "optimizer", "the method's own lr="),
        ({"server": optim.adamw()}, "server", "step size of its own"),
        ({"server": optim.adam()}, "server", "adam(lr="),
        ({"optimizer": optim.adamw(), "momentum": 0.9}, "momentum", "optim.sgd(momentum=0.9)"),
        ({"optimizer": optim.adamw(), "weight_decay": 0.1}, "weight_decay", "optim.adamw(weight_decay=0.1)"),
        ({"optimizer": optim.sgd(), "momentum": 0.9}, "momentum", "optim.sgd(momentum=0.9)"),
    ],
)
def test_options_that_contradict_each_other(options, field, advice) -> None:
    with pytest.raises(pt.Refused) as error:
        pt.fedavg(lr=0.1, **options)
    assert error.value.field == field
    assert error.value.value == options[field]
    assert advice in error.value.allowed


def test_the_step_of_sgd_at_the_server_is_1_by_default() -> None:
    assert pt.fedavg(lr=0.1, server=optim.sgd()).options["server"].options["lr"] == 1.0


def test_a_method_that_is_a_server_optimizer_takes_no_other() -> None:
    with pytest.raises(pt.Refused, match="fedadam has no such argument"):
        pt.fedadam(lr=0.1, server_lr=0.1, server=optim.sgd())


def small() -> pt.data.FederatedData:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(36, 5, generator=g), torch.randint(0, 3, (36,), generator=g)
    return pt.data.from_arrays(x, y, [0] * 16 + [1] * 12 + [2] * 8)


def test_methods_and_server_option_are_the_same() -> None:
    runs = [
        pt.federate(pt.models.mlp(5, 3), small(), method, rounds=3, batch=4, executor="loop", baselines=False)
        for method in (pt.fedadam(0.1, server_lr=0.05), pt.fedavg(0.1, server=optim.adam(0.05)))
    ]
    assert all(torch.equal(x, runs[1].shared[k]) for k, x in runs[0].shared.items())


def test_statistics_are_averaged_whatever_the_optimizer() -> None:
    """Adam's step on a running variance could make it negative."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    one_round = {"rounds": 1, "steps": 2, "norm": "global", "executor": "loop", "baselines": False}
    plain, adam = (
        pt.federate(model, small(), m, **one_round) for m in (pt.fedavg(0.1), pt.fedadam(0.1, server_lr=1.0))
    )
    for k in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(plain.shared[k], adam.shared[k])
        assert plain.shared[k].dtype == model.state_dict()[k].dtype
    assert not torch.equal(plain.shared["0.weight"], adam.shared["0.weight"])
    assert plain.shared["1.num_batches_tracked"] == 2


# ---- clients

X = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 3
LR = 0.05
# ours, and what torch has
CLIENTS = {
    "sgd": (optim.sgd(), lambda p: torch.optim.SGD(p, LR)),
    "momentum": (
        optim.sgd(momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": (
        optim.sgd(momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    "adam": (optim.adam(), lambda p: torch.optim.Adam(p, LR)),
    "adam, with decay": (
        optim.adam(weight_decay=0.3),
        lambda p: torch.optim.Adam(p, LR, weight_decay=0.3),
    ),
    "adam, other options": (
        optim.adam(beta1=0.5, beta2=0.9, eps=1e-3),
        lambda p: torch.optim.Adam(p, LR, betas=(0.5, 0.9), eps=1e-3),
    ),
    "adamw": (optim.adamw(), lambda p: torch.optim.AdamW(p, LR)),
    "adamw, other options": (
        optim.adamw(weight_decay=0.3, beta1=0.5, beta2=0.9, eps=1e-3),
        lambda p: torch.optim.AdamW(p, LR, weight_decay=0.3, betas=(0.5, 0.9), eps=1e-3),
    ),
    "adagrad": (
        optim.adagrad(tau=0.01),
        lambda p: torch.optim.Adagrad(p, LR, initial_accumulator_value=1e-4, eps=0.01),
    ),
}
with_torch = pytest.mark.parametrize(("ours", "theirs"), CLIENTS.values(), ids=CLIENTS)


def network() -> torch.nn.Module:
    return pt.models.mlp(5, 4, 3, seed=2).double()


def trained(theirs, steps: int, clip: float | None = None) -> list[dict[str, Tensor]]:
    """The model after each step of an optimizer of torch on all samples."""
    model, seen = network(), []
    optimizer = theirs(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(X), Y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        seen.append({k: v.detach().clone() for k, v in model.named_parameters()})
    return seen


@with_torch
def test_every_step_is_that_of_torch(ours, theirs) -> None:
    model = network()
    params = {k: v.detach() for k, v in model.named_parameters()}
    state, rates = ours.init(params), dict.fromkeys(params, torch.tensor(LR, dtype=torch.float64))
    for expected in trained(theirs, 6):
        leaves = {k: v.requires_grad_() for k, v in params.items()}
        loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model, leaves, (X,)), Y)
        gradient = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
        params, after = ours.update({k: v.detach() for k, v in leaves.items()}, gradient, state, rates)
        assert after.keys() == state.keys()
        state = after
        for k, x in expected.items():
            torch.testing.assert_close(params[k], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
@with_torch
def test_clients_take_the_steps_of_torch(ours, theirs, executor, clip) -> None:
    method = pt.fedavg(LR, optimizer=ours, max_grad_norm=clip)
    run = pt.federate(
        network(), alone(), method, rounds=1, steps=6, executor=executor, baselines=False, progress=False
    )
    for k, x in trained(theirs, 6, clip)[-1].items():
        torch.testing.assert_close(run.shared[k], x, rtol=0, atol=1e-6 if clip else 1e-12)


def alone() -> pt.data.FederatedData:
    everything = np.array([[0, 12]])
    return pt.data.FederatedData.make(X.numpy(), Y.numpy(), everything, everything)


@each(("decay", "betas"), [(0.0, (0.9, 0.99)), (0.3, (0.9, 0.99)), (0.1, (0.5, 0.8))])
def test_lion(decay, betas) -> None:
    """Algorithm 2 of Chen et al. (2023), in NumPy."""
    lion = optim.lion(0.05, decay, *betas)
    x, m = {k: np.ones(s) for k, s in SHAPES.items()}, {k: np.zeros(s) for k, s in SHAPES.items()}
    for d in deltas():
        for k, g in d.items():
            c = betas[0] * m[k] + (1 - betas[0]) * g
            x[k] = x[k] - 0.05 * (np.sign(c) + decay * x[k])
            m[k] = betas[1] * m[k] + (1 - betas[1]) * g
    for k, got in run(lion).items():
        np.testing.assert_allclose(got.numpy(), x[k], rtol=1e-12)


def test_yogi_of_clients_is_that_of_the_server() -> None:
    """Both in NumPy, as above: the rate alone comes from elsewhere."""
    x = {k: torch.ones(s, dtype=torch.float64) for k, s in SHAPES.items()}
    yogi = optim.yogi()
    state, rates = yogi.init(x), dict.fromkeys(x, torch.tensor(0.3, dtype=torch.float64))
    for d in deltas():
        x, state = yogi.update(x, tensors(d), state, rates)
    for k, expected in adaptive("yogi", 0.3, 0.9, 0.99, 1e-3).items():
        np.testing.assert_allclose(x[k].numpy(), expected, rtol=1e-12)


def test_a_clients_state_begins_anew_in_every_round() -> None:
    once, twice = (
        pt.federate(
            network(),
            alone(),
            pt.fedavg(LR, optimizer=optim.adamw()),
            rounds=rounds,
            steps=2,
            executor="loop",
            baselines=False,
            progress=False,
        ).shared
        for rounds in (1, 2)
    )
    again = network()
    again.load_state_dict(once)
    method = pt.fedavg(LR, optimizer=optim.adamw())
    run = pt.federate(again, alone(), method, rounds=1, steps=2, executor="loop", baselines=False)
    assert all(torch.equal(run.shared[k], x) for k, x in twice.items())


def test_the_short_form_is_sgd() -> None:
    options = {"momentum": 0.9, "weight_decay": 0.1}
    runs = [
        pt.federate(pt.models.mlp(5, 3), small(), method, rounds=2, batch=4, steps=3, executor="vmap")
        for method in (pt.fedavg(0.1, **options), pt.fedavg(0.1, optimizer=optim.sgd(**options)))
    ]
    assert all(torch.equal(x, runs[1].shared[k]) for k, x in runs[0].shared.items())


def test_names_count_their_own_steps() -> None:
    """A part of the model that moves later begins with a whole step, of size η."""
    x = {"a": torch.zeros(2), "b": torch.zeros(2)}
    adam, rates = optim.adam(), dict.fromkeys("ab", torch.tensor(0.1))
    state = adam.init(x)
    for _ in range(5):
        new, state = adam.update(x, {"a": torch.ones(2)}, state, rates)
        x = {**x, **new}
    new, _ = adam.update(x, {"b": torch.ones(2)}, state, rates)
    torch.testing.assert_close(new["b"], torch.full((2,), -0.1))


def test_adam_with_eps_at_the_server() -> None:
    """The form with bias correction: its first step has the size of the rate, whatever the delta."""
    x = run(optim.adam(lr=0.1, eps=1e-8), deltas(1))
    for k, d in deltas(1)[0].items():
        np.testing.assert_allclose(x[k].numpy(), 1 - 0.1 * np.sign(d), rtol=1e-6)


@each("options", [{}, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}])
def test_adam_with_eps_at_the_server_is_that_of_torch(options) -> None:
    given = {"eps": 1e-8, **options}
    x = {k: torch.ones(s, dtype=torch.float64, requires_grad=True) for k, s in SHAPES.items()}
    betas = (given.get("beta1", 0.9), given.get("beta2", 0.999))
    theirs = torch.optim.Adam(x.values(), 0.1, betas, given["eps"])
    for delta in deltas():
        for k, d in tensors(delta).items():
            x[k].grad = d
        theirs.step()
    ours = run(optim.adam(lr=0.1, **given), deltas())
    for k, expected in x.items():
        torch.testing.assert_close(ours[k], expected.detach(), rtol=0, atol=1e-12)


def test_statistics_are_never_touched() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    one = {"rounds": 1, "steps": 1, "norm": "global", "executor": "loop", "baselines": False}
    plain, adam = (
        pt.federate(model, small(), pt.fedavg(0.1, optimizer=o), **one) for o in (None, optim.adamw())
    )
    for k in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(plain.shared[k], adam.shared[k])


# ---- kept between rounds


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@each(("ours", "theirs"), CLIENTS.values(), ids=CLIENTS)
def test_a_state_that_is_kept_goes_on_as_in_torch(ours, theirs, executor) -> None:
    """Two rounds of one client are one training, for which the server changes nothing."""
    method = pt.fedavg(LR, optimizer=ours, optimizer_state="keep")
    run = pt.federate(
        network(), alone(), method, rounds=2, steps=3, executor=executor, baselines=False, progress=False
    )
    for k, x in trained(theirs, 6)[-1].items():
        torch.testing.assert_close(run.shared[k], x, rtol=0, atol=1e-12)


ADAM = {"optimizer": optim.adam(eps=1e-3), "optimizer_state": "keep"}
KEPT_RUN = {"rounds": 3, "steps": 2, "baselines": False, "progress": False, "seed": 4}


def states(run: pt.Run, i: int, word: str) -> dict[str, Tensor]:
    """The state that a client keeps of an optimizer."""
    return {k.removeprefix(word): v for k, v in run.client(i).memory.items() if k.startswith(word)}


def test_each_copy_of_the_model_has_a_state_of_its_own() -> None:
    """Those of ditto are fedavg's for w, and for v, without a pull, those of every client alone."""
    both = pt.federate(network(), double(), pt.ditto(LR, lam=0.0, **ADAM), **KEPT_RUN)
    average = pt.federate(network(), double(), pt.fedavg(LR, **ADAM), **KEPT_RUN)
    by_itself = pt.federate(network(), double(), pt.local(LR, **ADAM), **KEPT_RUN)
    for i in range(3):
        w, v = states(both, i, "optimizer_of_shared."), states(both, i, "optimizer.")
        assert w.keys() == v.keys() == states(average, i, "optimizer.").keys()
        assert any(not torch.equal(w[k], v[k]) for k in w)
        for k in w:
            torch.testing.assert_close(w[k], states(average, i, "optimizer.")[k], rtol=0, atol=1e-12)
            torch.testing.assert_close(v[k], states(by_itself, i, "optimizer.")[k], rtol=0, atol=1e-12)
        assert {float(x) for k, x in v.items() if k.startswith("t.")} == {6.0}


def double() -> pt.data.FederatedData:
    """Three clients in double precision."""
    data = small()
    return pt.data.FederatedData.make(data.x.double().numpy(), data.y.numpy(), data.train, data.test)


def test_a_kept_state_starts_with_the_stage_and_is_forgotten_with_the_others() -> None:
    method = pt.fedavg(LR, **ADAM)
    forgetful = pt.fedavg(LR, optimizer=ADAM["optimizer"])
    short = {**KEPT_RUN, "rounds": None}
    stages = pt.pipeline(pt.stage(method, rounds=1), pt.stage(method, rounds=1))
    anew = pt.pipeline(pt.stage(forgetful, rounds=1), pt.stage(forgetful, rounds=1))
    one, other = (pt.federate(network(), double(), m, **short) for m in (stages, anew))
    assert all(torch.equal(x, other.shared[k]) for k, x in one.shared.items())
    with pytest.warns(UserWarning, match="state='reset': fedavg relies on what clients remember"):
        reset = pt.federate(network(), double(), method, state="reset", **KEPT_RUN)
    plain = pt.federate(network(), double(), forgetful, **KEPT_RUN)
    assert all(torch.equal(x, plain.shared[k]) for k, x in reset.shared.items())


@each(
    ("make", "reason"),
    [
        (lambda **o: pt.ffgg("output", 0.1, **o), "keep nothing"),
        (lambda **o: pt.ffgg_local("output", 0.1, **o), "keep nothing"),
        (lambda **o: pt.ffgg_robust("output", 0.1, **o), "keep nothing"),
        (lambda **o: pt.ffgg_async("output", 0.1, **o), "keep nothing"),
        (lambda **o: pt.pfedme(0.1, **o), "begins anew with every"),
        (lambda **o: pt.persafl_me(0.1, **o), "begins anew with every"),
        (lambda **o: pt.fedplus(pt.psi.avg(0.1), 0.1, solver=pt.exact(), **o), "solves anew"),
    ],
)
def test_methods_that_cannot_keep_a_state_say_why(make, reason) -> None:
    with pytest.raises(pt.Refused) as error:
        make(optimizer_state="keep")
    assert error.value.field == "optimizer_state"
    assert reason in error.value.allowed


@each("nesterov", [False, True])
def test_momentum_that_is_kept_or_of_nesterov_leaves_scaffold_its_mean_gradient(nesterov) -> None:
    """Where x − y is no sum of this round's gradients, c_i is their mean: on the full batch, ∇f at each y."""
    options = {"optimizer": optim.sgd(momentum=0.9, nesterov=nesterov)}
    options |= {} if nesterov else {"optimizer_state": "keep"}
    one = {"rounds": 1, "steps": 3, "executor": "loop", "baselines": False, "progress": False}
    run = pt.federate(network(), alone(), pt.scaffold(LR, **options), **one)
    points = [network(), *(network() for _ in range(2))]
    theirs = trained(lambda p: torch.optim.SGD(p, LR, momentum=0.9, nesterov=nesterov), 2)
    for model, state in zip(points[1:], theirs):
        model.load_state_dict(state)
    for model in points:
        torch.nn.functional.cross_entropy(model(X), Y).backward()
    for k in dict(network().named_parameters()):
        mean = sum(dict(model.named_parameters())[k].grad for model in points) / 3
        torch.testing.assert_close(run.client(0).memory[k], mean, rtol=0, atol=1e-12)


def test_an_asynchronous_run_with_kept_states_is_resumed_to_the_bit(tmp_path) -> None:
    late = pt.schedule.delays(compute=pt.schedule.lognormal(1.0, sigma=1.0))
    schedule = pt.schedule.asynchronous(concurrency=2, buffer=1, delays=late)
    settings = {**KEPT_RUN, "rounds": 8, "schedule": schedule, "store": "disk"}
    method = pt.fedavg(LR, **ADAM)

    class Stop(pt.callbacks.Callback):
        def round(self, event: pt.callbacks.Event) -> None:
            if event.round == 5:
                raise RuntimeError("stopped")

    straight = pt.federate(network(), double(), method, out=tmp_path / "straight", **settings)
    there = {**settings, "out": tmp_path / "run", "checkpoint_every": 2}
    with pytest.raises(RuntimeError, match="stopped"):
        pt.federate(network(), double(), method, callbacks=[Stop()], **there)
    resumed = pt.federate(network(), double(), method, resume=True, **there)
    assert all(torch.equal(x, resumed.shared[k]) for k, x in straight.shared.items())
    for i in range(3):
        kept = states(resumed, i, "optimizer.")
        assert all(torch.equal(x, kept[k]) for k, x in states(straight, i, "optimizer.").items())
    assert any(float(x) > 2 for k, x in kept.items() if k.startswith("t."))
