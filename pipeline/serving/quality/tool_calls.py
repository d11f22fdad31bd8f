"""Part `schema`: calls of tools fit their schemas, whole and in streams."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import HttpUrl

from pipeline.core import log
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Frozen, Line
from pipeline.core.verdict import TestVerdict, worst
from pipeline.core.yaml_file import read_yaml
from pipeline.serving.quality.estimate import wilson
from pipeline.serving.quality.model import QualityNumber, QualityPart, QualityRow
from pipeline.serving.quality.session import QualitySession
from pipeline.serving.quality.tool_cases import ToolCase
from pipeline.serving.smoke.chat import ChatAnswer, ask_chat
from pipeline.serving.smoke.client import Gone, Unsound
from pipeline.serving.smoke.schema import SchemaUnknown, same_json, schema_fault

Outcome: TypeAlias = Literal["valid", "no call", "broken", "failed", "not judged"]
_MOST_ROWS = 40  # of what went wrong; all answers are among the exchanges
_MOST_ARGUMENTS = 1 << 20


class CallResult(NamedTuple):
    """What became of one case, in one way of asking."""

    case: str
    is_stream: bool
    outcome: Outcome
    message: str = ""
    is_exact: bool | None = None  # the very arguments that the prompt names

    @classmethod
    def judged(cls, case: ToolCase, answer: ChatAnswer) -> CallResult:
        """Judges whether every call of an answer fits the schema of its tool."""
        question = (case.name, answer.is_stream)
        if not answer.calls:
            # a request of a stranger need not lead to a call
            must = case.wanted or case.choice == "required"
            message = f"no call; content {answer.text[:80]!r}"
            return cls(*question, "no call" if must else "not judged", message)
        exact: list[bool] = []
        for call in answer.calls:
            schema = case.parameters(call.name)
            if schema is None:
                return cls(*question, "broken", f"there is no tool {call.name[:80]!r}")
            try:
                data = call.arguments.encode(errors="surrogatepass")
                arguments = read_json(data, most_bytes=_MOST_ARGUMENTS, any_int=True)
                fault = schema_fault(schema, arguments)
            except JsonInvalid as error:
                return cls(*question, "broken", f"the arguments: {error}: {call.arguments[:80]!r}")
            except SchemaUnknown as error:
                return cls(*question, "not judged", str(error))
            if fault or not isinstance(arguments, dict):
                return cls(*question, "broken", f"{call.name}: {fault or 'no object'}")
            if case.wanted:
                name, wanted = case.wanted
                exact.append(call.name == name and same_json(arguments, wanted))
        if answer.finish != "tool_calls":
            return cls(*question, "broken", f"a call, and finish_reason is {answer.finish!r}")
        return cls(*question, "valid", is_exact=exact == [True] if exact else None)


class VendorBar(Frozen):
    """One published number, for models whose name holds a pattern."""

    model: Line
    measure: Literal["schema"]
    text: Line
    source: HttpUrl


class VendorBars(Frozen):
    """`bars.yaml`: what vendors publish for the same measures, each with its source."""

    bars: list[VendorBar]


def vendor_bar(model: str) -> str:
    """What the vendor of a model gives, with its source; empty where nothing is known."""
    name = re.sub(r"[\s_.]+", "-", model.lower())
    known = read_yaml(Path(__file__).with_name("bars.yaml"), VendorBars).bars
    # the first that fits a model counts
    fitting = (f"{bar.text}: {bar.source}" for bar in known if re.search(bar.model, name))
    return next(fitting, "")


async def judge_schema(session: QualitySession, cases: Sequence[ToolCase]) -> QualityPart:
    """Ask for every case twice, and count what fits."""
    plan = session.plan

    async def ask(asked: tuple[ToolCase, bool]) -> CallResult:
        case, is_stream = asked
        body: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": plan.answer_tokens,
            "tools": list(case.tools),
            "tool_choice": case.choice or plan.tool_choice,
            "stream": is_stream,
        }
        try:
            answer = await ask_chat(session.client, session.model, case.messages, **body)
            return CallResult.judged(case, answer)
        except Gone:
            raise
        except Unsound as error:
            return CallResult(case.name, is_stream, "failed", str(error)[:300])

    asked = [(case, is_stream) for case in cases for is_stream in (False, True)]
    results = await session.each(asked, ask, "tool call")
    return schema_part(results, plan.least_valid, session.model)


def schema_part(results: Sequence[CallResult], least: float, model: str) -> QualityPart:
    """The verdict on all results; judges the whole and the streamed ones apart."""
    numbers: list[QualityNumber] = []
    verdicts: list[TestVerdict] = []
    common = {"unit": "share", "bar": least, "vendor": vendor_bar(model)}
    for name, is_stream in (("valid, whole", False), ("valid, streamed", True)):
        asked = [r for r in results if r.is_stream == is_stream and r.outcome != "not judged"]
        if asked:
            share = wilson(sum(r.outcome == "valid" for r in asked), len(asked))
            verdicts.append(share.at_least(least))
            about = {**common, "name": name, "estimate": share}
            numbers.append(QualityNumber.model_validate(about))
    if known := [r for r in results if r.is_exact is not None]:
        share = wilson(sum(bool(r.is_exact) for r in known), len(known))
        numbers.append(QualityNumber(name="arguments as asked for", unit="share", estimate=share))
    counts = Counter(r.outcome for r in results)
    wrong = [r for r in results if r.outcome not in ("valid", "not judged")]
    rows = [
        QualityRow(
            name=f"{r.case}, {'streamed' if r.is_stream else 'whole'}",
            verdict="failed",
            message=f"{r.outcome}: {r.message}",
        )
        for r in wrong[:_MOST_ROWS]
    ]
    listed = ", ".join(f"{number} {name}" for name, number in counts.most_common())
    first = f"; first: {wrong[0].case}: {wrong[0].message[:120]}" if wrong else ""
    return QualityPart(
        name="schema",
        verdict=worst(verdicts, "unknown"),
        message=f"{log.count(len(results), 'call')}: {listed}{first}",
        numbers=numbers,
        rows=rows,
    )
