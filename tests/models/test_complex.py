"""Models of complex numbers: what would be trained or tracked is refused, a constant is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partita as pt

DATA = pt.data.digits(clients=3, test=0.4, seed=0)
WORK = {"rounds": 1, "steps": 2, "batch": 8, "baselines": False}


class Rotated(nn.Module):
    """Phases that turn what a layer puts out; they may be trained, tracked or constant."""

    def __init__(self, phases: str) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer = nn.Linear(64, 8)
        self.head = nn.Linear(8, 10)
        turn = torch.polar(torch.ones(8), torch.linspace(0, 1, 8))
        if phases == "trained":
            self.turn = nn.Parameter(turn)
        elif phases == "frozen":
            self.turn = nn.Parameter(turn, requires_grad=False)
        else:
            self.register_buffer("turn", turn)
        self.tracked = phases == "tracked"

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.flatten(x)) * self.turn
        if self.tracked and self.training:
            self.turn = self.turn * self.turn[1]
        return self.head(h.real + h.imag)  # type: ignore[no-any-return]


@pytest.mark.parametrize("phases", ["trained", "tracked"])
def test_what_changes_is_refused_with_its_name(phases: str) -> None:
    message = r"^model turn='torch.complex64': expected parameters and statistics of real numbers: .*view_as"
    with pytest.raises(ValueError, match=message):
        pt.federate(Rotated(phases), DATA, pt.fedavg(lr=0.1), **WORK)


@pytest.mark.parametrize("phases", ["constant", "frozen"])
def test_a_constant_is_the_models_own(phases: str) -> None:
    model = Rotated(phases)
    runs = [pt.federate(model, DATA, pt.fedavg(lr=0.1), executor=e, **WORK) for e in ("loop", "vmap")]
    assert set(runs[0].shared) == {"layer.weight", "layer.bias", "head.weight", "head.bias"}
    for name, value in runs[0].shared.items():
        torch.testing.assert_close(value, runs[1].shared[name])
        assert not torch.equal(value, model.state_dict()[name])
