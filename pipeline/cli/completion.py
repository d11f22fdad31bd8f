"""Shell completion: its script, and names of images and recipes without what reads them.

A shell waits for the answer at every press of the key: the modules that read specs take a second,
and an error would end up in the middle of the line that is being typed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import click
from click.shell_completion import CompletionItem, get_completion_class

from pipeline.images.spec.root import checkout_above

Kind: TypeAlias = Literal["image", "recipe"]


def complete_names(kind: Kind, context: click.Context, incomplete: str) -> list[CompletionItem]:
    """The names that begin so, sorted; none where nothing can be read."""
    with suppress(OSError):
        # the checkout of --checkout, else the one around the current folder
        start = Path(context.find_root().params.get("checkout") or Path.cwd())
        root = checkout_above(start.resolve())
        if kind == "image":
            names = {p.parent.name for p in root.glob("images/*/image.yaml")} if root else set()
        else:
            # the folders of --recipes, else of its variable
            variable = os.environ.get("SM120_RECIPES", "").split(os.pathsep)
            folders = [Path(each) for each in context.params.get("folders") or variable if each]
            folders += [root / "recipes"] if root else []
            names = {path.stem for folder in folders for path in folder.glob("*.yaml")}
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
    return []


# click prints a paragraph that begins with a backspace character as it is written
_HELP = """Print the script that completes commands and options in a shell.

\b
bash: eval "$(sm120 completion bash)"  in ~/.bashrc
zsh:  eval "$(sm120 completion zsh)"   in ~/.zshrc, after compinit
fish: sm120 completion fish > ~/.config/fish/completions/sm120.fish
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script of a shell."""
    script = get_completion_class(shell)
    # the choice above names only shells that click knows
    assert script is not None
    click.echo(script(context.find_root().command, {}, "sm120", "_SM120_COMPLETE").source())
