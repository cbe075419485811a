"""The model of the quadratic problems: a linear map in two parts, in float64."""

import re

import pytest
import torch
from torch.func import functional_call, grad, vmap

from partita import models
from support import each


def test_the_two_parts_add_up():
    model = models.quadratic(3, 2)
    x = torch.randn(5, 5, dtype=torch.float64)
    assert {k: (p.shape, p.dtype) for k, p in model.named_parameters()} == {
        "theta": ((3,), torch.float64),
        "w": ((2,), torch.float64),
    }
    torch.testing.assert_close(model(x), x @ torch.cat([model.theta, model.w]))


def test_the_start_is_normal_and_the_seed_alone_decides_it():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a, b, c = (models.quadratic(4000, 50, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["theta"], c["theta"])
    assert abs(float(a["theta"].mean())) < 0.1
    assert float(a["theta"].std()) == pytest.approx(1, abs=0.1)


def test_another_w_begins_at_the_same_theta():
    assert torch.equal(models.quadratic(7, 2).theta, models.quadratic(7, 4).theta)


def test_gradients_of_stacked_clients_are_those_of_each():
    model = models.quadratic(3, 2)
    params = {k: torch.randn(4, *p.shape, dtype=p.dtype) for k, p in model.named_parameters()}
    x, y = torch.randn(4, 6, 5, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)

    def loss(p, x, y):
        return (functional_call(model, p, (x,)) - y).square().mean()

    stacked = vmap(grad(loss))(params, x, y)
    for i in range(4):
        alone = grad(loss)({k: p[i] for k, p in params.items()}, x[i], y[i])
        for name in alone:
            torch.testing.assert_close(stacked[name][i], alone[name])


@each(
    ("options", "message"),
    [
        ({"d_theta": 0}, "d_theta=0: expected a whole number from 1"),
        ({"d_w": 2.5}, "d_w=2.5: expected a whole number from 1"),
        ({"seed": -1}, "seed=-1: expected a whole number from 0"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        models.quadratic(**options)
