"""A model's chat template and tokenizer, from the files that came with its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pipeline.core.errors import MissingTool, TemplateUnusable
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import sha256_of
from pipeline.images.gate.templates.renderer import INSTALL, ChatTemplate

TEMPLATE, TOKENIZER, CONFIG = "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"
# Names of files with which a tokenizer begins that only its own Python code can read.
OTHER_TOKENIZERS = ("tiktoken.model", "tokenizer.model", "tekken.json")
_MOST_BYTES = {TEMPLATE: 4 << 20, CONFIG: 64 << 20, TOKENIZER: 512 << 20}


class Asked(Protocol):
    """A request, as far as its text goes."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class ModelText:
    """How a model's conversations become text, and text becomes tokens."""

    template: ChatTemplate
    tool_template: ChatTemplate  # where a model has another one for tools
    inputs: Mapping[str, str] = field(default_factory=dict)  # digests of the files, by name
    tokenizer_file: Path | None = None
    why_no_tokenizer: str = ""
    # tokens that the config adds to the vocabulary → whether they are special
    config_tokens: Mapping[str, bool] = field(default_factory=dict)

    def render(self, messages: Any, tools: Any = None, **options: Any) -> str:
        """The text of a conversation."""
        template = self.tool_template if tools else self.template
        return template.render(messages, tools, **options)

    def prompt(self, case: Asked, options: Mapping[str, Any] | None = None) -> str:
        """The text that an engine must make of a request; its tokens are what `usage` counts."""
        chosen = case.options if options is None else options
        return self.render(case.messages, case.tools or None, options=chosen)

    def count(self, text: str) -> int:
        """Tokens of a rendered text; the template has written the special ones itself."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def added_tokens(self) -> Mapping[str, bool]:
        """Tokens beside the vocabulary, by text, and whether a decoder may leave them out."""
        if self.tokenizer_file is None:
            return self.config_tokens
        try:
            whole = read_json(
                self.tokenizer_file.read_bytes(), most_bytes=_MOST_BYTES[TOKENIZER], any_int=True
            )
        except JsonInvalid as error:
            raise TemplateUnusable(f"{self.tokenizer_file}: {error}") from error
        listed = whole.get("added_tokens") if isinstance(whole, dict) else None
        # where both files list a token, engines go by the tokenizer's own
        return {**self.config_tokens, **_added(listed if isinstance(listed, list) else [])}

    @cached_property
    def _tokenizer(self) -> Any:
        assert self.tokenizer_file is not None
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingTool("the tokenizers package is missing", INSTALL) from error
        try:
            return Tokenizer.from_file(str(self.tokenizer_file))
        # the library raises plain Exception for any file that it cannot read
        except Exception as error:
            raise TemplateUnusable(f"{self.tokenizer_file}: {str(error)[:300]}") from error


def _added(listed: Iterable[Any]) -> dict[str, bool]:
    return {
        token["content"]: bool(token.get("special"))
        for token in listed
        if isinstance(token, dict) and isinstance(token.get("content"), str)
    }


def read_model_text(folder: Path) -> ModelText:
    """The template and tokenizer in a folder of weights."""
    inputs: dict[str, str] = {}

    def read(name: str) -> bytes | None:
        path = folder / name
        if not path.is_file():
            return None
        if path.stat().st_size > _MOST_BYTES[name]:
            raise TemplateUnusable(f"{path}: is larger than {_MOST_BYTES[name]} bytes")
        data = path.read_bytes()
        inputs[name] = sha256_of(data)
        return data

    config: Any = {}
    if (data := read(CONFIG)) is not None:
        try:
            config = read_json(data, most_bytes=_MOST_BYTES[CONFIG], any_int=True)
        except JsonInvalid as error:
            raise TemplateUnusable(f"{folder / CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise TemplateUnusable(f"{folder / CONFIG}: is no object")
    # a file of its own goes before the field: transformers, tokenization_utils_base.py
    alone = read(TEMPLATE)
    named = config.get("chat_template") if alone is None else alone.decode(errors="replace")
    # older models list several by name
    listed = named if isinstance(named, list) else [{"name": "default", "template": named}]
    sources = {
        str(each.get("name")): each["template"]
        for each in listed
        if isinstance(each, dict) and isinstance(each.get("template"), str)
    }
    if "default" not in sources:
        raise TemplateUnusable(
            f"{folder}: has no chat template ({TEMPLATE}, or chat_template in {CONFIG})",
            "Name the folder of the weights that are served, with --weights.",
        )
    # what templates may write by name, such as `bos_token`; some files hold whole objects
    named_tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    tokens = {name: text for name, text in named_tokens.items() if isinstance(text, str)}
    decoder = config.get("added_tokens_decoder")
    has_tokenizer = read(TOKENIZER) is not None
    other = next((name for name in OTHER_TOKENIZERS if (folder / name).is_file()), None)
    why = f"only its own Python code reads {other}" if other else f"{TOKENIZER} is missing"
    return ModelText(
        template=ChatTemplate(sources["default"], tokens),
        tool_template=ChatTemplate(sources.get("tool_use", sources["default"]), tokens),
        inputs=inputs,
        tokenizer_file=folder / TOKENIZER if has_tokenizer else None,
        why_no_tokenizer="" if has_tokenizer else why,
        config_tokens=_added(decoder.values() if isinstance(decoder, dict) else []),
    )
