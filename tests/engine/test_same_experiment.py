"""What decides a result must agree before a run or a study goes on: models and their weights included."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import pandas
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import partita as pt
from partita import cli
from partita.engine import digest as code
from partita.engine.description import describe
from partita.engine.folder import parts
from partita.recipes import Experiment, Study, Variant
from partita.recipes.study import run_study
from support import each

pytestmark = pytest.mark.usefixtures("brief_baselines")

CLIENTS = 5
F = nn.functional


def quiet(text: str) -> None:
    del text


class Net(nn.Module):
    """A model whose forward has a part that no tensor shows."""

    def __init__(
        self, seed: int = 0, slope: float = 0.1, act: Callable[[Tensor], Tensor] = torch.tanh
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.hidden, self.output = nn.Linear(64, 4), nn.Linear(4, 10)
        self.slope, self.act, self.drop = slope, act, nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.drop(self.act(self.hidden(x.flatten(1))) * self.slope))


class Longer(Net):
    """The same tensors, computed by another text."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def dropped(rate: float) -> nn.Module:
    model = Net()
    model.drop.p = rate
    return model


def data(**changed: Any) -> pt.data.FederatedData:
    return pt.data.digits(CLIENTS, pt.data.label_skew(3), **{"test": 0.4, "seed": 0, **changed})


def weighted(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Functions of one name that compute something else."""

    def own_loss(output: Tensor, target: Tensor) -> Tensor:
        return scale * F.cross_entropy(output, target)

    return own_loss


def error_rate(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) != target).float().mean()


def experiment(**changed: Any) -> Experiment:
    given: dict[str, Any] = {
        "model": Net(),
        "data": data(),
        "algorithm": pt.fedalt(personal, lr=0.1),
        "rounds": 2,
        "cohort": 3,
        "steps": 2,
        "batch": 8,
        "loss": weighted(1.0),
        "metric": pt.Metric(error_rate, higher_is_better=False),
        "attack": pt.attack.sign_flip(),
        "byzantine": [1],
        "schedule": pt.schedule.synchronous(),
        "measures": [pt.measures.gradient_norm()],
        "baselines": False,
    }
    return Experiment(**{**given, **changed})


def personal(name: str) -> bool:
    return name.startswith("output")


def renamed() -> pt.data.FederatedData:
    there = data()
    return replace(there, names=tuple("abcde"))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "initial weights": ({"model": Net(seed=1)}, "its model (initial"),
    "its class": ({"model": Longer()}, "its model (class: 'Net' -> 'Longer'"),
    "an attribute of the model": ({"model": Net(slope=0.2)}, "its code (model"),
    "an activation": ({"model": Net(act=torch.relu)}, "its code (model"),
    "dropout": ({"model": dropped(0.5)}, "its code (model"),
    "code of the loss": ({"loss": weighted(2.0)}, "its code (loss"),
    "code of the metric": (
        {"metric": pt.Metric(lambda o, t: error_rate(o, t) / 2, higher_is_better=False)},
        "its metric",
    ),
    "code of the split": ({"algorithm": pt.fedalt(lambda n: "output" in n, lr=0.1)}, "personal: 'personal"),
    "a rate": ({"algorithm": pt.fedalt(personal, lr=lambda t, n: 0.1 * t / n)}, "lr: 0.1 -> '<lambda>"),
    "attack": ({"attack": pt.attack.sign_flip(scale=2.0)}, "its attack (scale: 1.0 -> 2.0)"),
    "Byzantine clients": ({"byzantine": [2]}, "byzantine: [1] -> [2]"),
    "schedule": ({"schedule": pt.schedule.synchronous(order="turns")}, "its schedule"),
    "capacity": ({"capacity": pt.capacity.width({"all": 1.0})}, "its capacity"),
    "measures": ({"measures": []}, "its measures"),
    "evaluations": ({"evaluate_every": 1}, "evaluate_every: None -> 1"),
    "scores": ({"train_scores": True}, "train_scores: False -> True"),
    "the seed of the data": ({"data": data(seed=1)}, "its data (fingerprint"),
    "names of clients": ({"data": renamed()}, "its data (fingerprint"),
    "the seed": ({"seed": 1}, "seed: 0 -> 1"),
}


def study(**changed: Any) -> Callable[[int], Study]:
    return lambda _: Study({"one": Variant(experiment(**changed))})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("same") / "study"
    run_study(study(), [0], out=out, announce=quiet)
    return out


@each("case", CHANGES)
def test_a_finished_run_of_another_experiment_is_not_taken(case: str, finished: Path) -> None:
    changed, words = CHANGES[case]
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    with pytest.raises(pt.Refused, match=r"^resume=True: ") as study_error:
        run_study(study(**changed), [0], out=finished, resume=True, announce=quiet)
    folder = finished / "one" / "seed-0"
    with pytest.raises(pt.Refused, match=r"^resume=True: ") as run_error:
        experiment(**changed).run(out=folder, resume=True, baselines={})
    assert words in str(study_error.value)
    assert str(study_error.value) == str(run_error.value)  # one definition for both
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before


def test_a_finished_run_of_a_study_has_its_rounds(finished: Path) -> None:
    """A single run goes on with more rounds; a run of a study stays what its tables were made of."""
    with pytest.raises(pt.Refused) as refused:
        run_study(study(rounds=3), [0], out=finished, resume=True, announce=quiet)
    assert "rounds: 2 -> 3" in refused.value.reason


def test_the_same_experiment_is_taken(finished: Path) -> None:
    runs, _ = run_study(study(), [0], out=finished, resume=True, announce=quiet)
    assert len(runs["one"]) == 1
    run_study(study(checkpoint_every=1), [0], out=finished, resume=True, announce=quiet)


def test_every_part_of_the_description_is_compared(finished: Path) -> None:
    config = json.loads((finished / "one" / "seed-0" / "config.json").read_text())
    assert set(config) - set(parts(config)) == {"what", "executor", "versions"}
    assert {"initial", "fixed", "tensors", "class"} == set(config["model"])
    assert all(config["code"].values())


def test_a_folder_of_a_version_that_noted_less(tmp_path: Path) -> None:
    experiment().run(out=tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    del config["code"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no code: another version of partita may"):
        experiment().run(out=tmp_path / "run", resume=True)


def test_baselines_of_a_finished_run_are_compared_too(tmp_path: Path) -> None:
    run_study(study(), [0], out=tmp_path / "s", announce=quiet, baselines=True)
    path = tmp_path / "s" / "one" / "seed-0" / "baselines" / "local" / "config.json"
    config = json.loads(path.read_text())
    config["algorithm"]["lr"] = 0.5
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"baselines/local holds .*lr: 0.5 -> 0.1"):
        run_study(study(), [0], out=tmp_path / "s", resume=True, announce=quiet, baselines=True)


def test_what_other_calls_have_finished_is_compared_too(tmp_path: Path) -> None:
    def two(**changed: Any) -> Callable[[int], Study]:
        return lambda _: Study({"a": Variant(experiment(**changed)), "b": Variant(experiment())})

    run_study(two(), [0], out=tmp_path / "s", only=["a"], announce=quiet)
    with pytest.raises(ValueError, match=r"a/seed-0 .* its settings \(rounds: 2 -> 1\)"):
        run_study(two(rounds=1), [0], out=tmp_path / "s", only=["b"], resume=True, announce=quiet)


def test_a_variant_that_starts_from_another_has_the_weights_of_that_one(tmp_path: Path) -> None:
    """A first stage that was trained anew, otherwise, is not mixed with what was made of the old one."""

    def pair(lr: float) -> Callable[[int], Study]:
        first = experiment(algorithm=pt.fedavg(lr=lr), measures=[])
        return lambda _: Study({"first": Variant(first), "then": Variant(experiment(), start="first")})

    out = tmp_path / "s"
    run_study(pair(0.1), [0], out=out, announce=quiet)
    run_study(pair(0.1), [0], out=out, resume=True, announce=quiet)
    before, after = (json.loads((out / n / "seed-0" / "config.json").read_text()) for n in ("first", "then"))
    assert before["model"]["initial"] != after["model"]["initial"]
    (out / "first").rename(tmp_path / "old")
    with pytest.raises(ValueError, match=r"then/seed-0 holds a run that differs in its model \(initial"):
        run_study(pair(0.2), [0], out=out, resume=True, announce=quiet)


HELPERS = "SCALE = {scale}\ndef bent(x): return x * SCALE\n"
MINE = """
import types
import torch
import partita as pt
from partita.recipes import Experiment
import helpers
{more}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(64, 10)
        {own}

    def forward(self, x):
        return {forward}

def experiment(seed=0):
    data = pt.data.digits(4, pt.data.label_skew(3), test=0.4, seed=seed)
    torch.manual_seed(seed)
    model = Net()
    {then}
    return Experiment(model, data, pt.fedavg(lr=0.1), rounds=1, steps=1, batch=8, seed=seed, {settings})
"""
HIDDEN = {  # what decides a result, with a number S in it that no weight shows
    "a module by its attribute": {"forward": "helpers.bent(self.fc(x.flatten(1)))"},
    "an import inside": {
        "more": "def late(x):\n    from helpers import bent\n    return bent(x)",
        "forward": "late(self.fc(x.flatten(1)))",
    },
    "an object in the file": {
        "more": "CFG = types.SimpleNamespace(s=S)",
        "forward": "self.fc(x.flatten(1)) * CFG.s",
    },
    "functions in a dictionary": {
        "more": "ACTS = {'a': lambda x: x * S}",
        "forward": "ACTS['a'](self.fc(x.flatten(1)))",
    },
    "an object of the model": {
        "then": "model.cfg = types.SimpleNamespace(s=S)",
        "forward": "self.fc(x.flatten(1)) * self.cfg.s",
    },
    "a tensor of the model": {
        "then": "model.s = torch.tensor(float(S))",
        "forward": "self.fc(x.flatten(1)) * self.s",
    },
    "a buffer that is not kept": {
        "own": "self.register_buffer('s', torch.ones(1), persistent=False)",
        "then": "model.s.fill_(S)",
        "forward": "self.fc(x.flatten(1)) * self.s",
    },
    "a hook": {"then": "model.fc.register_forward_hook(lambda m, i, o: o * S)"},
    "a metric": {
        "more": "def right(o, t): return S * (o.argmax(-1) == t).float().mean()",
        "settings": "metric=pt.Metric(lambda o, t: right(o, t), higher_is_better=True)",
    },
    "only while training": {
        "more": "CFG = types.SimpleNamespace(s=S)",
        "forward": "self.fc(x.flatten(1)) * (CFG.s if self.training else 1)",
    },
}


@pytest.mark.parametrize("case", HIDDEN)
def test_what_no_weight_shows_is_compared(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"more": "", "own": "pass", "then": "", "settings": "", "forward": "self.fc(x.flatten(1))"}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(scale: int, *more: str) -> tuple[int, str]:
        text = MINE
        for name, part in {**parts, **HIDDEN[case]}.items():
            text = text.replace("{" + name + "}", part)
        (tmp_path / "mine.py").write_text(re.sub(r"\bS\b", str(scale), text))
        (tmp_path / "helpers.py").write_text(HELPERS.format(scale=scale))
        sys.modules.pop("helpers", None)
        importlib.invalidate_caches()
        argv = ["partita", "run", str(tmp_path / "mine.py"), "--out", str(tmp_path / "out"), "--quiet"]
        monkeypatch.setattr(sys, "argv", [*argv, "--set", "baselines=False", *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), capsys.readouterr().err

    assert run(2)[0] == 0
    assert run(2, "--resume")[0] == 0
    status, told = run(3, "--resume")
    assert status == 2
    assert re.search("resume=True: .*out holds a run that differs in its (model|metric|code)", told)


def test_a_comparison_from_the_command_line_after_its_file_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
import partita as pt
import torch
from partita.recipes import Experiment

def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target) * 1.0

def experiment(seed=0):
    data = pt.data.digits(4, pt.data.label_skew(3), test=0.4, seed=seed)
    return Experiment(
        pt.models.mlp(64, 4, 10, seed=seed), data, pt.fedalt("output", lr=0.1), rounds=1, steps=1, batch=8,
        seed=seed, loss=loss
    )
"""
    file, out = tmp_path / "mine.py", tmp_path / "s"
    file.write_text(text)

    def call(*more: str) -> tuple[int, str]:
        argv = ["partita", "compare", str(file), "--out", str(out), "--quiet"]
        argv += ["--set", "algorithm.server=adam(1.0)", *more]  # an option that is no plain value
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), capsys.readouterr().err

    assert call()[0] == 0
    assert call("--resume")[0] == 0
    file.write_text(text.replace("* 1.0", "* 3.0"))
    status, told = call("--resume")
    assert (status, told.count("\n")) == (2, 1)
    assert "its code (loss" in told
    file.write_text(text.replace("mlp(64, 4, 10, seed=seed)", "mlp(64, 4, 10, seed=7)"))
    status, told = call("--resume")
    assert status == 2
    assert "its model (initial" in told


# ---- digits of code


def helper(x: float) -> float:
    return x + 1


def calls_helper(x: float) -> float:
    return helper(x)


@torch.compile
def compiled(x: Tensor) -> Tensor:
    return x + 1


def uses_libraries(x: Tensor) -> Any:
    """What packages bring may hold sets, and objects that are others in each process."""
    return pandas.DataFrame({"x": compiled(x)}), Console, hypothesis.given


@dataclass(frozen=True)
class Doubled:
    rate: float

    def __call__(self, t: int, rounds: int) -> float:
        return 2 * self.rate * t / rounds


def made(text: str) -> Any:
    """What a text defines as `f`, as in a user's file."""
    space: dict[str, Any] = {"__name__": "mine", "torch": torch, "nn": nn}
    exec(text, space)
    return space["f"]


TEXTS = {
    "a constant": ("def f(x): return x * 2", "def f(x): return x * 3"),
    "an operation": ("def f(x): return x + 2", "def f(x): return x - 2"),
    "a name": ("def f(x): return torch.exp(x)", "def f(x): return torch.log(x)"),
    "a default": ("def f(x, a=1): return x * a", "def f(x, a=2): return x * a"),
    "a keyword's default": ("def f(x, *, a=1): return x * a", "def f(x, *, a=2): return x * a"),
    "a value in the file": ("A = 1\ndef f(x): return x * A", "A = 2\ndef f(x): return x * A"),
    "a function in the file": (
        "def g(x): return x\ndef f(x): return g(x)",
        "def g(x): return -x\ndef f(x): return g(x)",
    ),
    "a function inside": (
        "def f(x):\n def g(y): return y\n return g(x)",
        "def f(x):\n def g(y): return -y\n return g(x)",
    ),
    "what is closed over": (
        "def make(a):\n def g(x): return x * a\n return g\nf = make(1.0)",
        "def make(a):\n def g(x): return x * a\n return g\nf = make(2.0)",
    ),
    "a tensor": (
        "w = torch.ones(3)\ndef f(x): return x * w",
        "w = torch.zeros(3)\ndef f(x): return x * w",
    ),
    "a method": (
        "class C:\n def __call__(self, x): return x\nf = C()",
        "class C:\n def __call__(self, x): return -x\nf = C()",
    ),
    "an attribute": (
        "class C:\n def __init__(self, a): self.a = a\n def __call__(self, x): return x\nf = C(1)",
        "class C:\n def __init__(self, a): self.a = a\n def __call__(self, x): return x\nf = C(2)",
    ),
    "a class in between": (
        "class B:\n def g(self): return 1\nclass C(B):\n def __call__(self, x): return x\nf = C()",
        "class B:\n def g(self): return 2\nclass C(B):\n def __call__(self, x): return x\nf = C()",
    ),
    "the weights of a loss": (
        "f = nn.CrossEntropyLoss(weight=torch.ones(2))",
        "f = nn.CrossEntropyLoss(weight=torch.zeros(2))",
    ),
    "an option of a loss": ("f = nn.CrossEntropyLoss()", "f = nn.CrossEntropyLoss(label_smoothing=0.1)"),
    "a function of a metric": (
        "import partita as pt\nf = pt.Metric(lambda o, t: o.mean(), higher_is_better=True)",
        "import partita as pt\nf = pt.Metric(lambda o, t: o.sum(), higher_is_better=True)",
    ),
    "a function that remembers": (
        "import functools\n@functools.cache\ndef g(x): return x\ndef f(x): return g(x)",
        "import functools\n@functools.cache\ndef g(x): return -x\ndef f(x): return g(x)",
    ),
    "a function with the name of another": (
        "import functools\n@functools.wraps(nn.functional.cross_entropy)\ndef f(x): return x",
        "import functools\n@functools.wraps(nn.functional.cross_entropy)\ndef f(x): return -x",
    ),
    "a function of every number": (
        "import numpy\nf = numpy.vectorize(lambda x: x)",
        "import numpy\nf = numpy.vectorize(lambda x: -x)",
    ),
    "an attribute in a slot": (
        "class C:\n __slots__ = 'a'\n def __init__(self): self.a = 1\nf = C()",
        "class C:\n __slots__ = 'a'\n def __init__(self): self.a = 2 - 0.5\nf = C()",
    ),
    "what is marked": (
        "def f(x): return x\nf.higher_is_better = True",
        "def f(x): return x\nf.higher_is_better = False",
    ),
}


@each("case", TEXTS)
def test_another_text_has_other_digits(case: str) -> None:
    one, other = TEXTS[case]
    assert code.digest(made(one)) == code.digest(made(one))
    assert code.digest(made(one)) == code.digest(made(f'"""A file."""\n\n\n# lower down\n{one}'))
    assert code.digest(made(one)) != code.digest(made(other))
    assert describe(made(one)) != describe(made(other))


def test_a_docstring_or_a_comment_is_no_code() -> None:
    one = made("def f(x):\n    return x")
    assert code.digest(one) == code.digest(made("def f(x):\n    # the same\n    return x"))
    told = "def f(x):\n    '''{}'''\n    return x"
    assert code.digest(made(told.format("one"))) == code.digest(made(told.format("another")))


PLAIN_TEXT = "def f(x):\n    def g():\n        return None\n    return x or g()"
TOLD_TEXT = (
    'def f(x):\n    "What it does."\n    def g():\n        "It"\n        return None\n    return x or g()'
)


def test_a_docstring_may_be_added() -> None:
    assert code.digest(made(PLAIN_TEXT)) == code.digest(made(TOLD_TEXT))


def test_what_a_function_counts_in_is_no_code() -> None:
    f = made("N = []\ndef f(x):\n    N.append(1)\n    return x")
    before = code.digest(f)
    f(1.0)
    assert code.digest(f) == before


def test_an_object_that_answers_with_errors_has_digits() -> None:
    text = """
class Odd(type):
    def __len__(cls): raise RuntimeError("no")
    def __iter__(cls): raise RuntimeError("no")
class C(dict, metaclass=Odd):
    def __len__(self): raise RuntimeError("no")
    def __repr__(self): raise RuntimeError("no")
c = C()
def f(x): return c, C, x * {}
"""
    assert code.digest(made(text.format(1))) == code.digest(made(text.format(1)))
    assert code.digest(made(text.format(1))) != code.digest(made(text.format(2)))
    chain = "\n".join(f"def g{i}(x): return g{i + 1}(x)" for i in range(500))
    chain += "\ndef g500(x): return x\ndef f(x): return g0(x)"
    assert code.digest(made(chain)) == code.digest(made(chain))


def test_what_calls_itself_and_what_holds_itself_have_digits() -> None:
    looped: list[Any] = []
    looped.append(looped)
    assert code.digest(looped) == code.digest(looped)
    fact = "def f(n): return 1 if n == 0 else n * f(n - 1)"
    assert code.digest(made(fact)) == code.digest(made(fact))
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert code.digest(deep)


def test_a_rate_of_ones_own_and_a_method_of_ones_own() -> None:
    assert describe(Doubled(0.1))["code"] == code.digest(Doubled)
    assert "code" not in describe(pt.optim.linear(0.1))
    assert "code" not in describe(pt.fedavg(lr=0.1))
    rule = pt.fedavg(lr=0.1)
    some = [
        replace(rule, local=lambda p: rule.local(p)),
        replace(rule, local=lambda p: (p, rule.local(p))[1]),
    ]
    assert describe(some[0])["code"] != describe(some[1])["code"]
    assert describe(functools.partial(weighted, 1.0)) != describe(functools.partial(weighted, 2.0))


def test_digits_are_the_same_in_every_process() -> None:
    """Also under another seed of hashes, which orders sets otherwise."""
    text = f"""
import sys; sys.path[:0] = {[str(p) for p in Path(__file__).parents[:2]]!r}
import test_same_experiment as t
from partita.engine import digest as code
print(code.digest(t.calls_helper), code.digest(t.Doubled(1.0)), code.digest(t.weighted(2.0)),
      code.structure_digest(t.Net()), code.digest({{"a", "b", "c"}}), code.digest(t.uses_libraries))
"""
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, env=env)
    here = [code.digest(x) for x in (calls_helper, Doubled(1.0), weighted(2.0))]
    here += [code.structure_digest(Net()), code.digest({"a", "b", "c"}), code.digest(uses_libraries)]
    assert there.stdout.split() == here


def test_a_row_between_those_that_are_sampled_counts() -> None:
    x = torch.zeros(40_000, 64)
    y = torch.zeros(len(x), dtype=torch.int64)
    one = pt.data.FederatedData.make(x, y, [[0, len(x)]])
    x = x.clone()
    x[777, 3] = 1.0
    assert pt.data.FederatedData.make(x, y, [[0, len(x)]]).fingerprint() != one.fingerprint()
