"""Compile engines from source: lock, build, export and publish sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline import __version__
from pipeline.app.signing import Signing, signer_of, trust_of
from pipeline.app.workspace import Workspace, host_platform
from pipeline.artifacts.containers.backend import Wanted
from pipeline.artifacts.containers.container_engine import find_backend
from pipeline.artifacts.oci.record import FileRow, LayerRecord
from pipeline.artifacts.oci.reference import ImageReference, parse_repository
from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.store.store import Store
from pipeline.core import errors, log
from pipeline.core.sealed import read_or_none
from pipeline.images.assemble.golden import read_golden
from pipeline.images.assemble.image import Built, assemble_images
from pipeline.images.assemble.plan import ImagePlan, TreePlan, plan_tree
from pipeline.images.lock.model import (
    ArchivePin,
    SourceLock,
    current_source_lock,
    read_source_lock,
    write_source_lock,
)
from pipeline.images.source.compiled import (
    CompiledTree,
    Compiler,
    compile_tree,
    compiled_layer,
    read_tree,
    require_decided,
)
from pipeline.images.source.toolchain import NOT_HERE, why_not_here
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import CompiledSpec

if TYPE_CHECKING:
    from pipeline.app.statements import FileStatement
    from pipeline.artifacts.registry.upload import LocalBlob
    from pipeline.evidence.publish.publish import Published
    from pipeline.evidence.verify.layers import OfferedLayer
    from pipeline.images.fetch.inputs import Fetcher


@dataclass(frozen=True)
class LayerSettings:
    """Where to take compiled layers from, and whose signature counts."""

    repository: ImageReference
    trust_path: Path | None = None


class ExportedSource(NamedTuple):
    """A file of a compiled source in a folder, and the statement next to it."""

    path: Path
    file: FileRow
    statement: FileStatement


class PublishedSource(NamedTuple):
    """A compiled layer in a registry."""

    tree: TreePlan
    layer: LocalBlob
    published: Published
    signed_by: str


def compile_missing(
    checkout: Checkout,
    store: Store,
    plans: Sequence[ImagePlan],
    fetcher: Callable[[], Fetcher],
    offered: Mapping[str, OfferedLayer] | None = None,
) -> None:
    """Take or compile every tree that the images need and the store lacks."""
    missing = missing_trees(store, plans)
    for tree in missing:
        if layer := (offered or {}).get(tree.key):
            from pipeline.evidence.verify.layers import take_layer

            try:
                take_layer(store, tree, layer)
            except (errors.RegistryUnreachable, errors.NotInRegistry) as error:
                log.say(f"{tree.title} is compiled instead: {error}")
    if absent := [tree for tree in missing if store.layer(tree.key) is None]:
        compiler = make_compiler(checkout, store, fetcher, "auto", 0)
        for tree in absent:
            compile_tree(compiler, tree)


def offered_layers(
    workspace: Workspace,
    trees: Sequence[TreePlan],
    layers: LayerSettings | None,
    access: Access | None,
    *,
    offline: bool = False,
) -> dict[str, OfferedLayer]:
    """Map keys of trees to layers that a registry has and a trusted key signed.

    Without --layers-from it asks no registry. A registry that does not answer, or lacks a layer,
    costs only the time to compile it; a layer that cannot be trusted is an error.
    """
    if layers is None or not trees:
        return {}
    place = layers.repository
    offered: dict[str, OfferedLayer] = {}
    if offline:
        log.say(f"{place} is not asked for layers: --offline")
        return {}
    from pipeline.app.registry import open_registry
    from pipeline.evidence.verify.layers import find_layer

    trust = trust_of(workspace, layers.trust_path)
    golden = read_golden(workspace.checkout().golden_path)
    try:
        with open_registry(place, access or Access()) as repository:
            for tree in trees:
                found = find_layer(repository, tree, golden, trust, datetime.now(UTC))
                if found is None:
                    log.say(f"{tree.title}: {place} has no layer of it, so it is compiled")
                else:
                    offered[tree.key] = found
    except errors.RegistryUnreachable as error:
        rest = ", ".join(tree.title for tree in trees if tree.key not in offered)
        log.say(f"{rest}: compiled, as no layer can be looked for: {error}")
    return offered


def missing_trees(store: Store, plans: Sequence[ImagePlan]) -> list[TreePlan]:
    """The trees that images need and the store lacks, each once."""
    trees = {tree.key: tree for plan in plans for tree in plan.all_trees()}
    return [tree for tree in trees.values() if store.layer(tree.key) is None]


def missing_archives(store: Store, trees: Sequence[TreePlan]) -> list[ArchivePin]:
    """List the archives that must be fetched first, each once."""
    pins = {tree.lock.archive.sha256: tree.lock.archive for tree in trees}.values()
    return [pin for pin in pins if not store.has_input(pin.sha256, pin.size_bytes)]


def make_compiler(
    checkout: Checkout,
    store: Store,
    fetcher: Callable[[], Fetcher],
    sandbox: Wanted,
    jobs: int,
    object_cache: str = "",
) -> Compiler:
    """Make a compiler; its toolchains are images of this checkout, built when needed."""

    def toolchain(tree: TreePlan) -> Built:
        # before the first byte is fetched
        if why := why_not_here(tree):
            raise errors.SandboxUnavailable(why, NOT_HERE)
        return assemble_images(checkout, store, [tree.toolchain], fetcher)[0]

    backend = find_backend(sandbox)
    return Compiler(checkout, store, fetcher, toolchain, backend, jobs, object_cache=object_cache)


def find_tree(workspace: Workspace, name: str, build: str, platform: str | None) -> TreePlan:
    """Plan one build of a source, for this machine if no platform is chosen."""
    chosen = host_platform() if platform in (None, "host") else str(platform)
    return plan_tree(workspace.checkout(), CompiledSpec(source=name, build=build), chosen)


def build_source(
    workspace: Workspace,
    name: str,
    build: str,
    *,
    platform: str | None = None,
    jobs: int = 0,
    sandbox: Wanted = "auto",
    mirrors: tuple[str, ...] = (),
    offline: bool = False,
    object_cache: str | None = None,
) -> tuple[CompiledTree, LayerRecord]:
    """Compile one build of a source into the store, without making an image of it."""
    plan, store = find_tree(workspace, name, build, platform), workspace.store()

    def fetcher() -> Fetcher:
        from pipeline.images.fetch.inputs import make_fetcher  # slow; often nothing is fetched

        return make_fetcher(store, mirrors, offline)

    with store.in_use():
        cache = "" if offline else (object_cache or "").rstrip("/")
        compiler = make_compiler(workspace.checkout(), store, fetcher, sandbox, jobs, cache)
        record = compile_tree(compiler, plan)
    return read_tree(store, plan), record


def export_source(
    workspace: Workspace, name: str, build: str, folder: Path, platform: str | None = None
) -> list[ExportedSource]:
    """Write the files of a compiled source into a folder, each with a statement."""
    from pipeline.app.statements import keep_statement
    from pipeline.artifacts.attest.envelope import SUFFIX
    from pipeline.artifacts.attest.names import COMPILED_FILE
    from pipeline.artifacts.attest.predicates import CompiledFile, Tool
    from pipeline.artifacts.attest.statement import make_statement, moment
    from pipeline.images.source.compiled import export_tree

    signing, store = Signing(), workspace.store()
    plan = find_tree(workspace, name, build, platform)
    with store.in_use():
        record = compiled_layer(store, plan)
        # each file gets a signed statement
        require_decided(store, read_golden(workspace.checkout().golden_path), plan)
        written = export_tree(store, record, plan.build.to, folder)
    body = CompiledFile(
        source=name,
        build=build,
        platform=plan.platform,
        inputs=plan.key,
        layer=record.digest,
        tool=Tool(name="sm120-pipeline", version=__version__),
    ).model_dump(mode="json")
    when, rows = moment(), []
    for path, row in written.items():
        statement = make_statement(path.name, row.sha256, COMPILED_FILE, body, when)
        stated = keep_statement(path.with_name(f"{path.name}{SUFFIX}"), statement, signing)
        rows.append(ExportedSource(path, row, stated))
    return rows


def publish_source(
    workspace: Workspace,
    name: str,
    build: str,
    place: str,
    *,
    platform: str | None = None,
    key_path: Path | None = None,
    dry_run: bool = False,
    access: Access | None = None,
    jobs: int = 4,
) -> PublishedSource:
    """Push the layer of a compiled source, with a signed statement of what it was made from."""
    from pipeline.app.registry import open_registry
    from pipeline.evidence.publish.publish import push_with_evidence, rehearse
    from pipeline.evidence.publish.tree import order_tree

    reference = parse_repository(place)
    checkout, store = workspace.checkout(), workspace.store()
    plan = find_tree(workspace, name, build, platform)
    # also for a dry run: a key that cannot be read should be known before the real one
    signer = signer_of(key_path)
    with store.in_use(), open_registry(reference, access or Access()) as repository:
        golden = read_golden(checkout.golden_path)
        order = order_tree(store, repository, plan, golden, signer, dry_run=dry_run)
        done = rehearse(order) if dry_run else push_with_evidence(store, order)
    return PublishedSource(plan, order.shipment.blobs[0], done, signer.key_id)


def list_sources(workspace: Workspace) -> list[dict[str, Any]]:
    """The sources that can be compiled, with their builds and times."""
    checkout, rows = workspace.checkout(), []
    for name in checkout.sources():
        spec = checkout.source(name)
        try:
            lock = current_source_lock(checkout.source_lock_path(name), spec)
            state = lock.archive.version or lock.archive.file
        except errors.LockUnusable as error:
            state = "no" if isinstance(error, errors.LockMissing) else error.state
        rows += [
            {
                "source": name,
                "build": build,
                "toolchain": each.toolchain,
                "for": ", ".join([*each.platforms, *each.architectures]),
                "locked": state,
                "time": f"{each.cpu_minutes} CPU-minutes",
            }
            for build, each in spec.builds.items()
        ]
    return rows


def lock_sources(
    workspace: Workspace,
    names: tuple[str, ...] = (),
    archive: Path | None = None,
    *,
    dry_run: bool = False,
) -> list[dict[str, str | None]]:
    """Look up archives of sources and write their locks; returns what changed in them."""
    from pipeline.images.source.archive import lock_file, lock_source

    checkout, store = workspace.checkout(), workspace.store()
    if archive and len(names) != 1:
        raise errors.SpecInvalid(
            "--from locks exactly one source", "sm120 source lock SOURCE --from FILE"
        )
    rows = []
    for name in names or tuple(checkout.sources()):
        spec = checkout.source(name)
        with log.step(f"Locking {name}"):
            new = lock_file(store, spec, archive) if archive else lock_source(store, spec)
        path = checkout.source_lock_path(name)
        old = read_or_none(read_source_lock, path)
        before, after = _facts(old) if old else {}, _facts(new)
        rows += [
            {"source": name, "what": what, "before": before.get(what), "after": value}
            for what, value in after.items()
            if before.get(what) != value
        ]
        if not dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_source_lock(path, new)
    return rows


def _facts(lock: SourceLock) -> dict[str, str | None]:
    """Collect what a new lock can change: the archive, its files, the spec."""
    pin = lock.archive
    facts = {"archive": pin.file, "version": pin.version, "sha256": pin.sha256[:12]}
    return {**facts, "files": str(lock.files), "tree": lock.tree, "spec": lock.spec}
