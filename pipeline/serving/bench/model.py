"""The result of a benchmark: closed values that go into evidence and into reports.

A run is a folder with two files. `bench.json` is a `BenchRun`; `requests.jsonl` has a `RequestRow`
a line, for every request of every trial, good or bad; a trial names its lines and their digest. The
lines of a void trial stay when it is repeated, and its cell names them.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from pipeline.core.model import FILE_VERSION, Count, Digest, Frozen, Stamp
from pipeline.serving.bench.workload import Lengths, Reads, Workload

Engine: TypeAlias = Literal["vllm", "sglang", "llama.cpp", "stub"]
# Why a request has no whole answer.
Failure: TypeAlias = Literal[
    "refused",  # a status that is not 200, after all retries
    "unconnected",  # no connection could be made
    "lost",  # the connection ended in mid-answer
    "stalled",  # nothing came for too long
    "malformed",  # the answer is not HTTP, not a stream of events, or not JSON
    "empty",  # a whole answer without any text
    "stopped",  # by Ctrl-C
]
# Why a reader must take a number with care; its message says more.
MarkKind: TypeAlias = Literal[
    "client-limited",  # the client, not the server, was the limit
    "client-unmeasured",  # the client did not measure itself at this concurrency
    "throttled",  # a card lowered its clocks
    "link-errors",  # PCIe replays, or a link below its width or speed
    "usage-disagrees",  # the server's token counts do not match its stream
    "usage-missing",  # the server gave no token counts: events were counted
    "short-answers",  # fewer tokens than were asked for
    "input-differs",  # the prompts have another length than was asked for
    "cache-hits",  # unique prompts, yet the server found some in its cache
    "retried",  # requests were refused at first
    "looping",  # answers that repeat themselves, where the workload allows it
    "not-drained",  # the server was still busy when the trial began
    "behind-schedule",  # requests of a rate were sent late
    "events-together",  # several events in one read: the time between them is not known
    "repeated",  # a trial was void before, and was measured again
    "tokens-together",  # without speculation an event has several tokens, by the server's count
    "bursts",  # beside a read the rate looks well, but tokens came in bursts after pauses
]


class Mark(Frozen):
    """A doubt that a reader must know before believing a number."""

    kind: MarkKind
    message: str


class RequestRow(Frozen):
    """One request as it went. Times are of one monotonic clock on the client."""

    number: Count  # within its trial
    worker: Count = 0
    conversation: Count | None = None
    turn: Count | None = None
    part: Literal["reader", "writer"] | None = None  # in a cell with reads
    # of a trace: prompt tokens whose blocks an earlier request of the trial has, too
    repeated_tokens: Count | None = None
    planned_s: float | None = None  # with a rate: when it was due, since the trial's start
    sent_s: float  # when its first byte was written, since the trial's start
    # the following since `sent_s`
    first_byte_s: float | None = None  # of the answer's head
    first_token_s: float | None = None  # the first event that carries text
    end_s: float | None = None  # the last byte, or the failure
    # microseconds between one event with text and the next, in order
    gaps_us: list[Count] = []
    chunks: Count = 0  # events with text; an event may carry several tokens
    asked_input: Count | None = None
    asked_output: Count | None = None
    # as the server's `usage` says; none where it does not
    input_tokens: Count | None = None
    cached_tokens: Count | None = None
    output_tokens: Count | None = None
    reasoning_tokens: Count | None = None
    characters: Count = 0
    finish: str = ""
    status: Count = 0  # 0: there was no answer
    retries: Count = 0
    failure: Failure | None = None
    message: str = ""
    looping: bool = False

    @property
    def is_good(self) -> bool:
        return self.failure is None

    @property
    def cached(self) -> int | None:
        """Cached tokens where the count can be true: no cache holds more than the prompt."""
        return self.cached_tokens if (self.cached_tokens or 0) <= (self.input_tokens or 0) else None

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count where it can be true, else one for each event.

        No server writes more events than tokens, or more tokens than it was asked for.
        """
        most = self.asked_output or self.output_tokens
        if self.output_tokens is None or most is None:
            return self.chunks
        return self.output_tokens if self.chunks <= self.output_tokens <= most else self.chunks


class Cell(Frozen):
    """One step of a workload: a concurrency or a rate, with its lengths."""

    name: str  # unique in its run, such as c128, r4 or c1-in8192
    concurrency: Annotated[int, Field(ge=1)] | None = None
    rate_per_s: float | None = None
    arrivals: Literal["poisson", "even"] = "poisson"
    requests: Count  # of conversations: how many of them
    input: Lengths | None = None
    output: Lengths | None = None
    start: Literal["cold", "warm"] | None = None
    reads: Reads | None = Field(default=None, exclude_if=lambda reads: reads is None)


class Quantiles(Frozen):
    """A distribution; `count` is how many values it has."""

    count: Count
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    least: float
    most: float


# Left out where it does not apply, as earlier runs have it.
WhereKnown = Annotated[float | None, Field(exclude_if=lambda seconds: seconds is None)]


class Metrics(Frozen):
    """What follows from the requests of one trial; each is defined in metrics.DEFINITIONS."""

    duration_s: float
    requests: Count
    completed: Count
    failed: Count
    retries: Count
    looping: Count = 0
    input_tokens: Count
    output_tokens: Count
    cached_tokens: Count | None = None
    output_tok_s: float
    total_tok_s: float
    peak_output_tok_s: float
    requests_s: float
    goodput_s: float | None = None  # only with objectives
    concurrency: float  # requests under way, on average
    ttft_ms: Quantiles | None = None
    tpot_ms: Quantiles | None = None
    itl_ms: Quantiles | None = None
    latency_ms: Quantiles | None = None
    prefill_tok_s: Quantiles | None = None
    decode_tok_s: Quantiles | None = None
    # with speculation
    acceptance_length: float | None = None
    verifier_steps: Count | None = None
    tokens_per_chunk: float | None = None
    # with power samples
    energy_j: float | None = None
    joules_per_output_token: float | None = None
    # of a cell with reads
    reads: Annotated[Count | None, Field(exclude_if=lambda count: count is None)] = None
    decode_alone_tok_s: WhereKnown = None
    decode_under_load_tok_s: WhereKnown = None
    decode_kept: WhereKnown = None
    worst_pause_ms: WhereKnown = None
    read_tok_s: WhereKnown = None
    # of a trace
    cached_share: WhereKnown = None
    repeated_share: WhereKnown = None
    ttft_by_turn_ms: Annotated[
        dict[str, float] | None, Field(exclude_if=lambda turns: turns is None)
    ] = None
    session_s: Annotated[Quantiles | None, Field(exclude_if=lambda spread: spread is None)] = None
    # of a start
    ready_s: float | None = None
    start_to_first_token_s: float | None = None
    # later than the first runs of starts, which lack them
    start_to_right_answer_s: WhereKnown = None
    pull_s: WhereKnown = None
    pull_to_right_answer_s: WhereKnown = None
    # parts of it, as the engine's log has them; left out elsewhere, as earlier runs have it
    load_s: WhereKnown = None
    compile_s: WhereKnown = None
    tune_s: WhereKnown = None
    capture_s: WhereKnown = None


# These are about an engine's start, so no request shows them.
OF_A_START = (
    *("ready_s", "start_to_first_token_s", "start_to_right_answer_s"),
    *("pull_s", "pull_to_right_answer_s"),
    *("load_s", "compile_s", "tune_s", "capture_s"),
)


class GpuSeries(Frozen):
    """One card while a trial ran, a value for each time; none where it gave no answer."""

    index: Count
    name: str
    uuid: str = ""
    at_s: list[float]
    power_w: list[float | None]
    sm_clock_mhz: list[float | None]
    memory_clock_mhz: list[float | None]
    temperature_c: list[float | None]
    memory_used_bytes: list[Count | None]
    utilization_percent: list[float | None]
    throttle: list[list[str]]  # reasons that lower clocks, by nvidia-smi's names
    pcie_generation: list[Count | None]
    pcie_width: list[Count | None]
    pcie_generation_most: Count | None = None
    pcie_width_most: Count | None = None
    pcie_replays: list[Count | None]


class EngineSeries(Frozen):
    """The engine's own metrics while a trial ran; which it has differs by engine and version."""

    at_s: list[float]
    running: list[float | None]
    waiting: list[float | None]
    kv_use: list[float | None]  # share of the KV cache, 0 to 1
    acceptance: list[float | None] = []  # tokens a verifier step, where the engine says so itself
    # counters: how much they rose during the trial, by our names in engine_metrics
    counters: dict[str, float] = {}


class Samples(Frozen):
    """What was sampled beside the requests."""

    gpus: list[GpuSeries] = []
    engine: EngineSeries | None = None
    absent: list[str] = []  # what could not be sampled, and why


class RequestLines(Frozen):
    """The lines of a trial in `requests.jsonl`."""

    first_byte: Count
    bytes: Count
    lines: Count
    digest: Digest  # of these bytes


class Trial(Frozen):
    """One run of a cell: its own warm-up, a drained server before it."""

    number: Count  # 0 is the first
    # which start of the engine it was measured in, where there were several
    start: Count | None = Field(default=None, exclude_if=lambda number: number is None)
    started: Stamp
    metrics: Metrics
    marks: list[Mark] = []
    void: list[str] = []  # why it counts for nothing; shown, and left out of intervals
    samples: Samples = Samples()
    requests: RequestLines
    warmup_requests: Count
    drained_s: float | None = None  # how long the server needed to come to rest before it


class Interval(Frozen):
    """A metric over the good trials of a cell: mean and 95 % confidence (Student's t).

    With several starts of the engine it is over the means of the starts, and `trials` counts these.
    `low` and `high` are none with fewer than two trials: one trial says nothing of its error.
    """

    mean: float
    low: float | None
    high: float | None
    trials: Count


class CellResult(Frozen):
    """A cell with all of its trials."""

    cell: Cell
    # void: a trial is void, and a cell from which failures are left out looks better than it is;
    # partial: trials are missing
    state: Literal["good", "void", "partial"]
    trials: list[Trial]
    # by name: `output_tok_s`, `ttft_ms.mean`, `ttft_ms.p99` …
    intervals: dict[str, Interval]
    # of trials that were void and were measured again: no line of the requests is unclaimed
    repeated: list[RequestLines] = []

    @property
    def good_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.void]


class SelfTest(Frozen):
    """The client against its own stub, whose pacing is known: what it adds to what it reads."""

    concurrency: Count
    workers: Count
    requests: Count
    tokens: Count
    # what the stub wrote and when, by its own clock
    true_ttft_ms: float
    true_tpot_ms: float
    read_ttft_ms: float
    read_tpot_ms: float
    ttft_error: float  # share: 0.02 is 2 % too high
    tpot_error: float
    offered_tok_s: float  # how fast the stub was to write
    ceiling_tok_s: float  # tokens a second that the client can read
    cpu_us_per_token: float
    trusted: bool  # errors within the bounds
    message: str = ""


class ClientFacts(Frozen):
    """The program that measured, and the machine it ran on."""

    name: Literal["sm120-bench"] = "sm120-bench"
    version: str
    digest: Digest  # of the client's own code
    python: str
    event_loop: Literal["uvloop", "asyncio"]
    json_reader: Literal["orjson", "json"]
    machine: str
    cores: Count
    open_files: Count


class ServerFacts(Frozen):
    """What the server says of itself."""

    url: str
    model: str
    engine: Engine | None = None
    version: str | None = None
    context_tokens: Count | None = None
    speculation: bool | None = None  # none: it does not say
    # its own command line or settings, where it tells
    settings: dict[str, str] = {}


class Inputs(Frozen):
    """Digests of what the server ran, as far as they are known."""

    image: Digest | None = None
    weights: Digest | None = None
    recipe: Digest | None = None
    recipe_name: str | None = None
    host: Digest | None = None  # of the statement or file of host facts
    # the host that --on named; left out where there is none, as earlier runs have it
    host_name: str | None = Field(default=None, exclude_if=lambda name: name is None)
    # which kernels the engine's log names; left out where it names none, as earlier runs have it
    kernels: list[str] = Field(default=[], exclude_if=lambda names: not names)
    workload: Digest


class BenchRun(Frozen):
    """The whole of `bench.json`."""

    format: Annotated[Literal["sm120-bench/1"], FILE_VERSION] = "sm120-bench/1"
    # partial: stopped before all cells were done; the same command resumes it
    state: Literal["complete", "partial"]
    why_partial: str = ""
    started: Stamp
    ended: Stamp
    workload: Workload
    inputs: Inputs
    server: ServerFacts
    client: ClientFacts
    self_tests: list[SelfTest]
    cells: list[CellResult]
    marks: list[Mark] = []  # of the whole run
    nonce: str = ""  # goes into every prompt, so that no cache knows them from an earlier run
    interruptions: Count = 0  # how often it was stopped and resumed
    turns: str = ""  # the same for two runs whose trials were measured in turns
