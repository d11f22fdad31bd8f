"""`sm120 completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    r"""Print the script that completes commands and options in a shell.

    \b
    bash: eval "$(sm120 completion bash)"  in ~/.bashrc
    zsh:  eval "$(sm120 completion zsh)"   in ~/.zshrc, after compinit
    fish: sm120 completion fish > ~/.config/fish/completions/sm120.fish
    """
    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(context.find_root().command, {}, "sm120", "_SM120_COMPLETE").source())
