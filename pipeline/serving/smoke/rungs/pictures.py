"""Rung 9: pictures, where the model sees; asked after everything that is text.

The pictures are drawn on the spot, so that what is to be seen in them is known. PNG by hand
(https://www.w3.org/TR/png-3/): eight bits for each of red, green and blue, no filter.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from pipeline.serving.smoke.client import Unsound
from pipeline.serving.smoke.session import Rung, SmokeSession, answers_of

PICTURES = Rung("pictures", "Pictures are seen as they are")
_SEEN_SHARE = 0.75  # a model that does not look is right about one in three
UNSEEN = "neither the recipe nor the server says that the model sees"
Colour: TypeAlias = tuple[int, int, int]
COLOURS: dict[str, Colour] = {
    "red": (220, 20, 20),
    "green": (20, 160, 20),
    "blue": (20, 40, 220),
    "yellow": (250, 220, 0),
    "black": (0, 0, 0),
}
_SIDE = 224  # pixels; what most vision models cut pictures into fits in it
# The bars of a digital clock: left, top, right, bottom, in parts of a digit's width.
_BARS = {
    "top": (0.0, 0.0, 1.0, 0.2),
    "upper left": (0.0, 0.0, 0.2, 1.0),
    "upper right": (0.8, 0.0, 1.0, 1.0),
    "middle": (0.0, 0.9, 1.0, 1.1),
    "lower left": (0.0, 1.0, 0.2, 2.0),
    "lower right": (0.8, 1.0, 1.0, 2.0),
    "bottom": (0.0, 1.8, 1.0, 2.0),
}
_LEFT, _RIGHT = ("upper left", "lower left"), ("upper right", "lower right")
_DIGITS: dict[int, tuple[str, ...]] = {
    2: ("top", "upper right", "middle", "lower left", "bottom"),
    3: ("top", "middle", "bottom", *_RIGHT),
    4: ("upper left", "middle", *_RIGHT),
    5: ("top", "upper left", "middle", "lower right", "bottom"),
    6: ("top", "middle", "bottom", "lower right", *_LEFT),
    7: ("top", *_RIGHT),
    8: tuple(_BARS),
}


class PictureQuestion(NamedTuple):
    """A picture, what is asked about it, and the one word that is right."""

    png: bytes
    prompt: str
    want: str

    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The picture in the request itself, as OpenAI's API has it."""
        url = f"data:image/png;base64,{base64.b64encode(self.png).decode()}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [picture, {"type": "text", "text": self.prompt}]}]

    def is_right(self, text: str) -> bool:
        """Whether the last of the possible words in a text is the wanted one."""
        words = "".join(c if c.isalnum() else " " for c in text.casefold()).split()
        known = [word for word in words if word in COLOURS or word.isdigit()]
        return bool(known) and known[-1] == self.want


@lru_cache(maxsize=1)
def picture_questions() -> tuple[PictureQuestion, ...]:
    """Colours, counts and digits: a model that does not look is right about one in three."""
    pixels = [(x, y) for x in range(_SIDE) for y in range(_SIDE)]
    middle, step, width = _SIDE // 2, _SIDE // 4, 80
    left, top = (_SIDE - width) // 2, (_SIDE - 2 * width) // 2
    choices = ", ".join(sorted(COLOURS))
    ask_colour = f"Which colour does the square have: {choices}? Answer with one word."
    ask_count = "How many black dots are in the picture? Answer with the number in digits only."
    ask_digit = "Which digit does this display of a clock show? Answer with the digit only."
    questions = []
    for colour, count, digit in (("blue", 3, 7), ("red", 5, 4), ("green", 2, 6)):
        square = {p for p in pixels if max(abs(p[0] - middle), abs(p[1] - middle)) < _SIDE // 3}
        questions.append(PictureQuestion(_png(square, COLOURS[colour]), ask_colour, colour))
        # dots in two rows
        places = [(step * (1 + n % 3), step * (1 + 2 * (n // 3))) for n in range(count)]
        dots = {p for p in pixels if any(math.dist(p, place) < step // 3 for place in places)}
        questions.append(PictureQuestion(_png(dots), ask_count, str(count)))
        bars = {
            (x, y)
            for a, b, c, d in (_BARS[name] for name in _DIGITS[digit])
            for x in range(left + round(a * width), left + round(c * width))
            for y in range(top + round(b * width), top + round(d * width))
        }
        questions.append(PictureQuestion(_png(bars), ask_digit, str(digit)))
    return tuple(questions)


def _png(painted: set[tuple[int, int]], colour: Colour = COLOURS["black"]) -> bytes:
    inks = {True: bytes(colour), False: b"\xff\xff\xff"}
    side = range(_SIDE)
    rows = b"".join(b"\0" + b"".join(inks[(x, y) in painted] for x in side) for y in side)
    head = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")):
        crc = zlib.crc32(kind + data)
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)
    return png


@PICTURES.check(
    "pictures",
    "quality",
    lambda s: "--text-only" if s.plan.text_only else "" if s.plan.vision or s.sees else UNSEEN,
)
async def _pictures(session: SmokeSession) -> str:
    """Each in a request of its own, all at once: one that is taken for another shows, too."""
    questions = picture_questions()
    results = await session.ask_all([q.messages() for q in questions], len(questions))
    answers = answers_of(results)
    pairs = list(zip(questions, answers, strict=True))
    wrong = [(q, a) for q, a in pairs if not q.is_right(a.text)]
    if len(wrong) > (1 - _SEEN_SHARE) * len(pairs):
        question, answer = wrong[0]
        raise Unsound(
            f"{len(wrong)} of {len(pairs)} pictures are not seen as they are;"
            f" {question.prompt!r} is {question.want}, not {answer.text[:60]!r}"
        )
    return f"{len(pairs) - len(wrong)} of {len(pairs)} pictures are seen as they are"
