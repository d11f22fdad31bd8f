"""The wheels of this tool itself, for a machine that has no package index.

pip downloads them, as pip will install them there: by the hashes of `lockfiles/tool`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from packaging.markers import default_environment
from packaging.requirements import Requirement
from pydantic import StringConstraints

from pipeline import bootstrap
from pipeline.core import log, proc
from pipeline.core.errors import SourceUnreachable
from pipeline.core.model import Frozen, Platform

# The menu, the command, and what provisions hosts; tests and lint are for a checkout with network.
GROUPS = ("nox", "run", "hosts")
_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
# Oldest first, so that the wheels also fit a machine with an older C library than this one.
_GLIBC = (
    *("manylinux1", "manylinux2010", "manylinux2014", "manylinux_2_5", "manylinux_2_12"),
    *(f"manylinux_2_{minor}" for minor in range(17, 32)),
)
_PREFIXES = ("PIP_", "SSL_", "REQUESTS_", "http_", "https_", "HTTP", "no_", "NO_", "all_", "ALL_")


class ToolTarget(Frozen):
    """The machine that wheels are for."""

    platform: Platform
    python: Annotated[str, StringConstraints(pattern=r"^3\.\d{1,2}$")]

    @property
    def markers(self) -> list[dict[str, str]]:
        """What requirements may ask about a machine, with the first and the last of its Pythons.

        A lock may differ between 3.11.4 and 3.11.5, and which one the machine has is not known.
        """
        machine = {
            **{name: str(value) for name, value in default_environment().items()},
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": _MACHINES[self.platform],
            "python_version": self.python,
        }
        full = (f"{self.python}.0", self.last_python)
        return [{**machine, "python_full_version": version} for version in full]

    @property
    def last_python(self) -> str:
        """Later than any release of this version, so that no wheel is too new for it."""
        return f"{self.python}.99"


def own_python() -> str:
    """The version of the Python that runs this, as wheels name it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def collect_tool(root: Path, target: ToolTarget, folder: Path) -> tuple[int, int]:
    """Download all wheels of the tool; return how many the folder then has, and their bytes."""
    locks = [root / "lockfiles" / bootstrap.FOLDER / f"{group}.txt" for group in GROUPS]
    texts = [path.read_text("utf-8").replace("\\\n", " ") for path in locks]
    lines = []
    # pip judges conditions by the machine that it runs on, whatever --platform says
    for line in (line for text in texts for line in text.splitlines()):
        wanted, _, hashes = line.partition(" --hash=")
        if not wanted.strip() or wanted.startswith("#"):
            continue
        asked = Requirement(wanted.strip())
        if asked.marker is None or any(map(asked.marker.evaluate, target.markers)):
            lines.append(f"{asked.name}{asked.specifier} --hash={hashes}")
    folder.mkdir(parents=True, exist_ok=True)
    title = f"Collecting this tool's wheels for {target.platform}, Python {target.python}"
    tags = [f"{glibc}_{_MACHINES[target.platform]}" for glibc in _GLIBC]
    # wheels alone, for a machine that need not be this one
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--require-hashes", "--no-deps", "--only-binary", ":all:"),
        *("--implementation", "cp", "--python-version", target.last_python),
        *(word for tag in tags for word in ("--platform", tag)),
        *("--dest", str(folder), "--requirement"),
    ]
    names = [name for name in os.environ if name.startswith(_PREFIXES)]
    with log.step(title), tempfile.TemporaryDirectory() as scratch:
        for each in rounds(lines):
            chosen = Path(scratch) / "requirements.txt"
            chosen.write_text("".join(f"{line}\n" for line in each), encoding="utf-8")
            done = proc.read([*command, str(chosen)], env=proc.child_environment(*names))
            if done.returncode:
                reason = bootstrap.last_words(done.stderr.decode(errors="replace"))
                raise SourceUnreachable(
                    f"pip has no wheels for {target.platform} and Python {target.python}: {reason}",
                    "Check the network and pip's settings (`python3 -m pip config list`).",
                )
    sizes = [path.stat().st_size for path in folder.glob("*.whl")]
    return len(sizes), sum(sizes)


def rounds(lines: Iterable[str]) -> list[list[str]]:
    """Splits lines into rounds with each project once: groups may have locked two versions."""
    made: list[dict[str, str]] = []
    for line in dict.fromkeys(lines):
        project = line.partition("==")[0]
        home = next((each for each in made if project not in each), None)
        if home is None:
            made.append(home := {})
        home[project] = line
    return [list(each.values()) for each in made]
