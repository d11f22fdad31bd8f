"""`sm120 host deploy`: a recipe becomes a service on every host of an inventory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from pipeline import app
from pipeline.app.hosts import PlayMode
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.hosts import FOR_ANSIBLE, fleet_of, play_options
from pipeline.cli.options import (
    EXISTING_FILE,
    file_option,
    flag_option,
    many_option,
    path_option,
)
from pipeline.cli.output import say_json
from pipeline.cli.serve import skip_preflight_option, timeout_option
from pipeline.core import log
from pipeline.core.files import write_bytes


@click.command(context_settings=FOR_ANSIBLE)
@click.argument("recipe", metavar="RECIPE")
@options.recipes_option
@click.option(
    "--registry", metavar="REF", help="Where the image was published: REGISTRY/REPOSITORY[@DIGEST]."
)
@path_option("--weights", help="Folder of the weights on the hosts [/models/SET].")
@path_option("--draft", help="Folder of the draft model's weights on the hosts.")
@many_option(
    "--weights-from",
    metavar="URL|FOLDER",
    help="Ask this `sm120 weights serve`, or folder of the hosts, before the Hub. Repeatable.",
)
@options.override_options
@options.gpus_option
@click.option(
    "--host-nccl",
    type=click.Choice(["settings", "patched"]),
    help="Use the hosts' NCCL settings, or their patched library too, from the role nccl.",
)
@click.option(
    "--runtime",
    "runner",
    type=click.Choice(["docker", "podman"]),
    default="docker",
    help="Docker with a unit of systemd, or Podman with a quadlet.",
)
@flag_option("--lan", help="Let other machines connect, too.")
@flag_option("--no-cdi", help="Ask for the cards with --gpus, for a Docker without CDI.")
@click.option(
    "--metrics",
    default="",
    metavar="ADDRESS:PORT",
    help="Answer at this address, too, where Prometheus reads /metrics.",
)
@options.platform_option
@click.option(
    "--batch",
    metavar="N|N%",
    help="Hosts at a time after the first [default: 25%].",
)
@timeout_option
@click.option(
    "--smoke",
    type=click.Choice(["short", "whole", "none"]),
    default="short",
    help="Prove it by the first rungs of the smoke test in small steps, by all, or by its health.",
)
@skip_preflight_option
@flag_option("--absent", help="Remove unit, container and record from the hosts.")
@flag_option("--remove-weights", help="With --absent: remove the weights, too.")
@options.trust_option
@many_option("--key", "key_paths", type=EXISTING_FILE, help="Public key to believe. Repeatable.")
@file_option("--policy", "policy_path", help="What the evidence must show.")
@options.access_options
@path_option("--output", "out", help="Write what the role engine takes here; touch no host.")
@options.json_option
@play_options
def host_deploy_command(
    workspace: Workspace,
    /,
    recipe: str,
    mode: PlayMode,
    out: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Run RECIPE as a service on the hosts of an inventory, each proved before it is kept.

    The image is taken from a registry by digest, and only where its signed evidence holds; each
    host must report that very image. The first host is a canary: where it fails, no other is
    touched. The others follow in batches. A host on which the new version does not start, does
    not answer or fails the smoke test goes back to the version that passed there last. A second
    run changes nothing. `sm120 host verify` compares the hosts with what was deployed.
    """
    if given["remove_weights"] and not given["absent"]:
        raise click.UsageError("--remove-weights belongs to --absent")
    if not re.fullmatch(r"[1-9][0-9]{0,3}|[1-9][0-9]?%|100%", given["batch"] or "1"):
        raise click.UsageError("--batch is a number of hosts, or a share such as 25%")
    if not re.fullmatch(r"|[0-9.]+:[0-9]{1,5}", given["metrics"]):
        raise click.UsageError("--metrics is an address of the hosts such as 10.0.0.5:9400")
    names = app.deploy.DeployRequest.__dataclass_fields__
    request = app.deploy.DeployRequest(
        recipe, **{name: given[name] for name in names if name in given}
    )
    if out:
        order = app.deploy.plan_deploy(workspace, request)
        write_bytes(out, f"{order.model_dump_json(indent=2)}\n".encode())
        return log.say(f"wrote {out}")
    done = app.deploy.deploy(workspace, fleet_of(given), mode, request)
    if as_json:
        say_json([host.model_dump(mode="json") for host in done.hosts])
    else:
        rows = [[host.host, host.outcome, host.why or None] for host in done.hosts]
        click.echo(log.table(["host", "outcome", "reason"], rows))
    if done.error:
        raise done.error
