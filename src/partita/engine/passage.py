"""What transforms of uploads and downloads cannot do for a run: refused before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.core import check, tree
from partita.core.types import Upload
from partita.engine.account import upload_like
from partita.engine.channel import Channel, Way, message_of
from partita.engine.execute.task import Task

if TYPE_CHECKING:
    from partita.engine.setup import Setup


def check_passage(setup: Setup) -> None:
    """Refuse transforms of a run that would not do what they say, in whichever of its stages."""
    settings = setup.settings
    encoding = next((t.name for t in setup.uploads if t.encode is not None), "")
    for measure in settings.measures:
        if encoding and measure.of_cohort:
            reason = f"it looks at the models that clients end with, of which {encoding} sends another form"
            raise check.fail("measures", measure.name, "runs without uploads=", reason)
    if settings.downloads:
        _check_downloads(setup)
    for number in setup.sending[1:] if setup.uploads else ():  # the first stage is bound before any work
        _channel(setup, number)


def _check_downloads(setup: Setup) -> None:
    """Refuse compression that a device would get of the whole model where it receives a part of it."""
    downloads, devices = setup.settings.downloads, setup.devices
    for number, transform in enumerate(downloads):
        if not (transform.entrywise or devices.alike):
            reason = "devices receive parts of the model, and each part would be compressed in another way"
            raise check.fail(f"downloads[{number}]", transform.name, "partita.transforms.half()", reason)
    for plan in setup.plans:
        shared = tree.pick(setup.initial, setup.partition_of(plan.algorithm).shared)
        if shared:
            message = message_of(Upload(shared), frozenset(setup.profile.buffers))
            Way(downloads).tried("downloads", message, [{}] * len(downloads))


def _channel(setup: Setup, number: int) -> Channel:
    """Return the channel of a stage as it will be bound."""
    algorithm = setup.plans[number].algorithm
    partition = setup.partition_of(algorithm)
    task = Task(setup.model, setup.data, partition, setup.profile, setup.initial, method_loss=algorithm.loss)
    like = upload_like(algorithm, task.alone, setup.initial, partition, setup.settings.device)
    return Channel.of(setup.uploads, (), setup.profile.buffers, like)
