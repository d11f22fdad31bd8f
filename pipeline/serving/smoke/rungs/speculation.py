"""Rung 10: a draft model may make answers faster, never other answers."""

from __future__ import annotations

import math
import re
from collections import Counter

from pipeline.serving.smoke.client import NotOffered, Unsound
from pipeline.serving.smoke.compare import compare_answers
from pipeline.serving.smoke.rungs.answers import json_by_schema
from pipeline.serving.smoke.rungs.memory import shared_prefix
from pipeline.serving.smoke.rungs.streams import as_alone, tools_at_once
from pipeline.serving.smoke.rungs.tools import tool_scenarios, without_tools
from pipeline.serving.smoke.session import (
    Rung,
    SmokeSession,
    baseline_questions,
    is_right,
    record_baseline,
)

SPECULATION = Rung("speculation", "A draft model changes no answer")
_AT_ONCE = 2  # from two streams on, drafts corrupted answers: local-inference-lab/rtx6kpro#53
_LOST_SHARE = 0.1
_VLLM = "vllm:"  # how its metrics begin
_MANY_DRAFTED = 50  # tokens; of fewer none may be accepted by chance
_ORACLE_PROMPTS = 12
_COUNTS = re.compile(
    r"^\S*spec_decode_num_(accepted|draft)_tokens(?:_total)?(?:\{[^}]*\})? ([0-9.e+]+)$", re.M
)


def _no_baseline(session: SmokeSession) -> str:
    return "" if session.baseline else "no baseline was given: record one without a draft model"


def _not_drafting(session: SmokeSession) -> str:
    return "" if session.is_drafting else "the ladder turned no draft model on"


@SPECULATION.check("draft model", skip=lambda s: "" if s.start_drafting else s.why_no_drafting)
async def _start_drafting(session: SmokeSession) -> str:
    """Last of all: what was answered without the draft model must be answered with it."""
    assert session.start_drafting is not None
    if session.baseline is None:
        session.baseline = await record_baseline(session, session.client.address.url)
    await session.start_drafting()
    session.is_drafting = True
    return f"it is on; held against {len(session.baseline.answers)} answers without it"


@SPECULATION.check("the baseline's answers", skip=_no_baseline)
async def _same(session: SmokeSession) -> str:
    assert session.baseline is not None
    known = {a.prompt: a for a in session.baseline.answers}
    questions = [q for q in baseline_questions() if q.prompt in known]
    if not questions:
        raise Unsound("the baseline has none of the prompts of this version")
    # a quick run asks for shorter answers than a whole one that recorded the baseline
    room = session.baseline.answer_tokens or session.answer_tokens
    prompts = [q.prompt for q in questions]
    answers = await session.ask_clean(prompts, _AT_ONCE, max_tokens=room)
    pairs = list(zip(questions, answers, strict=True))
    differences = [
        compare_answers(known[q.prompt].reference(), a, session.plan.tolerance) for q, a in pairs
    ]
    found = session.require_close(differences, "held against the baseline: ")
    before = sum(known[q.prompt].is_right for q in questions)
    now = sum(is_right(q, a.text) for q, a in pairs)
    if now < before - _LOST_SHARE * len(questions):
        raise Unsound(f"{now} of {len(questions)} are right, {before} were in the baseline")
    return f"{found}; {now} right, {before} in the baseline"


@SPECULATION.check("the baseline's probabilities", skip=_no_baseline)
async def _probabilities(session: SmokeSession) -> str:
    """Numbers that are a little wrong change probabilities long before they change words."""
    assert session.baseline is not None
    differences: list[float] = []
    for known in session.baseline.answers[:_ORACLE_PROMPTS]:
        answer = await session.ask_known(known.prompt)
        for want, got in zip(known.tokens, answer.tokens, strict=False):
            if want.text != got.text:
                break
            differences.append(abs(want.logprob - got.logprob))
    if not differences:
        raise NotOffered("the baseline or the server has no logprobs")
    mean, most = math.fsum(differences) / len(differences), session.plan.tolerance.oracle_nats
    found = f"{mean:.3f} nats apart on average over {len(differences)} tokens, {most} allowed"
    if mean > most:
        raise Unsound(found)
    return found


@SPECULATION.check("streams with drafts", skip=_not_drafting)
async def _streams(session: SmokeSession) -> str:
    """Few and many at once, held against what each was answered alone, without drafts."""
    several = sorted(n for n in session.plan.streams if n > 1)
    if not several:
        raise NotOffered("no more than one at once is expected")
    parts = [
        f"{number} at once: {await as_alone(session, number)}"
        for number in dict.fromkeys((several[0], several[-1]))
    ]
    return "; ".join(parts)


# vllm-project/vllm#53912: prefixes that were kept, read by a draft model
SPECULATION.check("shared prefix with drafts", skip=_not_drafting)(shared_prefix)
SPECULATION.check("JSON with drafts", "quality", _not_drafting)(json_by_schema)


@SPECULATION.check(
    "tool calls with drafts", "quality", lambda s: _not_drafting(s) or without_tools(s)
)
async def _tools(session: SmokeSession) -> str:
    """One after the other, then many at once."""
    return f"{await tool_scenarios(session)}; {await tools_at_once(session)}"


@SPECULATION.check("acceptance")
async def _acceptance(session: SmokeSession) -> str:
    """How much of the draft is taken, for the record."""
    text = await session.client.text("/metrics")
    counts: Counter[str] = Counter()
    for name, value in _COUNTS.findall(text):
        # one line for each of several engines
        counts[name] += int(float(value))
    if not counts["draft"]:
        # vLLM counts wherever it drafts; SGLang has other names, and only with a flag
        if session.is_drafting and _VLLM in text:
            raise Unsound("the draft model was turned on, and the server drafts nothing")
        raise NotOffered("the server counts no drafted tokens: nothing speculates here")
    # right answers, and slower than without: a draft model of another model, or wrong weights
    if not counts["accepted"] and counts["draft"] >= _MANY_DRAFTED:
        raise Unsound(f"{counts['draft']} tokens were drafted, and none was accepted")
    return f"{counts['accepted'] / counts['draft']:.0%} of drafted tokens are accepted"
