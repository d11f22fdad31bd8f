"""The plan of a run, and its result: closed values that go into evidence."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from pipeline.core.model import FILE_VERSION, Count, Digest, Frozen, Stamp
from pipeline.core.verdict import TestVerdict
from pipeline.serving.quality.estimate import Estimate
from pipeline.serving.smoke.model import ChatLimits, Positive, Share

PartName: TypeAlias = Literal["tokens", "schema", "agreement"]
PARTS: tuple[PartName, ...] = ("tokens", "schema", "agreement")


class QualityPlan(Frozen):
    """What a run asks, and the bars that its answers must reach.

    We chose the bars, and every result shows them, with a vendor's own beside them.
    """

    model: str | None = None  # none: the first that the server names
    parts: list[PartName] = list(PARTS)
    cases: Positive = 300  # of tools; each is asked whole and as a stream
    seed: Count = 26
    tool_choice: Literal["auto", "required"] = "auto"
    texts: Positive = 96  # of the agreement: fewer cannot show 95 % even where all agree
    places: Positive = 8  # in each text
    at_once: Positive = 4
    answer_tokens: Positive = 1024
    least_valid: Share = 0.98
    least_agreement: Share = 0.95
    # a quarter of a nat is a probability that is wrong by a quarter, as for the smoke test
    most_nats: Annotated[float, Field(ge=0)] = 0.25
    # tokens as close as this may swap: sgl-project/sglang#39068
    tie_nats: Annotated[float, Field(ge=0)] = 0.3
    limits: ChatLimits = ChatLimits()


class QualityRow(Frozen):
    """One thing that a part looked at."""

    name: str
    verdict: TestVerdict
    message: str = ""


class QualityNumber(Frozen):
    """A number with its interval, what it must be, and who asks for that."""

    name: str
    unit: Literal["share", "nats"]
    estimate: Estimate
    bar: float | None = None
    vendor: str = ""  # what the vendor gives for the same thing, with its source

    def text(self) -> str:
        """For people."""
        value, low, high = self.estimate.value, self.estimate.low, self.estimate.high
        if self.unit == "share":
            return f"{value:.1%} [{low:.1%}, {high:.1%}]"
        return f"{value:.3f} [{low:.3f}, {high:.3f}] nats"

    def bar_text(self) -> str:
        """For people."""
        if self.bar is None:
            return "none"
        return f"≥ {self.bar:.1%}" if self.unit == "share" else f"≤ {self.bar:g} nats"


class QualityPart(Frozen):
    """One part with its verdict, numbers, and the rows that did not pass."""

    name: PartName
    verdict: TestVerdict
    message: str
    numbers: list[QualityNumber] = []
    rows: list[QualityRow] = []
    inputs: dict[str, Digest] = {}  # files that decided it: template, tokenizer, reference
    requests: Count = 0
    seconds: float = 0.0


class QualityResult(Frozen):
    """All parts that ran."""

    format: Annotated[Literal["sm120-quality/1"], FILE_VERSION] = "sm120-quality/1"
    url: str
    model: str
    started: Stamp
    verdict: TestVerdict
    parts: list[QualityPart]
    exchanges: Count
    seconds: float
    plan: QualityPlan
