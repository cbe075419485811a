"""Runs whose schedule chooses: as the papers' algorithms, as alone, resumed, combined, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita.core import draws
from partita.engine import loop
from partita.engine.callbacks import Callback
from partita.schedule import Known
from support import each

S = pt.schedule
SEED, N, D, M, STEPS, LR = 5, 9, 5, 2, 3, 0.3


def clients() -> pt.data.FederatedData:
    """Clients of different sizes and difficulty, in double precision."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(4, 30, N)
    owner = np.repeat(np.arange(N), sizes)
    x = rng.normal(size=(len(owner), 3)) + owner[:, None] / N
    y = (x @ rng.normal(size=3) + rng.normal(size=len(x)) * owner / 3 > 0.5).astype(np.int64)
    return pt.data.from_arrays(torch.from_numpy(x), torch.from_numpy(y), owner, test=0.2, seed=0)


DATA = clients()


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2, dtype=torch.float64)


USUAL: dict[str, Any] = {
    "rounds": 6,
    "cohort": M,
    "steps": STEPS,
    "batch": None,
    "seed": SEED,
    "baselines": False,
    "report": False,
}


def federate(schedule: Any, method: Any = None, **options: Any) -> pt.Run:
    method = method or pt.fedavg(lr=LR, weighting="uniform")
    return pt.federate(model(), DATA, method, schedule=schedule, **{**USUAL, **options})


# ---- power-of-choice, plainly


def softmax(w: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    z = x @ w.T + b
    z = np.exp(z - z.max(1, keepdims=True))
    return z / z.sum(1, keepdims=True)


def plain(variant: str, rounds: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Cho et al., section 4: draw d by data share, take the m with the largest loss, average them equally."""
    start = model().state_dict()
    w, b = start["weight"].numpy(), start["bias"].numpy()
    rows = [DATA.client(i, "train") for i in range(N)]
    rows = [(x.numpy(), y.numpy()) for x, y in rows]
    share = np.array([len(y) for _, y in rows], dtype=float)
    latest, chosen = np.full(N, np.inf), []

    def loss(w: np.ndarray, b: np.ndarray, i: int) -> float:
        x, y = rows[i]
        return float(-np.log(softmax(w, b, x)[np.arange(len(y)), y]).mean())

    for t in range(rounds):
        rng = draws.generator(SEED, "choice", t)
        candidates = rng.choice(N, D, replace=False, p=share / share.sum())
        ties = rng.random(D)
        value = {int(i): loss(w, b, i) if variant == "pow" else latest[i] for i in candidates}
        order = sorted(zip(ties, candidates.tolist()), key=lambda pair: (-value[pair[1]], pair[0]))
        cohort = sorted(i for _, i in order[:M])
        ends = []
        for i in cohort:
            x, y = rows[i]
            wi, bi, losses = w.copy(), b.copy(), []
            for _ in range(STEPS):
                losses.append(loss(wi, bi, i))
                p = softmax(wi, bi, x)
                p[np.arange(len(y)), y] -= 1
                wi, bi = wi - LR * p.T @ x / len(y), bi - LR * p.mean(0)
            latest[i] = np.mean(losses)
            ends.append((wi, bi))
        w, b = (np.mean(parts, axis=0) for parts in zip(*ends))
        chosen.append(cohort)
    return w, b, chosen


@each("variant, losses", [("rpow", "last"), ("pow", "now")])
def test_power_of_choice_is_the_algorithm_of_its_paper(variant: str, losses: str, monkeypatch: Any) -> None:
    told: list[list[int]] = []
    seen = loop._read_ahead
    monkeypatch.setattr(loop, "_read_ahead", lambda a, b, c: (told.append(sorted(c.clients)), seen(a, b, c)))
    run = federate(S.synchronous(choose=S.power_of_choice(d=D, losses=losses)), rounds=12)
    w, b, chosen = plain(variant, 12)
    assert told == chosen
    assert len({tuple(cohort) for cohort in chosen}) > 3
    np.testing.assert_allclose(run.shared["weight"].numpy(), w, rtol=1e-9)
    np.testing.assert_allclose(run.shared["bias"].numpy(), b, rtol=1e-9)


def test_what_asking_costs() -> None:
    """d downloads in place of m, an answer of four bytes each, and the time of the slowest candidate."""
    delays = S.delays(download=2.0, compute=0.5, upload=1.0)
    plain, asked = (
        federate(S.synchronous(choose=S.power_of_choice(d=D, losses=losses), delays=delays), rounds=1)
        for losses in ("last", "now")
    )
    size = sum(v.nbytes for v in plain.shared.values())
    assert plain.metrics[-1]["bytes_down"] == M * size
    assert asked.metrics[-1]["bytes_down"] == D * size
    assert asked.metrics[-1]["bytes_up"] - plain.metrics[-1]["bytes_up"] == 4 * D
    turn = 2.0 + STEPS * 0.5 + 1.0
    assert plain.metrics[-1]["time"] == turn
    assert asked.metrics[-1]["time"] == 0.5 + turn  # one evaluation; the chosen do not download again


def test_some_samples_are_asked_for() -> None:
    """cpow-d: an answer is the mean over so many drawn samples of the client, others in each round."""
    answers: dict[int | None, list[np.ndarray]] = {}

    def choose(known: Known, count: int, rng: np.random.Generator) -> np.ndarray:  # noqa: ARG001
        for samples in (None, 3, 1000):
            answers.setdefault(samples, []).append(known.ask(known.candidates, samples))
        return known.candidates[:count]

    federate(S.synchronous(choose=choose), pt.fedavg(lr=0.0), rounds=3, cohort=N)
    whole, some, more = (np.stack(answers[k]) for k in (None, 3, 1000))
    np.testing.assert_allclose(more, whole, rtol=1e-12)
    assert (whole == whole[0]).all()  # lr=0: the model stays
    assert not np.allclose(some[0], some[1])
    x, y = DATA.client(2, "train")
    each_loss = nn.functional.cross_entropy(model()(x), y, reduction="none").detach().numpy()
    triples = each_loss[np.array(np.meshgrid(*[np.arange(len(y))] * 3)).reshape(3, -1)].mean(0)
    assert np.isclose(triples, some[0][2]).any()


# ---- what the server knows


def test_what_is_known() -> None:
    """Losses of the last turn, the round of it, how often: as the rows of the run tell them."""
    seen: list[Known] = []

    def choose(known: Known, count: int, rng: np.random.Generator) -> np.ndarray:
        seen.append(known)
        return rng.choice(known.candidates, count, replace=False)

    run = federate(S.synchronous(choose=choose), rounds=5, evaluate_every=1)
    first, last = seen[0], seen[-1]
    assert [k.round for k in seen] == [0, 1, 2, 3, 4]
    assert [k.time for k in seen] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert np.isnan(first.loss).all()
    assert not first.seen.any()
    assert (first.samples == DATA.sizes()).all()
    assert (np.isnan(last.loss) == (last.seen == 0)).all()
    assert ((last.chosen > 0) == (last.seen > 0)).all()
    assert last.chosen.sum() == 4 * M
    newest = last.seen == 4
    assert newest.sum() == M
    loss = (last.loss * last.samples)[newest].sum() / last.samples[newest].sum()
    assert loss == pytest.approx(run.metrics[3]["train_loss"], rel=1e-9)


def test_unusable_uploads_tell_nothing() -> None:
    """A Byzantine client that sends NaN is counted as chosen, and its loss stays unknown."""
    seen: list[Known] = []

    def choose(known: Known, count: int, rng: np.random.Generator) -> np.ndarray:  # noqa: ARG001
        seen.append(known)
        return known.candidates[:count]

    federate(S.synchronous(choose=choose), attack=pt.attack.nonfinite(), byzantine=[0], rounds=3)
    assert seen[-1].chosen[:3].tolist() == [2, 2, 0]
    assert seen[-1].seen[:3].tolist() == [0, 2, 0]
    assert np.isnan(seen[-1].loss).tolist()[:3] == [True, False, True]


# ---- same seed, same run

DELAYS = S.delays(download=S.exponential(0.5), compute=0.1, upload=S.exponential(1.0), dropout=0.1)
NIGHT = S.day_night(period=6.0, share=0.5, unfinished="lost")
SCHEDULES = {
    "rpow": S.synchronous(
        choose=S.power_of_choice(d=D, losses="last"), delays=DELAYS, deadline=1.5, late="apply"
    ),
    "pow": S.synchronous(choose=S.power_of_choice(d=D), available=NIGHT, delays=DELAYS, until=20.0),
    "cpow": S.synchronous(choose=S.power_of_choice(d=D, samples=2), stragglers=0.5, late="partial"),
    "loss": S.synchronous(choose=S.by_loss(), available=NIGHT, delays=DELAYS),
    "arrivals": S.asynchronous(choose=S.by_loss(), available=NIGHT, delays=DELAYS, buffer=2),
    "arrivals rpow": S.asynchronous(
        choose=S.power_of_choice(d=D, losses="last"), concurrency=4, delays=DELAYS
    ),
    "turns": S.asynchronous(choose=S.least_chosen(), available=S.intermittent(0.3), delays=DELAYS),
}


def same(a: pt.Run, b: pt.Run, exactly: bool = True) -> None:
    counts = ("reports", "late", "lost")
    assert [[c[k] for k in counts] for c in a.clients] == [[c[k] for k in counts] for c in b.clients]
    assert [(r["round"], r["time"], r["bytes_down"]) for r in a.metrics] == [
        (r["round"], r["time"], r["bytes_down"]) for r in b.metrics
    ]
    for name, value in a.shared.items():
        if exactly:
            assert torch.equal(value, b.shared[name])
        else:
            assert torch.allclose(value, b.shared[name], rtol=1e-9, atol=1e-12)


class Kill(Callback):
    """Ends a run after a round as an error would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, event: Any) -> None:
        if event.round == self.after:
            raise RuntimeError("killed")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:the deltas of")
def test_killed_and_resumed(name: str, tmp_path: Path) -> None:
    options = {"rounds": 8, "evaluate_every": 2, "checkpoint_every": 1, "batch": 4}
    method = pt.fedavg(lr=0.1, weighting="uniform")
    straight = federate(SCHEDULES[name], method, **options)
    with pytest.raises(RuntimeError, match="killed"):
        federate(SCHEDULES[name], method, **options, out=tmp_path, callbacks=[Kill(5)])
    same(federate(SCHEDULES[name], method, **options, out=tmp_path, resume=True), straight)


@each("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:the deltas of")
def test_stacked_as_alone(name: str) -> None:
    method = pt.fedavg(lr=0.1, weighting="uniform")
    same(*(federate(SCHEDULES[name], method, executor=kind) for kind in ("loop", "vmap")), exactly=False)


@pytest.mark.slow
@each("losses, samples", [("last", None), ("now", None), ("now", 3)])
def test_with_workers_as_alone(losses: str, samples: int | None) -> None:
    schedule = S.synchronous(choose=S.power_of_choice(d=D, losses=losses, samples=samples))
    same(*(federate(schedule, workers=workers) for workers in (None, 2)), exactly=False)


# ---- combined with everything


@pytest.mark.filterwarnings("ignore:the deltas of")
def test_a_pipeline_remembers_what_it_knew() -> None:
    known_at_start: list[np.ndarray] = []

    def choose(known: Known, count: int, rng: np.random.Generator) -> np.ndarray:
        known_at_start.append(known.seen.copy())
        return rng.choice(known.candidates, count, replace=False)

    method = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=3),
        pt.stage(pt.fedalt("weight", lr=0.1), rounds=2, schedule=S.synchronous(choose=choose)),
        pt.stage(pt.fedavg(lr=0.1), rounds=4, schedule=S.asynchronous(choose=S.by_loss(), available=NIGHT)),
    )
    run = pt.federate(model(), DATA, method, **{k: v for k, v in USUAL.items() if k != "rounds"})
    assert (known_at_start[0] > 0).sum() >= M
    assert run.summary()["rounds"] == 9


def test_personal_parts_devices_and_attackers() -> None:
    """A client whose model is partly its own answers with its own loss."""
    rng = np.random.default_rng(0)
    data = pt.data.from_arrays(
        rng.normal(size=(120, 6)).astype(np.float32), rng.integers(0, 2, 120), np.arange(120) % 8
    )
    run = pt.federate(
        pt.models.mlp(6, 8, 8, 2),
        data,
        pt.fedalt("output", lr=0.1, aggregate=pt.aggregate.coordinate_median(), weighting="uniform"),
        schedule=S.synchronous(choose=S.power_of_choice(d=6), available=S.intermittent(0.8)),
        capacity=pt.capacity.width({"strong": 1.0, "weak": 0.5}),
        attack=pt.attack.sign_flip(),
        byzantine=["3"],
        newcomers=["5", "6"],
        **{**USUAL, "cohort": 4},
    )
    assert run.personalize().summary()["clients"] == 2
    assert sum(c["reports"] for c in run.clients) >= USUAL["rounds"]


def test_nobody_is_ever_there() -> None:
    never = S.windows([[] for _ in range(N)])
    with pytest.warns(UserWarning, match="nobody is ever available in stage 1"):
        run = federate(S.synchronous(available=never))
    assert run.summary()["rounds"] == 0


# ---- cautions


@each(
    "choose, weighting, told",
    [
        (S.by_size(), "samples", True),
        (S.power_of_choice(d=D, losses="last"), "samples", True),
        (S.by_size(), "uniform", False),
        (S.by_loss(), "samples", False),
    ],
)
def test_large_clients_that_count_twice(choose: Any, weighting: str, told: bool, recwarn: Any) -> None:
    recwarn.clear()
    federate(S.synchronous(choose=choose), pt.fedavg(lr=0.1, weighting=weighting), rounds=1)
    assert any("count twice" in str(w.message) for w in recwarn) == told


def test_what_norm_static_cannot_answer() -> None:
    norm = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64))
    with pytest.raises(pt.Refused, match="norm='static'"):
        pt.federate(
            norm,
            DATA,
            pt.fedavg(lr=0.1, weighting="uniform"),
            norm="static",
            schedule=S.synchronous(choose=S.power_of_choice(d=D)),
            **USUAL,
        )


def test_an_asynchronous_choice_cannot_ask() -> None:
    def choose(known: Known, count: int, rng: np.random.Generator) -> np.ndarray:  # noqa: ARG001
        return known.candidates[np.argsort(known.ask(known.candidates))[:count]]

    with pytest.raises(pt.Refused, match="whose server can wait for answers"):
        federate(S.asynchronous(choose=choose))


def test_the_page_tells_who_took_part(tmp_path: Path) -> None:
    schedule = S.synchronous(choose=S.power_of_choice(d=D, losses="last"), available=S.day_night(period=6.0))
    federate(schedule, out=tmp_path, report=True)
    text = (tmp_path / "report.html").read_text()
    assert "Who took part" in text
    assert "power_of_choice(d=5, losses=last), while available by day_night(period=6.0" in text
