"""Who diverged is said first: in the summary, on the command line, on the page, and while a run goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita.algorithms.by_name import by_name
from partita.core import parts
from partita.engine.callbacks import Callback, Event, ProgressBar
from partita.engine.counters import Tally
from partita.engine.description import describe
from partita.engine.divergence import rates, sentences
from partita.recipes import RECIPES, Experiment
from partita.recipes.digits import digits
from support import Command

pytestmark = pytest.mark.filterwarnings("ignore:.*diverged in round:UserWarning")
CLIENTS, HIGH = 6, 1e30


def data(scale: float = 1.0) -> pt.data.FederatedData:
    """Six clients; the features of client 2 are larger than they should be."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 5)).astype("float32")
    client = np.arange(120) % CLIENTS
    y = (x[:, 0] > 0).astype(int)
    x[client == 2] *= scale
    return pt.data.from_arrays(x, y, client)


def run(method: parts.Algorithm, source: pt.data.FederatedData | None = None, **options: Any) -> pt.Run:
    given: dict[str, Any] = {"rounds": 3, "steps": 4, "executor": "loop", "baselines": False} | options
    return pt.federate(pt.models.mlp(5, 8, 2), source or data(), method, **given)


# ---- the summary


def test_a_run_that_learned_nothing_says_so_first() -> None:
    found = run(pt.fedalt("output", lr=HIGH, personal_lr=0.1))
    diverged = found.summary()["diverged"]
    assert diverged == {
        "clients": CLIENTS,
        "of": CLIENTS,
        "first": 1,
        "last": 3,
        "set_aside": 18,
        "uploads": 18,
        "why": diverged["why"],
        "finite": True,
        "nothing_learned": True,
        "rates": {"lr": HIGH, "personal_lr": 0.1},
        "baselines": {},
    }
    assert sum(diverged["why"].values()) == CLIENTS
    first, second, third, title = str(found.summary()).splitlines()[:4]
    assert first.startswith("DIVERGED. 6 of 6 clients diverged from round 1 to round 3: 18 of 18 uploads")
    assert "the model is the initial one" in second
    assert "lower lr=1e+30, personal_lr=0.1" in third
    assert title.startswith("fedalt: 6 clients")


def test_a_run_that_is_sound_says_nothing() -> None:
    found = run(pt.fedavg(lr=0.1))
    assert found.summary()["diverged"] is None
    assert str(found.summary()).startswith("fedavg: 6 clients")


def test_one_client_with_broken_data_is_told_apart_from_a_high_rate() -> None:
    found = run(pt.fedavg(lr=0.5), data(1e30))
    diverged = found.summary()["diverged"]
    assert (diverged["clients"], diverged["nothing_learned"], diverged["set_aside"]) == (1, False, 3)
    assert "Look at the data of these clients" in str(found.summary())


def test_byzantine_clients_that_are_set_aside_have_not_diverged() -> None:
    lies = {"attack": pt.attack.nonfinite(), "byzantine": [1, 4]}
    sound = run(pt.fedavg(lr=0.1), **lies)
    assert sound.summary()["excluded"] == ["1", "4"]
    assert sound.summary()["diverged"] is None
    both = run(pt.fedavg(lr=HIGH), **lies)
    assert len(both.summary()["excluded"]) == CLIENTS
    diverged = both.summary()["diverged"]
    assert (diverged["clients"], diverged["of"], diverged["uploads"]) == (4, 4, 12)
    assert diverged["nothing_learned"]


def test_a_rate_of_the_server_is_blamed_only_after_its_first_step() -> None:
    later = run(pt.fedavg(lr=0.1, server=pt.optim.sgd(1e30)), rounds=4).summary()["diverged"]
    assert later["first"] == 2
    assert later["rates"] == {"lr": 0.1, "server.lr": 1e30}
    at_once = run(pt.fedavg(lr=HIGH, server=pt.optim.sgd(1e30))).summary()["diverged"]
    assert at_once["rates"] == {"lr": HIGH}


def test_a_model_that_is_not_finite_at_the_end_is_of_no_use() -> None:
    """Nobody's upload shows it: the server's last step was the one too far."""
    found = run(pt.fedavg(lr=1e19, server=pt.optim.sgd(1e38)), rounds=1, steps=1)
    diverged = found.summary()["diverged"]
    assert not all(torch.isfinite(v).all() for v in found.shared.values())
    assert (diverged["clients"], diverged["finite"], diverged["nothing_learned"]) == (0, False, True)
    assert str(found.summary()).startswith("DIVERGED. The server's model is not finite")


def test_a_loss_that_is_not_finite_counts_though_the_tensors_are() -> None:
    """Errors may overflow before their gradients do: what such a client sends is not trusted."""

    def logged(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        squares = (output.reshape(target.shape) - target).square().mean()
        return squares + torch.where(target.abs().max() > 100, torch.inf, 0.0)

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 80, 4)).astype("float32")
    client, y = np.arange(80) % 4, y[:, 0]
    y[client == 3] *= 1000
    source = pt.data.from_arrays(x, y, client)
    options = {"rounds": 2, "steps": 1, "executor": "loop", "baselines": False, "loss": logged}
    found = pt.federate(nn.Linear(4, 1), source, pt.fedavg(lr=1e-3), **options)
    diverged = found.summary()["diverged"]
    assert found.summary()["excluded"] == ["3"]
    assert (diverged["clients"], diverged["set_aside"], diverged["first"]) == (1, 2, 1)
    assert all(np.isfinite(row["train_loss"]) for row in found.metrics)


def test_a_baseline_that_diverged_is_named() -> None:
    alone = run(pt.local(lr=HIGH))
    assert alone.summary()["diverged"]["nothing_learned"]
    found = run(pt.fedavg(lr=0.1), baselines={"local": alone})
    diverged = found.summary()["diverged"]
    assert (diverged["clients"], diverged["nothing_learned"]) == (0, False)
    assert diverged["baselines"]["local"]["clients"] == CLIENTS
    first = str(found.summary()).splitlines()[0]
    assert first == (
        "DIVERGED. The baseline 'each client alone' diverged (6 of 6 clients): "
        "a comparison with it says little."
    )
    trained = run(pt.fedalt("output", lr=HIGH), baselines=True).summary()["diverged"]["baselines"]
    assert set(trained) == {"local", "global"}


def test_rates_have_the_names_under_which_they_are_set() -> None:
    method = pt.pipeline(
        pt.stage(pt.fedavg(lr=pt.optim.linear(0.3), server=pt.optim.adam(0.02)), rounds=1),
        pt.stage(pt.fedalt("output", lr=0.2, personal_lr=0.4), rounds=1),
    )
    found = dict(rates(describe(method)))
    assert found == {"0.lr": 0.3, "0.server.lr": 0.02, "1.lr": 0.2, "1.personal_lr": 0.4}
    assert sentences(None) == []


# ---- while it runs


class Seen(Callback):
    def __init__(self) -> None:
        self.diverged: list[int] = []

    def round(self, event: Event) -> None:
        self.diverged.append(event.diverged)


def test_a_rate_that_changes_by_round_is_no_obstacle() -> None:
    method = pt.fedavg(lr=pt.optim.stepped(0.4, at=[3, 4], factor=0.1))
    assert dict(rates(describe(method))) == {"lr": 0.4}


def test_it_is_said_in_the_round_in_which_it_begins() -> None:
    seen = Seen()
    with pytest.warns(UserWarning, match=r"fedavg: 2 of 6 clients diverged in round 1: .*lr=1e\+30") as told:
        run(pt.fedavg(lr=HIGH), cohort=2, callbacks=[seen])
    assert len(told) == 1  # not again in every round
    assert told[0].filename == __file__
    assert seen.diverged[0] == 2
    assert seen.diverged == sorted(seen.diverged)


def test_the_progress_bar_counts_them() -> None:
    bar = ProgressBar()
    bar.start("x", 0, 3)
    bar.round(Event("x", 1, 3, 0.5, ()))
    assert "diverged" not in bar._progress.tasks[0].fields["note"]
    bar.round(Event("x", 2, 3, None, ("a",), {}, 4))
    assert "4 diverged" in bar._progress.tasks[0].fields["note"]
    bar.close()


# ---- checkpoints


def test_what_is_kept_of_the_excluded_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    found = {}
    for rounds in (2, 9):
        out = tmp_path / str(rounds)
        run(pt.fedavg(lr=HIGH), rounds=rounds, evaluate_every=100, out=out, report=False)
        state = json.loads((out / "checkpoint" / f"{rounds:08d}" / "state.json").read_text())
        found[rounds] = {client: times for client, *times in state["counters"]["excluded"]}
    assert set(found[2]) == set(found[9]) == set(range(CLIENTS))
    assert found[9][0][:3] == [9, 1, 9]
    assert len(json.dumps(found[2])) == len(json.dumps(found[9]))


def test_a_resumed_run_knows_who_diverged_before(tmp_path: Path) -> None:
    class Cut(Callback):
        def round(self, event: Event) -> None:
            if event.round == 2:
                raise InterruptedError

    options: dict[str, Any] = {"cohort": 2, "checkpoint_every": 1, "report": False}
    whole = run(pt.fedavg(lr=HIGH), out=tmp_path / "whole", **options)
    with pytest.raises(InterruptedError):
        run(pt.fedavg(lr=HIGH), out=tmp_path / "cut", callbacks=[Cut()], **options)
    again = run(pt.fedavg(lr=HIGH), out=tmp_path / "cut", resume=True, **options)
    assert again.summary()["diverged"] == whole.summary()["diverged"]
    assert again.summary()["excluded_why"] == whole.summary()["excluded_why"]
    assert pt.load(tmp_path / "cut").summary()["diverged"] == json.loads(
        json.dumps(whole.summary()["diverged"])
    )


def test_a_tally_counts() -> None:
    tally = Tally()
    for round, why in ((2, "not finite"), (5, "too large")):
        tally.count(7, round, why)
    assert tally == {7: (2, 2, 5, "too large")}


# ---- the command line


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, partita: Command, tmp_path: Path) -> Command:
    """The command in this process, in a folder of its own, on a recipe with little to do."""

    def small(clients: int = 4, classes: int = 3, test: float = 0.4, seed: int = 0) -> Experiment:
        return replace(digits(clients, classes, test, seed), rounds=2, steps=1, cohort=None)

    monkeypatch.setitem(RECIPES, "digits", small)
    monkeypatch.chdir(tmp_path)
    return partita


HIGHER = ("--set", "algorithm.lr=1e30", "--set", "baselines=False", "--quiet")


def test_run_leads_with_it_and_does_not_look_like_success(command: Command) -> None:
    code, out, _ = command("run", "digits", *HIGHER)
    assert code == 1
    assert out.startswith("DIVERGED. 4 of 4 clients diverged")
    assert "lr=1e+30" in out
    code, out, _ = command("run", "digits", "--set", "baselines=False", "--quiet")
    assert code == 0
    assert "DIVERGED" not in out


def test_some_diverged_clients_are_told_but_are_no_failure(command: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np, partita as pt\n"
        "from partita.recipes import Experiment\n"
        "def experiment():\n"
        "    x, client = np.random.default_rng(0).normal(size=(40, 3)).astype('float32'), np.arange(40) % 4\n"
        "    y = (x[:, 0] > 0).astype(int)\n"
        "    x[client == 3] *= 1e30\n"
        "    data = pt.data.from_arrays(x, y, client)\n"
        "    return Experiment(pt.models.mlp(3, 2), data, pt.fedavg(lr=0.5), rounds=2, steps=4,\n"
        "                      baselines=False)\n"
    )
    code, out, _ = command("run", "mine.py", "--quiet")
    assert code == 0
    assert out.startswith("DIVERGED. 1 of 4 clients")


def test_json_has_it_and_stays_alone_on_its_stream(command: Command) -> None:
    code, out, err = command("run", "digits", *HIGHER, "--json")
    assert code == 1
    assert json.loads(out)["diverged"]["nothing_learned"] is True
    assert "DIVERGED." in err


def test_compare_names_the_method_that_diverged(command: Any, tmp_path: Path) -> None:
    wanted = ("compare", "digits", "--algorithms", "fedalt(lr=1e30)", "--quiet", "--out", str(tmp_path / "c"))
    code, out, _ = command(*wanted)
    assert code == 1
    assert out.startswith("DIVERGED. fedalt-lr=1e30: 4 of 4 clients")
    assert out.count("(diverged)") == 1
    code, out, _ = command(*wanted, "--resume", "--json")
    found = json.loads(out)
    assert code == 1
    assert len(found["diverged"]) == 1
    assert [row["diverged"] for row in found["table"]] == [0, 0, 4]
    code, out, _ = command("report", str(tmp_path / "c"))
    assert code == 0  # the page was written, and that was asked for
    assert out.startswith("DIVERGED. fedalt-lr=1e30")


def test_demo_leads_with_it(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = RECIPES["digits"]
    high = pt.fedalt("output", lr=HIGH)
    monkeypatch.setitem(RECIPES, "offices", lambda seed=0: replace(small(seed=seed), algorithm=high))
    code, out, _ = command("demo", "--quiet")
    assert code == 1
    assert out.startswith("DIVERGED.")
    text = Path("partita-demo.html").read_text()
    body = text[text.index("<main>") :]
    assert body.startswith(
        '<main><header id="summary"><div class="alert" role="alert"><p><b>DIVERGED.</b> 4 of'
    )
    assert "<h1>Nothing was learned.</h1>" in body
    assert '<span class="badge">best</span>' not in body[: body.index("</header>")]


def test_the_rates_of_fine_tuning_by_its_name_are_those_that_can_be_set() -> None:
    assert dict(rates(describe(by_name("finetune", lr=0.1)))) == {"lr": 0.1}
