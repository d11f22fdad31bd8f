"""What the demo has made so far: a folder that stays, and parts that end with the run."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.core import proc
from tests.demo.overview import LeftOut, Overview
from tests.demo.shell import ROOT, Shell
from tests.integration.site import Site
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.registry import Registry

MARK = "demo.json"
# what others need: titles of steps, and stages of the plan
NODES_STEP = "Two fresh nodes"
BUILD, PUBLISH, WEIGHTS_STAGE, REPORT = "build", "publish", "weights", "report"
Part = TypeVar("Part")


@dataclass
class World:
    """One run of the demo."""

    folder: Path
    stack: ExitStack
    overview: Overview
    shell: Shell
    registry: Registry | None = None
    image: str | None = None  # its digest
    weights: Path | None = None
    daemon: DockerDaemon | None = None
    site: Site | None = None
    report: Path | None = None
    port: int = 0

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    @property
    def inventory(self) -> Path:
        return self.folder / "inventory.json"

    def place_of(self, name: str) -> str:
        """The image's name in the registry."""
        assert self.registry
        return f"{self.registry.host_port}/team/{name}"

    @property
    def on_node(self) -> tuple[str, ...]:
        """The options that name the node that serves; none where this machine does."""
        return ("--on", "n1", "-i", str(self.inventory)) if self.site else ()


def needed(part: Part | None, maker: str) -> Part:
    """A part that a step or stage before made; without it this one is left out, too."""
    if part is None:
        raise LeftOut(f"needs what `{maker}` makes")
    return part


def new_world(folder: Path, stack: ExitStack, overview: Overview) -> World:
    """An empty folder, and a shell in what will be the checkout."""
    folder = folder.resolve()
    for name in ("checkout", "logs"):
        (folder / name).mkdir(parents=True)
    env = proc.child_environment(
        *(name for name in os.environ if name.startswith(("PIP_", "UV_", "SM120_DEBIAN"))),
        *("SM120_MIRRORS", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy"),
        PYTHONPATH=str(ROOT),
        SM120_STORE=str(folder / "store"),
        # nothing of the user's own: neither keys nor settings
        XDG_CONFIG_HOME=str(folder / "config"),
        ANSIBLE_TIMEOUT="90",
    )
    shell = Shell(folder / "checkout", folder / "logs", env, overview.typed, {str(folder): ".."})
    return World(folder, stack, overview, shell)


def make_empty(folder: Path) -> None:
    """Remove what an earlier demo left there, and nothing else."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).is_file():
            raise FileExistsError(f"{folder} is not empty, and no demo has written it")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # so that a run that is killed can be told from a folder of somebody's own
    (folder / MARK).write_text("{}\n")
