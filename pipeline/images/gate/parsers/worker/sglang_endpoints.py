"""SGLang's endpoints, driven by a source of tokens of our own."""

from __future__ import annotations

import contextlib
import importlib
import json
import types
from collections.abc import AsyncIterator
from typing import Any

from .answers import ClientAnswer, Json
from .clients import ChatReader, MessagesReader, ResponsesReader
from .endpoints import (
    NATIVE,
    NoEndpoint,
    finished,
    let_through,
    message_request,
    plain_message,
    read_stream,
    response_tools,
    tool_choice,
)
from .stand_ins import Missing
from .tokens import ByteToken, ByteTokenizer

_PACKAGE = "sglang.srt.entrypoints"


class SglangChat:
    """`OpenAIServingChat._generate_chat_stream` of SGLang, and its answer without a stream."""

    route = "sglang/srt/entrypoints/openai/serving_chat.py: _generate_chat_stream"
    address = "/v1/chat/completions"

    def __init__(self) -> None:
        # settings that are all off, as without flags; earlier versions have no such module
        with contextlib.suppress(ModuleNotFoundError):
            settings = importlib.import_module("sglang.srt.runtime_context")
            names = ("get_disagg", "get_model", "get_serving")
            vars(settings).update(dict.fromkeys(names, Missing))
        self._protocol: Any = importlib.import_module(f"{_PACKAGE}.openai.protocol")
        self._server_type = self._find_server()

    def _find_server(self) -> Any:
        return importlib.import_module(f"{_PACKAGE}.openai.serving_chat").OpenAIServingChat

    def serve(self, case: Json, tokenizer: ByteTokenizer) -> str:
        """Sets the parsers that a recipe names; says how a model writes calls for the request."""
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
        if parsers["tool_call_parser"] == "auto":
            # as the server does when it starts: by what the template writes calls with
            detection: Any = importlib.import_module("sglang.srt.parser.template_detection")
            found = detection.detect_tool_call_parser(case["template"], tokenizer)
            if found is None:
                raise ValueError("the engine finds no parser for this template")
            parsers["tool_call_parser"] = found
        model = types.SimpleNamespace(
            hf_config=types.SimpleNamespace(model_type=case["model_type"], architectures=[]),
            get_default_sampling_params=dict,
            is_multimodal=False,
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
        self._chat = self._server_type(manager, template)
        # a prompt is never rendered: only what the engine decides beside it is asked for
        self._chat._apply_jinja_template = lambda *about: types.SimpleNamespace(
            stop=[], prompt="", prompt_ids=[1], image_data=None, video_data=None, audio_data=None
        )
        self._request = self._asked(case)
        return self._held(case)

    def _asked(self, case: Json) -> Any:
        return self._protocol.ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            tools=case["tools"],
            tool_choice=tool_choice(case, {"type": "function", "function": {"name": "$name"}}),
            chat_template_kwargs=case["template_kwargs"],
            stream=True,
        )

    def _held(self, case: Json) -> str:
        """Asks the engine which grammar holds the model, where a call is required."""
        if case["tool_choice"] == "auto":
            return NATIVE
        constraint = self._chat._process_messages(self._request, False).tool_call_constraint
        kind: str
        grammar: Any
        kind, grammar = constraint or ("", None)
        form = "calls" if kind == "json_schema" else NATIVE
        if kind in ("json_schema", "structural_tag"):
            grammar = grammar if kind == "json_schema" else grammar.model_dump(by_alias=True)
            let_through(case, form, kind, grammar)
        return form

    async def _generate(self, *args: Any) -> AsyncIterator[Json]:
        for content in self._source:
            yield content

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
        stream = self._chat._generate_chat_stream(None, self._request, None)
        return read_stream(stream, ChatReader())

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        client = ChatReader()
        client.read(json.loads(self._whole(tokens).model_dump_json()))
        return client.ended()

    def _whole(self, tokens: list[ByteToken]) -> Any:
        (content,) = self._contents([tokens], "stop")
        return self._chat._build_chat_response(self._request, [content], 0)


class SglangMessages(SglangChat):
    """`AnthropicServing` of SGLang: events made of those of the chat endpoint."""

    route = "sglang/srt/entrypoints/anthropic/serving.py: _generate_anthropic_stream"
    conversion = "sglang/srt/entrypoints/anthropic/serving.py: _convert_to_chat_completion_request"
    address = "/v1/messages"

    def __init__(self) -> None:
        name = f"{_PACKAGE}.anthropic"
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise NoEndpoint(f"there is no module {name}") from error
        super().__init__()
        self._anthropic: Any = importlib.import_module(f"{name}.serving").AnthropicServing
        self._message_type = importlib.import_module(f"{name}.protocol").AnthropicMessagesRequest

    def _asked(self, case: Json) -> Any:
        self._messages = self._anthropic(self._chat)
        self._message = self._message_type(**message_request(case))
        return self._messages._convert_to_chat_completion_request(self._message)

    def convert(self, asked: Json) -> list[Json]:
        """A request as the chat messages that the template gets."""
        chat = self._messages._convert_to_chat_completion_request(self._message_type(**asked))
        return [plain_message(message) for message in chat.messages]

    def send(self, steps: list[list[ByteToken]], reason: str) -> ClientAnswer:
        self._source = self._contents(steps, reason)
        about = (None, self._request, self._message, None)
        return read_stream(self._messages._generate_anthropic_stream(*about), MessagesReader())

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        message = self._messages._convert_response(self._whole(tokens))
        return MessagesReader().whole(message.model_dump(exclude_none=True))


class SglangResponses(SglangChat):
    """`OpenAIServingResponses` of SGLang, whose parsing is not that of the chat endpoint."""

    route = (
        "sglang/srt/entrypoints/openai/serving_responses.py: responses_stream_generator_non_harmony"
    )
    address = "/v1/responses"

    def _find_server(self) -> Any:
        module: Any = importlib.import_module(f"{_PACKAGE}.openai.serving_responses")
        server = module.OpenAIServingResponses
        # earlier versions stream for gpt-oss alone, and find no tool calls
        if not hasattr(server, "responses_stream_generator_non_harmony"):
            raise NoEndpoint(f"{server.__name__} has no stream for models other than gpt-oss")
        self._context_type = module.SimpleContext
        return server

    def _asked(self, case: Json) -> Any:
        request = self._protocol.ResponsesRequest(
            model="m",
            input="hi",
            tools=response_tools(case),
            tool_choice=tool_choice(case, {"type": "function", "name": "$name"}),
            chat_template_kwargs=case["template_kwargs"],
            stream=True,
            store=False,
        )
        # its own translation to a request of the chat endpoint, and whether a thought is expected
        made = finished(self._chat._make_request(request, None, self._tokenizer))
        self._thinks = made[3].require_reasoning
        return request

    def _made(self, generator: Any, contents: list[Json], *about: Any) -> Any:
        self._source, context = contents, self._context_type()
        outputs = self._chat._generate_with_builtin_tools("r", "", None, {}, context)
        between = (context,) if about else ()
        metadata = types.SimpleNamespace()
        return generator(
            *(self._request, {}, outputs, *between, "m", self._tokenizer, metadata),
            require_reasoning=self._thinks,
        )

    def send(self, steps: list[list[ByteToken]], reason: str) -> ClientAnswer:
        generator = self._chat.responses_stream_generator_non_harmony
        return read_stream(self._made(generator, self._contents(steps, reason)), ResponsesReader())

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        contents = self._contents([tokens], "stop")
        whole = finished(self._made(self._chat.responses_full_generator, contents, "context"))
        return ResponsesReader().whole(json.loads(whole.model_dump_json()))


SGLANG = {"chat": SglangChat, "messages": SglangMessages, "responses": SglangResponses}
