"""The least that SGLang and vLLM have to render conversations, sound or with a planted defect.

Both are written into a folder, with a transformers and a tokenizers of the same kind: one token for
each character, and a first token before every text that is encoded on its own. The name of the tool
parser says which defect an engine has.
"""

from __future__ import annotations

from pathlib import Path

# What can be wrong, and the conversation that shows it.
DEFECTS = {
    "drops-a-turn": "several-turns",
    "tools-missing": "tool",
    "second-tool-missing": "tools-and-system",
    "late-system-dropped": "late-system-turn",
    "late-system-first": "late-system-turn",
    "thinking-ignored": "thinking-off",
    "no-generation-prompt": "text-one-word",
    "two-first-tokens": "text-one-word",
    "results-in-other-order": "two-calls-and-their-results",
    "picture-lost": "picture",
    "picture-first": "picture",
    "reasoning-dropped": "reasoning-of-an-earlier-turn",
    "arguments-as-text": "tool-result",
    "field-added": "tool",
    "bare-tools": "tools-and-system",
    "strips-texts": "text-spaces-and-lines",
    "texts-as-parts": "tool-result",
    "other-ids": "two-calls-and-their-results",
    "refuses": "system",
    "takes-all": "refused",
    "breaks": "tool-result",
    "ascii": "text-scripts",
    "escapes": "text-markup",
    "sorted-tools": "tool",
    "first-call-alone": "two-calls-and-their-results",
    "result-as-user": "tool-result",
    "turns-swapped": "several-turns",
    "cut-off": "text-long",
}

TEMPLATE = """\
{{- bos_token }}
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- for message in messages %}
  {%- if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}
  {{- '<' ~ message.role ~ '>' }}
  {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
  {%- if message.content is string %}{{ message.content }}
  {%- else %}
    {%- for part in message.content %}
      {%- if part.type == 'image' %}<picture>{% else %}{{ part.text }}{% endif %}
    {%- endfor %}
  {%- endif %}
  {%- for call in message.tool_calls or [] %}
    {{- '<call ' ~ call.id ~ ' ' ~ call.function.name ~ '>' }}
    {%- for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}
  {%- endfor %}
{%- endfor %}
{%- set is_off = enable_thinking is defined and not enable_thinking %}
{%- if add_generation_prompt %}<assistant>{% if is_off %}<think></think>{% endif %}{% endif %}"""

_FILES = {
    # what both engines do with a request
    "site/common_engine.py": """
import copy, html, json


def render(request, tokenizer, defect, pictures):
    messages, tools = copy.deepcopy(request.messages), copy.deepcopy(request.tools)
    options = dict(request.chat_template_kwargs or {})
    if defect == "refuses" and messages[0]["role"] == "system":
        raise ValueError("no system turns")
    if defect == "takes-all":
        messages = [m if m["role"] != "forbidden" else {**m, "role": "user"} for m in messages]
    if defect == "drops-a-turn" and len(messages) > 2:
        del messages[1]
    if defect == "turns-swapped" and len(messages) > 3:
        messages[0], messages[2] = messages[2], messages[0]
    late = [m for m in messages[1:] if m["role"] == "system"]
    if defect.startswith("late-system") and late:
        messages = [m for m in messages if m not in late]
        messages = (late if defect.endswith("first") else []) + messages
    results = [m for m in messages if m["role"] == "tool"]
    if defect == "results-in-other-order" and len(results) > 1:
        messages = [m for m in messages if m not in results] + results[::-1]
    for message in messages:
        if defect == "result-as-user" and message["role"] == "tool":
            message["role"] = "user"
        if defect == "reasoning-dropped":
            message.pop("reasoning_content", None)
        calls = message.get("tool_calls") or []
        if defect == "first-call-alone":
            del calls[1:]
        for number, call in enumerate(calls):
            if defect == "other-ids":
                call["id"] = str(number)
            if defect == "breaks":
                raise KeyError("arguments")
            if defect != "arguments-as-text":
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            else:
                call["function"]["arguments"] = {"all": call["function"]["arguments"]}
        content = message.get("content")
        if isinstance(content, list):
            parts = [{"type": "image"} if p["type"] == "image_url" else p for p in content]
            if defect == "picture-first":
                parts = parts[::-1]
            if defect == "picture-lost":
                parts = [p for p in parts if p["type"] != "image"]
            message["content"] = parts
            continue
        if defect == "strips-texts":
            content = content.strip()
        if defect == "ascii":
            content = content.encode("ascii", "ignore").decode()
        if defect == "escapes":
            content = html.escape(content)
        if defect == "cut-off":
            content = content[:1000]
        message["content"] = content
        if defect == "texts-as-parts" and calls:
            message["content"] = [{"type": "text", "text": str([{"text": content}])}]
    if defect == "tools-missing":
        tools = None
    if tools and defect == "second-tool-missing":
        tools = tools[:1]
    if tools and defect == "field-added":
        tools = [{**tool, "defer_loading": None} for tool in tools]
    if tools and defect == "bare-tools":
        tools = [tool["function"] for tool in tools]
    if tools and defect == "sorted-tools":
        tools = json.loads(json.dumps(tools, sort_keys=True))
    if defect == "thinking-ignored":
        options = {}
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False,
        add_generation_prompt=defect != "no-generation-prompt", **options)
    return text, tokenizer.encode(text, add_special_tokens=defect == "two-first-tokens")
""",
    "site/transformers/__init__.py": """
import json
import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

__version__ = "1"


class PreTrainedTokenizerFast:
    def __init__(self, tokenizer_object, clean_up_tokenization_spaces, **named):
        self.core, self.named = tokenizer_object, named

    def apply_chat_template(self, messages, tools=None, tokenize=True, **options):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

        def refuse(message):
            raise jinja2.TemplateError(message)

        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = refuse
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, tools=tools, **self.named, **options)
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error

    def encode(self, text, add_special_tokens=True):
        first = self.core.post_processor[0] if add_special_tokens else ""
        return [ord(letter) for letter in first + text]

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))
""",
    "site/transformers/utils/import_utils.py": """
def is_torch_available():
    return False


def is_that_available(name):
    raise RuntimeError("wants a name")
""",
    "site/tokenizers/__init__.py": """
import json, types


class Tokenizer:
    post_processor = [""]

    @classmethod
    def from_str(cls, text):
        core = cls()
        core.tokens = {t["content"]: t["id"] for t in json.loads(text)["added_tokens"]}
        return core

    def token_to_id(self, text):
        return self.tokens[text]


processors = types.SimpleNamespace(TemplateProcessing=lambda single, special_tokens: single)
""",
    "engine/sglang/__init__.py": "raise RuntimeError('starts a whole server')\n",
    "engine/sglang/srt/parser/template_manager.py": """
class TemplateManager:
    def load_chat_template(self, manager, argument, path):
        assert manager.tokenizer.chat_template
""",
    "engine/sglang/srt/entrypoints/openai/protocol.py": """
class ChatCompletionRequest:
    def __init__(self, model, messages, tools=None, chat_template_kwargs=None):
        self.messages, self.tools = messages, tools
        self.chat_template_kwargs = chat_template_kwargs
""",
    "engine/sglang/srt/entrypoints/openai/serving_chat.py": """
import types
import torch  # stood in for
from common_engine import render

assert not torch.cuda.is_available()


class OpenAIServingChat:
    def __init__(self, manager, template):
        self.manager, self.defect = manager, manager.server_args.tool_call_parser or ""

    def _validate_request(self, request):
        return None if request.messages else "no messages"

    def _process_messages(self, request, is_multimodal):
        tokenizer = self.manager.tokenizer
        text, ids = render(request, tokenizer, self.defect, is_multimodal)
        return types.SimpleNamespace(prompt_ids=ids)
""",
    "engine/vllm/__init__.py": "",
    "engine/vllm/exceptions.py": "class VLLMValidationError(Exception):\n    pass\n",
    "engine/vllm/model_executor/models/boat.py": """
import torch.nn.functional.that_is_not_there


class BoatForPictures(torch.nn.Module):
    @classmethod
    def get_placeholder_str(cls, modality, i):
        return "<picture>"
""",
    "engine/vllm/tokenizers/hf.py": "def get_cached_tokenizer(tokenizer):\n    return tokenizer\n",
    "engine/vllm/entrypoints/openai/chat_completion/protocol.py": """
class ChatCompletionRequest:
    def __init__(self, model, messages, tools=None, chat_template_kwargs=None):
        self.messages, self.tools = messages, tools
        self.chat_template_kwargs = chat_template_kwargs
""",
    "engine/vllm/renderers/chat_utils.py": """
class BaseMultiModalItemTracker:
    pass
""",
    "engine/vllm/renderers/registry.py": """
from common_engine import render
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import BaseMultiModalItemTracker


class Renderer:
    def __init__(self, config, tokenizer):
        self.config, self.tokenizer = config, tokenizer

    async def render_messages_async(self, request, defect):
        pictures = self.config.model_config.is_multimodal_model
        if pictures:
            model = BaseMultiModalItemTracker.model_cls
            assert model.get_placeholder_str("image", 1) == "<picture>"
        try:
            text, ids = render(request, self.tokenizer, defect, pictures)
        except ValueError as error:
            raise VLLMValidationError(str(error))
        return [], {"prompt": text, "ids": ids}

    async def render_chat_async(self, request, defect):
        _, prompt = await self.render_messages_async(request, defect)
        return [[]], [{"prompt_token_ids": prompt["ids"]}]


class RENDERER_REGISTRY:
    def load_renderer(mode, config, tokenizer):
        return Renderer(config, tokenizer)
""",
    "engine/vllm/renderers/online_renderer.py": """
class OnlineRenderer:
    def __init__(self, config, renderer, *, tool_parser=None, **others):
        self.renderer, self.defect = renderer, tool_parser or ""

    async def render_chat(self, request):
        done = await self.renderer.render_chat_async(request, self.defect)
        raise ValueError("a grammar that is not there")
""",
}


def write_engines(folder: Path) -> None:
    """Both engines below `engine`, and what they import below `site`."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for package in ("transformers/utils", "sglang/srt", "sglang/srt/parser", "vllm/renderers"):
        top = "site" if package.startswith("transformers") else "engine"
        (folder / top / package / "__init__.py").touch()
