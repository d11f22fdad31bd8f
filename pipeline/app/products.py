"""Check the FP4 and FP8 matrix products of a recipe on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.app.images import find_image
from pipeline.app.recipes import recipes_of
from pipeline.app.workspace import Workspace
from pipeline.artifacts.containers.container_engine import Wanted, find_engine
from pipeline.core.errors import ModelUnreadable, ProductsUnknown, ProductsWrong, RecipeInvalid
from pipeline.hosts.facts.source import read_capture
from pipeline.serving.fit.facts import fact_of
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.source import find_source
from pipeline.serving.products.model import Product, ProductsResult, Skipped, judge_all
from pipeline.serving.products.run import Order, compute, require_card
from pipeline.serving.products.shapes import products_of, sharding_of, tokens_of
from pipeline.serving.recipe.launch import Overrides, plan_launch
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.attempts import new_id
from pipeline.serving.serve.preflight import machine_of
from pipeline.serving.serve.run import attempts_of

# FlashInfer compiles for minutes when it is first asked for a kernel.
TIMEOUT_S = 3600


@dataclass(frozen=True)
class ProductsPlan:
    """The products of a recipe on one GPU after sharding, and those that are not probed."""

    recipe: Recipe
    probed: list[Product]
    skipped: list[Skipped]
    tokens: list[int]


def plan_products(
    workspace: Workspace, name: str, folders: tuple[Path, ...] = (), weights: Path | None = None
) -> ProductsPlan:
    """Which products a recipe computes; needs no GPU and no image."""
    recipe = recipes_of(workspace, folders).read(name)
    shards = sharding_of(recipe)
    probed, skipped = products_of(_architecture(workspace, recipe, weights), shards)
    return ProductsPlan(recipe, probed, skipped, tokens_of(recipe))


def check_products(
    workspace: Workspace,
    plan: ProductsPlan,
    *,
    gpu: int = 0,
    engine: Wanted = "auto",
    timeout_s: int = TIMEOUT_S,
) -> ProductsResult:
    """Compute the products on a GPU through every route of the image, and compare them."""
    recipe = plan.recipe
    if recipe.image is None:
        raise RecipeInvalid(
            f"{recipe.name}: is for an engine without a container",
            "Take a recipe with an image; --dry-run shows the products.",
        )
    # nothing in the container listens, so no port is asked for
    require_card(recipe, machine_of(read_capture(None), ""), gpu)
    checkout, store = workspace.checkout(), workspace.store()
    order = Order(
        launch=plan_launch(recipe, Overrides(), weights=""),
        record=find_image(checkout, store, recipe.image, None).record,
        products=plan.probed,
        tokens=plan.tokens,
        gpu=gpu,
        timeout_s=timeout_s,
        log_file=attempts_of(store).log_path(new_id()),
    )
    with store.in_use():
        computed = compute(find_engine(engine), store, order)
    return judge_all(recipe.name, computed, plan.probed, plan.skipped, order.bound)


def _architecture(workspace: Workspace, recipe: Recipe, weights: Path | None) -> Architecture:
    """From the files of the weights, the recipe's lock, or what is shipped about its repository."""
    named = str(weights) if weights else recipe.model.weights
    if named is None:
        known = fact_of(recipe.model.repository or "")
        if known is None:
            raise ModelUnreadable(
                f"{recipe.name}: nothing about {recipe.model.repository} is shipped",
                "Name the folder of its weights, or its config.json, with --weights.",
            )
        return known.architecture()
    model = find_source(named, workspace.checkout).model
    if not isinstance(model, Architecture):
        raise RecipeInvalid(
            f"{recipe.name}: a GGUF model has no FP4 or FP8 products",
            "Name a recipe of safetensors weights in FP4 or FP8.",
        )
    return model


def require_passed(result: ProductsResult) -> None:
    """Raise ProductsWrong or ProductsUnknown where not every product is proved."""
    if result.verdict == "failed":
        first = next(row for row in result.judged if row.verdict == "failed")
        raise ProductsWrong(f"{first.product.name}: {first.route}: {first.message[:300]}")
    if result.verdict == "unknown":
        proved = {r.product for r in result.judged if r.verdict == "passed"}
        left = next(row for row in result.judged if row.product not in proved)
        raise ProductsUnknown(f"{left.product.name}: {left.route}: {left.message[:300]}")
