"""Rung 7: /v1/responses, which Codex speaks, answers as chat completions do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from pipeline.serving.smoke import tasks
from pipeline.serving.smoke.agent_endpoints import AgentAnswer, ask_responses
from pipeline.serving.smoke.client import Unsound
from pipeline.serving.smoke.rungs.tools import arguments_of, without_tools
from pipeline.serving.smoke.session import Rung, SmokeSession, optional, require_alike

RESPONSES = Rung("responses", "/v1/responses answers as chat completions do")
_TOOLS = [{"type": "function", **function} for function in tasks.FUNCTIONS]


async def _ask(session: SmokeSession, given: Any, **options: Any) -> AgentAnswer:
    most = session.room(min(256, session.answer_tokens))
    body = {"model": session.model, "input": given, "max_output_tokens": most, "temperature": 0}
    answer = await ask_responses(session.client, {**body, **options})
    if answer.model not in (session.model, *session.aliases):
        raise Unsound(f"/v1/responses: asked {session.model!r}, and {answer.model!r} answered")
    return answer


@RESPONSES.check("one answer")
async def _answer(session: SmokeSession) -> str:
    question, tokens = tasks.countings(5)[4], 0

    async def ask(stream: bool) -> str:
        nonlocal tokens
        answer = await _ask(session, question.prompt, **({"stream": True} if stream else {}))
        if not answer.text.strip():
            raise Unsound("/v1/responses: the answer is empty")
        if session.plan.quality and not question.is_held(answer.text):
            raise Unsound(f"/v1/responses: {question.prompt!r}: {answer.text[:120]!r}")
        tokens = answer.prompt_tokens
        return answer.text

    await require_alike(ask, "/v1/responses")
    return f"the same as a stream; {tokens} tokens of a prompt"


@RESPONSES.check("conversation", "quality")
async def _conversation(session: SmokeSession) -> str:
    for what, messages, want in tasks.CONVERSATIONS:
        system = "".join(m["content"] for m in messages if m["role"] == "system")
        given = [m for m in messages if m["role"] != "system"]
        with optional("no instructions") if system else nullcontext():
            answer = await _ask(session, given, **({"instructions": system} if system else {}))
        if not tasks.SmokeQuestion("", want).is_right(answer.text):
            raise Unsound(f"/v1/responses: {what}: {want}, not {answer.text[:120]!r}")
    return "earlier turns and the instructions are read"


@RESPONSES.check("tool call", "quality", without_tools)
async def _call(session: SmokeSession) -> str:
    scenario = tasks.SCENARIOS[0]
    asked = [{"role": "user", "content": scenario.prompt}]
    for stream in (False, True):
        options = {"stream": True} if stream else {}
        answer = await _ask(session, asked, tools=_TOOLS, **options)
        calls = [(call.name, arguments_of(call)) for call in answer.calls]
        if calls != [(scenario.tool, scenario.arguments)]:
            how = "in a stream" if stream else "whole"
            raise Unsound(f"/v1/responses, {how}: {scenario.prompt!r}: {calls}")
    (call,) = answer.calls
    made = {"type": "function_call", "call_id": call.id, "name": call.name}
    result = {"type": "function_call_output", "call_id": call.id, "output": "Rain, 17 degrees"}
    given = [*asked, {**made, "arguments": call.arguments}, result]
    answer = await _ask(session, given, tools=_TOOLS)
    if "17" not in answer.text:
        raise Unsound(f"/v1/responses: the tool said 17 degrees: {answer.text[:120]!r}")
    return "a call, whole and in a stream, and its result in the answer"


@RESPONSES.check("as Codex asks")
async def _codex(session: SmokeSession) -> str:
    """Messages of a developer, tools of other kinds, and all items of an answer sent back."""
    known, statement = tasks.known_number()
    tools = [*_TOOLS, {"type": "web_search", "external_web_access": False}]
    options = {
        "stream": True,
        "store": False,
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True,
        "prompt_cache_key": "sm120",
        **({} if without_tools(session) else {"tools": tools, "tool_choice": "auto"}),
    }
    given: list[dict[str, Any]] = []
    for role, text in (("developer", "Answer briefly."), ("developer", statement), ("user", "")):
        content = [{"type": "input_text", "text": text or known.prompt}]
        given.append({"type": "message", "role": role, "content": content})
    for number in range(2):
        with optional("Codex's requests are refused"):
            answer = await _ask(session, given, **options)
        if not answer.text.strip() or (session.plan.quality and known.want not in answer.text):
            raise Unsound(f"turn {number + 1}: it is {known.want}, not {answer.text[:80]!r}")
        again = [{"type": "input_text", "text": f"Thanks. {known.prompt}"}]
        given += [*answer.parts, {"type": "message", "role": "user", "content": again}]
    thought = any(part.get("type") == "reasoning" for part in answer.parts)
    return f"two turns{', with reasoning sent back' if thought else ''}"
