"""What a loss asks for beside (output, target): by its signature, by sample, and in a method's loss."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partita.core.asks import asked_by, by_sample, of_model
from partita.core.criterion import LOSSES, OWN, choose_loss, own
from partita.core.terms import of_output, with_term

OUTPUT, TARGET = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
H, COUNTS = torch.randn(5, 4, dtype=torch.float64), torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64)
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])


def rich(output: Tensor, target: Tensor, features: Tensor, class_counts: Tensor) -> Tensor:
    return F.cross_entropy(output + (class_counts + 1).log(), target) + 0.1 * features.square().sum(1).mean()


class Rich(nn.Module):
    def forward(self, prediction: Tensor, label: Tensor, *, received_output: Tensor) -> Tensor:
        return F.cross_entropy(prediction, label) + (prediction - received_output).square().mean()


def focal(inputs: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    return gamma * F.cross_entropy(inputs, targets)


def test_the_signature_says_what_a_loss_asks_for() -> None:
    assert asked_by(rich) == ("features", "class_counts")
    assert asked_by(Rich()) == ("received_output",)
    assert asked_by(partial(rich, class_counts=COUNTS)) == ("features", "class_counts")
    for plain in (focal, F.cross_entropy, nn.MSELoss(), lambda features, inputs: inputs - features):
        assert asked_by(plain) == ()  # the first two arguments may be called anything
    assert of_model("previous_features") == ("previous", "features")
    assert of_model("class_counts") is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target, featuers: output,  # noqa: ARG005
        lambda output, target, features, teacher: output,  # noqa: ARG005
        lambda output, features: output,  # noqa: ARG005, one argument too few
    ],
)
def test_a_name_that_nobody_knows_is_refused(loss: object) -> None:
    if loss.__code__.co_argcount == 2:  # type: ignore[attr-defined]
        assert choose_loss(loss, OUTPUT, TARGET).asks == ()  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=r"^loss=.*features, inputs, received_output.*class_counts"):
        choose_loss(loss, OUTPUT, TARGET)  # type: ignore[arg-type]


def test_an_option_that_is_nearly_a_known_name_is_refused() -> None:
    def typo(output: Tensor, target: Tensor, recieved_output: Tensor | None = None) -> Tensor:  # noqa: ARG001
        return F.cross_entropy(output, target)

    with pytest.raises(ValueError, match=r"^loss=.*'recieved_output'.*give 'received_output'"):
        choose_loss(typo, OUTPUT, TARGET)

    def fine(output: Tensor, target: Tensor, class_weights: Tensor | None = None) -> Tensor:
        return F.cross_entropy(output, target, weight=class_weights)

    for loss in (fine, focal, partial(typo, recieved_output=None), F.cross_entropy, nn.CrossEntropyLoss()):
        assert choose_loss(loss, OUTPUT, TARGET).asks == ()


def test_a_batch_with_padding_counts_its_real_samples() -> None:
    criterion, real = own(rich), MASK > 0
    given = {"features": H, "class_counts": COUNTS}
    whole = criterion.of_batch(OUTPUT[real], TARGET[real], None, {**given, "features": H[real]})
    torch.testing.assert_close(criterion.of_batch(OUTPUT, TARGET, MASK, given), whole)
    torch.testing.assert_close(whole, rich(OUTPUT[real], TARGET[real], H[real], COUNTS))


def test_what_vmap_cannot_trace_goes_sample_by_sample() -> None:
    def loss(output: Tensor, target: Tensor, features: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * float(features.sum().item())

    expected = [loss(OUTPUT[i : i + 1], TARGET[i : i + 1], H[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(by_sample(loss)(OUTPUT, TARGET, features=H), torch.stack(expected))


# ---- what methods make of a loss


def term(features: Tensor, target: Tensor) -> Tensor:
    return 0.3 * features.square().sum(1) * (target + 1)


@pytest.mark.parametrize(
    "base",
    [
        LOSSES["cross_entropy"],
        own(rich),
        own(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))),
        own(nn.CrossEntropyLoss(reduction="sum")),
        own(nn.CrossEntropyLoss(ignore_index=1)),
    ],
    ids=["named", "rich", "weighted", "sum", "ignoring"],
)
def test_a_term_counts_as_its_sample_does(base: object) -> None:
    loss, real = with_term(base, term), MASK > 0  # type: ignore[arg-type]
    given = {k: v for k, v in {"features": H, "class_counts": COUNTS}.items() if k in loss.asks}
    alone = {k: v for k, v in given.items() if k in base.asks}  # type: ignore[attr-defined]
    cut = {**given, "features": H[real]}
    value = base.of_batch(  # type: ignore[attr-defined]
        OUTPUT[real], TARGET[real], None, {k: v[real] if k == "features" else v for k, v in alone.items()}
    )
    weight = torch.ones(5, dtype=torch.float64)
    if base.weight is not None:  # type: ignore[attr-defined]
        weight = base.weight(OUTPUT, TARGET)  # type: ignore[attr-defined]
    total = (weight * term(H, TARGET))[real].sum()
    expected = value + (total if loss.adds_up else total / weight[real].sum())
    torch.testing.assert_close(loss.of_batch(OUTPUT[real], TARGET[real], None, cut), expected)
    torch.testing.assert_close(loss.of_batch(OUTPUT, TARGET, MASK, given), expected)


def test_other_outputs_for_the_same_loss() -> None:
    loss = of_output(own(rich), lambda output, class_counts: output + (class_counts + 2).log())
    assert loss.asks == ("features", "class_counts")
    found = loss.of_batch(OUTPUT, TARGET, None, {"features": H, "class_counts": COUNTS})
    torch.testing.assert_close(found, rich(OUTPUT + (COUNTS + 2).log(), TARGET, H, COUNTS))


def test_the_models_own_loss_has_no_outputs_to_change() -> None:
    for change in (lambda: with_term(OWN, term), lambda: of_output(OWN, lambda output: output)):
        with pytest.raises(ValueError, match=r"^loss='model': the method changes the loss"):
            change()
