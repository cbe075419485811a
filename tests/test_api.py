"""What a run does around its rounds: baselines, cohorts in parts, folders that are not its own, warnings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.engine import stage as stages
from partita.engine.execute import plan

METHOD = pt.fedalt(personal="output", lr=0.1)


def arrays(clients: int = 6, n: int = 10, classes: int = 3) -> pt.data.FederatedData:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * n, 5)).astype("float32")
    return pt.data.from_arrays(x, rng.integers(0, classes, len(x)), np.repeat(np.arange(clients), n))


def run(
    model: nn.Module | None = None, data: object = None, method: object = METHOD, **options: object
) -> pt.Run:
    given = {"rounds": 2, "epochs": 1, "batch": 4, "baselines": False, **options}
    return pt.federate(model or pt.models.mlp(5, 4, 3), data or arrays(), method, **given)  # type: ignore[arg-type]


def test_alone_means_trained_alone() -> None:
    """As a method, a client that had no turn has no local score, and does not count as hurt."""
    few = run(method=pt.local(lr=0.1), cohort=2, rounds=1)
    assert (~np.isnan(few.scores("local"))).sum() == 2
    assert few.summary()["hurt"]["vs_local"] == 0


@pytest.mark.parametrize("method", [METHOD, pt.finetune(personal="all", lr=0.1), pt.fedavg(lr=0.1)])
def test_a_cohort_in_parts_is_the_same_cohort(method: object, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(method=method, cohort=5, executor="loop")
    monkeypatch.setattr(stages, "BLOCK_CLIENTS", 2)
    parts = run(method=method, cohort=5, executor="loop")
    for name, value in whole.shared.items():
        assert torch.equal(parts.shared[name], value)
    for i in range(6):
        for name, value in whole.client(i).personal.items():
            assert torch.equal(parts.client(i).personal[name], value)
    assert whole.metrics[-1]["bytes_up"] == parts.metrics[-1]["bytes_up"]


def test_a_folder_of_something_else_is_left_alone(tmp_path) -> None:
    other = tmp_path / "checkpoint" / "model.pt"
    other.parent.mkdir()
    other.write_text("precious")
    with pytest.raises(ValueError, match=r"model\.pt"):
        run(out=tmp_path)
    assert other.read_text() == "precious"


def test_a_run_without_checkpoints_is_not_overwritten(tmp_path) -> None:
    import shutil

    run(out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="no checkpoint left"):
        run(out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


class Averaging(nn.Module):
    """Keeps a statistic by assigning a new tensor to its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x - self.mean)


def test_a_buffer_that_is_assigned_moves() -> None:
    found = run(Averaging(), method=pt.fedavg(lr=0.1), norm="global", executor="loop")
    assert found.shared["mean"].abs().sum() > 0


def test_statistics_over_padding_are_not_stacked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.InstanceNorm1d(1, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(5, 3),
    )
    with pytest.warns(UserWarning, match="statistics differ"):
        found = run(model, method=pt.fedavg(lr=0.1), norm="global", executor="vmap")
    alone = run(model, method=pt.fedavg(lr=0.1), norm="global", executor="loop")
    assert torch.equal(found.shared["1.running_mean"], alone.shared["1.running_mean"])


def test_whole_numbers_to_predict_are_no_classes() -> None:
    data = arrays(classes=50)
    with pytest.raises(ValueError, match="loss='mse'"):
        run(nn.Linear(5, 1), data, pt.fedavg(lr=0.01))
    numbers = run(nn.Linear(5, 1), data, pt.fedavg(lr=0.001), loss="mse")
    assert numbers.summary()["metric"] == "mse"


def test_the_direction_of_a_loss_as_metric() -> None:
    assert not run(metric=F.nll_loss).higher_is_better
    x = np.random.default_rng(0).normal(size=(20, 5)).astype("float32")
    data = pt.data.from_arrays(x, x[:, :1], np.arange(20) % 4)
    assert not run(nn.Linear(5, 1), data, pt.fedavg(lr=0.01), metric=nn.MSELoss()).higher_is_better


def test_a_metric_may_return_a_number() -> None:
    def right(output: torch.Tensor, target: torch.Tensor) -> float:
        return (output.argmax(-1) == target).float().mean().item()

    metrics = (pt.Metric(right, higher_is_better=True), "accuracy")
    mine, ours = (run(metric=metric, executor="loop") for metric in metrics)
    assert mine.metrics[-1]["test.personal"] == pytest.approx(ours.metrics[-1]["test.personal"])


def test_float64_is_explained() -> None:
    """That of tensors is kept, as somebody has asked for it; NumPy's becomes float32."""
    x = torch.randn(20, 5, dtype=torch.float64)
    data = pt.data.from_arrays(x, np.arange(20) % 3, np.arange(20) % 4)
    with pytest.raises(ValueError, match="convert x"):
        run(data=data)


def test_tied_output_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"2\.weight is the same tensor as 0\.weight"):
        run(model)


def test_many_passes_are_ordered_like_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sort for more passes than fit beside the random bits gives the same order."""
    key, n, passes = np.arange(4), np.array([3, 0, 5, 2]), np.array([2, 0, 3, 1])
    few, _ = plan._orders(key, n, passes, torch.device("cpu"))
    monkeypatch.setattr(plan, "NUMBERED_PASSES", 1)
    many, _ = plan._orders(key, n, passes, torch.device("cpu"))
    assert torch.equal(few, many)


def test_turns_are_even() -> None:
    turns = pt.schedule.synchronous(order="turns").begin(
        pt.schedule.StageSpec(clients=7, cohort=3, first=0, rounds=6, seed=0, time=0.0, steps=lambda _: 1)
    )
    from partita.core.types import ServerState

    seen = [c for r in range(6) for c in turns.next(ServerState({}, {}, {}, r)).clients]
    assert sorted(seen) == sorted([*range(7), *range(7)])


def test_a_wrong_schedule_is_named() -> None:
    with pytest.raises(ValueError, match="schedule='async'"):
        run(schedule="async")
    with pytest.raises(ValueError, match="order='round'"):
        pt.schedule.synchronous(order="round")


def test_resume_keeps_what_was_picked(tmp_path) -> None:
    """Also when it was picked after the last checkpoint: config.json has it."""
    import json

    out = tmp_path / "run"

    class Stop(pt.callbacks.Callback):
        def round(self, event: pt.callbacks.Event) -> None:
            if event.round == 2:
                raise InterruptedError

    with pytest.raises(InterruptedError):
        run(out=out, rounds=4, callbacks=[Stop()], evaluate_every=4)
    config = json.loads((out / "config.json").read_text())
    picks = config["executor"]["picks"]
    role = next(iter(picks))
    picks[role] = {"picked": "loop", "why": "for a test"}
    (out / "config.json").write_text(json.dumps(config))
    run(out=out, rounds=4, resume=True, evaluate_every=4)
    assert json.loads((out / "config.json").read_text())["executor"]["picks"][role]["why"] == "for a test"


# ---- stages


def test_clients_without_a_state_begin_alike_after_any_stage() -> None:
    """ffgg starts from the model's own part, not from what a client has learned in the stage before."""
    model = pt.models.mlp(5, 4, 3, seed=1)
    start = {k: v.clone() for k, v in model.state_dict().items() if k.startswith("output")}
    fit = pt.ffgg("output", 0.0, pt.gd(1, 0.0), start="model")  # w stays where it begins
    both = run(model, method=pt.pipeline(pt.stage(METHOD, rounds=2), pt.stage(fit, rounds=1)))
    assert start
    for i in range(6):
        own = both.personalized(i)
        for name, value in start.items():
            assert torch.equal(both.client(i).personal[name], value)
            assert torch.equal(own[name], value)


def test_clients_with_a_state_take_it_along() -> None:
    """After ffgg they have none: fine-tuning starts from the model's part, and keeps what it finds."""
    model = pt.models.mlp(5, 4, 3, seed=1)
    start = {k: v.clone() for k, v in model.state_dict().items() if k.startswith("output")}
    before = {"fedalt": METHOD, "ffgg": pt.ffgg("output", 0.1, pt.gd(5, 0.1))}
    last = {
        name: run(model, method=pt.pipeline(pt.stage(m, rounds=2), pt.stage(pt.finetune("output", 0.0))))
        for name, m in before.items()
    }
    for i in range(6):
        for name, value in start.items():
            assert torch.equal(last["ffgg"].client(i).personal[name], value)
            assert not torch.equal(last["fedalt"].client(i).personal[name], value)


# ---- what the summary says of those who are set aside


def summary(attack: object = None, lr: float = 0.1) -> str:
    lying = {} if attack is None else {"attack": attack, "byzantine": [1, 4]}
    return str(run(method=pt.fedavg(lr=lr), executor="loop", **lying).summary())


def test_the_summary_says_why_clients_are_excluded() -> None:
    text = summary(pt.attack.malformed("names"))
    assert "2 Byzantine clients (malformed); scores are those of the honest clients" in text
    assert "excluded for unusable uploads: 1 (without hidden1.linear.weight), 4 (" in text
    assert "lr" not in text


def test_the_rate_is_suspected_only_where_honest_clients_diverge() -> None:
    assert "lr" not in summary()
    assert "excluded" not in summary(pt.attack.sign_flip())
    assert "1 (not finite), 4 (not finite)\n" in summary(pt.attack.nonfinite())
    assert "lower lr=1e+30" in summary(lr=1e30)
    assert "lower lr=1e+30" in summary(pt.attack.nonfinite(), lr=1e30)
