"""The recipes of this checkout as the table that the docs print."""

from __future__ import annotations

from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import CONTEXT
from pipeline.serving.recipe.model import Recipe, merged_flags
from tests.docs.pages import ROOT

BEGIN, END = "<!-- recipes: begin -->\n", "<!-- recipes: end -->\n"

_CARDS = {
    "rtx-pro-6000": "RTX PRO 6000",
    "rtx-5090": "RTX 5090",
    "gb10": "GB10",
    "b200": "B200",
    "h200": "H200",
}
_HEAD = (
    "| recipe | what it serves | cards | image | context | backing | from |\n" + "|---" * 7 + "|\n"
)


def with_recipes(page: str) -> str:
    """The page with the table of all recipes between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("the page has no place for the table of recipes")
    return f"{before}{BEGIN}\n{recipe_table(Recipes([ROOT / 'recipes']))}\n{END}{after}"


def recipe_table(recipes: Recipes) -> str:
    """A row for each recipe, in the order of their names."""
    return _HEAD + "".join(_row(recipes.read(name)) for name in recipes.names())


def _row(recipe: Recipe) -> str:
    cells = (
        f"[{recipe.name}](../recipes/{recipe.name}.yaml)",
        recipe.model.repository or "a tiny model made on the spot",
        _cards(recipe),
        recipe.image or f"{recipe.engine} of the machine",
        _context(recipe),
        recipe.backing,
        _sources(recipe),
    )
    return f"| {' | '.join(cells)} |\n"


def _cards(recipe: Recipe) -> str:
    machine = recipe.hardware
    cards = f"{machine.cards} × {_CARDS[machine.card]}" if machine.card else "none"
    return f"{recipe.nodes} nodes with {cards}" if recipe.nodes > 1 else cards


def _context(recipe: Recipe) -> str:
    flags = merged_flags(recipe)
    tokens: int | None = getattr(flags, CONTEXT[type(flags)])
    return f"{tokens:,}" if tokens else "the model's"


def _sources(recipe: Recipe) -> str:
    """What is not this project's own: a link, or the name of one that has no address."""
    others = {k: s for k, s in recipe.sources.items() if s.kind in ("document", "report")}
    return ", ".join(_linked(name, source.link or "") for name, source in others.items())


def _linked(name: str, link: str) -> str:
    return f"[{name}]({link})" if link.startswith("https://") else name
