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
from pipeline.serving.smoke.chat import ChatAnswer, Token
from pipeline.serving.smoke.model import Tolerance

Kind: TypeAlias = Literal["equal", "tie", "near", "drift", "unjudged"]
_WORDS: dict[Kind, str] = {"tie": "ties", "near": "near misses", "drift": "drift"}
_WORDS["unjudged"] = "differ, not judged"
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
# No prompt asks for names in another script: two letters of these are a word that slipped in.
_ALIEN_WORD = 2
_ALIEN = frozenset(
    ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "CYRILLIC", "ARABIC", "HEBREW", "THAI", "DEVANAGARI")
)
_FEWEST_LETTERS = 8


def corruption(text: str, scripts: Sequence[str] = ("LATIN",), *, is_cut: bool = False) -> str:
    """What is wrong with a text; empty where nothing is. `is_cut`: it ended at the token limit."""
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
    if is_few and aliens < _ALIEN_WORD:
        return ""
    most = max(set(foreign), key=foreign.count)
    return f"{len(foreign)} of {len(letters)} letters are {most.title()}, not {scripts[0].title()}"


class AnswerReference(NamedTuple):
    """An answer to compare with: its text, and its tokens where the server gives them."""

    text: str
    tokens: tuple[Token, ...]
    is_cut: bool = False  # by a limit of tokens, or by the end of the context
    finish: str | None = None  # none: not known


class TextDifference(NamedTuple):
    """How two answers differ, and where first."""

    kind: Kind
    message: str = ""


def reference(answer: ChatAnswer) -> AnswerReference:
    """What later answers are held against."""
    return AnswerReference(written_text(answer), answer.tokens, answer.is_cut, answer.finish)


def written_text(answer: ChatAnswer) -> str:
    """All that a model wrote."""
    return answer.reasoning + answer.text


def compare_answers(
    base: AnswerReference, other: ChatAnswer, tolerance: Tolerance
) -> TextDifference:
    """Judge the first difference by the probabilities that the reference saw there.

    Only the reference's own logprobs count: a server that computes wrongly is sure of it.
    """
    text = written_text(other)
    if text == base.text:
        if base.finish is None or other.finish == base.finish:
            return TextDifference("equal")
        ends = f"finish_reason is {other.finish!r}, {base.finish!r} alone"
        return TextDifference("drift", f"the same text, and {ends}")
    if base.is_cut and other.is_cut:
        # drafts need room, so that a context is full earlier and one goes on where the other ends
        short, long = sorted((base.text, text), key=len)
        if long.startswith(short) and len(short) > len(long) // 2:
            return TextDifference("equal")
    start = _common(base.text, text)
    shown = parting(base.text, text)
    gap = _gap_at(base, text, start, tolerance)
    # where a limit ended the other, that was no choice
    if gap is None or (other.is_cut and start == len(text)):
        # only some servers show what the reference could have gone on with where it ended
        if base.tokens and start in (len(base.text), len(text)):
            return TextDifference("near", f"{shown} (one of them ends)")
        return TextDifference("unjudged", shown)
    if gap <= tolerance.tie_nats:
        return TextDifference("tie", shown)
    kind: Kind = "near" if gap <= tolerance.near_nats else "drift"
    return TextDifference(kind, f"{shown} ({gap:.2f} nats less probable)")


def _gap_at(base: AnswerReference, text: str, start: int, tolerance: Tolerance) -> float | None:
    """How much less probable the other text is at a place; none where no token is known there."""
    joined = "".join(token.text for token in base.tokens)
    ends = list(accumulate(len(token.text) for token in base.tokens))
    gaps: list[tuple[bool, float]] = []  # whether what the other took is not named, and nats
    # Where the place is in the tokens, which also have what parsers take out. Two where such a mark
    # stands there: the difference may be in it or after it.
    places: list[int] = []
    done, at = 0, joined.find(base.text[:_ANCHOR])
    while at >= 0 and not places:
        common = _common(base.text[done:start], joined[at:])
        done, at = done + common, at + common
        after = joined.find(base.text[done : done + _ANCHOR], at)
        if done == start:
            places = sorted({at, max(at, after)})
        at = after
    for place in places:
        if place >= len(joined):
            continue
        number = bisect_right(ends, place)
        token = base.tokens[number]
        inside = place - (ends[number] - len(token.text))
        rest = text[max(0, start - inside) :]
        others = [(text, p) for text, p in token.top if text != token.text]
        taken = [p for text, p in others if text and rest.startswith(text)]
        # an end is not to be seen, nor is a mark after which the other went on
        if not rest or (base.text not in joined and not taken):
            taken += [p for text, p in others if not text.strip() or _MARK.fullmatch(text.strip())]
        if taken:
            gaps.append((False, token.logprob - max(taken)))
        elif rest and token.top:
            # not among those that were named: less probable than the last of them
            gaps.append((True, token.logprob - min(p for _, p in token.top)))
        else:
            # an end that is not named has at most what the named ones leave; and is never a tie
            left = 1 - math.fsum(math.exp(p) for _, p in set(token.top))
            nats = token.logprob - math.log(max(left, 1e-6))
            gaps.append((True, max(nats, tolerance.near_nats)))
    # where a mark stands, what is named for one of two places was taken there
    return min(gaps)[1] if gaps else None


def parting(one: str, other: str, names: tuple[str, str] = ("alone", "here")) -> str:
    """Two texts from where they differ, for people; `names` say whose each is."""
    start = _common(one, other)
    shown = f"after {one[max(0, start - 20) : start]!r}: {one[start : start + 20]!r} {names[0]}"
    return f"{shown}, {other[start : start + 20]!r} {names[1]}"


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    most = min(len(one), len(other))
    return next((i for i in range(most) if one[i] != other[i]), most)


def tally(differences: Sequence[TextDifference], tolerance: Tolerance) -> tuple[str, str]:
    """Differences counted, for people, and why they are more than a sound server may have."""
    counts = Counter(difference.kind for difference in differences)
    parts = [f"{log.count(len(differences), 'answer')}: {counts['equal']} equal"]
    parts += [f"{counts[kind]} {word}" for kind, word in _WORDS.items() if counts[kind]]
    # one near miss is allowed however few the answers are
    near, unjudged = (
        max(1, int(share * len(differences)))
        for share in (tolerance.near_share, tolerance.unjudged_share)
    )
    found = ", ".join(parts)
    if not counts["drift"] and counts["near"] <= near and counts["unjudged"] <= unjudged:
        return found, ""
    order = ("drift", "near", "unjudged")
    worst = min((d for d in differences if d.kind in order), key=lambda d: order.index(d.kind))
    return found, f"{found}; {worst.message}"
