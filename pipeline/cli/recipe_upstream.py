"""`sm120 recipe diff`, `import` and `drift`: recipes beside each other and their documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml

from pipeline.app.recipes import recipes_of
from pipeline.app.upstream import (
    ImportRequest,
    compare_recipes,
    find_drift,
    import_recipe,
    list_commands,
)
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import flag_option, many_option, query
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.errors import RecipeInvalid
from pipeline.core.files import write_bytes

_CARDS = ("rtx-pro-6000", "rtx-5090", "gb10", "b200", "h200")


@query
@click.argument("one", metavar="RECIPE")
@click.argument("other", metavar="RECIPE")
@options.recipes_option
def recipe_diff_command(
    workspace: Workspace, one: str, other: str, folders: tuple[Path, ...], as_json: bool
) -> None:
    """List what two recipes do not share: model, image, cards, flags and variables.

    Both are taken with all that they extend. Names, summaries and sources are not compared.
    """
    recipes = recipes_of(workspace, folders)
    found = compare_recipes(recipes.read(one), recipes.read(other))
    if as_json:
        return say_json([each._asdict() for each in found])
    if found:
        click.echo(log.table(("setting", one, other), found))
    log.say(f"{one} and {other}: {log.count(len(found), 'difference')}")


@query
@click.argument("place", metavar="FILE|REPO@COMMIT:PATH")
@click.option("--name", help="Name of the new recipe; --list needs none.")
@click.option(
    "--pick", metavar="LABEL", help="Which command of the file, where it has several; see --list."
)
@flag_option("--list", "is_listed", help="List the commands of the file, and stop.")
@click.option("--image", help="Image that serves it [default: vllm or sglang].")
@click.option(
    "--cards",
    type=click.IntRange(1, 64),
    help="Number of cards [default: what the command divides the model among].",
)
@click.option(
    "--card",
    type=click.Choice(_CARDS),
    default=_CARDS[0],
    show_default=True,
    help="Kind of the cards.",
)
@many_option(
    "--feature", "features", help="Feature of a vLLM recipe that is off by default. Repeatable."
)
@click.option("--hardware", help="Name that a vLLM recipe has for the card, such as rtx_5090.")
@many_option("--drop", "drops", metavar="FLAG", help="Leave it out. Repeatable.")
@flag_option(
    "--allow-remote-code",
    "remote_code",
    help="Take --trust-remote-code, which runs Python of the model's repository.",
)
@click.option(
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write NAME.yaml to, instead of standard output.",
)
def recipe_import_command(
    workspace: Workspace,
    /,
    is_listed: bool,
    folder: Path | None,
    as_json: bool,
    name: str | None,
    **options: Any,
) -> None:
    """Make a recipe of one command of vLLM's recipes, SGLang's cookbook or a page of Markdown.

    The file is one on this disk, or with REPO@COMMIT:PATH one of a local git checkout, whose commit
    the recipe then names. Nothing is downloaded and nothing of the file is run. Every flag is held
    against the argument parser of the engine in the image; what the image does not know, what a
    shell would fill in, and what loads code of others is refused with the reason. Where the recipe
    differs from the document is listed.
    """
    if name is None and not is_listed:
        raise click.UsageError("Name the new recipe: --name NAME.")
    request = ImportRequest(name=name or "", **options)
    if is_listed:
        rows = list_commands(request)
        if as_json:
            return say_json(rows)
        return click.echo(log.table(("label", "model", "command"), [[*r.values()] for r in rows]))
    target = folder / f"{request.name}.yaml" if folder else None
    if target and target.exists():
        raise RecipeInvalid(f"{target}: is there already", "Choose another --name, or remove it.")
    done = import_recipe(workspace, request)
    text = yaml.safe_dump(done.body, sort_keys=False, width=100, allow_unicode=True)
    if target:
        write_bytes(target, text.encode())
        log.say(f"wrote {target}")
    if as_json:
        shown = [each._asdict() for each in done.differences]
        return say_json({"recipe": done.body, "differences": shown})
    if not target:
        click.echo(text, nl=False)
    for what, before, after in done.differences:
        there, here = ("nothing" if each is None else each or "it" for each in (before, after))
        log.say(f"differs: {what}: the document has {there}, the recipe {here}")


@query
@click.argument("names", metavar="[RECIPE]...", nargs=-1)
@click.option(
    "--upstream",
    required=True,
    metavar="REPO[@COMMIT]",
    help="Local git checkout of the project that the recipes come from [default: its HEAD].",
)
@options.recipes_option
def recipe_drift_command(
    workspace: Workspace,
    names: tuple[str, ...],
    upstream: str,
    folders: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Compare the documents that recipes name by commit with those of a newer commit.

    Looks at the sources whose link is .../blob/COMMIT/PATH of the checkout's own project, of all
    recipes or of those named. Nothing is downloaded: fetch in the checkout first. Ends with exit
    code 11 where a document has changed.
    """
    found, error = find_drift(workspace, names, upstream, folders)
    if as_json:
        rows = [{**e._asdict(), "differences": [d._asdict() for d in e.differences]} for e in found]
        say_json(rows)
    elif not found:
        click.echo("None of these recipes names a document of that project by commit.")
    else:
        head = ("state", "recipe", "document", "since", "why")
        click.echo(
            log.table(head, [(e.state, e.recipe, e.path, e.commit[:12], e.why) for e in found])
        )
        for each in found:
            for what, before, after in each.differences:
                click.echo(f"  {each.recipe}: {what}: {before} -> {after}")
    if error:
        raise error
