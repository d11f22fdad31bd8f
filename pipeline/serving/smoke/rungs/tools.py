"""Rung 3: tool calls and reasoning arrive as what they are, whole and in streams."""

from __future__ import annotations

import json
import re
from typing import Any

from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.serving.smoke import tasks
from pipeline.serving.smoke.agent_endpoints import AgentAnswer, ask_messages
from pipeline.serving.smoke.chat import ChatAnswer, ToolCall
from pipeline.serving.smoke.client import NotOffered, RequestRefused, Unsound
from pipeline.serving.smoke.schema import schema_fault
from pipeline.serving.smoke.session import Rung, SmokeSession, require_alike

TOOLS_RUNG = Rung("tools", "Tool calls and reasoning arrive whole")
_KIMI_ID = re.compile(r"functions\.(.+):(\d+)")
# What parsers should have taken out of the content.
_MARKS = re.compile(
    r"</?think(?:ing)?>|<\|channel\|>|</?tool_call>|<\|tool_calls?_(?:section_)?begin\|>"
    r"|<\|tool▁calls?▁begin\|>|\[TOOL_CALLS\]|<\|im_(?:start|end)\|>"
)


def without_tools(session: SmokeSession) -> str:
    """Why no tool calls are looked at."""
    return "" if session.plan.tools else "the recipe expects no tool calls"


def _without_reasoning(session: SmokeSession) -> str:
    return "" if session.plan.reasoning else "the recipe expects no reasoning"


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call, which its tool can take."""
    schemas = {each["name"]: each["parameters"] for each in tasks.FUNCTIONS}
    if call.name not in schemas:
        raise Unsound(f"a call of {call.name!r}, which was not offered")
    if not call.id:
        raise Unsound(f"the call of {call.name} has no id")
    try:
        value = read_json(call.arguments.encode(), most_bytes=1 << 20)
    except JsonInvalid as error:
        raise Unsound(f"the arguments of {call.name} {error}: {call.arguments[:120]!r}") from error
    if why := schema_fault(schemas[call.name], value):
        raise Unsound(f"the arguments of {call.name}: {why}: {call.arguments[:120]!r}")
    arguments: dict[str, Any] = value
    return arguments


def require_call(answer: ChatAnswer, scenario: tasks.Scenario) -> None:
    """Requires exactly the call that a scenario leads to."""
    how = "in a stream" if answer.is_stream else "whole"
    where = f"{scenario.prompt!r}, {how}"
    if len(answer.calls) != 1:
        content = f"content {answer.text[:120]!r}"
        raise Unsound(f"{where}: {len(answer.calls)} calls, not 1; {content}")
    name, got = answer.calls[0].name, arguments_of(answer.calls[0])
    if (name, got) != (scenario.tool, scenario.arguments):
        raise Unsound(f"{where}: {name}({json.dumps(got, ensure_ascii=False)})")
    if answer.finish != "tool_calls":
        raise Unsound(f"a tool call, {how}, and finish_reason is {answer.finish!r}")
    require_no_marks(answer)


def require_no_marks(answer: ChatAnswer) -> None:
    """Requires none of the model's own markup in what a person reads."""
    if found := _MARKS.search(answer.text):
        raise Unsound(f"{found[0]!r} is in the content: {answer.text[:120]!r}")


@TOOLS_RUNG.check("no marks", "quality")
async def _no_marks(session: SmokeSession) -> str:
    for stream in (False, True):
        answer = await session.ask(tasks.sums(4)[3].prompt, stream=stream)
        require_no_marks(answer)
    return "no marks of reasoning or tools in the content"


@TOOLS_RUNG.check("scenarios", "quality", without_tools)
async def tool_scenarios(session: SmokeSession) -> str:
    """Each request leads to its one call."""
    for scenario in tasks.SCENARIOS:
        for stream in (False, True):
            try:
                answer = await session.ask(scenario.prompt, tools=tasks.TOOLS, stream=stream)
            except RequestRefused as error:
                raise Unsound(f"tools are refused (--no-tools expects none): {error}") from error
            require_call(answer, scenario)
    return f"{len(tasks.SCENARIOS)} calls, the same whole and in streams"


@TOOLS_RUNG.check("parallel calls", "quality", without_tools)
async def _parallel(session: SmokeSession) -> str:
    counts = []
    for stream in (False, True):
        answer = await session.ask(tasks.PARALLEL, tools=tasks.TOOLS, stream=stream)
        cities = [str(arguments_of(call).get("city", "")) for call in answer.calls]
        ids = {call.id for call in answer.calls}
        if not cities or not set(cities) <= set(tasks.CITIES) or len(set(cities)) != len(cities):
            raise Unsound(f"asked for {tasks.CITIES}: calls for {cities}")
        if len(ids) != len(cities):
            raise Unsound(f"{len(cities)} calls have {len(ids)} ids")
        counts.append(len(cities))
    if counts[0] != counts[1]:
        raise Unsound(f"{counts[0]} calls whole, {counts[1]} in a stream")
    note = "" if counts[0] == len(tasks.CITIES) else " (this model asks for one after the other)"
    return f"{counts[0]} calls at once{note}"


@TOOLS_RUNG.check("tool result", "quality", without_tools)
async def _result(session: SmokeSession) -> str:
    """The results of two calls, one after the other, come back to the model.

    Kimi counts its calls through a conversation (`functions.NAME:0`, then `:1`), and goes wrong
    where an engine writes other ids: MoonshotAI/Kimi-K2, docs/tool_call_guidance.md.
    """
    messages: list[dict[str, Any]] = []
    ids: list[str] = []
    results = ("Rain, 17 degrees", "The lamp is at 40.")
    for scenario, result in zip(tasks.SCENARIOS, results, strict=False):
        messages.append({"role": "user", "content": scenario.prompt})
        first = await session.ask(messages, tools=tasks.TOOLS)
        require_call(first, scenario)
        (call,) = first.calls
        function = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": call.id, "type": "function", "function": function}]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
        answer = await session.ask(messages, tools=tasks.TOOLS)
        require_no_marks(answer)
        want = re.findall(r"\d+", result)[0]
        if want not in answer.text:
            raise Unsound(f"the tool said {result!r}, the answer is {answer.text[:120]!r}")
        messages.append({"role": "assistant", "content": answer.text})
        named = _KIMI_ID.fullmatch(call.id)
        if named and (named[1] != call.name or int(named[2]) != len(ids)):
            want = f"functions.{call.name}:{len(ids)}"
            raise Unsound(f"the call {len(ids) + 1} of a conversation is {call.id!r}, not {want!r}")
        ids.append(call.id)
    if len(set(ids)) != len(ids):
        raise Unsound(f"two calls of one conversation have the id {ids[0]!r}")
    return f"the results of {len(ids)} calls are in the answers; ids {', '.join(ids)}"


@TOOLS_RUNG.check("thinking", "quality", _without_reasoning)
async def _thinking(session: SmokeSession) -> str:
    """Content alone is compared: long reasoning differs by its ties."""
    question = tasks.sums(5)[4]

    async def think(stream: bool) -> str:
        answer = await session.ask(question.prompt, thinking=True, stream=stream)
        if not answer.reasoning.strip():
            raise Unsound(f"thinking was asked for: no reasoning, content {answer.text[:120]!r}")
        require_no_marks(answer)
        session.require_right(question, answer.text)
        if answer.reasoning.strip() in answer.text:
            raise Unsound("the reasoning is in the content, too")
        return answer.text.strip()

    await require_alike(think, "the content differs")
    return "reasoning apart from the content, whole and in streams"


@TOOLS_RUNG.check(
    "tool call after thinking", "quality", lambda s: _without_reasoning(s) or without_tools(s)
)
async def _thinking_call(session: SmokeSession) -> str:
    """Parsers of reasoning and of calls read one text: the first may take what is the other's."""
    for stream in (False, True):
        answer = await session.ask(
            tasks.SCENARIOS[0].prompt, tools=tasks.TOOLS, thinking=True, stream=stream
        )
        require_call(answer, tasks.SCENARIOS[0])
    return "a call after thinking, whole and in a stream"


@TOOLS_RUNG.check("instant", "quality", _without_reasoning)
async def _instant(session: SmokeSession) -> str:
    question = tasks.sums(6)[5]
    answer = await session.ask(question.prompt, thinking=False)
    require_no_marks(answer)
    if answer.reasoning.strip():
        why = f"no thinking was asked for: {answer.reasoning[:120]!r}"
        # gpt-oss cannot do otherwise; a switch that is lost now and then is a fault
        before = session.instant_thoughts
        raise NotOffered(f"{why}, as always") if sum(before) > len(before) / 2 else Unsound(why)
    session.require_right(question, answer.text)
    return "an answer without reasoning"


async def message_answer(
    session: SmokeSession, prompt: str, most_tokens: int, *, stream: bool = False
) -> AgentAnswer:
    """Asks /v1/messages one question."""
    body = {
        "model": session.model,
        "max_tokens": most_tokens,
        "temperature": 0,
        "messages": [{"role": "user", "content": prompt}],
        **({"stream": True} if stream else {}),
    }
    answer = await ask_messages(session.client, body)
    if not answer.text.strip():
        raise Unsound("/v1/messages: the answer is empty")
    return answer


@TOOLS_RUNG.check("/v1/messages")
async def _messages(session: SmokeSession) -> str:
    """The same answer through the other endpoint: vllm-project/vllm#44576."""
    question, most = tasks.countings(4)[3], session.answer_tokens

    async def ask(stream: bool) -> str:
        text = (await message_answer(session, question.prompt, most, stream=stream)).text
        if session.plan.quality and not stream and not question.is_held(text):
            raise Unsound(f"/v1/messages: {question.prompt!r}, the answer is {text[:120]!r}")
        return text

    await require_alike(ask, "/v1/messages")
    return "an answer, the same as a stream"
