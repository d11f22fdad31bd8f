"""How an answer can arrive: what one step of a stream holds is up to the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from .tokens import ByteToken

# Every token alone, and the steps of a stream interval or of accepted drafts.
SIZES = (1, 2, 3, 4, 5, 8, 13)
RANDOM = 12  # plans of random steps, half of them of large ones
DRAFTS = (1, 3, 7)  # tokens that are drafted for each step, of which some are accepted
# Where another endpoint has every cut of the same parser: its own events see one step at a time.
FEW = ("by 1", "by 5", "by words", "whole", "random 0", "random 1", "drafts of 3")


class Stream(NamedTuple):
    """An answer's tokens by step, and whether its end comes alone in an empty last step."""

    name: str
    sizes: tuple[int, ...]
    empty_end: bool

    @property
    def is_token_by_token(self) -> bool:
        """Whether a server without drafts and stream interval sends it so."""
        return self.name in ("by 1", "by words")

    def steps(self, tokens: list[ByteToken]) -> list[list[ByteToken]]:
        steps, at = [], 0
        for size in self.sizes:
            steps.append(tokens[at : at + size])
            at += size
        return [*steps, []] if self.empty_end else steps


def every_stream(
    length: int, words: list[int], seed: str, every_cut: bool = True
) -> Iterator[Stream]:
    """Whole, in even, random and drafted steps, and every cut into two; each with both ends."""
    for name, sizes in _plans(length, words, seed):
        for empty_end in (False, True) if every_cut or name in FEW else ():
            yield Stream(name, tuple(sizes), empty_end)


def _plans(length: int, words: list[int], seed: str) -> Iterator[tuple[str, list[int]]]:
    for size in SIZES:
        yield f"by {size}", even(length, size)
    yield "by words", words
    yield "whole", [length]
    for at in range(1, length):
        yield f"cut at {at}", [at, length - at]
    for number in range(RANDOM):
        dice = random.Random(f"{seed} {number}")  # noqa: S311
        yield f"random {number}", _drawn([1] * length, dice, 30 if number % 2 else 6)
    for drafted in DRAFTS:
        # the verifier's own token comes with those of the draft that it accepts
        dice = random.Random(f"{seed} drafts {drafted}")  # noqa: S311
        yield f"drafts of {drafted}", _drawn(words, dice, drafted + 1)


def even(length: int, size: int) -> list[int]:
    """Steps of one size, and what is left."""
    return [min(size, length - at) for at in range(0, length, size)]


def _drawn(units: list[int], dice: random.Random, most: int) -> list[int]:
    sizes, at = [], 0
    while at < len(units):
        count = dice.randint(1, most)
        sizes.append(sum(units[at : at + count]))
        at += count
    return sizes
