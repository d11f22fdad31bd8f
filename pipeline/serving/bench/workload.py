"""What people write about a load: how many requests at a time, how long, and what they say."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, StringConstraints, model_validator

from pipeline.core.errors import SpecInvalid, WorkloadInvalid, did_you_mean
from pipeline.core.files import read_limited
from pipeline.core.model import Digest, Frozen, Name, RelativePath
from pipeline.core.yaml_file import MAX_FILE_BYTES, parse_yaml

FOLDER = Path(__file__).parent / "workloads"
Positive = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
Concurrency = Annotated[int, Field(ge=1, le=100_000)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Pause = Annotated[float, Field(ge=0, le=86400)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Line = Annotated[str, StringConstraints(pattern=r"^\S(.*\S)?$", max_length=1000)]


class Fixed(Frozen):
    """Every one has this length."""

    kind: Literal["fixed"] = "fixed"
    tokens: Tokens

    @property
    def most(self) -> int:
        return self.tokens


class Uniform(Frozen):
    """Any length between two is as likely."""

    kind: Literal["uniform"]
    least: Tokens
    most: Tokens

    @model_validator(mode="after")
    def _is_a_range(self) -> Uniform:
        if self.least > self.most:
            raise ValueError("`least` is more than `most`")
        return self


class Normal(Frozen):
    """A bell curve, cut off at both ends."""

    kind: Literal["normal"]
    mean: Tokens
    deviation: Annotated[float, Field(ge=0)]
    least: Tokens = 1
    most: Tokens

    @model_validator(mode="after")
    def _is_a_range(self) -> Normal:
        if not self.least <= self.mean <= self.most:
            raise ValueError("`mean` is not between `least` and `most`")
        return self


Lengths: TypeAlias = Annotated[Fixed | Uniform | Normal, Discriminator("kind")]


class TextPrompts(Frozen):
    """English text, another for each request unless `unique` says otherwise."""

    kind: Literal["text"] = "text"
    # identical prompts are answered from the prefix cache, which flatters every number
    unique: bool = True
    # of the prompt, so many tokens are common to all requests of a group
    prefix_tokens: Annotated[int, Field(ge=0)] = 0
    prefix_groups: Positive = 1


class RandomTokens(Frozen):
    """Token ids drawn at random, through /v1/completions; refused with speculation."""

    kind: Literal["random-tokens"]
    vocabulary: Positive  # ids are below this
    skip: Annotated[int, Field(ge=0)] = 1000  # and not below this: special tokens are there


class FilePrompts(Frozen):
    """Lines of JSON: {"prompt": "…"} or {"messages": […]}, each used once."""

    kind: Literal["file"]
    path: RelativePath  # beside the workload's file
    digest: Digest | None = None


class TracePrompts(Frozen):
    """Sessions that an agent had, by the hashes of their KV blocks: see `trace.py`."""

    kind: Literal["trace"]
    path: RelativePath  # beside the workload's file
    digest: Digest | None = None
    block_tokens: Positive = 512  # of a Mooncake trace; a Weka trace names its own
    # sessions one after the other on each stream, or each when the trace has it
    timing: Literal["sessions", "timestamps"] = "sessions"
    most_think_s: Pause = 60.0
    most_input: Tokens | None = None  # a session ends before a longer prompt


class Turn(Frozen):
    """The next message of a conversation, and how long the user or the tool takes for it."""

    input: Lengths
    output: Lengths
    role: Literal["user", "tool"] = "user"
    think_s: Pause = 0.0
    times: Positive = 1


class Conversations(Frozen):
    """Each request carries all earlier messages, with the server's own answers."""

    kind: Literal["conversation"]
    turns: Annotated[list[Turn], Field(min_length=1)]
    system_tokens: Annotated[int, Field(ge=0)] = 0
    # one system text for all of them, as agents have it
    shared_system: bool = True

    def each_turn(self) -> list[Turn]:
        """One entry a turn."""
        return [turn for turn in self.turns for _ in range(turn.times)]


Prompts: TypeAlias = Annotated[
    TextPrompts | RandomTokens | FilePrompts | TracePrompts | Conversations, Discriminator("kind")
]


class Reads(Frozen):
    """Long prompts of one reader, one after the other, while the writers of a cell decode."""

    times: Positive = 3
    input: Lengths
    output: Lengths = Fixed(tokens=1)  # it is the prompt that disturbs the writers
    pause_s: Pause = 5.0  # before each, so long the writers decode alone


class Load(Frozen):
    """One cell of a sweep: so many requests at a time, or so many a second."""

    concurrency: Concurrency | None = None  # with a rate: no more than this at a time
    rate_per_s: Rate | None = None
    arrivals: Literal["poisson", "even"] = "poisson"
    requests: Positive  # of conversations: how many of them
    # in place of the workload's own
    input: Lengths | None = None
    output: Lengths | None = None
    # `requests` are the fewest answers then: writers go on until the last read is over
    reads: Reads | None = Field(default=None, exclude_if=lambda reads: reads is None)

    @model_validator(mode="after")
    def _says_how_much(self) -> Load:
        if self.concurrency is None and self.rate_per_s is None:
            raise ValueError("needs `concurrency` or `rate_per_s`")
        if self.reads and (self.rate_per_s or (self.concurrency or 0) > self.requests):
            raise ValueError("`reads` need writers: `concurrency`, at most as many as `requests`")
        return self


class Objectives(Frozen):
    """What a request must keep to count as goodput (service level objectives)."""

    ttft_ms: Seconds | None = None
    tpot_ms: Seconds | None = None
    latency_ms: Seconds | None = None


class RequestLimits(Frozen):
    """When a request counts as lost, and what is tried again."""

    connect_s: Seconds = 30.0
    first_token_s: Seconds = 1800.0  # deep queues are part of the measurement
    stall_s: Seconds = 120.0  # no byte for so long, once text has begun
    request_s: Seconds = 7200.0
    retries: Annotated[int, Field(ge=0, le=100)] = 3  # of 429 and 503, as the server asks


class Sampling(Frozen):
    """What the server is asked for beside the text."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None  # none: the server's own
    # fixed lengths need it: otherwise the model decides how much work there is
    ignore_eos: bool = True


class WorkloadSource(Frozen):
    """Whose measurement a workload repeats."""

    title: Line
    link: Line | None = None


class Workload(Frozen):
    """A file of `workloads/`: what is asked of a server, and how often."""

    name: Name
    summary: Line
    source: WorkloadSource | None = None
    prompts: Prompts = TextPrompts()
    input: Lengths | None = None
    output: Lengths | None = None
    loads: list[Load] = []
    # how long a server takes until its first token: with nothing cached, and once more
    starts: list[Literal["cold", "warm"]] = []
    warmup_requests: Annotated[int, Field(ge=0)] | None = None  # none: one for each stream
    repeats: Positive = 3
    # the engine is started so often, and each start has its share of the repeats
    engine_starts: Positive = Field(default=1, exclude_if=lambda count: count == 1)
    sampling: Sampling = Sampling()
    objectives: Objectives | None = None
    limits: RequestLimits = RequestLimits()
    # a looping answer is easy to predict: with speculation it is fast and worth nothing
    looping: Literal["void", "mark"] = "void"
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _is_whole(self) -> Workload:
        if bool(self.loads) == bool(self.starts):
            raise ValueError("needs `loads`, or `starts`")
        if self.engine_starts > 1 and (self.starts or self.repeats % self.engine_starts):
            raise ValueError("`repeats` of `loads` are shared by `engine_starts` without a rest")
        if self.loads and self.prompts.kind not in ("conversation", "trace"):
            has_output = all(load.output or self.output for load in self.loads)
            has_input = all(load.input or self.input for load in self.loads)
            if not has_output or not (has_input or self.prompts.kind == "file"):
                raise ValueError("needs `input` and `output` lengths")
        if self.prompts.kind != "text" and any(load.reads for load in self.loads):
            raise ValueError("`reads` are of text, as the prompts beside them must be")
        return self


def shipped_names() -> list[str]:
    """All that are shipped, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def workload_path(name: str) -> Path:
    """The file of a workload: a name of ours, or a path that ends in .yaml."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name in shipped_names():
        return FOLDER / f"{name}.yaml"
    near = did_you_mean(get_close_matches(name, shipped_names(), n=1))
    raise WorkloadInvalid(
        f"there is no workload {name!r} (there are: {', '.join(shipped_names())})",
        f"{near}Name one of them, or a file that ends in .yaml.",
    )


def read_workload(name: str) -> Workload:
    """A workload by name or file."""
    path = workload_path(name)
    data = read_limited(path, MAX_FILE_BYTES, WorkloadInvalid)
    try:
        workload = parse_yaml(data, Workload, path)
    except SpecInvalid as error:
        raise WorkloadInvalid(str(error)) from error
    if path.parent == FOLDER and workload.name != path.stem:
        raise WorkloadInvalid(f"{path}: name: is {workload.name!r}, the file is {path.name}")
    return workload


def prompt_file(name: str, workload: Workload) -> Path | None:
    """Where the prompts of a workload lie: beside its file."""
    prompts = workload.prompts
    if not isinstance(prompts, FilePrompts | TracePrompts):
        return None
    return workload_path(name).resolve().parent / prompts.path
