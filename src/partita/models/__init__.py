"""The papers' models, and adapters and other personal parts for any model.

Each function builds a model with the initial weights of its own `seed`, and leaves the global random numbers
as they are. All can be stacked over clients with torch.func.
"""

from partita.models.adapters import add_adapters
from partita.models.blocks import Blocks
from partita.models.cnn import cifar_cnn, leaf_cnn, mnist_cnn
from partita.models.composed import additive, split_units
from partita.models.freeze import freeze
from partita.models.linear import logistic, mlp
from partita.models.lstm import bilstm
from partita.models.quadratic import quadratic
from partita.models.resnet import resnet18, resnet20
from partita.models.transformer import transformer

__all__ = [
    "Blocks",
    "add_adapters",
    "additive",
    "bilstm",
    "cifar_cnn",
    "freeze",
    "leaf_cnn",
    "logistic",
    "mlp",
    "mnist_cnn",
    "quadratic",
    "resnet18",
    "resnet20",
    "split_units",
    "transformer",
]
