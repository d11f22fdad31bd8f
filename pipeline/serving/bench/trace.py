"""Traces of agents: requests by the hashes of their KV blocks, without text.

Two forms are read, a line of JSON each. Mooncake: a request with `timestamp` (ms), `input_length`,
`output_length` and `hash_ids`, and where known `session_id` and `delay` (ms since the answer
before): github.com/kvcache-ai/Mooncake, docs.rs/dynamo-data-gen. Weka: a session with its
`requests`, as InferenceX publishes them: huggingface.co/datasets/semianalysisai.

The same hash is replayed as the same words, so that the same beginning of a prompt is the same
tokens, and a cache finds what it found when the trace was made.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from pipeline.core import log
from pipeline.core.errors import WorkloadInvalid
from pipeline.core.files import atomic_file, os_errors_explained, sha256_of_file
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Frozen
from pipeline.core.yaml_file import mistakes
from pipeline.serving.bench.plan import TASK, Planned, Session, WorkerJob, completion_body, words
from pipeline.serving.bench.workload import Tokens, TracePrompts

_MOST_LINE_BYTES, _MOST_REQUESTS = 64 << 20, 1_000_000
Hash = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Moment = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class _MooncakeRow(Frozen):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Hash]
    session_id: str | int | None = None
    delay: Milliseconds | None = None


class _WekaRequest(Frozen):
    t: Moment
    type: Literal["n", "s"]
    input: Tokens = Field(alias="in")
    output: Tokens = Field(alias="out")
    hash_ids: list[Hash]
    api_time: Moment | None = None
    think_time: Moment | None = None
    # what is known of them beside, and is not replayed
    model: Any = None
    ttft: Any = None
    stop: Any = None
    input_types: Any = None
    output_types: Any = None


class _WekaAgent(Frozen):
    t: Moment
    type: Literal["subagent"]
    requests: list[_WekaRequest]
    agent_id: Any = None
    subagent_type: Any = None
    duration_ms: Any = None
    total_tokens: Any = None
    tool_use_count: Any = None
    status: Any = None
    models: Any = None
    tool_tokens: Any = None
    system_tokens: Any = None


class _WekaSession(Frozen):
    id: str
    block_size: Tokens
    hash_id_scope: Literal["local", "global"] = "local"
    requests: list[_WekaRequest | _WekaAgent]
    models: Any = None
    tool_tokens: Any = None
    system_tokens: Any = None


class TraceRequest(NamedTuple):
    """One request of a session, as far as a trace tells it."""

    at_s: float
    think_s: float | None  # since the answer before it; none: not known, and for the first
    input: int
    output: int
    blocks: tuple[str, ...]
    block_tokens: int
    line: int


def read_trace(path: Path, prompts: TracePrompts) -> list[list[TraceRequest]]:
    """Reads a trace's sessions in the order of their first requests; refuses impossible ones."""
    if not path.is_file():
        hint = "`path` of the workload's `prompts` begins at the folder of the workload's file."
        raise WorkloadInvalid(f"{path}: is not there", hint)
    if prompts.digest and (got := sha256_of_file(path)) != prompts.digest:
        raise WorkloadInvalid(f"{path}: is {got}, the workload names {prompts.digest}")
    found: dict[str, list[TraceRequest]] = {}
    before: dict[str, tuple[str, int]] = {}  # of each hash: which one it follows, and where
    latest, count = 0.0, 0

    def add(name: str, request: TraceRequest) -> None:
        nonlocal count
        count += 1
        size = request.block_tokens
        fitting = {request.input // size, -(-request.input // size)}
        if len(request.blocks) not in fitting:
            have = f"{log.count(len(request.blocks), 'hash', 'hashes')} for {request.input} tokens"
            where = "`block_tokens` of the workload, `block_size` of a Weka session"
            raise ValueError(f"{have}, of which {size} are a block ({where})")
        for last, block in pairwise(("", *request.blocks)):
            known, line = before.setdefault(block, (last, request.line))
            if known != last:
                # a hash stands for its block and for all before it
                why = f"the hash {block} follows another one than in line {line}"
                raise ValueError(f"{why}: no cache could hold it")
        turns = found.setdefault(name, [])
        if turns and request.at_s < turns[-1].at_s:
            raise ValueError("the times of its session go back")
        if count > _MOST_REQUESTS:
            raise ValueError(f"more than {_MOST_REQUESTS:,} requests")
        turns.append(request)

    number = 0
    try:
        with os_errors_explained(path), path.open("rb") as file:
            while data := file.readline(_MOST_LINE_BYTES + 1):
                number += 1
                if len(data) > _MOST_LINE_BYTES:
                    raise ValueError(f"has no end within {_MOST_LINE_BYTES >> 20} MiB")
                value = read_json(data, most_bytes=_MOST_LINE_BYTES) if data.strip() else None
                if isinstance(value, dict) and "requests" in value:
                    session = _WekaSession.model_validate(value)
                    scope = f"{number} " if session.hash_id_scope == "local" else ""
                    # a subagent is a session of its own, with the hashes of the whole
                    agents = [r for r in session.requests if isinstance(r, _WekaAgent)]
                    own = [r for r in session.requests if isinstance(r, _WekaRequest)]
                    if session.id in found:
                        raise ValueError(f"the session {session.id!r} is there twice")
                    parts = [(session.id, own)]
                    parts += [(f"{session.id} agent {n}", a.requests) for n, a in enumerate(agents)]
                    for name, requests in parts:
                        end_s = None
                        for r in requests:
                            think = r.think_time
                            if think is None and end_s is not None:
                                think = max(0.0, r.t - end_s)
                            end_s = None if r.api_time is None else r.t + r.api_time
                            ids = tuple(f"{scope}{each}" for each in r.hash_ids)
                            size = session.block_size
                            add(
                                name, TraceRequest(r.t, think, r.input, r.output, ids, size, number)
                            )
                elif value is not None:
                    row = _MooncakeRow.model_validate(value)
                    at_s, ids = row.timestamp / 1e3, tuple(str(each) for each in row.hash_ids)
                    if at_s < latest:
                        raise ValueError("its time is before that of the line before")
                    latest = at_s
                    think = None if row.delay is None else row.delay / 1e3
                    name = f"request {number}" if row.session_id is None else str(row.session_id)
                    lengths = row.input_length, row.output_length
                    add(
                        name, TraceRequest(at_s, think, *lengths, ids, prompts.block_tokens, number)
                    )
    except ValidationError as error:
        raise WorkloadInvalid(f"{path.name}, line {number}: {mistakes(error)}") from error
    except (JsonInvalid, ValueError) as error:
        raise WorkloadInvalid(f"{path.name}, line {number}: {error}") from error
    sessions = sorted((turns for turns in found.values() if turns), key=lambda t: t[0].at_s)
    if not sessions:
        raise WorkloadInvalid(f"{path}: has no requests")
    return sessions


def replayed_sessions(
    path: Path, prompts: TracePrompts, least: int = 0
) -> list[list[TraceRequest]]:
    """Reads the sessions of a trace as the workload takes them; refuses too few."""
    every = read_trace(path, prompts)
    if most := prompts.most_input:
        # what does not fit into a context ends its session, as it would end the agent's
        fitting = (
            [r for n, r in enumerate(s) if all(x.input <= most for x in s[: n + 1])] for s in every
        )
        every = [session for session in fitting if session]
    if len(every) < least:
        raise WorkloadInvalid(
            f"{prompts.path}: has {log.count(len(every), 'session')}, {least} are asked for",
            "`requests` of the workload's `loads`, or --requests, says how many.",
        )
    return every


def trace_sessions(job: WorkerJob) -> Iterator[Session]:
    """One worker's share of a replayed trace."""
    prompts = job.workload.prompts
    assert isinstance(prompts, TracePrompts)
    least = job.requests if job.phase == "trial" else 0
    every = replayed_sessions(Path(job.prompt_file or prompts.path), prompts, least)
    chosen = every[: job.requests]
    # what a cache without limits would hold: blocks of requests that began before
    known: set[str] = set()
    repeated: dict[int, int] = {}
    for request in sorted((r for s in chosen for r in s), key=lambda r: r.at_s):
        hits = next(
            (n for n, b in enumerate(request.blocks) if b not in known), len(request.blocks)
        )
        repeated[id(request)] = min(hits * request.block_tokens, request.input)
        known.update(request.blocks)
    texts: dict[tuple[str, int], str] = {}
    # other words in each trial: a server that is still running knows those of the last trial
    key = f"{job.workload.seed} {job.nonce} {job.phase} {job.trial} block"
    head = f"[{hashlib.sha256(key.encode()).hexdigest()[:12]}]"
    first_s, total = chosen[0][0].at_s, 0
    for number, session in enumerate(chosen):
        begin, total = total, total + len(session)
        if number % job.workers != job.worker:
            continue
        planned = []
        for turn, request in enumerate(session if job.phase == "trial" else session[:1]):
            left, parts = job.scale.words(request.input), []
            for block in request.blocks:
                size = min(left, max(1, round(request.block_tokens / job.scale.per_word)))
                if (block, size) not in texts:
                    texts[block, size] = words(f"{key} {block}", size)
                parts.append(texts[block, size])
                left -= size
            # where the last block is not whole and has no hash
            parts.append(words(f"{key} {number} {turn} rest", max(0, left)))
            text = " ".join(part for part in (head, *parts) if part) + TASK
            think = request.think_s
            if think is None and turn:
                think = request.at_s - session[turn - 1].at_s
            content = {"messages": [{"role": "user", "content": text}]}
            planned.append(
                Planned(
                    number=begin + turn,
                    asked_input=request.input,
                    asked_output=request.output,
                    body=completion_body(job, request.output, content),
                    conversation=number,
                    turn=turn,
                    think_s=min(think or 0.0, prompts.most_think_s) if turn else 0.0,
                    repeated_tokens=repeated[id(request)],
                )
            )
        if prompts.timing == "timestamps" and job.phase == "trial":
            planned[0].due_s = session[0].at_s - first_s
        yield planned


# vLLM (VLLM_LOGGING_LEVEL=DEBUG, --enable-log-requests, --enable-log-outputs) and SGLang
# (--log-requests --log-requests-level 3), by the lines of their own loggers:
# vllm/entrypoints/logger.py and sglang/srt/utils/request_logger.py
_STAMP = re.compile(rb"(?:(\d{4})-)?(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_ASKED = re.compile(rb"(?:Received request|Request) (\S+?)(?:: prompt:| details: prompt:)")
_RECEIVED = re.compile(rb"Receive: obj=\w*GenerateReqInput\(.{0,200}?rid='([^']{1,200})'")
_ANSWERED = re.compile(rb"Generated response (\S+?)( \(streaming (?:delta|complete)\))?: output:")
_FINISHED = re.compile(rb"Finish: obj=\w*GenerateReqInput\(.{0,200}?rid='([^']{1,200})'")
_COMPLETED = re.compile(rb"'completion_tokens': (\d{1,9})")
_IDS = re.compile(rb"\[([\d, ]*)\]")


class RecordedTrace(NamedTuple):
    """What a recorder wrote."""

    requests: int
    sessions: int
    unfinished: int  # requests without an answer in the log, which are left out
    block_tokens: int


class _Logged:
    """A request as an engine logged it."""

    def __init__(self, at_s: float, ids: list[int]) -> None:
        self.at_s, self.ids, self.output, self.end_s = at_s, ids, 0, 0.0


def record_trace(source: Path, out: Path, block_tokens: int) -> RecordedTrace:
    """A trace from an engine's own log: numbers in place of blocks, and no word of any prompt."""
    asked: dict[bytes, _Logged] = {}
    number = 0
    with os_errors_explained(source), source.open("rb") as file:
        while data := file.readline(_MOST_LINE_BYTES + 1):
            number += 1
            head = _ASKED.search(data) or _RECEIVED.search(data)
            end = None if head else _ANSWERED.search(data) or _FINISHED.search(data)
            stamp = _STAMP.search(data[:200]) if head or end else None
            if stamp is None:
                continue
            if len(data) > _MOST_LINE_BYTES:
                raise WorkloadInvalid(f"{source.name}, line {number}: has no end")
            # vLLM writes no year
            whole = [int(each or 2000) for each in stamp.groups()[:6]]
            at_s = datetime(*whole, tzinfo=UTC).timestamp()  # type: ignore[arg-type, misc]
            at_s += float(b"0." + (stamp[7] or b"0"))
            # the last on the line: a prompt may hold the same words
            place = max(data.rfind(each) for each in (b"token_ids: ", b"input_ids="))
            ids = _IDS.match(data, data.index(b"[", place)) if b"[" in data[place:] else None
            if head:
                if ids is None or place < 0:
                    raise WorkloadInvalid(
                        f"{source.name}, line {number}: the tokens of the prompt are not whole",
                        "vLLM: no --max-log-len; SGLang: --log-requests-level 3.",
                    )
                asked[head[1]] = _Logged(at_s, [int(each) for each in ids[1].split(b",") if each])
            elif end and (request := asked.get(end[1])):
                request.end_s = at_s
                counted = _COMPLETED.search(data)
                if counted:
                    request.output = int(counted[1])
                elif ids and place >= 0 and b"complete" not in (end[2] or b""):
                    # a stream is logged piece by piece
                    request.output += len([each for each in ids[1].split(b",") if each.strip()])
    done = sorted((r for r in asked.values() if r.output and r.ids), key=lambda r: r.at_s)
    if not done:
        raise WorkloadInvalid(
            f"{source}: has no request with the tokens of its prompt and of its answer",
            "vLLM: VLLM_LOGGING_LEVEL=DEBUG --enable-log-requests --enable-log-outputs;"
            " SGLang: --log-requests --log-requests-level 3.",
        )
    salt, numbers, begun = secrets.token_bytes(16), dict[bytes, int](), 0
    tips: dict[bytes, tuple[int, float]] = {}  # the last whole block of a session, and its end
    with atomic_file(out) as file:
        for request in done:
            chain, blocks, session, end_s, tip = salt, list[int](), None, 0.0, b""
            for at in range(0, len(request.ids), block_tokens):
                part = request.ids[at : at + block_tokens]
                chain = hashlib.sha256(chain + repr(part).encode()).digest()
                blocks.append(numbers.setdefault(chain, len(numbers)))
                if chain in tips:
                    # it begins with all of an earlier one: the next turn of its session
                    session, end_s = tips.pop(chain)
                tip = chain if len(part) == block_tokens else tip
            if session is None:
                session, begun = begun, begun + 1
            row: dict[str, Any] = {
                "session_id": session,
                "timestamp": round((request.at_s - done[0].at_s) * 1e3, 3),
                "input_length": len(request.ids),
                "output_length": request.output,
                "hash_ids": blocks,
            }
            if end_s and request.at_s >= end_s:
                row["delay"] = round((request.at_s - end_s) * 1e3, 3)
            if tip:
                tips[tip] = session, request.end_s
            file.write(json.dumps(row).encode() + b"\n")
    # what cannot be read back is no trace
    prompts = TracePrompts(kind="trace", path=out.name, block_tokens=block_tokens)
    sessions = read_trace(out, prompts)
    return RecordedTrace(len(done), len(sessions), len(asked) - len(done), block_tokens)
