"""A process that sends its share of the requests of a trial and times every answer.

`python -m pipeline.serving.bench.worker` reads a `WorkerJob` on stdin, gets ready, says so, waits
for the word to go, and writes a line for each request once the last is done: meanwhile it handles
nothing but requests. It ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice, pairwise, takewhile
from typing import Any

from pipeline.core import log
from pipeline.core.errors import PipelineError
from pipeline.core.net.route import tls_context
from pipeline.core.net.timing import retry_after_s
from pipeline.serving.bench.answer import (
    BenchAnswer,
    Connection,
    Failed,
    loops,
    open_connection,
    run_loop,
)
from pipeline.serving.bench.model import Failure, RequestRow
from pipeline.serving.bench.plan import Planned, Session, WorkerJob, assistant_message, sessions
from pipeline.serving.bench.trace import trace_sessions
from pipeline.serving.bench.workload import RandomTokens, TracePrompts

_RETRIED = (429, 503)
_WATCH_S = 0.1
_PROGRESS_S = 0.5
_POLL_S = 0.02  # whether all writers have begun
_PARALLEL_CONNECTS = 128
_MOST_WAIT_S = 30.0  # for a server that asks to come back later
_MESSAGE_CHARACTERS = 300
# Fields that a row has of the request as it was planned.
_OF_PLANNED = (
    *("number", "conversation", "turn", "part", "repeated_tokens", "asked_input", "asked_output"),
)
# After so many failures, or one a stream, the rest is not sent: the trial is void anyway.
_FEWEST_FAILURES = 32
_MOST_TOKENS = 1 << 40
# No server writes more events than tokens; a stream of so many would last for hours.
_MOST_EVENTS, _MORE_EVENTS = 4, 1000


@dataclass(slots=True)
class _Sent:
    """A request under way or done."""

    planned: Planned
    sent: float
    answer: BenchAnswer | None = None
    end: float | None = None
    retries: int = 0
    failure: Failure | None = None
    message: str = ""


@dataclass
class WorkerRun:
    """What one worker does in a trial."""

    job: WorkerJob
    origin: float = 0.0
    idle: list[Connection] = field(default_factory=list)
    busy: dict[Connection, int] = field(default_factory=dict)  # the tokens that it was asked for
    sent: list[_Sent] = field(default_factory=list)
    failures: int = 0
    done: int = 0
    events: int = 0
    unsent: int = 0
    behind_s: float = 0.0  # the longest that this process was late
    keeps_connections: bool = True  # as far as the server has not shown otherwise

    @property
    def given_up(self) -> bool:
        return self.failures >= max(_FEWEST_FAILURES, self.job.streams)

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings, read once: they hold all CAs of the machine."""
        return tls_context() if self.job.address.is_tls else None

    def rows(self) -> Iterator[RequestRow]:
        """Every request that was sent, as the run keeps it."""
        for sent in self.sent:
            planned, answer = sent.planned, sent.answer or BenchAnswer()
            # rounded from the first on, so that the gaps add up to the whole
            micros = [round((t - answer.times[0]) * 1e6) for t in answer.times]
            moments = {
                "first_byte_s": answer.first_byte,
                "first_token_s": answer.times[0] if micros else None,
                "end_s": sent.end,
            }
            usage = answer.usage or {}
            prompt, output = (usage.get(f"{n}_tokens_details") for n in ("prompt", "completion"))
            own = {name: getattr(planned, name) for name in _OF_PLANNED}
            own |= {
                n: None if at is None else round(at - sent.sent, 6) for n, at in moments.items()
            }
            yield RequestRow(
                **own,
                worker=self.job.worker,
                planned_s=None if planned.due_s is None else round(planned.due_s, 6),
                sent_s=round(sent.sent - self.origin, 6),
                gaps_us=[b - a for a, b in pairwise(micros)],
                chunks=len(micros),
                input_tokens=_count(usage, "prompt_tokens"),
                cached_tokens=_count(prompt, "cached_tokens"),
                output_tokens=_count(usage, "completion_tokens"),
                reasoning_tokens=_count(output, "reasoning_tokens"),
                characters=answer.characters,
                finish=answer.finish,
                status=answer.status,
                retries=sent.retries,
                failure=sent.failure,
                message=sent.message,
                looping=bool(loops(answer.text)),
            )

    async def run(self, todo: Iterator[Session]) -> None:
        """Send everything, and wait for the last answer."""
        watch = asyncio.ensure_future(self._watch())
        gate = asyncio.Semaphore(self.job.streams)
        tasks: set[asyncio.Task[None]] = set()
        reads = self.job.cell.reads if self.job.phase == "trial" else None
        to_read = list(islice(todo, reads.times)) if reads else []
        is_reading, fewest = reads is not None, len(to_read) + self.job.requests
        if reads:
            # writers go on until the last read is over
            todo = takewhile(lambda each: is_reading or each[0].number < fewest, todo)

        async def stream(number: int) -> None:
            """One session after the other."""
            if self.job.ramp_s:
                await asyncio.sleep(self.job.ramp_s * number / self.job.streams)
            while not self.given_up and (session := next(todo, None)) is not None:
                await self._session(session)

        async def read(pause_s: float) -> None:
            """Each read once all writers have decoded alone for a while."""
            nonlocal is_reading
            # one that answers at once never has all of them under way
            while self.done < self.job.requests and not self.given_up:
                if sum(bool(c.answer.times) for c in self.busy) >= self.job.streams:
                    break
                await asyncio.sleep(_POLL_S)
            while to_read and not self.given_up:
                await asyncio.sleep(pause_s)
                await self._session(to_read.pop(0))
            is_reading = False

        async def bounded(session: Session) -> None:
            async with gate:
                await self._session(session)

        try:
            is_timed = self.job.cell.rate_per_s is not None
            if isinstance(prompts := self.job.workload.prompts, TracePrompts):
                is_timed = prompts.timing == "timestamps"
            if not is_timed or self.job.phase != "trial":
                readers = [read(reads.pause_s)] if reads else []
                writers = (stream(number) for number in range(self.job.streams))
                await asyncio.gather(*readers, *writers)
            else:
                # with a rate: each when it is due, up to the cell's own bound at a time
                for session in todo:
                    if self.given_up:
                        self.unsent += len(session)
                        break
                    await asyncio.sleep(self.origin + (session[0].due_s or 0.0) - time.monotonic())
                    task = asyncio.ensure_future(bounded(session))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.gather(*tasks)
        finally:
            watch.cancel()
        self.unsent += sum(len(session) for session in chain(to_read, todo))

    async def _session(self, session: Session) -> None:
        messages: list[bytes] = []
        for index, planned in enumerate(session):
            if planned.think_s:
                await asyncio.sleep(planned.think_s)
            body, is_talk = planned.body, bool(planned.messages)
            if is_talk:
                # all messages so far, which are encoded already
                messages += planned.messages
                body = body[:-1] + b', "messages": [' + b", ".join(messages) + b"]}"
            sent = await self.request(planned, body, keep_all=is_talk)
            if sent.failure or sent.answer is None:
                # the rest of a conversation has nothing to go on with
                self.unsent += len(session) - index - 1
                return
            if index + 1 < len(session):
                messages.append(assistant_message(session[index + 1], sent.answer.text))

    async def request(self, planned: Planned, body: bytes, *, keep_all: bool = False) -> _Sent:
        """One request with all of its attempts; it never fails, but keeps why it did."""
        sent, job = _Sent(planned, time.monotonic()), self.job
        self.sent.append(sent)
        # only completions take token ids
        is_ids = isinstance(job.workload.prompts, RandomTokens)
        path = "/v1/completions" if is_ids else "/v1/chat/completions"
        lines = [
            f"POST {job.address.base}{path} HTTP/1.1",
            f"Host: {job.address.netloc}",
            "User-Agent: sm120-bench",
            "Accept: text/event-stream",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in job.headers.items()),
        ]
        whole = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
        planned.body, planned.messages = b"", ()  # a row does not keep long prompts
        try:
            answer = await self._attempts(sent, whole, keep_all)
            if answer.status != 200:
                raise Failed("refused", f"status {answer.status}: {' '.join(answer.error.split())}")
            if answer.error:
                raise Failed("refused", f"the stream says: {answer.error}")
            if not answer.done and not answer.finish:
                raise Failed("lost", "the stream ended without [DONE]")
            if not answer.times:
                raise Failed("empty", "the answer has no text")
            # a proxy may end a stream that its engine did not: no reason, and too few tokens
            tokens = max(len(answer.times), _count(answer.usage, "completion_tokens") or 0)
            if not answer.finish and tokens < planned.asked_output:
                after = f"{tokens} of {planned.asked_output} tokens"
                raise Failed("lost", f"the stream ended after {after} without a reason")
        except Failed as error:
            # before it is cut: a server may repeat the key, which is in no worker's environment
            keys = [value.removeprefix("Bearer ") for value in job.headers.values()]
            sent.failure = error.kind
            sent.message = log.redacted(error.message, more=keys)[:_MESSAGE_CHARACTERS]
            self.failures += 1
        sent.end = sent.end or time.monotonic()
        self.done += 1
        self.events += len(sent.answer.times) if sent.answer else 0
        return sent

    async def _attempts(self, sent: _Sent, request: bytes, keep_all: bool) -> BenchAnswer:
        limits = self.job.workload.limits
        while True:
            connection = None
            while self.idle and connection is None:
                idle = self.idle.pop()
                # asyncio first reads what came after the last answer, which ends the connection:
                # the next request must not take a surplus answer for its own
                await asyncio.sleep(0)
                connection = idle if idle.is_open else None
            if connection is None:
                connection = await open_connection(self.job.address, self.tls, limits.connect_s)
            was_used = connection.used
            waiter = connection.send(request, keep_all=keep_all)
            if not sent.retries:
                # of the first attempt: a refused request waits, too
                sent.sent = connection.sent
            answer = sent.answer = connection.answer
            self.busy[connection] = sent.planned.asked_output
            try:
                await waiter
            except Failed as error:
                # a server may close an idle connection just when it is used again: it saw
                # nothing of the request, so that another attempt is the first
                if was_used and error.kind == "lost" and not answer.status:
                    self.keeps_connections = False
                    continue
                raise
            finally:
                self.busy.pop(connection, None)
            sent.end = connection.last_byte
            if connection.is_open and self.keeps_connections:
                self.idle.append(connection)
            else:
                connection.close()
            if answer.status not in _RETRIED or sent.retries >= limits.retries:
                return answer
            sent.retries += 1
            # waits as long as the server asks; else a little longer each time
            asked_s = retry_after_s(answer.headers.get("retry-after", ""))
            wait_s = 0.25 * 2**sent.retries if asked_s is None else asked_s
            await asyncio.sleep(min(wait_s, _MOST_WAIT_S))

    async def _watch(self) -> None:
        """Give up what takes too long, and report the progress."""
        limits, reported = self.job.workload.limits, 0.0
        while True:
            due = time.monotonic() + _WATCH_S
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            self.behind_s = max(self.behind_s, now - due)
            for connection, asked in list(self.busy.items()):
                if not connection.is_waiting:
                    continue
                events = len(connection.answer.times)
                begun = events > 0
                if events > _MOST_EVENTS * asked + _MORE_EVENTS:
                    connection.fail("malformed", f"no end: {events} events for {asked} tokens")
                elif now - connection.sent > limits.request_s:
                    connection.fail("stalled", f"no whole answer within {limits.request_s:g} s")
                elif not begun and now - connection.sent > limits.first_token_s:
                    connection.fail("stalled", f"no token within {limits.first_token_s:g} s")
                elif begun and now - connection.answer.times[-1] > limits.stall_s:
                    # comments and empty events are no progress
                    connection.fail("stalled", f"no text came for {limits.stall_s:g} s")
            if now - reported >= _PROGRESS_S:
                reported = now
                under_way = sum(len(c.answer.times) for c in self.busy)
                _say(progress=[self.done, self.failures, self.events + under_way])


def _count(table: Any, name: str) -> int | None:
    """A count that a server gave; none if it is no count."""
    value = table.get(name) if isinstance(table, dict) else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < _MOST_TOKENS else None


def _say(**message: Any) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


async def prepared(job: WorkerJob) -> tuple[WorkerRun, Iterator[Session]]:
    """Prepares all but the requests themselves: makes prompts and opens connections."""
    # beside reads there is no last writer: those beyond the fewest are made as they are needed
    is_trace = isinstance(job.workload.prompts, TracePrompts)
    todo = trace_sessions(job) if is_trace else sessions(job)
    share, reads = WorkerRun(job), job.cell.reads
    fewest = job.requests + reads.times if reads else None
    todo = chain(list(islice(todo, fewest)), todo)
    limit_s, left = job.workload.limits.connect_s, job.streams + bool(reads)
    # as many as will be needed at a time, before the clock runs
    while left > 0:
        opening = [
            open_connection(job.address, share.tls, limit_s)
            for _ in range(min(left, _PARALLEL_CONNECTS))
        ]
        for each in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(each, Connection):
                share.idle.append(each)
            elif not isinstance(each, Failed):
                raise each
        # a request that finds no connection tries again, and names what is wrong
        left -= len(opening)
    return share, todo


async def _work(job: WorkerJob) -> None:
    share, todo = await prepared(job)
    _say(ready=True)
    line = await asyncio.to_thread(sys.stdin.buffer.readline)
    share.origin = json.loads(line)["start_at"]

    def end_with_stdin() -> None:
        """Ends with stdin: the parent is gone, or wants us to stop."""
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    # a collection in mid-trial would stop all streams for its time
    gc.freeze()
    gc.disable()
    await asyncio.sleep(share.origin - time.monotonic())
    before, begun = time.process_time(), time.monotonic()
    await share.run(todo)
    cpu, wall = time.process_time() - before, time.monotonic() - begun
    for row in share.rows():
        _say(row=row.model_dump(mode="json", exclude_defaults=True))
    _say(end={"cpu_s": cpu, "wall_s": wall, "behind_s": share.behind_s, "unsent": share.unsent})


if __name__ == "__main__":
    try:
        run_loop(_work(WorkerJob.model_validate_json(sys.stdin.buffer.readline())))
    except PipelineError as error:
        _say(error=[type(error).__name__, str(error), error.hint])
    # the thread that waits for the end of stdin holds its lock
    os._exit(0)
