"""Losses: the mean over a batch is the mean of the samples, and agrees with PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from partita.core.criterion import LOSSES, Criterion, choose_loss, own
from partita.core.metrics import choose_metrics
from support import each

X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (7,), generator=torch.Generator().manual_seed(1))


def criterion_of(
    metric: str, output: torch.Tensor, target: torch.Tensor, loss: str = "cross_entropy"
) -> Criterion:
    criterion = choose_metrics(metric, LOSSES[loss], False, output, target, target)[0].criterion
    assert criterion is not None
    return criterion


def test_cross_entropy_is_pytorchs() -> None:
    torch.testing.assert_close(LOSSES["cross_entropy"].mean(X, Y), F.cross_entropy(X, Y))
    torch.testing.assert_close(LOSSES["cross_entropy"].each(X, Y), F.cross_entropy(X, Y, reduction="none"))


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets of sequences, one of which ends early."""
    draw = torch.Generator().manual_seed(2)
    output, target = (
        torch.randn(3, 4, 6, generator=draw),
        torch.randint(0, 6, (3, 4), generator=draw),
    )
    target[0, 2:] = -100
    return output, target


def test_every_token_of_sequences_counts_alike() -> None:
    output, target = sequences()
    loss = LOSSES["cross_entropy"]
    torch.testing.assert_close(
        loss.mean(output, target), F.cross_entropy(output.flatten(0, 1), target.flatten())
    )
    real = torch.tensor([1.0, 1.0, 0.0])  # a batch with padding
    expected = F.cross_entropy(output[:2].flatten(0, 1), target[:2].flatten())
    torch.testing.assert_close(loss.of_batch(output, target, real), expected)
    accuracy = criterion_of("accuracy", output, target)
    hits = (output.argmax(-1) == target)[target != -100].float()
    torch.testing.assert_close(accuracy.mean(output, target), hits.mean())


@each("name", ["cross_entropy", "next_token"])
def test_a_batch_without_labels_that_count_has_no_loss(name: str) -> None:
    output, target = sequences()
    output.requires_grad_()
    empty = torch.full_like(target, -100)
    for mask in (None, torch.ones(3), torch.zeros(3)):
        value = LOSSES[name].of_batch(output, empty, mask)
        assert value == 0
        assert not torch.autograd.grad(value, output)[0].any()


def test_next_token_compares_each_output_with_the_label_behind_it() -> None:
    output, target = sequences()
    loss = LOSSES["next_token"]
    expected = F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())
    torch.testing.assert_close(loss.mean(output, target), expected)


@each("metric", ["accuracy", "perplexity", "log_loss", "balanced_accuracy", "f1_macro", "brier"])
def test_metrics_of_next_tokens(metric: str) -> None:
    output, target = sequences()
    (ahead,) = choose_metrics(metric, LOSSES["next_token"], False, output, target, target)
    known = target[:, 1:] != -100
    after, labels = output[:, :-1][known], target[:, 1:][known]
    (plain,) = choose_metrics(metric, LOSSES["cross_entropy"], False, after, labels, labels)
    value, expected = (
        m.score(m.keep(o, t), t) for m, o, t in ((ahead, output, target), (plain, after, labels))
    )
    assert value == pytest.approx(expected, rel=1e-5)


@each("metric", ["accuracy", "perplexity", "f1_macro"])
def test_the_last_prompt_predicts_the_first_token(metric: str) -> None:
    output, target = sequences()
    longer = torch.cat([torch.randn(3, 2, 6), output], 1)
    loss = LOSSES["next_token"]
    (prompted,) = choose_metrics(metric, loss, False, longer, target, target)
    known = target != -100
    before, labels = longer[:, 1:-1][known], target[known]
    (plain,) = choose_metrics(metric, LOSSES["cross_entropy"], False, before, labels, labels)
    expected = plain.score(plain.keep(before, labels), labels)
    assert prompted.score(prompted.keep(longer, target), target) == pytest.approx(expected, rel=1e-5)


def test_binary_and_squared() -> None:
    logit, y = torch.randn(6, 1), torch.tensor([0, 1, 1, 0, 1, 0])
    expected = F.binary_cross_entropy_with_logits(logit[:, 0], y.float())
    torch.testing.assert_close(LOSSES["binary_cross_entropy"].mean(logit, y), expected)
    accuracy = criterion_of("accuracy", logit, y, "binary_cross_entropy")
    assert accuracy.each(torch.where(y[:, None] > 0, 2.0, -2.0), y).mean() == 1.0
    target = torch.randn(6, 2)
    torch.testing.assert_close(
        LOSSES["mse"].mean(logit.expand(6, 2), target), F.mse_loss(logit.expand(6, 2), target)
    )
    mae = criterion_of("mae", logit, target[:, 0], "mse")
    torch.testing.assert_close(mae.mean(logit[:, 0], target[:, 0]), F.l1_loss(logit[:, 0], target[:, 0]))


def test_own_function_per_sample() -> None:
    criterion = own(F.cross_entropy)
    torch.testing.assert_close(criterion.each(X, Y), F.cross_entropy(X, Y, reduction="none"))
    assert criterion.name == "cross_entropy"


@each(
    ("output", "target", "loss", "metric"),
    [
        (X, Y, "cross_entropy", "accuracy"),
        (X[:, :1], Y % 2, "binary_cross_entropy", "accuracy"),
        (X[:, 0], Y % 2, "binary_cross_entropy", "accuracy"),
        (X[:, :1], torch.randn(7, 1), "mse", "mse"),
        (torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), "cross_entropy", "accuracy"),
    ],
)
def test_what_fits_the_targets(output: torch.Tensor, target: torch.Tensor, loss: str, metric: str) -> None:
    chosen = choose_loss(None, output, target)
    (default,) = choose_metrics(None, chosen, False, output, target, target)
    assert (chosen.name, default.name) == (loss, metric)


@pytest.mark.parametrize(("loss", "words"), [("mes", "did you mean 'mse'"), (3, "function of")])
def test_refusals(loss: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_loss(loss, X, Y)  # type: ignore[arg-type]
