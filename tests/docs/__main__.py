"""Say which pages are out of date, or bring them up to date: `python -m tests.docs --write`."""

from __future__ import annotations

import os
import subprocess
import sys

import click

from pipeline.artifacts.store.store import default_root
from tests.docs.pages import ROOT, pages
from tests.docs.references import generated
from tests.docs.walks import RECORDED, RealWorld, walk, walks


@click.command()
@click.option("--write", is_flag=True, help="Write the references, and the output of commands.")
@click.option("--record", is_flag=True, help="Also what needs the built engine images (minutes).")
def main(write: bool, record: bool) -> None:
    """Compare the documentation with the code."""
    if write or record:
        for path, text in generated().items():
            path.write_text(text, encoding="utf-8")
    if record:
        _record()
    env = {**os.environ, **({"SM120_WRITE_DOCS": "1"} if write else {})}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/docs"]
    sys.exit(subprocess.run(command, cwd=ROOT, env=env, check=False).returncode)


def _record() -> None:
    for page in pages():
        if RECORDED in walks(page):
            wrong = walk(page, RECORDED, RealWorld(default_root()), write=True)
            click.echo("\n".join(wrong) or f"{page.name}: recorded")


if __name__ == "__main__":
    main()
