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
    draw,
    random_ids,
    read_prompts,
    unique_text,
    words,
)
from pipeline.bench.workload import Conversations, FilePrompts, RandomTokens, TextPrompts, Workload
from pipeline.errors import WorkloadInvalid
from pipeline.files import read_limited
from pipeline.model import Frozen, sha256_of

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
    inputs = [load.input or workload.input for load in workload.loads]
    is_varied = len(set(inputs)) > 1
    for load, given in zip(workload.loads, inputs, strict=True):
        # more streams than requests are never open at a time
        streams = load.concurrency and min(load.concurrency, load.requests)
        name = f"c{streams}" if load.rate_per_s is None else f"r{load.rate_per_s:g}"
        if is_varied and given:
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


def sessions(job: Job) -> Iterator[Session]:
    """The share of one worker, in order; a session is one request, or a conversation."""
    cell, prompts = job.cell, job.workload.prompts
    due: Sequence[float] = ()
    if cell.rate_per_s is not None and job.phase == "trial":
        key = f"{job.workload.seed} {cell.name} {job.trial} arrivals"
        due = arrivals(cell.rate_per_s, job.requests, cell.arrivals, key)
    texts = _read_file(job, prompts) if isinstance(prompts, FilePrompts) else []
    for number in range(job.worker, job.requests, job.workers):
        # without the nonce: runs of one workload ask for the same lengths with the same words
        key = f"{job.workload.seed} {cell.name} {job.phase} {job.trial} {number}"
        if isinstance(prompts, Conversations):
            session = _conversation(job, prompts, number, key)
        else:
            assert cell.output is not None
            output = draw(cell.output, f"{key} output")
            length = None
            if isinstance(prompts, FilePrompts):
                # warm-ups may repeat prompts from the end of the file
                content: dict[str, Any] = {"messages": texts[number % len(texts)]}
            else:
                assert cell.input is not None
                length = draw(cell.input, f"{key} input")
                if isinstance(prompts, RandomTokens):
                    content = {"prompt": random_ids(prompts, key, length)}
                else:
                    text = _text(job, prompts, number, key, length)
                    content = {"messages": [{"role": "user", "content": text}]}
            session = [Planned(number, length, output, _body(job, output, content))]
        if due:
            session[0].due_s = due[number]
        yield session


def _read_file(job: Job, prompts: FilePrompts) -> list[list[dict[str, Any]]]:
    path = Path(job.prompt_file or prompts.path)
    data = read_limited(path, _MOST_FILE_BYTES, WorkloadInvalid)
    if prompts.digest and sha256_of(data) != prompts.digest:
        raise WorkloadInvalid(f"{path}: is {sha256_of(data)}, the workload names {prompts.digest}")
    texts = read_prompts(data, path.name)
    if len(texts) < job.requests and job.phase == "trial":
        # a prompt that is asked twice is answered from a cache
        count = log.count(len(texts), "prompt")
        raise WorkloadInvalid(f"{path}: has {count}, {job.requests} are needed")
    return texts


def _text(job: Job, prompts: TextPrompts, number: int, key: str, length: int) -> str:
    nonce, seed, scale = job.nonce, job.workload.seed, job.scale
    if not prompts.unique:
        key, nonce = f"{seed} {job.cell.name}", ""
    common = min(prompts.prefix_tokens, max(0, length - round(scale.overhead)))
    prefix = ""
    if common:
        group = f"{seed} {job.nonce} prefix {number % prompts.prefix_groups}"
        prefix = words(group, max(1, round(common / scale.per_word))) + "\n\n"
    return unique_text(key, scale.words(length - common), prefix, nonce)


def _conversation(job: Job, prompts: Conversations, number: int, key: str) -> Session:
    session: Session = []
    turns = prompts.each_turn()
    for index, turn in enumerate(turns):
        of_turn = f"{key} turn {index}"
        output = draw(turn.output, f"{of_turn} output")
        length = draw(turn.input, f"{of_turn} input")
        messages = []
        if index == 0 and prompts.system_tokens:
            own = "" if prompts.shared_system else of_turn
            system = words(
                f"{job.workload.seed} {job.nonce} system {own}",
                max(1, round(prompts.system_tokens / job.scale.per_word)),
            )
            messages.append({"role": "system", "content": system})
        text = unique_text(of_turn, max(1, round(length / job.scale.per_word)), nonce=job.nonce)
        messages.append({"role": turn.role if index else "user", "content": text})
        session.append(
            Planned(
                number=number * len(turns) + index,
                asked_input=None,  # it carries what the server answered before
                asked_output=output,
                body=_body(job, output, {}),
                messages=tuple(json.dumps(each, ensure_ascii=False).encode() for each in messages),
                conversation=number,
                turn=index,
                think_s=turn.think_s if index else 0.0,
                tool_call=f"call_{number}_{index}" if turn.role == "tool" and index else "",
            )
        )
    return session


def _body(job: Job, output: int, content: dict[str, Any]) -> bytes:
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
