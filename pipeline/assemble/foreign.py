"""A foreign base in the store: its files, its config, its users, its Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.assemble.entry import parents
from pipeline.assemble.foreign_layers import base_layers
from pipeline.assemble.manifest import Below
from pipeline.assemble.plan import ImagePlan
from pipeline.assemble.view import View, follow, see
from pipeline.errors import BaseUnusable, SpecInvalid, StoreDamaged
from pipeline.lock.model import BasePin
from pipeline.lock.wheels import GLIBC_MINOR
from pipeline.oci.config import ImageConfig, read_config
from pipeline.oci.record import FileRow, Kind, LayerRecord
from pipeline.oci.tar_reader import open_layer
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store

# a list of users has a few kilobytes
_MOST_PASSWD_BYTES = 1 << 20
# PyPI's manylinux wheels need glibc; Alpine and its like have musl.
_MUSL = re.compile(r"(usr/)?lib/ld-musl-[a-z0-9_]+\.so\.1")
# glibc has carried its version in this name up to 2.33; newer ones do not tell it so
_OLD_GLIBC = re.compile(r"(?:usr/)?lib(?:64)?/(?:[a-z0-9_-]+/)?libc-2\.(\d+)\.so")
# Debian's own, and that of the official Python images
_PYTHON_FOLDERS = ("usr/bin", "usr/local/bin")


@dataclass(frozen=True)
class Foreign:
    """A locked base whose layers were read."""

    store: Store
    pin: BasePin

    @cached_property
    def config(self) -> ImageConfig:
        return read_config(self.store.read_blob(self.pin.config.digest))

    @cached_property
    def view(self) -> View[LayerRecord]:
        """Its files as a container sees them."""
        layers = [x.record for x in base_layers(self.store, self.pin)]
        return see((record, self.store.contents(record)) for record in layers)

    @cached_property
    def rows(self) -> dict[str, FileRow]:
        return {path: row for path, (_, row) in self.view.items()}

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """A small file, links followed; none where there is no such file."""
        real, _ = follow(self.rows, path)
        if real not in self.view:
            return None
        record, row = self.view[real]
        if row.kind == Kind.HARDLINK:
            real = row.target
        with open_layer(self.store.blob_path(record.digest), record.media_type) as stream:
            # to the layer's end: a later entry of the same name wins, and the diffID is known
            data = None
            for header in stream.entries():
                if header.path == real and header.kind == Kind.FILE:
                    if header.size_bytes > most_bytes:
                        raise BaseUnusable(
                            f"{self.pin}: /{real} is too large: {header.size_bytes} bytes"
                        )
                    data = b"".join(stream.content(header))
        if stream.diff_id != record.diff_id:
            raise StoreDamaged(f"the layer {record.digest} of {self.pin} does not match its diffID")
        return data

    def user(self, image: str, name: str, passwd: bytes | None = None) -> str:
        """`uid:gid` of a user by the base's own list; a number stands for itself."""
        # numbers need no entry in /etc/passwd, as in Docker
        if name.isdecimal():
            return name
        listed = self.read("etc/passwd", _MOST_PASSWD_BYTES) if passwd is None else passwd
        if listed is None:
            raise SpecInvalid(
                f"{image}: user: {name!r} cannot be looked up, its base has no /etc/passwd",
                'Give the number: `user: "1000"`.',
            )
        for line in listed.decode(errors="replace").splitlines():
            fields = line.split(":")
            if fields[0] == name and len(fields) >= 4 and all(f.isdecimal() for f in fields[2:4]):
                return f"{fields[2]}:{fields[3]}"
        raise SpecInvalid(f"{image}: user: {name!r} is not in /etc/passwd of its base")

    def python_home(self, image: str, version: str, root: str) -> str:
        """The folder of the base's Python; an environment can only be put where none is."""
        self._require_room(image, root)
        self._require_glibc(image)
        for folder in _PYTHON_FOLDERS:
            program, _ = follow(self.rows, f"{folder}/python{version}")
            row = self.rows.get(program)
            if row is not None and row.kind in (Kind.FILE, Kind.HARDLINK):
                return f"/{folder}"
        raise SpecInvalid(
            f"{image}: python: its base has no python{version} in /usr/bin or /usr/local/bin",
            "Name the version that the base has under `python: version:`, or another base.",
        )

    def _require_glibc(self, image: str) -> None:
        for path in self.rows:
            if _MUSL.fullmatch(path):
                raise SpecInvalid(
                    f"{image}: python: its base has musl, wheels are locked for glibc"
                )
            old = _OLD_GLIBC.fullmatch(path)
            if old and int(old[1]) < GLIBC_MINOR:
                raise SpecInvalid(
                    f"{image}: python: its base has glibc 2.{old[1]}, wheels are locked for"
                    f" 2.{GLIBC_MINOR}"
                )

    def _require_room(self, image: str, root: str) -> None:
        if root in self.rows:
            raise SpecInvalid(
                f"{image}: python: its base has /{root} already; two environments would mix",
                "Use a base without one, or add `files` only.",
            )
        for folder in parents(root):
            row = self.rows.get(folder)
            # a layer writes the folders above its files anew, and would change their mode and owner
            plain = (Kind.DIR, 0o755, 0, 0)
            if row is not None and (row.kind, row.mode, row.uid, row.gid) != plain:
                raise SpecInvalid(
                    f"{image}: python: /{folder} of its base is a {row.kind} of mode"
                    f" {row.mode:04o}, owner {row.uid}:{row.gid}; wheels need a plain folder there"
                )


def require_fit(store: Store, plans: Sequence[ImagePlan]) -> None:
    """Wheels that a foreign base has no place or no Python for are not worth fetching."""
    for plan in plans:
        base = Foreign(store, plan.foreign) if plan.foreign else None
        for each in plan.chain() if base else []:
            if base and each.spec.python:
                base.python_home(each.spec.name, each.venv.version, each.venv.root)


def below(checkout: Checkout, plan: ImagePlan, foreign: Foreign) -> Below:
    """How the foreign base runs; its users, unless a file of ours lists others."""
    files = [
        checkout.folder(each.spec.name) / file.source
        for each in plan.chain()
        for file in each.spec.files
        if file.to == "/etc/passwd"
    ]

    def find_user(name: str) -> str:
        passwd = files[-1].read_bytes() if files else None
        return foreign.user(plan.spec.name, name, passwd)

    return Below(foreign.config, find_user)
