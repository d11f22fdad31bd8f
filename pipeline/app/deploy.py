"""Deploy a recipe over an inventory: check evidence and hosts; a play does the rest.

The play is ansible/deploy.yml with the role engine. On each host it pulls the image by digest,
compares it with the evidence, brings the weights, starts the unit, waits, lets `sm120 smoke` ask
from this machine, and goes back to the version that passed last where one of these fails.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from pipeline.app.hosts import Fleet, PlayMode
from pipeline.app.recipes import (
    RenderRequest,
    all_overrides,
    image_digest,
    recipes_of,
    render_recipe,
)
from pipeline.app.registry import open_registry
from pipeline.app.serve import cuda_branch
from pipeline.app.verify import VerifyRequest, verify_artifact
from pipeline.app.workspace import Workspace, named_platform
from pipeline.artifacts.oci.reference import parse_reference
from pipeline.artifacts.registry.access import Access
from pipeline.core import errors, log
from pipeline.core.files import write_bytes
from pipeline.core.model import Frozen
from pipeline.evidence.verify.remote import open_remote, open_remote_image
from pipeline.hosts.fleet.playbook import Played, promises_of, stream_playbook
from pipeline.hosts.fleet.promised import EngineRecord, Promised
from pipeline.hosts.fleet.tunnel import open_tunnel
from pipeline.serving.recipe.container import UnitSettings, container_name
from pipeline.serving.recipe.launch import Overrides
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.attempts import START_S
from pipeline.serving.serve.fits import model_in, plan_fit
from pipeline.serving.serve.preflight import PlannedStart, require_ready, run_checks
from pipeline.serving.serve.run import recipe_digest
from pipeline.serving.serve.site import RemoteSite
from pipeline.serving.serve.weights import tiny_weights
from pipeline.weights.model import current_weights_lock, lock_path

# where the role weights keeps sets
_MODELS = "/models"
_UNITS = {
    "docker": "/etc/systemd/system/{}.service",
    "podman": "/etc/containers/systemd/{}.container",
}
# The evidence, the rendering and the play answer these; the engine that runs holds the others.
_ANSWERED = ("image", "flags", "weights", "gate")
_HELD = ("port", "idle", "hugepages")
# one answer, and whether it is right: seconds on a card, without long contexts
SHORT_RUNG = "answers"
# what the smoke test gets from this machine's environment
_PASSED = ("SM120_", "PYTHON", "HF_", "DOCKER_CONFIG", "XDG_")

DeployOutcome = Literal[
    "deployed",
    "unchanged",
    "planned",
    "removed",
    "rolled back",
    "failed",
    "refused",
    "not reached",
    "not touched",
]


@dataclass(frozen=True)
class DeployRequest:
    """A recipe, where its image was published, and how it is to run on every host."""

    recipe: str
    registry: str | None = (
        None  # REGISTRY/REPOSITORY, with @sha256:… for another than today's image
    )
    folders: tuple[Path, ...] = ()  # recipes of the user's own
    weights: Path | None = None  # a folder of the hosts
    draft: Path | None = None
    weights_from: tuple[str, ...] = ()  # tried before the Hub
    overrides: Overrides = field(default_factory=Overrides)
    gpus: tuple[int, ...] | None = None
    host_nccl: str | None = None
    runner: Literal["docker", "podman"] = "docker"
    lan: bool = False
    no_cdi: bool = False
    metrics: str = ""
    platform: str | None = None
    batch: str | None = None  # hosts at a time after the first: a number, or a share such as 25%
    timeout_s: int = int(START_S)
    smoke: Literal["short", "whole", "none"] = "short"
    skipped: tuple[str, ...] = ()
    absent: bool = False
    remove_weights: bool = False
    trust_path: Path | None = None
    key_paths: tuple[Path, ...] = ()
    policy_path: Path | None = None
    access: Access = field(default_factory=Access)


class DeployedHost(Frozen):
    """What was done on a host, and why."""

    host: str
    outcome: DeployOutcome
    why: str = ""
    back_to: str = ""  # the image of the version that runs again
    step: str = ""  # the task of the play that failed


class DeployResult(NamedTuple):
    """Every host of the inventory, and the error that follows."""

    hosts: list[DeployedHost]
    error: errors.PipelineError | None


def plan_deploy(workspace: Workspace, request: DeployRequest) -> EngineRecord:
    """Plan what each host gets; refuse an image whose evidence does not hold. Ask no host."""
    recipe = recipes_of(workspace, request.folders).read(request.recipe)
    if recipe.image is None or request.registry is None:
        why = "nothing says where its image was published" if recipe.image else "has no image"
        raise errors.RecipeInvalid(
            f"{recipe.name}: {why}",
            "--registry REGISTRY/REPOSITORY names it; `sm120 publish` puts it there.",
        )
    if recipe.nodes > 1:
        raise errors.RecipeInvalid(
            f"{recipe.name}: is for {recipe.nodes} nodes at once, and a service is on one host",
            "`sm120 serve --on A,B` starts its ranks; `sm120 render --as slurm` prints a job.",
        )
    named, platform = parse_reference(request.registry), named_platform(request.platform)
    digest = named.digest or image_digest(workspace, recipe, platform)
    place = named.model_copy(update={"tag": None, "digest": digest})
    evidence = VerifyRequest(
        artifact=str(place),
        trust_path=request.trust_path,
        key_paths=request.key_paths,
        policy_path=request.policy_path,
        platform=platform,
        access=request.access,
    )
    # first: nothing about an image that nobody vouches for is worth planning
    verify_artifact(workspace, evidence).require_valid()
    with open_registry(place, request.access) as repository:
        remote = open_remote(repository, place, platform)
        if len(remote.images) != 1:
            raise errors.UnknownImage(
                f"{place}: has images for several platforms", "Choose one with --platform."
            )
        image = open_remote_image(remote, remote.images[0], deep=False, jobs=4)
        config = remote.images[0].blobs[0].digest
    # from an index, the platform's image: that is what a host reports
    place = place.model_copy(update={"digest": image.digest})
    weights = weights_on_hosts(workspace, recipe, request)
    rendering = RenderRequest(
        recipe=recipe.name,
        format_name="systemd" if request.runner == "docker" else "quadlet",
        weights=weights.folder,
        draft=request.draft,
        registry=str(place),
        gpus=request.gpus,
        host_nccl=request.host_nccl,
        runner=request.runner,
        lan=request.lan,
        no_cdi=request.no_cdi,
        overrides=request.overrides,
        folders=request.folders,
        platform=request.platform,
        unit=UnitSettings(metrics=request.metrics),
    )
    rendered, name = render_recipe(workspace, rendering), container_name(recipe.name)
    # on one host there is one text
    (unit,) = rendered.texts().values()
    assert isinstance(rendered.body, dict)
    return EngineRecord(
        recipe=recipe.name,
        recipe_digest=recipe_digest(recipe),
        recipe_body=recipe.model_dump(mode="json", exclude_defaults=True),
        image=str(place),
        image_digest=image.digest,
        image_ids=[config, image.digest],
        layers=[*image.diff_ids],
        platform=image.platform,
        runtime=request.runner,
        name=name,
        unit=unit,
        unit_path=_UNITS[request.runner].format(name),
        port=rendered.body["port"],
        model=rendered.body["model"],
        weights=str(weights.folder or ""),
        weights_digest=weights.seal,
    )


class HostWeights(NamedTuple):
    """The folder of a recipe's weights on every host, what proves them, how a host gets them."""

    folder: Path | None
    seal: str | None = None
    values: Mapping[str, Any] = {}  # variables of the role


def weights_on_hosts(workspace: Workspace, recipe: Recipe, request: DeployRequest) -> HostWeights:
    """Let each host fetch a locked set itself; send it a tiny model."""
    name, folder = recipe.model.weights, request.weights
    if request.overrides.model_path:
        # the engine fetches it, or it is in the image
        return HostWeights(folder)
    if recipe.model.tiny and folder is None:
        made = tiny_weights(workspace.store(), recipe)
        place = Path(_MODELS, "sm120-tiny", made.folder.name)
        values = {"engine_model_file": str(made.folder / made.file)}
        return HostWeights(place, made.digest, values)
    if name is None:
        if folder is None:
            raise errors.WeightsUnknown(
                f"{recipe.name}: nothing says where its weights are on the hosts",
                "--weights DIR names their folder there.",
            )
        return HostWeights(folder)
    checkout = workspace.checkout()
    lock = current_weights_lock(checkout, name)
    brought: dict[str, Any] = {
        "engine_weights_set": name,
        "engine_weights_lock": str(lock_path(checkout, name)),
        "engine_weights_from": [*request.weights_from],
    }
    return HostWeights(folder or Path(_MODELS, name), lock.seal, brought)


def deploy(
    workspace: Workspace, fleet: Fleet, mode: PlayMode, request: DeployRequest
) -> DeployResult:
    """Bring a recipe to every host, the first one alone; what fails goes back to what passed."""
    fleet.require_inventories()
    if fleet.secrets.ssh:
        raise errors.FleetUnready(
            "the smoke test logs in by itself, and a typed SSH password does not reach it",
            "Use a key, an agent, or ansible_password in the inventory's vault.",
        )
    recipe = recipes_of(workspace, request.folders).read(request.recipe)
    with tempfile.TemporaryDirectory(prefix="sm120-") as temporary:
        folder = Path(temporary)
        outcomes = folder / "outcomes"
        outcomes.mkdir(mode=0o700)
        variables: dict[str, Any] = {
            "engine_state": "absent" if request.absent else "present",
            "engine_order": str(folder / "order.json"),
            "engine_records": str(fleet.records_folder / "engines"),
            "engine_outcomes": str(outcomes),
            "engine_remove_weights": request.remove_weights,
            "engine_timeout_s": request.timeout_s,
        }
        if request.absent:
            name, where = container_name(recipe.name), None
            if request.remove_weights:
                where = weights_on_hosts(workspace, recipe, request).folder
            gone: dict[str, Any] = {"recipe": recipe.name, "name": name, "runtime": request.runner}
            gone |= {"weights": str(where or "")}
            gone |= {"unit_paths": [path.format(name) for path in _UNITS.values()]}
            write_bytes(folder / "order.json", json.dumps(gone).encode())
        else:
            order = plan_deploy(workspace, request)
            write_bytes(folder / "order.json", order.model_dump_json().encode())
            variables |= weights_on_hosts(workspace, recipe, request).values
            log.say(f"{recipe.name}: {order.image}, its evidence holds")
        with fleet.password_files() as passwords:
            if not request.absent:
                variables["engine_refused"] = _refused_hosts(
                    workspace, fleet, request, recipe, passwords
                )
                variables |= smoke_values(workspace, fleet, request, order, passwords)
            # a file, since the arguments of a process can be read by every user
            values = folder / "variables.json"
            values.touch(mode=0o600)
            values.write_text(json.dumps(variables), encoding="utf-8")
            played = _play_batches(workspace, fleet, mode, request, [f"@{values}"], passwords)
        return judge_outcomes(outcomes, played)


def smoke_values(
    workspace: Workspace,
    fleet: Fleet,
    request: DeployRequest,
    order: EngineRecord,
    passwords: Sequence[str],
) -> dict[str, Any]:
    """Write the smoke test that the play runs on this machine for a host, and its environment."""
    if request.smoke == "none":
        return {}
    words = [sys.executable, "-m", "pipeline", "--checkout", str(workspace.checkout().root)]
    words += ["--store", str(workspace.store().root), "smoke", f"http://127.0.0.1:{order.port}"]
    words += ["--recipe", order.recipe, "--model", order.model, "--json"]
    words += [x for each in request.folders for x in ("--recipes", str(each.resolve()))]
    words += ["--on", "INVENTORY_HOSTNAME"]
    for each in fleet.inventories:
        # the play may run in another folder than this command
        words += ["-i", each if "," in each else str(Path(each).resolve())]
    words += ["--quick", "--up-to", SHORT_RUNG] if request.smoke == "short" else []
    environment = {n: v for n, v in os.environ.items() if n.startswith(_PASSED)}
    # the same program, wherever the play runs
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    # how Ansible reaches the hosts in it; a typed password of the vault is in a file for now
    typed = dict(zip(passwords[::2], passwords[1::2], strict=True))
    vault = typed.get("--vault-password-file") or fleet.vault_password_file
    reached = {
        "ANSIBLE_REMOTE_USER": fleet.user,
        "ANSIBLE_PRIVATE_KEY_FILE": fleet.private_key,
        "ANSIBLE_VAULT_PASSWORD_FILE": vault,
        "ANSIBLE_VAULT_IDENTITY_LIST": ",".join(fleet.vault_ids),
    }
    environment |= {name: str(value) for name, value in reached.items() if value}
    return {"engine_smoke": words, "engine_smoke_environment": environment}


def _refused_hosts(
    workspace: Workspace,
    fleet: Fleet,
    request: DeployRequest,
    recipe: Recipe,
    passwords: Sequence[str],
) -> dict[str, str]:
    """Find hosts that fail the checks of `sm120 serve` for the recipe, and why."""
    checkout = workspace.checkout()
    overrides = all_overrides(recipe, request.overrides, request.weights)
    plan = PlannedStart(
        recipe=recipe,
        port=overrides.port or recipe.port,
        image_is_built=True,
        weights=None,
        cuda=cuda_branch(checkout, recipe.image or "", request.platform),
        cards=request.gpus or (),
        fit=plan_fit(recipe, overrides, model_in(recipe, None, checkout))
        if recipe.hardware.cards
        else None,
    )
    unit = f"{container_name(recipe.name)}.service"

    def judged(host: Promised) -> str:
        try:
            with open_tunnel(host.connection) as tunnel:
                site = RemoteSite(tunnel, host.host, request.runner, "")
                # the version that runs holds the port and the cards, until it makes room
                serves = tunnel.read(["systemctl", "is-active", "--quiet", unit]).code == 0
                skipped = {*_ANSWERED, *request.skipped, *(_HELD if serves else ())}
                machine = site.look(recipe, plan.port)
                rows = run_checks(plan, machine, skipped)
            require_ready(rows)
        except errors.PreflightFailed as error:
            return f"preflight: {error}"
        except errors.HostUnreached as error:
            # the play will not reach it either, and says so in its turn
            log.say(f"  {host.host}: not reached: {error}")
        return ""

    arguments = [*fleet.arguments(), *passwords]
    with (
        log.step("Asking Ansible how the hosts are reached"),
        promises_of(checkout, arguments, "connection.yml") as promised,
    ):
        hosts = [fleet.reach(each) for each in promised]
    with (
        log.step(f"Checking {log.count(len(hosts), 'host')}"),
        ThreadPoolExecutor(fleet.jobs) as pool,
    ):
        found = zip(hosts, pool.map(judged, hosts), strict=True)
        refused = {host.host: why for host, why in found if why}
    for name, why in refused.items():
        log.say(f"  {name}: {why}")
    return refused


def _play_batches(
    workspace: Workspace,
    fleet: Fleet,
    mode: PlayMode,
    request: DeployRequest,
    values: Sequence[str],
    passwords: Sequence[str],
) -> Played:
    """Run the play over all hosts; go on after a batch in which every host was dead."""
    batch = request.batch or "25%"
    more = [*mode.more, *["--check"] * mode.dry_run, *["--diff"] * mode.diff]
    more += [x for value in values for x in ("--extra-vars", value)]
    if mode.even_if_busy:
        more += ["--extra-vars", "reboot_even_if_busy=true"]
    batches = ["1", batch]
    failed: list[str] = []
    done: list[str] = []
    unreached: list[str] = []
    while True:
        arguments = [*fleet.arguments(), "--forks", str(fleet.jobs), *more, *passwords]
        arguments += ["--extra-vars", json.dumps({"sm120_batches": batches})]
        played = stream_playbook(workspace.checkout(), "deploy.yml", arguments, output=2)
        failed, done = [*failed, *played.failed], [*done, *played.done]
        unreached += played.unreached
        # Ansible ends a play with a batch that failed whole. Dead hosts say nothing about the
        # version; a batch on which it did not work does, and so does the canary, dead or not.
        if not (played.untouched and played.unreached and done):
            code = played.code or int(bool(failed))
            return Played(code, failed, done, played.untouched, unreached)
        fleet = replace(fleet, limit=",".join(played.untouched))
        batches = [batch]


def judge_outcomes(folder: Path, played: Played) -> DeployResult:
    """Collect each host's outcome, also where the play wrote none, and the worst error."""
    found: dict[str, DeployedHost] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            each = DeployedHost.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise errors.FleetUnready(f"{path.stem}: its outcome cannot be read") from error
        found[each.host] = each
    for name in played.failed:
        if name not in found:
            outcome: DeployOutcome = "not reached" if name in played.unreached else "failed"
            why = "" if name in played.unreached else "Ansible's messages above say why"
            found[name] = DeployedHost(host=name, outcome=outcome, why=why)
    for name in played.untouched:
        found[name] = DeployedHost(host=name, outcome="not touched", why="a host before it failed")
    hosts = [found[name] for name in sorted(found)]
    kinds: Mapping[DeployOutcome, type[errors.PipelineError]] = {
        "rolled back": errors.RolledBack,
        "failed": errors.StartFailed,
        "refused": errors.PreflightFailed,
        "not reached": errors.HostUnreached,
    }
    for outcome, kind in kinds.items():
        struck = [each for each in hosts if each.outcome == outcome]
        if not struck:
            continue
        if outcome == "refused" and any("image" in each.step.lower() for each in struck):
            kind = errors.ImageDiffers
        to = f" to {struck[0].back_to[:19]}" if struck[0].back_to else ""
        parts = [f"{each.host} ({each.why})" if each.why else each.host for each in struck]
        left = [each.host for each in hosts if each.outcome == "not touched"]
        rest = f"; not touched: {', '.join(left)}" if left else ""
        hint = "Correct what is named, then deploy again: hosts that passed are left alone."
        if kind is errors.RolledBack:
            hint = ""  # its own
        return DeployResult(hosts, kind(f"{outcome}{to}: {'; '.join(parts)}{rest}", hint))
    return DeployResult(hosts, errors.ProvisionFailed(played.summary) if played.code else None)
