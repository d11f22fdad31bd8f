"""vLLM's endpoints, driven by a source of tokens of our own."""

from __future__ import annotations

import importlib
import json
import types
from collections.abc import AsyncIterator
from typing import Any

from .answers import ClientAnswer, Json
from .clients import ChatReader, MessagesReader, ResponsesReader
from .endpoints import (
    NATIVE,
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

_PACKAGE = "vllm.entrypoints"


class VllmChat:
    """`OpenAIServingChat.chat_completion_stream_generator` of vLLM, and its full generator."""

    route = "vllm/entrypoints/openai/chat_completion/serving.py: chat_completion_stream_generator"
    address = "/v1/chat/completions"
    _modules = f"{_PACKAGE}.openai.chat_completion"
    _names = ("OpenAIServingChat", "ChatCompletionRequest")

    def __init__(self) -> None:
        serving: Any = importlib.import_module(f"{self._modules}.serving")
        protocol: Any = importlib.import_module(f"{self._modules}.protocol")
        self._server_type = getattr(serving, self._names[0])
        self._request_type = getattr(protocol, self._names[1])
        self._outputs: Any = importlib.import_module("vllm.outputs")

    def serve(self, case: Json, tokenizer: ByteTokenizer) -> str:
        """Sets the parsers that a recipe names; says how a model writes calls for the request."""
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
        self._client, self._tokenizer = client, tokenizer
        template = (case["conversation"] or {}).get("template")
        self._server = self._made(
            *(client, models),
            online_renderer=types.SimpleNamespace(renderer=renderer, chat_template=template),
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
            reasoning_parser=case["parsers"].get("reasoning_parser") or "",
            tool_parser=case["parsers"].get("tool_call_parser"),
            enable_auto_tools=True,
        )
        self._prompt = tokenizer.encode(case["prompt"])
        self._request = self._asked(case)
        self._kwargs = self._server._effective_chat_template_kwargs(self._request)
        return self._held(case)

    def _made(self, client: Any, models: Any, **options: Any) -> Any:
        return self._server_type(client, models, "assistant", **options)

    def _asked(self, case: Json) -> Any:
        return self._request_type(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            tools=case["tools"],
            tool_choice=tool_choice(case, {"type": "function", "function": {"name": "$name"}}),
            chat_template_kwargs=case["template_kwargs"],
            stream=True,
        )

    def _parser(self) -> Any:
        return self._server._make_parser(self._request, self._tokenizer, self._kwargs)

    def _held(self, case: Json) -> str:
        """Asks the engine which grammar holds the model, where a call is required."""
        if case["tool_choice"] == "auto":
            return NATIVE
        self._request = self._parser().adjust_request(self._request)
        held = self._request.structured_outputs
        if held is not None and held.json is not None:
            schema = json.loads(held.json) if isinstance(held.json, str) else held.json
            form = "calls" if schema["type"] == "array" else "arguments"
            let_through(case, form, "json_schema", schema)
            return form
        if held is not None and held.structural_tag is not None:
            let_through(case, NATIVE, "structural_tag", json.loads(held.structural_tag))
        return NATIVE

    async def _generate(self, steps: list[list[ByteToken]], reason: str) -> AsyncIterator[Any]:
        for place, step in enumerate(steps):
            is_last = place + 1 == len(steps)
            ids = self._tokenizer.ids(step)
            # the closing token has an id, and no text
            ids += [self._tokenizer.eos_token_id] if is_last and reason == "stop" else []
            text = "".join(token.text for token in step)
            output = self._outputs.CompletionOutput(
                0, text, ids, None, None, finish_reason=reason if is_last else None
            )
            yield self._outputs.RequestOutput("r", None, self._prompt, None, [output], is_last)

    def _stream(self, steps: list[list[ByteToken]], reason: str) -> Any:
        return self._server.chat_completion_stream_generator(
            self._request,
            self._generate(steps, reason),
            *("r", "m", [], self._tokenizer, types.SimpleNamespace()),
            chat_template_kwargs=self._kwargs,
        )

    def _whole(self, tokens: list[ByteToken]) -> Any:
        made = self._server.chat_completion_full_generator(
            self._request,
            self._generate([tokens], "stop"),
            *("r", "m", [], self._tokenizer, types.SimpleNamespace()),
            parser=self._parser(),
        )
        return finished(made)

    def send(self, steps: list[list[ByteToken]], reason: str) -> ClientAnswer:
        return read_stream(self._stream(steps, reason), ChatReader())

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        client = ChatReader()
        client.read(json.loads(self._whole(tokens).model_dump_json()))
        return client.ended()


class VllmMessages(VllmChat):
    """`AnthropicServingMessages` of vLLM: events made of those of the chat endpoint."""

    route = "vllm/entrypoints/anthropic/serving.py: message_stream_converter"
    conversion = "vllm/entrypoints/anthropic/serving.py: create_messages"
    address = "/v1/messages"
    _modules = f"{_PACKAGE}.anthropic"
    _names = ("AnthropicServingMessages", "AnthropicMessagesRequest")

    def _asked(self, case: Json) -> Any:
        kwargs = {"chat_template_kwargs": case["template_kwargs"]}
        message = self._request_type(**message_request(case), **kwargs)
        return self._server.to_chat_completion_request(message)

    def convert(self, asked: Json) -> list[Json]:
        """A request as the chat messages that the template gets."""
        converted = list[Any]()

        async def create(chat: Any, raw: Any) -> None:
            converted.extend(chat.messages)

        self._server.create_chat_completion = create
        finished(self._server.create_messages(self._request_type(**asked)))
        return [plain_message(message) for message in converted]

    def send(self, steps: list[list[ByteToken]], reason: str) -> ClientAnswer:
        events = self._server.message_stream_converter(self._stream(steps, reason))
        return read_stream(events, MessagesReader())

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        message = self._server.messages_full_converter(self._whole(tokens))
        return MessagesReader().whole(json.loads(message.model_dump_json(exclude_none=True)))


class VllmResponses(VllmChat):
    """`OpenAIServingResponses` of vLLM, with the same parsers and events of its own."""

    route = "vllm/entrypoints/openai/responses/serving.py: responses_stream_generator"
    address = "/v1/responses"
    _modules = f"{_PACKAGE}.openai.responses"
    _names = ("OpenAIServingResponses", "ResponsesRequest")

    def __init__(self) -> None:
        super().__init__()
        self._contexts: Any = importlib.import_module(f"{self._modules}.context")
        self._utils: Any = importlib.import_module(f"{self._modules}.utils")
        self._params = importlib.import_module("vllm.sampling_params").SamplingParams()

    def _made(self, client: Any, models: Any, **options: Any) -> Any:
        return self._server_type(client, models, **options)

    def _asked(self, case: Json) -> Any:
        return self._request_type(
            model="m",
            input="hi",
            tools=response_tools(case),
            tool_choice=tool_choice(case, {"type": "function", "name": "$name"}),
            chat_template_kwargs=case["template_kwargs"],
            stream=True,
            store=False,
        )

    def _parser(self) -> Any:
        return self._server._make_response_parser(self._request, self._tokenizer, self._kwargs)

    def _run(self, generator: Any, steps: list[list[ByteToken]], reason: str) -> Any:
        parser = self._parser()
        parser.set_prompt_token_ids(self._prompt)
        context = self._contexts.SimpleContext(response_parser=parser)
        if self._server.use_harmony:
            harmony: Any = importlib.import_module(f"{_PACKAGE}.openai.parser.harmony_utils")
            names = self._utils.extract_function_tool_names(self._request.tools)
            asked = [harmony.get_user_message("hi")]
            options = {"response_parser": parser, "request": self._request}
            context = self._contexts.HarmonyContext(asked, [], names, **options)
        self._client.generate = lambda *args, **options: self._generate(steps, reason)
        outputs = self._server._generate_with_builtin_tools("r", {}, self._params, context)
        about = ("m", self._tokenizer, types.SimpleNamespace())
        return generator(self._request, self._params, outputs, context, *about)

    def send(self, steps: list[list[ByteToken]], reason: str) -> ClientAnswer:
        events = self._run(self._server.responses_stream_generator, steps, reason)
        return read_stream(events, ResponsesReader())

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        made = self._run(self._server.responses_full_generator, [tokens], "stop")
        return ResponsesReader().whole(json.loads(finished(made).model_dump_json()))


VLLM = {"chat": VllmChat, "messages": VllmMessages, "responses": VllmResponses}
