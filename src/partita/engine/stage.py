"""One stage of a run, bound once: the method on the model, its programs, its executor, its limits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from partita.algorithms.base import as_is
from partita.algorithms.local.batchnorm import statistics_of, with_own_statistics
from partita.algorithms.local.evaluation import deployment, evaluation, global_model
from partita.algorithms.local.measuring import measure_program, measured_split
from partita.core import tree
from partita.core.parts import (
    Algorithm,
    LocalRule,
    Measure,
    Personalize,
    Problem,
    Program,
    ServerRule,
    StagePlan,
)
from partita.core.types import PASS_BATCH, ClientState, Partition, Tensors, Upload, Work
from partita.data.federated import SPLITS, FederatedData
from partita.engine.account import upload_like
from partita.engine.channel import Channel
from partita.engine.execute import Executor, Runner, Task, budget, make_executor
from partita.engine.execute.cuda.replayed import replaying
from partita.engine.execute.task import each_time
from partita.engine.lockstep import Seat, once, seat
from partita.engine.lockstep.member import Following, Member, joins
from partita.engine.look import Look, LookAtSome
from partita.engine.model.problem import ModelProblem
from partita.engine.release import Releases, releases_of, serving
from partita.engine.settings import stage_work
from partita.engine.setup import Setup
from partita.engine.workers.messages import StageBlob
from partita.engine.workers.spread import Spread
from partita.measures.probe import try_probe

PASS_BYTES, GPU_PASS_BYTES = 1 << 26, 1 << 30  # of samples that pass through a model without a gradient
STATE_BYTES = 1 << 28  # of client states that are held at once
BLOCK_CLIENTS = 4096  # whose states are held at once, where they are small
SMALL_BLOCK_CLIENTS, SMALL_BLOCK_BYTES = 1024, 1 << 24  # so many, where those of more would take this much
Choices = dict[str, dict[str, str]]
"""What executors have decided, by what, and why."""


class Limits(NamedTuple):
    """What is held at once, so that a round fits into memory whatever the cohort.

    clients_per_block  clients whose states are loaded together
    deltas_in_memory   uploads that are kept before they are added up, where a method's add up
    store_device       where client states stay: beside the model if all of them fit, else on the host
    states_fit         whether all of them fit
    pass_batch         samples of a client that pass through its model together in an evaluation
    """

    clients_per_block: int
    deltas_in_memory: int
    store_device: str
    states_fit: bool
    pass_batch: int


@dataclass(frozen=True, eq=False)
class Stage:
    """All that follows from the settings and from the model that the stage begins with.

    plan         the method, its length, work, cohort and schedule
    initial      the model's tensors when the stage begins
    new_client   the state of a client that was never seen
    problem      the model on the clients' data, as a local rule sees it
    rule         the method's local rule on the whole model
    personalize  the model that a client is evaluated with, with statistics of its own under norm="static"
    programs     by name, all that clients run: see `programs`
    executor     runs a program for a group of clients, each on its part of the model
    whole        the executor, in this process, of clients that hold the whole model
    spread       the executor, where it cuts a cohort into shares for workers
    release      lets the executor use the memory of earlier results again, but for what is kept
    expect       lets an executor of several runs know how to find out who trains next
    look         (uploads, states) -> a first look at what the executor has computed last
    aggregate    (stacked uploads, key) -> one upload
    channel      what happens to uploads and downloads on their way
    releases     what is released of sums, where a transform does so: then `aggregate` sums up
    """

    setup: Setup
    number: int
    plan: StagePlan
    initial: Tensors
    new_client: ClientState
    partition: Partition
    problem: ModelProblem
    rule: LocalRule
    personalize: Callable[[Problem], Personalize]
    programs: Mapping[str, Program]
    executor: Executor
    whole: Runner
    release: Callable[[Any], None]
    expect: Callable[[Callable[[], Following | None]], None]
    look: Callable[[Upload, ClientState], Look | LookAtSome]
    aggregate: Callable[[Upload, Tensor], Upload]
    server_rule: ServerRule
    limits: Limits
    work: Work
    is_global: bool
    channel: Channel
    releases: Releases | None = None
    spread: Spread | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The method of this stage."""
        return self.plan.algorithm

    @property
    def cohort(self) -> int:
        """How many clients the plan wants at a time."""
        return self.plan.cohort or self.setup.data.clients

    @functools.cached_property
    def keeps_state(self) -> bool:
        """Whether clients keep a state between rounds."""
        has_names = bool(self.new_client.personal or self.new_client.memory)
        return self.algorithm.stateful and self.plan.state == "keep" and has_names

    @property
    def has_personal(self) -> bool:
        """Whether a client's model differs from the server's: by its own part, or by steps at the end."""
        adapts = self.partition.personal or self.algorithm.personalize(self.problem).phases
        return bool(adapts or self.setup.devices.narrow)

    @property
    def computes_models(self) -> bool:
        """Whether a client's model is more than the server's with its own part in place."""
        devices, (shared, personal) = self.setup.devices, self.partition
        both = set(shared) & set(personal)  # some devices may hold no copy of their own
        return self.personalize is not as_is or devices.narrow or devices.lacks(both)

    @property
    def no_mean(self) -> str:
        """Why the clients' personal parts cannot be averaged ('': they can)."""
        personal, devices = self.partition.personal, self.setup.devices
        if personal and not self.keeps_state:
            return "clients keep no personal part between rounds"
        if devices.narrow or devices.lacks(personal):
            return "clients hold personal parts of different sizes"
        if self.setup.settings.norm == "static" and set(personal) & set(self.setup.profile.buffers):
            return "statistics are measured for a model (norm='static'), and a mean has none"
        return ""

    @functools.cached_property
    def adds_up(self) -> bool:
        """Whether deltas may be added up as they come: the method allows it, and nobody looks at one."""
        settings = self.setup.settings
        measured = any(m.of_cohort or m.of_upload for m in settings.measures)
        looked_at = settings.attack is not None or measured
        able = getattr(self.algorithm.aggregate, "adds_up", False) and self.setup.devices.alike
        return (able or self.releases is not None) and not looked_at

    @functools.cached_property
    def in_lockstep(self) -> bool:
        """Whether clients train together with those of other runs."""
        return isinstance(self.executor, Member)

    @functools.cached_property
    def in_this_process(self) -> Stage:
        """The stage as a worker has it: its executor computes here."""
        return self if self.spread is None else replace(self, executor=self.spread.inner, spread=None)

    def blocks(self, clients: np.ndarray) -> Iterator[np.ndarray]:
        """Cut clients into blocks whose states fit."""
        most = self.limits.clients_per_block
        return (clients[i : i + most] for i in range(0, len(clients), most))

    def measured_partition(self, measure: Measure) -> Partition:
        """The split of the model that a measure looks at."""
        return measured_split(measure, self.partition, self.setup.model, self.setup.names)

    @functools.cached_property
    def bytes_down(self) -> dict[int, int]:
        """By class of devices, the bytes that a client downloads in a turn."""
        server = self.server_rule.init(tree.pick(self.initial, self.partition.shared))
        devices = self.setup.devices
        return {k: self.channel.bytes_down(devices, k, server) for k in devices.used}

    @functools.cached_property
    def bytes_up(self) -> dict[int, int]:
        """By class of devices, the bytes that a client uploads in a turn."""
        return {k: self.channel.bytes_up(self.setup.devices, k) for k in self.setup.devices.used}

    def bytes_sent(self, uploads: Upload) -> int:
        """Return the bytes that these clients have uploaded."""
        devices = self.setup.devices
        if not self.channel.uploads.transforms:
            delta, extra, sums = uploads.delta, uploads.extra, uploads.sums
            return tree.nbytes((delta, extra, sums)) if devices.alike else devices.bytes_sent(uploads)
        assert uploads.client is not None
        return sum(self.bytes_up[int(devices.class_of[c])] for c in uploads.client.tolist())

    @property
    def upload_like(self) -> Upload:
        """What a client would send that holds the whole model, for its names and shapes."""
        return self.channel.like


def programs(
    algorithm: Algorithm,
    personalize: Callable[[Problem], Personalize],
    is_global: bool,
    measures: Sequence[tuple[Measure, Partition]],
    evaluations: Sequence[Program],
) -> dict[str, Program]:
    """All that clients run in a stage, by name; the same wherever it is called with the same method.

    training             the method's local rule
    evaluations          score the server's or the client's own model
    model                compute the model that a client deploys
    newcomer             solve for the personal part of a client that comes after training
    measure NAME         compute a measure
    statistics           sum up BatchNorm statistics of the server's model, or of the models `of devices`
    """
    whole_model = global_model if is_global else algorithm.personalize
    everything = [
        Program("training", algorithm.local, trains=True),
        Program("model", deployment(personalize)),
        Program("newcomer", algorithm.newcomer or algorithm.local, keeps=True),
        Program("statistics", statistics_of(whole_model), whole_model=True),
        Program("statistics of devices", statistics_of(whole_model)),
    ]
    method = replace(algorithm, personalize=personalize)
    everything += [measure_program(measure, split, method) for measure, split in measures]
    return {program.name: program for program in (*everything, *evaluations)}


def evaluations(
    personalize: Callable[[Problem], Personalize], kept: Tensors, data: FederatedData, batch: int
) -> list[Program]:
    """Return the programs that score the global and the clients' own models on each split of the data.

    Those 'with rows' also return what metrics need of every sample: `kept` is that of one.
    """
    programs = []
    for split, samples in most_samples(data, batch).items():
        for rows, most in ((None, 0), (kept, samples)):
            names = [evaluation_name(model, split, most, kept) for model in ("global", "personal")]
            of_server = evaluation(global_model, split, rows, most)
            programs.append(Program(names[0], of_server, whole_model=True))
            programs.append(Program(names[1], evaluation(personalize, split, rows, most)))
    return programs


def evaluation_name(model: str, split: str, rows: int = 0, kept: Tensors | None = None) -> str:
    """Return the name of the program that scores a model on a split, with so many rows for each client.

    `kept` is one of those rows: longer sequences have others, and so a program of their own.
    """
    shapes = [list(row.shape) for row in (kept or {}).values() if row.dim()]
    of_several = f" of {shapes}" if shapes else ""
    return f"{model} on {split}" + (f" with {rows} rows{of_several}" if rows else "")


def most_samples(data: FederatedData, batch: int) -> dict[str, int]:
    """Return by split the samples of the largest client, rounded up to whole batches of an evaluation."""
    largest = {split: int(data.ranges(split)[:, 1].max()) for split in SPLITS}
    return {k: n if n <= batch else -(-n // batch) * batch for k, n in largest.items()}


def bind(
    setup: Setup, number: int, initial: Tensors, choices: Choices, notify: Callable[[str], None]
) -> Stage:
    """Bind a stage to the model that it begins with.

    choices  what executors have decided so far; they add to it
    notify   hears what takes a while
    """
    settings, data, devices, plan = setup.settings, setup.data, setup.devices, setup.plans[number]
    algorithm, static = plan.algorithm, settings.norm == "static"
    partition = setup.partition_of(algorithm)
    place, kind = _in_lockstep(setup, number)
    task = Task(
        setup.model,
        data,
        partition,
        setup.profile,
        initial,
        memory=_memory(setup),
        choices=choices,
        tracks=not static,
        cohort_sizes=_sizes({plan.cohort or data.clients, *devices.sizes}, settings.shares),
        batch=plan.batch,
        half=settings.precision == "bf16",
        notify=notify,
        method_loss=algorithm.loss,
        augment=settings.augment,
        steps=_steps(plan, data),
        once=each_time if place is None else lambda what, make: once(("stackable", kind, what), make),
    )
    whole = make_executor(settings.executor, task)
    problem = whole.bound.problem
    executor: Executor = whole
    like = upload_like(algorithm, problem, initial, partition, settings.device)
    if not devices.uniform:
        executor = devices.executor(settings.executor, whole, task, like)
    channel = Channel.of(setup.uploads, settings.downloads, problem.buffers, like)
    releases = releases_of(setup, number, algorithm, problem, channel)
    sending = channel.around(algorithm)
    personalize = algorithm.personalize
    if static and (partition.personal or personalize(problem).phases):
        personalize = with_own_statistics(personalize)
    aggregate = releases.totals if releases else devices.aggregate(algorithm.aggregate(problem))
    server_rule = serving(algorithm.server(problem), channel.uploads.transforms, channel.like, releases)
    if data.device.type == "cuda" and devices.alike:  # else what is done depends on who has sent what
        aggregate, server_rule = _replayed(aggregate, server_rule, releases)
    is_global = setup.is_global(number)
    new_client = channel.new_client(setup.new_client(algorithm, initial))
    limits = _limits(setup, new_client, tree.pick(initial, partition.shared), plan.batch)
    scoring = evaluations(personalize, setup.profile.kept, data, limits.pass_batch)
    if place is not None:
        scored, plain = frozenset(program.name for program in scoring), personalize is as_is
        executor = member = Member(whole, task, settings.executor, place, kind, sending, scored, plain)
        if not channel.uploads.transforms:  # which have draws and accounts of their own in each run
            aggregate, server_rule = member.aggregating(aggregate), member.serving(server_rule)
    spread = None
    if setup.crew is not None:
        executor = spread = _spread(setup, number, initial, executor, whole, choices)
    splits = [(m, measured_split(m, partition, setup.model, setup.names)) for m in settings.measures]
    for measure, _ in splits:
        try_probe(measure, problem, initial, data, settings.seed)
    return Stage(
        setup=setup,
        number=number,
        plan=plan,
        initial=initial,
        new_client=new_client,
        partition=partition,
        problem=problem,
        rule=algorithm.local(problem),
        personalize=personalize,
        programs=programs(sending, personalize, is_global, splits, scoring),
        executor=executor,
        whole=whole,
        spread=spread,
        release=getattr(executor, "release", _nothing_to_release),  # a user's may know nothing of it
        expect=getattr(executor, "expect", _nothing_to_expect),
        look=getattr(executor, "look", Look),
        aggregate=aggregate,
        server_rule=server_rule,
        channel=channel,
        releases=releases,
        limits=limits,
        work=stage_work(plan),
        is_global=is_global,
    )


def _in_lockstep(setup: Setup, number: int) -> tuple[Seat | None, str]:
    """Return where a run asks that trains with others, and what it has in common with those; or None."""
    place = seat()
    joined = setup.devices.uniform and setup.crew is None and joins(setup.settings.executor)
    return (place, place.kin(setup, number)) if place is not None and joined else (None, "")


def _replayed(
    aggregate: Callable[[Upload, Tensor], Upload], rule: ServerRule, releases: Releases | None
) -> tuple[Callable[[Upload, Tensor], Upload], ServerRule]:
    """Return what the server does as recordings; releases replay by themselves what knows no round."""
    if releases is None:
        rule = rule._replace(step=replaying("the server's step", rule.step))
    return replaying("aggregation", aggregate), rule


def _memory(setup: Setup) -> int | None:
    """Return the bytes for stacked clients: of a share, where there are shares."""
    return setup.settings.memory_bytes if setup.crew is None else setup.crew.terms.memory


def _sizes(cohorts: set[int], shares: int | None) -> set[int]:
    """Return the numbers of clients that train together: those of cohorts, or of their shares."""
    if shares is None:
        return cohorts
    return {max(1, size) for n in cohorts for size in (n // shares, -(-n // shares))}


def _spread(
    setup: Setup, number: int, initial: Tensors, inner: Executor, whole: Runner, choices: Choices
) -> Spread:
    """Return the executor that lets workers compute what `inner` would."""
    assert setup.crew is not None
    memory = setup.crew.terms.memory
    return Spread(
        inner=inner,
        bound=whole.bound,
        team=setup.crew,
        choices=choices,
        decides=setup.settings.executor,
        class_of=setup.devices.class_of,
        names=setup.data.names,
        blob=lambda key: StageBlob.of(key, setup, number, initial, memory),
        samples=lambda crew: crew.samples(setup),
    )


def _nothing_to_expect(following: Callable[[], Following | None]) -> None:
    """Do nothing, for an executor that learns of the next cohort while it works: see `prefetch`."""


def _nothing_to_release(kept: Any) -> None:
    """Do nothing, for an executor that lends no memory."""


def _limits(setup: Setup, new_client: ClientState, shared: Tensors, batch: int | None) -> Limits:
    state_bytes = max(1, tree.nbytes(new_client))
    most = BLOCK_CLIENTS if BLOCK_CLIENTS * state_bytes < SMALL_BLOCK_BYTES else SMALL_BLOCK_CLIENTS
    all_fit = setup.data.clients * state_bytes <= STATE_BYTES
    room = budget(_memory(setup), setup.data.device) // 4
    delta_bytes = max(1, 2 * tree.nbytes(shared))  # a delta, and what it is made of
    return Limits(
        clients_per_block=max(1, min(most, STATE_BYTES // state_bytes)),
        deltas_in_memory=max(1, room // delta_bytes),
        store_device=setup.settings.device if all_fit else "cpu",
        states_fit=all_fit,
        pass_batch=_pass_batch(setup, batch),
    )


def _steps(plan: StagePlan, data: FederatedData) -> float:
    """Return about how many steps clients take in a stage."""
    if plan.rounds is None:
        return math.inf
    work, n = stage_work(plan), data.train[:, 1]
    if work.steps is not None:
        each = float(np.mean(work.steps))
    else:
        each = float(np.ceil(n / (work.batch or n.max())).mean()) * (work.epochs or 1)
    return plan.rounds * (plan.cohort or data.clients) * each


def _pass_batch(setup: Setup, batch: int | None) -> int:
    """Return how many samples an evaluation takes at once: as a step, or more where that is little memory.

    A model that normalizes by statistics of the batch, in evaluation too, has batches of one size always.
    """
    norms = [m for m in setup.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if any(norm.running_mean is None for norm in norms):
        return PASS_BATCH
    device, sample = setup.data.device, max(1, setup.profile.pass_bytes)
    little = (PASS_BYTES if device.type == "cpu" else GPU_PASS_BYTES) // sample
    fits = budget(_memory(setup), device) // sample
    return max(1, min(PASS_BATCH, max(little, batch or 1), fits))
