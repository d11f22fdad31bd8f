"""A host for promises to be judged by: files, units and output of programs, all in plain values."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.hosts.fleet.promised import HostConnection

LOCAL = HostConnection(kind="local", address="here")


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@dataclass(frozen=True)
class FakeHost:
    """What testinfra's Host is for the tests of promises."""

    files: dict[str, str] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    units: dict[str, tuple[bool, bool]] = field(default_factory=dict)  # enabled, running
    outputs: dict[str, tuple[int, str]] = field(default_factory=dict)  # by how a command begins
    mounted: tuple[str, ...] = ()

    def file(self, path: str) -> SimpleNamespace:
        text = self.files.get(path)
        below = any(p.startswith(f"{path}/") for p in self.files)
        return SimpleNamespace(
            exists=text is not None or below,
            content_string=text,
            mode=self.modes.get(path, 0o644),
            user=self.owners.get(path, "root"),
            sha256sum=hashlib.sha256((text or "").encode()).hexdigest(),
        )

    def service(self, name: str) -> SimpleNamespace:
        enabled, running = self.units.get(name, (False, False))
        return SimpleNamespace(is_enabled=enabled, is_running=running)

    def mount_point(self, path: str) -> SimpleNamespace:
        return SimpleNamespace(exists=path in self.mounted)

    def run(self, command: str, *args: str) -> SimpleNamespace:
        full = command % args if args else command
        if full.startswith("for f in ") and not any(full.startswith(x) for x in self.outputs):
            return SimpleNamespace(
                rc=0, stdout=self._texts(full.split(";")[0].split()[3:]), stderr=""
            )
        best = max((b for b in self.outputs if full.startswith(b)), key=len, default=None)
        rc, out = self.outputs[best] if best is not None else (1, "")
        if best is None and full.startswith("cat ") and full[4:] in self.files:
            rc, out = 0, self.files[full[4:]]
        return SimpleNamespace(rc=rc, stdout=out, stderr="" if rc == 0 else out)

    def _texts(self, patterns: list[str]) -> str:
        """The output of the loop of `texts_in`."""
        found = {p: None for x in patterns for p in sorted(self.files) if fnmatchcase(p, x)}
        return "".join(f"\x1e{p}\n{self.files[p]}" for p in found)

    def but(self, **changes: Any) -> FakeHost:
        """The same host with some things otherwise; None takes a file away."""
        made: dict[str, Any] = {}
        for name, change in changes.items():
            if name == "mounted":
                made[name] = change
                continue
            new = {**getattr(self, name), **change}
            made[name] = {k: v for k, v in new.items() if v is not None}
        return replace(self, **made)
