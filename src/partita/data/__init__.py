"""Federated datasets: readers, partitioners, feature shifts."""

from partita.data.build import from_arrays, split
from partita.data.datasets import from_datasets
from partita.data.digits import digits
from partita.data.federated import FederatedData
from partita.data.mnist import mnist_shifted
from partita.data.partitioners import dirichlet, iid, label_skew, natural, power_law
from partita.data.population import Population
from partita.data.quadratic import Quadratic, quadratic
from partita.data.readers import from_huggingface, from_leaf, from_npz
from partita.data.real import real
from partita.data.scale import standardize
from partita.data.shifts import negative, noise, rotation, standard
from partita.data.synthetic import synthetic, synthetic_regression

__all__ = [
    "FederatedData",
    "Population",
    "Quadratic",
    "digits",
    "dirichlet",
    "from_arrays",
    "from_datasets",
    "from_huggingface",
    "from_leaf",
    "from_npz",
    "iid",
    "label_skew",
    "mnist_shifted",
    "natural",
    "negative",
    "noise",
    "power_law",
    "quadratic",
    "real",
    "rotation",
    "split",
    "standard",
    "standardize",
    "synthetic",
    "synthetic_regression",
]
