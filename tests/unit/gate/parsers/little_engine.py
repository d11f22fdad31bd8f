"""A little engine with SGLang's endpoints around the reference parser, as files of a tree.

A parser's name is that of a format, and after a blank that of a defect. The endpoints of other APIs
are made of the chat endpoint's deltas, as in real engines.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.unit.gate.parsers import reference

CHAT = '''
"""The least that SGLang's endpoint has: requests, a stream of events, an answer as a whole."""
import json, os, types
import torch  # stood in for
from sglang.reference import Reference

HERE = os.path.dirname(os.path.abspath(__file__))
SETUP = json.load(open(os.path.join(HERE, "setup.json")))
assert not torch.cuda.is_available() and not isinstance(3, torch.Tensor)


class JsonCalls:
    """Calls that a grammar holds to JSON, behind a thought."""

    def __init__(self, form, defect):
        self.closing, self.defect, self.buffer = form["thinking"][1], defect, ""
        self.opening, self.is_open, self.count, self.late = form["thinking"][0], True, 0, []

    def feed(self, text, final):
        out = {"reasoning": "", "content": "", "calls": [*self.late]}
        self.buffer, self.late = self.buffer + text, []
        if self.is_open:
            if self.closing not in self.buffer:
                return out
            thought, _, self.buffer = self.buffer.partition(self.closing)
            out["reasoning"], self.is_open = thought.removeprefix(self.opening), False
        while "{" in self.buffer:
            try:
                start = self.buffer.index("{")
                call, end = json.JSONDecoder().raw_decode(self.buffer, start)
            except ValueError:
                break
            self.buffer = self.buffer[end:]
            given = json.dumps(call["parameters"])
            if self.defect == "forgets empty arguments" and not call["parameters"]:
                given = ""
            # the name in this step, the arguments in the next: if there is one
            if self.defect == "arguments come late":
                out["calls"].append((self.count, call["name"], ""))
                self.late.append((self.count, None, given))
            else:
                out["calls"].append((self.count, call["name"], given))
            self.count += 1
        return out


class OpenAIServingChat:
    def __init__(self, manager, template):
        self.manager = manager
        name, _, defect = manager.server_args.tool_call_parser.partition(" ")
        self.form, self.defect = SETUP["formats"][name], defect.replace("_", " ")

    def _process_messages(self, request, is_multimodal):
        if self.defect == "no grammar":
            return types.SimpleNamespace(tool_call_constraint=None, require_reasoning=True)
        schema = {"refuses": self.defect == "refuses"}
        return types.SimpleNamespace(tool_call_constraint=("json_schema", schema))

    def deltas(self, steps, defect, request):
        if request.tool_choice != "auto" and defect != "no grammar":
            parser = JsonCalls(self.form, defect)
        else:
            thinks = all(request.chat_template_kwargs.values())
            parser = Reference(self.form, SETUP["tools"], defect, thinks=thinks)
        for text, final in steps:
            out = parser.feed(text, final=final)
            calls = [{"index": i, "id": str(i), "function": {"name": n, "arguments": a}}
                     for i, n, a in out["calls"]]
            yield {"reasoning_content": out["reasoning"], "content": out["content"],
                   "tool_calls": calls}

    async def sent(self, request, adapted, raw):
        seen, steps = 0, []
        async for content in self.manager.generate_request(adapted, raw):
            final = content["meta_info"]["finish_reason"] is not None
            steps.append((content["text"][seen:], final))
            seen = len(content["text"])
        for delta in self.deltas(steps, self.defect, request):
            yield delta

    async def _generate_chat_stream(self, adapted, request, raw):
        called = False
        async for delta in self.sent(request, adapted, raw):
            called = called or bool(delta["tool_calls"])
            yield "data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}) + "\\n\\n"
        end = {"delta": {}, "finish_reason": "tool_calls" if called else "stop"}
        yield "data: " + json.dumps({"choices": [end]}) + "\\n\\n"
        yield "data: [DONE]\\n\\n"

    def _build_chat_response(self, request, ret, created):
        # only a stream mixes up two calls
        defect = "" if self.defect.startswith(("second", "arguments come")) else self.defect
        (message,) = self.deltas([(ret[0]["text"], True)], defect, request)
        finish = "tool_calls" if message["tool_calls"] else "stop"
        said = {"choices": [{"message": message, "finish_reason": finish}]}
        return types.SimpleNamespace(said=said, model_dump_json=lambda: json.dumps(said))
'''
PROTOCOL = """
import types

class ChatCompletionRequest(types.SimpleNamespace):
    pass

class ResponsesRequest(types.SimpleNamespace):
    pass

class AnthropicMessagesRequest(types.SimpleNamespace):
    pass
"""
MESSAGES = """
import json, types
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

KINDS = {"thinking": ("thinking", "thinking_delta"), "text": ("text", "text_delta"),
         "tool_use": ("partial_json", "input_json_delta")}


class AnthropicServing:
    def __init__(self, chat):
        self.chat, self.defect = chat, chat.defect

    def _convert_to_chat_completion_request(self, message):
        asked = getattr(message, "thinking", {"type": "enabled"})
        kwargs = {"thinking": asked["type"] == "enabled"}
        return ChatCompletionRequest(tool_choice="auto", chat_template_kwargs=kwargs)

    def parts(self, delta):
        if delta["reasoning_content"]:
            yield "thinking", {"thinking": ""}, delta["reasoning_content"]
        if delta["content"]:
            yield "text", {"text": ""}, delta["content"]
        for call in delta["tool_calls"]:
            about = {"id": call["id"], "name": call["function"]["name"], "input": {}}
            given = call["function"]["arguments"]
            if self.defect == "block of space within a call":
                yield "tool_use", about, given[:1]
                yield "text", {"text": ""}, "\\n"
                continue
            yield "tool_use", about, given

    async def events(self, request):
        yield {"type": "message_start"}
        index, kind, called = -1, None, False
        async for delta in self.chat.sent(request, None, None):
            for block, start, text in self.parts(delta):
                if block != kind or block == "tool_use":
                    if kind and self.defect != "never closes":
                        yield {"type": "content_block_stop", "index": index}
                    index += 1
                    block_start = {"type": block, **start}
                    yield {"type": "content_block_start", "index": index,
                           "content_block": block_start}
                kind, called = block, called or block == "tool_use"
                field, name = KINDS[block]
                if self.defect == "delta of another kind" and block == "tool_use":
                    field, name = KINDS["text"]
                yield {"type": "content_block_delta", "index": index,
                       "delta": {"type": name, field: text}}
        if kind:
            yield {"type": "content_block_stop", "index": index}
        stop = "tool_use" if called and self.defect != "ends its turn" else "end_turn"
        yield {"type": "message_delta", "delta": {"stop_reason": stop}}
        if self.defect != "no end":
            yield {"type": "message_stop"}

    async def _generate_anthropic_stream(self, adapted, request, message, raw):
        async for event in self.events(request):
            yield f"event: {event['type']}\\ndata: {json.dumps(event)}\\n\\n"

    def _convert_response(self, response):
        (choice,) = response.said["choices"]
        content = []
        for block, start, text in self.parts(choice["message"]):
            field = KINDS[block][0]
            filled = {"input": json.loads(text)} if block == "tool_use" else {field: text}
            content.append({"type": block, **start, **filled})
        stop = {"tool_calls": "tool_use", "stop": "end_turn"}[choice["finish_reason"]]
        message = {"content": content, "stop_reason": stop}
        return types.SimpleNamespace(model_dump=lambda **options: message)
"""
RESPONSES = """
import json, types
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat


class SimpleContext:
    last_output = None


class OpenAIServingResponses(OpenAIServingChat):
    async def _make_request(self, request, previous, tokenizer):
        return [], [], [], types.SimpleNamespace(require_reasoning=True)

    async def _generate_with_builtin_tools(self, name, prompt, adapted, params, context):
        async for content in self.manager.generate_request(adapted, None):
            context.last_output = content
            yield context

    def items(self, message):
        if message["reasoning_content"]:
            text = {"type": "reasoning_text", "text": message["reasoning_content"]}
            yield {"type": "reasoning", "id": "r", "content": [text]}
        if message["content"]:
            text = {"type": "output_text", "text": message["content"]}
            yield {"type": "message", "id": "m", "content": [text]}
        for call in message["tool_calls"]:
            yield {"type": "function_call", "id": "f" + call["id"], "call_id": call["id"],
                   "name": call["function"]["name"],
                   "arguments": call["function"]["arguments"]}

    async def responses_stream_generator_non_harmony(
        self, request, params, outputs, model, tokenizer, metadata, *, require_reasoning
    ):
        # everything is sent when the last step is there: its events are what is judged
        async for context in outputs:
            pass
        (message,) = self.deltas([(context.last_output["text"], True)], self.defect, request)
        items, events = list(self.items(message)), []
        for index, item in enumerate(items):
            text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
            empty = {**item, "arguments": ""} if "arguments" in item else {**item, "content": []}
            if self.defect == "no name" and "name" in item:
                empty["name"] = ""
            events.append({"type": "response.output_item.added", "output_index": index,
                           "item": empty})
            pieces = [text[:3], text[3:]]
            if self.defect == "loses a delta" and "arguments" in item:
                pieces = pieces[1:]
            for piece in pieces:
                events.append({"type": "response.x.delta", "output_index": index,
                               "item_id": item["id"], "delta": piece})
            done = dict(item)
            if self.defect == "half an item" and "arguments" in item:
                done["arguments"] = text[:3]
            events.append({"type": "response.output_item.done", "output_index": index,
                           "item": done})
        final = [i for i in items if self.defect != "forgets its calls" or "name" not in i]
        if self.defect == "other ids":
            final = [{**i, "call_id": "x"} if "call_id" in i else i for i in final]
        status = "failed" if self.defect == "fails" else "completed"
        events.append({"type": "response." + status,
                       "response": {"status": status, "output": final}})
        for number, event in enumerate(events):
            step = 2 if self.defect == "counts by two" else 1
            said = json.dumps({**event, "sequence_number": number * step})
            yield f"event: {event['type']}\\ndata: {said}\\n\\n"

    async def responses_full_generator(
        self, request, params, outputs, context, model, tokenizer, metadata, *, require_reasoning
    ):
        async for _ in outputs:
            pass
        (message,) = self.deltas([(context.last_output["text"], True)], self.defect, request)
        whole = json.dumps({"status": "completed", "output": list(self.items(message))})
        return types.SimpleNamespace(model_dump_json=lambda: whole)
"""
DETECTION = """
def detect_tool_call_parser(template, tokenizer):
    return "kimi-k2.5" if "<|tool_call_begin|>" in template else None
"""
GRAMMAR = """
class Grammar:
    @staticmethod
    def from_json_schema(schema):
        return schema
"""
ACCEPTS = """
def _is_grammar_accept_string(grammar, text):
    import json
    return not json.loads(grammar)["refuses"] and bool(json.loads(text))
"""


def write_engine(root: Path, formats: dict[str, Any], tools: dict[str, Any]) -> None:
    """Writes the tree; its package starts a whole server where it is imported as such."""
    package = root / "sglang"
    openai = package / "srt" / "entrypoints" / "openai"
    files = {
        openai / "serving_chat.py": CHAT,
        openai / "protocol.py": PROTOCOL,
        openai / "serving_responses.py": RESPONSES,
        openai / "setup.json": json.dumps({"formats": formats, "tools": tools}),
        openai.parent / "anthropic" / "__init__.py": "",
        openai.parent / "anthropic" / "serving.py": MESSAGES,
        openai.parent / "anthropic" / "protocol.py": PROTOCOL,
        package / "srt" / "parser" / "template_detection.py": DETECTION,
        root / "xgrammar" / "__init__.py": GRAMMAR,
        root / "xgrammar" / "testing.py": ACCEPTS,
        package / "__init__.py": "raise RuntimeError('starts a whole server')\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copyfile(reference.__file__, package / "reference.py")
