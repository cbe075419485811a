"""Parameters and activations as EmbracingFL counts them, cuts and pieces that fit a device."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita import capacity, models
from partita.capacity import Memory, fit, memory, pieces
from partita.capacity.blocks import block_names, part
from partita.capacity.memory import Row
from partita.models.lstm import BiLSTM
from partita.recipes import RECIPES, embracing
from partita.recipes.study import Study
from support import each

LM = {"length": 6, "width": 8, "depth": 2, "heads": 2, "hidden": 16}


def rows(model: nn.Module, shape: Any, **options: Any) -> list[tuple[str, int, int]]:
    return [tuple(row) for row in memory(model, shape, **options).rows]


def chain(*sizes: int, **options: Any) -> nn.Sequential:
    """Linear layers."""
    return nn.Sequential(*(nn.Linear(a, b, **options) for a, b in pairwise(sizes)))


# ---- the paper's tables


def test_resnet20_of_table_1() -> None:
    found = memory(models.resnet20(), (3, 32, 32), batch=32)
    assert [found.after(cut)[:2] for cut in (0, 4, 7)] == [
        (272_762, 6_947_136),
        (257_994, 2_752_832),
        (206_346, 917_824),
    ]
    assert [round(found.after(cut).capacity, 2) for cut in (0, 4, 7)] == [1.0, 0.42, 0.16]
    assert found.total == found.after(0)
    assert found.bytes(7) == 4 * (2 * 206_346 + 2 * 917_824)


def test_femnist_cnn_of_table_1() -> None:
    found = memory(models.leaf_cnn(), (1, 28, 28))
    assert [found.after(cut)[:2] for cut in (0, 2, 3)] == [
        (6_603_710, 39_742),
        (6_551_614, 2_110),
        (127_038, 62),
    ]
    assert [round(found.after(cut).capacity, 2) for cut in (0, 2, 3)] == [1.0, 0.99, 0.02]
    assert memory(models.leaf_cnn(), (28, 28)) == found


def test_bilstm_of_table_1() -> None:
    """The paper leaves out the one logit, which is the activation of the last block."""
    found, half = (memory(models.bilstm(), (words,)) for words in (256, 128))
    assert found.rows == (
        ("embedding", 2_560_000, 0),
        ("lstm", 1_050_624, 1_310_720),
        ("output", 513, 1),
    )
    assert half.after(1)[:2] == (1_051_137, 655_360 + 1)


@pytest.mark.parametrize(("width", "left"), [(0.45, (52_874, 3_039_552)), (0.2, (10_006, 1_302_848))])
def test_widths_of_table_10(width: float, left: tuple[int, int]) -> None:
    assert memory(models.resnet20(width=width), (3, 32, 32), batch=32).total[:2] == left


def test_the_recipe_finds_the_papers_numbers() -> None:
    study = RECIPES["embracing-capacity"]()
    assert isinstance(study, Study)
    deep, wide = study.tables({})
    assert len(deep.rows) == 9
    assert len(wide.rows) == 3
    for row in (*deep.rows, *wide.rows):
        assert row[3:6] == row[6:9]
    assert [row[2] for row in deep.rows] == [
        "-",
        "stem to block3",
        "stem to block6",
        "-",
        "conv1 to conv2",
        "conv1 to dense1",
        "-",
        "embedding",
        "embedding, 128 of 256 words",
    ]
    assert [row[2] for row in wide.rows] == ["-", "55% of channels", "80% of channels"]
    assert "the one output of the BiLSTM is left out" in deep.note
    assert len({*deep.columns}) == len(deep.columns) == len(deep.rows[0])


def test_the_small_size_of_the_recipe_has_no_numbers_of_the_paper() -> None:
    study = RECIPES["embracing-capacity"](size="small")
    assert isinstance(study, Study)
    deep, wide = study.tables({})
    assert memory(models.resnet20(width=0.25), (3, 32, 32), batch=32).total[0] == int(
        deep.rows[0][3].replace(",", "")
    )
    assert all(row[6:9] == ("-",) * 3 for row in (*deep.rows[:3], *wide.rows))
    assert deep.rows[3][3:6] == deep.rows[3][6:9]


def test_the_recipe_computes_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        models, "resnet20", lambda width=1.0, **_: chain(3 * 32 * 32, 4, *[1] * 7, int(8 * width))
    )
    monkeypatch.setattr(embracing, "IMAGE", (3 * 32 * 32,))
    deep, wide = embracing.capacity_tables(seed=0)
    weights = (3072 * 4 + 4) + (4 + 1) + 6 * (1 + 1) + (1 + 1) * 8
    assert deep.rows[0][3:6] == (f"{weights:,}", f"{32 * (4 + 7 + 8):,}", "1.00")
    assert wide.rows[2][3:5] == (f"{weights - 14:,}", f"{32 * (4 + 7 + 1):,}")
    assert deep.rows[3][3:6] == deep.rows[3][6:9]


def test_the_recipe_runs_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from partita import cli

    monkeypatch.setattr("sys.argv", ["partita", "run", "embracing-capacity", "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert [table["rows"][-1][3] for table in tables] == ["1,051,137", "10,006"]


# ---- what is counted


def test_every_block_of_resnet20_by_hand() -> None:
    """Two convolutions in each block, a projection in the first of each stage, ten logits."""
    a, b, c = 16 * 32 * 32, 32 * 16 * 16, 64 * 8 * 8
    each = [a, 3 * a, 2 * a, 2 * a, 3 * b, 2 * b, 2 * b, 3 * c, 2 * c, 2 * c, 10]
    assert [row.activations for row in memory(models.resnet20(), (3, 32, 32)).rows] == each


BY_HAND: dict[str, tuple[nn.Module, tuple[int, ...], list[int]]] = {
    "logistic": (models.logistic(12, 3), (12,), [3]),
    "mlp": (models.mlp(12, 8, 3), (3, 4), [8, 3]),
    "mnist_cnn": (models.mnist_cnn(), (28, 28), [32 * 24 * 24, 64 * 8 * 8, 512, 10]),
    "cifar_cnn": (models.cifar_cnn(), (3, 32, 32), [32 * 1024, 64 * 256, 128 * 64, 256, 128, 10]),
    "resnet18": (
        models.resnet18(width=0.125),
        (16, 16),
        [2048, 4096, 4096, *[3 * 1024, 2 * 1024], *[3 * 512, 2 * 512], *[3 * 256, 2 * 256], 62],
    ),
    "transformer": (models.transformer(20, **LM), (6,), [0, *[6 * (5 * 8 + 16)] * 2, 6 * 20]),
    "bilstm": (models.bilstm(20, embedding=4, hidden=3), (6,), [0, 10 * 6 * 2 * 3, 1]),
    "lora": (models.add_adapters(models.mlp(12, 8, 3), "lora", rank=2), (12,), [8 + 2 + 8, 3]),
    "residual": (
        models.add_adapters(models.mnist_cnn(), "residual"),
        (28, 28),
        [32 * 24 * 24, 2 * 64 * 8 * 8, 512, 10],
    ),
}


@each("name", BY_HAND)
@each("batch", [1, 5])
def test_our_models(name: str, batch: int) -> None:
    model, shape, activations = BY_HAND[name]
    found = memory(model, shape, batch)
    assert [row.activations for row in found.rows] == [batch * a for a in activations]
    names = block_names(model)
    assert [row.name for row in found.rows] == list(names)
    for cut in range(len(names)):  # the transformer shares a tensor between its first and its last block
        left = sum(p.numel() for p in part(model, names[cut:]).parameters())
        assert found.after(cut).parameters == left
        assert sum(row.parameters for row in found.rows[cut:]) == left


class Last(nn.Module):
    """The output of a recurrent layer without its states."""

    def forward(self, x: tuple[Tensor, Any]) -> Tensor:
        return x[0]


class Steps(nn.Module):
    """A cell, word by word, given by its name."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for word in x.unbind(1):
            state = self.cell(input=word, hx=state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[index, return-value]


class Packed(nn.Module):
    """A recurrent layer on a sequence that is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [x.shape[1] - 2] * len(x), batch_first=True)
        out: Tensor = self.lstm(packed)[1][0]
        return out


@each(
    ("layer", "activations"),
    [
        (nn.LSTM(4, 3, batch_first=True), 6 * 3 * 10),
        (nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), 6 * 3 * 10 * 2 * 2),
        (nn.LSTM(4, 3, proj_size=2, batch_first=True), 6 * (3 * 10 + 2)),
        (nn.GRU(4, 3, bidirectional=True, batch_first=True), 6 * 3 * 7 * 2),
        (nn.RNN(4, 3, num_layers=2, batch_first=True), 6 * 3 * 2 * 2),
        (nn.RNN(4, 3, nonlinearity="relu"), 6 * 3 * 2),
        (Steps(nn.LSTMCell(4, 3)), 6 * 3 * 10),
        (Steps(nn.GRUCell(4, 3)), 6 * 3 * 7),
        (Steps(nn.RNNCell(4, 3)), 6 * 3 * 2),
        (Packed(), 4 * 3 * 10),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrent_layers(layer: nn.Module, activations: int) -> None:
    states = isinstance(layer, nn.RNNBase)
    model = nn.Sequential(layer, *([Last()] if states else []))
    assert memory(model, (6, 4)).rows[0].activations == activations
    assert memory(model, (6, 4), batch=3).total.activations == 3 * activations


def test_our_lstm_counts_as_pytorchs() -> None:
    theirs = nn.Sequential(nn.LSTM(4, 3, bidirectional=True, batch_first=True), Last())
    ours = nn.Sequential(BiLSTM(4, 3))
    assert memory(ours, (6, 4)).total.activations == memory(theirs, (6, 4)).total.activations == 360


class Attend(nn.Module):
    """Attention of the first words to all, keys and values of other widths; arguments by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x[:, :3], value=x[..., :2], key=x[..., :4])[0]
        return out


def test_attention_counts_as_linear_layers() -> None:
    assert rows(nn.Sequential(Attend()), (6, 8))[0][2] == (3 + 6 + 6 + 3) * 8
    # the same as attention written with layers; PyTorch's fast path would skip the layers inside
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    ours = models.transformer(20, **LM)
    (_, _, found) = rows(nn.Sequential(encoder), (6, 8))[0]
    assert found == memory(ours, (6,)).rows[1].activations == 6 * (4 * 8 + 16 + 8)


@each(
    ("model", "shape", "activations"),
    [
        (nn.Sequential(nn.Conv1d(2, 3, 2)), (2, 6), [3 * 5]),
        (nn.Sequential(nn.Conv3d(1, 2, 2)), (1, 3, 3, 3), [2 * 8]),
        (nn.Sequential(nn.ConvTranspose2d(1, 2, 2, stride=2)), (1, 3, 3), [2 * 36]),
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.GELU(), nn.Dropout()), (5, 4), [15, 0, 0, 0]),
        (nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 3)), (5,), [0, 3]),
        (nn.Sequential(nn.Linear(4, 4)), (), None),
    ],
)
def test_other_layers(model: nn.Module, shape: tuple[int, ...], activations: list[int] | None) -> None:
    if activations is None:
        with pytest.raises(ValueError, match=r"^input_shape=\(\): expected the shape of one sample"):
            memory(model, shape)
    else:
        assert [row.activations for row in memory(model, shape).rows] == activations


def test_a_layer_that_is_used_twice_counts_twice_and_its_weights_once() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 2))
    assert rows(model, (3,)) == [("0", 0, 3), ("1", 0, 0), ("2", 12, 3), ("3", 8, 2)]
    assert memory(model, (3,)).total[:2] == (20, 8)


def test_only_parameters_that_require_gradients() -> None:
    model = chain(4, 3, 2)
    model[0].weight.requires_grad_(False)
    assert rows(model, (4,)) == [("0", 3, 3), ("1", 8, 2)]


class Counted(nn.Module):
    """A module that says itself what it keeps."""

    def __init__(self, kept: Any = 100) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept = kept

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        return self.inner(x) * (2 if twice else 1)

    def activations(self, x: Tensor, *, twice: bool = False) -> Any:
        return self.kept if not isinstance(self.kept, int) else self.kept * len(x) * (2 if twice else 1)


class Caller(nn.Module):
    """Calls it twice, once with an argument by name; has a list that only sounds like a count."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()
        self.activations = nn.ModuleList([nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        return self.activations[0](self.counted(self.counted(x, twice=True)))  # type: ignore[no-any-return]


def test_a_module_declares_its_own_count() -> None:
    assert rows(nn.Sequential(Counted(), nn.Linear(4, 2)), (4,)) == [("0", 20, 100), ("1", 10, 2)]
    assert rows(nn.Sequential(Caller()), (4,), batch=3) == [("0", 20, 900)]


@each("kept", [-1, 2.5, "many", None])
def test_a_wrong_count(kept: Any) -> None:
    with pytest.raises(ValueError, match=r"^Counted.activations=.*: expected a whole number from 0"):
        memory(nn.Sequential(Counted(kept)), (4,))


class Net(nn.Module):
    """No nn.Sequential; the embedding is made last and applied first."""

    def __init__(self, between: float = 1.0) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.trunk = nn.ModuleList([nn.Linear(4, 3)])
        self.words = nn.Embedding(7, 4)
        self.between = between

    def activations(self) -> list[int]:
        """Of another meaning: the model as a whole is not asked."""
        return []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between * self.trunk[0](self.words(x)))  # type: ignore[no-any-return]


NET = ("words", "trunk.0", "head")


def test_a_users_model_with_declared_blocks() -> None:
    expected = [("words", 28, 0), ("trunk.0", 15, 15), ("head", 8, 10)]
    assert rows(Net(), (5,), blocks=NET) == expected
    net = Net()
    net.blocks = NET
    assert rows(net, (5,)) == expected
    assert [fit(net, budget, (5,)) for budget in (384, 383)] == [1, 2]
    assert fit(Net(), 383, (5,), blocks=NET) == 2
    assert pieces(Net(), 2, "1kB", (5,), blocks=NET) == (("words", "trunk.0"),)


@each(("dtype", "size"), [(torch.float64, 8), (torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)])
def test_bytes_of_the_models_own_numbers(dtype: torch.dtype, size: int) -> None:
    found = memory(chain(4, 3, 2, dtype=dtype), (4,), batch=10)
    assert (found.bytes(), found.bytes(1)) == (size * 2 * (23 + 50), size * 2 * (8 + 20))
    needed = size * (15 + 10 * (4 + 3))  # to pass the first layer
    assert fit(chain(4, 3, 2, dtype=dtype), needed, (4,), batch=10) == 1
    with pytest.raises(ValueError, match=f"at least {needed} bytes"):
        fit(chain(4, 3, 2, dtype=dtype), needed - 1, (4,), batch=10)


class Hot(nn.Module):
    """Numbers of classes to vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot(x, 4).float()


def test_a_sample_instead_of_its_shape() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), Hot(), nn.Linear(4, 3))
    with pytest.raises(
        ValueError, match=r"^input_shape=\(5,\): .*the model does not take it: one_hot is only"
    ):
        memory(model, (5,))
    sample = torch.tensor([0, 1, 2, 3, -1])  # the model works in place
    assert rows(model, sample) == [("0", 0, 0), ("1", 0, 0), ("2", 15, 15)]
    assert sample.tolist() == [0, 1, 2, 3, -1]


class Calls(nn.Module):
    """Counts its calls, in evaluation mode too."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_measuring_changes_nothing() -> None:
    model = nn.Sequential(
        nn.Embedding(3, 4, max_norm=0.1),  # a forward pass changes its weights
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(20), Calls()),
        nn.Sequential(nn.Dropout(), nn.Linear(20, 2)),
    )
    model[2].eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    assert memory(model, (5,), batch=4).total[:2] == (12 + 40 + 42, 8)
    assert fit(model, "1GB", (5,)) == 0
    assert pieces(model, 2, "1GB", (5,)) == (("0", "1"),)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# ---- Memory


def test_a_memory_is_a_value() -> None:
    found = Memory((Row("a", 10, 5), Row("b", 0, 0), Row("c", 3, 2)), element=2)
    assert found.total == (13, 7, 1.0)
    assert [found.after(cut) for cut in (1, 2)] == [(3, 2, 0.25)] * 2
    assert [found.bytes(cut) for cut in range(3)] == [80, 20, 20]
    assert found == Memory((Row("a", 10, 5), Row("b", 0, 0), Row("c", 3, 2)), element=2)
    with pytest.raises(FrozenInstanceError):
        found.element = 4  # type: ignore[misc]
    for cut in (-1, 3, 1.0, True, "a"):
        with pytest.raises(ValueError, match=r"^cut=.*: expected a whole number from 0 up to 2"):
            found.after(cut)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^cut="):
            found.bytes(cut)  # type: ignore[arg-type]


def test_a_memory_prints_as_a_table() -> None:
    assert str(memory(models.leaf_cnn(), (28, 28))).splitlines() == [
        "block   parameters  activations  from here: capacity  bytes to train      needed",
        "conv1          832       25,088                1.000      53,147,616  53,147,616",
        "conv2       51,264       12,544                0.996      52,940,256  52,940,256",
        "dense1   6,424,576        2,048                0.986      52,429,792  52,429,792",
        "output     127,038           62                0.019       1,016,800  25,719,040",
        "all      6,603,710       39,742",
    ]


def test_the_package_offers_them() -> None:
    assert {"memory", "Memory", "fit", "pieces"} <= {*capacity.__all__}


# ---- wrong arguments

CALLS: dict[str, Callable[..., Any]] = {
    "memory": memory,
    "fit": lambda model, shape, **o: fit(model, "1GB", shape, **o),
    "pieces": lambda model, shape, **o: pieces(model, 1, "1GB", shape, **o),
}


@each("call", CALLS)
@each(
    ("model", "shape", "options", "message"),
    [
        (
            chain(4, 3, 2),
            (5,),
            {},
            "input_shape=(5,): expected the shape of one sample, or a sample; the model",
        ),
        (models.resnet20(width=0.1), (32, 32, 3), {}, "the model does not take it: input=[1, 32, 32, 3]"),
        (
            chain(4, 3, 2),
            torch.zeros(5),
            {},
            "input_shape=(5,): expected the shape of one sample, or a sample",
        ),
        (chain(4, 3, 2), 4, {}, "input_shape=4: expected the shape of one sample, such as (3, 32, 32)"),
        (chain(4, 3, 2), "4", {}, "input_shape='4': expected the shape of one sample, such as"),
        (chain(4, 3, 2), (4, 0), {}, "input_shape=0: expected a whole number from 1"),
        (chain(4, 3, 2), (4.0,), {}, "input_shape=4.0: expected a whole number from 1"),
        (chain(4, 3, 2), (4,), {"batch": 0}, "batch=0: expected a whole number from 1"),
        (chain(4, 3, 2), (4,), {"batch": 1.5}, "batch=1.5: expected a whole number from 1"),
        (chain(4, 3, 2), (4,), {"blocks": ["0"]}, "blocks=['0']: expected blocks that own all"),
        (Net(), (5,), {}, "blocks=None: expected the names of the submodules"),
        (Net(), (5,), {"blocks": ["words", "trunk.0", "hed"]}, "(did you mean 'head'?)"),
        (Net(), (5,), {"blocks": ["words", "head", "trunk.0"]}, "'head' does not take what comes before it"),
        (Net(between=2.0), (5,), {"blocks": NET}, "the model gives something else"),
        (chain(4, 2).requires_grad_(False), (4,), {}, "model='Sequential': expected a model with parameters"),
        (nn.Sequential(nn.ReLU()), (4,), {}, "model='Sequential': expected a model with parameters"),
    ],
)
def test_wrong_models_and_shapes(
    call: str, model: nn.Module, shape: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CALLS[call](model, shape, **options)


BAD = [
    ("8 apples", "'500MB' or '8GiB'"),
    (0, "from 1"),
    (-5, "from 1"),
    (1e6, "whole number"),
    ("0", "from 1"),
]


@each(("budget", "words"), BAD)
def test_wrong_budgets(budget: Any, words: str) -> None:
    for call in (fit, lambda m, b, x: pieces(m, 1, b, x)):
        with pytest.raises(ValueError, match=rf"^budget=.*: expected .*{words}"):
            call(chain(4, 3, 2), budget, (4,))


def test_a_fit_needs_a_budget() -> None:
    with pytest.raises(ValueError, match=r"^budget=None: expected"):
        fit(chain(4, 3, 2), None, (4,))  # type: ignore[arg-type]


# ---- fit


def test_fit_at_every_boundary() -> None:
    """The frozen blocks of ResNet-20 are small: what is trained decides, down to the last blocks."""
    model, shape = models.resnet20(), (3, 32, 32)
    found = memory(model, shape, batch=32)
    passing = 4 * (4_960 + 32 * 2 * 16 * 32 * 32)  # block1: its weights, its input and output
    for cut in range(9):
        assert found.bytes(cut) > passing
        assert fit(model, found.bytes(cut), shape, 32) == cut
        assert fit(model, found.bytes(cut) - 1, shape, 32) == cut + 1
    assert found.bytes(9) < passing
    assert fit(model, passing, shape, 32) == 9
    with pytest.raises(
        ValueError, match=f"^budget={passing - 1}: expected at least {passing} bytes, for cut=9: "
    ):
        fit(model, passing - 1, shape, 32)


def test_fit_takes_words() -> None:
    model = chain(4, 3, 2)
    assert memory(model, (4,), batch=10).bytes(0) == 584
    assert [fit(model, b, (4,), 10) for b in ("584", "584B", "0.584kB", "0.583 kB", "1KiB", "1 MiB")] == [
        *[0] * 3,
        1,
        0,
        0,
    ]


def test_what_cannot_be_trained_says_what_could() -> None:
    """A chain 4, 3, 2: the last layer needs 2·(8 + 2), to pass the first takes 15 + 4 + 3."""
    model = chain(4, 3, 2)
    assert [memory(model, (4,)).bytes(cut) for cut in (0, 1)] == [4 * 2 * 28, 4 * 2 * 10]
    assert fit(model, 4 * 22, (4,)) == 1
    message = (
        "budget='87B': expected at least 88 bytes, for cut=1: 80 to train the rest, 88 to pass the frozen"
    )
    with pytest.raises(ValueError, match=f"^{message} block '0'$"):
        fit(model, "87B", (4,))
    with pytest.raises(
        ValueError, match=r"^budget=79: expected at least 80 bytes, for cut=0: 80 to train the"
    ):
        fit(chain(3, 2), 79, (3,))
    assert fit(chain(3, 2), 80, (3,)) == 0


def test_a_frozen_block_may_be_the_obstacle() -> None:
    """The last layer of the FEMNIST network fits 1 MiB, the dense layer before it does not even pass it."""
    model = models.leaf_cnn()
    needed = 4 * (6_424_576 + 64 * 7 * 7 + 2048)
    assert memory(model, (28, 28)).bytes(3) == 1_016_800 < 2**20
    assert fit(model, needed, (28, 28)) == 3
    with pytest.raises(
        ValueError, match=f"^budget='1MiB': expected at least {needed} bytes.* block 'dense1'$"
    ):
        fit(model, "1MiB", (28, 28))


class Mean(nn.Module):
    """Over words."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_a_larger_cut_may_ask_for_more() -> None:
    """The output of an embedding is no activation, but it must be held when the block is frozen."""
    model = nn.Sequential(nn.Embedding(2, 100), Mean(), nn.Linear(100, 1))
    trained, passed = 4 * 2 * (200 + 101 + 1), 4 * (200 + 50 + 5000)
    assert passed > trained
    assert fit(model, trained, (50,)) == 0
    with pytest.raises(
        ValueError, match=rf"^budget={trained - 1}: expected at least {trained} bytes, for cut=0"
    ):
        fit(model, trained - 1, (50,))


def test_fit_never_leaves_nothing_to_train() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Flatten())
    assert fit(model, 88, (4,)) == 1
    assert memory(model, (4,)).bytes(3) == 0
    model[0] = nn.Linear(4, 3).requires_grad_(False)
    assert fit(model, 88, (4,)) == 1  # 0 takes the activations of the first layer, too
    tiny = nn.Sequential(nn.Linear(1, 1), nn.Flatten())
    with pytest.raises(ValueError, match=r"expected at least 24 bytes, for cut=0"):
        fit(tiny, 23, (1,))  # enough to pass the layer; then there would be nothing to train
    assert pieces(tiny, 1, 16, (1,)) == (("0",),)


# ---- pieces


def passing(model: nn.Module, names: tuple[str, ...], flows: dict[str, int]) -> int:
    return 4 * (sum(p.numel() for p in part(model, names).parameters()) + max(flows[n] for n in names))


def flows(model: nn.Sequential, x: Tensor, batch: int) -> dict[str, int]:
    """Numbers in the input and output of each block."""
    found = {}
    for name, block in model.eval().named_children():
        y = block(x)
        found[name] = batch * (x.numel() + y.numel())
        x = y
    return found


PASSED: dict[str, tuple[nn.Sequential, Tensor, int]] = {
    "resnet20": (models.resnet20(width=0.5), torch.zeros(1, 3, 16, 16), 8),
    "cifar_cnn": (models.cifar_cnn(), torch.zeros(1, 3, 32, 32), 4),
    "transformer": (models.transformer(20, **{**LM, "depth": 5}), torch.zeros(1, 6, dtype=torch.int64), 2),
}


@each("name", PASSED)
def test_pieces_cover_the_frozen_part_and_fit(name: str) -> None:
    model, x, batch = PASSED[name]
    names, flow, shape = block_names(model), flows(model, x, batch), tuple(x.shape[1:])
    seen = set()
    for cut in range(len(names)):
        most = max((passing(model, (n,), flow) for n in names[:cut]), default=1)
        for budget in (most, most + 1, most * 3 // 2, most * 3, 10**9):
            found = pieces(model, cut, budget, shape, batch)
            seen.add(len(found))
            assert tuple(n for piece in found for n in piece) == names[:cut]
            assert all(passing(model, piece, flow) <= budget for piece in found)
            for before, after in pairwise(found):  # greedy: the next block did not fit
                assert passing(model, (*before, after[0]), flow) > budget
        if cut:
            assert pieces(model, cut, 10**9, shape, batch) == (names[:cut],)
            with pytest.raises(
                ValueError, match=rf"^budget={most - 1}: expected at least {most} bytes to pass"
            ):
                pieces(model, cut, most - 1, shape, batch)
    assert len(seen) > 2  # nothing, one piece, several


def test_pieces_by_hand() -> None:
    """4 → 4 → 4 → 4 → 4: 20 parameters a layer and 8 numbers in and out."""
    model = chain(*[4] * 5)
    one, two = 4 * (20 + 8), 4 * (40 + 8)
    assert pieces(model, 3, one, (4,)) == (("0",), ("1",), ("2",))
    assert pieces(model, 3, two - 1, (4,)) == (("0",), ("1",), ("2",))
    assert pieces(model, 3, two, (4,)) == (("0", "1"), ("2",))
    assert pieces(model, 0, 1, (4,)) == ()
    assert pieces(model, 3, two, (4,), batch=2) == (("0",), ("1",), ("2",))
    for block in model:
        block.requires_grad_(block is model[3])  # a device holds them all the same
    assert pieces(model, 3, two - 1, (4,)) == (("0",), ("1",), ("2",))


def test_shared_weights_are_held_once_in_a_piece() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer, nn.Linear(4, 4), nn.Linear(4, 4))
    assert pieces(model, 3, 4 * (20 + 8), (4,)) == (("0", "1"), ("2",))


def test_without_a_budget_a_piece_is_as_large_as_what_is_trained() -> None:
    model = chain(4, 4, 4, 4, 2)
    assert memory(model, (4,)).bytes(3) == 4 * 2 * (10 + 2)
    with pytest.raises(
        ValueError, match=r"^budget=None: expected at least 112 bytes to pass the frozen block '0'"
    ):
        pieces(model, 3, None, (4,))
    with pytest.raises(ValueError, match=r"\(the trained part takes 96\)$"):
        pieces(model, 3, None, (4,))
    assert pieces(model, 2, None, (4,)) == pieces(model, 2, 4 * 2 * (20 + 4 + 12), (4,)) == (("0", "1"),)
    with pytest.raises(
        ValueError, match=r"at least 25719040 bytes to pass the frozen block 'dense1' \(the trained"
    ):
        pieces(models.leaf_cnn(), 3, None, (28, 28))


def test_the_largest_block_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"^budget=900: expected at least 960 bytes to pass the frozen block '1'$"
    ):
        pieces(chain(2, 20, 10, 2, 2), 3, 900, (2,))


@each("budget", [None, "1GB"])
@each("cut", [-1, 2, 1.0, "1"])
def test_a_wrong_cut(cut: Any, budget: Any) -> None:
    with pytest.raises(ValueError, match=r"^cut=.*: expected a whole number from 0 up to 1"):
        pieces(chain(4, 3, 2), cut, budget, (4,))
