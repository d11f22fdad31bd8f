"""`sm120 source build`, and compiling what images need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.assemble.golden import read_golden
from pipeline.assemble.image import Built, build_images
from pipeline.assemble.plan import ImagePlan, TreePlan, plan_tree, work_for
from pipeline.cli.context import (
    checkout_of,
    host_platform,
    say_json,
    store_of,
    store_to_read,
)
from pipeline.cli.options import (
    LayerSettings,
    json_option,
    mirror_option,
    offline_option,
    platform_option,
)
from pipeline.cli.signing import trust_of
from pipeline.errors import NotInRegistry, RegistryUnreachable, SandboxUnavailable
from pipeline.lock.model import ArchivePin
from pipeline.oci.record import LayerRecord
from pipeline.registry.access import Access
from pipeline.source.box import KINDS, Wanted, find_way
from pipeline.source.compiled import CompiledTree, Compiler, compile_tree, objects_text, read_tree
from pipeline.source.toolchain import NOT_HERE, why_not_here
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import CompiledSpec
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.fetch.inputs import Fetcher
    from pipeline.verify.layers import OfferedLayer


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
            from pipeline.verify.layers import take_layer

            try:
                take_layer(store, tree, layer)
            except (RegistryUnreachable, NotInRegistry) as error:
                log.say(f"{tree.title} is compiled instead: {error}")
    if left := [tree for tree in missing if store.layer(tree.key) is None]:
        compiler = make_compiler(checkout, store, fetcher, "auto", 0)
        for tree in left:
            compile_tree(compiler, tree)


def offered_layers(
    context: click.Context,
    trees: Sequence[TreePlan],
    layers: LayerSettings | None,
    access: Access | None,
    *,
    offline: bool = False,
) -> dict[str, OfferedLayer]:
    """By its key, each tree whose layer a registry has and a trusted key signed.

    Without --layers-from nobody is asked. A registry that is not there, or lacks a layer, costs
    only the time to compile it; a layer that cannot be trusted is an error.
    """
    if layers is None or not trees:
        return {}
    place = layers.repository
    offered: dict[str, OfferedLayer] = {}
    if offline:
        log.say(f"{place} is not asked for layers: --offline")
        return {}
    from pipeline.cli.registry.look import open_registry
    from pipeline.verify.layers import find_layer

    trust = trust_of(context, layers.trust_path)
    golden = read_golden(checkout_of(context).golden_path)
    try:
        with open_registry(place, access or Access()) as repository:
            for tree in trees:
                found = find_layer(repository, tree, golden, trust, datetime.now(UTC))
                if found is None:
                    log.say(f"{tree.title}: {place} has no layer of it, so it is compiled")
                else:
                    offered[tree.key] = found
    except RegistryUnreachable as error:
        rest = ", ".join(tree.title for tree in trees if tree.key not in offered)
        log.say(f"{rest}: compiled, as no layer can be looked for: {error}")
    return offered


def missing_trees(store: Store, plans: Sequence[ImagePlan]) -> list[TreePlan]:
    """The trees that images need and the store lacks, each once."""
    trees = {tree.key: tree for plan in plans for tree in plan.all_trees()}
    return [tree for tree in trees.values() if store.layer(tree.key) is None]


def missing_archives(store: Store, trees: Sequence[TreePlan]) -> list[ArchivePin]:
    """The archives of trees that must be fetched first, each once."""
    pins = {tree.lock.archive.sha256: tree.lock.archive for tree in trees}.values()
    return [pin for pin in pins if not store.has_input(pin.sha256, pin.size_bytes)]


def make_compiler(
    checkout: Checkout, store: Store, fetcher: Callable[[], Fetcher], sandbox: Wanted, jobs: int
) -> Compiler:
    """A compiler whose toolchains are images of this checkout, built when they are needed."""

    def toolchain(tree: TreePlan) -> Built:
        # before the first byte is fetched
        if why := why_not_here(tree):
            raise SandboxUnavailable(why, NOT_HERE)
        return build_images(checkout, store, [tree.toolchain], fetcher)[0]

    return Compiler(checkout, store, fetcher, toolchain, find_way(sandbox), jobs)


@click.command("build")
@click.argument("name", metavar="SOURCE")
@click.argument("build", metavar="BUILD")
@platform_option
@click.option(
    "--jobs",
    type=click.IntRange(0),
    default=0,
    help="Compilers to run at once (0: as memory allows).",
)
@click.option(
    "--sandbox",
    type=click.Choice(["auto", *KINDS]),
    default="auto",
    help="What the steps run in.",
    show_default=True,
)
@click.option("--dry-run", is_flag=True, help="Show what would be compiled and fetched.")
@mirror_option
@offline_option
@json_option
@click.pass_context
def build_source(
    context: click.Context,
    name: str,
    build: str,
    platform: str | None,
    jobs: int,
    sandbox: Wanted,
    dry_run: bool,
    mirrors: tuple[str, ...],
    offline: bool,
    as_json: bool,
) -> None:
    """Compile one build of a source into the store, without making an image of it.

    The steps run in the source's toolchain image without network. Objects are kept: an interrupted
    or slightly changed build goes on where it was. `sm120 source list` shows builds and times.
    """
    checkout = checkout_of(context)
    chosen = host_platform() if platform in (None, "host") else str(platform)
    wanted = CompiledSpec(source=name, build=build)
    plan = plan_tree(checkout, wanted, chosen)
    if dry_run:
        return _show_plan(plan, store_to_read(context), as_json)
    store = store_of(context)

    def fetcher() -> Fetcher:
        from pipeline.fetch.transport import make_fetcher  # slow; often nothing is fetched

        return make_fetcher(store, mirrors, offline)

    with store.in_use():
        record = compile_tree(make_compiler(checkout, store, fetcher, sandbox, jobs), plan)
    tree = read_tree(store, plan)
    if as_json:
        return say_json({**tree.model_dump(), **record.model_dump()})
    click.echo(_text(tree, record))


def _show_plan(plan: TreePlan, store: Store, as_json: bool) -> None:
    """What compiling would take; a tree that the store has takes nothing."""
    known, archive = store.layer(plan.key), plan.lock.archive
    tools = work_for([plan.toolchain], store)
    pins = [] if known else [*missing_archives(store, [plan]), *tools.fetch]
    n_bytes = sum(pin.size_bytes for pin in pins)
    why = "" if known else why_not_here(plan)
    if as_json:
        row = {"source": plan.source.name, "build": plan.name, "platform": plan.platform}
        minutes = 0 if known else plan.build.cpu_minutes
        sizes = {"cpu_minutes": minutes, "fetch_files": len(pins), "fetch_bytes": n_bytes}
        layer = known.digest if known else None
        return say_json({**row, **sizes, "layer": layer, "not_here": why, "dry_run": True})
    if known:
        return click.echo(f"{plan.title} for {plan.platform} is compiled: {known.digest}")
    if why:
        click.echo(f"{why}.\n{NOT_HERE}\n")
    layers = log.count(len(tools.missing), "layer")
    rows = [
        ["compile", f"{plan.build.cpu_minutes} CPU-minutes, for {plan.platform}"],
        ["archive", f"{archive.file}, {log.size(archive.size_bytes)}"],
        ["toolchain", f"{plan.toolchain.spec.name}, {layers} to build"],
        ["fetch", f"{log.count(len(pins), 'file')}, {log.size(n_bytes)}"],
    ]
    click.echo(log.table([plan.source.name, plan.name], rows))


def _text(tree: CompiledTree, record: LayerRecord) -> str:
    rows = [
        ["layer", record.digest],
        ["size", log.size(record.unpacked_bytes)],
        ["toolchain", tree.toolchain],
        ["GPU code", ", ".join(tree.code.gpu) or "none"],
        ["instructions", ", ".join(tree.code.cpu) or "of every processor"],
        ["objects", objects_text(tree.objects)],
        *([["compiled by", ", ".join(tree.taken.signed_by)]] if tree.taken else []),
        ["time", log.seconds(tree.seconds)],
        ["version", tree.version.replace("\n", "; ")],
    ]
    return log.table([tree.source, tree.build], rows)
