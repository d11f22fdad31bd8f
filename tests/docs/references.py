"""What the code itself writes of the pages: exit codes, the command's reference, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click

from pipeline.cli.main import cli
from pipeline.core.errors import PipelineError
from tests.docs.commands import below
from tests.docs.error_table import error_families, error_kinds
from tests.docs.gate_table import with_cases
from tests.docs.packages import arrows, drawing
from tests.docs.pages import DOCS, anchor
from tests.docs.recipe_table import with_recipes

# | `pipeline/package` | takes | gives | imports |
_PACKAGE = re.compile(r"^(?P<row>\| `pipeline/(?P<package>[\w/]+)` \|[^|]*\|[^|]*\|)[^|]*\|$", re.M)
_NOTE = "<!-- Written by `python -m tests.docs --write`; edit the code instead. -->\n"

_EXIT_CODES = """# Exit codes

A failed command prints one line that says what happened and one that says what to try, and ends
with an exit code. Codes stand for families of errors; with `--json` the error is a JSON document on
stderr that also names its kind, so that a script can tell kinds apart. `--debug` shows where in the
code it happened.

0 is success; 2 is a command line that `sm120` does not understand (the usage is printed); 141 means
that the reader of a pipe went away (`sm120 … | head`). A code that is not listed here does not come
from `sm120`. nox ends with 1 whatever failed, so a script should call `.nox/run/bin/sm120` itself.
Commands without `--json`, and code 2, print text only.

"""

_CLI = """# The `sm120` command

Every command with its options, as `--help` prints them. `sm120` is also `python -m pipeline`.
Results go to stdout, progress to stderr; `--json` answers for programs. Options of `sm120` itself
stand before the verb: `sm120 --store DIR build sglang-k2`.

"""


# by name, so that collecting tests does not draw the house
GENERATED = ("exit-codes.md", "cli.md", "architecture.md", "recipes.md", "gates.md")


@cache
def generated() -> dict[Path, str]:
    """Each page that the code has a part in, whole, as it must be."""
    return {
        DOCS / "exit-codes.md": _EXIT_CODES.replace("\n\n", f"\n\n{_NOTE}\n", 1) + _exit_codes(),
        DOCS / "cli.md": _CLI.replace("\n\n", f"\n\n{_NOTE}\n", 1) + "\n".join(_commands()),
        DOCS / "architecture.md": _architecture((DOCS / "architecture.md").read_text("utf-8")),
        DOCS / "gates.md": with_cases((DOCS / "gates.md").read_text("utf-8")),
        DOCS / "recipes.md": with_recipes((DOCS / "recipes.md").read_text("utf-8")),
    }


def _exit_codes() -> str:
    """A table of the families, then each family with its kinds."""
    families = error_families()
    rows = [f"| [{f.exit_code}](#exit-code-{f.exit_code}) | {f.meaning} |" for f in families]
    table = "\n".join(["| code | what happened |", "|---|---|", *rows])
    return "\n\n".join([table, *map(_family, families)]) + "\n"


def _family(family: type[PipelineError]) -> str:
    title = f"## Exit code {family.exit_code}\n\n{family.meaning[:1].upper()}{family.meaning[1:]}."
    rows = [f"| `{k.__name__}` | {k.meaning} | {k.hint} |" for k in error_kinds(family)]
    return "\n".join([title, "", "| error | what happened | what to try |", "|---|---|---|", *rows])


def _commands() -> Iterator[str]:
    top = click.Context(cli, info_name="sm120", **cli.context_settings)
    yield _section("## sm120", top)
    first: dict[int, str] = {}
    for context in below(top):
        path = context.command_path
        title = f"{'#' * min(len(path.split()) + 1, 4)} {path}"
        if (other := first.setdefault(id(context.command), path)) != path:
            yield f"{title}\n\nThe same as [{other}](#{anchor(other)}).\n"
        else:
            yield _section(title, context)


def _section(title: str, context: click.Context) -> str:
    # the width of a terminal must not change the page
    context.terminal_width = context.max_content_width = 100
    text = context.get_help()
    return f"{title}\n\n```text\n{text}\n```\n"


def _architecture(text: str) -> str:
    """The page with the drawing, and the imports in the table of packages, as they are."""
    before, _, rest = text.partition("```mermaid\n")
    after = rest.partition("```\n")[2]
    return f"{_PACKAGE.sub(_with_imports, before)}```mermaid\n{drawing()}\n```\n{after}"


def _with_imports(row: re.Match[str]) -> str:
    """Packages of the same part by their own name, other parts as a whole; core is everywhere."""
    part = row["package"].partition("/")[0]
    imported = sorted(arrows().get(row["package"], frozenset()))
    own = [f"`{name.partition('/')[2]}`" for name in imported if name.startswith(f"{part}/")]
    others = dict.fromkeys(name.partition("/")[0] for name in imported)
    rest = [name for name in others if name not in (part, "core")]
    return f"{row['row']} {', '.join([*own, *rest]) or '–'} |"
