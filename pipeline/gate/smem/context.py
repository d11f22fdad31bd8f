"""What preparing an image for its gates takes: specs, the store, and files out of layers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.assemble.layer import read_file
from pipeline.assemble.locked_layers import make_layers
from pipeline.assemble.plan import ImagePlan, LayerKind, LayerPlan, Work
from pipeline.errors import GateEnvironment, StoreDamaged
from pipeline.fetch.inputs import Fetcher
from pipeline.files import os_errors_explained
from pipeline.gate.smem.wheels import WheelFinder
from pipeline.lock.model import WheelPin
from pipeline.oci.record import FileRow, Kind, LayerRecord
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store


@dataclass(frozen=True)
class GateContext:
    """What making environments and engine trees takes."""

    checkout: Checkout
    store: Store
    host: str  # this machine's platform
    make_fetcher: Callable[[], Fetcher]
    make_finder: Callable[[], WheelFinder]

    def work(self, plans: Sequence[LayerPlan]) -> Work:
        """What is missing of some layers, and what must be fetched for them."""
        missing = tuple(plan for plan in plans if not self.store.layer(plan.key))
        pins = {pin.sha256: pin for plan in missing for pin in plan.pins}.values()
        fetch = (p for p in pins if not self.store.has_input(p.sha256, p.size_bytes))
        return Work(missing, (), tuple(fetch))

    def layers(self, plans: Sequence[LayerPlan]) -> list[LayerRecord]:
        """Layers from the store, made now where they are missing."""
        work = self.work(plans)
        if work.missing:
            self.store.need_space(work.disk_bytes)
            # a wheel's bytes are all in its layer, from which files are unpacked
            make_layers(self.store, work, self.make_fetcher(), keep_inputs=False)
        records = [self.store.layer(plan.key) for plan in plans]
        if any(record is None for record in records):
            raise StoreDamaged("a layer was removed from the store while it was in use")
        return [record for record in records if record is not None]


def locked_wheel(plan: ImagePlan, name: str) -> WheelPin:
    """The wheel of a project in an image's lock."""
    for pin in plan.lock.wheels:
        if pin.name == name:
            return pin
    raise GateEnvironment(
        f"{plan.spec.name}: has no wheel of {name}",
        "The shared-memory gate is for images whose engine has Triton kernels.",
    )


def layer_of(plan: ImagePlan, pin: WheelPin, architecture: str) -> LayerPlan:
    """The image's layer that holds a wheel, or one of its own for a wheel outside the lock."""
    for layer in plan.layers:
        if layer.kind is LayerKind.WHEELS and pin.sha256 in {p.sha256 for p in layer.pins}:
            return layer
    return LayerPlan(f"{pin.name} {pin.version}", LayerKind.WHEELS, architecture, (pin,), plan.venv)


def mark_used(path: Path) -> None:
    """Note that something kept was used: `sm120 store trim` takes what was not for a month."""
    with suppress(OSError):  # of another user, perhaps; it is only kept less long
        os.utime(path)


# Where a path of the image goes below the folder; none to leave it out.
Placing = Callable[[FileRow], str | None]


def unpack(store: Store, layers: Iterable[LayerRecord], place: Placing, folder: Path) -> int:
    """Write the files that `place` keeps, each checked by its hash; returns the bytes."""
    jobs: dict[str, tuple[LayerRecord, FileRow]] = {}
    for layer in layers:
        for row in store.contents(layer):
            to = place(row) if row.kind in (Kind.FILE, Kind.SYMLINK) else None
            if to is not None:
                jobs[to] = (layer, row)
    with os_errors_explained(folder):
        for parent in sorted({(folder / to).parent for to in jobs}):
            parent.mkdir(parents=True, exist_ok=True)

        def write(to: str) -> int:
            layer, row = jobs[to]
            return _write(store, layer, row, folder / to)

        # the large libraries first, so that no core waits for the last one
        order = sorted(jobs, key=lambda to: -jobs[to][1].size_bytes)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return sum(pool.map(write, order))


def _write(store: Store, layer: LayerRecord, row: FileRow, path: Path) -> int:
    if row.kind == Kind.SYMLINK:
        # in the image it would lead elsewhere in the image; here, anywhere on this machine
        if not row.target.startswith("/") and ".." not in row.target.split("/"):
            path.symlink_to(row.target)
        return 0
    path.write_bytes(read_file(store.blob_path(layer.digest), row))
    # ptxas must start; owners and other bits of the image mean nothing here
    path.chmod(0o755 if row.mode & 0o111 else 0o644)
    return row.size_bytes
