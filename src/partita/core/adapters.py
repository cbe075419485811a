"""Which tensors of a model are adapters: those of this package, of peft, and of others by their names.

A model of peft says it itself: each layer that it changes has `adapter_layer_names`, and the module that
holds all of them the `prefix` of their names ("lora_", "ia3_"); trained prompts and prefixes are in its
`prompt_encoder`. Whole layers that are trained beside adapters (`modules_to_save`, a new head) are none: they
are of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

OURS = "adapter"
WORDS = (OURS, "adapters", "adaption_prompt", "adaption_gate", "prompt_encoder")
"""Parts of names that say so: ours, of adapter-hub, and of peft where no layer declares them."""
SAVED = "modules_to_save"


class Adapters:
    """Tells adapters from all other tensors of a model, by their names."""

    def __init__(self, model: nn.Module) -> None:
        tuners = [m for m in model.modules() if hasattr(m, "peft_config")]
        prefixes = {prefix for m in tuners if isinstance(prefix := getattr(m, "prefix", ""), str) and prefix}
        self._prefixes = tuple(sorted(prefixes))
        self._declared = tuple(
            f"{path}.{name}.".lstrip(".")
            for path, module in model.named_modules()
            for name in _names(module)
            if name != SAVED
        )

    def __contains__(self, name: object) -> bool:
        """Return whether this tensor is of an adapter."""
        if not isinstance(name, str):
            return False
        parts = name.split(".")
        if any(part in WORDS or (self._prefixes and part.startswith(self._prefixes)) for part in parts):
            return SAVED not in parts
        return f"{name}.".startswith(self._declared)


def _names(module: nn.Module) -> Sequence[str]:
    """Return what a layer of peft declares as its adapters."""
    names = getattr(module, "adapter_layer_names", ())
    return names if isinstance(names, list | tuple) else ()
