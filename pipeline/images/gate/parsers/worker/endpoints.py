"""The chat endpoints of the engines, driven by a source of tokens of our own.

The endpoint's own generator runs, from what the detokenizer hands it to the lines that a client
reads: which parser a request gets, what happens at its end, and every id and finish reason are the
engine's. Its server, scheduler and model are not there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import types
from collections.abc import AsyncIterator
from typing import Any

from .answers import ClientAnswer, Json
from .stand_ins import Missing
from .tokens import ByteToken, ByteTokenizer


class SglangChat:
    """`OpenAIServingChat._generate_chat_stream` of SGLang, and its answer without a stream."""

    route = "sglang/srt/entrypoints/openai/serving_chat.py: _generate_chat_stream"
    messages_route = (
        "sglang/srt/entrypoints/anthropic/serving.py: _convert_to_chat_completion_request"
    )

    def __init__(self) -> None:
        # settings that are all off, as without flags; earlier versions have no such module
        with contextlib.suppress(ModuleNotFoundError):
            settings = importlib.import_module("sglang.srt.runtime_context")
            vars(settings).update(dict.fromkeys(("get_model", "get_serving"), Missing))
        package = "sglang.srt.entrypoints.openai"
        self._module: Any = importlib.import_module(f"{package}.serving_chat")
        self._request_type = importlib.import_module(f"{package}.protocol").ChatCompletionRequest

    def serve(self, case: Json, tokenizer: ByteTokenizer) -> None:
        """Sets the parsers that a recipe names, for requests of one case."""
        self._tokenizer, self._source = tokenizer, [dict[str, Any]()]
        if case["conversation"]:
            tokenizer.chat_template = case["conversation"]["template"]
            # transformers compiles templates, and is stood in for
            reader = importlib.import_module("sglang.srt.parser.jinja_template_utils")
            compiler: Any = importlib.import_module("jinja2").Environment()
            vars(reader)["_try_extract_ast"] = compiler.parse
        parsers = {
            "tool_call_parser": case["parsers"].get("tool_call_parser"),
            "reasoning_parser": case["parsers"].get("reasoning_parser"),
        }
        model = types.SimpleNamespace(
            hf_config=types.SimpleNamespace(model_type=case["model_type"], architectures=[]),
            get_default_sampling_params=dict,
        )
        manager = types.SimpleNamespace(
            tokenizer=tokenizer,
            model_config=model,
            model_path="stand-in",
            served_model_name="m",
            server_args=types.SimpleNamespace(**parsers, enable_cache_report=False),
            config_value=parsers.get,
            generate_request=self._generate,
        )
        template = types.SimpleNamespace(
            chat_template_name=None,
            force_reasoning=case["opened"],
            jinja_template_content_format="string",
            python_chat_template=None,
            reasoning_config=None,
        )
        self._chat = self._module.OpenAIServingChat(manager, template)
        self._request = self._request_type(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            tools=case["tools"],
            chat_template_kwargs={"thinking": True, "enable_thinking": True},
            stream=True,
        )

    async def _generate(self, *args: Any) -> AsyncIterator[Json]:
        for content in self._source:
            yield content

    def convert(self, asked: Json) -> list[Json]:
        """A request of `/v1/messages` as the chat messages that the template gets."""
        package = "sglang.srt.entrypoints.anthropic"
        serving: Any = importlib.import_module(f"{package}.serving")
        request = importlib.import_module(f"{package}.protocol").AnthropicMessagesRequest(**asked)
        chat = serving.AnthropicServing(self._chat)._convert_to_chat_completion_request(request)
        return [_plain(message) for message in chat.messages]

    def _contents(self, steps: list[list[ByteToken]], reason: str) -> list[Json]:
        contents, text, ids = [], "", list[int]()
        for place, step in enumerate(steps):
            text += "".join(token.text for token in step)
            ids = [*ids, *(token.id for token in step)]
            is_last = place + 1 == len(steps)
            about = {
                **{"id": "r", "prompt_tokens": 1, "completion_tokens": len(ids)},
                **{"finish_reason": {"type": reason} if is_last else None},
                **{"weight_version": "none", "cached_tokens": 0},
            }
            contents.append({"text": text, "output_ids": ids, "meta_info": about})
        return contents

    def send(self, steps: list[list[ByteToken]], reason: str) -> ClientAnswer:
        self._source = self._contents(steps, reason)
        return _read(self._chat._generate_chat_stream(None, self._request, None))

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        (content,) = self._contents([tokens], "stop")
        whole = self._chat._build_chat_response(self._request, [content], 0)
        return _answered(whole)


class VllmChat:
    """`OpenAIServingChat.chat_completion_stream_generator` of vLLM, and its full generator."""

    route = "vllm/entrypoints/openai/chat_completion/serving.py: chat_completion_stream_generator"
    messages_route = "vllm/entrypoints/anthropic/serving.py: create_messages"

    def __init__(self) -> None:
        name = "vllm.entrypoints.openai.chat_completion"
        self._module: Any = importlib.import_module(f"{name}.serving")
        self._request_type = importlib.import_module(f"{name}.protocol").ChatCompletionRequest
        self._outputs: Any = importlib.import_module("vllm.outputs")

    def serve(self, case: Json, tokenizer: ByteTokenizer) -> None:
        """Sets the parsers that a recipe names, for requests of one case."""
        config = types.SimpleNamespace(
            model="m",
            max_model_len=1 << 20,
            generation_config="vllm",
            hf_config=types.SimpleNamespace(model_type=case["model_type"]),
            get_diff_sampling_param=dict,
        )
        renderer = types.SimpleNamespace(tokenizer=tokenizer)
        client = types.SimpleNamespace(
            model_config=config, renderer=renderer, vllm_config=Missing(), input_processor=None
        )
        models = types.SimpleNamespace(
            engine_client=client, model_config=config, renderer=renderer, input_processor=None
        )
        template = (case["conversation"] or {}).get("template")
        settings = {
            "online_renderer": types.SimpleNamespace(renderer=renderer, chat_template=template),
            "request_logger": None,
            "chat_template": template,
            "chat_template_content_format": "auto",
            "reasoning_parser": case["parsers"].get("reasoning_parser") or "",
            "tool_parser": case["parsers"].get("tool_call_parser"),
            "enable_auto_tools": True,
        }
        self._chat = self._module.OpenAIServingChat(client, models, "assistant", **settings)
        self._setup = (client, models, "assistant"), settings
        self._tokenizer, self._prompt = tokenizer, tokenizer.encode(case["prompt"])
        self._kwargs = {"thinking": True, "enable_thinking": True}
        self._request = self._request_type(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            tools=case["tools"],
            tool_choice="auto",
            chat_template_kwargs=self._kwargs,
            stream=True,
        )

    def convert(self, asked: Json) -> list[Json]:
        """A request of `/v1/messages` as the chat messages that the template gets."""
        package = "vllm.entrypoints.anthropic"
        serving: Any = importlib.import_module(f"{package}.serving")
        request = importlib.import_module(f"{package}.protocol").AnthropicMessagesRequest(**asked)
        parts, settings = self._setup
        endpoint, converted = serving.AnthropicServingMessages(*parts, **settings), list[Any]()

        async def create(chat: Any, raw: Any) -> None:
            converted.extend(chat.messages)

        endpoint.create_chat_completion = create
        _finished(endpoint.create_messages(request))
        return [_plain(message) for message in converted]

    async def _generate(self, steps: list[list[ByteToken]], reason: str) -> AsyncIterator[Any]:
        for place, step in enumerate(steps):
            is_last = place + 1 == len(steps)
            ids = [token.id for token in step]
            # the closing token has an id, and no text
            ids += [self._tokenizer.eos_token_id] if is_last and reason == "stop" else []
            text = "".join(token.text for token in step)
            output = self._outputs.CompletionOutput(
                0, text, ids, None, None, finish_reason=reason if is_last else None
            )
            yield self._outputs.RequestOutput("r", None, self._prompt, None, [output], is_last)

    def send(self, steps: list[list[ByteToken]], reason: str) -> ClientAnswer:
        return _read(
            self._chat.chat_completion_stream_generator(
                self._request,
                self._generate(steps, reason),
                *("r", "m", [], self._tokenizer, types.SimpleNamespace()),
                chat_template_kwargs=self._kwargs,
            )
        )

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        parser = self._chat._make_parser(self._request, self._tokenizer, self._kwargs)
        made = self._chat.chat_completion_full_generator(
            self._request,
            self._generate([tokens], "stop"),
            *("r", "m", [], self._tokenizer, types.SimpleNamespace()),
            parser=parser,
        )
        return _answered(_finished(made))


ENDPOINTS: dict[str, Any] = {"sglang": SglangChat, "vllm": VllmChat}


def _finished(coroutine: Any) -> Any:
    """Runs what never waits for anything; a loop for each would take most of the time."""
    try:
        coroutine.send(None)
    except StopIteration as stopped:
        return stopped.value
    raise RuntimeError("the endpoint waits for something that is not there")


def _plain(message: Any) -> Json:
    """A message as a chat template sees it."""
    given = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    plain: Json = json.loads(json.dumps(given, default=list))
    return plain


def _read(lines: Any) -> ClientAnswer:
    """Reads server-sent events as a client does."""
    answer = ClientAnswer()

    async def read() -> None:
        async for text in lines:
            for line in text.splitlines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"]))
                for choice in chunk.get("choices", []):
                    answer.add(choice)

    _finished(read())
    return answer


def _answered(whole: Any) -> ClientAnswer:
    answer = ClientAnswer()
    for choice in json.loads(whole.model_dump_json())["choices"]:
        answer.add(choice)
    return answer
