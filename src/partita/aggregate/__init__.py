"""What the server makes of the clients' deltas. An aggregator is one file with its definition."""

from partita.aggregate.bucketing import bucketing
from partita.aggregate.centered_clipping import centered_clipping
from partita.aggregate.coordinate_median import coordinate_median
from partita.aggregate.geometric_median import geometric_median
from partita.aggregate.krum import krum, multi_krum
from partita.aggregate.layerwise import layerwise
from partita.aggregate.mean import mean
from partita.aggregate.nnm import nnm
from partita.aggregate.smoothed import smoothed_coordinate_median, smoothed_geometric_median
from partita.aggregate.trimmed_mean import trimmed_mean

__all__ = [
    "bucketing",
    "centered_clipping",
    "coordinate_median",
    "geometric_median",
    "krum",
    "layerwise",
    "mean",
    "multi_krum",
    "nnm",
    "smoothed_coordinate_median",
    "smoothed_geometric_median",
    "trimmed_mean",
]
