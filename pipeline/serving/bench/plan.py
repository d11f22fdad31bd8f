"""From a workload to the requests of one trial: pure, so that every worker makes its own share.

It makes the text of prompts, and quotes none: any amount of it, the same on every machine for the
same seed, and plain enough that a model answers it as it answers people. Its length in tokens
depends on the model, so a `TokenScale` is measured first, with the server's own count.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal

from pydantic import RootModel

from pipeline.core import log
from pipeline.core.errors import WorkloadInvalid
from pipeline.core.files import read_limited
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Frozen, sha256_of
from pipeline.core.net.wire import Address
from pipeline.core.yaml_file import read_yaml
from pipeline.serving.bench.model import Cell
from pipeline.serving.bench.workload import Conversations, FilePrompts, Lengths, Workload

_MOST_FILE_BYTES, _MOST_LINE_BYTES = 512 << 20, 64 << 20
TASK = "\n\nWrite a long and detailed report about all of the above, in full sentences."


class _Vocabulary(RootModel[dict[str, list[str]]]):
    """Forms of sentences, and the words for each of their places."""


class TokenScale(Frozen):
    """How many tokens words have with this model: tokens = overhead + words * per_word."""

    per_word: float = 1.3
    overhead: float = 30.0  # of the chat template, the unique head and the task

    def words(self, tokens: int) -> int:
        """How many words make so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.per_word))


def fit_scale(few: tuple[int, float], many: tuple[int, float]) -> TokenScale:
    """Fits a scale to prompts of two known lengths: (words, tokens on average) of each."""
    per_word = (many[1] - few[1]) / (many[0] - few[0])
    if not 0.2 < per_word < 20:
        raise WorkloadInvalid(
            f"the server counts {few[1]:g} tokens for {few[0]} words and {many[1]:g} for {many[0]}",
            "Its token counts cannot be used to make prompts of a wanted length.",
        )
    return TokenScale(per_word=per_word, overhead=few[1] - few[0] * per_word)


def _noise(key: str) -> random.Random:
    """The same numbers for the same key, on every machine."""
    return random.Random(key)  # noqa: S311 - nothing here is secret


@cache
def _vocabulary() -> dict[str, list[str]]:
    return read_yaml(Path(__file__).with_name("vocabulary.yaml"), _Vocabulary).root


def words(key: str, count: int, nonce: str = "") -> str:
    """Makes so many words of text; another key gives another text, a nonce another order of it."""
    known, noise = _vocabulary(), _noise(key)
    left, found = count, []
    while left:
        form = noise.choice(known["forms"])
        parts = {name: noise.choice(each) for name, each in known.items() if name != "forms"}
        number, year = noise.randint(2, 900), noise.randint(1780, 1990)
        sentence = form.format(**parts, number=number, year=year)
        found.append(sentence.split()[:left])
        left -= len(found[-1])
    if nonce:
        *whole, last = found
        _noise(f"{nonce} {key}").shuffle(whole)
        # the last one may be cut off in the middle
        found = [*whole, last]
    return " ".join(word for sentence in found for word in sentence)


def unique_text(key: str, count: int, prefix: str = "", nonce: str = "") -> str:
    """Makes a prompt of so many words that shares only its prefix with any other.

    With another nonce it has the same sentences, and so the same length: two runs of a workload
    are comparable, though no cache that compares from the start knows the prompts of the first.
    """
    # within the first tokens: caches compare from the start
    head = hashlib.sha256(f"{nonce} {key}".encode()).hexdigest()[:12]
    return f"{prefix}[{head}] {words(key, count, nonce)}{TASK}"


def draw(lengths: Lengths, key: str) -> int:
    """One length of a distribution."""
    if lengths.kind == "uniform":
        return _noise(key).randint(lengths.least, lengths.most)
    if lengths.kind == "normal":
        value = _noise(key).gauss(lengths.mean, lengths.deviation)
        return min(max(round(value), lengths.least), lengths.most)
    return lengths.tokens


def arrivals(rate_per_s: float, count: int, kind: str, key: str) -> list[float]:
    """When each request is due, in seconds since the start."""
    if kind == "even":
        return [number / rate_per_s for number in range(count)]
    noise, at, due = _noise(key), 0.0, []
    for _ in range(count):
        at += noise.expovariate(rate_per_s)
        due.append(at)
    return due


class WorkerJob(Frozen):
    """All that a worker needs to know for its share of a trial."""

    address: Address
    headers: dict[str, str] = {}
    model: str
    workload: Workload
    cell: Cell
    # measured, or only sent: a warm-up has other prompts
    phase: Literal["trial", "warm-up"] = "trial"
    trial: int = 0
    nonce: str = ""  # of the run: a cache may hold the prompts of an earlier one
    requests: int  # of all workers
    worker: int = 0
    workers: int = 1
    scale: TokenScale = TokenScale()
    prompt_file: str | None = None  # where the workload's own lies on this machine
    ramp_s: float = 0.0  # streams begin one after the other within this time

    @property
    def streams(self) -> int:
        """Streams of this worker; with a rate, the most at a time."""
        total = min(self.cell.concurrency or self.requests, self.requests)
        return len(range(self.worker, total, self.workers))


@dataclass(slots=True)
class Planned:
    """One request, as far as it is known before the server has answered anything."""

    number: int
    asked_input: int | None
    asked_output: int
    # the JSON of the request; of a turn: its beginning, and the messages that it adds
    body: bytes = b""
    messages: tuple[bytes, ...] = ()
    conversation: int | None = None
    turn: int | None = None
    due_s: float | None = None
    think_s: float = 0.0
    part: Literal["reader", "writer"] | None = None
    repeated_tokens: int | None = None  # of a trace
    # an assistant's call of a tool comes before the tool's answer
    tool_call: str = ""


Session = list[Planned]


def cells_of(workload: Workload) -> list[Cell]:
    """Every step of a workload, each under a name of its own."""
    cells = [
        Cell(name=f"start-{kind}", requests=1, concurrency=1, start=kind)
        for kind in workload.starts
    ]
    inputs = [load.input or workload.input for load in workload.loads]
    is_varied = len(set(inputs)) > 1
    for load, given in zip(workload.loads, inputs, strict=True):
        # more streams than requests are never open at a time
        streams = load.concurrency and min(load.concurrency, load.requests)
        name = f"c{streams}" if load.rate_per_s is None else f"r{load.rate_per_s:g}"
        if is_varied and given:
            name += f"-in{given.most}"
        if load.reads:
            name += f"-read{load.reads.input.most}"
        names = [cell.name for cell in cells]
        cells.append(
            Cell(
                name=name if name not in names else f"{name}-{len(cells)}",
                concurrency=streams,
                rate_per_s=load.rate_per_s,
                arrivals=load.arrivals,
                requests=load.requests,
                input=given,
                output=load.output or workload.output,
                reads=load.reads,
            )
        )
    return cells


def sessions(job: WorkerJob) -> Iterator[Session]:
    """The share of one worker, in order; a session is one request, or a conversation.

    With reads, the reader's sessions come first; in a trial, the writers' sessions never end.
    """
    cell, prompts, seed, scale = job.cell, job.workload.prompts, job.workload.seed, job.scale
    due: Sequence[float] = ()
    if cell.rate_per_s is not None and job.phase == "trial":
        key = f"{seed} {cell.name} {job.trial} arrivals"
        due = arrivals(cell.rate_per_s, job.requests, cell.arrivals, key)
    texts = _read_prompts(job, prompts) if prompts.kind == "file" else []
    numbers: Iterable[int] = range(job.worker, job.requests, job.workers)
    beside = 0
    if cell.reads:
        # one read warms up: kernels for long prompts may be compiled
        beside = cell.reads.times if job.phase == "trial" else 1
        numbers = count() if job.phase == "trial" else range(beside + job.requests)
    for number in numbers:
        asked = cell.reads if cell.reads and number < beside else cell
        # without the nonce: runs of one workload ask for the same lengths with the same words
        key = f"{seed} {cell.name} {job.phase} {job.trial} {number}"
        if prompts.kind == "conversation":
            session = _conversation(job, prompts, number, key)
        else:
            assert asked.output is not None
            output, length = draw(asked.output, f"{key} output"), None
            # warm-ups may repeat prompts from the end of the file
            content: dict[str, Any] = {"messages": texts[number % len(texts)] if texts else []}
            if prompts.kind != "file":
                assert asked.input is not None
                length = draw(asked.input, f"{key} input")
            if prompts.kind == "random-tokens":
                noise, least = _noise(key), min(prompts.skip, prompts.vocabulary - 1)
                ids = [noise.randrange(least, prompts.vocabulary) for _ in range(length or 0)]
                content = {"prompt": ids}
            elif prompts.kind == "text" and length is not None:
                own = (key, job.nonce) if prompts.unique else (f"{seed} {cell.name}", "")
                common = min(prompts.prefix_tokens, max(0, length - round(scale.overhead)))
                prefix = ""
                if common:
                    group = f"{seed} {job.nonce} prefix {number % prompts.prefix_groups}"
                    prefix = words(group, max(1, round(common / scale.per_word))) + "\n\n"
                text = unique_text(own[0], scale.words(length - common), prefix, own[1])
                content = {"messages": [{"role": "user", "content": text}]}
            session = [Planned(number, length, output, completion_body(job, output, content))]
        if cell.reads:
            session[0].part = "writer" if asked is cell else "reader"
        if due:
            session[0].due_s = due[number]
        yield session


def _read_prompts(job: WorkerJob, prompts: FilePrompts) -> list[list[dict[str, Any]]]:
    """The lines of a prompt file, each as messages."""
    path, found = Path(job.prompt_file or prompts.path), []
    data = read_limited(path, _MOST_FILE_BYTES, WorkloadInvalid)
    if prompts.digest and sha256_of(data) != prompts.digest:
        raise WorkloadInvalid(f"{path}: is {sha256_of(data)}, the workload names {prompts.digest}")
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            value = read_json(line, most_bytes=_MOST_LINE_BYTES)
        except JsonInvalid as error:
            raise WorkloadInvalid(f"{where}: {error}") from error
        fields = value if isinstance(value, dict) else {}
        prompt, messages = fields.get("prompt"), fields.get("messages")
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        known: list[Any] = messages if isinstance(messages, list) else [None]
        if not all(isinstance(each, dict) and "role" in each for each in known):
            raise WorkloadInvalid(f"{where}: has neither a `prompt` nor `messages`")
        found.append(known)
    if len(found) < job.requests and job.phase == "trial":
        # a prompt that is asked twice is answered from a cache
        count = log.count(len(found), "prompt")
        raise WorkloadInvalid(f"{path}: has {count}, {job.requests} are needed")
    return found


def _conversation(job: WorkerJob, prompts: Conversations, number: int, key: str) -> Session:
    session: Session = []
    turns = prompts.each_turn()
    for index, turn in enumerate(turns):
        of_turn = f"{key} turn {index}"
        output = draw(turn.output, f"{of_turn} output")
        length = draw(turn.input, f"{of_turn} input")
        messages = []
        if index == 0 and prompts.system_tokens:
            own = "" if prompts.shared_system else of_turn
            text = f"{job.workload.seed} {job.nonce} system {own}"
            text = words(text, max(1, round(prompts.system_tokens / job.scale.per_word)))
            messages.append({"role": "system", "content": text})
        text = unique_text(of_turn, max(1, round(length / job.scale.per_word)), nonce=job.nonce)
        messages.append({"role": turn.role if index else "user", "content": text})
        session.append(
            Planned(
                number=number * len(turns) + index,
                asked_input=None,  # it carries what the server answered before
                asked_output=output,
                body=completion_body(job, output, {}),
                messages=tuple(json.dumps(each, ensure_ascii=False).encode() for each in messages),
                conversation=number,
                turn=index,
                think_s=turn.think_s if index else 0.0,
                tool_call=f"call_{number}_{index}" if turn.role == "tool" and index else "",
            )
        )
    return session


def completion_body(job: WorkerJob, output: int, content: dict[str, Any]) -> bytes:
    """A request's JSON."""
    body: dict[str, Any] = {
        "model": job.model,
        "max_tokens": output,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if job.workload.sampling.ignore_eos:
        body["ignore_eos"] = True
    if job.workload.sampling.temperature is not None:
        body["temperature"] = job.workload.sampling.temperature
    return json.dumps({**body, **content}, ensure_ascii=False).encode()


def assistant_message(planned: Planned, text: str) -> bytes:
    """The server's own answer, as the next turn carries it."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if planned.tool_call:
        call = {"name": "read_file", "arguments": json.dumps({"path": "notes.txt"})}
        message["tool_calls"] = [{"id": planned.tool_call, "type": "function", "function": call}]
    return json.dumps(message, ensure_ascii=False).encode()
