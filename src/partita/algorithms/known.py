"""Methods of the literature that are expressions of those here, by the names that people search for."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A method by its own name: its paper, and how it is written here. `settings` go to `federate`."""

    paper: str
    expression: str
    settings: str = ""
    note: str = ""


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
        note="weak devices train narrower models",
    ),
    "FjORD": Known(
        "Horváth et al. (2021)",
        "pt.fedavg(lr=0.1)",
        'capacity=pt.capacity.fjord({"strong": 1.0, "weak": 0.5})',
        note="ordered dropout of channels",
    ),
    "EmbracingFL": Known(
        "Lee et al. (2024)",
        "pt.fedavg(lr=0.1)",
        'capacity=pt.capacity.depth({"strong": 0, "weak": 1})',
        note="weak devices train the last blocks",
    ),
}
"""kNN-Per is not among them: its personal part is a memory of samples, and not of parameters."""
