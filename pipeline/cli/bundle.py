"""`sm120 bundle` and `unbundle`: a plan with all that it needs, for a place without network."""

from __future__ import annotations

import json
from typing import Any

import click

from pipeline import app
from pipeline.app.bundle import BundleRequest
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    ANY_PATH,
    EXISTING_FILE,
    PLATFORM,
    file_option,
    flag_option,
    many_option,
    path_option,
    query,
)
from pipeline.cli.output import say_json
from pipeline.core import log


def _pair(context: click.Context, parameter: click.Parameter, value: Any) -> dict[str, str]:
    pairs = [each.partition("=") for each in value]
    if wrong := [name for name, _, address in pairs if not address]:
        raise click.BadParameter(f"{wrong[0]!r} is not SYSTEM=ADDRESS", context, parameter)
    return {name: address for name, _, address in pairs}


_for = click.option(
    "--for", "platform", type=PLATFORM, default="host", help="Platform of the machine that uses it."
)


@query
@click.argument("path", metavar="PLAN", type=EXISTING_FILE)
@path_option("--output", "folder", required=True, help="Folder for the bundle.")
@flag_option("--dry-run", help="Show how much would be brought; fetch and write nothing.")
@_for
@click.option(
    "--python",
    type=click.Choice([f"3.{minor}" for minor in range(11, 16)]),
    help="Python of that machine [default: the one that runs this].",
)
@click.option("--no-weights", "weights", flag_value=False, default=True, help="Leave weights out.")
@many_option(
    "--from",
    "neighbours",
    metavar="FOLDER|URL",
    help="Folder, or `weights serve`, to take weights from first. Repeatable.",
)
@many_option(
    "--repository",
    "repositories",
    callback=_pair,
    metavar="SYSTEM=ADDRESS",
    help="Repository of hosts' packages, such as ubuntu-24.04/amd64=URL. Repeatable.",
)
@file_option("--keyring", help="Public key of that repository.")
@click.option(
    "--no-archive",
    "archive",
    flag_value=False,
    default=True,
    help="Leave packages of the system's own archive out: the hosts reach one.",
)
@many_option(
    "--role",
    "roles",
    help="Role of hosts whose packages the system's own archive has [default: all]. Repeatable.",
)
@many_option(
    "--package",
    "packages",
    metavar="NAME",
    help="One more package of that archive, such as linux-headers-VERSION. Repeatable.",
)
@many_option(
    "--archive",
    "archives",
    callback=_pair,
    metavar="SYSTEM=ADDRESS",
    help="The system's own archive [default: Debian's, as apt has it here]. Repeatable.",
)
@file_option("--archive-keyring", help="Public keys of that archive [default: those of Debian 12].")
@options.key_option
@options.mirror_option
@options.base_options
def bundle_command(workspace: Workspace, /, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Bring all that the stages of a plan need into one folder, and sign a list of it.

    Inputs of the images that they build, images that are built, weights that they fetch, packages
    of hosts (those that are locked, and those that roles install from the system's own archive),
    the plan with its files, the checkout as committed, this tool, public keys. The same command
    goes on after an interruption.

    On the machine without network: sm120 unbundle DIR
    """
    request = BundleRequest(**options)
    done = app.bundle.write_bundle(workspace, request, dry_run=dry_run)
    total = sum(part.size_bytes or 0 for part in done.parts)
    if as_json:
        rows = [part._asdict() for part in done.parts]
        about = {"folder": str(request.folder), "parts": rows, "bytes": total}
        about |= {"left_out": list(done.left_out), "signed_by": done.signed_by, "dry_run": dry_run}
        return say_json(about)
    shown = [
        [what, files, None if size is None else log.size(size)] for what, files, size in done.parts
    ]
    click.echo(log.table(["what", "files", "size"], shown))
    for reason in done.left_out:
        click.echo(f"left out: {reason}")
    verb = "would hold at least" if dry_run else "holds"
    signed = "" if dry_run else f", signed by {done.signed_by[:19]}…"
    click.echo(f"\n{request.folder} {verb} {log.size(total)}{signed}")


@query
@click.argument("folder", metavar="DIR", type=ANY_PATH)
@path_option("--output", help="Copy its parts here, and unpack the checkout.")
@_for
@options.trust_option
@many_option(
    "--key", "key_paths", type=EXISTING_FILE, help="Public key to believe, this once. Repeatable."
)
@flag_option("--serve", help="Then serve it to other machines, until Ctrl-C.")
@click.option("--host", default="127.0.0.1", help="For --serve: address to listen on.")
@click.option(
    "--port",
    default=8080,
    type=click.IntRange(0, 65535),
    help="For --serve: port to listen on; 0 takes a free one.",
)
def unbundle_command(
    workspace: Workspace, /, serve: bool, host: str, port: int, as_json: bool, **options: Any
) -> None:
    """Check the signature and every byte of a bundle; then bring its images into the store.

    Nothing of it is used before all of it was checked. The key that signed it must be trusted
    here: a key in the bundle itself says nothing.

    --serve hands it on at one address: a package index (simple/), a mirror for --mirror (mirror/),
    apt repositories of hosts' packages (hosts/, system/), a registry to read images from (v2/) and
    a Hub for the weights.
    """
    done = app.bundle.unbundle(workspace, **options)
    place, manifest = done.folder, done.manifest
    total = sum(file.size_bytes for file in manifest.files)
    about = {"folder": str(place), "files": len(manifest.files), "bytes": total}
    about |= {"commit": manifest.commit, "plan": str(place / manifest.plan)}
    about |= {"images": done.images, "left_out": manifest.left_out, "signed_by": done.signed_by}
    if not as_json:
        files = log.count(len(manifest.files), "file")
        click.echo(f"{place}: {files}, {log.size(total)}, as {done.signed_by} signed them")
        for name in done.images:
            click.echo(f"in the store: {name}")
        for reason in manifest.left_out:
            click.echo(f"not in it: {reason}")
        lines = [f"cd {place / 'checkout'}"] if options["output"] else []
        lines.append(f"export SM120_OFFLINE=1 SM120_MIRRORS={place / 'mirror'}")
        lines.append(f"sm120 run {place / manifest.plan}")
        for number, line in enumerate(lines):
            click.echo(f"{'      ' if number else 'Next: '}{line}")
    elif not serve:
        say_json(about)
    if not serve:
        return
    with app.bundle.serve_bundle(workspace, done, host=host, port=port) as hub:
        if as_json:
            # one line, which a program reads while this one goes on
            click.echo(json.dumps({**about, "endpoint": hub.endpoint}))
        else:
            click.echo(f"export UV_DEFAULT_INDEX={hub.endpoint}/simple/")
            click.echo(f"export SM120_MIRRORS={hub.endpoint}/mirror HF_ENDPOINT={hub.endpoint}")
            for name in sorted({"/".join(f.path.split("/")[:2]) for f in manifest.files}):
                # as the inventory of hosts names them
                if name.startswith("hosts/"):
                    click.echo(f"nvidia_repository_url: {hub.endpoint}/{name}")
                elif name.startswith("system/"):
                    click.echo(f"nvidia_repository_system_address: {hub.endpoint}/{name}")
        hub.run()
