"""Small recipes as they are written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.model import Recipe, RecipeFile

_SOURCES = {
    "paper": {"kind": "document", "title": "A paper"},
    "us": {"kind": "ours", "title": "Our own", "why": "It was measured."},
}
_VLLM: dict[str, Any] = {
    "name": "one",
    "summary": "A model on two cards",
    "backing": "stated",
    "engine": "vllm",
    "image": "vllm",
    "sources": _SOURCES,
    "model": {"repository": "some/model", "name": "m"},
    "hardware": {"cards": 2, "card": "rtx-pro-6000", "memory_gib": 96},
    "port": 8000,
    "flags": {"paper": {"tensor_parallel_size": 2}, "us": {"max_model_len": 4096}},
}
_SGLANG = {**_VLLM, "engine": "sglang", "image": "sglang", "flags": {"us": {"ep_size": 2}}}
_LLAMA = {
    **_VLLM,
    "engine": "ik-llama",
    "image": "ik-llama",
    "model": {"repository": "some/model-GGUF", "file": "a/b-00001-of-00003.gguf", "name": "m"},
    "flags": {"paper": {"override_tensor": ["a=CUDA0", "exps=CPU"]}, "us": {"mla": 3}},
}
_ENGINES = {"vllm": _VLLM, "sglang": _SGLANG, "ik-llama": _LLAMA}
DRAFTS = {"method": "eagle3", "repository": "some/draft", "tokens": 3, "source": "paper"}


def body(engine: str = "vllm", **changes: Any) -> dict[str, Any]:
    """A recipe with some of its fields replaced; None leaves one out."""
    result = copy.deepcopy(_ENGINES[engine]) | copy.deepcopy(changes)
    return {key: value for key, value in result.items() if value is not None}


def recipe(engine: str = "vllm", **changes: Any) -> Recipe:
    """The same as a value."""
    return RecipeFile.model_validate(body(engine, **changes)).root


def write(folder: Path, *recipes: dict[str, Any] | str) -> Recipes:
    """A folder of recipes: each in the file that its name asks for, text as it is in one.yaml."""
    folder.mkdir(exist_ok=True)
    for each in recipes:
        text = each if isinstance(each, str) else yaml.safe_dump(each)
        name = "one" if isinstance(each, str) else each["name"]
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return Recipes([folder])


def without(path: str) -> Callable[[dict[str, Any]], None]:
    """Takes a field out of a body, named as `model.name`."""
    *parents, last = path.split(".")

    def change(holder: dict[str, Any]) -> None:
        for parent in parents:
            holder = holder[parent]
        del holder[last]

    return change
