"""Clients whose devices differ: what a part of a model takes in training, and what each class of them trains.

depth     weak devices train the last blocks only (EmbracingFL)
shallow   weak devices train the first blocks and the head (the shape of InclusiveFL)
width     weak devices train the first channels of every layer
rank      weak devices train LoRA adapters of a smaller rank
heterofl  the same with the scaler and the masked loss of HeteroFL
fjord     the same with a random width in each step (ordered dropout)
"""

from partita.capacity.depth import depth
from partita.capacity.memory import Memory, fit, memory, pieces
from partita.capacity.rank import rank
from partita.capacity.shallow import shallow
from partita.capacity.width import fjord, heterofl, width

__all__ = ["Memory", "depth", "fit", "fjord", "heterofl", "memory", "pieces", "rank", "shallow", "width"]
