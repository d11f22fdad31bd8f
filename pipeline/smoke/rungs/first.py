"""Rung 1: the server is there, names its model, and gives one answer, whole and as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.smoke.chat import Answer
from pipeline.smoke.client import NotOffered, Unsound
from pipeline.smoke.session import CheckSpec, Rung, Session
from pipeline.smoke.tasks import countings

_FIRST, _SHORT = 256, 4  # tokens
_TRIES = 3
_FINISHES = ("stop", "length")


async def _health(session: Session) -> str:
    # some answer with JSON, some with a word, some with nothing
    await session.client.text("/health")
    return "the server says that it is healthy"


async def _models(session: Session) -> str:
    _, value = await session.client.get("/v1/models")
    models = value.get("data") if isinstance(value, dict) else None
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


async def _context(session: Session, model: dict[str, Any]) -> int | None:
    """How much one request may hold: vLLM and SGLang say so in the list, llama.cpp in /props.

    There it also says what its model sees.
    """
    said = model.get("max_model_len")
    if isinstance(said, int) and said > 0:
        return said
    try:
        _, props = await session.client.get("/props", optional=True)
    except (NotOffered, Unsound):
        return None
    props = props if isinstance(props, dict) else {}
    modalities, settings = props.get("modalities"), props.get("default_generation_settings")
    session.sees = isinstance(modalities, dict) and modalities.get("vision") is True
    size = settings.get("n_ctx") if isinstance(settings, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def require_sound(session: Session, answer: Answer, most_tokens: int) -> None:
    """What holds of every answer: its model, its end, its counts."""
    if answer.model not in (session.model, *session.aliases):
        raise Unsound(f"asked {session.model!r}, and {answer.model!r} answered")
    if answer.finish not in _FINISHES:
        raise Unsound(f"finish_reason is {answer.finish!r}")
    usage = answer.usage
    if usage is None:
        # not every engine counts in streams
        if answer.is_stream:
            return
        raise Unsound("the answer has no usage")
    if usage.prompt_tokens < 1 or usage.total_tokens != (
        usage.prompt_tokens + usage.completion_tokens
    ):
        raise Unsound(f"usage does not add up: {usage!r}")
    if not 0 < usage.completion_tokens <= most_tokens:
        raise Unsound(f"usage counts {usage.completion_tokens} tokens, of at most {most_tokens}")
    is_full = usage.total_tokens >= (session.context_tokens or usage.total_tokens + 1)
    if answer.is_cut and usage.completion_tokens < most_tokens and not is_full:
        raise Unsound(
            f"finish_reason is 'length' after {usage.completion_tokens} tokens of {most_tokens}"
        )


async def _answer(session: Session) -> str:
    # a model that thinks may need more, and shows that it does
    most = max(_FIRST, session.answer_tokens) if session.plan.quality else _FIRST
    answer = await session.ask("Say hello in one short English sentence.", max_tokens=most)
    if answer.content is None and not answer.reasoning:
        raise Unsound("content is null, and there is no tool call")
    session.require_clean(answer)
    require_sound(session, answer, most)
    session.thinks = bool(answer.reasoning.strip())
    if session.plan.quality and not answer.text.strip():
        raise Unsound("the answer has reasoning and no content; a thinking model needs --reasoning")
    return f"{answer.text[:60]!r}"


async def _limit(session: Session) -> str:
    """A token limit is kept, counted and named: what later rungs count depends on it."""
    for stream in (False, True):
        answer = await session.ask(countings(1)[0].prompt, max_tokens=_SHORT, stream=stream)
        how = "in a stream" if stream else "whole"
        require_sound(session, answer, _SHORT)
        if answer.finish != "length" and (session.plan.quality or answer.is_empty):
            raise Unsound(f"cut at {_SHORT} tokens, {how}: finish_reason is {answer.finish!r}")
    return f"cut at {_SHORT} tokens"


async def _stream(session: Session) -> str:
    prompt, most = countings(1)[0].prompt, 64
    wholes, streams = [], []
    for _ in range(_TRIES):
        wholes.append(await session.ask(prompt, max_tokens=most))
        streams.append(await session.ask(prompt, max_tokens=most, stream=True))
        session.require_clean(streams[-1])
        require_sound(session, streams[-1], most)
        # another try where they differ: a tie may turn either way, a lost chunk is lost again
        if {_shape(a) for a in wholes} & {_shape(a) for a in streams}:
            _require_same_counts(wholes[-1], streams[-1])
            break
    else:
        raise Unsound(f"a stream gives {_shape(streams[0])}, a whole answer {_shape(wholes[0])}")
    limit = session.plan.limits.first_token_s
    if streams[-1].first_token_s > limit:
        raise Unsound(f"the first token took {streams[-1].first_token_s:.1f} s, not {limit:g}")
    return f"the same as a stream; first token after {streams[-1].first_token_s:.2f} s"


def _require_same_counts(whole: Answer, stream: Answer) -> None:
    """One prompt has one length, whole and as a stream, and so has one answer."""
    one, other = whole.usage, stream.usage
    if one is None or other is None:
        return
    # the token that ends a turn may be counted or not
    is_other = abs(one.completion_tokens - other.completion_tokens) > 1
    if one.prompt_tokens != other.prompt_tokens or (is_other and _shape(whole) == _shape(stream)):
        raise Unsound(f"usage of an answer: {one!r}; of the same as a stream: {other!r}")


def _shape(answer: Answer) -> tuple[str, str, str | None]:
    return answer.reasoning, answer.text, answer.finish


def _checks(session: Session) -> Sequence[CheckSpec]:
    return [
        CheckSpec("health", "mechanics", _health),
        CheckSpec("models", "mechanics", _models),
        CheckSpec("one answer", "mechanics", _answer),
        CheckSpec("token limit", "mechanics", _limit),
        CheckSpec("one stream", "mechanics", _stream),
    ]


FIRST = Rung("first-answer", "The server is there and answers", _checks)
