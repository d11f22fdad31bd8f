"""Judges one case: every stream of an answer, and the smallest that breaks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from .answers import ClientAnswer, Json, differences
from .streams import Stream, even, every_stream
from .tokens import ByteToken, ByteTokenizer

# Steps that must give an answer that was cut off the same parts as single tokens do.
_STEPS = (2, 3, 5, 13)
_MOST_SHOWN = 400
_MOST_TAIL = 60  # of an answer that was cut off, its last characters
# Reducing begins from so many failed streams, those with the smallest steps first.
_REDUCED = 3


class Endpoint(Protocol):
    """An engine's chat endpoint that serves one case."""

    def send(self, steps: list[list[ByteToken]], reason: str) -> ClientAnswer:
        """A stream of these steps, which then stops for this reason."""

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        """The same answer without a stream."""


def judge_whole(case: Json, tokenizer: ByteTokenizer, endpoint: Endpoint) -> Json:
    """Puts a whole answer through the endpoint in every stream, and once without one."""
    tokens, truth, markers = tokenizer.tokens(case["text"]), case["truth"], list(case["markers"])

    def faults(stream: Stream) -> tuple[list[str], Any]:
        try:
            got = endpoint.send(stream.steps(tokens), "stop")
            return differences(truth, got, markers), got.shown()
        except Exception as error:  # to the client, a stream that breaks off
            return [f"raises {type(error).__name__}"], str(error)[:_MOST_SHOWN]

    shown: Any
    try:
        whole = endpoint.ask(tokens)
        unstreamed, shown = differences(truth, whole, markers), whole.shown()
    except Exception as error:
        unstreamed, shown = [f"raises {type(error).__name__}"], str(error)[:_MOST_SHOWN]
    failed: list[tuple[Stream, list[str]]] = []
    count = 0
    words = tokenizer.words(tokens)
    for stream in every_stream(len(tokens), words, case["name"], case["every_cut"]):
        count += 1
        if found := faults(stream)[0]:
            failed.append((stream, found))
    kinds = Counter(fault for _, found in failed for fault in found)
    answer: Json = {
        "streams": count + 1,
        "failed": len(failed) + bool(unstreamed),
        "faults": sorted({*kinds, *unstreamed}),
        "token_by_token": bool(unstreamed) or any(s.is_token_by_token for s, _ in failed),
    }
    if unstreamed:
        answer["unstreamed"] = {"faults": unstreamed, "got": shown}
    if failed:
        failed.sort(key=lambda pair: max(pair[0].sizes))
        reduced = [reduce_stream(s, lambda x: bool(faults(x)[0])) for s, _ in failed[:_REDUCED]]
        smallest = min(reduced, key=lambda stream: max(stream.sizes))
        found, got = faults(smallest)
        at = smallest.sizes.index(max(smallest.sizes))
        before = sum(smallest.sizes[:at])
        step = "".join(token.text for token in tokens[before : before + smallest.sizes[at]])
        answer["smallest"] = {
            **{"tokens": smallest.sizes[at], "step": step[:_MOST_SHOWN]},
            **{"empty_end": smallest.empty_end, "faults": found, "got": got},
        }
    return answer


def judge_cut_off(case: Json, tokenizer: ByteTokenizer, endpoint: Endpoint) -> Json:
    """Stops an answer after every token. No truth says what is right, but steps must not matter,
    and a client must be able to put together what it gets."""
    tokens, faults = tokenizer.tokens(case["text"]), set[str]()
    answer: Json = {"streams": 0, "failed": 0, "token_by_token": False}
    for length in range(1, len(tokens)):
        # a detokenizer holds back a character that is not whole
        if not tokens[length - 1].text:
            continue
        single = None
        for size in (1, *_STEPS, length):
            stream = Stream(f"by {size}", tuple(even(length, size)), False)
            got = endpoint.send(stream.steps(tokens), "length")
            single = single or got
            found = set(got.faults)
            if got.parts() != single.parts():
                found.add("depends on the steps")
            answer["streams"] += 1
            answer["failed"] += bool(found)
            answer["token_by_token"] |= bool(got.faults) and size == 1
            faults |= found
            if found and "smallest" not in answer:
                step = "".join(token.text for token in tokens[:length])[-_MOST_TAIL:]
                answer["smallest"] = {
                    **{"tokens": size, "step": step, "empty_end": False},
                    **{"faults": sorted(found), "got": got.shown(), "single": single.shown()},
                }
    return {**answer, "faults": sorted(faults)}


def reduce_stream(stream: Stream, breaks: Callable[[Stream], bool]) -> Stream:
    """Cuts a stream that fails into single tokens, as far as it still fails."""
    steps = [[size] for size in stream.sizes]

    def made(parts: list[list[int]]) -> Stream:
        return stream._replace(name="reduced", sizes=tuple(size for part in parts for size in part))

    for at, (size,) in enumerate(list(steps)):
        tried = [*steps[:at], [1] * size, *steps[at + 1 :]]
        if size > 1 and breaks(made(tried)):
            steps = tried
    for at, part in enumerate(list(steps)):
        # from both sides: what is left is the step that no single tokens may replace
        before, size, after = 0, part[0] if len(part) == 1 else 1, 0
        for side in ("before", "after"):
            while size > 1:
                left, right = (before + 1, after) if side == "before" else (before, after + 1)
                narrow = [*[1] * left, size - 1, *[1] * right]
                if not breaks(made([*steps[:at], narrow, *steps[at + 1 :]])):
                    break
                before, size, after = left, size - 1, right
                steps = [*steps[:at], narrow, *steps[at + 1 :]]
    return made(steps)
