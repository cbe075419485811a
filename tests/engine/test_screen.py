"""What is unusable is set aside and named; the run goes on as if its client were not there."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from algorithms.test_every_algorithm import CASES, RELATED, make
from partita.algorithms import METHODS
from partita.core.parts import Aggregator, Attack
from partita.core.tree import NOT_FINITE, TOO_LARGE, faults
from partita.core.types import Cohort, ServerState, Upload
from partita.engine.callbacks import Callback
from partita.engine.screen import screen
from partita.schedule import Running, StageSpec
from support import each

SIZES, BAD = [9, 7, 5, 8], 2


# ---- what clients computed


def usable(kept: Any, clients: int) -> list[bool]:
    return [not why for why in faults(Upload({}), kept, clients)]


@each("poison", [float("nan"), float("inf"), -float("inf")])
@each("where", ["delta", "extra", "state"])
def test_one_bad_entry_names_its_client(poison, where) -> None:
    parts = {"delta": torch.zeros(4, 3, 2), "extra": torch.zeros(4), "state": torch.zeros(4, 1)}
    parts[where].view(4, -1)[2, -1] = poison
    stacks = (
        {"a": parts["delta"]},
        {"x": parts["extra"]},
        parts["state"],
        torch.zeros(4, 2, dtype=torch.int64),
    )
    assert usable(stacks, 4) == [True, True, False, True]


def test_opposite_infinities_do_not_cancel() -> None:
    x = torch.zeros(2, 4)
    x[0, 1], x[0, 2] = float("inf"), -float("inf")
    assert usable(x, 2) == [False, True]


def test_large_and_finite_may_be_kept() -> None:
    """The quick sum overflows, the closer look finds nothing wrong."""
    x = torch.full((3, 10), 3e38)
    assert usable(x, 3) == [True] * 3
    x[1, 4] = float("nan")
    assert usable(x, 3) == [True, False, True]


@pytest.mark.parametrize("where", ["delta", "extra", "sums"])
def test_what_is_sent_must_be_small_enough_to_be_squared(where: str) -> None:
    x = torch.ones(4, 10)
    x[1, 4], x[2, 5], x[3, 6] = 1e25, float("nan"), -1e18
    sent = Upload(**{"delta": {}, where: {"w": x}})
    assert faults(sent, torch.zeros(4), 4) == ["", TOO_LARGE, NOT_FINITE, ""]
    many = Upload({"w": torch.full((2, 1000), 1e18)})  # each can be squared, their sum cannot
    assert faults(many, (), 2) == [TOO_LARGE] * 2


@each(
    ("dtype", "large", "too_large"),
    [
        (torch.float64, 1e150, 1e160),
        (torch.float32, 1e18, 1e20),
        (torch.bfloat16, 1e18, 1e20),
        (torch.float16, 6e4, float("inf")),  # lengths of short numbers are taken in single precision
    ],
    ids=str,
)
def test_too_large_depends_on_the_precision(dtype: torch.dtype, large: float, too_large: float) -> None:
    for value, fine in ((large, True), (too_large, False)):
        assert (faults(Upload({"w": torch.tensor([[value]], dtype=dtype)}), (), 1) == [""]) == fine


def test_nothing_to_look_at() -> None:
    assert usable(({}, {}), 3) == [True] * 3
    assert usable(torch.zeros(3, 2, dtype=torch.int64), 3) == [True] * 3
    assert usable(torch.zeros(3, 0), 3) == [True] * 3


# ---- what else may arrive


def expected(weight: tuple[float, ...] = (5.0, 8.0, 7.0)) -> Upload:
    n = len(weight)
    delta = {"w": torch.zeros(n, 4, 1), "b": torch.zeros(n, 4), "s": torch.zeros(n)}
    delta["count"] = torch.zeros(n, dtype=torch.int64)
    return Upload(delta, torch.tensor(weight, dtype=torch.float64), {"c": torch.zeros(n, 2)})


def good(**changed: Any) -> dict[str, Any]:
    own = {"w": torch.ones(4, 1), "b": torch.ones(4), "s": torch.tensor(1.0), "count": torch.tensor(3)}
    return {**own, **changed}


def reason(delta: Any, weight: Any = None, extra: Any = None) -> str:
    """Why the upload of the client in the middle is set aside."""
    extra = {"c": torch.ones(2)} if extra is None else extra
    upload = Upload(delta, torch.tensor(6.0) if weight is None else weight, extra)
    arrived, why = screen(expected(), [""] * 3, {1: upload})
    assert why[0] == why[2] == ""
    assert why[1] or torch.equal(arrived.delta["b"][1], torch.ones(4))
    for k, x in expected().delta.items():
        assert torch.equal(arrived.delta[k][[0, 2]], x[[0, 2]])
        assert arrived.delta[k].dtype == x.dtype
    return why[1]


def unfit(upload: Upload, known: Upload, place: int) -> str:
    """Why an upload at this place is set aside."""
    assert known.weight is not None
    return screen(known, [""] * len(known.weight), {place: upload})[1][place]


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in good().items() if k != name}


def test_a_good_upload_takes_its_place() -> None:
    assert reason(good()) == ""
    arrived, _ = screen(expected(), [""] * 3, {1: Upload(good(), torch.tensor(6), {"c": torch.ones(2)})})
    assert arrived.weight is not None
    assert arrived.weight.tolist() == [5, 6, 7]
    assert arrived.delta["count"].tolist() == [0, 3, 0]
    assert arrived.extra["c"].tolist() == [[0, 0], [1, 1], [0, 0]]


DOUBLE = torch.float64
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name is missing": ({"delta": without("b")}, "without b"),
    "an unknown name": ({"delta": good(x=torch.ones(1))}, "unknown name x"),
    "a name that is a number": ({"delta": {**good(), 3: torch.ones(1)}}, "unknown name 3"),
    "a name that is nothing": ({"delta": {**good(), None: torch.ones(1)}}, "unknown name None"),
    "nothing of what else is sent": ({"delta": good(), "extra": {}}, "without c"),
    "something else instead": ({"delta": good(), "extra": {"d": torch.ones(2)}}, "without c"),
    "one entry": ({"delta": good(b=torch.ones(1))}, "b of shape [1], not [4]"),
    "a column": ({"delta": good(b=torch.ones(4, 1))}, "b of shape [4, 1], not [4]"),
    "no column": ({"delta": good(w=torch.ones(4))}, "w of shape [4], not [4, 1]"),
    "a row": ({"delta": good(w=torch.ones(1, 4))}, "w of shape [1, 4], not [4, 1]"),
    "one number": ({"delta": good(b=torch.tensor(1.0))}, "b of shape [], not [4]"),
    "one entry for a number": ({"delta": good(s=torch.ones(1))}, "s of shape [1], not []"),
    "no entry": ({"delta": good(b=torch.ones(0))}, "b of shape [0], not [4]"),
    "complex": ({"delta": good(b=torch.ones(4, dtype=torch.complex64))}, "b of type torch.complex64"),
    "boolean": (
        {"delta": good(b=torch.ones(4, dtype=torch.bool))},
        "b of type torch.bool, not torch",
    ),
    "whole": ({"delta": good(b=torch.ones(4, dtype=torch.int64))}, "b of type torch.int64"),
    "a counter with decimals": ({"delta": good(count=torch.tensor(3.0))}, "count of type torch.float32"),
    "sparse": ({"delta": good(b=torch.ones(4).to_sparse())}, "b without its numbers"),
    "on no device": ({"delta": good(b=torch.ones(4, device="meta"))}, "b without its numbers"),
    "a list": ({"delta": good(b=[1.0] * 4)}, "b of type list, not a tensor"),
    "an array": ({"delta": good(b=np.ones(4))}, "b of type ndarray, not a tensor"),
    "a Python number": ({"delta": good(s=1.0)}, "s of type float, not a tensor"),
    "no value": ({"delta": good(b=None)}, "b of type NoneType, not a tensor"),
    "no delta": ({"delta": None}, "NoneType, not named tensors"),
    "tensors without names": ({"delta": [torch.ones(4)]}, "list, not named tensors"),
    "one tensor": ({"delta": torch.ones(4)}, "Tensor, not named tensors"),
    "NaN": ({"delta": good(b=torch.full((4,), float("nan")))}, NOT_FINITE),
    "infinite beside": ({"delta": good(), "extra": {"c": torch.tensor([1, float("inf")])}}, NOT_FINITE),
    "overflows in single precision": (
        {"delta": good(b=torch.full((4,), 1e300, dtype=DOUBLE))},
        "b of type torch.float64, not torch.float32",
    ),
    "too large": ({"delta": good(b=torch.full((4,), 1e25))}, TOO_LARGE),
    "too large beside": ({"delta": good(), "extra": {"c": torch.full((2,), -1e30)}}, TOO_LARGE),
    "a negative weight": ({"delta": good(), "weight": torch.tensor(-1.0)}, "weight -1"),
    "weight NaN": ({"delta": good(), "weight": torch.tensor(float("nan"))}, "weight nan"),
    "weight infinite": ({"delta": good(), "weight": torch.tensor(float("inf"))}, "weight inf"),
    "a huge weight": ({"delta": good(), "weight": torch.tensor(1e15)}, "weight 1e+15"),
    "just above its weight": ({"delta": good(), "weight": torch.tensor(8.001)}, "weight 8.001"),
    "one sample more": ({"delta": good(), "weight": torch.tensor(9)}, "weight 9"),
    "five times its weight": ({"delta": good(), "weight": torch.tensor(40.0)}, "weight 40"),
    "900 times its weight": ({"delta": good(), "weight": torch.tensor(7200.0)}, "weight 7200"),
    "thousands": ({"delta": good(), "weight": torch.tensor(5000.0)}, "weight 5000"),
    "weights": ({"delta": good(), "weight": torch.ones(2)}, "weight of shape [2]"),
    "an empty weight": ({"delta": good(), "weight": torch.ones(0)}, "weight of shape [0]"),
    "a complex weight": (
        {"delta": good(), "weight": torch.tensor(1j)},
        "weight of shape []",
    ),
    "weight is a Python number": ({"delta": good(), "weight": 6}, "weight of type int, not a tensor"),
    "weight is a word": ({"delta": good(), "weight": "many"}, "weight of type str, not a tensor"),
}


@each("what", WRONG)
def test_what_does_not_fit_is_set_aside_with_its_reason(what: str) -> None:
    given, words = WRONG[what]
    assert reason(**given).startswith(words)


@each("upload", [None, 3, "x", [], {}, (1, 2, 3, 4, 5), torch.ones(3)], ids=str)
def test_what_is_no_upload_is_set_aside(upload: Any) -> None:
    _, why = screen(expected(), [""] * 3, {1: upload})
    assert why == ["", f"{type(upload).__name__}, not an upload", ""]


OTHERS = [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@each("dtype", OTHERS, ids=str)
def test_another_precision_is_set_aside(dtype: torch.dtype) -> None:
    """A client of this run has numbers of the model's type: whoever sends others is none."""
    other = torch.ones(4).to(dtype)
    assert reason(good(b=other)) == f"b of type {dtype}, not torch.float32"
    assert reason(good(), extra={"c": other[:2]}) == f"c of type {dtype}, not torch.float32"


def test_another_kind_of_counter_is_set_aside() -> None:
    short = torch.tensor(3, dtype=torch.int32)
    assert reason(good(count=short)) == "count of type torch.int32, not torch.int64"


@each("weight", [8.0, 8, 7.999, 1.0, 0.0, 0, None])
def test_a_client_counts_for_what_it_has_or_less(weight: float | None) -> None:
    claimed = None if weight is None else torch.tensor(weight)
    upload = Upload(good(), claimed, {"c": torch.ones(2)})
    assert unfit(upload, expected(), 1) == ""
    arrived, why = screen(expected(), [""] * 3, {1: upload})
    assert arrived.weight is not None
    assert why == [""] * 3
    assert arrived.weight.tolist() == pytest.approx([5.0, 8.0 if weight is None else weight, 7.0])


def test_only_its_own_weight_counts_however_large() -> None:
    upload = Upload(good(), torch.tensor(9e4), {"c": torch.ones(2)})
    assert unfit(upload, expected((1.0, 9e4, 1.0)), 1) == ""
    assert unfit(upload, expected((0.0, 9e4, 0.0)), 1) == ""
    assert unfit(upload, expected((9e4,)), 0) == ""  # nobody else is there
    assert unfit(upload, expected((9e4, 1.0, 9e4)), 1) == "weight 90000"
    one = Upload(good(), torch.tensor(1.0), {"c": torch.ones(2)})
    assert unfit(one, expected((9.0, 0.0, 9.0)), 1) == "weight 1"  # it has no data


def test_a_gradient_does_not_travel() -> None:
    upload = Upload(good(b=torch.ones(4, requires_grad=True) * 2), extra={"c": torch.ones(2)})
    arrived, why = screen(expected(), [""] * 3, {1: upload})
    assert why == [""] * 3
    assert not arrived.delta["b"].requires_grad


# ---- in a run


def data(scale: float = 1.0, without: bool = False, bad: int = BAD) -> pt.data.FederatedData:
    """Four clients; the features of one are scaled, or it has no training samples."""
    g = torch.Generator().manual_seed(0)
    n, m = sum(SIZES), 3 * len(SIZES)
    x, y = torch.rand(n + m, 4, generator=g) + 0.5, torch.randint(0, 3, (n + m,), generator=g)
    ends = np.cumsum(SIZES)
    train = [(int(e) - s, s) for e, s in zip(ends, SIZES)]
    test = [(n + 3 * i, 3) for i in range(len(SIZES))]
    begin, length = train[bad]
    x[begin : begin + length] *= scale
    if without:
        train[bad] = (begin, 0)
    return pt.data.FederatedData.make(x, y, train, test, names=["ann", "bob", "eve", "joe"])


class Told(Callback):
    def __init__(self) -> None:
        self.excluded: list[tuple[str, ...]] = []

    def round(self, event) -> None:
        self.excluded.append(event.excluded)


def run(source, method, executor, **options):
    common = {"rounds": 3, "batch": 4, "epochs": 1, "baselines": False, "evaluate_every": 1, "metric": "loss"}
    return pt.federate(pt.models.mlp(4, 6, 3), source, method, executor=executor, **{**common, **options})


def close(a, b) -> None:
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=1e-5, atol=1e-6)


@each("executor", ["loop", "vmap"])
@each("method", [pt.fedavg(lr=0.1), pt.fedalt("output", lr=0.1), pt.local(lr=0.1)])
def test_the_run_goes_on_without_the_client(method, executor) -> None:
    told = Told()
    got = run(data(scale=1e38), method, executor, callbacks=[told])
    expected = run(data(without=True), method, executor)
    assert told.excluded == [("eve",)] * 3
    assert got.summary()["excluded"] == ["eve"]
    assert [row["excluded"] for row in got.metrics] == [["eve"]] * 3
    assert expected.summary()["excluded"] == []
    close(got.shared, expected.shared)
    for i in range(4):  # its own state included: as if it had never trained
        close(got.client(i).personal, expected.client(i).personal)
    for a, b in zip(got.metrics, expected.metrics):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a["test.personal"] == pytest.approx(b["test.personal"], rel=1e-5)
    assert all(torch.isfinite(x).all() for x in got.shared.values())


class Without:
    """The same cohorts less one client."""

    def __init__(self, client: int) -> None:
        self.client = client

    def check(self, clients: int, cohort: int) -> None:
        """Any number fits."""

    def of(self, algorithm: Any) -> Without:  # noqa: ARG002
        return self

    def begin(self, spec: StageSpec) -> Running:
        turns = pt.schedule.synchronous().begin(spec)
        whole = turns.next

        def others(server: ServerState) -> Cohort:
            found = whole(server)
            chosen = tuple(c for c in found.clients if c != self.client)
            group = found.groups[0]._replace(positions=tuple(range(len(chosen))))
            left = {"staleness": (0,) * len(chosen), "delays": found.delays[: len(chosen)]}
            return found._replace(clients=chosen, groups=(group,), **left)

        turns.next = others
        return turns


def assert_as_if_it_were_not_there(method: Any, client: int = BAD, bad: Any = None, **options: Any) -> Any:
    """The server and all other clients have the bits of a run that never picks this one."""
    given = {**options, "attack": None, "byzantine": ()}
    expected = run(data(), method, "loop", **given, schedule=Without(client))
    got = run(bad or data(), method, "loop", **options, schedule=pt.schedule.synchronous())
    assert list(got.summary()["excluded_why"]) == ["eve"]
    same = [(got.shared, expected.shared)]
    for i in {0, 1, 2, 3} - {client}:
        a, b = got.client(i), expected.client(i)
        same += [(a.personal, b.personal), (a.memory, b.memory)]
    for a, b in same:
        assert a.keys() == b.keys()
        for k in a:
            assert torch.equal(a[k], b[k]), k
    assert [r["train_loss"] for r in got.metrics] == [r["train_loss"] for r in expected.metrics]
    return got


UNUSABLE = [pt.attack.nonfinite(value) for value in ("nan", "inf", "-inf")]
UNUSABLE += [pt.attack.malformed(how) for how in ("names", "shape", "broadcast", "weight", "greed")]
unusable = each("attack", UNUSABLE, ids=lambda a: " ".join(a.options.values()))


RULES = [pt.fedavg(lr=0.1), pt.fedalt("output", lr=0.1), pt.fedadam(0.1, 0.01)]


@unusable
@each(
    ("method", "cohort"),
    [(method, cohort) for method in RULES for cohort in (None, 3)],
    slow=lambda method, cohort: (method.name == "fedalt") == (cohort is None),
)
def test_with_a_byzantine_client_set_aside_as_without_it(
    attack: Any, method: Any, cohort: int | None
) -> None:
    assert_as_if_it_were_not_there(method, attack=attack, byzantine=["eve"], rounds=4, cohort=cohort)


SENDS = [name for name in METHODS if name in CASES and CASES[name].up and name != "pipeline"]


@each("name", SENDS, slow=lambda name: name in RELATED)
@each("attack", [pt.attack.nonfinite(), pt.attack.malformed()], ids=lambda a: a.name)
def test_whatever_the_method(name: str, attack: Any) -> None:
    method = make(name, CASES[name].options)
    assert_as_if_it_were_not_there(method, attack=attack, byzantine=["eve"])


@pytest.mark.parametrize("how", ["names", "shape", "broadcast", "weight", "greed"])
def test_whatever_the_stage(how: str) -> None:
    stages = pt.pipeline(
        pt.stage(pt.fedavg(lr=0.1), rounds=2), pt.stage(pt.fedalt("output", lr=0.1), rounds=2, cohort=3)
    )
    attack = pt.attack.malformed(how)
    assert_as_if_it_were_not_there(stages, attack=attack, byzantine=["eve"], rounds=None)


def aggregators() -> list[Aggregator]:
    """All of them, with arguments that three honest clients can bear."""
    a = pt.aggregate
    return [
        a.mean(),
        a.coordinate_median(),
        a.trimmed_mean(1),
        a.geometric_median(),
        a.krum(0),
        a.multi_krum(0, 2),
        a.centered_clipping(1.0),
        a.smoothed_coordinate_median(0.1),
        a.smoothed_geometric_median(0.1),
        a.layerwise({"*.bias": a.mean(), "*": a.coordinate_median()}),
        a.bucketing(2, a.coordinate_median()),
        a.nnm(1, a.mean()),
    ]


def test_no_aggregator_is_left_out() -> None:
    assert {found.name for found in aggregators()} == set(pt.aggregate.__all__)


@each("aggregate", aggregators(), ids=lambda a: a.name)
@each("attack", [pt.attack.nonfinite(), pt.attack.malformed("greed")], ids=lambda a: a.name)
def test_whatever_the_aggregator(aggregate: Any, attack: Any) -> None:
    method = pt.fedavg(lr=0.1, aggregate=aggregate)
    assert_as_if_it_were_not_there(method, attack=attack, byzantine=["eve"])


ROBUST = [pt.rfa(lr=0.1), pt.fedavg(lr=0.1, aggregate=pt.aggregate.coordinate_median())]


@each("method", ROBUST, ids=["rfa", "median"])
@each("times", [1.001, 5.0, 900.0])
def test_a_quarter_that_claims_more_than_it_has_changes_nothing(method: Any, times: float) -> None:
    """Five times the weight would make a majority of the quarter."""

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Any) -> dict[int, Upload]:  # noqa: ARG001
        assert uploads.weight is not None
        lie = {k: -10 * v for k, v in uploads.delta.items()}
        return {i: Upload({k: v[i] for k, v in lie.items()}, times * uploads.weight[i]) for i in byzantine}

    greedy = Attack("greedy", forge, None, {})
    got = assert_as_if_it_were_not_there(method, attack=greedy, byzantine=["eve"])
    assert got.summary()["excluded_why"] == {"eve": f"weight {times * SIZES[BAD]:g}"}


@pytest.mark.parametrize("method", [pt.fedavg(lr=0.1), pt.fedsim("output", lr=0.1)], ids=lambda m: m.name)
@pytest.mark.parametrize(("steps", "why"), [(1, TOO_LARGE), (2, NOT_FINITE)])
def test_an_honest_client_that_diverged_is_as_if_it_were_not_there(method, steps, why) -> None:
    """After one step on features of 1e25 all is finite, and too large to be squared."""
    options = {"batch": None, "epochs": steps, "rounds": 2}
    got = assert_as_if_it_were_not_there(method, bad=data(scale=1e25), **options)
    assert got.summary()["excluded_why"] == {"eve": why}
    never = run(data(), method, "loop", **options, schedule=Without(BAD))
    for k, v in never.client(BAD).personal.items():  # its own state included: as if it had never trained
        assert torch.equal(got.client(BAD).personal[k], v)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_the_largest_client_may_be_the_bad_one(executor) -> None:
    """It is the one that the trial before the run looks at; its squared errors overflow."""

    def squared(scale: float = 1.0, without: bool = False) -> pt.data.FederatedData:
        source = data(scale, without, bad=0)
        return replace(source, y=source.y.float())

    method = pt.fedavg(lr=0.01)
    options = {"executor": executor, "rounds": 2, "batch": 4, "baselines": False}
    got = pt.federate(pt.models.mlp(4, 6, 1), squared(1e38), method, **options)
    assert got.summary()["excluded"] == ["ann"]
    close(got.shared, pt.federate(pt.models.mlp(4, 6, 1), squared(without=True), method, **options).shared)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_client_keeps_the_state_of_its_last_good_round(executor) -> None:
    """The rate explodes in the third round: everybody is set aside and stays where it was."""

    def rate(t: int, rounds: int) -> float:  # noqa: ARG001
        return 0.1 if t < 2 else 1e300

    def until(rounds: int):
        return run(data(), pt.fedalt("output", lr=rate), executor, rounds=rounds)

    good, bad = until(2), until(4)
    assert bad.summary()["excluded"] == ["ann", "bob", "eve", "joe"]
    assert bad.summary()["rounds"] == bad.metrics[-1]["round"] == 4
    assert [row["excluded"] for row in bad.metrics[:2]] == [[], []]
    assert all(torch.equal(good.shared[k], bad.shared[k]) for k in good.shared)
    for i in range(4):
        a, b = good.client(i).personal, bad.client(i).personal
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert bad.metrics[-1]["train_loss"] is None
    assert bad.metrics[-1]["test.personal"] == good.metrics[-1]["test.personal"]


def test_server_memory_is_not_poisoned() -> None:
    got = run(data(scale=1e38), pt.fedadam(lr=0.1, server_lr=0.01), "loop")
    close(got.shared, run(data(without=True), pt.fedadam(lr=0.1, server_lr=0.01), "loop").shared)


def test_only_a_cohort_with_the_client_names_it() -> None:
    told = Told()
    got = run(data(scale=1e38), pt.fedavg(lr=0.1), "loop", rounds=8, cohort=2, callbacks=[told])
    assert set(told.excluded) == {(), ("eve",)}
    first = told.excluded.index(("eve",))
    assert [row["excluded"] for row in got.metrics] == [[]] * first + [["eve"]] * (8 - first)


def test_the_files_name_it(tmp_path) -> None:
    out = tmp_path / "run"
    run(data(scale=1e38), pt.fedalt("output", lr=0.1), "loop", out=out)
    assert json.loads((out / "summary.json").read_text())["excluded"] == ["eve"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["excluded"] for row in rows] == [["eve"]] * 3
    with (out / "clients.csv").open(newline="") as f:
        assert [row["client"] for row in csv.DictReader(f)] == ["ann", "bob", "eve", "joe"]
