"""Building again from nothing, and naming the first byte that differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.assemble.image import Built, build_images
from pipeline.errors import NotReproducible
from pipeline.oci.record import FileRow
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.fetch.inputs import Fetcher


def rebuild(
    checkout: Checkout, first: Built, store: Store, empty: Store, fetcher: Fetcher
) -> Built:
    """Build in an empty store and compare with the first build, layer by layer."""
    second = build_images(checkout, empty, [first.plan], lambda: fetcher, judge=False)[0]
    if first.digest != second.digest:
        raise NotReproducible(difference(store, first, empty, second))
    return second


def difference(one: Store, first: Built, other: Store, second: Built) -> str:
    """The first layer and the first file in it that are not the same."""
    for a, b in zip(first.layers, second.layers, strict=False):
        if a.record.digest == b.record.digest:
            continue
        before = {r.path: r for r in one.contents(a.record)}
        after = {r.path: r for r in other.contents(b.record)}
        for path in sorted(before.keys() | after.keys()):
            if reason := _file_difference(before.get(path), after.get(path)):
                return f"layer {a.title!r}: /{path} {reason}"
        return f"layer {a.title!r}: the same files, packed differently"
    if len(first.layers) != len(second.layers):
        return f"{len(first.layers)} layers against {len(second.layers)}"
    return "all layers are equal, the config or manifest differs"


def _file_difference(a: FileRow | None, b: FileRow | None) -> str:
    if a is None or b is None:
        return "is only in the first build" if b is None else "is only in the second build"
    for field in ("kind", "mode", "size_bytes", "sha256", "target"):
        if getattr(a, field) != getattr(b, field):
            return f"differs in {field}: {getattr(a, field)} against {getattr(b, field)}"
    return ""
