"""The template and tokenizer of the weights that are served: a folder, a Hub cache or GGUF."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.core import log
from pipeline.core.errors import TemplateUnusable, WeightsDamaged, WeightsUnknown
from pipeline.core.model import sha256_of
from pipeline.images.gate.templates.files import ModelText, read_model_text
from pipeline.images.gate.templates.renderer import ChatTemplate
from pipeline.serving.fit.gguf import gguf_header, gguf_parts
from pipeline.weights.place import find_places, snapshots_in

_TOKENS = "tokenizer.ggml.tokens"
_TEMPLATE = "tokenizer.chat_template"


def served_text(path: Path) -> ModelText:
    """The template and tokenizer of weights at a path; locked files must match their lock."""
    if path.is_file():
        return gguf_text(path)
    try:
        place = find_places(path)[0]
    except WeightsUnknown:
        # not locked: a folder of a user's own, a snapshot of a Hub cache, or one GGUF file
        if files := sorted(path.glob("*.gguf")):
            return gguf_text(files[0])
        folder = next(iter(snapshots_in(path)), path)
        log.say(f"{folder}: its files are not locked, and are taken as they are")
        return read_model_text(folder)
    if files := sorted(place.snapshot.glob("*.gguf")):
        return gguf_text(files[0])
    text = read_model_text(place.snapshot)
    pins = {pin.path: pin for pin in place.lock.files}
    for name in text.inputs:
        if name not in pins:
            raise WeightsDamaged(f"{place.snapshot / name}: is not among the locked files")
        hashed: hashlib._Hash = pins[name].new_hash()
        hashed.update((place.snapshot / name).read_bytes())
        if hashed.hexdigest() != pins[name].want:
            raise WeightsDamaged(f"{place.snapshot / name}: is not the file that is locked")
    return text


def gguf_text(path: Path) -> ModelText:
    """The template in the head of a GGUF file; its tokens are counted by the server.

    The head names the rule by which a text is split by a word alone (`tokenizer.ggml.pre`): what it
    means is in llama.cpp's code.
    """
    first = gguf_parts(path)[0]
    metadata = gguf_header(first, (_TOKENS,)).metadata
    source, tokens = metadata.get(_TEMPLATE), metadata.get(_TOKENS) or []
    if not isinstance(source, str):
        raise TemplateUnusable(f"{first.name}: has no chat template ({_TEMPLATE})")
    special = {}
    for name in ("bos", "eos", "unknown", "padding"):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            special[f"{short}_token"] = tokens[number]
    template = ChatTemplate(source, special)
    return ModelText(
        template=template,
        tool_template=template,
        inputs={_TEMPLATE: sha256_of(source.encode())},
        why_no_tokenizer="GGUF names the rules of its tokenizer only by a word",
    )
