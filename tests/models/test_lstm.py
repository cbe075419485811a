"""The recurrence written by hand is that of torch.nn.LSTM with one bias per gate."""

import torch
from torch import nn

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
