"""Rung 6: an agent's conversation: tools, a late system turn, and no turn computed twice."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

from pipeline.core.foreign_json import value_at
from pipeline.serving.smoke import tasks
from pipeline.serving.smoke.agent_endpoints import MESSAGES, AgentAnswer, ask_messages
from pipeline.serving.smoke.client import NotOffered, RequestRefused, Unsound
from pipeline.serving.smoke.rungs.length import UNKNOWN_CONTEXT, measure_text
from pipeline.serving.smoke.rungs.tools import arguments_of, without_tools
from pipeline.serving.smoke.session import Rung, SmokeSession, optional

AGENTS = Rung("agents", "An agent's conversation holds, and is not computed again at every turn")
_LATE = 3  # the turn with a system message
_WITH_TOOLS = (1, 2)  # in a stream, and whole
_DEGREES = "17"  # what the tool says
_MOST_TURN_TOKENS = 1024
_TURN_SHARE = 12  # of the context for one turn
# Hybrid models keep whole blocks of a thousand tokens, so that the end of a prompt is not kept.
_KEPT_SHARE = 0.5
_TOOLS = [
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
    for f in tasks.FUNCTIONS
]
# What stands in each request of Claude Code 2.1.326, beside the conversation.
_CLAUDE_CODE = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.326.f91;"},
        {"type": "text", "text": "Answer briefly.", "cache_control": {"type": "ephemeral"}},
    ],
    "metadata": {"user_id": '{"device_id":"0","session_id":"0"}'},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
# Counts of one prompt may differ by what the server writes around a turn.
_COUNT_SLACK = 8


def _has_tools(session: SmokeSession) -> bool:
    return session.plan.quality and not without_tools(session)


@AGENTS.check("six turns", skip=lambda s: "" if s.context_tokens else UNKNOWN_CONTEXT)
async def _six_turns(session: SmokeSession) -> str:
    """Over /v1/messages, as Claude Code asks.

    A server moved a late system message to the front, so its cache found nothing of the
    conversation again: vllm-project/vllm#53393, #56520.
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
        prompt, want = f"{text}\n\n{question.prompt}", question.want
        if number in _WITH_TOOLS and _has_tools(session):
            prompt, want = f"{text}\n\n{tasks.SCENARIOS[0].prompt}", _DEGREES
        late = [{"role": "system", "content": text}] if number == _LATE else []
        try:
            with nullcontext() if number else optional("no system prompt"):
                asked = question.prompt if late else prompt
                messages, answer = await _turn(session, [*messages, *late], asked, number)
        except RequestRefused as error:
            if not late or not error.is_of_field:
                raise
            note = "; a late system message is refused, and was sent as the user's"
            asked = f"<system-reminder>{text}</system-reminder>\n{question.prompt}"
            messages, answer = await _turn(session, messages, asked, number)
        if session.plan.quality and want not in answer.text:
            raise Unsound(f"turn {number + 1}: it is {want}, not {answer.text[:80]!r}")
        answers.append(answer)
    session.turns = answers
    prompts = [answer.prompt_tokens for answer in answers]
    if any(b <= a for a, b in pairwise(prompts)):
        raise Unsound(f"each turn adds to the conversation, and usage counts {prompts}")
    return f"{len(turns)} turns, {prompts[0]} to {prompts[-1]} tokens{note}"


async def _turn(
    session: SmokeSession, messages: list[dict[str, Any]], prompt: str, number: int
) -> tuple[list[dict[str, Any]], AgentAnswer]:
    """One more question of the user; the conversation with its answer.

    As agents do: a tool that is called is run, and its result sent, until there is an answer.
    """
    turns = [*messages, {"role": "user", "content": prompt}]
    scenario, is_called = tasks.SCENARIOS[0], False
    while True:
        body = {
            "model": session.model,
            "max_tokens": session.room(64),
            "temperature": 0,
            "system": "You are a careful assistant. Answer briefly.",
            "messages": turns,
            **({"stream": True} if number % 2 else {}),
            **({"tools": _TOOLS} if _has_tools(session) else {}),
        }
        answer = await ask_messages(session.client, body)
        if answer.model not in (session.model, *session.aliases):
            raise Unsound(f"/v1/messages: asked {session.model!r}, and {answer.model!r} answered")
        # thinking is sent back below, where a server may refuse it
        parts = [part for part in answer.parts if part.get("type") in ("text", "tool_use")]
        turns.append({"role": "assistant", "content": parts})
        calls = [(call.name, arguments_of(call)) for call in answer.calls]
        if not calls or is_called:
            break
        if calls != [(scenario.tool, scenario.arguments)] or scenario.prompt not in prompt:
            raise Unsound(f"turn {number + 1}: calls of {json.dumps(calls)}")
        is_called = True
        result = {"type": "tool_result", "tool_use_id": answer.calls[0].id}
        content = [{**result, "content": f"Rain, {_DEGREES} degrees"}]
        turns.append({"role": "user", "content": content})
    if calls or not answer.text.strip():
        raise Unsound(f"turn {number + 1}: {'a call again' if calls else 'the answer is empty'}")
    if _has_tools(session) and scenario.prompt in prompt and not is_called:
        raise Unsound(f"turn {number + 1}: the tool is not called: {answer.text[:80]!r}")
    return turns, answer


@AGENTS.check("cached tokens grow", skip=lambda s: "" if s.turns else "there was no conversation")
async def _kept(session: SmokeSession) -> str:
    """The server keeps what came before from turn to turn, even with a late system message."""
    prompts = [answer.prompt_tokens for answer in session.turns]
    counts = [answer.cached_tokens for answer in session.turns]
    if not session.plan.caches or not any(n is not None for n in counts):
        raise NotOffered("the server does not count cached tokens (cache_read_input_tokens)")
    cached = [n or 0 for n in counts]
    for number in range(_LATE, len(cached)):
        if cached[number] < _KEPT_SHARE * prompts[number - 1]:
            before = f"the turn before had {prompts[number - 1]}"
            few = f"{cached[number]} of {prompts[number]} tokens were kept, and {before}"
            raise Unsound(f"turn {number + 1}: {few}; cached tokens by turn: {cached}")
    if cached[-1] <= cached[_LATE]:
        raise Unsound(f"the conversation grows, and what is kept of it does not: {cached}")
    return f"by turn: {', '.join(map(str, cached))} of {prompts[-1]} in the end"


@AGENTS.check("as Claude Code asks")
async def _claude_code(session: SmokeSession) -> str:
    """Its fields, system turns as blocks and then as text, and thinking that is sent back."""
    known, statement = tasks.known_number()
    tools = {"tools": _TOOLS} if _has_tools(session) else {}
    body = {"model": session.model, "max_tokens": session.room(64), "stream": True}
    body |= {"temperature": 0, **_CLAUDE_CODE, **tools}
    question = [{"type": "text", "text": "<system-reminder>It is Monday.</system-reminder>"}]
    question.append({"type": "text", "text": known.prompt})
    blocks = [{"type": "text", "text": statement, "cache_control": {"type": "ephemeral"}}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
    # the same turn is a list of blocks at first, and a text from then on
    for number, system in enumerate((blocks, statement)):
        late = {"role": "system", "content": system}
        asked = [turns[0], late, *turns[1:]]
        with optional("Claude Code's requests are refused"):
            answer = await ask_messages(
                session.client, {**body, "messages": asked}, f"{MESSAGES}?beta=true"
            )
        if not answer.text.strip() or (session.plan.quality and known.want not in answer.text):
            raise Unsound(f"turn {number + 1}: it is {known.want}, not {answer.text[:80]!r}")
        turns.append({"role": "assistant", "content": answer.parts})
        turns.append({"role": "user", "content": f"Thanks. {known.prompt}"})
    thought = any(part.get("type") == "thinking" for part in answer.parts)
    return f"two turns{', with thinking sent back' if thought else ''}; {await _counted(session)}"


async def _counted(session: SmokeSession) -> str:
    """/v1/messages/count_tokens beside what an answer counts; Claude Code plans by it."""
    turns = [{"role": "user", "content": f"{tasks.haystack(8, [], seed=9).text}\n\nSay yes."}]
    body = {"model": session.model, "system": "Answer briefly.", "messages": turns}
    answer = await ask_messages(session.client, {**body, "max_tokens": session.room(16)})
    try:
        _, counted = await session.client.post(f"{MESSAGES}/count_tokens", body, optional=True)
    except NotOffered:
        return "count_tokens is not there"
    count = value_at(counted, "input_tokens")
    if not isinstance(count, int) or abs(count - answer.prompt_tokens) > _COUNT_SLACK:
        raise Unsound(f"count_tokens says {count}, and the answer {answer.prompt_tokens} tokens")
    return f"count_tokens: {count} of {answer.prompt_tokens} tokens"
