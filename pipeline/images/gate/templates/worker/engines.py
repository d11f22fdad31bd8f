"""From a client's request to the tokens of the prompt, by the code of the engines.

The request's own checks, what becomes of its messages and tools, the template, and how the text is
encoded are the engine's. The tokenizer is transformers' own, with one token for each byte: what it
encodes can be read back exactly. Server, scheduler and model are not there.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import types
from pathlib import Path
from typing import Any

Missing: Any = importlib.import_module("parser_worker.stand_ins").Missing
ByteTokenizer: Any = importlib.import_module("parser_worker.tokens").ByteTokenizer
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


class Refused(Exception):
    """The engine answers a request with an error that is the client's."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


def make_tokenizer(case: dict[str, Any]) -> Any:
    """The image's own tokenizer class, over bytes; it puts a first token before plain texts."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    special = {name: text for name, text in case["tokens"].items() if text}
    markers = dict.fromkeys([*special.values(), *case["markers"]], True)
    core = tokenizers.Tokenizer.from_str(ByteTokenizer(markers).to_str())
    # as tokenizers do whose models begin with such a token: who encodes a rendered text with it
    # gets two of them
    if first := special.get("bos_token"):
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, core.token_to_id(first))]
        )
    named = {name: text for name, text in special.items() if name in _NAMED}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, **named
    )
    tokenizer.chat_template = case["template"]
    # the path of the weights, by which some engines choose a template of their own
    tokenizer.name_or_path = case["family"]
    return tokenizer


def request_body(case: dict[str, Any]) -> dict[str, Any]:
    """What a client sends."""
    body = {"model": "m", "messages": case["messages"]}
    body |= {"tools": case["tools"]} if case["tools"] else {}
    return body | ({"chat_template_kwargs": case["options"]} if case["options"] else {})


class SglangRenderer:
    """`OpenAIServingChat._process_messages` of SGLang, with its template manager."""

    route = "sglang/srt/entrypoints/openai/serving_chat.py: _process_messages"

    def __init__(self) -> None:
        # settings that are all off, as without flags; earlier versions have no such module
        with contextlib.suppress(ModuleNotFoundError):
            settings = importlib.import_module("sglang.srt.runtime_context")
            vars(settings).update(dict.fromkeys(("get_model", "get_serving"), Missing))
        package = "sglang.srt.entrypoints.openai"
        self._module: Any = importlib.import_module(f"{package}.serving_chat")
        self._request_type = importlib.import_module(f"{package}.protocol").ChatCompletionRequest
        try:
            manager = importlib.import_module("sglang.srt.parser.template_manager")
        except ModuleNotFoundError:
            manager = importlib.import_module("sglang.srt.managers.template_manager")
        self._template_type = manager.TemplateManager
        self._served: tuple[str, Any, Any] = ("", None, None)

    async def render(self, case: dict[str, Any]) -> str:
        if self._served[0] != case["family"]:
            self._served = (case["family"], *self._serve(case))
        _, chat, tokenizer = self._served
        try:
            request = self._request_type(**request_body(case))
            if fault := chat._validate_request(request):
                raise ValueError(fault)
            done = chat._process_messages(request, case["pictures"])
        # what the endpoint turns into status 400
        except ValueError as error:
            raise Refused(error) from error
        return str(tokenizer.decode(done.prompt_ids, skip_special_tokens=False))

    def _serve(self, case: dict[str, Any]) -> tuple[Any, Any]:
        tokenizer = make_tokenizer(case)
        parsers = {
            "tool_call_parser": case["parsers"].get("tool_call_parser"),
            "reasoning_parser": case["parsers"].get("reasoning_parser"),
        }
        config = types.SimpleNamespace(
            model_type=case["model_type"], architectures=[case["architecture"]]
        )
        model = types.SimpleNamespace(
            hf_config=config,
            is_multimodal=case["pictures"],
            get_default_sampling_params=dict,
        )
        manager = types.SimpleNamespace(
            tokenizer=tokenizer,
            processor=None,
            model_config=model,
            model_path=case["family"],
            served_model_name="m",
            server_args=types.SimpleNamespace(
                **parsers, enable_cache_report=False, context_length=None
            ),
            config_value=parsers.get,
        )
        template = self._template_type()
        template.load_chat_template(manager, None, case["family"])
        return self._module.OpenAIServingChat(manager, template), tokenizer


class VllmRenderer:
    """`OnlineRenderer.render_chat` of vLLM, with the renderer that it has for the model."""

    route = "vllm/renderers/online_renderer.py: render_chat"

    def __init__(self) -> None:
        self._online: Any = importlib.import_module("vllm.renderers.online_renderer")
        self._registry: Any = importlib.import_module("vllm.renderers.registry")
        tracker = importlib.import_module("vllm.renderers.chat_utils").BaseMultiModalItemTracker
        # how many pictures a model takes is known to its processor, which is made of the weights
        tracker.mm_processor, self._tracker = Missing(), tracker
        invalid = importlib.import_module("vllm.exceptions").VLLMValidationError
        self._refusals = (ValueError, invalid)
        name = "vllm.entrypoints.openai.chat_completion.protocol"
        self._request_type = importlib.import_module(name).ChatCompletionRequest
        self._served: tuple[str, Any, Any] = ("", None, None)

    async def render(self, case: dict[str, Any]) -> str:
        if self._served[0] != case["family"]:
            self._served = (case["family"], *self._serve(case))
        _, online, tokenizer = self._served
        renderer, made = online.renderer, list[Any]()
        # with a picture its text is what the model's processor gets, which is not there
        step = "render_messages_async" if case["has_picture"] else "render_chat_async"
        plain = getattr(renderer, step)

        async def noted(*args: Any, **kwargs: Any) -> Any:
            made.append(await plain(*args, **kwargs))
            return made[0]

        vars(renderer)[step] = noted
        try:
            done = await online.render_chat(self._request_type(**request_body(case)))
            if not isinstance(done, tuple):
                raise Refused(ValueError(done.error.message))
        except self._refusals as error:
            # what fails once the prompt is there is about the output: its grammar, its parser
            if not made:
                raise Refused(error) from error
        except Exception:
            if not made:
                raise
        finally:
            del vars(renderer)[step]
        prompt = made[0][1]
        if case["has_picture"]:
            return str(prompt["prompt"])
        return str(tokenizer.decode(prompt[0]["prompt_token_ids"], skip_special_tokens=False))

    def _serve(self, case: dict[str, Any]) -> tuple[Any, Any]:
        tokenizer, mode = make_tokenizer(case), case["tokenizer_mode"]
        if mode != "hf":
            module = importlib.import_module(f"vllm.tokenizers.{mode}")
            tokenizer = getattr(module, f"get_{mode}_tokenizer")(tokenizer)
        # as each of its classes ends with
        tokenizer = importlib.import_module("vllm.tokenizers.hf").get_cached_tokenizer(tokenizer)
        config = types.SimpleNamespace(
            **dict.fromkeys(("model", "tokenizer", "served_model_name"), case["family"]),
            **dict.fromkeys(("tokenizer_revision", "revision", "code_revision"), None),
            max_model_len=1 << 24,
            hf_config=types.SimpleNamespace(model_type=case["model_type"]),
            trust_remote_code=False,
            enable_prompt_embeds=False,
            multimodal_config=Missing() if case["pictures"] else None,
            encoder_config=None,
            is_encoder_decoder=False,
            is_multimodal_model=case["pictures"],
            # a processor of pictures is made of the weights; its text comes before that
            supports_multimodal_inputs=False,
            allowed_local_media_path="",
            allowed_media_domains=None,
            renderer_num_workers=1,
            get_vocab_size=lambda: len(tokenizer),
        )
        whole = types.SimpleNamespace(
            model_config=config,
            parallel_config=types.SimpleNamespace(_api_process_rank=0, _api_process_count=1),
            observability_config=None,
        )
        self._tracker.model_cls = self._model_stand_in(case["architecture"])
        renderer = self._registry.RENDERER_REGISTRY.load_renderer(mode, whole, tokenizer)
        online = self._online.OnlineRenderer(
            config,
            renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser=case["parsers"].get("tool_call_parser"),
            reasoning_parser=case["parsers"].get("reasoning_parser"),
        )
        return online, tokenizer

    @staticmethod
    def _model_stand_in(architecture: str) -> Any:
        """The one function of a model that says how a picture is written; the rest needs torch."""
        folder = Path(importlib.import_module("vllm").__path__[0]) / "model_executor" / "models"
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if f"class {architecture}(" not in text:
                continue
            tree = ast.parse(text)
            found = [node for node in tree.body if getattr(node, "name", "") == architecture]
            functions = [
                node
                for node in ast.walk(found[0])
                if isinstance(node, ast.FunctionDef) and node.name == "get_placeholder_str"
            ]
            if functions:
                alone = ast.Module([functions[0]], [])
                names: dict[str, Any] = {}
                # the engine's own code, as all that runs here
                exec(compile(alone, str(path), "exec"), names)  # noqa: S102
                return type(architecture, (), names)
        return Missing()


class RecipeRenderer:
    """deepseek-recipe, DeepSeek's own encoder: the reference for models without a template."""

    route = "deepseek_recipe: render_conversation"

    def __init__(self) -> None:
        self._recipe: Any = importlib.import_module("deepseek_recipe")

    async def render(self, case: dict[str, Any]) -> str:
        recipe, encoder = self._recipe, case["encoder"]
        names = {"DeepseekV4": "DeepSeek-V4-Pro", "DeepseekV41": "DeepSeek-V4.1-Flash"}
        body = {**request_body(case), "model": names[encoder]}
        # it has a field of its own for what others read from the template's switches
        switches = body.pop("chat_template_kwargs", {})
        if "thinking" in switches:
            body["thinking"] = {"type": "enabled" if switches["thinking"] else "disabled"}
        try:
            asked = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
            encoding = getattr(recipe, f"{encoder}Encoding")()
            return str(encoding.render_conversation(asked.conversation).prompt)
        except ValueError as error:
            raise Refused(error) from error


RENDERERS: dict[str, Any] = {
    "sglang": SglangRenderer,
    "vllm": VllmRenderer,
    "deepseek_recipe": RecipeRenderer,
}
