"""Rung 6: an agent's conversation: tools, a late system turn, and no turn computed twice."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

from pipeline.serving.smoke import tasks
from pipeline.serving.smoke.agent_endpoints import AgentAnswer, ask_messages
from pipeline.serving.smoke.client import NotOffered, RequestRefused, Unsound
from pipeline.serving.smoke.rungs.length import UNKNOWN_CONTEXT, measure_text
from pipeline.serving.smoke.rungs.tools import arguments_of, without_tools
from pipeline.serving.smoke.session import Rung, SmokeSession, optional

AGENTS = Rung("agents", "An agent's conversation holds, and is not computed again at every turn")
_LATE, _TOOL = 3, 2  # the turns with a system message, and with a tool call
_MOST_TURN_TOKENS = 1024
_TURN_SHARE = 12  # of the context for one turn
# Hybrid models keep whole blocks of a thousand tokens, so that the end of a prompt is not kept.
_KEPT_SHARE = 0.5


@AGENTS.check("six turns", skip=lambda s: "" if s.context_tokens else UNKNOWN_CONTEXT)
async def _six_turns(session: SmokeSession) -> str:
    """Over /v1/messages, as Claude Code asks.

    A system message that comes late was moved to the front, so that nothing of the conversation
    was found in the cache again: vllm-project/vllm#53393, #56520.
    """
    assert session.context_tokens is not None
    if not session.sentence_tokens:
        await measure_text(session)
    tokens, each = session.context_tokens // _TURN_SHARE, session.sentence_tokens
    turns = tasks.agent_turns(max(1, int(min(_MOST_TURN_TOKENS, tokens) / each)))
    # each turn has a number and a question besides, of about two sentences
    if len(turns) * (max(tokens, each) + 3 * each) > session.context_tokens:
        raise NotOffered(f"{session.context_tokens} tokens are too few for {len(turns)} turns")
    messages: list[dict[str, Any]] = []
    answers: list[AgentAnswer] = []
    note = ""
    for number, (text, question) in enumerate(turns):
        if number == _LATE:
            late = {"role": "system", "content": text}
            try:
                messages, answer = await _turn(session, [*messages, late], question.prompt, number)
            except RequestRefused as error:
                if not error.is_of_field:
                    raise
                note = "; a late system message is refused, and was sent as the user's"
                whole = f"<system-reminder>{text}</system-reminder>\n{question.prompt}"
                messages, answer = await _turn(session, messages, whole, number)
        else:
            if number == _TOOL and session.plan.quality and not without_tools(session):
                messages = await _tool_turn(session, messages)
            whole = f"{text}\n\n{question.prompt}"
            with nullcontext() if number else optional("no system prompt"):
                messages, answer = await _turn(session, messages, whole, number)
        if session.plan.quality and not question.is_right(answer.text):
            why = f"{question.want}, not {answer.text[:80]!r}"
            raise Unsound(f"turn {number + 1}: {question.prompt!r} is {why}")
        answers.append(answer)
    return _require_growth(session, answers) + note


async def _turn(
    session: SmokeSession, messages: list[dict[str, Any]], prompt: str, number: int
) -> tuple[list[dict[str, Any]], AgentAnswer]:
    """One more question of the user; the conversation with its answer."""
    asked = [*messages, {"role": "user", "content": prompt}]
    answer = await ask_messages(session.client, _body(session, asked, stream=number % 2 == 1))
    if answer.model not in (session.model, *session.aliases):
        raise Unsound(f"/v1/messages: asked {session.model!r}, and {answer.model!r} answered")
    if not answer.text.strip():
        raise Unsound(f"turn {number + 1}: the answer is empty")
    return [*asked, {"role": "assistant", "content": answer.parts}], answer


def _body(session: SmokeSession, messages: list[dict[str, Any]], *, stream: bool) -> dict[str, Any]:
    tools = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in tasks.TOOLS
    ]
    return {
        "model": session.model,
        "max_tokens": session.room(64),
        "temperature": 0,
        "system": "You are a careful assistant. Answer briefly.",
        "messages": messages,
        **({"stream": True} if stream else {}),
        **({"tools": tools} if session.plan.quality and not without_tools(session) else {}),
    }


async def _tool_turn(session: SmokeSession, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A call, its result, and an answer that has read it; whole and in a stream."""
    scenario = tasks.SCENARIOS[0]
    asked = [*messages, {"role": "user", "content": scenario.prompt}]
    for stream in (False, True):
        answer = await ask_messages(session.client, _body(session, asked, stream=stream))
        calls = [(c.name, arguments_of(c)) for c in answer.calls]
        if calls != [(scenario.tool, scenario.arguments)]:
            how = "in a stream" if stream else "whole"
            raise Unsound(f"/v1/messages, {how}: {scenario.prompt!r}: {json.dumps(calls)}")
    result = {"type": "tool_result", "tool_use_id": answer.calls[0].id}
    done = [
        *asked,
        {"role": "assistant", "content": answer.parts},
        {"role": "user", "content": [{**result, "content": "Rain, 17 degrees"}]},
    ]
    answer = await ask_messages(session.client, _body(session, done, stream=False))
    if "17" not in answer.text:
        raise Unsound(f"/v1/messages: the tool said 17 degrees: {answer.text[:120]!r}")
    return [*done, {"role": "assistant", "content": answer.parts}]


def _require_growth(session: SmokeSession, answers: list[AgentAnswer]) -> str:
    """Every turn is longer, and what came before is kept."""
    prompts = [answer.prompt_tokens for answer in answers]
    if any(b <= a for a, b in pairwise(prompts)):
        raise Unsound(f"each turn adds to the conversation, and usage counts {prompts}")
    told = f"{len(answers)} turns, {prompts[0]} to {prompts[-1]} tokens"
    cached = [answer.cached_tokens for answer in answers]
    if not session.plan.caches or not any(n is not None for n in cached):
        return f"{told}; the server does not count cached tokens"
    kept = [n or 0 for n in cached]
    for number in range(_LATE, len(answers)):
        if kept[number] < _KEPT_SHARE * prompts[number - 1]:
            before = f"the turn before had {prompts[number - 1]}"
            counts = f"{kept[number]} of {prompts[number]} tokens were kept, and {before}"
            raise Unsound(f"turn {number + 1}: {counts}; cached tokens by turn: {kept}")
    if kept[-1] <= kept[_LATE]:
        raise Unsound(f"the conversation grows, and what is kept of it does not: {kept}")
    return f"{told}; {kept[-1]} tokens of the last were kept"
