"""`sm120 verify`: follow the evidence of an artifact back to its parts, and judge it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import ANY_PATH, EXISTING_FILE, flag, query
from pipeline.cli.output import say_json
from pipeline.evidence.verify.verdict import show


@query
@click.argument("artifact", metavar="IMAGE|RUN|REPORT|FILE|DIR|REGISTRY/REPO:TAG|@DIGEST")
@click.option(
    "--evidence",
    "places",
    multiple=True,
    # a mistyped name is no broken evidence
    type=click.Path(exists=True, path_type=Path),
    help="Statement file or folder of them [default: those beside it]. Repeatable.",
)
@options.look_in_option
@options.trust_option
@click.option(
    "--key",
    "key_paths",
    multiple=True,
    type=EXISTING_FILE,
    metavar="FILE.pub",
    help="Public key to believe for this once, about everything. Repeatable.",
)
@click.option(
    "--policy", "policy_path", type=ANY_PATH, help="File of what the evidence must hold, for CI."
)
@flag("--deep", help="Read every layer in a registry and every weights file.")
@flag("--all", "everything", help="Show every package, not only what is wrong.")
@options.own_recipes_option
@options.platform_option
@options.registry_options
def verify_command(
    workspace: Workspace,
    /,
    folders: tuple[Path, ...],
    own_recipes: tuple[Path, ...],
    everything: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check evidence: who signed it, whether it is about these bytes, and what is behind it.

    Works offline; for an image in a registry, only that registry is asked. The store remembers
    which image a tag named last, so that a tag which was moved back is noticed.

    The exit code is 0 only when everything holds. Stale, incomplete, unsigned, moved and broken
    have their own exit codes; what could not be checked never counts as valid.
    """
    # a run of a recipe of one's own is compared with that recipe, as `serve` found it
    request = app.verify.VerifyRequest(folders=(*folders, *own_recipes), **options)
    done = app.verify.verify(workspace, request)
    if as_json:
        answer = done.node.as_json()
        if judged := [each.as_json() for each in done.policy]:
            answer["policy"] = judged[0] if len(judged) == 1 else judged
        say_json(answer)
    else:
        click.echo("\n".join(show(n, everything=everything) for n in (done.node, *done.policy)))
    done.require_valid()
