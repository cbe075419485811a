"""Models that Partita did not write: how each is made, small and random, and what samples it takes."""

from __future__ import annotations

from language import LANGUAGE
from layers import LAYERS
from vision import VISION

from samples import Foreign

MODELS: dict[str, Foreign] = {**VISION, **LANGUAGE, **LAYERS}
