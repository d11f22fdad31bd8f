"""Recipes for tests."""

from __future__ import annotations

from typing import Any

from pipeline.serving.recipe.model import Recipe, RecipeFile


def recipe(**changes: Any) -> Recipe:
    """A tiny model on the CPU."""
    body: dict[str, Any] = {
        "name": "tiny-cpu",
        "summary": "a tiny model",
        "backing": "proved",
        "sources": {"ours": {"kind": "ours", "title": "this project", "why": "a test"}},
        "image": "llama-cpp-cpu",
        "engine": "llama-cpp",
        "model": {"tiny": True, "file": "tiny.gguf", "name": "tiny"},
        "hardware": {"cards": 0},
        "port": 8080,
        **changes,
    }
    return RecipeFile.model_validate(body).root


def two_cards(**hardware: Any) -> Recipe:
    """A model on two workstation cards."""
    return recipe(
        name="kimi-2x",
        engine="vllm",
        image="vllm",
        model={"repository": "moonshotai/Kimi-K2.6", "weights": "kimi", "name": "kimi"},
        hardware={"cards": 2, "card": "rtx-pro-6000", **hardware},
    )
