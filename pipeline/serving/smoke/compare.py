"""Judges answers: text that no sound model writes, and what two greedy answers have in common."""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

from pipeline.core import log
from pipeline.serving.smoke.chat import Answer, Token
from pipeline.serving.smoke.model import Tolerance

Kind: TypeAlias = Literal["equal", "tie", "near", "drift", "unjudged"]
# Tokens that no reader sees: the end of a turn, marks around the reasoning.
_MARK = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]")
_ANCHOR = 12  # characters by which a text is found again after a mark
# A run of one character; lines, tables and dots of real answers are left out.
_RUN = re.compile(r"([^\s\-=_*.#`~|─━\d])\1{11,}")
# FP4 products that are all zero pick token 0, which is `!` for many tokenizers.
_BANGS = re.compile(r"!{4,}")
_LOOP = re.compile(r"(.{2,80}?)\1{5,}", re.S)
_CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LOOKED_AT = 4000  # characters from the end, where loops are; the pattern is quadratic
_FOREIGN_SHARE = 0.1
# Where a prompt asks for no names, two letters of these are a word that slipped in.
_ALIEN_WORD = 2
_ALIEN = frozenset(
    ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "CYRILLIC", "ARABIC", "HEBREW", "THAI", "DEVANAGARI")
)
_FEWEST_LETTERS = 8


def corruption(
    text: str,
    scripts: Sequence[str] = ("LATIN",),
    *,
    is_cut: bool = False,
    has_names: bool = True,
) -> str:
    """What is wrong with a text; empty where nothing is. `is_cut`: it ended at the token limit.

    `has_names`: it may name things in another script.
    """
    if "\x00" in text:
        return "it has NUL characters"
    if found := _CONTROL.search(text):
        return f"it has the control character U+{ord(found[0]):04X}"
    # a character of several tokens may be cut off by the limit
    if "\ufffd" in (text.rstrip("\ufffd") if is_cut else text):
        return "it has U+FFFD, the sign for a broken character"
    if _BANGS.search(text):
        return "it has `!!!!`"
    end = text[-_LOOKED_AT:]
    # lines of tables and long numbers repeat signs and digits, loops of a model repeat words
    loops = (loop[1] for loop in _LOOP.finditer(end) if any(c.isalpha() for c in loop[1]))
    run = _RUN.search(end)
    if part := run[1] if run else next(loops, ""):
        return f"it repeats {part!r}"
    # Unicode begins the name of a letter with its script: LATIN, CJK, CYRILLIC …
    names = (unicodedata.name(letter, "UNKNOWN") for letter in text if letter.isalpha())
    letters = [name.split(" ")[0].split("-")[0] for name in names]
    foreign = [script for script in letters if script not in scripts]
    aliens = sum(s in _ALIEN for s in foreign) if tuple(scripts) == ("LATIN",) else 0
    is_few = len(letters) < _FEWEST_LETTERS or len(foreign) <= _FOREIGN_SHARE * len(letters)
    if is_few and (has_names or aliens < _ALIEN_WORD):
        return ""
    most = max(set(foreign), key=foreign.count)
    return f"{len(foreign)} of {len(letters)} letters are {most.title()}, not {scripts[0].title()}"


class Reference(NamedTuple):
    """An answer to compare with: its text, and its tokens where the server gives them."""

    text: str
    tokens: tuple[Token, ...]
    is_cut: bool = False  # by a limit of tokens, or by the end of the context
    finish: str | None = None  # none: not known


class Difference(NamedTuple):
    """How two answers differ, and where first."""

    kind: Kind
    message: str = ""


def reference(answer: Answer) -> Reference:
    """What later answers are held against."""
    return Reference(text_of(answer), answer.tokens, answer.is_cut, answer.finish)


def text_of(answer: Answer) -> str:
    """All that a model wrote."""
    return answer.reasoning + answer.text


def compare(base: Reference, other: Answer, tolerance: Tolerance) -> Difference:
    """Judge the first difference by the probabilities that the reference saw there.

    Only the reference's own logprobs count: a server that computes wrongly is sure of it.
    """
    text = text_of(other)
    if text == base.text:
        if base.finish is None or other.finish == base.finish:
            return Difference("equal")
        ends = f"finish_reason is {other.finish!r}, {base.finish!r} alone"
        return Difference("drift", f"the same text, and {ends}")
    if base.is_cut and other.is_cut:
        # drafts need room, so that a context is full earlier and one goes on where the other ends
        short, long = sorted((base.text, text), key=len)
        if long.startswith(short) and len(short) > len(long) // 2:
            return Difference("equal")
    start = _common(base.text, text)
    shown = f"after {base.text[max(0, start - 20) : start]!r}: {base.text[start : start + 20]!r}"
    shown += f" alone, {text[start : start + 20]!r} here"
    gap = _gap_at(base, text, start, tolerance)
    # where a limit ended the other, that was no choice
    if gap is None or (other.is_cut and start == len(text)):
        # only some servers show what the reference could have gone on with where it ended
        if base.tokens and start in (len(base.text), len(text)):
            return Difference("near", f"{shown} (one of them ends)")
        return Difference("unjudged", shown)
    if gap <= tolerance.tie_nats:
        return Difference("tie", shown)
    kind: Kind = "near" if gap <= tolerance.near_nats else "drift"
    return Difference(kind, f"{shown} ({gap:.2f} nats less probable)")


def _gap_at(base: Reference, text: str, start: int, tolerance: Tolerance) -> float | None:
    """How much less probable the other text is at a place; none where no token is known there."""
    joined = "".join(token.text for token in base.tokens)
    ends = list(accumulate(len(token.text) for token in base.tokens))
    gaps = []
    for place in _places(base.text, joined, start):
        if place < len(joined):
            number = bisect_right(ends, place)
            token = base.tokens[number]
            inside = place - (ends[number] - len(token.text))
            rest = text[max(0, start - inside) :]
            gaps.append(_gap(token, rest, tolerance, has_marks=base.text not in joined))
    # where a mark stands, what is named for one of two places was taken there
    return min(gaps, key=lambda g: (not g.is_named, g.nats)).nats if gaps else None


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    most = min(len(one), len(other))
    return next((i for i in range(most) if one[i] != other[i]), most)


def _places(text: str, joined: str, place: int) -> list[int]:
    """Where a place of a text is in its tokens, which also have what parsers take out.

    Two where such a mark stands there: the difference may be in it or after it.
    """
    done, at = 0, joined.find(text[:_ANCHOR])
    while at >= 0:
        common = _common(text[done:place], joined[at:])
        done, at = done + common, at + common
        after = joined.find(text[done : done + _ANCHOR], at)
        if done == place:
            return sorted({at, max(at, after)})
        at = after
    return []


class _Gap(NamedTuple):
    """How much less probable what the other took was; at least, where it is not named."""

    nats: float
    is_named: bool


def _gap(token: Token, rest: str, tolerance: Tolerance, *, has_marks: bool) -> _Gap:
    others = [(text, p) for text, p in token.top if text != token.text]
    taken = [p for text, p in others if text and rest.startswith(text)]
    # an end is not to be seen, nor is a mark after which the other went on
    if not rest or (has_marks and not taken):
        taken += [p for text, p in others if not text.strip() or _MARK.fullmatch(text.strip())]
    if taken:
        return _Gap(token.logprob - max(taken), True)
    if rest and token.top:
        # not among those that were named: less probable than the last of them
        return _Gap(token.logprob - min(p for _, p in token.top), False)
    # an end that is not named has at most what the named ones leave; and it is never a tie
    left = 1 - math.fsum(math.exp(p) for _, p in set(token.top))
    return _Gap(max(token.logprob - math.log(max(left, 1e-6)), tolerance.near_nats), False)


class Tally(NamedTuple):
    """Many differences, counted and judged."""

    counts: Counter[Kind]
    first: str  # the first drift, or the first near miss

    def sentence(self) -> str:
        """For people."""
        words = {"tie": "ties", "near": "near misses", "unjudged": "differ, not judged"}
        parts = [f"{log.count(self.counts.total(), 'answer')}: {self.counts['equal']} equal"]
        for kind in ("tie", "near", "drift", "unjudged"):
            if number := self.counts[kind]:
                parts.append(f"{number} {words.get(kind, kind)}")
        return ", ".join(parts)

    def fault(self, tolerance: Tolerance) -> str:
        """Why this is more than a sound server may differ; empty where it is not."""
        counts, total = self.counts, self.counts.total()
        # one near miss is allowed however few the answers are
        is_near = counts["near"] > max(1, int(tolerance.near_share * total))
        is_unjudged = counts["unjudged"] > max(1, int(tolerance.unjudged_share * total))
        return (
            f"{self.sentence()}; {self.first}" if counts["drift"] or is_near or is_unjudged else ""
        )


def tally(differences: Sequence[Difference]) -> Tally:
    """Count differences."""
    order = ("drift", "near", "unjudged")
    worst = sorted((d for d in differences if d.kind in order), key=lambda d: order.index(d.kind))
    counts = Counter(difference.kind for difference in differences)
    return Tally(counts, worst[0].message if worst else "")
