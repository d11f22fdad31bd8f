"""`sm120 recipe products`: the FP4 and FP8 matrix products of a recipe, on a card."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_of, say_json, store_of
from pipeline.cli.images import find_image
from pipeline.cli.options import ANY_PATH, json_option
from pipeline.cli.recipe.recipes import recipes_of, recipes_option
from pipeline.cli.serve.options import engine_option
from pipeline.errors import ModelUnreadable, ProductsUnknown, ProductsWrong, RecipeInvalid
from pipeline.fit.facts import fact_of
from pipeline.fit.shape import Architecture
from pipeline.fit.source import find_source
from pipeline.host.facts.source import read_capture
from pipeline.products.model import Product, ProductsResult, Skipped, judge_all
from pipeline.products.run import Order, compute, require_card
from pipeline.products.shapes import products_of, sharding_of, tokens_of
from pipeline.recipe.launch import Overrides, plan_launch
from pipeline.recipe.model import Recipe
from pipeline.serve.attempts import new_id
from pipeline.serve.find_engine import Wanted, find_engine
from pipeline.serve.preflight import machine_of
from pipeline.serve.run import attempts_of

# FlashInfer compiles for minutes when it is first asked for a kernel.
_TIMEOUT_S = 3600


@click.command("products")
@click.argument("name", metavar="RECIPE")
@recipes_option
@click.option(
    "--weights", type=ANY_PATH, help="Folder of the weights, or their config.json [the lock's]."
)
@click.option("--gpu", type=click.IntRange(0, 63), default=0, show_default=True, help="GPU to use.")
@engine_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(1),
    default=_TIMEOUT_S,
    show_default=True,
    help="Seconds that it may take.",
)
@click.option("--dry-run", is_flag=True, help="Show the products; needs no GPU and no image.")
@json_option
@click.pass_context
def products(
    context: click.Context,
    name: str,
    folders: tuple[Path, ...],
    weights: Path | None,
    gpu: int,
    engine: Wanted,
    timeout_s: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compute the FP4 and FP8 matrix products of a recipe on a GPU, and compare with exact ones.

    Shapes are those of one GPU after sharding. Every route that the recipe's image has to a product
    is judged; one that the image does not have counts as missing, never as passed.
    """
    recipe = recipes_of(context, folders).read(name)
    shards = sharding_of(recipe)
    probed, skipped = products_of(_architecture(context, recipe, weights), shards)
    tokens = tokens_of(recipe)
    if dry_run or not probed:
        return _show_plan(recipe, probed, skipped, tokens, as_json)
    if recipe.image is None:
        raise RecipeInvalid(
            f"{recipe.name}: is for an engine without a container",
            "Take a recipe with an image; --dry-run shows the products.",
        )
    # nothing in the container listens, so no port is asked for
    require_card(recipe, machine_of(read_capture(None), ""), gpu)
    checkout, store = checkout_of(context), store_of(context)
    order = Order(
        launch=plan_launch(recipe, Overrides(), weights=""),
        record=find_image(checkout, store, recipe.image, None).record,
        products=probed,
        tokens=tokens,
        gpu=gpu,
        timeout_s=timeout_s,
        log_file=attempts_of(store).log_path(new_id()),
    )
    with store.in_use():
        computed = compute(find_engine(engine), store, order)
    result = judge_all(recipe.name, computed, probed, skipped, order.bound)
    if as_json:
        say_json(result.model_dump(mode="json"))
    else:
        _show(result)
    _require_passed(result)


def _architecture(context: click.Context, recipe: Recipe, weights: Path | None) -> Architecture:
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
    model = find_source(named, lambda: checkout_of(context)).model
    if not isinstance(model, Architecture):
        raise RecipeInvalid(
            f"{recipe.name}: a GGUF model has no FP4 or FP8 products",
            "Name a recipe of safetensors weights in FP4 or FP8.",
        )
    return model


def _show_plan(
    recipe: Recipe,
    probed: list[Product],
    skipped: list[Skipped],
    tokens: list[int],
    as_json: bool,
) -> None:
    if as_json:
        return say_json(
            {
                "recipe": recipe.name,
                "verdict": "skipped",
                "products": [product.model_dump() for product in probed],
                "skipped": [each.model_dump() for each in skipped],
                "tokens": tokens,
            }
        )
    rows = [[p.name, p.format, p.n, p.k, p.experts or ""] for p in probed]
    if rows:
        click.echo(log.table(["product", "format", "n", "k", "experts"], rows))
        click.echo(f"Tokens: {', '.join(map(str, tokens))}. Nothing was computed.")
    else:
        click.echo(f"{recipe.name}: none of its products is FP4 or FP8.")
    _show_skipped(skipped)


def _show_skipped(skipped: list[Skipped]) -> None:
    for why in dict.fromkeys(each.why for each in skipped):
        names = "; ".join(each.name for each in skipped if each.why == why)
        click.echo(f"Not probed, as {why}: {names}.")


def _show(result: ProductsResult) -> None:
    rows = [
        [
            row.verdict,
            row.product.name,
            f"{row.product.format} {row.product.n}x{row.product.k}",
            row.route,
            ",".join(map(str, row.tokens)),
            row.message[:120],
        ]
        for row in result.judged
    ]
    click.echo(log.table(["verdict", "product", "weights", "route", "tokens", "message"], rows))
    _show_skipped(result.skipped)
    card = result.card
    click.echo(
        f"{result.recipe}: {result.verdict} on {card.name} (capability {card.capability})."
        f" The bound is {result.bound.sentence()}."
    )


def _require_passed(result: ProductsResult) -> None:
    if result.verdict == "failed":
        first = next(row for row in result.judged if row.verdict == "failed")
        raise ProductsWrong(f"{first.product.name}: {first.route}: {first.message[:300]}")
    if result.verdict == "unknown":
        proved = {r.product for r in result.judged if r.verdict == "passed"}
        left = next(row for row in result.judged if row.product not in proved)
        raise ProductsUnknown(f"{left.product.name}: {left.route}: {left.message[:300]}")
