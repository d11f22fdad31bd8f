"""Chat answers: one value, whether they came whole or in a stream."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from pipeline.core.model import ForeignModel
from pipeline.serving.smoke.client import ChatClient, Unsound, error_in
from pipeline.serving.smoke.model import Exchange

CHAT = "/v1/chat/completions"
_MOST_CERTAIN = 2.0  # sum of probabilities: more than rounding makes of 1


class _Function(ForeignModel):
    name: str | None = None
    arguments: str | None = None


class _Call(ForeignModel):
    index: int | None = None  # SGLang writes null in whole answers
    id: str | None = None
    function: _Function = _Function()


class _Message(ForeignModel):
    """A whole message, or what a chunk adds to one."""

    role: str | None = None
    content: str | None = None
    # vLLM renamed it; SGLang and llama.cpp have the longer name
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class _Top(ForeignModel):
    token: str
    logprob: float


class GivenToken(_Top):
    """A token as servers write it in chats."""

    top_logprobs: list[_Top] = []

    @property
    def token_value(self) -> Token:
        """The token as checks compare it."""
        top = tuple((other.token, other.logprob) for other in self.top_logprobs)
        return Token(self.token, self.logprob, top)


class _Logprobs(ForeignModel):
    content: list[GivenToken] | None = None


class _Choice(ForeignModel):
    index: int | None = None
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _PromptDetails(ForeignModel):
    cached_tokens: int | None = None


class Usage(ForeignModel):
    """The server's own count of tokens."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were kept from earlier ones; none: the server does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Completion(ForeignModel):
    id: str | int | None = None
    model: str = ""
    choices: list[_Choice] = Field(default=[])
    usage: Usage | None = None


@dataclass(frozen=True)
class Token:
    """A token that was chosen, and those that could have been."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; the arguments as the server wrote them."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatAnswer:
    """What a server answered."""

    content: str | None
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish: str | None
    model: str
    usage: Usage | None
    tokens: tuple[Token, ...]
    exchange: Exchange
    first_token_s: float
    is_stream: bool
    ids: frozenset[str] = frozenset()  # of the answer; a stream repeats it in every chunk

    @property
    def text(self) -> str:
        """The part that a person reads."""
        return self.content or ""

    @property
    def prompt_tokens(self) -> int:
        """The server's own count, which a whole answer must have."""
        if self.usage is None:
            raise Unsound("the answer has no usage")
        return self.usage.prompt_tokens

    @property
    def is_empty(self) -> bool:
        return not (self.text.strip() or self.reasoning.strip() or self.calls)

    @property
    def is_cut(self) -> bool:
        return self.finish == "length"


async def ask_chat(
    client: ChatClient, model: str, messages: Sequence[Mapping[str, Any]], **options: Any
) -> ChatAnswer:
    """Asks for one chat answer; `stream=True` joins it from its chunks."""
    is_stream = options.pop("stream", False)
    body = {"model": model, "messages": list(messages), **options}
    if is_stream:
        body |= {"stream": True}
        exchange, events = await client.stream(CHAT, body)
        return _joined(exchange, [(at, _completion(value)) for at, value in events], is_stream)
    exchange, value = await client.post(CHAT, body)
    whole = _completion(value)
    if not whole.choices or (message := whole.choices[0].message) is None:
        raise Unsound("the answer has no message")
    if message.role not in (None, "assistant"):
        raise Unsound(f"the answer is a message of {message.role!r}")
    return _joined(exchange, [(exchange.seconds, whole)], is_stream)


async def ask_choices(
    client: ChatClient, model: str, prompt: str, number: int, **options: Any
) -> dict[int, str]:
    """Asks for so many answers to one prompt in one request, by index, whole or in a stream."""
    messages, is_stream = [{"role": "user", "content": prompt}], options.get("stream")
    body = {"model": model, "messages": messages, "n": number, **options}
    texts: dict[int, str] = {}
    if is_stream:
        values = [value for _, value in (await client.stream(CHAT, body))[1]]
    else:
        values = [(await client.post(CHAT, body))[1]]
    for choice in (choice for value in values for choice in _completion(value).choices):
        part = (choice.delta if is_stream else choice.message) or _Message()
        if not is_stream and (choice.index or 0) in texts:
            raise Unsound(f"two choices have the index {choice.index}")
        before = texts.get(choice.index or 0, "")
        texts[choice.index or 0] = before + part.thought + (part.content or "")
    return texts


def _completion(value: Any) -> _Completion:
    # some servers report a failure in mid-stream as an event, or with status 200
    if words := error_in(value):
        raise Unsound(f"the answer holds an error: {words}")
    try:
        return _Completion.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise Unsound(f"{place}: {first['msg']}") from error


def _joined(
    exchange: Exchange, chunks: Sequence[tuple[float, _Completion]], is_stream: bool
) -> ChatAnswer:
    """One answer from the chunks of a stream; a whole answer is a single chunk."""
    content: list[str | None] = []
    reasoning: list[str] = []
    tokens: list[Token] = []
    calls: dict[int, list[_Call]] = {}
    finish: str | None = None
    first: float | None = None
    for at, choice in ((at, choice) for at, chunk in chunks for choice in chunk.choices[:1]):
        part = (choice.delta if is_stream else choice.message) or _Message()
        if finish and (part.content or part.thought or part.tool_calls):
            raise Unsound(f"a stream goes on after its finish_reason {finish!r}")
        content.append(part.content)
        reasoning.append(part.thought)
        for number, call in enumerate(part.tool_calls or []):
            if is_stream and call.index is not None:
                number = call.index
            elif is_stream:
                # a new id begins a new call
                is_known = not call.id or any(call.id == parts[0].id for parts in calls.values())
                number = max(calls) if calls and is_known else len(calls)
            calls.setdefault(number, []).append(call)
        if first is None and (content[-1] or reasoning[-1] or calls):
            first = at
        given = (choice.logprobs.content if choice.logprobs else None) or []
        tokens += [token.token_value for token in given]
        finish = choice.finish_reason or finish
    usages = [chunk.usage for _, chunk in chunks if chunk.usage]
    is_null = not is_stream and content == [None]
    return ChatAnswer(
        content=None if is_null else "".join(text or "" for text in content),
        reasoning="".join(reasoning),
        calls=tuple(
            ToolCall(
                id=next((p.id for p in parts if p.id), ""),
                name=next((p.function.name for p in parts if p.function.name), ""),
                arguments="".join(p.function.arguments or "" for p in parts),
            )
            for _, parts in sorted(calls.items())
        ),
        finish=finish,
        model=next((chunk.model for _, chunk in chunks if chunk.model), ""),
        usage=usages[-1] if usages else None,
        tokens=tuple(tokens),
        exchange=exchange,
        first_token_s=exchange.seconds if first is None else first,
        is_stream=is_stream,
        ids=frozenset(str(chunk.id) for _, chunk in chunks if chunk.id),
    )


def logprobs_fault(tokens: Sequence[Token]) -> str:
    """What is wrong with log probabilities, whatever the model; empty where nothing is."""
    for token in tokens:
        values = [token.logprob, *(p for _, p in token.top)]
        if not all(math.isfinite(p) and p <= 1e-3 for p in values):
            return f"the token {token.text!r} has a logprob that is no log of a probability"
        # some servers name the chosen one twice
        if math.fsum(math.exp(p) for _, p in set(token.top)) > _MOST_CERTAIN:
            return f"at {token.text!r} the probabilities of all tokens are more than 1"
        # greedy: what was chosen is the most probable
        if token.top and token.logprob < max(p for _, p in token.top) - 1e-3:
            return f"the token {token.text!r} was chosen, and another was more probable"
    if tokens and all(len({p for _, p in t.top}) == 1 < len(t.top) for t in tokens):
        return "every token is equally probable: the logits are constant"
    return ""


def tokens_fault(answer: ChatAnswer) -> str:
    """How tokens with logprobs differ from the text; empty if they do not."""

    def without_spaces(text: str) -> str:
        # sentencepiece writes a space as U+2581
        return "".join(text.replace("\u2581", "").split())

    # vLLM may name tokens by their numbers; tokens of one text may lose their spaces
    joined = without_spaces("".join(t.text for t in answer.tokens))
    if not joined or joined.startswith("token_id:"):
        return ""
    for part in (answer.reasoning, answer.text):
        if without_spaces(part) not in joined:
            return f"the answer is {part[:40]!r}, and its logprobs are those of {joined[:40]!r}"
    return ""
