"""The data of a report: all that a page shows, embedded in it, so that a page can be checked."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from pipeline.core.model import FILE_VERSION, Count, Digest, Frozen, Name, Stamp
from pipeline.serving.bench.metrics import DEFINITIONS
from pipeline.serving.bench.model import SelfTest

# How far evidence holds, as `sm120 verify` says it, or what a report knows by itself.
State: TypeAlias = Literal[
    "valid",
    "unsigned",
    "stale",
    "incomplete",
    "moved",
    "changed",
    "broken",
    "named",  # a digest that was not compared
    "unknown",
]
# As cells of `sm120 bench` are.
CellState: TypeAlias = Literal["good", "void", "partial"]


class _Sparse(Frozen):
    """A value whose JSON leaves out what it does not have: pages hold many of them."""

    @model_serializer(mode="wrap")
    def _without_nothing(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in whole(self).items() if value is not None}


class Measure(_Sparse):
    """One number; low and high are its 95 % confidence interval, where there is one."""

    mean: float
    low: float | None = None
    high: float | None = None
    trials: Count | None = None  # none: the source does not say


class Note(_Sparse):
    """Something a reader must know before believing a number."""

    kind: str
    message: str


class ReportCell(_Sparse):
    """A step of a sweep, or one of several configurations; numbers by bench's names."""

    name: str
    concurrency: Annotated[int, Field(ge=1)] | None = None
    rate_per_s: float | None = None
    state: CellState = "good"
    numbers: dict[str, Measure] = {}
    notes: list[Note] = []

    def mean(self, name: str) -> float | None:
        """A number, where it is known."""
        measure = self.numbers.get(name)
        return None if measure is None else measure.mean


class Lengths(_Sparse):
    """Tokens of a request, as they were asked for."""

    input: Annotated[float, Field(gt=0)]
    output: Annotated[float, Field(gt=0)]


class Series(_Sparse):
    """One server under one workload."""

    name: str
    model: str
    workload: str
    lengths: Lengths | None = None
    recipe: Name | None = None
    cells: list[ReportCell]

    @model_validator(mode="before")
    @classmethod
    def _from_table(cls, value: Any) -> Any:
        """Files of reference data hold tables as their documents print them."""
        if not isinstance(value, dict) or "columns" not in value:
            return value
        rest = {name: each for name, each in value.items() if name not in ("columns", "rows")}
        columns, cells = value["columns"], []
        for row in value.get("rows", []):
            if len(row) != len(columns):
                raise ValueError(f"a row has {len(row)} values for {len(columns)} columns")
            values = dict(zip(columns, row, strict=True))
            concurrency = values.pop("concurrency", None)
            name = values.pop("name", f"c{concurrency}")
            if unknown := [m for m in values if m.split(".")[0] not in DEFINITIONS]:
                raise ValueError(f"{unknown[0]} is no metric of `sm120 bench`")
            numbers = {metric: {"mean": v} for metric, v in values.items() if v is not None}
            cells.append({"name": name, "concurrency": concurrency, "numbers": numbers})
        return {**rest, "cells": cells}


class CardMemory(_Sparse):
    """How the memory of one card is split; what is not known is left out."""

    name: str
    unit: Literal["GB", "GiB"]
    total: float | None = None
    weights: float | None = None
    kv: float | None = None
    free: float | None = None
    used: float | None = None  # sampled: all of it together
    kv_tokens: Count | None = None
    source: str = ""

    @property
    def other(self) -> float | None:
        """What is left of the card: the engine's own buffers, the driver, other programs."""
        total, weights, kv, free = self.total, self.weights, self.kv, self.free
        if total is None or weights is None or kv is None or free is None:
            return None
        # rounded numbers may add up to a little more than the card has
        return max(0.0, total - (weights + kv + free))


class Fact(_Sparse):
    """A row of a table about hardware or software."""

    name: str
    value: str


class ModelRow(_Sparse):
    """A model that was tried."""

    name: str
    quantization: str = ""
    size: str = ""
    experts: str = ""
    status: str = ""


class AttemptRow(_Sparse):
    """One attempt, good or bad."""

    name: str
    at: Stamp | None = None
    model: str
    configuration: str
    outcome: str
    is_good: bool
    message: str = ""
    seconds: float | None = None


class EvidenceLink(_Sparse):
    """One input of the numbers."""

    name: str
    digest: Digest | None = None
    state: State
    message: str = ""


class Measured(_Sparse):
    """What was measured in one place: by a run of ours, or as a document says."""

    name: str
    title: str
    hardware: list[Fact] = []
    software: list[Fact] = []
    models: list[ModelRow] = []
    series: list[Series] = []
    memory: list[CardMemory] = []
    attempts: list[AttemptRow] = []
    evidence: list[EvidenceLink] = []
    notes: list[Note] = []


class RunData(Measured):
    """A run of `sm120 bench`, or another tool's result that was read."""

    file: str
    digest: Digest  # of the run's file, byte for byte
    requests: Digest | None = None  # of its raw requests
    started: Stamp | None = None
    tool: str
    # how well the client reads what is known beforehand
    self_tests: list[SelfTest] = []


class Claim(_Sparse):
    """A number that a document puts above its tables, with the words that it has there."""

    text: str
    value: float
    unit: str
    series: str | None = None  # whose cells it should be found in


class Correction(_Sparse):
    """Where a document's words differ from its own records; with the place that shows it."""

    says: str
    but: str
    source: str


class PublishedReference(Measured):
    """Published tables, word for word, with their source."""

    published: str
    link: str | None = None
    claims: list[Claim] = []
    corrections: list[Correction] = []

    @model_validator(mode="after")
    def _claims_name_series(self) -> PublishedReference:
        known = {series.name for series in self.series}
        for claim in self.claims:
            if claim.series is not None and claim.series not in known:
                raise ValueError(f"the claim {claim.text!r} names no series of it")
        return self


class Quantity(_Sparse):
    """A number inside a sentence."""

    value: float
    decimals: Annotated[int, Field(ge=0, le=6)] = 0


class ReportFinding(_Sparse):
    """A sentence that was computed; `{0}` stands for its first number."""

    kind: Literal["flag", "fact", "advice"]
    about: str
    text: str
    numbers: list[Quantity] = []

    @model_validator(mode="after")
    def _has_its_numbers(self) -> ReportFinding:
        # braces of a name are no places where a finding has no numbers
        places = re.findall(r"\{(\d)\}", self.text) if self.numbers else []
        if any(int(place) >= len(self.numbers) for place in places):
            raise ValueError("the text has a place without a number")
        return self

    def sentence(self) -> str:
        """The text with its numbers in their places."""
        text = self.text
        for index, number in enumerate(self.numbers):
            text = text.replace(f"{{{index}}}", shown_value(number.value, number.decimals))
        return text


class QualityLine(_Sparse):
    """A number or a verdict of `sm120 quality`, as it prints it."""

    model: str
    part: str
    verdict: str
    what: str
    value: str
    bar: str
    vendor: str = ""
    digest: Digest  # of the result's file


class ReportData(_Sparse):
    """Everything that a report shows."""

    format: Annotated[Literal["sm120-report/1"], FILE_VERSION] = "sm120-report/1"
    title: str
    made: Stamp
    tool: str
    redacted: bool = False
    runs: list[RunData] = []
    references: list[PublishedReference] = []
    attempts: list[AttemptRow] = []
    findings: list[ReportFinding] = []
    # left out of pages that show none, so that older ones stay equal
    quality: list[QualityLine] = Field(default=[], exclude_if=lambda value: not value)

    @property
    def measured(self) -> list[Measured]:
        """Runs, then documents."""
        return [*self.runs, *self.references]


def shown_value(value: object, decimals: int | None) -> str:
    """A value as pages print it."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.{decimals or 0}f}"
