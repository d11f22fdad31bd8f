"""Debian packages that an image adds to its base, as a layer of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.assemble import rootfs
from pipeline.assemble.entry import Entry, with_parents
from pipeline.oci.record import Kind


def assemble_overlay(debs: Iterable[Path], scratch: Path, *, architecture: str) -> list[Entry]:
    """The packages' files alone; what they are goes to dpkg's `status.d`, as scanners expect."""
    packages = rootfs.unpack_all(sorted(debs), scratch, architecture)
    tree = rootfs.Tree()
    for contents in packages:
        tree.add_package(contents)
        name = contents.control["Package"]
        stanza = rootfs.status_stanza(contents.control_text).encode()
        tree.put(Entry(f"var/lib/dpkg/status.d/{name}", Kind.FILE, 0o644, stanza), name)
    return rootfs.with_hard_links(with_parents(tree.entries()))
