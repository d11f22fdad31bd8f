"""What the requests say: English text of a wanted length, another for each request.

The text is made, not quoted: any amount of it, the same on every machine for the same seed, and
plain enough that a model answers it as it answers people. Its length in tokens depends on the
model, so a `Scale` is measured first, with the server's own count.
"""

from __future__ import annotations

import hashlib
import random
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.bench.workload import Lengths, Normal, RandomTokens, Uniform
from pipeline.errors import WorkloadInvalid
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.model import Frozen
from pipeline.yaml_file import read_yaml

_TASK = "\n\nWrite a long and detailed report about all of the above, in full sentences."
_MOST_LINE_BYTES = 64 << 20


class Vocabulary(Frozen):
    """What sentences are put together from."""

    places: list[str]
    names: list[str]
    people: list[str]
    things: list[str]
    verbs: list[str]
    reasons: list[str]
    forms: list[str]


class Scale(Frozen):
    """How many tokens words have with this model: tokens = overhead + words * per_word."""

    per_word: float = 1.3
    overhead: float = 30.0  # of the chat template, the unique head and the task

    def words(self, tokens: int) -> int:
        """How many words make so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.per_word))


def fit_scale(few: tuple[int, float], many: tuple[int, float]) -> Scale:
    """From prompts of two known lengths: (words, tokens on average) of each."""
    per_word = (many[1] - few[1]) / (many[0] - few[0])
    if not 0.2 < per_word < 20:
        raise WorkloadInvalid(
            f"the server counts {few[1]:g} tokens for {few[0]} words and {many[1]:g} for {many[0]}",
            "Its token counts cannot be used to make prompts of a wanted length.",
        )
    return Scale(per_word=per_word, overhead=few[1] - few[0] * per_word)


def _noise(key: str) -> random.Random:
    """The same numbers for the same key, on every machine."""
    return random.Random(key)  # noqa: S311 - nothing here is secret


@cache
def _vocabulary() -> Vocabulary:
    return read_yaml(Path(__file__).with_name("vocabulary.yaml"), Vocabulary)


def words(key: str, count: int, nonce: str = "") -> str:
    """So many words of text; another key gives another text, a nonce another order of it."""
    known, noise = _vocabulary(), _noise(key)
    left, found = count, []
    while left:
        sentence = noise.choice(known.forms).format(
            place=noise.choice(known.places),
            name=noise.choice(known.names),
            person=noise.choice(known.people),
            thing=noise.choice(known.things),
            verb=noise.choice(known.verbs),
            reason=noise.choice(known.reasons),
            number=noise.randint(2, 900),
            year=noise.randint(1780, 1990),
        )
        found.append(sentence.split()[:left])
        left -= len(found[-1])
    if nonce:
        *whole, last = found
        _noise(f"{nonce} {key}").shuffle(whole)
        # the last one may be cut off in the middle
        found = [*whole, last]
    return " ".join(word for sentence in found for word in sentence)


def unique_text(key: str, count: int, prefix: str = "", nonce: str = "") -> str:
    """A prompt of so many words that shares no beginning with any other, but for its prefix.

    With another nonce it has the same sentences, and so the same length: two runs of a workload
    are comparable, though no cache that compares from the start knows the prompts of the first.
    """
    # within the first tokens: caches compare from the start
    head = hashlib.sha256(f"{nonce} {key}".encode()).hexdigest()[:12]
    return f"{prefix}[{head}] {words(key, count, nonce)}{_TASK}"


def draw(lengths: Lengths, key: str) -> int:
    """One length of a distribution."""
    if isinstance(lengths, Uniform):
        return _noise(key).randint(lengths.least, lengths.most)
    if isinstance(lengths, Normal):
        value = _noise(key).gauss(lengths.mean, lengths.deviation)
        return min(max(round(value), lengths.least), lengths.most)
    return lengths.tokens


def random_ids(prompts: RandomTokens, key: str, count: int) -> list[int]:
    """Token ids that mean nothing together."""
    noise, least = _noise(key), min(prompts.skip, prompts.vocabulary - 1)
    return [noise.randrange(least, prompts.vocabulary) for _ in range(count)]


def arrivals(rate_per_s: float, count: int, kind: str, key: str) -> list[float]:
    """When each request is due, in seconds since the start."""
    if kind == "even":
        return [number / rate_per_s for number in range(count)]
    noise, at, due = _noise(key), 0.0, []
    for _ in range(count):
        at += noise.expovariate(rate_per_s)
        due.append(at)
    return due


def read_prompts(data: bytes, name: str) -> list[list[dict[str, Any]]]:
    """The lines of a prompt file, each as messages."""
    prompts = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            value = read_json(line, most_bytes=_MOST_LINE_BYTES)
        except JsonInvalid as error:
            raise WorkloadInvalid(f"{where}: {error}") from error
        fields = value if isinstance(value, dict) else {}
        prompt, messages = fields.get("prompt"), fields.get("messages")
        if isinstance(prompt, str):
            prompts.append([{"role": "user", "content": prompt}])
        elif isinstance(messages, list) and all(
            isinstance(each, dict) and "role" in each for each in messages
        ):
            prompts.append(messages)
        else:
            raise WorkloadInvalid(f"{where}: has neither a `prompt` nor `messages`")
    return prompts
