"""What runs an image that was just loaded: lines to paste."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import PipelineError
from pipeline.recipe.container import LOOPBACK
from pipeline.recipe.find import Recipes
from pipeline.recipe.launch import model_words
from pipeline.recipe.model import Recipe
from pipeline.spec.image import ImageSpec

_ON_CARDS = ["--gpus", "all", "--ipc=host", "--ulimit", "memlock=-1"]


def run_lines(recipes: Recipes, spec: ImageSpec, tag: str) -> Iterator[str]:
    """`docker run` with the image's port and a model, what to ask then, and a recipe for it."""
    recipe = next(_recipes_of(recipes, spec.name), None)
    # an image without a server, or one that no recipe knows how to give a model to
    if recipe is None or not spec.ports:
        return
    port, is_file = spec.ports[0], recipe.engine in ("llama-cpp", "ik-llama")
    model = model_words(recipe.engine, f"/models/{'MODEL.gguf' if is_file else 'MODEL'}")
    flags = ["--rm", *(_ON_CARDS if recipe.hardware.cards else [])]
    # to this machine alone: engines ask nobody for a password
    flags += ["-p", f"{LOOPBACK}:{port}:{port}", "-v", "/models:/models:ro"]
    yield f"Run it: docker run {' '.join(flags)} {tag} {' '.join(model)}"
    yield f"Ask it: curl http://{LOOPBACK}:{port}/v1/models"
    yield f"Or let a recipe do both: sm120 serve {recipe.name}"


def recipe_for_any_machine(recipes: Recipes, image: str) -> str | None:
    """A recipe of an image that needs neither a GPU nor weights."""
    found = (r for r in _recipes_of(recipes, image) if r.model.tiny and not r.hardware.cards)
    return next((recipe.name for recipe in found), None)


def _recipes_of(recipes: Recipes, image: str) -> Iterator[Recipe]:
    for name in recipes.names():
        try:
            recipe = recipes.read(name)
        except PipelineError:
            # somebody's unfinished recipe is no reason to end a load with an error
            continue
        if recipe.image == image:
            yield recipe
