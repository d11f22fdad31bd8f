"""`sm120 image` and `sm120 build`: list, plan, build, rebuild and test images."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace, host_platform, pick_platform
from pipeline.artifacts.containers.backend import KINDS
from pipeline.cli import options
from pipeline.cli.options import command, flag_option, query
from pipeline.cli.output import answer_keys, own_command, say_json
from pipeline.core import log
from pipeline.images.assemble.plan import layer_bytes_guess
from pipeline.images.source.toolchain import NOT_HERE

if TYPE_CHECKING:
    from pipeline.app.build import BuildPlan, BuildResult
    from pipeline.app.on_slurm import SlurmOrder
    from pipeline.images.assemble.image import Built
    from pipeline.images.gate.stage import Staged
    from pipeline.images.spec.checkout import Checkout

_MOST_SHOWN = 110  # characters of a message in a table


@query
def image_list_command(workspace: Workspace, as_json: bool) -> None:
    """List the images of this checkout, and whether they are locked and built."""
    rows = app.images.list_images(workspace)
    if as_json:
        return say_json(rows)
    for row in rows:
        # as short as Docker shows an image's id
        built = str(row["built"])[7:19] if row["built"] else None
        stale = ", stale" if row["stale"] else ""
        row["state"] = f"{built}{stale}" if built else "locked" if row["locked"] else "no lock"
    head = ["image", "platform", "state", "summary"]
    click.echo(log.table(head, [[row[name] for name in head] for row in rows]))


@query
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@options.platform_option
@options.layers_options
@options.access_options
def plan_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Show what a build would fetch, what is cached and how much disk it needs.

    Nothing is fetched. Without IMAGE, all images are planned. With --layers-from, the registry is
    asked what a build would take from it, and the signatures are checked.
    """
    _show_plan(app.build.plan_images(workspace, **options), as_json)


def _show_plan(plan: BuildPlan, as_json: bool) -> None:
    work, taken = plan.work, plan.taken
    disk_bytes = work.disk_bytes + plan.taken_bytes
    if as_json:
        return say_json(
            {
                "images": [p.spec.name for p in plan.plans],
                "fetch_files": len(work.fetch),
                "fetch_bytes": work.fetch_bytes,
                "base_bytes": work.base_bytes,
                "disk_bytes": disk_bytes,
                "layers_missing": [x.title for x in work.missing],
                "layers_cached": [x.title for x in work.cached],
                "compile": [
                    {"tree": tree.title, "cpu_minutes": tree.build.cpu_minutes}
                    for tree in plan.compiled
                ],
                "warm": [each.title for each in plan.warm],
                "take": [
                    {
                        "tree": tree.title,
                        "digest": layer.record.digest,
                        "size_bytes": layer.record.size_bytes,
                        "from": str(layer.repository),
                        "signed_by": list(layer.signed_by),
                    }
                    for tree, layer in taken
                ],
                "not_here": plan.not_here,
            }
        )
    for why in plan.not_here:
        click.echo(f"{why}.\n{NOT_HERE}\n")
    rows = [
        [x.title, log.size(layer_bytes_guess(x)), "cached" if x in work.cached else "to build"]
        for x in [*work.cached, *work.missing]
    ]
    for tree in plan.compiled:
        rows.append([tree.title, "-", f"to compile, {tree.build.cpu_minutes} CPU-minutes"])
    rows += [[each.title, "-", f"to compile for {each.card}"] for each in plan.warm]
    for base in work.bases:
        rows.append([str(base), log.size(sum(b.size_bytes for b in base.blobs)), "to fetch"])
    for tree, layer in taken:
        state = f"to take from {layer.repository}, signed by {', '.join(layer.signed_by)}"
        rows.append([tree.title, log.size(layer.record.size_bytes), state])
    click.echo(log.table(["layer", "size (about)", "state"], rows))
    more = f", and {log.size(work.base_bytes)} of foreign bases" if work.bases else ""
    more += f", and {log.size(plan.taken_bytes)} of compiled layers" if taken else ""
    click.echo(
        f"\n{log.count(len(work.fetch), 'file')} to fetch, {log.size(work.fetch_bytes)}{more};"
        f" disk needed {log.size(disk_bytes)}; store {plan.store.root}"
    )


@query
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@options.platform_option
@flag_option(
    "--accept",
    help="Take the result as expected: write its golden digest and the hashes of edited patches.",
)
@flag_option("--keep-inputs", help="Keep wheels after they became layers.")
@flag_option(
    "--gate", "gated", help="Then run the gates: shared memory, numerics, patches, machine code."
)
@flag_option("--slim", help="Of warm images: IMAGE-slim, which compiles nothing when it runs.")
@click.option("--recipe", "recipes", multiple=True, help="With --slim: it must serve this recipe.")
@flag_option("--dry-run", help="Show what would be fetched and built, as `sm120 plan` does.")
@options.mirror_option
@options.layers_options
@options.offline_option
@options.base_options
def build_command(workspace: Workspace, /, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Build images into the store; without IMAGE, all that need no compiling first.

    Needs no Docker, no root and no emulation. It can be interrupted: run again, it continues. A
    digest that differs from the committed one is an error. With --gate, so is an image that does
    not fit its card; the image is kept, with the results of its gates.

    What an image needs compiled is compiled here, for minutes or hours. With --layers-from, what
    another machine compiled and signed is fetched instead: by its digest, and only if a key that
    you trust signed it for exactly this source, these patches and this toolchain. A layer that
    fails a check ends the build; one that is not there is compiled.

    With --slim, a warm image is built without gcc, nvcc and headers, if its kernels cover its
    recipes, or those that you name; else the error lists what is missing or unknown.

    What each image is made of, and the results of its gates, are stated beside it: signed where
    there is a key, unsigned otherwise. `sm120 verify IMAGE` checks them.
    """
    request = app.build.BuildRequest(**options)
    if dry_run:
        return _show_plan(app.build.plan_build(workspace, request), as_json)
    done = app.build.build_images(workspace, request, _say_kernels)
    built = done.built
    if as_json:
        # printed before the error: a script gets the digests of what failed, too
        say_json([_built_json(done, each) for each in built])
        return done.require_passed()
    table = []
    for b in built:
        time = "cached" if b.cached else log.seconds(b.time_s)
        sizes = [log.size(b.size_bytes), log.size(b.record.unpacked_bytes)]
        table.append([b.name, b.platform, b.digest, *sizes, len(b.layers), time])
    head = ["image", "platform", "digest", "size", "unpacked", "layers", "time"]
    click.echo(log.table(head, table))
    gates = []
    for image, staged in done.stages.items():
        for gate in staged.gates.results:
            kinds = ("passed", "accepted", "failed", "unknown")
            counts = log.counts_by_kind((row.verdict for row in gate.rows), kinds)
            # a result for another card may be kept from an earlier run: it took no time now
            seconds = log.seconds(staged.seconds.get(f"{gate.gate} {gate.arch}", 0.0))
            # a gate that could not begin has no rows, only the reason
            cases = counts or gate.message[:60]
            gates.append([image.name, gate.gate, gate.arch, gate.verdict, cases, seconds])
    if done.stages:
        head = ["image", "gate", "card", "verdict", "cases", "time"]
        click.echo(f"\n{log.table(head, gates)}")
    rows = [
        [each.image, each.signed, ", ".join(each.stated.statements), str(each.folder)]
        for each in done.statements.values()
    ]
    click.echo(f"\n{log.table(['image', 'evidence', 'statements', 'folder'], rows)}")
    # never with --json, where no person reads it
    done.offer_key()
    done.require_passed()
    what = "nothing to do" if all(b.cached for b in built) else "done"
    click.echo(f"\n{what} in {log.seconds(done.seconds)}; store {done.store.root}")
    # of several platforms the one that runs here
    nearest = next((b for b in built if b.platform == host_platform()), built[0])
    for line in _next_lines(workspace.checkout(), nearest):
        click.echo(line)


def _say_kernels(staged: Staged) -> None:
    from pipeline.cli.gate_tables import show_kernels, show_numbers  # slow; most builds need none

    # on stderr: standard output is for the tables at the end, or for --json
    if staged.smem:
        log.say(show_kernels(staged.smem, hide_passed=True))
        log.say(show_numbers(staged.smem, hide_passed=True))


def _next_lines(checkout: Checkout, built: Built) -> list[str]:
    """What brings a built image to where it runs: with Docker, and without it."""
    me, name = own_command(), built.name
    # another platform than this machine's is not found without its name
    is_found = pick_platform(checkout.spec(name), None) == built.platform
    more = "" if is_found else f" --platform {built.platform}"
    load, export = f"{me} load {name}{more}", f"{me} image export {name} DIR{more}"
    lines = {
        load: "loads it into Docker",
        export: "without Docker: a layout for Podman, skopeo, containerd",
    }
    folder, texts = checkout.root / "recipes", []
    for path in folder.glob("*.yaml") if is_found and built.platform == host_platform() else ():
        # editors make links to nowhere next to recipes: no reason to end a build with an error
        with suppress(OSError):
            texts.append(path.read_text(errors="replace"))
    # most images have none, and reading all recipes takes as long as the rest of a build
    if any("tiny" in text and name in text for text in texts):
        from pipeline.serving.recipe.find import Recipes

        found = app.recipes.recipes_for(Recipes([folder]), name)
        # one that needs neither a GPU nor weights
        if recipe := next((r for r in found if r.model.tiny and not r.hardware.cards), None):
            lines[f"{me} serve {recipe.name}"] = "starts it with a tiny model, in Docker or Podman"
    width = max(map(len, lines))
    heads = ["Next:", *[""] * len(lines)]
    return [
        f"{h:5} {c:{width}}   {what}" for h, (c, what) in zip(heads, lines.items(), strict=False)
    ]


def _built_json(done: BuildResult, built: Built) -> dict[str, Any]:
    row = {
        "image": built.name,
        "platform": built.platform,
        "digest": built.digest,
        "size_bytes": built.size_bytes,
        "unpacked_bytes": built.record.unpacked_bytes,
        "cached": built.cached,
        # milliseconds: more digits only make two results differ
        "time_s": round(built.time_s, 3),
        "layers": [{"title": x.title, **x.record.model_dump()} for x in built.layers],
        "evidence": done.statements[built].as_json(),
    }
    if staged := done.stages.get(built):
        gates = staged.gates
        row |= {"gates": gates.model_dump(mode="json"), "verdict": gates.verdict}
    return row


@query
@click.argument("names", metavar="IMAGE...", nargs=-1, required=True)
@flag_option("--attest", help="Sign and keep the result, good or bad.")
@flag_option("--keep-objects", help="Take compiled objects from the store, and only link again.")
@options.slurm_options
@options.key_option
@options.platform_option
@options.mirror_option
@options.offline_option
@options.base_options
def image_rebuild_command(
    workspace: Workspace,
    /,
    names: tuple[str, ...],
    attest: bool,
    keep_objects: bool,
    slurm: SlurmOrder | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Build images again in an empty store, and compare every byte with the first build.

    One platform is built again: that of --platform, else this machine's where the image has it.
    Prints `identical`, or names the first file and byte that differ. Inputs that the store still
    has are used; everything else is fetched again, and compiled again. Files that a source declares
    under `may_differ` may differ: then it prints `equivalent`, and each of them with the reason.
    With --attest the result is signed: a proof of equal bytes, not of a hosted builder.

    With --on slurm, nodes build the images, each with a node of its own, and send the digests of
    image and layers. An image that a node built with equal bytes is not built again. With --json,
    several images are a list.
    """
    if attest and keep_objects:
        # objects that were compiled before prove nothing about compiling
        raise click.UsageError("--attest needs everything compiled again; leave --keep-objects out")
    if slurm and (attest or keep_objects):
        # a node has objects of its own; and a signature is about what its owner saw
        raise click.UsageError("--on slurm: --attest and --keep-objects are about this machine")
    rows: list[dict[str, Any]] = []
    error = None
    if slurm:
        given = {name: options[name] for name in ("platform", "offline")}
        for each in app.rebuilds.rebuild_on_nodes(workspace, names, slurm, **given):
            rows.append({"verdict": each.verdict, "node": each.answer.node, "cached": each.kept})
            rows[-1] |= _rebuilt_json(each.first, each.verdict == "identical", [])
            error = error or each.error
    else:
        for name in dict.fromkeys(names):
            done = app.build.rebuild_image(
                workspace, name, attest=attest, keep_objects=keep_objects, **options
            )
            differences = [each.model_dump() for each in done.declared]
            rows.append({"verdict": done.verdict})
            rows[-1] |= _rebuilt_json(done.second, not differences, differences)
    if as_json:
        say_json(rows if len(names) > 1 else rows[0])
    for row in [] if as_json else rows:
        where = f" on {row['node']}" if row.get("node") else ""
        where += ", as kept" if row.get("cached") else ""
        line = f"{row['image']} for {row['platform']}: {row['verdict']}{where}"
        click.echo(f"{line}, {row['digest']}")
        for each in row["differences"]:
            click.echo(f"  {each['path']} differs: {each['reason']}")
    if error:
        raise error


def _rebuilt_json(built: Built, identical: bool, differences: list[Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"image": built.name, "platform": built.platform, "digest": built.digest}
    return {**row, "identical": identical, "differences": differences}


@command
@click.argument("names", metavar="IMAGE...", nargs=-1, required=True)
@options.platform_option
@options.mirror_option
@options.offline_option
@options.base_options
def image_answer_command(workspace: Workspace, /, names: tuple[str, ...], **options: Any) -> None:
    """Build the images whose keys come on stdin, a key a line, from nothing.

    `sm120 image rebuild --on slurm` runs this on a node. Prints a line of JSON when it begins, one
    with the digest of the builder, and one with the digests of each image. Nothing is kept.
    """
    answer_keys(lambda keys: app.rebuilds.answer_rebuilds(workspace, names, keys, **options))


@query
@click.argument("names", metavar="IMAGE...", nargs=-1, required=True)
@options.platform_option
@click.option(
    "--runtime",
    "wanted",
    type=click.Choice(["auto", *KINDS]),
    default="auto",
    help="What runs it: Linux namespaces, Docker or Podman; auto is the first that works here.",
)
def image_test_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Prove that built images start. No GPU and no network are needed.

    Each image is run as its own user, with its own variables. The engine's modules must import and
    its argument parser must answer; gcc, nvcc, ptxas and ninja must compile as they will at run
    time; every shared library must be there but the driver's; and home, caches and /tmp must be
    writable. An image for another processor runs in an emulator where one is registered, which
    takes an hour.

    The result is stated beside the image, signed where there is a key: `sm120 verify IMAGE` shows
    it, and `sm120 publish` attaches it. What a server answers is for `sm120 smoke`.
    """
    results = app.gate.prove_starts(workspace, **options)
    if as_json:
        say_json(
            [
                {
                    "image": image.name,
                    "platform": image.platform,
                    "digest": image.digest,
                    "verdict": run.verdict,
                    **run.model_dump(mode="json"),
                }
                for image, run in results.items()
            ]
        )
        return app.gate.require_started(results)
    rows = [
        [image.name, test.verdict, test.name, test.message[:_MOST_SHOWN]]
        for image, run in results.items()
        for test in run.tests
    ]
    click.echo(log.table(["image", "verdict", "test", "message"], rows) + "\n")
    for image, run in results.items():
        kinds = ("passed", "failed", "unknown", "skipped")
        counts = log.counts_by_kind((test.verdict for test in run.tests), kinds)
        click.echo(f"{image.name} for {image.platform} {run.summary()}: {counts}")
    app.gate.require_started(results)
