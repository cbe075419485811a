"""A recurrent model that is cut in time: the first words run forwards, the rest trains from their state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partita as pt
from capacity.weak import assert_close, everything, federate, rounds
from partita.capacity import depth, memory
from partita.capacity.memory import footprint
from partita.core.parts import Share
from partita.data import FederatedData

KINDS = ("strong", "weak", "weak", "weak")
CUTS = {"strong": 0, "weak": 1}
HALF = {"weak": 0.5}
WEAK = depth(CUTS, KINDS, words=HALF)


def reviews(words: int = 7, each: int = 8) -> FederatedData:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 20, (each * len(KINDS), words), generator=g)
    starts = range(0, len(x), each)
    train, test = [(a, each - 2) for a in starts], [(a + each - 2, 2) for a in starts]
    return FederatedData.make(x, (x[:, 0] > 9).long(), train, test)


def model(dropout: float = 0.0) -> nn.Module:
    return pt.models.bilstm(20, embedding=4, hidden=3, outputs=2, dropout=dropout)


def weak_of(held: pt.Capacity, net: nn.Module, x: Tensor) -> tuple[Share, Tensor]:
    """What the weak class holds, and what its frozen pieces make of the samples."""
    share = next(share for share in held.shares(net, x, 1) if share.name == "weak")
    for piece in share.pieces:
        x = piece.eval()(x)
    return share, x


def plain(net: nn.Module, x: Tensor, k: int) -> Tensor:
    """Both directions word by word; what comes before the k-th word of each has no gradient."""
    block, words, ends = net.lstm.both, net.embedding(x).detach(), []
    for direction in range(2):
        weights = block.input[direction], block.recurrent[direction], block.bias[direction]
        h = c = words.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            word = words[:, t if direction == 0 else -1 - t]
            with torch.set_grad_enabled(t >= k):
                gates = nn.functional.linear(word, weights[0], weights[2]) + h @ weights[1].T
                i, f, g, o = gates.chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
        ends.append(h)
    return net.output(torch.cat(ends, 1))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_weak_client_trains_the_last_words_of_each_direction(executor: str) -> None:
    data = reviews()
    (round,), _ = rounds(model(), data, pt.fedavg(lr=0.5), capacity=WEAK, steps=1, batch=6, executor=executor)
    for client, kind in enumerate(KINDS):
        net, (x, y), upload = model(), data.client(client), round.upload(client)
        nn.functional.cross_entropy(plain(net, x, 3 if kind == "weak" else 0), y).backward()
        for name in ("input", "recurrent", "bias"):
            gradient = getattr(net.lstm.both, name).grad
            torch.testing.assert_close(upload[f"lstm.both.{name}"], 0.5 * gradient)
        assert bool(upload["embedding.weight"].any()) == (kind == "strong")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_it_sees_the_same_model(share: float) -> None:
    net, x = model().eval(), reviews().x
    weak, record = weak_of(depth(CUTS, words={"weak": share}), net, x)
    torch.testing.assert_close(weak.model.eval()(record), net(x))


def test_a_new_state_leaves_the_words_out() -> None:
    net, x = model().eval(), reviews().x
    weak, left = weak_of(depth(CUTS, words=HALF, state="new"), net, x)
    torch.testing.assert_close(weak.model.eval()(left), net(x[:, 3:]))


@pytest.mark.parametrize("state", ["recorded", "new"])
def test_stacked_as_alone(state: str) -> None:
    held = depth(CUTS, KINDS, words=HALF, state=state)
    runs = [
        federate(model(0.3), reviews(), pt.fedavg(lr=0.3), capacity=held, rounds=2, executor=executor)
        for executor in ("loop", "vmap")
    ]
    assert_close(*map(everything, runs))


def test_the_papers_figures() -> None:
    """Table 1: 1,051,137 parameters, 655,360 activations and the output's one; 0.35 of the whole."""
    net = pt.models.bilstm()
    weak, record = weak_of(depth(CUTS, words=HALF), net, torch.zeros(1, 256, dtype=torch.int64))
    p, a = footprint(weak.model, record)
    assert (p, a) == (1_051_137, 655_361)
    whole = memory(net, (256,)).total
    assert round((p + a) / (whole.parameters + whole.activations), 2) == 0.35


def test_a_tensor_that_is_passed_and_trained_is_sent_once() -> None:
    runs = [
        federate(model(), reviews(), pt.fedavg(lr=0.1), capacity=held) for held in (WEAK, depth(CUTS, KINDS))
    ]
    words, all_words = (run.summary()["classes"]["weak"]["bytes_down"] for run in runs)
    assert words == all_words


def test_errors() -> None:
    with pytest.raises(ValueError, match="words that leave some to train"):
        depth(CUTS, words=HALF).shares(pt.models.mlp(64, 8, 4), torch.zeros(2, 64), 1)
    with pytest.raises(ValueError, match="capacity words='other'"):
        depth(CUTS, words={"other": 0.5})
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"state='new'.*reads words one after another"):
        depth({"weak": 1}, words=HALF).shares(net, torch.zeros(2, 6, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="personal"):
        federate(model(), reviews(), pt.fedalt(personal="lstm.*", lr=0.1), capacity=WEAK)
