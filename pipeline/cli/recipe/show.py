"""`sm120 recipe list` and `show`."""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from pipeline import log
from pipeline.cli.context import say_json
from pipeline.cli.options import json_option
from pipeline.cli.recipe.recipes import recipes_of, recipes_option
from pipeline.recipe.model import Recipe


@click.command("list")
@recipes_option
@json_option
@click.pass_context
def list_recipes(context: click.Context, folders: tuple[Path, ...], as_json: bool) -> None:
    """List the recipes: engine, image, cards, and what each rests on."""
    recipes = recipes_of(context, folders)
    rows = [_row(recipes.read(name)) for name in recipes.names()]
    if as_json:
        return say_json(rows)
    head = ["name", "engine", "image", "gpus", "backing", "summary"]
    click.echo(log.table(head, [[row[name] for name in head] for row in rows]))


def _row(recipe: Recipe) -> dict[str, object]:
    cards = recipe.hardware
    return {
        "name": recipe.name,
        "engine": recipe.engine,
        "image": recipe.image,
        "gpus": f"{cards.cards}x {cards.card}" if cards.cards else None,
        "backing": recipe.backing,
        "summary": recipe.summary,
    }


@click.command("show")
@click.argument("name", metavar="RECIPE")
@recipes_option
@json_option
@click.pass_context
def show(context: click.Context, name: str, folders: tuple[Path, ...], as_json: bool) -> None:
    """Show a recipe with all that it extends: flags by source, hardware, changes."""
    recipe = recipes_of(context, folders).read(name)
    # what nobody wrote is left out, as in the file
    body = recipe.model_dump(mode="json", exclude_defaults=True)
    if as_json:
        return say_json(body)
    click.echo(yaml.safe_dump(body, sort_keys=False, width=100, allow_unicode=True), nl=False)
