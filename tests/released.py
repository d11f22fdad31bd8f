"""Signed artefacts of every release, which must verify forever: `python -m tests.released`.

Without options it compares them with the list of digests. `--add VERSION` makes the set of this
version by its own commands and keeps it; what is there already is never made again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.core.files import sha256_of_file

if TYPE_CHECKING:
    from tests.unit.support import Command, Ended

RELEASED = Path(__file__).parent / "fixtures" / "released"
DIGESTS = "digests.txt"
NEW_RELEASE = "SM120_NEW_RELEASE"
ARTEFACTS = ("report.html", "bench/quick", "layout", "weights", "host/n1.json")
MOST_BYTES = 1_500_000


def digests(folder: Path) -> dict[str, str]:
    """Every file of every release, but for those that say what they are."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    return {n: sha256_of_file(folder / n) for n in names if n not in ("README.md", DIGESTS)}


def listed(folder: Path) -> dict[str, str]:
    """The digests that were committed with the files."""
    lines = (folder / DIGESTS).read_text("utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def changes(folder: Path) -> list[str]:
    """What is not as it was committed: one line for each file."""
    now, before = digests(folder), listed(folder)
    said = dict.fromkeys(now.keys() - before.keys(), "is not listed")
    said |= dict.fromkeys(before.keys() - now.keys(), "was removed")
    both = now.keys() & before.keys()
    said |= {name: "was edited" for name in both if now[name] != before[name]}
    return [f"{name}: {why}" for name, why in sorted(said.items())]


def write_digests(folder: Path) -> None:
    """List a new release; files that are listed stay as they are."""
    path = folder / DIGESTS
    if path.exists():
        assert all(line.endswith("is not listed") for line in changes(folder)), changes(folder)
    lines = [f"{digest}  {name}" for name, digest in digests(folder).items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def verify_artefact(sm120: Command, release: Path, artefact: str) -> Ended:
    """`sm120 verify` as somebody does it who has the release's folder and its key alone."""
    folders = [release, *(release / name for name in ("layout", "weights", "host"))]
    look_in = [word for folder in folders for word in ("--look-in", folder)]
    words = ("--key", release / "released.pub", "--deep", *look_in)
    if artefact in ("layout", "weights", "host/n1.json"):
        words = words[:3]
    return sm120("--checkout", release / "checkout", "verify", release / artefact, *words)


@click.command()
@click.option("--add", "version", metavar="VERSION", help="Make and keep the set of this version.")
def main(version: str | None) -> None:
    """Compare the artefacts of all releases with their digests, or add a set."""
    if version:
        test = "tests/unit/cli/test_release_set.py"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        env = {**os.environ, NEW_RELEASE: version}
        ended = subprocess.run(command, cwd=RELEASED.parents[2], env=env, check=False)
        sys.exit(ended.returncode)
    wrong = changes(RELEASED)
    click.echo("\n".join(wrong) or f"{len(listed(RELEASED))} files as they were released")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
