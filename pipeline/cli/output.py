"""How a command answers: tables, JSON and bytes on stdout."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.core import log

if TYPE_CHECKING:
    from pipeline.app.on_slurm import NodeReply

_MOST_KEYS_BYTES = 1 << 20  # of some 70 bytes each


def own_command() -> str:
    """How to call this command again: by its path where it is not on the user's PATH."""
    here = Path(sys.argv[0])
    # nox puts it on the PATH of its own session alone
    found = None if "NOX_CURRENT_SESSION" in os.environ else shutil.which("sm120")
    if found and here.exists() and here.samefile(found):
        return "sm120"
    # a line that can be pasted: in a checkout, sm120 is often not on the PATH
    if here.name == "sm120" and here.is_absolute() and here.is_relative_to(Path.cwd()):
        return str(here.relative_to(Path.cwd()))
    return "sm120"


def show_moves(
    head: Sequence[str], rows: Sequence[Sequence[object]], dry_run: bool, about: str = ""
) -> None:
    """What locking changed, or would change, as a table."""
    if not rows:
        return click.echo("nothing would change" if dry_run else "locked; nothing changed")
    verb = "would change" if dry_run else "changed"
    click.echo(f"{log.table(head, rows)}\n\n{len(rows)} {verb}{about}")


def say_bytes(data: bytes) -> None:
    """Bytes of others on stdout: as they are for a program, and on a terminal nothing that acts."""
    if sys.stdout.isatty():
        click.echo(data.decode(errors="replace"), nl=False)
    else:
        click.echo(data, nl=False)
    sys.stdout.flush()


def say_json(value: Any) -> None:
    """A result for programs, on stdout."""
    # sorted: two results can be compared with diff
    click.echo(log.json_text(value, indent=2, sort_keys=True))


def answer_keys(answer: Callable[[list[str]], Iterable[NodeReply]]) -> None:
    """What a node of Slurm does: keys on stdin, a line each; on stdout what `answer` makes of them.

    A line at a time: what was printed before a node died counts.
    """
    keys = [line.strip() for line in sys.stdin.read(_MOST_KEYS_BYTES).splitlines()]
    for reply in answer(keys):
        click.echo(log.json_text(reply.model_dump(exclude_defaults=True)))
        sys.stdout.flush()
