"""Faults to plant in the model server, each with the rung that should see it.

Sizes are those of a context of 2048 tokens: what fails after 4,096 tokens in the field fails after
700 here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

from tests.testbed.model_brain import chance
from tests.testbed.model_eye import look_at
from tests.testbed.model_faults_more import MORE_FAULTS
from tests.testbed.model_faults_trial import AGENT_FAULTS, REPORTED_FAULTS, TRIAL_FAULTS
from tests.testbed.model_server import Asked, Fault, Refusal, Reply, Token

_LONG = 700  # tokens
_GARBAGE = " blorb 的 xq zzkt ÿ ngh" * 4


def _when(
    condition: Callable[[Asked], bool], change: Callable[[str], str]
) -> Callable[[Asked, str], str]:
    return lambda asked, text: change(text) if condition(asked) else text


def _any(_: Asked) -> bool:
    return True


def _other_digit(text: str) -> str:
    """The last digit, one more."""
    return re.sub(r"(\d)(\D*)$", lambda m: str((int(m[1]) + 1) % 10) + m[2], text)


def _corrupted(text: str) -> str:
    return text[: len(text) // 3] + _GARBAGE


def _is_sum(asked: Asked) -> bool:
    return bool(re.search(r"What is \d+ [-+*] \d+\?", asked.text))


def _counts_long(asked: Asked) -> bool:
    return "in digits" in asked.text


def _refuse(condition: Callable[[Asked], bool], status: int = 500) -> Callable[[Asked], None]:
    def asked(request: Asked) -> None:
        if condition(request):
            raise Refusal(status, "internal error")

    return asked


def _set(**values: Any) -> Callable[[Asked, Reply], None]:
    def reply(_: Asked, answer: Reply) -> None:
        for name, value in values.items():
            setattr(answer, name, value)

    return reply


def _no_models(asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "data": []} if asked.path == "/v1/models" else body


def _drop_usage(_: Asked, body: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k != "usage"}


def _bad_usage(_: Asked, body: dict[str, Any]) -> dict[str, Any]:
    if "usage" in body and "total_tokens" in body["usage"]:
        body["usage"]["total_tokens"] += 7
    return body


def _no_limit(asked: Asked, reply: Reply) -> None:
    if reply.finish == "length":
        reply.tokens += [Token(" on", -0.1, [(" off", -3.0)])] * 6
        reply.text = "".join(t.text for t in reply.tokens)
        reply.completion_tokens = len(reply.tokens)


def _finish(wrong: str, right: str) -> Callable[[Asked, Reply], None]:
    def reply(_: Asked, answer: Reply) -> None:
        answer.finish = wrong if answer.finish == right else answer.finish

    return reply


def _empty(asked: Asked, reply: Reply) -> None:
    reply.text, reply.tokens, reply.completion_tokens = "", [], 1


def _when_reply(
    condition: Callable[[Asked], bool], change: Callable[[Asked, Reply], None]
) -> Callable[[Asked, Reply], None]:
    return lambda asked, reply: change(asked, reply) if condition(asked) else None


def _cut_raw(asked: Asked, data: bytes) -> bytes:
    return data[: 2 * len(data) // 3] if asked.is_stream else data


def _cut_whole(asked: Asked, data: bytes) -> bytes:
    if asked.is_stream or not asked.body:
        return data
    head, _, body = data.partition(b"\r\n\r\n")
    kept = body[: len(body) - 5]
    return re.sub(rb"Length: \d+", b"Length: %d" % len(kept), head) + b"\r\n\r\n" + kept


def _doubled(_: Asked, chunks: list[Any]) -> list[Any]:
    return [chunk for chunk in chunks[:-3] for _ in range(2)] + chunks[-3:]


def _last_lost(asked: Asked, chunks: list[Any]) -> list[Any]:
    return chunks[:-4] + chunks[-3:] if asked.path != "/v1/messages" else chunks


def _no_finish(_: Asked, chunks: list[Any]) -> list[Any]:
    for chunk in chunks:
        for choice in chunk.get("choices", []) if isinstance(chunk, dict) else []:
            choice["finish_reason"] = None
    return chunks


def _error_event(_: Asked, chunks: list[Any]) -> list[Any]:
    return [*chunks[:3], {"error": {"message": "CUDA error: an illegal memory access"}}, chunks[-1]]


def _broken_characters(_: Asked, chunks: list[Any]) -> list[Any]:
    """Bytes of a character in two chunks, each decoded by itself."""
    for chunk in chunks:
        for choice in chunk.get("choices", []) if isinstance(chunk, dict) else []:
            text = choice["delta"].get("content")
            if text:
                choice["delta"]["content"] = text.encode()[:-1].decode(errors="replace") + (
                    text[-1] if text[-1].isascii() else "\ufffd"
                )
    return chunks


def _constant(_: Asked, reply: Reply) -> None:
    reply.tokens = [Token(t.text, -1.0, [(o, -1.0) for o, _ in t.others]) for t in reply.tokens]


def _frozen(asked: Asked, reply: Reply) -> None:
    """The text of before, and the same probabilities for every token."""
    if asked.body.get("logprobs"):
        reply.tokens = [Token("a", -0.1, [("b", -2.0), ("c", -3.0)]) for _ in reply.tokens]


def _positive(_: Asked, reply: Reply) -> None:
    reply.tokens = [Token(t.text, 0.7, t.others) for t in reply.tokens]


def _less_sure(_: Asked, reply: Reply) -> None:
    """The same tokens, and all that is computed for them is off."""
    for token in reply.tokens:
        token.logprob -= 0.4
        token.others = [(other, p - 0.4) for other, p in token.others]


def _not_greedy(_: Asked, reply: Reply) -> None:
    reply.tokens = [Token(t.text, -4.5, [(o, -0.2) for o, _ in t.others]) for t in reply.tokens]


def _in_calls(change: Callable[[dict[str, Any]], None]) -> Callable[[Asked, Reply], None]:
    def reply(_: Asked, answer: Reply) -> None:
        for call in answer.calls:
            change(call)

    return reply


def _prose_arguments(call: dict[str, Any]) -> None:
    call["function"]["arguments"] = "The city is Oslo, I think."


def _string_numbers(call: dict[str, Any]) -> None:
    text = call["function"]["arguments"]
    call["function"]["arguments"] = re.sub(r": (\d+)", r': "\1"', text)


def _lost_calls(asked: Asked, reply: Reply) -> None:
    if reply.calls:
        reply.calls, reply.finish = [], "stop"
        reply.tokens = [Token("I will look.", -0.1, [("x", -3.0)])]
        reply.text = reply.tokens[0].text


def _merged(_: Asked, reply: Reply) -> None:
    if len(reply.calls) > 1:
        joined = "".join(c["function"]["arguments"] for c in reply.calls)
        reply.calls[0]["function"]["arguments"] = joined
        reply.calls = reply.calls[:1]


def _one_id(_: Asked, reply: Reply) -> None:
    for call in reply.calls:
        call["id"] = "call"


def _call_as_text(_: Asked, reply: Reply) -> None:
    if reply.calls:
        text = f"<tool_call>{reply.calls[0]['function']['arguments']}</tool_call>"
        reply.calls, reply.finish, reply.text = [], "stop", text
        reply.tokens = [Token(text, -0.1, [("x", -3.0)])]


def _last_call_lost(asked: Asked, reply: Reply) -> None:
    if asked.is_stream and len(reply.calls) > 1:
        reply.calls.pop()


def _thought_in_content(_: Asked, reply: Reply) -> None:
    reply.tokens.insert(0, Token("<think>It is easy.</think>", -0.1, [("x", -3.0)]))
    reply.text = "".join(t.text for t in reply.tokens)


def _lost_reasoning(_: Asked, reply: Reply) -> None:
    reply.reasoning = ""


def _always_thinks(asked: Asked, reply: Reply) -> None:
    if not asked.is_stream:
        reply.reasoning = "Let me think anyway."


def _forgets_start(asked: Asked, text: str) -> str:
    """Attention sees the end of a long prompt only."""
    found = re.search(r"What is the secret number of (\w+)\?", asked.text)
    if not found or asked.prompt_tokens < _LONG:
        return text
    seen = asked.text[len(asked.text) // 3 :]
    return text if f"of {found[1]} is" in seen else "1234"


def _shared_prefix(asked: Asked, text: str) -> str:
    """The answer to the first question about a text is given to the others, too."""
    needles = re.findall(r"is (\d+)\.", asked.text)
    return needles[0] if asked.load > 1 and needles and "secret" in asked.text else text


def _short_count(asked: Asked, reply: Reply) -> None:
    reply.prompt_tokens = min(reply.prompt_tokens, 500)


def _same_count(asked: Asked, reply: Reply) -> None:
    reply.prompt_tokens = 64


def _messages_body(condition: Callable[[Asked], bool]) -> Callable[[Asked, Any], Any]:
    def body(asked: Asked, value: dict[str, Any]) -> dict[str, Any]:
        if asked.path == "/v1/messages" and condition(asked):
            value["content"] = []
        return value

    return body


def _dies_of_long_prompts() -> Callable[[Asked], None]:
    dead: list[bool] = []

    def asked(request: Asked) -> None:
        if request.prompt_tokens >= 2048:
            dead.append(True)
        if dead:
            raise Refusal(500, "the engine is dead")

    return asked


def _blind(text: str) -> str:
    """What is said by one who does not look."""
    return "Red." if text[0].isalpha() else "3"


def _first_picture() -> Callable[[Asked, str], str]:
    """A cache that takes every picture for the first one."""
    seen: list[bytes] = []

    def text(asked: Asked, text: str) -> str:
        if asked.picture is None:
            return text
        seen.append(asked.picture)
        return look_at(seen[0], asked.text)

    return text


def _half(text: str) -> str:
    return text[: len(text) // 2]


def _in_stream(change: Callable[[Asked, Reply], None]) -> Callable[[Asked, Reply], None]:
    return _when_reply(lambda a: a.is_stream, change)


def _counted(name: str, more: int) -> Callable[[Asked, Reply], None]:
    """One count is off; those of answers that were cut are right."""

    def reply(_: Asked, answer: Reply) -> None:
        if answer.finish == "stop":
            setattr(answer, name, getattr(answer, name) + more)

    return reply


def _every(number: int) -> Callable[[Asked, list[Any]], list[Any]]:
    """One chunk with content in so many is lost."""

    def chunks(asked: Asked, chunks: list[Any]) -> list[Any]:
        end = len(chunks) - 3
        return [c for n, c in enumerate(chunks) if n == 0 or n >= end or n % number]

    return chunks


def _other_logprobs(asked: Asked, reply: Reply) -> None:
    """Of another request: the text is right."""
    reply.written = [Token(t.text[::-1] + "x", t.logprob, t.others) for t in reply.tokens]


def _too_probable(_: Asked, reply: Reply) -> None:
    for token in reply.tokens:
        token.logprob = -0.01
        token.others = [(o, -0.02 - 0.01 * n) for n, (o, _) in enumerate(token.others)]


def _leaked_end(asked: Asked, reply: Reply) -> None:
    """The last words of the reasoning are taken for content."""
    head, _, tail = reply.reasoning.rpartition("about")
    if head:
        reply.reasoning = head
        reply.tokens.insert(0, Token(tail, -0.1, [("x", -3.0)]))
        reply.text = "".join(t.text for t in reply.tokens)


def _arguments(change: Callable[[str], str]) -> Callable[[Asked, Reply], None]:
    def changed(call: dict[str, Any]) -> None:
        call["function"]["arguments"] = change(call["function"]["arguments"])

    return _in_calls(changed)


def _first_arguments(_: Asked, reply: Reply) -> None:
    for call in reply.calls[1:2]:
        call["function"]["arguments"] = reply.calls[0]["function"]["arguments"]


def _forget(role: str) -> Callable[[Asked], None]:
    """Messages of a role, or all but the last, never reach the model."""

    def asked(request: Asked) -> None:
        messages = request.body.get("messages", [])
        kept = [m for m in messages[:-1] if m["role"] not in (role, "assistant")] + messages[-1:]
        if messages and messages[-1]["role"] == "user":
            request.body["messages"] = kept
            request.text = "\n".join(str(m["content"]) for m in kept)

    return asked


def _without(name: str) -> Callable[[Asked], None]:
    return lambda asked: asked.body.pop(name, None) if asked.is_stream else None


def _late(text: str, tokens: int = 100) -> str:
    parts = re.findall(r"\s*\S+", text)
    return "".join(parts[:tokens]) + " blorb xq zzkt" * 4 if len(parts) > tokens + 10 else text


def _late_end(text: str, tokens: int = 100) -> str:
    return " ".join(text.split(" ")[:tokens])


def _stale() -> Callable[[Asked, str], str]:
    """Every tenth answer is the one before."""
    last = ["Nothing yet."]

    def text(asked: Asked, text: str) -> str:
        before, last[0] = last[0], text
        return before if asked.number % 10 == 0 else text

    return text


def _kept_by_prompt() -> Callable[[Asked, Reply], None]:
    """A cache of answers that forgets the options of the request."""
    kept: dict[str, Reply] = {}

    def reply(asked: Asked, answer: Reply) -> None:
        first = kept.setdefault(asked.text, answer)
        answer.text, answer.tokens = first.text, first.tokens
        answer.finish, answer.completion_tokens = first.finish, first.completion_tokens

    return reply


def _swapped(least: int) -> Callable[[Asked, str], str]:
    """Now and then the answer of the request before, which is right for another."""
    seen: list[str] = []

    def text(asked: Asked, text: str) -> str:
        if asked.load < least or not _counts_long(asked):
            return text
        seen.append(text)
        return seen[-2] if len(seen) % 20 == 0 else text

    return text


def _sampled(asked: Asked, text: str) -> str:
    return str(asked.number * 7919) if "random" in asked.text and "seed" not in asked.body else text


def _error_as_answer(asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
    return {"error": {"message": "out of memory"}} if asked.number % 25 == 0 else body


def _wrong_role(_: Asked, body: dict[str, Any]) -> dict[str, Any]:
    for choice in body.get("choices", []):
        choice["message"]["role"] = "user"
    return body


def _usage_lost_later(asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
    return _drop_usage(asked, body) if asked.number > 120 else body


def _nan(asked: Asked, data: bytes) -> bytes:
    if not asked.body.get("logprobs"):
        return data
    head, _, body = data.partition(b"\r\n\r\n")
    body = re.sub(rb'"logprob": [-0-9.e]+', b'"logprob": NaN', body)
    return re.sub(rb"Length: \d+", b"Length: %d" % len(body), head) + b"\r\n\r\n" + body


def _messages_lost(asked: Asked, chunks: list[Any]) -> list[Any]:
    return chunks[:3] + chunks[5:] if asked.path == "/v1/messages" else chunks


def _endless(asked: Asked, chunks: list[Any]) -> list[Any]:
    """A stream that does not find its end."""
    return chunks[:2] + chunks[1:2] * 200_000 if _counts_long(asked) else chunks


def _only_ends(asked: Asked, text: str) -> str:
    """Attention sees the beginning and the end of a long prompt."""
    found = re.search(r"What is the secret number of (\w+)\?", asked.text)
    if not found or asked.prompt_tokens < _LONG:
        return text
    place = asked.text.find(f"of {found[1]} is") / len(asked.text)
    return text if place < 0.2 or place > 0.8 else "4711"


FAULTS = [
    Fault("unhealthy", "first-answer", asked=_refuse(lambda a: a.path == "/health", 503)),
    Fault("no models", "first-answer", body=_no_models),
    Fault("no chat", "first-answer", asked=_refuse(lambda a: "chat" in a.path, 404)),
    Fault("no list of models", "first-answer", asked=_refuse(lambda a: "models" in a.path, 404)),
    Fault("wrong model name", "first-answer", reply=_set(model="other-2")),
    Fault("content null", "first-answer", reply=_set(content_is_null=True)),
    Fault("empty answer", "first-answer", reply=_empty),
    Fault("wrong finish_reason at the limit", "first-answer", reply=_finish("stop", "length")),
    Fault("unknown finish_reason", "first-answer", reply=_finish("done", "stop")),
    Fault("token limit ignored", "first-answer", reply=_no_limit),
    Fault("usage missing", "first-answer", body=_drop_usage),
    Fault("usage does not add up", "first-answer", body=_bad_usage),
    Fault("JSON of the answer cut", "first-answer", raw=_cut_whole),
    Fault("SSE cut in mid-stream", "first-answer", raw=_cut_raw),
    Fault("stream without [DONE]", "first-answer", chunks=lambda _, c: c[:-1]),
    Fault("stream without finish_reason", "first-answer", chunks=_no_finish),
    Fault("stream chunks duplicated", "first-answer", chunks=_doubled),
    Fault("last chunk of a stream lost", "first-answer", chunks=_last_lost),
    Fault("error in mid-stream", "first-answer", chunks=_error_event),
    Fault("finish_reason length where it stopped", "first-answer", reply=_finish("length", "stop")),
    Fault(
        "wrong finish_reason at the limit in streams",
        "first-answer",
        reply=_in_stream(_finish("stop", "length")),
    ),
    Fault("token limit ignored in streams", "first-answer", asked=_without("max_tokens")),
    Fault(
        "prompts counted otherwise in streams",
        "first-answer",
        reply=_in_stream(_counted("prompt_tokens", 3)),
    ),
    Fault(
        "answers counted otherwise in streams",
        "first-answer",
        reply=_in_stream(_counted("completion_tokens", 5)),
    ),
    Fault("answers kept without their options", "first-answer", reply=_kept_by_prompt()),
    Fault("endless stream", "first-answer", chunks=_endless),
    Fault("a message of the user", "first-answer", body=_wrong_role),
    Fault("slow first token", "first-answer", delay_s=lambda a: 1.6 if a.is_stream else 0.0),
    Fault("wrong arithmetic", "answers", text=_when(_is_sum, _other_digit)),
    Fault(
        "half of the word problems wrong",
        "answers",
        text=_when(lambda a: "How many" in a.text and a.number % 2 == 0, _other_digit),
    ),
    Fault(
        "truncated JSON",
        "answers",
        text=_when(lambda a: "response_format" in a.body, lambda text: text[:-2]),
    ),
    Fault(
        "schema violated",
        "answers",
        text=_when(lambda a: "response_format" in a.body, lambda text: text.replace("34", '"34"')),
    ),
    Fault(
        "schema violated in streams only",
        "answers",
        text=_when(
            lambda a: "response_format" in a.body and a.is_stream,
            lambda text: text.replace("Tromsø", "Paris"),
        ),
    ),
    Fault(
        "repeated tokens",
        "answers",
        text=_when(lambda a: "sentences" in a.text, lambda text: text[:60] + " the pier" * 12),
    ),
    Fault(
        "wrong script",
        "answers",
        text=_when(lambda a: "sentences" in a.text, lambda text: text[:80] + "港口早晨很安静" * 3),
    ),
    Fault(
        "!!!! instead of words",
        "answers",
        text=_when(lambda a: "sentences" in a.text, lambda text: text[:80] + "!" * 40),
    ),
    Fault(
        "control characters",
        "answers",
        text=_when(lambda a: "sentences" in a.text, lambda text: text[:80] + "\x07" + text[80:]),
    ),
    Fault(
        "language switched",
        "answers",
        text=_when(lambda a: "Russian" in a.text, lambda _: "one, two, three, four, five"),
    ),
    Fault("UTF-8 cut between chunks", "answers", chunks=_broken_characters),
    Fault(
        "wrong code",
        "answers",
        text=_when(lambda a: "Python" in a.text, lambda text: text.replace("n + 1", "n")),
    ),
    Fault("constant logprobs", "answers", reply=_constant),
    Fault("frozen logits", "answers", reply=_frozen),
    Fault("positive logprobs", "answers", reply=_positive),
    Fault("less probable tokens chosen", "answers", reply=_not_greedy),
    Fault("logprobs of other tokens", "answers", reply=_other_logprobs),
    Fault("probabilities of more than 1", "answers", reply=_too_probable),
    Fault("NaN as logprob", "answers", raw=_nan),
    Fault("answers that stop counted wrong", "answers", reply=_counted("completion_tokens", 7)),
    Fault("temperature 0 not greedy", "answers", text=_sampled),
    Fault("system prompt dropped", "answers", asked=_forget("system")),
    Fault("earlier turns dropped", "answers", asked=_forget("user")),
    Fault("the answer before", "answers", text=_stale()),
    Fault("error with status 200", "answers", body=_error_as_answer),
    Fault("stop words ignored in streams", "answers", asked=_without("stop")),
    Fault(
        "one foreign word",
        "answers",
        text=_when(
            lambda a: "sentences" in a.text, lambda text: text.replace(" the ", " 的早 ", 1)
        ),
    ),
    Fault(
        "text decomposed",
        "answers",
        text=_when(_any, lambda text: unicodedata.normalize("NFD", text)),
    ),
    Fault(
        "cut at a character of several bytes",
        "answers",
        text=_when(_any, lambda text: re.sub(r"(?s)(.[^\x00-\x7f]).*", r"\1", text)),
    ),
    Fault(
        "property that the schema does not know",
        "answers",
        text=_when(lambda a: "response_format" in a.body, lambda text: text[:-1] + ', "x": 1}'),
    ),
    Fault(
        "JSON in a code block",
        "answers",
        text=_when(lambda a: "response_format" in a.body, lambda text: f"```json\n{text}\n```"),
    ),
    Fault(
        "seed ignored",
        "answers",
        reply=lambda a, r: setattr(r, "text", str(a.number)) if "seed" in a.body else None,
    ),
    Fault(
        "second request wrong",
        "answers",
        text=_when(lambda a: _counts_long(a) and a.times > 0 and "174" in a.text, _corrupted),
    ),
    Fault("500 every tenth request", "first-answer", asked=_refuse(lambda a: a.number % 10 == 0)),
    Fault(
        "stop words ignored",
        "answers",
        asked=lambda a: a.body.update(stop=[]),
    ),
    Fault(
        "blind to pictures",
        "pictures",
        text=_when(lambda a: a.picture is not None, _blind),
        needs="vision",
    ),
    Fault("another request's picture", "pictures", text=_first_picture(), needs="vision"),
    Fault(
        "pictures refused",
        "pictures",
        asked=_refuse(lambda a: a.picture is not None, 400),
        needs="vision",
    ),
    Fault("tool arguments as prose", "tools", reply=_in_calls(_prose_arguments)),
    Fault("tool arguments against the schema", "tools", reply=_in_calls(_string_numbers)),
    Fault(
        "tool arguments with broken characters",
        "tools",
        reply=_in_calls(
            lambda c: c["function"].update(arguments=c["function"]["arguments"].replace("ü", "??"))
        ),
    ),
    Fault("tool call id missing", "tools", reply=_in_calls(lambda call: call.update(id=""))),
    Fault(
        "wrong tool called",
        "tools",
        reply=_in_calls(lambda call: call["function"].update(name="list_files", arguments="{}")),
    ),
    Fault(
        "tool call lost in streams only",
        "tools",
        reply=_when_reply(lambda a: a.is_stream, _lost_calls),
    ),
    Fault(
        "characters of four bytes lost in arguments",
        "tools",
        reply=_arguments(lambda text: re.sub("[\U00010000-\U0010ffff]", "", text)),
    ),
    Fault("arguments of the first call in the second", "tools", reply=_first_arguments),
    Fault(
        "end of the reasoning in the content of streams",
        "tools",
        reply=_in_stream(_leaked_end),
        needs="reasoning",
    ),
    Fault(
        "tool call lost after thinking",
        "tools",
        reply=_when_reply(lambda a: a.thinks, _lost_calls),
        needs="reasoning",
    ),
    Fault("/v1/messages loses chunks of a stream", "tools", chunks=_messages_lost),
    Fault("tool call as text", "tools", reply=_call_as_text),
    Fault("tool call with finish_reason stop", "tools", reply=_finish("stop", "tool_calls")),
    Fault("parallel calls merged", "tools", reply=_merged),
    Fault("parallel calls with one id", "tools", reply=_one_id),
    Fault("last parallel call lost in streams", "tools", reply=_last_call_lost),
    Fault(
        "tool result not seen",
        "tools",
        text=_when(lambda a: a.body["messages"][-1]["role"] == "tool", lambda _: "I do not know."),
    ),
    Fault(
        "reasoning in content",
        "tools",
        reply=_when_reply(_is_sum, _thought_in_content),
    ),
    Fault("reasoning lost", "tools", reply=_lost_reasoning, needs="reasoning"),
    Fault(
        "reasoning although instant",
        "tools",
        reply=_when_reply(_is_sum, _always_thinks),
        needs="reasoning",
    ),
    Fault("/v1/messages empty", "tools", body=_messages_body(_any)),
    Fault(
        "/v1/messages stream cut",
        "tools",
        chunks=lambda a, c: c[:-1] if a.path == "/v1/messages" else c,
    ),
    Fault(
        "corruption from 2 streams on",
        "streams",
        text=_when(lambda a: a.load >= 2 and _counts_long(a), _corrupted),
    ),
    Fault(
        "corruption at 64 streams",
        "streams",
        text=_when(lambda a: a.load >= 60 and a.number % 5 == 0, _corrupted),
    ),
    Fault(
        "one wrong digit at 64 streams",
        "streams",
        text=_when(lambda a: a.load >= 60 and a.number % 9 == 0, _other_digit),
    ),
    Fault(
        "empty answers at 64 streams",
        "streams",
        reply=_when_reply(lambda a: a.load >= 60 and a.number % 3 == 0, _empty),
    ),
    Fault(
        "NUL tokens after some streams",
        "streams",
        text=_when(lambda a: a.load >= 8 and a.number > 90, lambda text: text[:9] + "\x00" * 8),
    ),
    Fault(
        "finish_reason wrong under load",
        "streams",
        reply=_when_reply(lambda a: a.load >= 8, _finish("length", "stop")),
    ),
    Fault(
        "one half answer of 64",
        "streams",
        text=_when(lambda a: a.load >= 60 and a.number % 40 == 0 and _counts_long(a), _half),
    ),
    Fault(
        "words behind the answer under load",
        "streams",
        text=_when(lambda a: a.load >= 60 and a.number % 9 == 0, lambda text: text + " and so on"),
    ),
    Fault("answers swapped now and then", "streams", text=_swapped(8), needs="no logprobs"),
    Fault(
        "another stream's answer",
        "streams",
        text=_when(
            lambda a: a.load >= 8 and a.number % 4 == 0 and _counts_long(a),
            lambda _: ", ".join(str(n) for n in range(137, 161)),
        ),
    ),
    Fault(
        "half answers under load",
        "streams",
        text=_when(lambda a: a.load >= 8 and _counts_long(a), _half),
    ),
    Fault(
        "503 at 64 streams",
        "streams",
        asked=_refuse(lambda a: a.load >= 60 and a.number % 20 == 0, 503),
    ),
    Fault(
        "NUL bytes where places are taken over",
        "streams",
        text=_when(
            lambda a: a.load >= 4 and a.body.get("max_tokens", 99) <= 16 and a.number % 9 == 0,
            lambda text: "\x00" * len(text),
        ),
    ),
    Fault(
        "tool call lost under load",
        "streams",
        reply=_when_reply(lambda a: a.load >= 4 and a.is_stream, _lost_calls),
    ),
    Fault(
        "one prompt length in four wrong",
        "length",
        text=_when(
            lambda a: _is_sum(a) and " sea" in a.text and a.prompt_tokens % 4 == 3, _other_digit
        ),
    ),
    Fault(
        "prompts counted wrong",
        "length",
        reply=_when_reply(lambda a: " sea" in a.text, _same_count),
    ),
    Fault(
        "usage lost after some requests",
        "streams",
        body=_usage_lost_later,
        chunks=lambda a, c: [
            x
            for x in c
            if isinstance(x, bytes) or "type" in x or not x.get("usage") or a.number <= 150
        ],
    ),
    Fault("garbage late in a long answer", "length", text=_when(_any, _late)),
    Fault("long answers end early", "length", text=_when(_any, _late_end)),
    Fault("one chunk in ninety lost", "length", chunks=_every(90)),
    Fault("needle found at the ends only", "length", text=_only_ends),
    Fault(
        "one prompt length in eight wrong",
        "length",
        text=_when(
            lambda a: _is_sum(a) and " sea" in a.text and a.prompt_tokens % 8 == 3, _other_digit
        ),
    ),
    Fault(
        "garbage after many tokens",
        "length",
        text=_when(lambda a: a.prompt_tokens > _LONG, _corrupted),
    ),
    Fault(
        "wrong after one batch",
        "length",
        text=_when(lambda a: 1200 < a.prompt_tokens < 1450, _other_digit),
    ),
    Fault("needle lost at depth", "length", text=_forgets_start),
    Fault(
        "prompt cut without a word",
        "length",
        reply=_when_reply(lambda a: a.prompt_tokens > 500, _short_count),
    ),
    Fault(
        "empty answer near the full context",
        "length",
        reply=_when_reply(lambda a: a.prompt_tokens > 1600, _empty),
    ),
    Fault(
        "/v1/messages fails near the full context",
        "length",
        body=_messages_body(lambda a: a.prompt_tokens > 1600),
    ),
    Fault("long prompt kills the server", "length", asked=_dies_of_long_prompts()),
    Fault("kept prefix answers for another prompt", "memory", text=_shared_prefix),
    Fault(
        "wrong after eviction",
        "memory",
        text=_when(
            lambda a: "Report 000007," in a.text and a.times > 2 and a.prompts > 60, _other_digit
        ),
    ),
    Fault(
        "stale KV after restart",
        "memory",
        text=_when(lambda a: a.restarts > 0 and "secret" in a.text, _other_digit),
        needs="restart",
    ),
    Fault(
        "short prompts wrong after restart",
        "memory",
        text=_when(lambda a: a.restarts > 0 and _counts_long(a), _other_digit),
        needs="restart",
    ),
    Fault(
        "tool calls lost after restart",
        "memory",
        reply=_when_reply(lambda a: a.restarts > 0, _lost_calls),
        needs="restart",
    ),
    Fault(
        "draft loses tool calls under load",
        "speculation",
        reply=_when_reply(lambda a: a.is_drafting and a.load >= 4, _lost_calls),
        needs="drafts",
    ),
    Fault(
        "draft changes answers",
        "speculation",
        text=_when(
            lambda a: (
                "End with the number" in a.text
                and a.times == 0
                and a.load >= 2
                and chance(a.text) % 2 == 0
                and a.prompts > 60
            ),
            lambda text: text.replace("makes", "gives"),
        ),
        needs="baseline",
    ),
    Fault("probabilities a little wrong", "speculation", reply=_less_sure, needs="baseline"),
    Fault(
        "draft makes answers wrong",
        "speculation",
        text=_when(lambda a: a.prompts > 60 and "End with the number" in a.text, _other_digit),
        needs="baseline",
    ),
    Fault(
        "draft changes answers when it is turned on",
        "speculation",
        text=_when(
            lambda a: a.is_drafting and a.load >= 2 and "End with the number" in a.text,
            lambda text: text.replace("makes", "gives"),
        ),
        needs="drafts",
    ),
    Fault(
        "draft corrupts at 64 streams",
        "speculation",
        text=_when(lambda a: a.is_drafting and a.load >= 60 and a.number % 5 == 0, _corrupted),
        needs="drafts",
    ),
    Fault(
        "draft breaks JSON",
        "speculation",
        text=_when(lambda a: a.is_drafting and "response_format" in a.body, lambda text: text[:-2]),
        needs="drafts",
    ),
    Fault(
        "draft loses tool calls in streams",
        "speculation",
        reply=_when_reply(lambda a: a.is_drafting and a.is_stream, _lost_calls),
        needs="drafts",
    ),
    Fault(
        "draft model on, and never used",
        "speculation",
        metrics=lambda _: "vllm:num_requests_running 0.0\n",
        needs="drafts",
    ),
    Fault("draft model does not come up", "speculation", starts_drafting=False, needs="drafts"),
    *MORE_FAULTS,
    *TRIAL_FAULTS,
    *AGENT_FAULTS,
    *REPORTED_FAULTS,
]
