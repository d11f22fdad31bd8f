"""`sm120 completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

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
