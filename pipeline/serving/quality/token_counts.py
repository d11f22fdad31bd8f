"""Part `tokens`: the server counts a prompt as its model's own template and tokenizer do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.core.errors import MissingTool, TemplateUnusable
from pipeline.core.foreign_json import value_at
from pipeline.core.verdict import TestVerdict, worst
from pipeline.images.gate.templates.cases import THINKING, Conversation
from pipeline.images.gate.templates.files import ModelText
from pipeline.images.gate.templates.renderer import TemplateRefused
from pipeline.serving.quality.model import QualityPart, QualityRow
from pipeline.serving.quality.session import QualitySession
from pipeline.serving.smoke.chat import ask_chat
from pipeline.serving.smoke.client import Gone, NotOffered, RequestRefused, Unsound

_TOKENIZE = "/tokenize"


class _NotJudged(Exception):
    """Why there is nothing to compare a count with."""


async def judge_tokens(
    session: QualitySession, text: ModelText, conversations: Sequence[Conversation]
) -> QualityPart:
    """Compare `usage.prompt_tokens` of each conversation with the reference, whole and streamed."""
    by = "tokenizer.json" if text.tokenizer_file else "the server's own tokenizer"
    off: list[int] = []  # how far each wrong count is off

    async def look(case: Conversation) -> QualityRow:
        verdict: TestVerdict = "passed"
        try:
            want = await _wanted(session, text, case)
            got = [await _counted(session, case, is_stream) for is_stream in (False, True)]
            message = f"{want} tokens"
            if got != [want, want]:
                verdict = "failed"
                message = (
                    f"the reference has {want} tokens, the server {got[0]} ({got[1]} streamed)"
                )
                off.extend(each - want for each in got)
        except _NotJudged as error:
            verdict, message = "skipped", str(error)
        except (TemplateUnusable, MissingTool) as error:
            verdict, message = "unknown", str(error)
        except Gone:
            raise
        except Unsound as error:
            verdict, message = "failed", str(error)[:300]
        return QualityRow(name=case.name, verdict=verdict, message=message)

    rows = await session.each(conversations, look, "conversation")
    judged = [row for row in rows if row.verdict in ("passed", "failed")]
    good = sum(row.verdict == "passed" for row in rows)
    message = f"{good} of {len(judged)} counts exact, by {by}"
    if len(set(off)) == 1:
        message += f"; wrong ones are all off by {off[0]:+d}"
    if not text.tokenizer_file:
        # a wrong tokenizer would be wrong on both sides: only the template is judged
        message += f" ({text.why_no_tokenizer}): this judges the template, not the tokenizer"
    if not judged:
        message = rows[0].message if rows else "no conversation"
    verdicts: list[TestVerdict] = [row.verdict for row in rows if row.verdict != "skipped"]
    return QualityPart(
        name="tokens",
        verdict=worst(verdicts, "unknown"),
        message=message,
        rows=rows,
        inputs=dict(text.inputs),
    )


async def _wanted(session: QualitySession, text: ModelText, case: Conversation) -> int:
    """The count of the reference, or why there is none."""
    if case.has_picture:
        raise _NotJudged("how many tokens a picture takes is not the template's matter")
    try:
        rendered = text.prompt(case)
        if case.options:
            other = dict.fromkeys(THINKING, not case.options[THINKING[0]])
            if rendered == text.prompt(case, options=other):
                raise _NotJudged("the template has no switch for thinking")
    except TemplateRefused as error:
        raise _NotJudged(f"the template refuses it: {error}") from error
    if text.tokenizer_file:
        return text.count(rendered)
    # vLLM and SGLang read `prompt`, llama.cpp `content`; each has its own names for "as it is"
    body = {
        "model": session.model,
        **dict.fromkeys(("prompt", "content"), rendered),
        **dict.fromkeys(("add_special_tokens", "add_special"), False),
        "parse_special": True,
        "max_tokens": 1,  # bounds the answer
    }
    try:
        _, value = await session.client.post(_TOKENIZE, body, optional=True)
    except (NotOffered, RequestRefused) as error:
        why = f"{text.why_no_tokenizer}, and the server does not count: {str(error)[:120]}"
        raise TemplateUnusable(why) from error
    tokens = value_at(value, "tokens")
    if not isinstance(tokens, list):
        raise TemplateUnusable(f"{text.why_no_tokenizer}, and {_TOKENIZE} gives no tokens")
    return len(tokens)


async def _counted(session: QualitySession, case: Conversation, is_stream: bool) -> int:
    """The server's count."""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "stream": is_stream}
    if is_stream:
        # without it llama.cpp and vLLM count nothing
        body["stream_options"] = {"include_usage": True}
    if case.tools:
        body["tools"] = list(case.tools)
    if case.options:
        body["chat_template_kwargs"] = dict(case.options)
    try:
        answer = await ask_chat(session.client, session.model, case.messages, **body)
    except RequestRefused as error:
        if not error.is_of_field:
            raise
        raise _NotJudged(f"the server refuses it: {str(error)[:160]}") from error
    return answer.prompt_tokens
