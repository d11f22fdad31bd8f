"""`images/<name>/gates/arch.yaml`: what is known and accepted, and what is demanded.

Where the wheels of another processor hold other code, `arch.<processor>.yaml` takes its place.

A file of its own: nothing in it decides a byte of the image, so nothing in it may move a digest.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

from pydantic import StringConstraints

from pipeline.gate.files import gate_files
from pipeline.model import Frozen
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import Architecture
from pipeline.yaml_file import read_yaml

# A path in the image with `*` and `?`; not so short that it swallows everything.
Glob = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._+@/*?-]{6,200}$")]
Reason = Annotated[str, StringConstraints(min_length=20, max_length=400)]


class ArchSpec(Frozen):
    """Objects without code for the card, each with the reason, and objects that need a variant."""

    schema_name: ClassVar[str] = "arch"

    accepted: dict[Glob, Reason] = {}
    demands: dict[Glob, Architecture] = {}

    def accepting(self, path: str) -> str | None:
        """The first glob that accepts a path."""
        return next((glob for glob in self.accepted if fnmatchcase(path, glob)), None)

    def demanded(self, path: str) -> Architecture | None:
        """The variant that a path must hold."""
        return next((arch for glob, arch in self.demands.items() if fnmatchcase(path, glob)), None)


def read_arch_spec(checkout: Checkout, name: str, platform: str) -> ArchSpec:
    """The image's file for a platform, or nothing accepted and nothing demanded."""
    files = gate_files(checkout, name, "arch", platform)
    return next((read_yaml(path, ArchSpec) for path in files.values()), ArchSpec())
