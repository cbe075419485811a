"""What happens to what clients send on its way to the server. A transform is one file with its definition."""

from partita.transforms.half import half
from partita.transforms.low_rank import low_rank
from partita.transforms.quantize import quantize
from partita.transforms.randk import randk
from partita.transforms.topk import topk

__all__ = ["half", "low_rank", "quantize", "randk", "topk"]
