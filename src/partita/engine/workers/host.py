"""A worker: it binds a stage as the driver does, and computes shares of it. What it holds, it was sent."""

from __future__ import annotations

import os
import platform
import time
import warnings
from contextlib import ExitStack
from typing import Any

import torch

from partita.core.device import arithmetic
from partita.core.process import cores
from partita.engine.description import versions
from partita.engine.execute.task import memory_shared_by
from partita.engine.stage import Choices, Stage, bind
from partita.engine.workers.messages import (
    Call,
    Facts,
    Place,
    Reply,
    Samples,
    StageBlob,
    called,
    received,
    sendable,
)
from partita.engine.workers.share import summed
from partita.engine.workers.wire import Packed, pack

TOLD = (UserWarning, RuntimeWarning)
"""Warnings that the driver gives again."""


class Host:
    """One worker. It holds the samples and the stage that it was sent last, and nothing of a run's state."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.samples: Samples | None = None
        self.blob: StageBlob | None = None
        self._stage: Stage | None = None
        self._choices: Choices = {}
        self._arithmetic = ExitStack()

    @staticmethod
    def facts() -> Facts:
        """Return what this process has to compute with."""
        gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Facts(platform.node(), cores(), memory, gpus, versions())

    def lacks_samples(self, key: int) -> bool:
        """Return whether it has to be sent the samples of this key."""
        return self.samples is None or self.samples.key != key

    def lacks_stage(self, key: int) -> bool:
        """Return whether it has to be sent the stage of this key."""
        return self.blob is None or self.blob.key != key

    def take_samples(self, samples: Samples) -> None:
        """Keep samples, in place of those before."""
        self._stage, self.blob, self.samples = None, None, samples

    def take_stage(self, blob: StageBlob) -> None:
        """Keep a stage, in place of the one before; it is bound when it is needed."""
        self._stage, self.blob = None, blob

    def compute(self, call: Call, common: Packed, own: Packed) -> tuple[Reply, Packed]:
        """Compute a share; what is raised becomes part of the reply."""
        begin, result, error = time.perf_counter(), Packed(b"", []), None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = pack(self._result(call, common, own))
            except Exception as found:
                error = sendable(found)
        decided = {k: v for k, v in self._choices.items() if k not in call.choices}
        warned = tuple(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, TOLD)))
        return Reply(self.place, time.perf_counter() - begin, decided, warned, error), result

    @property
    def place(self) -> Place:
        """Where this process is."""
        on_gpu = self._stage is not None and self._stage.setup.data.device.type == "cuda"
        device = torch.cuda.get_device_name() if on_gpu else "cpu"
        return Place(platform.node(), os.getpid(), device)

    def _result(self, call: Call, common: Packed, own: Packed) -> Any:
        if call.function:
            with memory_shared_by(call.together):
                return called(own)
        stage = self._bound()
        self._choices.update(call.choices)
        stage.release(())
        assignment, key = received(common, own, stage.setup.settings.device)
        if call.sum:
            return summed(stage, assignment, key)
        return stage.executor(stage.programs[call.program], *assignment)

    def _bound(self) -> Stage:
        """Return the stage, bound once."""
        if self._stage is None:
            assert self.samples is not None
            assert self.blob is not None
            self._arithmetic.close()
            setup, number, initial = self.blob.opened(self.samples)
            precision, deterministic = setup.settings.precision, setup.settings.deterministic
            self._arithmetic.enter_context(arithmetic(precision, deterministic))
            self._choices = {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the driver has bound it, too, and has warned
                self._stage = bind(setup, number, initial, self._choices, _ignored)
        return self._stage


def _ignored(text: str) -> None:
    """Ignore a message: the driver's progress tells what takes a while."""
