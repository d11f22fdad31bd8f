"""From a plan and finished layers to an image in the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifacts import oci
from pipeline.artifacts.oci.config import RunSettings
from pipeline.artifacts.oci.document import (
    OCI_CONFIG,
    OCI_MANIFEST,
    TITLE,
    Descriptor,
    descriptor_json,
)
from pipeline.artifacts.oci.record import ImageRecord, LayerRecord, TitledLayer
from pipeline.artifacts.store.store import Store
from pipeline.core import model
from pipeline.core.errors import SpecInvalid, StoreDamaged, UnknownImage
from pipeline.core.files import os_errors_explained
from pipeline.core.model import canonical_json, sha256_of
from pipeline.images.assemble import golden
from pipeline.images.assemble.deflate import check_compressor
from pipeline.images.assemble.foreign import Foreign, base_layers, read_layers, require_fit
from pipeline.images.assemble.layer import Entry, with_parents, write_layer
from pipeline.images.assemble.locked_layers import make_layers
from pipeline.images.assemble.own_layers import WheelTree, folders_above, own_entries
from pipeline.images.assemble.patch_series import patched_entries, refresh_series
from pipeline.images.assemble.plan import (
    PYCACHE,
    WARM_READER,
    ImagePlan,
    LayerKind,
    plan_image,
    require_few,
    work_for,
)
from pipeline.images.spec.checkout import Checkout

if TYPE_CHECKING:
    from pipeline.images.fetch.inputs import Fetcher

# Docker's own default where an image sets no PATH.
_PLAIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Images carry no build time: it would give every build another digest.
CREATED = "1980-01-01T00:00:00Z"
_PREFIX = "org.opencontainers.image."


@dataclass(frozen=True, eq=False)
class Built:
    """A finished image: the plan that it follows, and what the store holds of it."""

    plan: ImagePlan
    record: ImageRecord
    cached: bool
    time_s: float = 0.0  # from the start of the build until this image was done

    @property
    def name(self) -> str:
        return self.plan.spec.name

    @property
    def platform(self) -> str:
        return self.plan.platform

    @property
    def digest(self) -> str:
        return self.record.digest

    @property
    def layers(self) -> tuple[TitledLayer, ...]:
        return self.record.layers

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes


@cache
def code_digest() -> str:
    """The builder's own code: after an upgrade a build assembles each image again, in a second."""
    # oci holds the media types, descriptors and tar constants that images are written with, model
    # the function that writes their JSON. An edited comment counts: a false alarm costs a second,
    # and what Python makes of a source without comments differs between versions of Python.
    folders = (Path(__file__).parent, Path(oci.__file__).parent)
    sources = sorted(path for folder in folders for path in folder.glob("*.py"))
    sources.append(Path(model.__file__))
    return sha256_of(b"".join(path.read_bytes() for path in sources))


def find_built(store: Store, plan: ImagePlan) -> Built | None:
    """The image as built before, if its inputs are the same and every blob is still there."""
    record = store.image_record(plan.spec.name, plan.platform)
    if record is None or not _is_todays(store, plan, record):
        return None
    return Built(plan, record, cached=True) if store.has_image(record) else None


def _is_todays(store: Store, plan: ImagePlan, record: ImageRecord) -> bool:
    """Whether today's inputs and builder made it, with the warm layers that the store has now."""
    if (record.key, record.code) != (plan.key, code_digest()):
        return False
    # what compiles kernels is no input of an image: its layer may be new where the plan is not
    warm = [store.layer(each.warm.key) for each in plan.chain() if each.warm]
    held = {titled.record.digest for titled in record.layers}
    return all(layer is None or layer.digest in held for layer in warm)


def staleness(checkout: Checkout, store: Store, plan: ImagePlan) -> str:
    """Why an image that the store holds is not the one of today's checkout; empty where it is."""
    record = store.image_record(plan.spec.name, plan.platform)
    if record is None or _is_todays(store, plan, record):
        return ""
    if record.key == plan.key:
        return "another version of this tool built it"
    # a record has the digest of its inputs alone; the committed digest lists them by name
    golden_images = golden.read_golden(checkout.golden_path).images
    known = golden_images.get(f"{plan.spec.name}.{plan.architecture}")
    inputs = known.inputs if known and known.digest == record.digest else {}
    moved = [name for name in plan.inputs if inputs and inputs.get(name) != plan.inputs[name]]
    return f"{', '.join(moved) or 'spec, lock or patches'} changed since it was built"


def assemble_images(
    checkout: Checkout,
    store: Store,
    plans: list[ImagePlan],
    make_fetcher: Callable[[], Fetcher],
    *,
    keep_inputs: bool = False,
    accept: bool = False,
    judge: bool = True,
    before_named: Callable[[Built], None] | None = None,
) -> list[Built]:
    """Builds all images, sharing downloads and layers; nothing is done twice.

    With `judge`, an image that is not its golden digest is an error. `before_named` may refuse
    a new image before it gets its name. The fetcher is made only when something must be fetched: a
    build with nothing to do uses no network.
    """
    start, done = time.monotonic(), list[Built]()
    if todo := [plan for plan in plans if find_built(store, plan) is None]:
        check_compressor()
    work = work_for(todo, store)
    if work.missing or work.bases:
        # before the first download, not after most of them
        store.need_space(work.disk_bytes)
        fetcher = make_fetcher()
        for base in work.bases:
            fetcher.bases.bring(base)
            read_layers(store, base)
        # after the bases were read, before gigabytes of wheels are fetched for them
        require_fit(store, todo)
        if work.missing:
            make_layers(store, work, fetcher, keep_inputs=keep_inputs)
    if accept:
        # takes edited patches as they are now, and plans again with the hashes that they give
        for plan in plans:
            refresh_series(checkout, plan, _wheel_tree(store, plan))
        plans = [plan_image(checkout, plan.spec.name, plan.platform) for plan in plans]
    for plan in plans:
        built = _finish(checkout, store, plan, before_named, accept=accept, judge=judge)
        done.append(replace(built, time_s=time.monotonic() - start))
    return done


def _finish(
    checkout: Checkout,
    store: Store,
    plan: ImagePlan,
    before_named: Callable[[Built], None] | None,
    *,
    accept: bool,
    judge: bool,
) -> Built:
    """Assembles the image from its layers and compares it with its golden digest."""
    built, diff = find_built(store, plan), None
    if built is None:
        record, diff = _assemble(checkout, store, plan)
        built = Built(plan, record, cached=False)
        if before_named:
            before_named(built)
    layers = {x.title: x.record.digest for x in built.layers}
    got = golden.GoldenImage(digest=built.digest, inputs=plan.inputs, layers=layers)
    label = f"{plan.spec.name}.{plan.architecture}"
    # before the image gets its name: a refused one must not be found as built
    if accept:
        golden.accept_golden(checkout.golden_path, label, got)
    if judge:
        golden.check_golden(golden.read_golden(checkout.golden_path), label, got)
    # an image that was there keeps its name and its diff
    if diff is not None:
        folder = store.image_folder(plan.spec.name, plan.platform)
        store.write(folder / "patches.diff", diff.encode())
        store.keep_image(plan.spec.name, plan.platform, built.record)
    return built


def _assemble(checkout: Checkout, store: Store, plan: ImagePlan) -> tuple[ImageRecord, str]:
    """Puts an image's layers in order, makes its own ones, and writes config and manifest."""
    layers: list[TitledLayer] = []
    if plan.base:
        base = find_built(store, plan.base)
        layers += (base.record if base else _assemble(checkout, store, plan.base)[0]).layers
    if plan.lock.base_image:
        layers += base_layers(store, plan.lock.base_image)
    keys = [(x.title, x.key) for x in plan.layers] + [(x.title, x.key) for x in plan.trees]
    keys += [(plan.warm.title, plan.warm.key)] if plan.warm else []
    for title, key in keys:
        layers.append(TitledLayer(title=title, record=_pinned(store, key, title)))
    foreign = Foreign(store, plan.foreign) if plan.foreign else None
    tree = _wheel_tree(store, plan)
    # the image's own files; cached, so that an edited patch need not visit all paths
    parts = plan.spec.model_dump(mode="json", include={"name", "python", "cuda", "files"})
    # the layers below decide which folders and winners are written again
    decided = [parts, plan.inputs["files"], [x.record.digest for x in layers], code_digest()]
    own = store.layer(key := sha256_of(canonical_json(decided)))
    if own is None and (entries := own_entries(checkout, plan, tree, foreign)):
        # a layer replaces the folders it names, so they are written as they are below
        entries += folders_above(entries, [store.contents(x.record) for x in layers], plan)
        own = _thin_layer(store, entries, key)
    if own:
        layers.append(TitledLayer(title=f"{plan.spec.name} files", record=own))
    patched = patched_entries(checkout, plan, tree)
    if patched.entries:
        layers.append(TitledLayer(title="patches", record=_thin_layer(store, patched.entries)))
    require_few(plan.spec.name, len(layers))
    # the base's users, unless a file of ours lists others
    lists = [
        checkout.folder(each.spec.name) / file.source
        for each in plan.chain()
        for file in each.spec.files
        if file.to == "/etc/passwd"
    ]
    users = lists[-1].read_bytes() if lists else None
    config = canonical_json(image_config(plan, layers, foreign, users))
    document, descriptor = image_manifest(plan, config, layers)
    image = ImageRecord(
        key=plan.key,
        code=code_digest(),
        config=store.put_blob(config),
        descriptor=descriptor,
        layers=tuple(layers),
        base=tuple(x.digest for x in plan.foreign.documents) if plan.foreign else (),
    )
    store.put_blob(document)
    # another process may have deleted files of the store meanwhile
    if not store.has_image(image):
        raise StoreDamaged(f"{plan.spec.name}: a layer vanished while it was built")
    return image, patched.diff


def _pinned(store: Store, key: str, title: str) -> LayerRecord:
    record = store.layer(key)
    if record is None:
        raise StoreDamaged(f"the layer of {title} is gone from the store")
    return record


def _wheel_tree(store: Store, plan: ImagePlan) -> WheelTree:
    wheels = [x for x in plan.all_layers() if x.kind is LayerKind.WHEELS]
    return WheelTree(store, [_pinned(store, x.key, x.title) for x in wheels])


def wheel_tree(store: Store, plan: ImagePlan) -> WheelTree:
    """The files of an image's wheels, which an earlier build put into the store."""
    lacking = [x for x in plan.all_layers() if not store.layer(x.key)]
    if lacking:
        message = f"{plan.spec.name}: {lacking[0].title} is not in the store yet"
        raise UnknownImage(message, f"Run `sm120 build {plan.spec.name} --accept` first.")
    return _wheel_tree(store, plan)


def _thin_layer(store: Store, entries: list[Entry], key: str | None = None) -> LayerRecord:
    """Writes a small layer at once, in this process."""
    with store.new_blob() as blob:
        with os_errors_explained(blob.path), blob.path.open("wb") as out:
            written = write_layer(with_parents(entries), out)
        blob.keep(written.record.digest)
    return store.keep_layer(key or written.record.digest, written)


def image_config(
    plan: ImagePlan,
    layers: list[TitledLayer],
    foreign: Foreign | None = None,
    passwd: bytes | None = None,
) -> dict[str, Any]:
    """The OCI config: how the image runs, and the diffIDs of its layers.

    A foreign base's variables, user, folder, ports, volumes and stop signal stay where the image
    sets nothing else. Its labels do not: they describe another image.
    """
    below = foreign.config if foreign else None
    base = below.runs if below else RunSettings.model_validate({})
    specs = [each.spec for each in plan.chain()]
    workdirs, users = [x.workdir for x in specs if x.workdir], [x.user for x in specs if x.user]
    variables = below.variables() if below else {}
    if below and any(spec.python for spec in specs):
        # wheels on a foreign base come first
        variables["PATH"] = f"/{plan.venv.bin}:{variables.get('PATH') or _PLAIN_PATH}"
    variables |= {k: v for spec in specs for k, v in spec.env.items()}
    if any(spec.warm for spec in specs):
        # by the image itself: entries that a forgotten variable keeps from use help nobody
        variables["TRITON_CACHE_MANAGER"] = f"{WARM_READER.stem}:WarmCache"
        variables["PYTHONPYCACHEPREFIX"] = f"/{PYCACHE}"
    # as Docker inherits them: an own entrypoint drops a base's command
    entrypoint, command = base.entrypoint or [], base.command or []
    for spec in specs:
        command = spec.command or ([] if spec.entrypoint else command)
        entrypoint = spec.entrypoint or entrypoint
    user = base.user
    accounts = {x.name: f"{x.uid}:{x.gid}" for spec in specs for x in spec.accounts}
    # by number: no lookup at run time, and Kubernetes can check it
    for name in users[-1:]:
        user = foreign.user(plan.spec.name, name, passwd) if foreign else accounts.get(name)
        if user is None:
            message = f"{plan.spec.name}: user: {name!r} is not an account of its root image"
            raise SpecInvalid(message)
    ports = {f"{port}/tcp" for spec in specs for port in spec.ports} | set(base.ports or {})
    settings: dict[str, Any] = {
        # sorted, as everything that a digest is made of
        "Env": [f"{k}={v}" for k, v in sorted(variables.items())],
        "Labels": plan.notes,
        "WorkingDir": workdirs[-1] if workdirs else base.workdir or "/",
    }
    optional: dict[str, Any] = {
        "Entrypoint": entrypoint,
        "Cmd": command,
        "ExposedPorts": {port: {} for port in sorted(ports)},
        "Volumes": {path: {} for path in sorted(base.volumes or {})},
        "StopSignal": base.stop_signal,
        "User": user,
    }
    # the base's own steps as they are, where they fit its layers; a step for each other layer
    past = below.past() if below else None
    known = len(below.rootfs.diff_ids) if below and past is not None else 0
    ours = [{"created": CREATED, "created_by": f"sm120: {x.title}"} for x in layers[known:]]
    return {
        "architecture": plan.architecture,
        "os": "linux",
        "created": CREATED,
        "config": settings | {name: value for name, value in optional.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [x.record.diff_id for x in layers]},
        "history": [*(past or []), *ours],
    }


def image_manifest(
    plan: ImagePlan, config: bytes, layers: list[TitledLayer]
) -> tuple[bytes, Descriptor]:
    """The OCI manifest, and the image's line in an index."""
    described = [
        Descriptor(media_type=OCI_CONFIG, digest=sha256_of(config), size_bytes=len(config)),
        *(
            Descriptor(
                media_type=x.record.media_type,
                digest=x.record.digest,
                size_bytes=x.record.size_bytes,
                annotations={TITLE: x.title},
            )
            for x in layers
        ),
    ]
    first, *others = map(descriptor_json, described)
    body = {"config": first, "layers": others, "annotations": plan.notes}
    document = canonical_json({"schemaVersion": 2, "mediaType": OCI_MANIFEST, **body})
    return document, Descriptor(
        media_type=OCI_MANIFEST,
        digest=sha256_of(document),
        size_bytes=len(document),
        platform=plan.platform,
        annotations={f"{_PREFIX}ref.name": f"{plan.spec.name}-{plan.architecture}"},
    )
