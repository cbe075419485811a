"""`personal=` to names: the words, patterns, lists and functions, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import partita as pt
from partita import models
from partita.algorithms.partition import Names, check_personal, keep_norms, personal_names, split
from partita.core.types import Partition
from partita.recipes.experiment import Experiment
from partita.recipes.splits import candidates, splits
from partita.recipes.study import run_study
from support import each

LM = {"length": 5, "width": 8, "depth": 3, "heads": 2, "hidden": 16}


class Plain(nn.Module):
    """Says nothing about its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
        self.head = nn.Linear(5, 3)
        self.closing = nn.GroupNorm(1, 3)

    def forward(self, x):
        return self.closing(self.head(self.body(self.norm(x))))


def names(model: nn.Module, x: torch.Tensor | None = None) -> tuple[str, ...]:
    """All names; with samples, those for which "input" and "output" can be found out."""
    every = [n for n, _ in model.named_parameters()]
    return tuple(every) if x is None else Names.of(model, lambda: x, every)


def chosen(model: nn.Module, personal, x: torch.Tensor | None = None) -> tuple[str, ...]:
    """The personal names, after a look at the rest of the promise of `split`."""
    every = names(model, x)
    shared, personal = split(model, every, personal)
    assert set(shared) | set(personal) == set(every)
    assert not set(shared) & set(personal)
    assert list(shared) == [n for n in every if n in shared]
    assert list(personal) == [n for n in every if n in personal]
    return personal


def of(prefix: str) -> tuple[str, str]:
    return f"{prefix}.weight", f"{prefix}.bias"


# ---- words


def test_all_and_none() -> None:
    model = models.mlp(4, 3, 2)
    assert chosen(model, "all") == names(model)
    assert chosen(model, "none") == ()


@each(
    ("model", "first", "last"),
    [
        (models.mlp(4, 3, 2), of("hidden1.linear"), of("output.linear")),
        (models.mnist_cnn(4), of("conv1.conv"), of("output.linear")),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), of("1"), of("3")),
        (Plain(), of("body.0"), of("head")),
        (nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)), of("0"), of("1")),
    ],
    ids=["mlp", "mnist_cnn", "sequential", "norms at the ends", "norms only"],
)
def test_input_and_output(model, first, last) -> None:
    x = torch.randn(3, 4)
    assert chosen(model, "input", x) == first
    assert chosen(model, "output", x) == last


@each(
    ("model", "first", "last"),
    [
        (models.transformer(7, **LM), "block0.", "block2."),
        (models.resnet18(4, width=0.125), "stem.", "output."),
        (models.bilstm(7, embedding=4, hidden=4), "embedding.", "output."),
    ],
    ids=["transformer", "resnet18", "bilstm"],
)
def test_parts_that_the_models_declare(model, first, last) -> None:
    for word, prefix in (("input", first), ("output", last)):
        assert chosen(model, word) == tuple(n for n in names(model) if n.startswith(prefix))
        assert chosen(model, word)


def test_declared_parts_win_over_the_order_of_layers() -> None:
    blocks = {"a": nn.Linear(4, 4), "ab": nn.Linear(4, 4), "c": nn.Linear(4, 4)}
    model = models.Blocks(blocks, input_part=["a"], output_part=["ab", "c"])
    assert chosen(model, "input") == of("a")  # and not "ab", whose name begins alike
    assert chosen(model, "output") == (*of("ab"), *of("c"))


def test_norm() -> None:
    assert chosen(Plain(), "norm") == (*of("norm"), *of("body.1"), *of("closing"))


@each("layer", [nn.BatchNorm1d(3), nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.RMSNorm(3)])
def test_norm_knows_the_kinds(layer) -> None:
    found = chosen(nn.Sequential(nn.Linear(3, 3), layer), "norm")
    assert set(found) == {f"1.{n}" for n, _ in layer.named_parameters()}


def test_norm_takes_the_statistics_along() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    every = (*names(model), "1.running_mean", "1.running_var", "1.num_batches_tracked")
    shared, personal = split(model, every, "norm")
    assert shared == of("0")
    assert personal == every[2:]


@each(
    ("model", "kind", "count"),
    [
        (models.resnet20(4, norm="group", width=0.25), "residual", 18),
        (models.transformer(7, **LM), "bottleneck", 3 * 2 * 4),
        (models.mlp(4, 5, 3), "lora", 2),
    ],
    ids=["residual", "bottleneck", "lora"],
)
def test_adapter(model, kind, count) -> None:
    before = chosen(model, "input"), chosen(model, "output")
    adapted = models.add_adapters(model, kind)
    found = chosen(adapted, "adapter")
    assert len(found) == count
    assert all("adapter" in n.split(".") for n in found)
    assert set(names(adapted)) - set(found) == set(names(model))
    assert set(before[1]) <= set(chosen(adapted, "output"))


def test_outer_layers_are_no_adapters() -> None:
    model = models.add_adapters(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "lora", where="*")
    x = torch.randn(3, 4)
    assert names(model)[-1].startswith("1.adapter")
    assert set(of("1")) <= set(chosen(model, "output", x))
    assert not any(n.startswith("0.") for n in chosen(model, "output", x))


# ---- the order of execution


class Vision(nn.Module):
    """A small vision transformer: the root owns the class token and the positions, the head comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.norm = nn.LayerNorm(8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.patches = nn.Conv2d(1, 8, 4, 4)

    def forward(self, x):
        h = self.patches(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.positions
        return self.head(self.norm(self.block(h))[:, 0])


class Factors(nn.Module):
    """Matrix factorization whose root owns all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))
        self.items = nn.Parameter(torch.randn(6, 3))
        self.users = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return (self.users[x[:, 0]] * self.items[x[:, 1]]).sum(-1) + self.offset


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.gru, self.embed = nn.Linear(6, 3), nn.GRU(4, 6, batch_first=True), nn.Embedding(9, 4)

    def forward(self, x):
        return self.out(self.gru(self.embed(x))[0][:, -1])


class Functional(nn.Module):
    """Layers that are no modules; the second one is scaled before it is used."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"b2": (3,), "w2": (8, 3), "b1": (8,), "w1": (4, 8), "scale": ()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return torch.relu(x @ self.w1 + self.b1) @ (self.scale * self.w2) + self.b2


class Branches(nn.Module):
    """Two branches that meet in a head; what an unused head makes of them comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)
        self.right, self.left = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x):
        both = torch.cat([self.left(x[:, :2]), self.right(x[:, 2:])], 1)
        result = self.head(both)
        self.aside = self.unused(both)
        return result


class Twice(nn.Module):
    """A layer that is used first and last, with another one between."""

    def __init__(self) -> None:
        super().__init__()
        self.between, self.outer = nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)

    def forward(self, x):
        return self.outer(self.between[0](self.outer(x)))


class Positions(nn.Module):
    """Positions that are looked up before the tokens are; the scale of the result is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.tokens = nn.Embedding(7, 4), nn.Embedding(9, 4)
        self.head, self.temperature = nn.Linear(4, 3), nn.Parameter(torch.ones(()))

    def forward(self, x):
        places = self.positions(torch.arange(x.shape[1]))
        return self.temperature.exp() * self.head((self.tokens(x) + places).mean(1))


IDS = torch.tensor([[0, 1, 2], [4, 3, 2]])
ORDERS = {
    "vision transformer": (Vision(), torch.randn(2, 1, 8, 8), of("patches"), of("head")),
    "matrix factorization": (Factors(), IDS, ("users",), ("items",)),
    "gru": (Recurrent(), IDS, ("embed.weight",), of("out")),
    "functional": (Functional(), torch.randn(2, 4), ("b1", "w1"), ("b2", "w2", "scale")),
    "two branches": (Branches(), torch.randn(2, 4), of("left"), of("head")),
    "a layer twice": (Twice(), torch.randn(2, 4), of("outer"), of("outer")),
    "positions first": (Positions(), IDS, ("tokens.weight",), of("head")),
    "all in one module": (
        nn.Sequential(Functional()),
        torch.randn(2, 4),
        ("0.b1", "0.w1"),
        ("0.b2", "0.w2", "0.scale"),
    ),
}


@each("name", ORDERS)
def test_a_sample_decides_what_comes_first_and_last(name) -> None:
    model, x, first, last = ORDERS[name]
    assert chosen(model, "input", x) == first
    assert chosen(model, "output", x) == last


def test_the_trial_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2)).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(3, 4)
    drawn = torch.get_rng_state()
    assert chosen(model, "output", x) == of("3")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_layer_whose_weight_is_computed() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    model = nn.Sequential(nn.Linear(4, 3), normed)
    assert set(chosen(model, "output", torch.randn(3, 4))) == {n for n in names(model) if n.startswith("1.")}


def test_a_tied_layer_is_refused_by_the_name_it_is_used_by() -> None:
    class Tied(Positions):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 9)
            self.head.weight = self.tokens.weight

    with pytest.raises(ValueError, match=r"head.weight is the same tensor as tokens.weight"):
        chosen(Tied(), "output", IDS)
    assert chosen(Tied(), "input", IDS) == ("tokens.weight",)


def test_without_a_sample_the_order_is_not_known() -> None:
    with pytest.raises(
        ValueError, match=r"personal='output': expected a model that declares its output_part"
    ):
        chosen(Plain(), "output")


def test_a_word_must_leave_something_to_share() -> None:
    for model in (models.logistic(4, 2), nn.Linear(4, 2)):
        for word in ("input", ["output"]):
            with pytest.raises(ValueError, match=r"all of its .*nothing would be shared.* 'all'"):
                chosen(model, word, torch.randn(3, 4))
        assert personal_names(model, names(model, torch.randn(3, 4)), "output")  # it may have a copy of all
    assert chosen(nn.Linear(4, 2), "*") == ("weight", "bias")
    assert chosen(models.mlp(4, 3, 2), ["input", "all"])


def test_a_run_shares_what_is_no_input() -> None:
    model, x = Vision(), torch.randn(12, 1, 8, 8)
    data = pt.data.from_arrays(x, torch.arange(12) % 3, [0] * 6 + [1] * 6)
    method = pt.fedalt(personal="input", lr=0.1)
    run = pt.federate(model, data, method, rounds=1, executor="loop", baselines=False)
    assert set(run.client(0).personal) == set(of("patches"))
    assert set(run.shared) == set(names(model)) - set(of("patches"))
    assert run.summary()["bytes_up"] == 2 * 4 * sum(v.numel() for v in run.shared.values())


def test_a_partition_of_ones_own_knows_the_order_too() -> None:
    """It is a function of the model and the names, and may hand both on."""
    data = pt.data.from_arrays(torch.randn(8, 4), torch.arange(8) % 2, [0, 0, 0, 0, 1, 1, 1, 1])
    method = replace(pt.fedsim("all", lr=0.1), partition=lambda model, known: split(model, known, "output"))
    run = pt.federate(Branches(), data, method, rounds=1, baselines=False)
    assert set(run.client(0).personal) == set(of("head"))


def test_the_other_ways_to_a_split_see_the_same_order() -> None:
    data = pt.data.from_arrays(torch.randn(8, 4), torch.arange(8) % 2, [0, 0, 0, 0, 1, 1, 1, 1])
    experiment = Experiment(Branches(), data, pt.fedavg(lr=0.1), rounds=1)
    found, _ = candidates(experiment, ["input", "output"])
    assert [set(c.names) for c in found] == [set(of("left")), set(of("head"))]
    study = splits(experiment, ["output"])
    runs, _ = run_study(lambda seed: study, [0], announce=lambda text: None)  # noqa: ARG005
    assert runs["output"][0].config["algorithm"]["personal"] == ["output"]
    measure = pt.measures.gradient_norm(personal="output")
    run = pt.federate(Branches(), data, pt.fedavg(lr=0.1), rounds=1, baselines=False, measures=[measure])
    assert run.metrics[-1]["measures"]["gradient_norm"]["total"] > 0


# ---- patterns, lists, functions


def test_patterns() -> None:
    model = models.mlp(4, 3, 3, 2)
    assert chosen(model, "*.bias") == ("hidden1.linear.bias", "hidden2.linear.bias", "output.linear.bias")
    assert chosen(model, "hidden?.linear.weight") == ("hidden1.linear.weight", "hidden2.linear.weight")
    assert chosen(model, "hidden[2-9].*") == of("hidden2.linear")
    assert chosen(model, "output.linear.bias") == ("output.linear.bias",)


def test_lists_are_unions_in_the_order_of_the_model() -> None:
    model = models.mlp(4, 3, 3, 2)
    assert chosen(model, ["output", "input"]) == (*of("hidden1.linear"), *of("output.linear"))
    assert chosen(model, ("output", "*.bias", "output")) == (
        "hidden1.linear.bias",
        "hidden2.linear.bias",
        "output.linear.weight",
        "output.linear.bias",
    )


def test_callable() -> None:
    model = models.mlp(4, 3, 2)
    assert chosen(model, lambda n: n.startswith("hidden")) == of("hidden1.linear")


def test_tied_weights_have_one_name() -> None:
    model = models.transformer(7, **LM)
    assert model.head.project.weight is model.embed.tokens.weight
    assert chosen(model, "head.*") == (*of("head.norm"), "head.project.bias")
    assert chosen(model, "*tokens*") == ("embed.tokens.weight",)
    assert names(model)[0:2] == ("embed.positions", "embed.tokens.weight")


def test_frozen_names_are_not_the_methods_business() -> None:
    model = models.mlp(4, 3, 2)
    trainable = names(model)[2:]
    assert personal_names(model, trainable, "all") == trainable
    with pytest.raises(ValueError, match="is frozen"):
        personal_names(model, trainable, "input")


# ---- keep_norms


def test_keep_norms_moves_norms_and_statistics() -> None:
    model = Plain()
    statistics = ("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked")
    every = (*names(model), *statistics)
    known = Names.of(model, lambda: torch.randn(3, 4), every)
    kept = keep_norms(model, split(model, known, "output"), statistics)
    mine = {*of("norm"), *of("body.1"), *of("closing"), *statistics, *of("head")}
    assert sorted(kept.personal) == sorted(mine)
    assert kept.shared == tuple(n for n in every if n not in mine)


def test_keep_norms_keeps_other_buffers_too() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(()))
    kept = keep_norms(model, Partition(("weight", "bias", "seen"), ()), ("seen",))
    assert kept == Partition(("weight", "bias"), ("seen",))


def test_keep_norms_of_an_overlapping_partition() -> None:
    """A full personal copy stays full; norms are no longer sent."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    kept = keep_norms(model, Partition(names(model), names(model)), ())
    assert kept == Partition(of("0"), names(model))


def test_keep_norms_without_norms_changes_nothing() -> None:
    model = models.mlp(4, 3, 2)
    partition = split(model, names(model), "output")
    assert keep_norms(model, partition, ()) == partition


# ---- refusals


@each("personal", ["", [], (), [""], ["output", 3], [None], 3, None, 1.5, {"output": 1}])
def test_refused_before_there_is_a_model(personal) -> None:
    for make in (
        lambda p: check_personal("personal", p),
        lambda p: pt.fedalt(personal=p, lr=0.1),
        lambda p: pt.fedsim(p, lr=0.1),
    ):
        with pytest.raises(ValueError) as error:
            make(personal)
        assert str(error.value).startswith(f"personal={personal!r}: expected one of 'input', 'output'")
        assert "pattern" in str(error.value)
        assert "callable" in str(error.value)


@each(
    ("word", "meant"),
    [
        ("outputs", "output"),
        ("ouput", "output"),
        ("imput", "input"),
        ("adapters", "adapter"),
        ("norms", "norm"),
        ("non", "none"),
    ],
)
def test_a_typo_gets_a_suggestion(word, meant) -> None:
    model = models.mlp(4, 3, 2)
    with pytest.raises(ValueError) as error:
        split(model, names(model), word)
    text = str(error.value)
    assert text.startswith(f"personal={word!r}: expected ")
    for allowed in ("'input'", "'output'", "'adapter'", "'norm'", "'all'", "'none'", "pattern", "callable"):
        assert allowed in text
    assert f"did you mean {meant!r}?" in text
    assert "hidden1.linear.weight" in text


@each(
    ("personal", "hint"),
    [
        ("adapter", "add_adapters"),
        ("norm", "matches none"),
        ("nothing.like.this*", "matches none"),
        (["output", "*.wieght"], "'*.wieght'"),
        (lambda n: False, "a callable that accepts at least one"),  # noqa: ARG005
    ],
)
def test_what_matches_nothing_is_refused(personal, hint) -> None:
    model = models.mlp(4, 3, 2)
    with pytest.raises(ValueError) as error:
        split(model, names(model), personal)
    assert str(error.value).startswith("personal=")
    assert hint in str(error.value)


def test_refused_by_federate_before_any_work(tmp_path) -> None:
    data = pt.data.from_arrays(torch.randn(8, 4), torch.arange(8) % 2, [0, 0, 0, 0, 1, 1, 1, 1])
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"personal='outputs'.*did you mean 'output'"):
        pt.federate(models.mlp(4, 2), data, pt.fedalt(personal="outputs", lr=0.1), rounds=1, out=out)
    assert not out.exists()


@pytest.mark.parametrize(("word", "frozen"), [("input", 1), ("output", 3)])
def test_a_frozen_outer_layer_is_refused_by_its_name(word: str, frozen: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    model[frozen].requires_grad_(False)
    data = pt.data.digits(clients=4, seed=0)
    with pytest.raises(ValueError, match=rf"the {word} layer of this model \({frozen}\) is frozen"):
        pt.federate(model, data, pt.fedalt(personal=word, lr=0.1), rounds=1, progress=False)
