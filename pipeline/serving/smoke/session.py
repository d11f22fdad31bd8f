"""One run of the ladder: the server, the plan, and what earlier rungs found out for later ones.

A baseline is the greedy answers of a trusted run in a file: the oracle for another machine or a
draft model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field, ValidationError

from pipeline.core.errors import InputInvalid
from pipeline.core.files import write_bytes
from pipeline.core.model import Frozen, canonical_json
from pipeline.serving.smoke.agent_endpoints import AgentAnswer
from pipeline.serving.smoke.chat import CHAT, ChatAnswer, Token, ask_chat
from pipeline.serving.smoke.client import ChatClient, NotOffered, RequestRefused, Unsound
from pipeline.serving.smoke.compare import (
    AnswerReference,
    TextDifference,
    compare_answers,
    corruption,
    parting,
    reference,
    tally,
    written_text,
)
from pipeline.serving.smoke.model import THINKING_TOKENS, Kind, SmokePlan
from pipeline.serving.smoke.tasks import SmokeQuestion, countings, sums, word_problems

# How the templates of Qwen, GLM, DeepSeek and Kimi name the same switch.
_THINKING = ("enable_thinking", "thinking")

_MOST_BYTES = 64 << 20  # of a baseline
_TRIES = 3

# A question of a user, or whole messages.
Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]


class BaselineAnswer(Frozen):
    """One prompt and its answer."""

    prompt: str
    text: str
    is_right: bool
    is_cut: bool = False  # earlier versions wrote no such field
    tokens: tuple[Token, ...]

    def reference(self) -> AnswerReference:
        """As checks compare it."""
        return AnswerReference(self.text, self.tokens, self.is_cut)


class Baseline(Frozen):
    """All answers of a trusted run."""

    model: str
    url: str
    # how many tokens an answer might have; earlier versions wrote no such field
    answer_tokens: Annotated[int, Field(ge=1)] | None = None
    answers: list[BaselineAnswer]


@dataclass
class SmokeSession:
    """What checks work with."""

    client: ChatClient
    plan: SmokePlan
    run_code: Callable[[str], str]  # prints of a program, run where it can reach nothing
    model: str = ""
    context_tokens: int | None = None
    has_logprobs: bool | None = None  # none: not asked yet
    sees: bool = False  # the server says that its model looks at pictures
    # of the filler and of what is around it, as this server counts them
    sentence_tokens: float = 0.0
    frame_tokens: float = 0.0
    # other names of the same model, which vLLM may answer with
    aliases: frozenset[str] = frozenset()
    thinks: bool = False  # the first answer had reasoning
    instant_thoughts: list[bool] = field(default_factory=list)  # of answers without thinking
    references: dict[str, AnswerReference] = field(default_factory=dict)
    # of a server that was started here; at an address alone neither can be done
    restart: Callable[[], Awaitable[None]] | None = None
    start_drafting: Callable[[], Awaitable[None]] | None = None
    why_no_restart: str = "a server at an address cannot be restarted from here"
    why_no_drafting: str = "a server at an address is served as it is: --baseline compares it"
    is_drafting: bool = False  # the ladder turned its draft model on
    # streams are asked for their usage, unless the server refused that
    counts_streams: bool = True
    ids: set[str] = field(default_factory=set)  # of all answers so far
    seconds_at_once: dict[int, float] = field(default_factory=dict)  # of so many streams, the best
    baseline: Baseline | None = None
    turns: list[AgentAnswer] = field(default_factory=list)  # of an agent's conversation
    soak_s: float = 0.0  # how long a soak works
    soak: Any = None  # what it saw
    # of a container on this machine: its memory, and the lines of its log
    memory_bytes: Callable[[], int | None] | None = None
    read_log: Callable[[], Iterable[str]] | None = None
    log_lines: int = 0  # that were written before the test

    async def ask(
        self, prompt: Prompt, client: ChatClient | None = None, **options: Any
    ) -> ChatAnswer:
        """A greedy answer; `thinking` turns reasoning on or off where the model has it.

        Requires of each what every answer must have: the model's name, an id of its own, and the
        usage that a stream was asked for.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body = {"temperature": 0, "max_tokens": self.answer_tokens, **options}
        thinking = body.pop("thinking", False)
        if self.plan.reasoning:
            body["chat_template_kwargs"] = dict.fromkeys(_THINKING, thinking)
        if body.get("stream") and self.counts_streams:
            body["stream_options"] = {"include_usage": True}
        answer = await ask_chat(client or self.client, self.model, messages, **body)
        if answer.model not in (self.model, *self.aliases):
            raise Unsound(f"asked {self.model!r}, and {answer.model!r} answered")
        if "stream_options" in body and answer.usage is None:
            raise Unsound("a stream was asked for its usage (stream_options), and has none")
        if answer.usage and answer.usage.completion_tokens > body["max_tokens"]:
            counts = f"{answer.usage.completion_tokens} tokens, of at most {body['max_tokens']}"
            raise Unsound(f"usage counts {counts}")
        if len(answer.ids) > 1:
            raise Unsound(f"the chunks of one stream have several ids: {sorted(answer.ids)[:3]}")
        if again := self.ids & answer.ids:
            raise Unsound(f"two answers have the id {min(again)!r}")
        self.ids |= answer.ids
        if not thinking:
            self.instant_thoughts.append(bool(answer.reasoning.strip()))
        return answer

    async def hang_up(self, prompt: str, after: int, client: ChatClient | None = None) -> None:
        """Ask for a stream, and leave after so many pieces of it, as users who press stop."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "stream": True,
        }
        await (client or self.client).hang_up(CHAT, body, after)

    @property
    def answer_tokens(self) -> int:
        """Room for an answer, and for the thinking before it; at most half of the context."""
        plan = self.plan
        is_unexpected = self.thinks and not plan.reasoning
        wanted = max(plan.answer_tokens, THINKING_TOKENS) if is_unexpected else plan.answer_tokens
        return min(wanted, (self.context_tokens or 2 * wanted) // 2)

    def room(self, tokens: int) -> int:
        """So many tokens for a short answer; room for a whole one where thinking comes first."""
        return max(tokens, self.answer_tokens) if self.plan.reasoning or self.thinks else tokens

    async def ask_known(self, prompt: str, **options: Any) -> ChatAnswer:
        """Asks the same with logprobs, if there are any, to compare other answers with it."""
        if self.has_logprobs is not False:
            try:
                answer = await self.ask(prompt, logprobs=True, top_logprobs=5, **options)
                self.has_logprobs = any(token.top for token in answer.tokens)
                return answer
            except RequestRefused as error:
                if not error.is_of_field or self.has_logprobs:
                    raise
                self.has_logprobs = False
        return await self.ask(prompt, **options)

    async def ask_all(
        self, prompts: Sequence[Prompt], at_once: int, **options: Any
    ) -> list[ChatAnswer | Unsound]:
        """Asks for many answers, so many at the same time; every second one as a stream."""
        places = asyncio.Semaphore(at_once)

        async def one(number: int, prompt: Prompt) -> ChatAnswer | Unsound:
            async with places:
                try:
                    return await self.ask(prompt, stream=number % 2 == 1, **options)
                except Unsound as error:
                    return error

        return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))

    async def ask_clean(
        self, prompts: Sequence[Prompt], at_once: int, **options: Any
    ) -> list[ChatAnswer]:
        """Asks the same; refuses an answer that fails, is empty or corrupted."""
        answers = answers_of(await self.ask_all(prompts, at_once, **options))
        for answer in answers:
            self.require_clean(answer)
        return answers

    def require_clean(self, answer: ChatAnswer, scripts: Sequence[str] = ("LATIN",)) -> None:
        """Refuse an empty answer and, of a model that can write, a corrupted one."""
        if answer.is_empty:
            raise Unsound("the answer is empty")
        if not self.plan.quality:
            return
        if why := corruption(answer.text, scripts, is_cut=answer.is_cut):
            raise Unsound(f"corrupted text: {why}: {answer.text[:80]!r}")

    def require_right(self, question: SmokeQuestion, text: str) -> None:
        """Refuse, of a model that can write, a wrong answer."""
        if self.plan.quality and (why := question.mistake(text)):
            raise Unsound(why)

    def require_same(self, base: AnswerReference, others: Sequence[ChatAnswer]) -> str:
        """Requires answers that differ no more than a sound server's may."""
        return self.require_close([compare_answers(base, o, self.plan.tolerance) for o in others])

    def require_close(self, differences: Sequence[TextDifference], what: str = "") -> str:
        """Counts differences; refuses more than a sound server may have."""
        found, why = tally(differences, self.plan.tolerance)
        if why:
            raise Unsound(what + why)
        return found

    async def reference_for(self, prompt: str, **options: Any) -> AnswerReference:
        """The answer to a prompt when nothing else runs; asked once."""
        if prompt not in self.references:
            answer = await self.ask_known(prompt, **options)
            self.require_clean(answer)
            self.references[prompt] = reference(answer)
        return self.references[prompt]


def answers_of(results: Sequence[ChatAnswer | Unsound]) -> list[ChatAnswer]:
    """Returns all answers; raises the first failure, with how many there were."""
    failed = [r for r in results if isinstance(r, Unsound)]
    if failed:
        raise Unsound(f"{len(failed)} of {len(results)} requests failed: {failed[0]}")
    return [r for r in results if isinstance(r, ChatAnswer)]


async def require_alike(ask: Callable[[bool], Awaitable[str]], where: str) -> None:
    """Requires one text whole and as a stream; asks again if they differ: a tie may part them."""
    texts: dict[bool, set[str]] = {False: set(), True: set()}
    for number in range(2 * _TRIES):
        is_stream = number % 2 == 1
        texts[is_stream].add(await ask(is_stream))
        if texts[False] & texts[True]:
            return
    parted = parting(min(texts[False]), min(texts[True]), ("whole", "in a stream"))
    raise Unsound(f"{where}: {parted}")


@contextmanager
def optional(what: str) -> Iterator[None]:
    """A field that a server need not know: one that refuses it does not offer it."""
    try:
        yield
    except RequestRefused as error:
        if error.is_of_field:
            raise NotOffered(f"{what}: {error}") from error
        raise


def baseline_questions() -> list[SmokeQuestion]:
    """What a trusted run is asked: long answers, small sums, problems of three steps."""
    return [*countings(6), *sums(12, seed=11), *word_problems(12, seed=12)]


def is_right(question: SmokeQuestion, text: str) -> bool:
    """A long answer holds all that is wanted; a short one ends with it."""
    return question.is_held(text) if "," in question.want else question.is_right(text)


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Writes a baseline: the same bytes for the same answers."""
    write_bytes(path, canonical_json(baseline.model_dump(mode="json")) + b"\n")


def read_baseline(path: Path) -> Baseline:
    """Reads a recorded run; an error names what is wrong with the file."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputInvalid(f"{path}: is larger than {_MOST_BYTES} bytes")
        return Baseline.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise InputInvalid(
            f"{path}: is no baseline: {why}", "Record one with `sm120 smoke URL --record FILE`."
        ) from error


async def record_baseline(session: SmokeSession, url: str) -> Baseline:
    """Ask one after the other, so that nothing depends on a batch."""
    answers = []
    for question in baseline_questions():
        answer = await session.ask_known(question.prompt)
        session.require_clean(answer)
        answers.append(
            BaselineAnswer(
                prompt=question.prompt,
                text=written_text(answer),
                is_right=is_right(question, answer.text),
                is_cut=answer.is_cut,
                tokens=answer.tokens,
            )
        )
    most = session.answer_tokens
    return Baseline(model=session.model, url=url, answer_tokens=most, answers=answers)


# A sentence for people; raises what it finds.
Run: TypeAlias = Callable[[SmokeSession], Awaitable[str]]


class CheckSpec(NamedTuple):
    """A check: what it is called, what it needs, and what it does."""

    name: str
    kind: Kind
    run: Run
    skip: Callable[[SmokeSession], str] = lambda _: ""  # why there is nothing to look at


@dataclass(frozen=True, eq=False)
class Rung:
    """A step of the ladder; its module adds the checks in the order in which they run."""

    name: str
    title: str
    parts: list[Callable[[SmokeSession], Sequence[CheckSpec]]] = field(default_factory=list)

    def checks(self, session: SmokeSession) -> list[CheckSpec]:
        """What follows from the plan, and from what the server said of itself."""
        return [spec for part in self.parts for spec in part(session)]

    def check(
        self,
        name: str,
        kind: Kind = "mechanics",
        skip: Callable[[SmokeSession], str] = lambda _: "",
    ) -> Callable[[Run], Run]:
        """Adds a function as a check."""

        def add(run: Run) -> Run:
            self.parts.append(lambda _: [CheckSpec(name, kind, run, skip)])
            return run

        return add
