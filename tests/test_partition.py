"""`personal=` to names: the words, patterns, lists and functions, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt
from partita import models
from partita.partition import check_personal, keep_norms, personal_names, split
from partita.types import Partition

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


def names(model: nn.Module) -> tuple[str, ...]:
    return tuple(n for n, _ in model.named_parameters())


def chosen(model: nn.Module, personal) -> tuple[str, ...]:
    """The personal names, after a look at the rest of the promise of `split`."""
    every = names(model)
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


@pytest.mark.parametrize(
    ("model", "first", "last"),
    [
        (models.mlp(4, 3, 2), of("hidden1.linear"), of("output.linear")),
        (models.logistic(4, 2), of("output.linear"), of("output.linear")),
        (models.mnist_cnn(4), of("conv1.conv"), of("output.linear")),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), of("1"), of("3")),
        (nn.Linear(4, 2), ("weight", "bias"), ("weight", "bias")),
        (Plain(), of("body.0"), of("head")),
        (nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3)), of("0"), of("1")),
    ],
    ids=["mlp", "logistic", "mnist_cnn", "sequential", "one layer", "norms at the ends", "norms only"],
)
def test_input_and_output(model, first, last) -> None:
    assert chosen(model, "input") == first
    assert chosen(model, "output") == last


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.RMSNorm(3)])
def test_norm_knows_the_kinds(layer) -> None:
    found = chosen(nn.Sequential(nn.Linear(3, 3), layer), "norm")
    assert set(found) == {f"1.{n}" for n, _ in layer.named_parameters()}


def test_norm_takes_the_statistics_along() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    every = (*names(model), "1.running_mean", "1.running_var", "1.num_batches_tracked")
    shared, personal = split(model, every, "norm")
    assert shared == of("0")
    assert personal == every[2:]


@pytest.mark.parametrize(
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
    assert names(model)[-1].startswith("1.adapter")
    assert set(of("1")) <= set(chosen(model, "output"))
    assert not any(n.startswith("0.") for n in chosen(model, "output"))


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
    with pytest.raises(ValueError, match="matches none"):
        personal_names(model, trainable, "input")


# ---- keep_norms


def test_keep_norms_moves_norms_and_statistics() -> None:
    model = Plain()
    statistics = ("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked")
    every = (*names(model), *statistics)
    kept = keep_norms(model, split(model, every, "output"), statistics)
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


@pytest.mark.parametrize("personal", ["", [], (), [""], ["output", 3], [None], 3, None, 1.5, {"output": 1}])
def test_refused_before_there_is_a_model(personal) -> None:
    for make in (check_personal, lambda p: pt.fedalt(personal=p, lr=0.1), lambda p: pt.fedsim(p, lr=0.1)):
        with pytest.raises(ValueError) as error:
            make(personal)
        assert str(error.value).startswith(f"personal={personal!r}: expected one of 'input', 'output'")
        assert "pattern" in str(error.value)
        assert "callable" in str(error.value)


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
