"""The recurrence written by hand is that of torch.nn.LSTM with one bias per gate."""

import pytest
import torch
from torch import nn

from partita import models
from partita.models.lstm import BiLSTM


def test_equals_torch_lstm():
    torch.manual_seed(0)
    ours, theirs = BiLSTM(6, 5), nn.LSTM(6, 5, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for i, suffix in enumerate(("l0", "l0_reverse")):
            theirs.get_parameter(f"weight_ih_{suffix}").copy_(ours.input[i])
            theirs.get_parameter(f"weight_hh_{suffix}").copy_(ours.recurrent[i])
            theirs.get_parameter(f"bias_ih_{suffix}").copy_(ours.bias[i])
            theirs.get_parameter(f"bias_hh_{suffix}").zero_()
    x = torch.randn(3, 9, 6)
    _, (last, _) = theirs(x)
    torch.testing.assert_close(ours(x), torch.cat((last[0], last[1]), -1), atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad(ours(x).square().sum(), [ours.input, ours.recurrent, ours.bias])
    names = [f"{kind}_{s}" for kind in ("weight_ih", "weight_hh", "bias_ih") for s in ("l0", "l0_reverse")]
    loss = theirs(x)[1][0].square().sum()
    grads = torch.autograd.grad(loss, [theirs.get_parameter(name) for name in names])
    for i, g in enumerate(mine):
        torch.testing.assert_close(g, torch.stack(grads[2 * i : 2 * i + 2]), atol=1e-5, rtol=1e-4)


def test_mean_of_all_outputs():
    last = BiLSTM(6, 5)
    mean = BiLSTM(6, 5, "mean")
    mean.load_state_dict(last.state_dict())
    x = torch.randn(3, 4, 6)
    forwards = [last(x[:, : t + 1])[:, :5] for t in range(4)]
    backwards = [last(x[:, t:])[:, 5:] for t in range(4)]
    expected = torch.cat((torch.stack(forwards).mean(0), torch.stack(backwards).mean(0)), -1)
    torch.testing.assert_close(mean(x), expected)


def test_outputs_of_a_new_model_depend_on_the_words():
    """With an embedding from U(−0.05, 0.05) they hardly did (0.01), and SGD learnt nothing of reviews."""
    model = models.bilstm(1000, dropout=0.0)
    x = torch.randint(0, 1000, (16, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model[:2](x).std(0).mean() > 0.1


def test_the_mean_knows_words_that_the_last_output_has_forgotten():
    """A word in the middle of a long text moves the mean of the outputs, and not the last one."""
    x = torch.randint(0, 50, (8, 61), generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 30] = 50 - other[:, 30]
    moved = {}
    for pool in ("last", "mean"):
        model = models.bilstm(51, embedding=32, hidden=32, dropout=0.0, pool=pool)
        with torch.no_grad():
            moved[pool] = float((model[:2](x) - model[:2](other)).norm())
    assert moved["mean"] > 30 * moved["last"]


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_going_on_from_a_record_equals_reading_all(pool):
    lstm = models.bilstm(20, embedding=4, hidden=3, dropout=0.0, pool=pool).lstm
    x = torch.randn(5, 7, 4)
    torch.testing.assert_close(lstm.resume(lstm.begin(x, 3), 3), lstm(x))
