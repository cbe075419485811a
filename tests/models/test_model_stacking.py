"""Every model can be stacked: per-client gradients by vmap equal those of one client after another."""

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import cross_entropy

from partita import models
from support import each

CLIENTS, BATCH = 2, 3
LM = {"length": 5, "width": 8, "depth": 2, "heads": 2, "hidden": 16}

SMALL = {  # model, shape of one sample, number of tokens (0: the input is real)
    "logistic": (lambda: models.logistic(16, 4), (16,), 0),
    "mlp": (lambda: models.mlp(16, 8, 4), (4, 4), 0),
    "leaf_cnn": (lambda: models.leaf_cnn(4), (28, 28), 0),
    "mnist_cnn": (lambda: models.mnist_cnn(4, dropout=0.0), (28, 28), 0),
    "cifar_cnn": (lambda: models.cifar_cnn(4, dropout=0.0), (3, 32, 32), 0),
    "resnet20": (lambda: models.resnet20(4, norm="group", width=0.25), (3, 16, 16), 0),
    "resnet18": (lambda: models.resnet18(4, width=0.125), (16, 16), 0),
    "transformer": (lambda: models.transformer(7, **LM), (5,), 7),
    "bilstm": (lambda: models.bilstm(7, embedding=4, hidden=4, outputs=4, dropout=0.0), (5,), 7),
    "residual": (
        lambda: models.add_adapters(models.resnet18(4, width=0.125), "residual"),
        (16, 16),
        0,
    ),
    "bottleneck": (lambda: models.add_adapters(models.transformer(7, **LM), "bottleneck", rank=3), (5,), 7),
    "lora": (lambda: models.add_adapters(models.mlp(16, 8, 4), "lora", rank=3), (16,), 0),
    "additive": (lambda: models.additive(models.mlp(16, 8, 4), models.logistic(16, 4)), (16,), 0),
    "mixture": (
        lambda: models.additive(models.mlp(16, 8, 4), models.logistic(16, 4), mix="probabilities"),
        (16,),
        0,
    ),
    "split": (lambda: models.split_units(models.mlp(16, 8, 4), "hidden1.linear", 3, inputs=5), (16,), 0),
    "split convolution": (
        lambda: models.split_units(models.resnet18(4, width=0.125), "block1.conv1", 0.25),
        (16, 16),
        0,
    ),
    "encoder": (lambda: models.add_adapters(_encoder(), "bottleneck", rank=3), (5, 8), 0),
}


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 4))


def _cohort(name):
    """A model, the stacked parameters of clients that differ, and a batch for each."""
    build, shape, tokens = SMALL[name]
    torch.manual_seed(0)
    model = build()
    params = {
        k: torch.stack([p + 0.1 * torch.randn_like(p) for _ in range(CLIENTS)]) for k, p in _named(model)
    }
    if tokens:
        x = torch.randint(0, tokens, (CLIENTS, BATCH, *shape))
    else:
        x = torch.randn(CLIENTS, BATCH, *shape)
    return model, params, x, torch.randint(0, 4, (CLIENTS, BATCH))


def _named(model):
    return [(k, p.detach()) for k, p in model.named_parameters()]


def _loss(model, params, x, y):
    scores = functional_call(model, params, (x,))
    return cross_entropy(scores[:, -1] if scores.dim() == 3 else scores, y)


@each("name", SMALL)
def test_stacked_gradients_equal_the_loop(name):
    model, params, x, y = _cohort(name)
    stacked = vmap(grad(lambda p, x, y: _loss(model, p, x, y)))(params, x, y)
    for i in range(CLIENTS):
        own = {k: v[i].clone().requires_grad_() for k, v in params.items()}
        alone = torch.autograd.grad(_loss(model, own, x[i], y[i]), list(own.values()))
        for k, g in zip(own, alone):
            assert g.any(), k
            torch.testing.assert_close(stacked[k][i], g, atol=1e-5, rtol=1e-4, msg=k)


@each("name", [name for name in SMALL if name not in ("leaf_cnn", "cifar_cnn", "encoder")])
def test_stacked_hessian_vector_products(name):
    """Forward over reverse, which meta-learning asks for; checked against reverse over reverse."""
    model, params, x, y = _cohort(name)

    def product(p, x, y):
        return jvp(grad(lambda q: _loss(model, q, x, y)), (p,), (p,))[1]

    stacked = vmap(product)(params, x, y)
    own = {k: v[0].clone().requires_grad_() for k, v in params.items()}
    first = torch.autograd.grad(_loss(model, own, x[0], y[0]), list(own.values()), create_graph=True)
    inner = sum((g * p.detach()).sum() for g, p in zip(first, own.values()))
    alone = torch.autograd.grad(inner, list(own.values()), allow_unused=True, materialize_grads=True)
    for k, h in zip(own, alone):
        torch.testing.assert_close(stacked[k][0], h, atol=1e-4, rtol=1e-3, msg=k)


def test_stacked_batch_norm():
    """With batch normalization the statistics are cloned, passed with the parameters and returned."""
    torch.manual_seed(0)
    model = models.resnet20(4, norm="batch", width=0.25)
    params = {k: torch.stack([p, p + 0.1 * torch.randn_like(p)]) for k, p in _named(model)}
    buffers = {k: torch.stack([b, b]) for k, b in model.named_buffers()}
    x, y = torch.randn(CLIENTS, BATCH, 3, 16, 16), torch.randint(0, 4, (CLIENTS, BATCH))

    def loss(p, b, x, y):
        b = {k: v.clone() for k, v in b.items()}
        return cross_entropy(functional_call(model, {**p, **b}, (x,)), y), b

    stacked, after = vmap(grad(loss, has_aux=True))(params, buffers, x, y)
    for i in range(CLIENTS):
        one = [{k: v[i] for k, v in t.items()} for t in (params, buffers)]
        alone, own = grad(loss, has_aux=True)(*one, x[i], y[i])
        for k in alone:
            torch.testing.assert_close(stacked[k][i], alone[k], atol=1e-5, rtol=1e-4, msg=k)
        for k in own:
            torch.testing.assert_close(after[k][i], own[k], atol=1e-5, rtol=1e-5, msg=k)
    assert (after["stem.norm.num_batches_tracked"] == 1).all()
    assert not torch.equal(after["stem.norm.running_mean"][0], after["stem.norm.running_mean"][1])


@each(
    ("model", "x"),
    [
        (models.mnist_cnn(4, dropout=0.5), torch.ones(CLIENTS, BATCH, 28, 28)),
        (
            models.bilstm(7, embedding=4, hidden=4, dropout=0.5),
            torch.ones(CLIENTS, BATCH, 5, dtype=torch.long),
        ),
        (models.transformer(7, **LM, dropout=0.5), torch.ones(CLIENTS, BATCH, 5, dtype=torch.long)),
    ],
)
def test_dropout_stacks(model, x):
    params = dict(_named(model))
    scores = vmap(lambda x: functional_call(model, params, (x,)), randomness="different")(x)
    assert not torch.allclose(scores[0], scores[1])
    model.eval()
    scores = vmap(lambda x: functional_call(model, params, (x,)))(x)
    torch.testing.assert_close(scores[0], scores[1])
