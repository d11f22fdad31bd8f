"""Whether a model fits: where to read its shape, and the recipe that serves it."""

from __future__ import annotations

from pipeline.app.workspace import Workspace
from pipeline.serving.fit.engine import FitQuestion, shown_bytes
from pipeline.serving.fit.placement import FitMachine
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.source import HubModel, ModelSource, find_source
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.model import merged_flags
from pipeline.serving.serve.fits import question_of


def find_any_model(workspace: Workspace, model: str) -> ModelSource:
    """A model by the name of its weights, its repository, its folder or its file."""

    def ask_hub(repository: str, revision: str) -> HubModel:
        # late: most models are read from a disk, which needs no HTTP client
        from pipeline.app.weights_hub import ask_hub

        return ask_hub(repository, revision)

    return find_source(model, workspace.checkout, ask_hub)


def as_served(
    workspace: Workspace,
    source: ModelSource,
    name: str,
    *,
    gpus: int,
    nodes: int,
    vram: int,
    ctx: int,
) -> tuple[str, FitQuestion] | None:
    """Find the recipe that serves a model on these cards of all nodes, and what it needs."""
    checkout = workspace.checkout_or_none()
    if checkout is None or not isinstance(source.model, Architecture):
        return None
    recipes = Recipes([checkout.root / "recipes"])
    fitting = [
        recipe
        for recipe in map(recipes.read, recipes.names())
        if recipe.model.weights == name
        and (recipe.nodes, recipe.nodes * recipe.hardware.cards) == (nodes, gpus)
        and recipe.hardware.card == "rtx-pro-6000"
        and recipe.hardware.processor is None
    ]
    # the first one to try names what to try next
    for recipe in sorted(fitting, key=lambda r: (r.fallback is None, r.image is None)):
        room = FitMachine(gpus, shown_bytes(vram), 0)
        question = question_of(merged_flags(recipe), source.model, room)
        if isinstance(question, FitQuestion):
            return recipe.name, question.model_copy(update={"context": ctx})
    return None
