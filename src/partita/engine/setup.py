"""All that a run knows before its first round: model, data, method and settings, checked together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from partita.algorithms.local.measuring import measured_split
from partita.algorithms.partition import keep_norms
from partita.core import check
from partita.core.asks import asked_by
from partita.core.criterion import LOSSES, Criterion
from partita.core.frozen import lean_copy, note
from partita.core.parts import Algorithm, StagePlan, Transform
from partita.core.types import ClientState, Partition, Tensors
from partita.data import FederatedData
from partita.engine.account import settled
from partita.engine.cautions import warn_about_buffers, warn_about_reset, warn_about_scale
from partita.engine.devices.devices import Devices
from partita.engine.execute.informed import remembering
from partita.engine.initial import Origin, computed_by, own_copy, tensors_of
from partita.engine.model.augmenting import prepared, refuse_with
from partita.engine.model.fit import check_labels, check_pieces, check_real, warn_about_copies
from partita.engine.model.padding import for_metrics, warn_about_padding
from partita.engine.model.probe import (
    ModelProfile,
    evaluated,
    examine,
    names_of,
    only_whole_batches,
    refuse_own_statistics,
    tried,
)
from partita.engine.model.seeding import kept, set_all
from partita.engine.passage import check_passage
from partita.engine.placement import placed
from partita.engine.settings import Settings, as_alone, as_one, schedule_of, steps_of
from partita.schedule import Schedule, synchronous

if TYPE_CHECKING:
    from partita.engine.elsewhere import Elsewhere
    from partita.engine.workers.crew import Team


def _once(stage: StagePlan) -> bool:
    """Return whether a stage is one round of all clients."""
    return stage.rounds is None and stage.epochs is not None


def _methods(algorithm: Algorithm) -> list[Algorithm]:
    """Return the methods of all stages."""
    return [stage.algorithm for stage in algorithm.stages] or [algorithm]


def _asks(settings: Settings, algorithm: Algorithm) -> tuple[str, ...]:
    """Return what the losses of a run and of its methods ask for beside (output, target)."""
    asks = list(asked_by(settings.loss)) if callable(settings.loss) else []
    for method in _methods(algorithm):
        asks += [] if method.loss is None else method.loss(LOSSES["cross_entropy"]).asks
    return tuple(dict.fromkeys(asks))


@dataclass(frozen=True, eq=False)
class Setup:
    """What a run is made of. Nothing here changes while it runs.

    algorithm   the method as it was requested
    model       the run's own copy, and `given_model` whether it came with weights that may mean something
    clean_data  the data as they were given; `data` has the samples that Byzantine clients pretend to have
    profile     what a trial pass has shown of the model, the loss and the metric
    names       the tensors that are trained or tracked, and `initial` their values at the start
    origin      digests of what the run starts from, which a resumed run must bring again
    plans       the stages of the run, with nothing left open
    uploads     what happens to uploads, with nothing left open, and `sending` the stages that have any
    newcomers   clients that come after training
    crew        the workers that compute, while the run goes on
    elsewhere   the clients, where they are real: they hold their samples, and `data` has only their sizes
    secret      what the noise of releases is drawn from (None: the seed, which is in the experiment)
    baseline    which one it is, so that its noise is another one ('': the run itself)
    shorter     the run that this one goes on with, whose uploads its own are
    """

    settings: Settings
    algorithm: Algorithm
    model: nn.Module
    given_model: bool
    clean_data: FederatedData
    data: FederatedData
    profile: ModelProfile
    names: tuple[str, ...]
    initial: Tensors
    origin: Origin
    plans: tuple[StagePlan, ...]
    devices: Devices
    uploads: tuple[Transform, ...] = ()
    sending: tuple[int, ...] = ()
    newcomers: FederatedData | None = None
    crew: Team | None = None
    elsewhere: Elsewhere | None = None
    secret: int | None = None
    baseline: str = ""
    shorter: Setup | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module | Callable[[], nn.Module],
        data: FederatedData,
        algorithm: Algorithm,
        settings: Settings,
        origin: Origin | None = None,
    ) -> Setup:
        """Try the model on the data, and refuse what does not fit, before any work."""
        clean, device = data, settings.device
        if settings.attack is not None and settings.attack.poison is not None:
            data = data.altered(settings.byzantine_clients, settings.attack.poison)
        module = note(own_copy(model, settings.seed).to(device))
        data = placed(data.masked_for(module), settings.data_on, device, settings.memory_bytes)
        computed = origin.code if origin else computed_by(module, settings.loss, settings.metric)
        with kept(data.device):  # a model or a loss may draw random numbers
            set_all(settings.seed, data.device)
            # the longest sequences, whose activations take most
            profile = examine(
                module,
                data.fixed(),
                settings.loss,
                settings.metric,
                settings.output,
                _asks(settings, algorithm),
                settings.features,
            )
            if origin is None:
                warn_about_padding(module, data, profile, _methods(algorithm))
                warn_about_copies(profile.loss, data)
        data = prepared(settings.augment, for_metrics(module, data, profile)[0])
        check_real(module, profile.buffers)
        if settings.norm == "static":
            refuse_own_statistics(module, data)
        names = names_of(module, data, profile.buffers)
        trial = origin.trial if origin else tried(profile, module, data, settings.seed)
        plans = settings.stages(algorithm)
        batch = max(plan.batch or int(data.train[:, 1].max()) for plan in plans)
        setup = cls(
            settings=settings,
            algorithm=algorithm,
            model=module,
            given_model=isinstance(model, nn.Module),
            clean_data=clean,
            data=data,
            profile=profile,
            names=names,
            initial={k: v.detach().clone() for k, v in tensors_of(module, names).items()},
            origin=origin or Origin.of(module, names, computed, trial),
            plans=plans,
            devices=Devices.of(settings.capacity, module, names, data, settings.seed, batch),
            uploads=tuple(settings.uploads),
        )
        refuse_with(settings.augment, setup.devices.shares)
        setup._check_plans()
        if origin is None:  # not for each baseline again
            warn_about_scale(clean)
        setup = settled(setup)
        check_passage(setup)
        return setup

    def _check_plans(self) -> None:
        clients = self.data.clients
        for plan in self.plans:  # a wrong split or cohort is refused before any work
            partition = self.partition_of(plan.algorithm)
            for measure in self.settings.measures:
                measured_split(measure, partition, self.model, self.names)
            steps_of(plan.steps, clients)
            if plan.cohort is not None:
                check.integer("cohort", plan.cohort, low=1, high=clients)
            together = plan.algorithm.options.get("accumulate", 1)
            if together > 1 and plan.batch is None:
                reason = "a step takes all samples of a client at once"
                raise check.fail("accumulate", together, "batch= with it, the samples in a piece", reason)
        most = max(plan.algorithm.options.get("accumulate", 1) for plan in self.plans)
        if most > 1:
            check_pieces(most, only_whole_batches(self.profile, self.model, self.data.fixed()))
        splits = [self.partition_of(plan.algorithm) for plan in self.plans]
        warn_about_buffers(self.profile.buffers, self.settings.norm)
        new_clients = [self.new_client(plan.algorithm, self.initial) for plan in self.plans]
        warn_about_reset(self.plans, splits, new_clients)
        for field in ("until", "keep"):
            if self.watched != "validation" and getattr(self.settings, field) in ("converged", "best"):
                reason = "no client has validation samples"
                allowed = "data with such, as data.hold_out(validation=0.1) makes them"
                raise check.fail(field, getattr(self.settings, field), allowed, reason)
        for plan, schedule in zip(self.plans, self.schedules):
            schedule.check(clients, plan.cohort or clients)
        self.devices.check(self.plans, splits, self.settings, bool(self.profile.buffers))

    def like(self, algorithm: Algorithm, folder: Path | None, *, name: str) -> Setup:
        """Return a baseline under the same conditions: data, initial weights, work, schedule and seed.

        Every client `alone` needs no schedule: see `as_alone`.
        """
        settings, schedules, alone = self.settings, self.schedules, name == "local"
        work = as_one(self.plans)
        if alone:
            every = settings.evaluate_every
            work = as_alone(self.plans, schedules, self.data.clients, every, self.watched == "validation")
        settings = replace(
            settings,
            **work,
            schedule=synchronous() if alone else schedules[0],
            measures=(),
            out=folder,
            state="keep",
            norm="static" if settings.norm == "static" else "global",
            baselines=False,
        )
        model = lean_copy(self.model, own=self.names)
        model.load_state_dict(self.initial, strict=False)
        other = Setup.of(model, self.clean_data, algorithm, settings, self.origin)
        if self.shorter is not None and other.uploads:  # calibrated once, as those of the run
            other = replace(other, uploads=self.shorter.like(algorithm, folder, name=name).uploads)
        return replace(other, newcomers=self.newcomers, crew=self.crew, baseline=name)

    def expecting(self, newcomers: FederatedData) -> Setup:
        """Return the same run, after which these clients come; refuse labels that the model does not know."""
        profile = self.profile
        output = evaluated(self.model, self.data.fixed(), profile.forward, profile.trial)
        check_labels(profile.loss, output, newcomers)
        return replace(self, newcomers=newcomers)

    def longer(self, stage: int, rounds: int) -> Setup:
        """Return the same run with so many rounds of a stage; those of other stages stay."""
        settings, algorithm = self.settings, self.algorithm
        if not algorithm.stages:
            settings = replace(settings, rounds=rounds)
        else:
            lengths = [rounds if i == stage else plan.rounds for i, plan in enumerate(self.plans)]
            stages = tuple(
                part if _once(part) else replace(part, rounds=n) for part, n in zip(algorithm.stages, lengths)
            )
            if _once(stages[stage]):
                reason = f"stage {stage + 1} is one round of {stages[stage].epochs} epochs by definition"
                raise check.fail("rounds", rounds, "a new run with rounds= for this stage", reason)
            options = {**algorithm.options, "stages": stages}
            algorithm = replace(algorithm, stages=stages, options=options)
        settings = replace(settings, resume=settings.out is not None)
        plans, shorter = settings.stages(algorithm), self.shorter or self
        return replace(self, settings=settings, algorithm=algorithm, plans=plans, shorter=shorter)

    @property
    def rounds(self) -> int:
        """Rounds of all stages together."""
        return sum(plan.rounds or 0 for plan in self.plans)

    @functools.cached_property
    def schedules(self) -> list[Schedule]:
        """The schedule of each stage."""
        return [schedule_of(plan, self.settings.schedule, self.settings.uploads) for plan in self.plans]

    def reporting(self, stage: int) -> np.ndarray:
        """Each client's chance to report in a round of this stage, as far as the schedule declares it."""
        plan, schedule, clients = self.plans[stage], self.schedules[stage], self.data.clients
        cohort = plan.cohort or clients
        declared = getattr(schedule, "reporting", None)
        if declared is not None:
            chances: np.ndarray = declared(clients, cohort, simulated=self.elsewhere is None)
            return chances
        return np.full(clients, (getattr(schedule, "buffer", None) or cohort) / clients)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the data as they were given, or of what is known of clients that are elsewhere."""
        return self.clean_data.fingerprint() if self.elsewhere is None else self.clean_data.population.digest

    @functools.cached_property
    def honest(self) -> np.ndarray:
        """For each client, whether it is honest."""
        honest = np.ones(self.data.clients, dtype=bool)
        honest[list(self.settings.byzantine_clients)] = False
        return honest

    @property
    def noise_seed(self) -> int:
        """The seed of what is released."""
        return self.settings.seed if self.secret is None else self.secret

    @property
    def watched(self) -> str:
        """The split that evaluations during a run look at: validation, where an honest client has some."""
        return "validation" if self.weight("validation").any() else "test"

    def weight(self, split: str) -> np.ndarray:
        """How much each client counts in a mean score: its samples of a split, if it is honest."""
        return np.where(self.honest, self.data.ranges(split)[:, 1], 0)

    @property
    def test_weight(self) -> np.ndarray:
        """How much each client counts in a mean score on test samples."""
        return self.weight("test")

    @property
    def measurable(self) -> np.ndarray:
        """The honest clients with training samples: those whose models are measured."""
        return np.flatnonzero(self.honest & (self.data.train[:, 1] > 0))

    def partition_of(self, algorithm: Algorithm) -> Partition:
        """How a method splits this model."""
        partition = algorithm.partition(self.model, self.names)
        if self.settings.norm == "personal":
            partition = keep_norms(self.model, partition, self.profile.buffers)
        return partition

    def loss_of(self, algorithm: Algorithm) -> Criterion:
        """What the clients of a method minimize."""
        loss = self.profile.loss
        return loss if algorithm.loss is None else algorithm.loss(loss)

    def new_client(self, algorithm: Algorithm, model: Tensors) -> ClientState:
        """The state of a client that was never seen, in a stage that begins with this model."""
        partition = self.partition_of(algorithm)
        asks = (*self.profile.loss.asks, *self.loss_of(algorithm).asks)
        return remembering(algorithm.init_client(model, partition), asks, model, partition)

    def is_global(self, stage: int) -> bool:
        """Whether the server alone holds a whole model in this stage."""
        return set(self.names) <= set(self.partition_of(self.plans[stage].algorithm).shared)

    @property
    def alone(self) -> bool:
        """Whether nothing is ever shared: the method is its own local baseline."""
        methods = [plan.algorithm for plan in self.plans]
        return not any(self.partition_of(method).shared or method.shares_extra for method in methods)
