"""Asks workers for every case of an image's parsers, and turns their answers into verdicts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pipeline.core.model import Frozen
from pipeline.core.verdict import GateVerdict, worst
from pipeline.images.assemble.plan import ImagePlan, program_digest
from pipeline.images.gate.evidence import Evidence
from pipeline.images.gate.files import parser_owner, read_setup
from pipeline.images.gate.parsers.cases import (
    ParserCase,
    ParserGates,
    ParsersFile,
    Severity,
    read_parser_gates,
)
from pipeline.images.gate.smem.engine import (
    EngineTree,
    GateContext,
    engine_pin,
    engine_tree,
)
from pipeline.images.gate.smem.environment import make_environment
from pipeline.images.gate.smem.image_gate import OpenedGate, chosen_series
from pipeline.images.gate.smem.results import CaseReply, EngineResult
from pipeline.images.gate.smem.run import Answer, Case, WorkerTarget, kept_or_asked

PARSER_WORKER = Path(__file__).with_name("worker")
_MOST_SHOWN = 60  # characters of a step in a message


class BreakingStream(Frozen):
    """The smallest stream that was found to break an answer."""

    tokens: int  # of its largest step; all others have one
    step: str  # what that step holds
    empty_end: bool  # the end comes alone, after the last token
    faults: list[str]
    got: Any = None  # what a client then has
    single: Any = None  # of an answer that was cut off: what it has from single tokens


class ParserAnswer(CaseReply):
    """What a worker reports of one case."""

    ended: Literal["judged", "no parser", "no endpoint", "not imported", "died", "timed out"]
    route: str = ""  # the function of the engine that was driven
    address: str = ""  # the endpoint that calls it
    form: str = ""  # how the model writes calls: in its own format, or as the engine's JSON
    streams: int = 0
    failed: int = 0
    faults: list[str] = []
    token_by_token: bool = False
    unstreamed: dict[str, Any] | None = None  # what is wrong without a stream
    smallest: BreakingStream | None = None
    stand_ins: list[str] = []
    versions: dict[str, str] = {}
    seconds: float = 0.0

    @property
    def wrong(self) -> str:
        """What is wrong, and in the smallest stream that shows it."""
        faults, smallest = ", ".join(self.faults), self.smallest
        if self.message:  # of a conversation, which has no steps
            return f"{faults}: {self.message}"
        if self.unstreamed is not None:
            return f"{faults}: also without a stream"
        if smallest is None or smallest.tokens == 1:
            return f"{faults}: token by token"
        step = smallest.step
        shown = step if len(step) <= _MOST_SHOWN else f"{step[:30]}…{step[-29:]}"
        return f"{faults}: a step of {smallest.tokens} tokens: {shown!r}"


class ParserResult(Frozen):
    """A case, judged. Unknown is never passed."""

    name: str
    family: str
    parsers: dict[str, str]
    stands_for: list[str]
    verdict: GateVerdict
    message: str = ""
    severity: Severity | None = None
    streams: int = 0
    failed: int = 0
    faults: list[str] = []
    unstreamed: dict[str, Any] | None = None
    smallest: BreakingStream | None = None
    route: str = ""
    address: str = ""
    form: str = ""
    stand_ins: list[str] = []
    seconds: float = 0.0
    cached: bool = False

    @classmethod
    def of(
        cls, case: ParserCase, answer: ParserAnswer, file: ParsersFile, cached: bool
    ) -> ParserResult:
        """The verdict on one case."""
        verdict: GateVerdict = "passed"
        severity: Severity | None = None
        message = ""
        absent = file.no_endpoint.get(case.endpoint) if case.endpoint != "chat" else None
        if absent and answer.ended == "no endpoint":
            verdict, message = "accepted", absent
        elif answer.ended != "judged":
            reasons = {"timed out": f"took longer than {case.timeout_s} s and was stopped"}
            verdict, message = "unknown", answer.message or reasons.get(answer.ended, answer.ended)
        elif absent:
            verdict = "unknown"
            message = f"the engine has this endpoint: take {case.endpoint} out of no_endpoint"
        elif not answer.streams:
            verdict, message = "unknown", "no stream was tried"
        elif answer.failed:
            # a conversation has no steps: whoever sends one meets it
            if case.conversation is None:
                severity = "token by token" if answer.token_by_token else "larger steps"
            verdict, message = "failed", answer.wrong
            for known in file.accepted:
                is_meant = fnmatchcase(case.name, known.case) and known.only in (None, severity)
                if is_meant and set(answer.faults) <= set(known.faults):
                    verdict, message = "accepted", f"{known.reason} {known.upstream[0]}"
                    break
        copied = ("streams", "failed", "faults", "unstreamed", "route", "address", "form")
        return cls(
            **case.model_dump(include={"name", "family", "parsers", "stands_for"}),
            **{field: getattr(answer, field) for field in copied},
            verdict=verdict,
            message=message,
            severity=severity,
            smallest=answer.smallest,
            stand_ins=answer.stand_ins,
            seconds=answer.seconds,
            cached=cached,
        )


class ParserResults(EngineResult):
    """All cases of an image's parsers, and what decided them."""

    cases: list[ParserResult]
    not_judged: dict[str, str] = {}


@dataclass(frozen=True)
class ChatTarget(WorkerTarget[Case, Answer]):
    """An engine as far as its chat endpoint imports it."""

    bare: Sequence[str]  # packages without their own beginning
    left_out: Sequence[str]  # stood in for

    def job(self, cases: Sequence[Case]) -> dict[str, Any]:
        left_out = [*self.absent, *self.left_out]
        return {**super().job(cases), "bare": list(self.bare), "left_out": left_out}


class ParserTarget(ChatTarget[ParserCase, ParserAnswer]):
    """An engine's chat endpoint, with its parsers."""

    @property
    def program(self) -> Path:
        return PARSER_WORKER

    @property
    def answer_type(self) -> type[ParserAnswer]:
        return ParserAnswer

    def key(self, case: ParserCase) -> str:
        setup = {"bare": list(self.bare), "left_out": list(self.left_out)}
        # these decide no answer
        asked = case.model_dump(exclude={"family", "stands_for", "timeout_s"})
        return self.key_of(worker=program_digest(PARSER_WORKER), setup=setup, case=asked)


@dataclass(frozen=True)
class ParserGate(OpenedGate[ParserGates]):
    """An image made ready for judging its parsers; `plan` is that whose engine it has."""

    image: ImagePlan | None = None  # where its base has the engine

    @property
    def judged(self) -> ImagePlan:
        return self.image or self.plan

    def target(self, tree: EngineTree) -> ParserTarget:
        store, file = self.context.store, self.gates.file
        about = (store, self.environment, tree, file.bare, file.left_out)
        return ParserTarget(*about, ask=self.context.ask)

    def judge(self, tree: EngineTree, cases: Sequence[ParserCase]) -> list[ParserResult]:
        """Judges every case on one tree."""
        return [
            ParserResult.of(case, answer, self.gates.file, is_kept)
            for case, answer, is_kept in kept_or_asked(self.target(tree), cases)
        ]


def open_parser_gate(
    context: GateContext, plan: ImagePlan, series: str | None = None
) -> ParserGate:
    """Reads an image's cases and makes what they need: neither torch nor Triton."""
    image, owner = plan, parser_owner(context.checkout, plan.spec.name)
    while plan.spec.name != owner and plan.base is not None:
        plan = plan.base
    gates = read_parser_gates(context.checkout, image.spec.name)
    pin = engine_pin(context, plan, read_setup(context.checkout, owner).package, None)
    environment = make_environment(context, plan, gates.file.wheels, kernels=False)
    tree, chosen = engine_tree(context, plan, pin), chosen_series(context, plan, series)
    about = (context, plan, gates, environment, tree, chosen)
    return ParserGate(*about, is_own=series is None, image=image)


def run_parser_gate(
    gate: ParserGate, *, unpatched: bool = False, only: str | None = None
) -> ParserResults:
    """Judges an image's parsers."""
    start = time.monotonic()
    tree = gate.tree if unpatched else gate.patched()
    cases = gate.judge(tree, gate.gates.chosen(only))
    return ParserResults(
        **gate.about(tree, unpatched=unpatched, only=only),
        worker=program_digest(PARSER_WORKER),
        verdict=worst([case.verdict for case in cases], "unknown"),
        cases=cases,
        not_judged=dict(gate.gates.file.not_judged),
        sandbox=gate.target(tree).sandbox,
        seconds=round(time.monotonic() - start, 3),
    )


def parser_doubts(
    used: dict[str, str], judged: Evidence | None, not_judged: Mapping[str, str]
) -> str:
    """Why answers that go through these parsers cannot be relied on; empty where they can.

    `used` has the parsers by flag, `judged` the result for the very image, `not_judged` the reasons
    of its parsers.yaml.
    """
    rows = [
        row
        for row in (judged.rows if judged else [])
        if all(row.facts["parsers"].get(flag) == parser for flag, parser in used.items())
    ]
    named = " and ".join(dict.fromkeys(used.values()))
    if not rows:
        why = next((not_judged[parser] for parser in used.values() if parser in not_judged), "")
        return f"its parsers ({named}) were not judged on this image{why and ': '}{why}"
    bad = [row for row in rows if row.verdict in ("failed", "unknown")]
    if not bad:
        return ""
    breaking = {row.facts["severity"] for row in bad}
    when = " in larger steps, as with drafts" if breaking == {"larger steps"} else ""
    first = f"{bad[0].name}: {bad[0].message}"
    number = f"{len(bad)} of {len(rows)}"
    return f"its parsers ({named}) lose or change {number} known answers{when}: {first}"
