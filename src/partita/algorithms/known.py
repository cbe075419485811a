"""Methods of the literature that are expressions of those here, by the names that people search for."""

from __future__ import annotations

from typing import Any, NamedTuple

from partita.algorithms.base import METHODS
from partita.core import check


class Known(NamedTuple):
    """A method by its own name: its paper, and how it is written here.

    `settings` go to `federate`, and `model` is what becomes of the user's, where it needs another one.
    """

    paper: str
    expression: str
    settings: str = ""
    note: str = ""
    model: str = ""

    @property
    def here(self) -> str:
        """The expression, the settings of `federate` that go with it, and the model."""
        given = [self.settings] if self.settings else []
        given += [f"model={self.model}"] if self.model else []
        return " with ".join([self.expression, *([", ".join(given)] if given else [])])


LORA = 'pt.models.freeze(pt.models.add_adapters(model, "lora", rank=8), but="adapter")'


KNOWN = {
    "FedPer": Known(
        "Arivazhagan et al. (2019)",
        'pt.fedsim(personal="output", lr=0.1)',
        note="the last layers are personal, and all layers train together",
    ),
    "FedRep": Known(
        "Collins et al. (2021)",
        'pt.fedalt(personal="output", lr=0.1, personal_steps=10)',
        note="the head trains first, then the body",
    ),
    "LG-FedAvg": Known(
        "Liang et al. (2020)",
        'pt.fedsim(personal="input", lr=0.1)',
        note="the layers near the input are personal; a pattern names more than one",
    ),
    "FedBABU": Known(
        "Oh et al. (2022)",
        'pt.pipeline(pt.stage(pt.fedalt(personal="output", lr=0.1, personal_lr=0.0, personal_steps=1)), '
        'pt.stage(pt.finetune(personal="output", lr=0.1), epochs=1))',
        note="the body trains below a head that stays as it was drawn; then every client tunes the head",
    ),
    "FedBN": Known(
        "Li et al. (2021)",
        "pt.fedavg(lr=0.1)",
        'norm="personal"',
        note="normalization layers and their statistics are personal, with any method",
    ),
    "FedAvg with fine-tuning": Known(
        "McMahan et al. (2017)",
        'pt.pipeline(pt.stage(pt.fedavg(lr=0.1)), pt.stage(pt.finetune(personal="all", lr=0.1), epochs=1))',
        note="on the command line `finetune`",
    ),
    "HeteroFL": Known(
        "Diao et al. (2021)",
        "pt.fedavg(lr=0.1)",
        'capacity=pt.capacity.heterofl({"strong": 1.0, "weak": 0.5}), norm="static"',
        note="weak devices train narrower models, with a scaler and a masked loss",
    ),
    "FjORD": Known(
        "Horváth et al. (2021)",
        "pt.fedavg(lr=0.1)",
        'capacity=pt.capacity.fjord({"strong": 1.0, "weak": 0.5})',
        note="ordered dropout of channels",
    ),
    "InclusiveFL": Known(
        "Liu et al. (2022)",
        "pt.fedavg(lr=0.1)",
        'capacity=pt.capacity.shallow({"strong": 0, "weak": 1})',
        note="weak devices train the first blocks and the head; without the layer that each size keeps for "
        "itself and the momentum distillation into it",
    ),
    "EmbracingFL": Known(
        "Lee et al. (2024)",
        "pt.fedavg(lr=0.1)",
        'capacity=pt.capacity.depth({"strong": 0, "weak": 1})',
        note="weak devices train the last blocks",
    ),
    "FedIT": Known(
        "Zhang et al. (2024)",
        "pt.fedavg(lr=0.1)",
        model=LORA,
        note="LoRA adapters are shared, and each factor is averaged on its own",
    ),
    "FedSA-LoRA": Known(
        "Guo et al. (2024)",
        'pt.fedsim(personal="*lora_B*", lr=0.1)',
        model=LORA,
        note="of LoRA adapters, A is shared and B personal",
    ),
    "FFA-LoRA": Known(
        "Sun et al. (2024)",
        "pt.fedavg(lr=0.1)",
        model=f'pt.models.freeze({LORA}, "*lora_A*")',
        note="of LoRA adapters, A stays as it was drawn and B is shared",
    ),
    "HetLoRA": Known(
        "Cho et al. (2024)",
        "pt.fedavg(lr=0.1)",
        'capacity=pt.capacity.rank({"strong": 8, "weak": 2})',
        model=LORA,
        note="weak devices train LoRA adapters of a smaller rank; without its pruning of ranks, and averaged "
        "over those who hold a rank",
    ),
}
"""kNN-Per is not among them: its personal part is a memory of samples, and not of parameters."""


def find(name: Any) -> str | None:
    """Return the method of the literature that a name means: 'embracing', 'embracing_fl' are EmbracingFL."""
    text = _letters(str(name))
    close = [known for known in KNOWN if len(text) > 4 and _letters(known).startswith(text)]
    return next((known for known in KNOWN if _letters(known) == text), close[0] if close else None)


def written(name: Any) -> str:
    """Return how a method of the literature is written here; '' for what is none of them, or ours by name."""
    known = None if name in METHODS else find(name)
    if known is None:
        return ""
    return f"{KNOWN[known].here} for {known} ({KNOWN[known].note}); see `partita show {known}`"


def method(field: str, name: Any) -> str:
    """Return the name of a method; the error for one of the literature says how that is written here."""
    if name not in METHODS and (allowed := written(name)):
        raise check.fail(field, name, allowed)
    return str(check.choice(field, name, METHODS))


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
