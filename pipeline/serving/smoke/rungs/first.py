"""Rung 1: the server is there, names its model, and gives one answer, whole and as a stream."""

from __future__ import annotations

from typing import Any

from pipeline.core.foreign_json import value_at
from pipeline.serving.smoke.chat import ChatAnswer
from pipeline.serving.smoke.client import NotOffered, RequestRefused, Unsound
from pipeline.serving.smoke.compare import parting, written_text
from pipeline.serving.smoke.session import Rung, SmokeSession
from pipeline.serving.smoke.tasks import countings

FIRST = Rung("first-answer", "The server is there and answers")
_FIRST, _SHORT, _LONGER = 256, 4, 24  # tokens
_TRIES = 3
_FINISHES = ("stop", "length")


@FIRST.check("health")
async def _health(session: SmokeSession) -> str:
    # some answer with JSON, some with a word, some with nothing
    await session.client.text("/health")
    return "the server says that it is healthy"


@FIRST.check("models")
async def _models(session: SmokeSession) -> str:
    _, value = await session.client.get("/v1/models")
    models = value_at(value, "data")
    if not isinstance(models, list) or not models:
        raise Unsound("/v1/models names no model")
    named = [m for m in models if isinstance(m, dict) and isinstance(m.get("id"), str)]
    wanted = session.plan.model
    chosen = next((m for m in named if wanted in (None, m["id"])), None)
    if chosen is None:
        known = ", ".join(m["id"] for m in named) or "none with a name"
        raise Unsound(f"/v1/models has no {wanted!r} (there are: {known})")
    session.model, root = chosen["id"], chosen.get("root")
    session.aliases = frozenset(m["id"] for m in named if root and m.get("root") == root)
    session.context_tokens = session.plan.context_tokens or await _context(session, chosen)
    room = session.context_tokens or "an unknown number of"
    others = f"; the first of {len(named)}" if wanted is None and len(named) > 1 else ""
    return f"{session.model}, {room} tokens of context{others}"


async def _context(session: SmokeSession, model: dict[str, Any]) -> int | None:
    """How much one request may hold: vLLM and SGLang say so in the list, llama.cpp in /props.

    Its /props also say what its model sees.
    """
    stated = model.get("max_model_len")
    if isinstance(stated, int) and stated > 0:
        return stated
    try:
        _, props = await session.client.get("/props", optional=True)
    except (NotOffered, Unsound):
        return None
    session.sees = value_at(props, "modalities", "vision") is True
    size = value_at(props, "default_generation_settings", "n_ctx")
    return size if isinstance(size, int) and size > 0 else None


def require_sound_answer(session: SmokeSession, answer: ChatAnswer, most_tokens: int) -> None:
    """What holds of a short answer: its end, its counts."""
    if answer.finish not in _FINISHES:
        raise Unsound(f"finish_reason is {answer.finish!r}")
    usage = answer.usage
    # not every engine can count in streams
    if usage is None and answer.is_stream:
        return
    if usage is None:
        raise Unsound("the answer has no usage")
    written, total = usage.completion_tokens, usage.total_tokens
    if usage.prompt_tokens < 1 or total != usage.prompt_tokens + written:
        raise Unsound(f"usage does not add up: {usage!r}")
    if not 0 < written <= most_tokens:
        raise Unsound(f"usage counts {written} tokens, of at most {most_tokens}")
    is_full = total >= (session.context_tokens or total + 1)
    if answer.is_cut and written < most_tokens and not is_full:
        raise Unsound(f"finish_reason is 'length' after {written} tokens of {most_tokens}")


@FIRST.check("one answer")
async def _answer(session: SmokeSession) -> str:
    # a model that thinks may need more, and shows that it does
    most = max(_FIRST, session.answer_tokens) if session.plan.quality else _FIRST
    answer = await session.ask("Say hello in one short English sentence.", max_tokens=most)
    if answer.content is None and not answer.reasoning:
        raise Unsound("content is null, and there is no tool call")
    session.require_clean(answer)
    require_sound_answer(session, answer, most)
    session.thinks = bool(answer.reasoning.strip())
    if session.plan.quality and not answer.text.strip():
        raise Unsound("the answer has reasoning and no content; a thinking model needs --reasoning")
    return f"{answer.text[:60]!r}"


@FIRST.check("usage in streams")
async def _usage(session: SmokeSession) -> str:
    """Whoever pays or counts by tokens asks for it; from here on every stream must have it."""
    try:
        answer = await session.ask("Say hello.", max_tokens=_SHORT, stream=True)
    except RequestRefused as error:
        session.counts_streams = not error.is_of_field
        if error.is_of_field:
            raise NotOffered(f"no stream_options: {error}") from error
        raise
    return f"{answer.prompt_tokens} tokens of a prompt, in the last chunk"


@FIRST.check("token limit")
async def _limit(session: SmokeSession) -> str:
    """A token limit is kept, counted and named: what later rungs count depends on it."""
    for most, stream in ((_SHORT, False), (_SHORT, True), (_LONGER, False), (_LONGER, True)):
        prompt = countings(1, 2 * _LONGER)[0].prompt
        answer = await session.ask(prompt, max_tokens=most, stream=stream)
        how = "in a stream" if stream else "whole"
        require_sound_answer(session, answer, most)
        if answer.finish != "length" and (session.plan.quality or answer.is_empty):
            raise Unsound(f"cut at {most} tokens, {how}: finish_reason is {answer.finish!r}")
    return f"cut at {_SHORT} and at {_LONGER} tokens"


@FIRST.check("one stream")
async def _stream(session: SmokeSession) -> str:
    def shape(answer: ChatAnswer) -> tuple[str, str, str | None]:
        return answer.reasoning, answer.text, answer.finish

    prompt, most = countings(1)[0].prompt, 64
    wholes, streams = [], []
    for _ in range(_TRIES):
        whole = await session.ask(prompt, max_tokens=most)
        stream = await session.ask(prompt, max_tokens=most, stream=True)
        wholes.append(shape(whole))
        streams.append(shape(stream))
        session.require_clean(stream)
        require_sound_answer(session, stream, most)
        # another try where they differ: a tie may turn either way, a lost chunk is lost again
        if set(wholes) & set(streams):
            break
    else:
        texts = written_text(whole), written_text(stream)
        ends = f"finish_reason {whole.finish!r} and {stream.finish!r}"
        raise Unsound(f"{parting(*texts, ('whole', 'in a stream'))}; {ends}")
    # one prompt has one length, whole and as a stream, and so has one answer
    one, other = whole.usage, stream.usage
    if one and other:
        # the token that ends a turn may be counted or not
        is_longer = abs(one.completion_tokens - other.completion_tokens) > 1
        is_wrong = is_longer and wholes[-1] == streams[-1]
        if is_wrong or one.prompt_tokens != other.prompt_tokens:
            raise Unsound(f"usage of an answer: {one!r}; of the same as a stream: {other!r}")
    limit = session.plan.limits.first_token_s
    if stream.first_token_s > limit:
        raise Unsound(f"the first token took {stream.first_token_s:.1f} s, not {limit:g}")
    return f"the same as a stream; first token after {stream.first_token_s:.2f} s"
