"""Sequences of different lengths: kept without padding, padded by the batch, with masks where models ask."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import partita as pt
from partita.core import check
from partita.data import FederatedData, from_arrays, from_datasets, from_huggingface
from partita.data.columns import Ragged
from support import each

RNG = np.random.default_rng(0)
LENGTHS = [3, 7, 1, 4, 4, 9, 2, 5, 6, 8, 3, 2]
SEQUENCES = [RNG.integers(1, 20, n) for n in LENGTHS]
Y = np.arange(12) % 3
CLIENT = np.arange(12) % 2


def made(x: Any = SEQUENCES, y: Any = Y, **more: Any) -> FederatedData:
    return from_arrays(x, y, CLIENT, **{"test": 0, "validation": 0, **more})


def test_a_batch_is_padded_to_its_longest_sequence_as_torch_pads() -> None:
    data = made(pad=-1)
    tensors = [torch.from_numpy(s) for c in (0, 1) for s in SEQUENCES[c::2]]  # clients one after another
    for rows in ([0], [2, 1], [5, 0, 5], range(12)):
        x, _ = data.gather(torch.tensor(rows))
        assert torch.equal(x, pad_sequence([tensors[r] for r in rows], batch_first=True, padding_value=-1))
    square, _ = data.gather(torch.tensor([[0, 1], [2, 3]]))
    flat = pad_sequence(tensors[:4], batch_first=True, padding_value=-1)
    assert torch.equal(square, flat.reshape(2, 2, -1))


def test_only_the_entries_are_kept() -> None:
    data = made()
    assert isinstance(data.x, Ragged)
    assert len(data.x.values) == sum(LENGTHS)
    assert "x     int64, each [n], n up to 9" in repr(data)


def test_entries_may_have_a_shape_and_any_type() -> None:
    frames = [RNG.normal(size=(n, 2)).astype(np.float32) for n in LENGTHS]
    data = made([torch.from_numpy(f) for f in frames])
    x, _ = data.client(0)
    assert torch.equal(x, pad_sequence([torch.from_numpy(f) for f in frames[::2]], batch_first=True))
    marks = made({"x": SEQUENCES, "mark": [s % 2 == 0 for s in SEQUENCES]}).client(0)[0]["mark"]
    assert marks.dtype == torch.bool
    assert not marks[2, 4:].any()
    letters = made([bytes_of(s) for s in SEQUENCES])
    assert letters.client(0)[0].dtype == torch.int64  # no images


def bytes_of(sequence: np.ndarray) -> np.ndarray:
    return sequence.astype(np.uint8)


def test_labels_of_positions_are_padded_so_that_they_do_not_count() -> None:
    data = made(y=[s % 3 for s in SEQUENCES])
    x, y = data.gather(torch.tensor([0, 3]))
    assert y.shape == x.shape
    expected = [torch.from_numpy(s % 3) for s in (SEQUENCES[0], SEQUENCES[6])]
    assert torch.equal(y, pad_sequence(expected, batch_first=True, padding_value=-100))
    assert "3 classes, 0 to 2, each [n], n up to 9" in repr(data)


@each(
    ("x", "y", "more", "message"),
    [
        ([*SEQUENCES[:-1], []], Y, {}, r"length of x\[11\]=0"),
        (SEQUENCES[:-1], Y, {}, "ids in client=12: expected 11"),
        ([*SEQUENCES[:-1], np.ones((2, 2))], Y, {}, "sequences of entries of one kind"),
        (SEQUENCES, [s / 2 for s in SEQUENCES], {}, "padding would count"),
        (SEQUENCES, Y, {"pad": 0.5}, "a whole number"),
        (SEQUENCES, Y, {"pad": "0"}, "a number"),
        ({"a": SEQUENCES, "b": SEQUENCES}, Y, {"pad": 7}, r"a value for each of x\['a'\], x\['b'\]"),
        ({"a": SEQUENCES}, Y, {"pad": {"b": 1}}, "names of sequences"),
        ([np.array([1.0, np.inf]), *SEQUENCES[1:]], Y, {}, r"x\[0\] of client '0'=inf"),
    ],
)
def test_refusals(x: Any, y: Any, more: Any, message: str) -> None:
    with pytest.raises(check.Refused, match=message):
        made(x, y, **more)


def test_subset_and_hold_out_keep_the_right_sequences() -> None:
    data = made(y=np.array([s[0] for s in SEQUENCES]), validation=0)
    for some in (data, data.subset([1]), data.hold_out(0.4), data.hold_out(0.4).subset([1, 0])):
        for client in range(some.clients):
            for split in ("train", "validation"):
                x, y = some.client(client, split)
                assert torch.equal(x[:, 0] if len(x) else y, y)


def test_fingerprints_tell_entries_and_lengths_wherever_they_are_kept() -> None:
    data = made()
    assert made().fingerprint() == data.fingerprint()
    assert data.subset([0, 1]).fingerprint() == data.fingerprint()  # in another place, the same rows
    one, two = ([s.copy() for s in SEQUENCES] for _ in range(2))
    one[5][8] += 1
    two[0], two[2] = np.append(two[0], two[2][:1]), two[2]
    assert len({made(x).fingerprint() for x in (SEQUENCES, one, two)}) == 3


def test_standardize_counts_entries_one_by_one() -> None:
    frames = [RNG.normal(3, 2, (n, 2)).astype(np.float32) for n in LENGTHS]
    data = made(frames)
    for by in ("pooled", "client"):
        scaled = pt.data.standardize(data, by=by)
        groups = [(0, 1)] if by == "pooled" else [(0,), (1,)]
        for group in groups:
            entries = torch.cat(
                [scaled.gather(torch.tensor([r]))[0][0] for c in group for r in range(6 * c, 6 * c + 6)]
            )
            assert torch.allclose(entries.mean(0), torch.zeros(2), atol=1e-5)
            assert torch.allclose(entries.std(0, correction=0), torch.ones(2), atol=1e-5)


class Sequences(Dataset[Any]):
    """Samples of one client."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return {"input_ids": SEQUENCES[self.rows[i]].tolist(), "labels": int(Y[self.rows[i]])}


def test_datasets_may_have_sequences_also_where_all_of_a_client_are_of_one_length() -> None:
    data = from_datasets({"a": Sequences([3, 4]), "b": Sequences([0]), "c": Sequences([1, 2])}, test=0)
    assert data.client(0)[0]["input_ids"].shape == (2, 4)
    assert data.gather(torch.arange(data.rows))[0]["input_ids"].shape[1] == 7


class Pooled(nn.Module):
    """The mean of the words of a sequence, without its padding where that is told."""

    def __init__(self, tokens: int = 20) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(tokens, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        words = self.embedding(input_ids)
        if attention_mask is None:
            return self.output(words.mean(-2))
        weight = attention_mask.unsqueeze(-1).to(words.dtype)
        return self.output((words * weight).sum(-2) / weight.sum(-2))


def test_a_mask_is_made_where_the_model_takes_one_and_none_is_given() -> None:
    data = made({"input_ids": SEQUENCES})
    x, _ = data.masked_for(Pooled()).gather(torch.tensor([0, 3, 2]))
    lengths = torch.tensor([LENGTHS[0], LENGTHS[6], LENGTHS[4]])
    assert torch.equal(x["attention_mask"], (torch.arange(4) < lengths[:, None]).long())
    given = made({"input_ids": SEQUENCES, "attention_mask": [np.ones(n, int) for n in LENGTHS]})
    assert given.masked_for(Pooled()) is given
    assert data.masked_for(nn.Linear(1, 1)) is data
    assert made().masked_for(Pooled()).mask == ""  # nothing by which to name it

    class Encoder(nn.Module):
        def forward(self, src: Tensor, src_key_padding_mask: Tensor) -> Tensor:
            return src * src_key_padding_mask

    hidden = made({"src": SEQUENCES}).masked_for(Encoder()).gather(torch.tensor([0, 3]))[0]
    assert torch.equal(hidden["src_key_padding_mask"], torch.tensor([[False] * 3, [False] * 2 + [True]]))


def test_the_mask_belongs_to_the_input_that_is_called_so() -> None:
    titles = [np.ones(n, int) for n in reversed(LENGTHS)]
    data = made({"title": titles, "input_ids": SEQUENCES}).masked_for(Pooled())
    x, _ = data.client(1)
    assert torch.equal(x["attention_mask"], (x["input_ids"] > 0).long())
    with pytest.raises(check.Refused, match=r"'attention_mask' among the inputs, or the name 'input_ids'"):
        made({"title": titles, "words": SEQUENCES}).masked_for(Pooled())
    aligned = made({"kind": [s % 2 for s in SEQUENCES], "words": SEQUENCES}).masked_for(Pooled())
    x, _ = aligned.client(1)
    assert torch.equal(x["attention_mask"], (x["words"] > 0).long())
    array = made({"title": titles, "input_ids": np.ones((12, 4), int)})
    assert array.masked_for(Pooled()) is array  # nobody knows its padding


EQUAL = [np.array([1, 2, 3]) + i for i in range(12)]


class EqualSequences(Dataset[Any]):
    """Samples of which all have one length."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return {"input_ids": EQUAL[i].tolist(), "labels": int(Y[i])}


class Columns:
    """What `from_huggingface` needs of a datasets.Dataset."""

    features = None

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __len__(self) -> int:
        return len(self.columns["y"])

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


def test_lists_are_sequences_by_their_form_also_where_all_have_one_length() -> None:
    frames = [np.ones((4, 2), np.float32)] * 12
    table = Columns({"input_ids": [s.tolist() for s in EQUAL], "y": list(Y), "who": list(CLIENT)})
    for data, width in (
        (made({"input_ids": EQUAL}), 3),
        (made({"words": [s.tolist() for s in EQUAL]}), 3),
        (made({"inputs_embeds": [torch.from_numpy(f) for f in frames]}), 4),
        (from_datasets({"a": EqualSequences()}, test=0), 3),
        (from_huggingface(table, x=["input_ids"], y="y", client="who"), 3),
    ):
        mask = data.masked_for(Pooled()).client(0)[0]["attention_mask"]
        assert torch.equal(mask, torch.ones(len(mask), width, dtype=torch.int64))
    rows = {
        "values": [[0.5, 1.0]] * 12,
        "image": list(np.ones((12, 5, 5), np.uint8)),
        "words": np.stack(EQUAL),
    }
    given = {"input_ids": EQUAL, "attention_mask": [np.ones(3, int)] * 12}
    for table_of in (rows, given):
        columns = made(table_of).x
        assert isinstance(columns, dict)
        assert not any(isinstance(column, Ragged) for column in columns.values())


def plain_rounds(model: nn.Module, rounds: int, steps: int, lr: float) -> dict[str, Tensor]:
    """Return the model of full-batch FedAvg in which each sequence passes the model alone, unpadded."""
    now = {k: v.detach().clone() for k, v in model.named_parameters()}
    for _ in range(rounds):
        ends = []
        for client in (0, 1):
            params = {k: v.clone().requires_grad_() for k, v in now.items()}
            for _ in range(steps):
                outputs = [
                    torch.func.functional_call(model, params, (torch.from_numpy(s)[None],))
                    for s in SEQUENCES[client::2]
                ]
                target = torch.from_numpy(Y[client::2])
                loss = nn.functional.cross_entropy(torch.cat(outputs), target)
                gradient = torch.autograd.grad(loss, list(params.values()))
                moved = zip(params.items(), gradient)
                params = {k: (v - lr * g).detach().requires_grad_() for (k, v), g in moved}
            ends.append(params)
        now = {k: (ends[0][k] + ends[1][k]).detach() / 2 for k in now}
    return now


@pytest.mark.parametrize("executor", ["loop", "vmap", "graph"])
def test_runs_equal_those_of_unpadded_sequences(executor: str) -> None:
    torch.manual_seed(0)
    model = Pooled()
    data = made({"input_ids": SEQUENCES})
    run = pt.federate(
        model, data, pt.fedavg(lr=0.5), rounds=2, steps=2, executor=executor, baselines=False, progress=False
    )
    expected = plain_rounds(model, 2, 2, 0.5)
    assert all(torch.allclose(run.shared[k], v, atol=1e-5) for k, v in expected.items())


def test_labels_of_positions_train_the_same_stacked_and_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 3))
    data = made(y=[s % 3 for s in SEQUENCES], test=0.2)
    runs = [
        pt.federate(
            model, data, pt.fedavg(lr=0.5), rounds=2, steps=3, batch=2, executor=executor, progress=False
        )
        for executor in ("loop", "vmap", "graph")
    ]
    for run in runs[1:]:
        assert all(torch.allclose(run.shared[k], v, atol=1e-6) for k, v in runs[0].shared.items())
        assert run.summary()["test"] == pytest.approx(runs[0].summary()["test"])


def flat(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.view(-1, 3), target.view(-1))


def flat_by_sample(output: Tensor, target: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(output.view(-1, 3), target.view(-1), reduction="none")
    return (losses.view(target.shape).sum(-1) / (target != -100).sum(-1).clamp(min=1)).mean()


@each(
    ("loss", "other"),
    [(flat, {"executor": "loop"}), (flat_by_sample, {"executor": "vmap", "loss": flat_by_sample})],
)
def test_losses_may_view_labels_of_positions_as_one_row(loss: Any, other: dict[str, Any]) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.output = nn.Embedding(20, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(self.embedding(x.view(-1, x.shape[-1])))  # of a contiguous tensor only

    torch.manual_seed(0)
    model, data = Scores(), made(y=[s % 3 for s in SEQUENCES], test=0.2)
    given: dict[str, Any] = {"rounds": 2, "steps": 3, "batch": 2, "baselines": False, "progress": False}
    one = pt.federate(model, data, pt.fedavg(lr=0.5), loss=loss, executor="loop", **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # clients are stacked
        two = pt.federate(model, data, pt.fedavg(lr=0.5), **other, **given)
    assert all(torch.allclose(one.shared[k], v, atol=1e-6) for k, v in two.shared.items())
    assert one.personalize(data, rounds=1).scores("global") == pytest.approx(one.scores("global"))


def test_samples_of_a_client_are_as_its_models_were_scored_on_them() -> None:
    torch.manual_seed(0)
    data = made({"input_ids": SEQUENCES}, test=0.4)
    given: dict[str, Any] = {"rounds": 2, "steps": 2, "metric": "log_loss", "progress": False}
    run = pt.federate(Pooled(), data, pt.fedalt(personal="output.*", lr=0.5), **given)
    late = run.personalize(data, rounds=1)
    for result in (run, late):
        for client in range(2):
            inputs, target = result.client(client).samples()
            assert list(inputs) == ["input_ids", "attention_mask"]
            with torch.no_grad():
                output = result.client(client).model()(**inputs)
            recorded = result.clients[client]["personal"]
            assert float(nn.functional.cross_entropy(output, target)) == pytest.approx(recorded, abs=1e-5)
    assert torch.equal(run.client(1).samples("train")[1], data.client(1)[1])
    with pytest.raises(check.Refused, match="split='all'"):
        run.client(0).samples("all")


def test_a_run_that_was_read_tells_how_to_get_samples(tmp_path: Path) -> None:
    data = made({"input_ids": SEQUENCES}, test=0.4)
    pt.federate(Pooled(), data, pt.fedavg(lr=0.5), rounds=1, out=tmp_path, baselines=False, progress=False)
    with pytest.raises(check.Refused, match=r"data\.masked_for\(model\)\.client\(1, 'test'\)"):
        pt.load(tmp_path).client(1).samples()


def test_a_metric_of_all_positions_is_that_of_their_labels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 3))
    data = made(y=[s % 3 for s in SEQUENCES], test=0.4)
    for executor in ("loop", "vmap"):
        run = pt.federate(
            model, data, pt.fedavg(lr=0.5), rounds=1, executor=executor, metric="f1_macro", progress=False
        )
        scores = []
        for client in (0, 1):
            x, y = data.client(client, "test")
            with torch.no_grad():
                predicted = run.model()(x).argmax(-1)
            real = y != -100
            pairs = [(predicted[real] == c, y[real] == c) for c in torch.unique(y[real])]
            pairs += [
                (predicted[real] == c, y[real] == c)
                for c in set(predicted[real].tolist()) - set(y[real].tolist())
            ]
            scores.append(
                sum(2 * float((p & t).sum()) / float(p.sum() + t.sum()) for p, t in pairs) / len(pairs)
            )
        weights = data.sizes("test")
        expected = float(np.average(scores, weights=weights))
        assert run.summary()["test"]["global"] == pytest.approx(expected, abs=1e-6)


class ClassesFirst(nn.Sequential):
    """A model whose outputs are [samples, classes, positions], as torch's losses take them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


def of_places(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def tags(longest: int, seed: int) -> FederatedData:
    """Return samples of two clients, whose sequences are up to this long, with labels of positions."""
    rng = np.random.default_rng(seed)
    x = [rng.integers(1, 20, n) for n in (longest, *rng.integers(1, longest, 11))]
    return made(x, [s % 3 for s in x], test=0.5)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@each(("kind", "loss"), [(nn.Sequential, flat), (ClassesFirst, of_places)])
def test_a_loss_as_the_metric_scores_sequences_of_other_lengths(kind: Any, loss: Any, executor: str) -> None:
    torch.manual_seed(0)
    model = kind(nn.Embedding(20, 4), nn.Linear(4, 3))
    given: dict[str, Any] = {"rounds": 1, "loss": loss, "metric": "loss", "baselines": False}
    data = tags(9, seed=0)
    run = pt.federate(model, data, pt.fedavg(lr=0.5), executor=executor, progress=False, **given)
    trained = run.model().eval()
    for longest in (9, 5, 30, 9):
        new = tags(longest, seed=longest)
        expected = []
        for client in range(2):
            start, size = new.test[client].tolist()
            each_sample = []
            for row in range(start, start + size):
                x, y = new.gather(torch.tensor([row]))
                with torch.no_grad():
                    losses = nn.functional.cross_entropy(
                        trained(x) if kind is ClassesFirst else trained(x).mT, y, reduction="none"
                    )
                each_sample.append(losses[y != -100])
            expected.append(float(torch.cat(each_sample).mean()))
        assert run.evaluate(new).numbers("score") == pytest.approx(expected, abs=1e-5)
        assert run.personalize(new, rounds=1).scores("global") == pytest.approx(expected, abs=1e-5)


def test_clients_that_were_held_out_are_scored_by_a_loss_of_positions() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 3)), tags(9, seed=3)
    given: dict[str, Any] = {"rounds": 1, "loss": flat, "metric": "loss", "baselines": False}
    run = pt.federate(model, data, pt.fedavg(lr=0.5), newcomers=0.5, progress=False, **given)
    new = run.personalize(rounds=1)
    x, y = new.client(0).samples()
    with torch.no_grad():
        assert new.scores("global")[0] == pytest.approx(float(flat(run.model().eval()(x), y)), abs=1e-5)


def test_models_that_mind_padding_are_told_of() -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {"rounds": 1, "steps": 1, "baselines": False, "progress": False}
    with pytest.warns(UserWarning, match="changes with the padding behind it"):
        pt.federate(Pooled(), made(), pt.fedavg(lr=0.1), **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pt.federate(Pooled(), made({"input_ids": SEQUENCES}), pt.fedavg(lr=0.1), **given)


def test_losses_that_mind_padding_are_told_of() -> None:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 3))

    def pooled(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.mean(1), target)

    def real(output: Tensor, target: Tensor, inputs: Tensor) -> Tensor:
        counts = (inputs > 0).unsqueeze(-1)
        return nn.functional.cross_entropy((output * counts).sum(1) / counts.sum(1), target)

    given: dict[str, Any] = {"rounds": 1, "baselines": False, "progress": False, "executor": "loop"}
    metric = pt.Metric(lambda z, y: (z.mean(1).argmax(-1) == y).float().mean(), True, name="right")
    with pytest.warns(UserWarning, match="the loss of a sequence changes with the padding behind it"):
        pt.federate(model, made(test=0.2), pt.fedavg(lr=0.5), loss=pooled, metric=metric, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pt.federate(model, made(test=0.2), pt.fedavg(lr=0.5), loss=real, metric=metric, **given)


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Pooled(), made({"input_ids": SEQUENCES}, test=0.2)
    given: dict[str, Any] = {"steps": 2, "batch": 2, "baselines": False, "progress": False}
    whole = pt.federate(model, data, pt.fedavg(lr=0.5), rounds=4, **given)
    pt.federate(model, data, pt.fedavg(lr=0.5), rounds=2, out=tmp_path, **given)
    resumed = pt.federate(model, data, pt.fedavg(lr=0.5), rounds=4, out=tmp_path, resume=True, **given)
    assert all(torch.equal(resumed.shared[k], v) for k, v in whole.shared.items())
