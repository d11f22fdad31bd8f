"""Faults that an earlier ladder did not see: an outside trial found them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.testbed.model_server import Asked, Fault, Reply, Token


def _cool(asked: Asked) -> None:
    if asked.body:
        asked.body["temperature"] = 0


def _one_choice(asked: Asked) -> None:
    asked.body.pop("n", None)


def _bleeding() -> Callable[[Asked, str], str]:
    """After a client hung up, the next answer begins with what it would have read."""
    seen = [0]

    def text(asked: Asked, text: str) -> str:
        if asked.cancels > seen[0] and "in digits" in asked.text:
            seen[0] = asked.cancels
            return asked.aborted[:24] + text
        return text

    return text


def _mixed() -> Callable[[Asked, str], str]:
    """On a connection that was used before, now and then the answer of another connection."""
    last: dict[int, str] = {}

    def text(asked: Asked, text: str) -> str:
        others = [t for place, t in last.items() if place != asked.connection]
        last[asked.connection] = text
        return others[-1] if asked.reuses and asked.number % 5 == 0 and others else text

    return text


def _schema_broken(every: int) -> Callable[[Asked, str], str]:
    asked_so_far = [0]

    def text(asked: Asked, text: str) -> str:
        if "response_format" not in asked.body:
            return text
        asked_so_far[0] += 1
        return (
            re.sub(r'"age": (\d+)', r'"age": "\1"', text) if not asked_so_far[0] % every else text
        )

    return text


def _comma_lost(asked: Asked, text: str) -> str:
    parts = text.split(", ")
    if "in digits" not in asked.text or len(parts) < 100:
        return text
    return ", ".join(parts[:90]) + " " + ", ".join(parts[90:])


def _wrong_at(tokens: int) -> Callable[[Asked, str], str]:
    def text(asked: Asked, text: str) -> str:
        if " sea" in asked.text and asked.prompt_tokens % tokens == 0:
            return re.sub(r"\d$", lambda m: str((int(m[0]) + 1) % 10), text)
        return text

    return text


def _old_id(every: int) -> Callable[[Asked, Reply], None]:
    def reply(asked: Asked, reply: Reply) -> None:
        reply.id = f"answer-{asked.number // every}"

    return reply


def _no_stream_usage(asked: Asked, chunks: list[Any]) -> list[Any]:
    return [c for c in chunks if isinstance(c, bytes) or not c.get("usage")]


def _other_name(when: Callable[[Asked], bool]) -> Callable[[Asked, Reply], None]:
    return lambda asked, reply: setattr(reply, "model", "other-2") if when(asked) else None


def _nothing_kept(asked: Asked, reply: Reply) -> None:
    if asked.path == "/v1/chat/completions":
        reply.cached_tokens = 0


def _cut_count(asked: Asked, reply: Reply) -> None:
    reply.prompt_tokens = min(reply.prompt_tokens, 2000)


def _failing(words: str, has_done: bool) -> Callable[[Asked, list[Any]], list[Any]]:
    """An error in mid-stream, with and without the mark of an end."""

    def chunks(asked: Asked, chunks: list[Any]) -> list[Any]:
        if "in digits" not in asked.text or asked.path != "/v1/chat/completions":
            return chunks
        end = chunks[-1:] if has_done else []
        return [*chunks[:2], {"error": {"message": words, "code": 500}}, *end]

    return chunks


def _several_ids(asked: Asked, chunks: list[Any]) -> list[Any]:
    for number, chunk in enumerate(chunks):
        if isinstance(chunk, dict) and "id" in chunk and asked.load >= 8:
            chunk["id"] = f"{chunk['id']}-{number}"
    return chunks


def _first_choice_twice(asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
    for choice in body.get("choices", []):
        choice["index"] = 0
    return body


def _lost_in_stream(asked: Asked, reply: Reply) -> None:
    """One token in 120, in streams and in whole answers alike."""
    reply.tokens = [t for n, t in enumerate(reply.tokens) if n == 0 or n % 120]
    reply.text = "".join(t.text for t in reply.tokens)


def _sampler_broken(asked: Asked, reply: Reply) -> None:
    if asked.body.get("temperature"):
        reply.tokens = [Token("\x00", -0.1, [("x", -3.0)]) for _ in reply.tokens[:8]]
        reply.text = "".join(t.text for t in reply.tokens)


def _is_agent(asked: Asked) -> bool:
    return asked.path == "/v1/messages" and "careful" in asked.text


def _late_to_front(asked: Asked, reply: Reply) -> None:
    """A late system message is moved to the front: nothing after it is found again."""
    roles = [m["role"] for m in asked.body.get("messages", [])]
    if "system" in roles[1:] and roles[-2] == "system":
        reply.cached_tokens = min(16, reply.cached_tokens or 0)


def _kept_once(asked: Asked, reply: Reply) -> None:
    """Only the first prompt of a conversation is kept."""
    if _is_agent(asked):
        reply.cached_tokens = min(90, reply.cached_tokens or 0)


def _turns_forgotten(asked: Asked) -> None:
    """A long conversation keeps its last messages only."""
    messages = asked.body.get("messages", [])
    if _is_agent(asked) and len(messages) > 6:
        asked.text = "\n".join(str(m.get("content")) for m in messages[-5:])


def _tools_lost(path: str, in_stream: bool) -> Callable[[Asked, Reply], None]:
    def reply(asked: Asked, reply: Reply) -> None:
        if asked.path == path and asked.is_stream == in_stream and reply.calls:
            reply.calls, reply.finish, reply.text = [], "stop", "I will look."
            reply.tokens = [Token("I will look.", -0.1, [("x", -3.0)])]

    return reply


def _of(path: str, change: Callable[[list[Any]], list[Any]]) -> Callable[..., list[Any]]:
    return lambda asked, chunks: change(chunks) if asked.path == path else chunks


def _body_of(path: str, **values: Any) -> Callable[[Asked, dict[str, Any]], dict[str, Any]]:
    return lambda asked, body: {**body, **values} if asked.path == path else body


AGENT_FAULTS = [
    Fault("late system turn to the front", "agents", reply=_late_to_front),
    Fault("conversation computed again at every turn", "agents", reply=_kept_once),
    Fault("early turns of a conversation forgotten", "agents", asked=_turns_forgotten),
    Fault("tool use lost in /v1/messages", "agents", reply=_tools_lost("/v1/messages", False)),
    Fault(
        "tool use lost in streams of /v1/messages",
        "agents",
        reply=_tools_lost("/v1/messages", True),
    ),
    Fault(
        "conversation counted as its last turn",
        "agents",
        reply=lambda a, r: setattr(r, "prompt_tokens", 200) if _is_agent(a) else None,
    ),
    Fault(
        "late system message not read",
        "agents",
        text=lambda a, t: "I do not know." if _is_agent(a) and "Seville?" in a.text[-60:] else t,
    ),
    Fault("/v1/responses empty", "responses", body=_body_of("/v1/responses", output=[])),
    Fault("/v1/responses without usage", "responses", body=_body_of("/v1/responses", usage=None)),
    Fault(
        "/v1/responses of another model",
        "responses",
        body=_body_of("/v1/responses", model="other-2"),
    ),
    Fault(
        "/v1/responses loses deltas",
        "responses",
        chunks=_of("/v1/responses", lambda c: c[:3] + c[5:]),
    ),
    Fault(
        "/v1/responses without its end", "responses", chunks=_of("/v1/responses", lambda c: c[:-1])
    ),
    Fault(
        "tool call lost in /v1/responses", "responses", reply=_tools_lost("/v1/responses", False)
    ),
    Fault(
        "tool call lost in streams of /v1/responses",
        "responses",
        reply=_tools_lost("/v1/responses", True),
    ),
    Fault(
        "/v1/responses forgets its instructions",
        "responses",
        asked=lambda a: (
            setattr(a, "text", a.text.split("asks.")[-1]) if a.path == "/v1/responses" else None
        ),
    ),
]
TRIAL_FAULTS = [
    Fault("temperature ignored", "answers", asked=_cool),
    Fault("n ignored", "answers", asked=_one_choice),
    Fault("two choices of one index", "answers", body=_first_choice_twice),
    Fault("NUL bytes where a sampler runs", "answers", reply=_sampler_broken),
    Fault("context overflow cut without a word", "length", reply=_cut_count, cuts_prompts=True),
    Fault("aborted answer in the next one", "streams", text=_bleeding()),
    Fault(
        "stuck after cancelled streams",
        "streams",
        delay_s=lambda a: 60.0 if a.cancels >= 4 else 0.0,
    ),
    Fault("answers mixed between kept connections", "streams", text=_mixed()),
    Fault("model name wrong under load", "streams", reply=_other_name(lambda a: a.load >= 8)),
    Fault(
        "model name wrong now and then under load",
        "streams",
        reply=_other_name(lambda a: a.load >= 8 and a.number % 3 == 0),
    ),
    Fault("schema broken once in ten", "answers", text=_schema_broken(10)),
    Fault("schema broken once in twenty", "answers", text=_schema_broken(20)),
    Fault("wrong at every 64th length", "length", text=_wrong_at(64)),
    Fault("wrong at every 128th length", "length", text=_wrong_at(128)),
    Fault("a comma lost in a long answer", "length", text=_comma_lost),
    Fault("a token in 120 lost", "length", reply=_lost_in_stream),
    Fault(
        "latency cliff beyond 16 streams",
        "streams",
        delay_s=lambda a: 4.0 if a.load > 16 else 0.0,
    ),
    Fault("ids used twice", "first-answer", reply=_old_id(2)),
    Fault(
        "ids used again under load",
        "streams",
        reply=lambda a, r: setattr(r, "id", "x") if a.load >= 8 else None,
    ),
    Fault("several ids in one stream", "streams", chunks=_several_ids),
    Fault("usage missing in streams", "first-answer", chunks=_no_stream_usage),
    Fault(
        "usage missing in streams under load",
        "streams",
        chunks=lambda a, c: _no_stream_usage(a, c) if a.load >= 8 else c,
    ),
    Fault("cached tokens missing", "memory", reply=_nothing_kept),
    Fault(
        "error in mid-stream without an end", "first-answer", chunks=_failing("out of pages", False)
    ),
    Fault("error in mid-stream with an end", "first-answer", chunks=_failing("out of pages", True)),
]


def _permuted(when: Callable[[Asked], bool]) -> Callable[[Asked, str], str]:
    """The code of a neighbour: the same digits in another order."""

    def text(asked: Asked, text: str) -> str:
        is_record = "code of record" in asked.text and asked.prompt_tokens > 300
        return text[:2] + text[:1:-1] if is_record and when(asked) else text

    return text


def _kimi_id(
    number: Callable[[Asked], int], head: str = "functions."
) -> Callable[[Asked, Reply], None]:
    def reply(asked: Asked, reply: Reply) -> None:
        for place, call in enumerate(reply.calls):
            name = call["function"]["name"] if head == "functions." else ""
            call["id"] = f"{head}{name}:{number(asked) + place}"

    return reply


def calls_before(asked: Asked) -> int:
    """How many calls the conversation has."""
    return sum(len(m.get("tool_calls") or []) for m in asked.body.get("messages", []))


REPORTED_FAULTS = [
    Fault("digits permuted in long prompts", "length", text=_permuted(lambda a: True)),
    Fault(
        "digits permuted where a text was kept",
        "length",
        text=_permuted(lambda a: a.cached_tokens > 200),
    ),
    Fault(
        "digits permuted in texts never seen",
        "length",
        text=_permuted(lambda a: a.cached_tokens < 50),
    ),
    Fault(
        "long answer after a long prompt loses numbers",
        "length",
        text=lambda a, t: (
            ", ".join(t.split(", ")[:20] + t.split(", ")[22:])
            if "in digits" in a.text and a.prompt_tokens > 400
            else t
        ),
    ),
    Fault("Kimi's call ids begin anew", "tools", reply=_kimi_id(lambda a: 0)),
    Fault("Kimi's call ids count too fast", "tools", reply=_kimi_id(lambda a: 2 * calls_before(a))),
    Fault(
        "call ids of one conversation equal",
        "tools",
        reply=_kimi_id(lambda a: 0, "call"),
    ),
    Fault(
        "shared prefix wrong with drafts",
        "speculation",
        text=lambda a, t: t[::-1] if a.is_drafting and "Report 000007," in a.text else t,
        needs="drafts",
    ),
]
