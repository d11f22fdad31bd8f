"""Two greedy answers to one prompt: the same, a tie, a near miss, or drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from pipeline import log
from pipeline.smoke.chat import Answer, Token
from pipeline.smoke.model import Tolerance

Kind: TypeAlias = Literal["equal", "tie", "near", "drift", "unjudged"]


class Reference(NamedTuple):
    """An answer to compare with: its text, and its tokens where the server gives them."""

    text: str
    tokens: tuple[Token, ...]
    is_cut: bool = False  # by a limit of tokens, or by the end of the context


class Difference(NamedTuple):
    """How two answers differ, and where first."""

    kind: Kind
    message: str = ""


def reference(answer: Answer) -> Reference:
    """What later answers are held against."""
    return Reference(_said(answer), answer.tokens, answer.is_cut)


def _said(answer: Answer) -> str:
    return answer.reasoning + answer.text


def compare(base: Reference, other: Answer, tolerance: Tolerance) -> Difference:
    """Judge the first difference by the probabilities that the reference saw there.

    Only the reference's own logprobs count: a server that computes wrongly is sure of it.
    """
    said = _said(other)
    if said == base.text or (base.is_cut and other.is_cut and _is_most(base.text, said)):
        return Difference("equal")
    start = _common(base.text, said)
    shown = f"after {base.text[max(0, start - 20) : start]!r}: {base.text[start : start + 20]!r}"
    shown += f" alone, {said[start : start + 20]!r} here"
    place = _token_at(base, start)
    if place is None:
        return Difference("unjudged", shown)
    token, begins = place
    gap = _gap(token, said[begins:])
    if gap is None:
        return Difference("near", f"{shown} (one of them ends)")
    if gap <= tolerance.tie_nats:
        return Difference("tie", shown)
    kind: Kind = "near" if gap <= tolerance.near_nats else "drift"
    return Difference(kind, f"{shown} ({gap:.2f} nats less probable)")


def _is_most(one: str, other: str) -> bool:
    """Whether one goes on where the other ends: drafts need room, so a context is full earlier."""
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and len(short) > len(long) // 2


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    most = min(len(one), len(other))
    return next((i for i in range(most) if one[i] != other[i]), most)


def _token_at(base: Reference, place: int) -> tuple[Token, int] | None:
    """The reference's token at a place of its text, and where that token begins."""
    joined = "".join(t.text for t in base.tokens)
    # tokens also have what parsers take out: marks around the reasoning, the end of the turn
    begins = -joined.find(base.text) if base.text in joined else None
    if begins is None:
        return None
    for token in base.tokens:
        if begins <= place < begins + len(token.text):
            return token, begins
        begins += len(token.text)
    return None


def _gap(token: Token, rest: str) -> float | None:
    """How much less probable what the other took was; none where the other ended."""
    if not rest or not token.top:
        return None
    taken = [p for text, p in token.top if text and text != token.text and rest.startswith(text)]
    # not among those that were named: less probable than the last of them
    return token.logprob - (max(taken) if taken else min(p for _, p in token.top))


class Tally(NamedTuple):
    """Many differences, counted and judged."""

    equal: int
    tie: int
    near: int
    drift: int
    unjudged: int
    first: str  # the first drift, or the first near miss

    @property
    def total(self) -> int:
        return self.equal + self.tie + self.near + self.drift + self.unjudged

    def sentence(self) -> str:
        """For people."""
        parts = [f"{log.count(self.total, 'answer')}: {self.equal} equal"]
        for name in ("tie", "near", "drift", "unjudged"):
            if number := getattr(self, name):
                words = {"tie": "ties", "near": "near misses", "unjudged": "differ, not judged"}
                parts.append(f"{number} {words.get(name, name)}")
        return ", ".join(parts)

    def fault(self, tolerance: Tolerance) -> str:
        """Why this is more than a sound server may differ; empty where it is not."""
        # one near miss is allowed however few the answers are
        most_near = max(1, int(tolerance.near_share * self.total))
        most_unjudged = max(1, int(tolerance.unjudged_share * self.total))
        if self.drift or self.near > most_near or self.unjudged > most_unjudged:
            return f"{self.sentence()}; {self.first}"
        return ""


def tally(differences: Sequence[Difference]) -> Tally:
    """Count differences."""
    order = ("drift", "near", "unjudged")
    worst = sorted((d for d in differences if d.kind in order), key=lambda d: order.index(d.kind))
    kinds = [d.kind for d in differences]
    return Tally(
        equal=kinds.count("equal"),
        tie=kinds.count("tie"),
        near=kinds.count("near"),
        drift=kinds.count("drift"),
        unjudged=kinds.count("unjudged"),
        first=worst[0].message if worst else "",
    )
