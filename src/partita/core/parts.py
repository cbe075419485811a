"""What each part of a method or of a run promises: small functions and records, written for one client.

Parts are values: a method is composed of them, and a run is composed of a method and parts of other kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from partita.core.criterion import Criterion
from partita.core.types import (
    Batch,
    ClientState,
    Download,
    Inputs,
    Layout,
    Message,
    Partition,
    RoundContext,
    Scores,
    ServerState,
    Tensors,
    Upload,
    Work,
)

Rate = Callable[[int, int], float]
"""A learning rate over time: (round of the stage, rounds of the stage) -> step size."""


class StepRate:
    """A rate that changes within a round, too. As any other rate, it is that of the first step of a round."""

    def at(self, t: int, rounds: int, step: int, steps: int) -> float:
        """Return the rate of one of the `steps` that the client takes in a phase of round `t`."""
        raise NotImplementedError

    def __call__(self, t: int, rounds: int) -> float:
        """Return the rate of a round that has one step."""
        return self.at(t, rounds, 0, 1)


class Phase(NamedTuple):
    """`step` is repeated over the batches of a client.

    step        (carry, batch, lr) -> carry, written for one client; `lr` is a tuple of 0-d tensors, one per
                rate
    lr          the rates
    work        how much to do, from the work of the run at this moment (None: just that)
    batches     independent batches for each step; with more than one, `batch` is a tuple of them
    until       (carry) -> whether the client is finished with this phase, asked before each step: then its
                carry stays as it is (None: after all of its steps)
    accumulate  how many batches of the run make the batch of a step, whose gradient is taken in pieces
    """

    step: Callable[[Any, Any, Any], Any]
    lr: tuple[Rate, ...] = ()
    work: Callable[[RoundContext], Work] | None = None
    batches: int = 1
    until: Callable[[Any], Tensor] | None = None
    accumulate: int = 1

    def within(self, field: str) -> Phase:
        """Return the phase on this field of a larger carry."""
        step, until = self.step, self.until

        def inside(carry: Any, batch: Any, lr: Any) -> Any:
            return carry._replace(**{field: step(getattr(carry, field), batch, lr)})

        if until is None:
            return self._replace(step=inside)
        return self._replace(step=inside, until=lambda carry: until(getattr(carry, field)))


class LocalRule(NamedTuple):
    """What one client does: start -> phases of steps -> finish."""

    start: Callable[[Download, ClientState], Any]
    phases: tuple[Phase, ...]
    finish: Callable[[Any, Download, ClientState], tuple[Upload, ClientState]]


class Program(NamedTuple):
    """A local rule by name: what an executor runs, and what its caches go by.

    The programs of a stage follow from the method, its options and the model, and their names are the same in
    every process, so that a worker elsewhere can bind the same ones.

    name         unique within a stage
    build        (Problem) -> LocalRule
    trains       whether it trains: its uploads go to the server, and its states are kept
    whole_model  whether it runs on the whole model, also for clients whose devices hold a part of it
    keeps        whether clients keep the states that it ends with, as they do where it trains
    """

    name: str
    build: Callable[[Problem], LocalRule]
    trains: bool = False
    whole_model: bool = False
    keeps: bool = False


class Problem(Protocol):
    """What a local rule may ask of the client it is written for: f_i, its gradient, its scores."""

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters."""
        ...

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of what a training pass changes without a gradient (BatchNorm statistics)."""
        ...

    @property
    def partition(self) -> Partition: ...

    @property
    def initial(self) -> Tensors:
        """The model's tensors when the stage began, the same for all clients."""
        ...

    @property
    def clients(self) -> int:
        """How many clients there are in all."""
        ...

    @property
    def owns_gradients(self) -> bool:
        """Whether each gradient has memory of its own that the rule may overwrite."""
        ...

    def grad(self, params: Tensors, batch: Batch, wrt: Sequence[str]) -> tuple[Tensor, Tensors, Tensors]:
        """Return f(params) on the batch, ∇f with respect to the named parameters, buffers after the pass."""
        ...

    def hvp(self, params: Tensors, batch: Batch, direction: Tensors) -> Tensors:
        """Return ∇²f(params) d on the batch, for a direction d in some of the parameters."""
        ...

    def smooth_grad(self, params: Tensors, batch: Batch, wrt: Sequence[str]) -> Tensors:
        """Return ∇f on the batch in a form that `torch.func` can differentiate again, by inputs too."""
        ...

    def repeat(self, step: Callable[[Any], tuple[Any, Tensor | None]], carry: Any, steps: int) -> Any:
        """carry ← step(carry), up to `steps` times: for steps inside of a step, on the same batch.

        A step also says whether the client was done before it: then its carry stays as it was, and when all
        clients are done no further step is computed. None: it goes on.
        """
        ...

    @property
    def tracked(self) -> tuple[tuple[str, str], ...]:
        """The names of BatchNorm's means and variances."""
        ...

    def statistics(self, params: Tensors, batch: Batch) -> Tensors:
        """Return mean and variance of what each BatchNorm layer sees in this batch."""
        ...

    def score(self, params: Tensors, batch: Batch, keep: bool = False) -> Scores:
        """Return metric and loss, summed over the real samples of a batch, in evaluation mode.

        With `keep`, also what the metrics need of each sample.
        """
        ...

    def outputs(self, params: Tensors, x: Tensor, names: Sequence[str] | None = None) -> Tensors:
        """Return what the named submodules (None: the model's blocks) put out for x, in evaluation mode."""
        ...

    @property
    def plain(self) -> Problem:
        """The same problem with the loss of the run, whatever the method makes of it (`Algorithm.loss`)."""
        ...

    @property
    def layout(self) -> Layout | None:
        """Where the model's features are, and what is behind them; known where a loss asks for features."""
        ...

    def features(self, params: Tensors, batch: Batch) -> Tensor:
        """Return the features of a batch in evaluation mode, a row of each sample, without gradients."""
        ...


class Combined(NamedTuple):
    """One delta per name, and what the aggregator has to say about it: iterations, who was chosen."""

    delta: Tensors
    notes: Tensors = {}  # noqa: RUF012


class Aggregator(NamedTuple):
    """(stacked deltas, weights, key) -> one delta per name.

    Weights are non-negative and need not sum to one. The key seeds whatever is random, such as the buckets
    of `bucketing`; it is another one in every call. `linear`: it is a weighted mean.
    """

    name: str
    combine: Callable[[Tensors, Tensor, Tensor], Combined]
    options: Mapping[str, Any]
    linear: bool = False


class Attack(NamedTuple):
    """What Byzantine clients do, all of them together and knowing everything.

    forge   (uploads of the cohort, places of the Byzantine clients in it, key) -> what each of them sends in
            place of its upload. It may be anything: the server screens it
    poison  (x, y, classes) -> the training samples that a Byzantine client pretends to have
    """

    name: str
    forge: Callable[[Upload, tuple[int, ...], Tensor], Mapping[int, Upload]] | None
    poison: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None
    options: Mapping[str, Any]


class Release(NamedTuple):
    """What the server learns from a round, as a transform sees it before the method does.

    total   sums over the clients that have reported, each counting for at most 1: of their deltas, of their
            `sums` and `extra`; `weight` is what they count together
    sent    sums of what the transform itself has sent from every client (the paths that `encode` has added)
    public  what clients know of the transform, and `secret` what the server alone knows, as the last release
            left them
    key     seeds what is random: of (seed, the server's version, the transform)
    normal  (name, shape) -> standard normal numbers in double precision: of the same, and of the name. Where
            clients are real they are of a keyed hash, of which no number tells another one
    expected  what those who report count together on average, and how many `clients` they are, as far as that
              is known before the run: a constant, whoever has come
    """

    total: Upload
    sent: Tensors
    public: Tensors
    secret: Tensors
    key: Tensor
    normal: Callable[[str, Sequence[int]], Tensor]
    expected: float
    clients: float


class Taken(NamedTuple):
    """What has been released so far, for an account of it.

    releases  how many there were, and `planned` how many the run is to have (None: nobody knows)
    rate      with what probability a client takes part in each, independently of all others (None: chances
              are others, so that only `turns` count)
    turns     in how many releases any client has taken part at most, and `most_turns` in how many any will
              have by the end (None: nobody knows)
    apart     the least number of releases from one turn of a client to its next (None: any)
    clients   N
    cohort    how many clients report in each on average, as far as that is known before the run
    noise     the noise of the releases of a run that goes on, however many were planned (None: it begins)
    """

    releases: int
    planned: int | None
    rate: float | None
    turns: int
    most_turns: int | None
    apart: int | None
    clients: int
    cohort: float
    noise: float | None = None


class Transform(NamedTuple):
    """What happens to each client's whole upload on its way, and at the server to what all have sent.

    A transform has any of these. At the client, in the order of `federate(uploads=[...])`, for one client:

    encode  (message, public, key) -> message: pure, so that it runs for many clients at once. `public` is
            what the server has told of the transform, `key` seeds what is random: of (seed, round, client)
    packed  (the message that `encode` was given, for shapes and types) -> the bits that an entry takes of
            what it has added, by path, where they are fewer than those of its type
    below   (the message that `encode` was given) -> what each entry of what it has added is less than, by
            path, where that is less than its bits allow: a server refuses what is not

    At the server, in reverse order:

    decode  (message, the message that `encode` was given, for shapes and types, key) -> message: for one
            client. What `encode` has added is gone, and what it has replaced is there again
    accept  (message, public) -> message: for one client, whatever it has sent; what must hold for the
            server, since a Byzantine client does what it likes
    release (Release) -> (total, public, secret): what is done to the sums of a round, once

    begin       (an upload) -> public, secret: what the server knows of the transform before the first round
    draws       whether `encode` uses its key
    lossy       whether what `decode` returns differs from what `encode` was given
    feedback    whether a client keeps what the encoding has lost, and adds it to its next upload
    weight_cap  how much a client may count at most where it counts by samples (None: as it does)
    order       the order of clients that its account is best with, where a run has no schedule ('': any)
    for_sums    why it needs a method that adds up what clients send ('': it does not)
    bind        (Taken, as the run plans it) -> the transform of this run: what a bound asked for takes, such
                as the noise of an epsilon, is found before the first round
    account     (Taken) -> numbers for metrics.jsonl, progress and report, such as {"epsilon": 1.3}
    expands     why it may lose more than the length of what it was given ('': it does not). Beside feedback,
                what clients keep would grow without end
    entrywise   whether what becomes of an entry depends on no other one, nor on where it is
    """

    name: str
    options: Mapping[str, Any]
    encode: Callable[[Message, Tensors, Tensor], Message] | None = None
    decode: Callable[[Message, Message, Tensor], Message] | None = None
    packed: Callable[[Message], Mapping[str, int]] | None = None
    accept: Callable[[Message, Tensors], Message] | None = None
    release: Callable[[Release], tuple[Upload, Tensors, Tensors]] | None = None
    begin: Callable[[Upload], tuple[Tensors, Tensors]] | None = None
    draws: bool = False
    lossy: bool = False
    feedback: bool = False
    weight_cap: float | None = None
    order: str = ""
    for_sums: str = ""
    bind: Callable[[Taken], Transform] | None = None
    account: Callable[[Taken], Mapping[str, float]] | None = None
    below: Callable[[Message], Mapping[str, int]] | None = None
    expands: str = ""
    entrywise: bool = False


class Share(NamedTuple):
    """What the devices of one class hold of a model.

    model   the part that they train. Its tensors have the names that they have in the whole model, and its
            shape, or the leading part of it
    pieces  what the samples pass before, forwards only: one piece after another, never two at a time
    widths  for ordered dropout: the shapes, by name, of narrower models inside of `model`
    """

    name: str
    model: nn.Module
    pieces: tuple[nn.Module, ...] = ()
    widths: tuple[Mapping[str, tuple[int, ...]], ...] = ()


class Capacity(NamedTuple):
    """What devices can hold: a few classes of them, and which client is in which.

    shares  (model, some samples, samples in a training step) -> what each class holds
    assign  (clients, seed) -> for each client the number of its class
    record  where what a piece put out waits for the next one: 'memory' or 'disk'
    mask    whether a client's loss leaves out the classes of which it has no sample
    """

    name: str
    classes: tuple[str, ...]
    shares: Callable[[nn.Module, Inputs, int], tuple[Share, ...]]
    assign: Callable[[int, int], Sequence[int]]
    options: Mapping[str, Any]
    record: str = "memory"
    mask: bool = False


Rates = Mapping[str, float | Tensor]
"""A step size for each name: 0-d tensors for a client, numbers at the server."""

Update = Callable[[Tensors, Tensors, Tensors, Rates], tuple[Tensors, Tensors]]
"""(params, gradient, state, rates) -> params, state."""


class Optimizer(NamedTuple):
    """How gradients become steps, for clients, for inner solvers and for the server: two pure functions.

    init      (params) -> state: named tensors, always of the same structure
    update    (params, gradient, state, rates) -> the names of the gradient after a step, and the whole state
    options   what it was made with; `lr` is the step size of the server, None for clients
    in_place  as `update`, but the result may take the memory of the gradient (None: there is no such form)
    """

    name: str
    init: Callable[[Tensors], Tensors]
    update: Update
    options: Mapping[str, Any]
    in_place: Update | None = None

    def __repr__(self) -> str:
        return f"pt.optim.{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


class ServerRule(NamedTuple):
    """init (shared) -> ServerState; step (ServerState, aggregated upload) -> ServerState.

    `optimizer` is what takes the step on the model, where one does.
    """

    init: Callable[[Tensors], ServerState]
    step: Callable[[ServerState, Upload], ServerState]
    optimizer: Optimizer | None = None


class Personalize(NamedTuple):
    """The model a client is evaluated with, or deploys: start -> phases of steps -> model.

    The same shape as a local rule, so that one gradient step (MAML) or fine-tuning is no special case.
    """

    start: Callable[[Download, ClientState], Any]
    phases: tuple[Phase, ...]
    model: Callable[[Any, Download, ClientState], Tensors]


@dataclass(frozen=True)
class Aggregation:
    """How a method aggregates, and whether a cohort may be aggregated in parts.

    adds_up  the mean of what parts give, each counting for its weight, and the sum of their `sums` and of
             their extras, are those of the whole
    """

    bind: Callable[[Problem], Callable[[Upload, Tensor], Upload]]
    adds_up: bool

    def __call__(self, problem: Problem) -> Callable[[Upload, Tensor], Upload]:
        """For a model."""
        return self.bind(problem)


@dataclass(frozen=True)
class Algorithm:
    """A method: small functions, composed.

    partition    (model, names)               -> which names are shared and which personal
    init_client  (model's tensors, Partition) -> the state of a client that was never seen
    local        (Problem)                    -> LocalRule, what a client does
    aggregate    (Problem)                    -> (stacked uploads, key) -> one upload. If it says `adds_up`, a
                 cohort may be aggregated in parts (see `Aggregation`)
    server       (Problem)                    -> ServerRule, what the server does with it
    personalize  (Problem)                    -> Personalize, the model a client is evaluated with
    loss         (Criterion)                  -> Criterion, what clients minimize in place of the loss of the
                 run (None: that one). What it asks for beside (output, target) is handed to it, and models
                 are scored by the loss of the run (see `partita.core.terms`)
    newcomer     (Problem)                    -> LocalRule, how a client that comes after training finds its
                 personal part while the server's model stays as it is (None: by `local`; nothing is sent)
    stateful     whether clients keep a state between rounds, if the run lets them
    asynchronous what it wants of an asynchronous schedule: 'buffer', 'staleness'. A method that has it (it
                 may be empty) runs under one unless the run says otherwise
    mixes        whether stale uploads count as models: w − w_i, from what the server has now, in place of the
                 client's own delta w^{t−τ} − w_i
    sends_gradients   whether an upload is one gradient, whose step size is chosen for the clients at work
    synchronous_only  why it cannot run under an asynchronous schedule ('': it can)
    needs_full_model  why every client must hold the whole model ('': it need not)
    shares_extra      whether clients learn from each other by more than the shared part of their models
    """

    name: str
    partition: Callable[[nn.Module, Sequence[str]], Partition]
    init_client: Callable[[Tensors, Partition], ClientState]
    local: Callable[[Problem], LocalRule]
    aggregate: Callable[[Problem], Callable[[Upload, Tensor], Upload]]
    server: Callable[[Problem], ServerRule]
    personalize: Callable[[Problem], Personalize]
    loss: Callable[[Criterion], Criterion] | None = None
    newcomer: Callable[[Problem], LocalRule] | None = None
    stateful: bool = True
    asynchronous: Mapping[str, Any] | None = None
    mixes: bool = False
    sends_gradients: bool = False
    synchronous_only: str = ""
    needs_full_model: str = ""
    shares_extra: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[StagePlan, ...] = ()


class Probe(NamedTuple):
    """Samples that every client passes through its model, to look at what is inside.

    x       the samples as data are stored, or how many to take of the clients' test samples
    blocks  the submodules to look at (None: the model's blocks)
    batch   how many samples pass at a time
    """

    x: Any
    blocks: tuple[str, ...] | None = None
    batch: int = 32


class Watched(NamedTuple):
    """What a measure is to look at in a stage, for it to refuse what it cannot.

    like       what a client sends that holds the whole model, without what transforms add
    x, y       a few samples, as the model takes them
    params     the model's tensors when the stage begins
    seen       of how many samples a client makes an upload, at most
    newcomers  how many clients are held out
    alike      whether every client holds the whole model
    """

    algorithm: Algorithm
    problem: Problem
    like: Upload
    x: Inputs
    y: Tensor
    params: Tensors
    seen: int
    newcomers: int
    alike: bool


class Measure(NamedTuple):
    """Something to follow during a run beside scores; clients compute it as they compute an evaluation.

    client     (Problem, Algorithm) -> LocalRule; what it uploads is measured
    reduce     (stacked uploads of some clients) -> what is kept of them, with rows of any number (None: all).
               Clients come in blocks that fit; what is as large as the model is summed here
    summarize  (all that was kept, samples of each client) -> numbers, or lists of them, by name
    personal   the split that it looks at, where that is not the method's own
    of_cohort  only those who have just reported take part. `download.extra` then also holds, for the names
               that a client sent, the model that it ended with ('ended/NAME')
    own        clients bring their own states, as to an evaluation; else the personal part is as at the start
    probe      samples for all clients. `download.extra` then also holds them, as a model takes them ('probe')
    of_upload  as `of_cohort`, from where the server sits. `download` is what each client had received, and
               `download.extra` also holds what the server saw it send ('sent/NAME'), and what the server has
               made of all of it ('made/NAME'). States are those after the round, and phases draw the batches
               that those of the client's training have drawn
    most       how many clients of the cohort are measured, the first ones (None: all)
    newcomers  those whom `newcomers=` has held out are measured too, after the clients of the run: for them
               `uploads.metrics['newcomer']` is 1, for all others 0
    fits       (Watched) -> None: refuses what it cannot measure, before any work (None: it measures anything)

    Where nothing leaves a client, measures of uploads and of newcomers find nothing.
    """

    name: str
    client: Callable[[Problem, Algorithm], LocalRule]
    summarize: Callable[[Upload, Tensor], dict[str, float | list[float]]]
    options: Mapping[str, Any]
    personal: Any = None
    of_cohort: bool = False
    reduce: Callable[[Upload], Upload] | None = None
    own: bool = False
    probe: Probe | None = None
    of_upload: bool = False
    most: int | None = None
    newcomers: bool = False
    fits: Callable[[Watched], None] | None = None


@dataclass(frozen=True)
class StagePlan:
    """One part of a pipeline: a method, its own length, work, cohort and schedule (None: as the run says)."""

    algorithm: Algorithm
    rounds: int | None = None
    cohort: int | None = None
    steps: int | tuple[int, ...] | None = None
    epochs: int | None = None
    batch: int | None = None
    state: str | None = None
    schedule: Any = None
