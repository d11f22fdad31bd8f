"""From a workload to the requests of one trial: pure, so that every worker makes its own share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline import log
from pipeline.bench.model import Cell
from pipeline.bench.prompts import (
    Scale,
    arrivals,
    body_of,
    draw,
    random_ids,
    read_prompts,
    unique_text,
    words,
)
from pipeline.bench.workload import (
    Conversations,
    FilePrompts,
    Lengths,
    RandomTokens,
    TextPrompts,
    Turn,
    Workload,
)
from pipeline.errors import WorkloadInvalid
from pipeline.files import read_limited
from pipeline.model import Frozen, sha256_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MOST_FILE_BYTES = 512 << 20


class Job(Frozen):
    """All that a worker needs to know for its share of a trial."""

    host: str
    port: int
    base: str = ""
    is_tls: bool = False
    socket: str | None = None  # that leads to a server of another host
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
    scale: Scale = Scale()
    prompt_file: str | None = None  # where the workload's own lies on this machine
    ramp_s: float = 0.0  # streams begin one after the other within this time

    @property
    def streams(self) -> int:
        """Streams of this worker; of a rate: the most at a time."""
        total = min(self.cell.concurrency or self.requests, self.requests)
        return len(range(self.worker, total, self.workers))


@dataclass(slots=True)
class Planned:
    """One request, as far as it is known before the server has answered anything."""

    number: int
    asked_input: int | None
    asked_output: int
    # the JSON of the request; of a turn: its beginning, and what is said next
    body: bytes = b""
    messages: tuple[bytes, ...] = ()
    conversation: int | None = None
    turn: int | None = None
    due_s: float | None = None
    think_s: float = 0.0
    # an assistant's call of a tool comes before the tool's answer
    tool_call: str = ""


Session = list[Planned]


def cells_of(workload: Workload) -> list[Cell]:
    """Every step of a workload, each under a name of its own."""
    cells = [
        Cell(name=f"start-{kind}", requests=1, concurrency=1, start=kind)
        for kind in workload.starts
    ]
    varied = len({_length(load.input or workload.input) for load in workload.loads}) > 1
    for load in workload.loads:
        given = load.input or workload.input
        # more streams than requests are never open at a time
        streams = load.concurrency and min(load.concurrency, load.requests)
        name = f"c{streams}" if load.rate_per_s is None else f"r{load.rate_per_s:g}"
        if varied and given:
            name += f"-in{given.most}"
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
            )
        )
    return cells


def _length(lengths: Lengths | None) -> str:
    return lengths.model_dump_json() if lengths else ""


def sessions(job: Job) -> Iterator[Session]:
    """The share of one worker, in order; a session is one request, or a conversation."""
    due = _due(job)
    read = _read_file(job)
    for number in range(job.worker, job.requests, job.workers):
        session = _session(job, number, read)
        if due:
            session[0].due_s = due[number]
        yield session


def _due(job: Job) -> Sequence[float]:
    if job.cell.rate_per_s is None or job.phase == "warm-up":
        return ()
    key = f"{job.workload.seed} {job.cell.name} {job.trial} arrivals"
    return arrivals(job.cell.rate_per_s, job.requests, job.cell.arrivals, key)


def _read_file(job: Job) -> list[list[dict[str, Any]]]:
    prompts = job.workload.prompts
    if not isinstance(prompts, FilePrompts):
        return []
    path = Path(job.prompt_file or prompts.path)
    data = read_limited(path, _MOST_FILE_BYTES, WorkloadInvalid)
    if prompts.digest and sha256_of(data) != prompts.digest:
        raise WorkloadInvalid(f"{path}: is {sha256_of(data)}, the workload names {prompts.digest}")
    read = read_prompts(data, path.name)
    if len(read) < job.requests and job.phase == "trial":
        # a prompt that is asked twice is answered from a cache
        count = log.count(len(read), "prompt")
        raise WorkloadInvalid(f"{path}: has {count}, {job.requests} are needed")
    return read


def _key(job: Job, number: int) -> str:
    # without the nonce: runs of one workload ask for the same lengths with the same words
    return f"{job.workload.seed} {job.cell.name} {job.phase} {job.trial} {number}"


def _settings(job: Job, output: int) -> dict[str, Any]:
    sampling = job.workload.sampling
    settings: dict[str, Any] = {
        "model": job.model,
        "max_tokens": output,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.ignore_eos:
        settings["ignore_eos"] = True
    if sampling.temperature is not None:
        settings["temperature"] = sampling.temperature
    return settings


def _session(job: Job, number: int, read: list[list[dict[str, Any]]]) -> Session:
    prompts, key = job.workload.prompts, _key(job, number)
    if isinstance(prompts, Conversations):
        return _conversation(job, prompts, number)
    assert job.cell.output is not None
    output = draw(job.cell.output, f"{key} output")
    settings = _settings(job, output)
    if isinstance(prompts, FilePrompts):
        # warm-ups may repeat prompts from the end of the file
        body = body_of({"messages": read[number % len(read)]}, settings)
        return [Planned(number, None, output, body)]
    assert job.cell.input is not None
    length = draw(job.cell.input, f"{key} input")
    if isinstance(prompts, RandomTokens):
        body = body_of({"prompt": random_ids(prompts, key, length)}, settings)
    else:
        text = _text(job, prompts, number, length)
        body = body_of({"messages": [{"role": "user", "content": text}]}, settings)
    return [Planned(number, length, output, body)]


def _text(job: Job, prompts: TextPrompts, number: int, length: int) -> str:
    key, nonce = f"{job.workload.seed} {job.cell.name}", ""
    if prompts.unique:
        key, nonce = _key(job, number), job.nonce
    common = min(prompts.prefix_tokens, max(0, length - round(job.scale.overhead)))
    prefix = ""
    if common:
        group = f"{job.workload.seed} {job.nonce} prefix {number % prompts.prefix_groups}"
        prefix = words(group, max(1, round(common / job.scale.per_word))) + "\n\n"
    return unique_text(key, max(1, job.scale.words(length - common)), prefix, nonce)


def _conversation(job: Job, prompts: Conversations, number: int) -> Session:
    session = []
    for index, turn in enumerate(prompts.each_turn()):
        key = f"{_key(job, number)} turn {index}"
        output, length = draw(turn.output, f"{key} output"), draw(turn.input, f"{key} input")
        session.append(
            Planned(
                number=number * len(prompts.each_turn()) + index,
                asked_input=None,  # it carries what the server said before
                asked_output=output,
                body=body_of({}, _settings(job, output)),
                messages=_turn_messages(job, prompts, turn, key, length, is_first=index == 0),
                conversation=number,
                turn=index,
                think_s=turn.think_s if index else 0.0,
                tool_call=f"call_{number}_{index}" if turn.role == "tool" and index else "",
            )
        )
    return session


def _turn_messages(
    job: Job, prompts: Conversations, turn: Turn, key: str, length: int, *, is_first: bool
) -> tuple[bytes, ...]:
    messages: list[dict[str, Any]] = []
    count = max(1, round(length / job.scale.per_word))
    if is_first and prompts.system_tokens:
        own = "" if prompts.shared_system else key
        system = words(
            f"{job.workload.seed} {job.nonce} system {own}",
            max(1, round(prompts.system_tokens / job.scale.per_word)),
        )
        messages.append({"role": "system", "content": system})
    text = unique_text(key, count, nonce=job.nonce)
    role = "user" if is_first else turn.role
    messages.append({"role": role, "content": text})
    return tuple(json.dumps(message, ensure_ascii=False).encode() for message in messages)


def said_before(planned: Planned, text: str) -> bytes:
    """The server's own answer, as the next turn carries it."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if planned.tool_call:
        call = {"name": "read_file", "arguments": json.dumps({"path": "notes.txt"})}
        message["tool_calls"] = [{"id": planned.tool_call, "type": "function", "function": call}]
    return json.dumps(message, ensure_ascii=False).encode()


def turn_body(planned: Planned, said: Sequence[bytes]) -> bytes:
    """A turn's JSON with all that was said, which is encoded already."""
    return planned.body[:-1] + b', "messages": [' + b", ".join(said) + b"]}"


def path_of(workload: Workload) -> str:
    """Only completions take token ids."""
    return COMPLETIONS if isinstance(workload.prompts, RandomTokens) else CHAT
