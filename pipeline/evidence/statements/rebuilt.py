"""Compares a rebuild from nothing: identical, equivalent, or the first byte that differs."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.artifacts.attest.predicates import DeclaredDifference
from pipeline.artifacts.attest.strict import plain
from pipeline.artifacts.binary import elf
from pipeline.artifacts.oci.record import Kind
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import NotReproducible
from pipeline.evidence.statements.inventory import placed_layers
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.layer import read_layer_file

_COMPARED = ("kind", "mode", "size_bytes", "sha256", "target")


@dataclass(frozen=True)
class Rebuilt:
    """A second build that is as good as the first."""

    second: Built
    declared: tuple[DeclaredDifference, ...] = ()  # files whose bytes may differ, and did

    @property
    def verdict(self) -> Literal["identical", "equivalent"]:
        return "equivalent" if self.declared else "identical"


def compare_builds(
    one: Store, first: Built, other: Store, second: Built
) -> tuple[DeclaredDifference, ...]:
    """The declared differences of two builds; one that no build declares is an error."""
    if first.digest == second.digest:
        return ()
    # paths whose bytes may differ, each with the reason, by the digest of the tree's layer
    may_differ: dict[str, dict[str, str]] = {}
    for placed in placed_layers(first) if first.plan.all_trees() else ():
        if placed.tree:
            build, folder = placed.tree.build, placed.tree.build.to.strip("/")
            reasons = {f"{folder}/{path}": why for path, why in build.may_differ.items()}
            may_differ[placed.layer.record.digest] = reasons
    declared: list[DeclaredDifference] = []
    # layers that only one of them has are counted below
    for layer, again in zip(first.layers, second.layers, strict=False):
        if layer.record.digest == again.record.digest:
            continue
        allowed, so_far = may_differ.get(layer.record.digest, {}), len(declared)
        before = {r.path: r for r in one.contents(layer.record)}
        after = {r.path: r for r in other.contents(again.record)}
        for path in sorted(before.keys() | after.keys()):
            title, a, b = f"layer {layer.title!r}: /{path}", before.get(path), after.get(path)
            if a is None or b is None:
                only = "first" if b is None else "second"
                raise NotReproducible(f"{title} is only in the {only} build")
            differs = [f for f in _COMPARED if getattr(a, f) != getattr(b, f)]
            if not differs:
                continue
            # other bytes are what a build declares: never another kind of file, mode or target
            is_content = (a.kind, a.mode, a.target) == (b.kind, b.mode, b.target)
            if is_content and path in allowed:
                declared.append(DeclaredDifference(path=f"/{path}", reason=plain(allowed[path])))
                continue
            field, where = differs[0], ""
            # the offsets of files in a foreign layer are not known
            if is_content and a.kind == Kind.FILE and not layer.record.is_foreign:
                was = read_layer_file(one.blob_path(layer.record.digest), a)
                now = read_layer_file(other.blob_path(again.record.digest), b)
                where = f"; {first_difference(was, now)}"
            values = f"{getattr(a, field)} against {getattr(b, field)}"
            raise NotReproducible(f"{title} differs in {field}: {values}{where}")
        if len(declared) == so_far:
            raise NotReproducible(f"layer {layer.title!r}: the same files, packed differently")
    if len(first.layers) != len(second.layers):
        raise NotReproducible(f"{len(first.layers)} layers against {len(second.layers)}")
    # settings and annotations follow from the layers, and from nothing that a build declares
    if not declared or _settings(one, first) != _settings(other, second):
        raise NotReproducible("all layers are equal, the config or manifest differs")
    return tuple(declared)


def first_difference(was: bytes, now: bytes) -> str:
    """Where two files first differ, or the shorter one ends; for an ELF file also the section."""
    at, high = 0, min(len(was), len(now))
    # bisects instead of walking: a program has a hundred million bytes
    while at < high:
        middle = (at + high + 1) // 2
        if was[at:middle] == now[at:middle]:
            at = middle
        else:
            high = middle - 1
    shown = [f"0x{data[at]:02x}" if at < len(data) else "its end" for data in (was, now)]
    inside = ""
    if was.startswith(elf.MAGIC64) and at < elf.HEAD_BYTES:
        inside = "the ELF header"
    elif was.startswith(elf.MAGIC64):
        with suppress(elf.Unreadable):  # for a damaged program, only the byte is named
            header = elf.read_header(was[: elf.HEAD_BYTES], len(was))
            sections = elf.read_sections(header, lambda x, size: was[x : x + size], len(was))
            names = [x.name for x in sections if x.name and x.offset <= at < x.end]
            inside = f"section {plain(names[0])}" if names else "between the sections of its ELF"
    place = f"{at} ({inside})" if inside else f"{at}"
    return f"first at byte {place}, {shown[0]} against {shown[1]}"


def _settings(store: Store, built: Built) -> list[Any]:
    """An image's settings and annotations, without its layers."""
    config = json.loads(store.read_blob(built.record.config))
    manifest = json.loads(store.read_blob(built.digest))
    return [{k: v for k, v in config.items() if k != "rootfs"}, manifest.get("annotations")]
