"""Uploads and downloads on their way, in every kind of run: stacked as alone, resumed, over workers."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from engine.passing import (
    CHAINS,
    CLIENTS,
    CLOSE,
    DELAYS,
    KINDS,
    PRIVATE,
    PRIVATE_KINDS,
    PRIVATE_METHODS,
    REFUSED_IN_PRIVATE,
    SHORT,
    Linear,
    T,
    apart,
    data,
    federate,
    gradient,
    in_double,
    linear_data,
    methods,
    remembered,
)
from partita.core import check
from partita.core.parts import Algorithm, Transform
from partita.engine.lockstep import member
from partita.engine.lockstep.runs import in_lockstep
from support import Stop, each

# ---- stacked as alone


@each(
    ("method", "name"),
    [(method, name) for method in methods() for name in CHAINS],
    slow=lambda method, name: method not in ("fedavg", "scaffold") and name != SHORT,
)
def test_stacked_is_alone(method: str, name: str) -> None:
    algorithm, uploads = methods()[method], CHAINS[name]
    alone, stacked = (federate(algorithm, uploads, executor=e, rounds=2) for e in ("loop", "vmap"))
    assert apart(alone, stacked) <= CLOSE
    assert [row["bytes_up"] for row in alone.metrics] == [row["bytes_up"] for row in stacked.metrics]


@each("uploads", CHAINS.values(), ids=list(CHAINS))
def test_methods_that_keep_no_state(uploads: list[Transform]) -> None:
    """FFGG solves for the personal part anew: with feedback it is refused, without it stacked is alone."""
    method = pt.ffgg("output", lr=0.1, solver=pt.gd(lr=0.1, steps=3))
    if any(t.feedback for t in uploads):
        with pytest.raises(check.Refused, match="keeps no state") as caught:
            federate(method, uploads)
        assert caught.value.field == "uploads"
    else:
        alone, stacked = (federate(method, uploads, executor=e, rounds=2) for e in ("loop", "vmap"))
        assert apart(alone, stacked) <= CLOSE


@each(
    ("executor", "name"),
    [(e, name) for e in ("pool", "graph", "auto") for name in ("topk", "randk", SHORT, "low rank")],
    slow=lambda executor, name: executor == "auto" or name != SHORT,
)
def test_every_executor(executor: str, name: str) -> None:
    for method in (pt.fedavg(lr=0.1), pt.scaffold(lr=0.1)):
        alone, other = (federate(method, CHAINS[name], executor=e) for e in ("loop", executor))
        assert apart(alone, other) <= CLOSE


@each(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in ("topk", SHORT, "low rank", "half")],
    slow=lambda kind, name: name != SHORT and (kind, name) != ("fedbuff", "half"),
)
def test_every_kind_of_run(kind: str, name: str) -> None:
    method, settings = KINDS[kind]
    alone, stacked = (federate(method, CHAINS[name], executor=e, **settings) for e in ("loop", "vmap"))
    assert apart(alone, stacked) <= CLOSE
    dense = federate(method, **settings)
    ours, theirs = (run.summary() for run in (alone, dense))
    assert ours["bytes_up"] == stacked.summary()["bytes_up"] < theirs["bytes_up"]
    assert ours["bytes_down"] == theirs["bytes_down"]
    if name == "half":  # not far from what is sent in 32 bits
        assert max(float((alone.shared[k] - v).abs().max()) for k, v in dense.shared.items()) < 5e-2


USUAL = (
    ("width", "private"),
    ("fedbuff", "private, topk"),
    ("deadline, nobody waited for", "private"),
    ("pipeline", "private, topk"),
    ("attack", "private"),
    ("parts", "private"),
)


@each(
    ("kind", "name"),
    [(kind, name) for kind in PRIVATE_KINDS for name in PRIVATE],
    slow=lambda kind, name: kind not in REFUSED_IN_PRIVATE and (kind, name) not in USUAL,
)
def test_every_kind_of_private_run(kind: str, name: str) -> None:
    method, settings = PRIVATE_KINDS[kind]
    if kind in REFUSED_IN_PRIVATE:
        with pytest.raises(check.Refused) as caught:
            federate(method, PRIVATE[name], **settings)
        assert caught.value.field == REFUSED_IN_PRIVATE[kind]
        return
    alone, stacked = (federate(method, PRIVATE[name], executor=e, **settings) for e in ("loop", "vmap"))
    assert apart(alone, stacked) <= (1e-6 if kind == "parts" else CLOSE)
    ours, theirs = (run.summary() for run in (alone, stacked))
    assert ours["privacy"] == theirs["privacy"]
    assert ours["bytes_up"] == theirs["bytes_up"]


@each("name", list(PRIVATE_METHODS))
def test_private_runs_of_methods_that_personalize(name: str) -> None:
    """Stacked as alone; what is released has noise, and what stays with a client has none."""
    method, uploads = PRIVATE_METHODS[name], [pt.privacy.gaussian(noise=1.0, clip=0.05, quantile=0.5)]
    alone, stacked = (federate(method, uploads, executor=e) for e in ("loop", "vmap"))
    assert apart(alone, stacked) <= CLOSE
    account = alone.summary()["privacy"]
    assert account == stacked.summary()["privacy"]
    assert account["epsilon"] == pytest.approx(pt.privacy.epsilon(1.0, 3, rate=5 / CLIENTS))
    far = federate(method, [pt.privacy.gaussian(noise=2.0, clip=0.05, quantile=0.5)])
    assert any(not torch.equal(far.shared[k], v) for k, v in alone.shared.items())


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """For how many runs at once clients have trained."""
    found: set[int] = set()
    compute = member.Joint.__call__

    def noted(self: member.Joint, members: Any, calls: Any) -> Any:
        found.add(len(calls))
        return compute(self, members, calls)

    monkeypatch.setattr(member.Joint, "__call__", noted)
    return found


@each("name", ["topk", "randk", "topk, quantize"])
def test_runs_in_lockstep_are_those_of_each_alone(name: str, joined: set[int]) -> None:
    make = [functools.partial(federate, uploads=CHAINS[name], seed=i) for i in range(3)]
    joined.clear()  # of the case before
    for alone, together in zip([run() for run in make], in_lockstep(make)):
        assert apart(alone, together) <= CLOSE
    assert joined == {3}


def test_runs_that_compress_in_different_ways_go_apart(joined: set[int]) -> None:
    ways = [CHAINS["topk"], [T.topk(0.2)], []]
    make = [functools.partial(federate, uploads=uploads) for uploads in ways]
    for alone, together in zip([run() for run in make], in_lockstep(make)):
        assert apart(alone, together) <= CLOSE
        assert alone.summary()["bytes_up"] == together.summary()["bytes_up"]
    assert not joined


def test_a_cohort_in_parts_is_the_whole_cohort() -> None:
    whole, parts = (federate(uploads=CHAINS["topk, quantize"], memory=m) for m in ("1GiB", "50KiB"))
    assert apart(whole, parts) <= 1e-6
    assert whole.summary()["bytes_up"] == parts.summary()["bytes_up"]


@pytest.mark.slow
def test_workers() -> None:
    for method in (pt.fedavg(lr=0.1), pt.fedavg(lr=0.1, aggregate=pt.aggregate.trimmed_mean(1))):
        one = federate(method, CHAINS["topk, quantize"], downloads=[T.half()])
        two = federate(method, CHAINS["topk, quantize"], downloads=[T.half()], workers=2)
        assert apart(one, two) <= 1e-5
        for key in ("bytes_up", "bytes_down"):
            assert one.summary()[key] == two.summary()[key]


# ---- without loss nothing changes


@each("name", list(methods()), slow=lambda name: name not in ("fedavg", "scaffold", "fedalt"))
def test_all_entries_are_the_same_bits(name: str) -> None:
    method = methods()[name]
    dense = federate(method)
    for uploads in ([T.topk(1.0)], [T.randk(1.0)], [T.low_rank(64)], [T.topk(1.0, feedback=False)]):
        run = federate(method, uploads)
        assert all(torch.equal(v, run.shared[k]) for k, v in dense.shared.items())
        assert run.summary()["bytes_up"] == dense.summary()["bytes_up"]
        assert [row["train_loss"] for row in run.metrics] == [row["train_loss"] for row in dense.metrics]


def test_none_is_no_transform() -> None:
    assert apart(federate(), federate(uploads=[], downloads=[])) == 0.0


# ---- downloads


@each(
    "downloads",
    [[T.half()], [T.quantize(8, stochastic=False)], [T.topk(0.5, feedback=False), T.half()]],
    ids=["half", "nearest", "topk, half"],
)
@each("method", [pt.fedavg(lr=0.1), pt.scaffold(lr=0.1), pt.fedalt("output", lr=0.1)])
def test_downloads(method: Algorithm, downloads: list[Transform]) -> None:
    alone, stacked = (federate(method, downloads=downloads, executor=e) for e in ("loop", "vmap"))
    assert apart(alone, stacked) <= CLOSE
    dense = federate(method)
    assert alone.summary()["bytes_down"] < dense.summary()["bytes_down"]
    assert alone.summary()["bytes_up"] == dense.summary()["bytes_up"]


def test_clients_begin_with_what_they_have_received() -> None:
    """The delta is from what has arrived, and the server goes on in full precision."""
    samples, lr = linear_data(), 0.5
    for executor in ("loop", "vmap"):
        run = pt.federate(
            Linear(), samples, pt.fedavg(lr=lr), rounds=3, steps=1, batch=None, executor=executor,
            downloads=[T.half()], baselines=False, progress=False,
        )  # fmt: skip
        w = Linear().weight.detach().numpy().copy()
        for _ in range(3):
            received = w.astype(np.float16).astype(np.float64)
            sizes, sums = samples.train[:, 1], np.zeros_like(w)
            for i, n in enumerate(sizes):
                x, y = (v.numpy() for v in samples.client(i))
                sums += n * lr * gradient(received, x, y)
            w -= sums / sizes.sum()
        np.testing.assert_allclose(run.shared["weight"].numpy(), w, atol=1e-12)
        assert run.summary()["bytes_down"] == 3 * 5 * 2 * w.size


def test_downloads_of_stale_and_of_stacked_clients() -> None:
    settings = {"schedule": pt.schedule.asynchronous(delays=DELAYS), "rounds": 8, "cohort": None}
    for method in (pt.fedbuff(lr=0.1, buffer=3), pt.fedasync(lr=0.1)):
        runs = [federate(method, downloads=[T.half()], executor=e, **settings) for e in ("loop", "vmap")]
        assert apart(*runs) <= CLOSE


def test_clients_alone_download_nothing() -> None:
    run = federate(pt.local(lr=0.1), [T.topk(0.1)], downloads=[T.half()])
    assert run.summary()["bytes_up"] == run.summary()["bytes_down"] == 0


def test_devices_that_hold_a_part() -> None:
    settings: dict[str, Any] = {"capacity": pt.capacity.depth({"strong": 0, "weak": 1})}
    dense, half = (federate(downloads=some, **settings) for some in ([], [T.half()]))
    assert 4 * half.summary()["bytes_down"] == dense.summary()["bytes_down"]


# ---- baselines, newcomers, other samples, resuming


@pytest.mark.usefixtures("brief_baselines")
def test_baselines_send_as_the_run_does() -> None:
    run = federate(pt.fedalt("output", lr=0.1), CHAINS["topk"], downloads=[T.half()], baselines=True)
    assert all(score is not None for score in run.summary()["test"].values())


def test_newcomers_and_other_samples() -> None:
    """They send nothing, and so are the same whatever uploads pass."""
    for method in (pt.fedalt("output", lr=0.1), pt.ditto(lr=0.1, lam=0.1)):
        run = federate(method, [T.topk(1.0)])
        dense = federate(method)
        new = in_double(pt.data.digits(clients=3, seed=5, validation=0))
        assert run.personalize(new).summary()["test"] == dense.personalize(new).summary()["test"]
        scores = [some.evaluate(data()).numbers("score") for some in (run, dense)]
        assert np.array_equal(*scores, equal_nan=True)


@each("store", ["memory", "disk"])
@each(("method", "settings"), [(pt.fedavg(lr=0.1), {}), KINDS["fedbuff"]])
def test_resumed_is_uninterrupted(method: Algorithm, settings, store: str, tmp_path: Path) -> None:
    """What clients have not sent yet is in the checkpoint."""
    some = {**settings, "rounds": 6, "store": store, "checkpoint_every": 2, "downloads": [T.half()]}
    uploads = CHAINS["topk, quantize"]
    straight = federate(method, uploads, out=tmp_path / "straight", **some)
    with pytest.raises(RuntimeError):
        federate(method, uploads, out=tmp_path / "killed", callbacks=[Stop(5, RuntimeError)], **some)
    resumed = federate(method, uploads, out=tmp_path / "killed", resume=True, **some)
    assert apart(straight, resumed) == 0.0
    assert remembered(straight)
    assert straight.summary()["bytes_up"] == resumed.summary()["bytes_up"]
    assert straight.summary()["bytes_down"] == resumed.summary()["bytes_down"]
    with pytest.raises(check.Refused):
        federate(method, [T.topk(0.2)], out=tmp_path / "killed", resume=True, **some)


def test_a_folder_says_what_was_sent(tmp_path: Path) -> None:
    federate(uploads=CHAINS["topk, quantize"], downloads=[T.half()], out=tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [t["name"] for t in config["uploads"]] == ["topk", "quantize"]
    assert config["uploads"][0]["share"] == 0.1
    assert config["downloads"][0]["dtype"] == "float16"
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert json.loads(rows[-1])["bytes_up"] == summary["bytes_up"] > 0
    loaded = pt.load(tmp_path / "run")
    assert loaded.summary()["bytes_up"] == summary["bytes_up"]
