"""A launch as text: commands for Docker, Podman and shells, systemd units, clients' settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path

from pipeline.artifacts.containers.arguments import ContainerArguments, Mount
from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.container import (
    ANYWHERE,
    NCCL_LIBRARY,
    NCCL_SETTINGS,
    RDMA_DEVICES,
    LaunchTarget,
    contained,
    container_name,
    published,
    require_count,
    require_plain_text,
)
from pipeline.serving.recipe.launch import MASTER_PORT, Launch, NodePlace, on_node
from pipeline.serving.recipe.render.manifests import render_compose, render_kubernetes

# What systemd takes as it stands in a command line.
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
# Podman's generator copies a folder into a line that has no quotes (RequiresMountsFor=).
_AWKWARD = re.compile(r"[\s\"'\\$]")
# Podman's copies go to the journal, which has limits of its own.
_LOGS = {
    "docker": ["--log-driver=json-file", "--log-opt=max-size={0}m", "--log-opt=max-file={1}"],
    "podman": ["--log-driver=journald"],
}
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
# Claude Code asks for models by these names; all are the one that is served.
_CLAUDE_MODELS = (
    *("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL"),
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_FAST_MODEL"),
)
# The engines ask for no key, but clients refuse to start without one.
_NO_KEY = "dummy"


def systemd_word(word: str) -> str:
    """One word of ExecStart= or Environment=, or of a quadlet's Exec=."""
    # `%` begins a specifier, `$` a variable, also within quotes
    escaped = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(escaped):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _lines(groups: Sequence[Sequence[str]], quote: Callable[[str], str] = shlex.quote) -> str:
    """One command with a group of words on each line."""
    return " \\\n  ".join(" ".join(map(quote, group)) for group in groups if group)


def _grouped(arguments: Sequence[str]) -> list[list[str]]:
    """Each flag with its values, so that every flag has its line."""
    groups: list[list[str]] = []
    for word in arguments:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def _image(target: LaunchTarget, runner: str) -> str:
    # `podman load` puts this before a name without a registry
    return f"localhost/{target.image}" if target.is_local and runner == "podman" else target.image


def _volume(mount: Mount, runner: str) -> str:
    rights = "ro" if mount.read_only else "rw"
    # SELinux: only containers of Podman are confined by default. What belongs to the host's own
    # system keeps its label.
    label = ",Z" if runner == "podman" and mount != NCCL_LIBRARY else ""
    return f"{mount.host}:{mount.inside}:{rights}{label}"


def _cache(container: ContainerArguments, runner: str) -> list[str]:
    if (cache := container.cache) is None:
        return []
    return [f"{cache.name}:{cache.inside}{':U' if runner == 'podman' else ''}"]


def _isolation(container: ContainerArguments, target: LaunchTarget) -> list[str]:
    """Shared memory, locked memory, and where the image may come from."""
    return [
        *(["--ipc=host"] if container.ipc == "host" else []),
        *([f"--shm-size={container.shm_bytes}"] if container.shm_bytes else []),
        *(["--ulimit=memlock=-1:-1"] if container.memory_locked else []),
        # another owner may have the same name in a public registry; a deployed image was compared
        # with its evidence, and what is pulled later was not
        *(["--pull=never"] if target.is_local or target.deployed else []),
    ]


def _kept(container: ContainerArguments, target: LaunchTarget, runner: str) -> list[str]:
    """Words of a unit that stays: labels to find it by, rotated logs, an address for metrics."""
    if (unit := target.deployed) is None:
        return []
    return [
        *(f"--label={name}={value}" for name, value in container.labels.items()),
        *(word.format(unit.log_mib, unit.log_files) for word in _LOGS[runner]),
        *([f"--publish={unit.metrics}:{container.port}"] if unit.metrics else []),
    ]


def _service(target: LaunchTarget) -> list[str]:
    # an engine of a rack that ends with code 0 is as gone as any other
    restart = "always" if target.deployed else "on-failure"
    # an image of many gigabytes may have to be pulled first
    return [f"Restart={restart}", "RestartSec=10", "TimeoutStartSec=infinity", "", "[Install]"]


def _run_words(
    launch: Launch, target: LaunchTarget, runner: str, first: list[str]
) -> list[list[str]]:
    """The whole `docker run` or `podman run`, each option with its value as one group."""
    container = contained(launch, target)
    cards = [["--device", name] for name in container.devices]
    if cards and not target.cdi:
        # Docker reads a list as CSV, so that it stands in quotes of its own
        listed = ",".join(map(str, target.gpus or ()))
        cards = [["--gpus", "all" if target.gpus is None else f'"device={listed}"']]
    is_bare = not launch.container.as_documented
    return [
        [runner, "run", *first],
        *cards,
        *([["--device", RDMA_DEVICES]] if target.rdma else []),
        ["--network=host"] if container.host_network else ["-p", published(container)],
        *([["--cap-drop=ALL"], ["--security-opt=no-new-privileges"]] if is_bare else []),
        *([f"--cap-add={name}"] for name in container.capabilities),
        *([word] for word in _isolation(container, target)),
        *([word] for word in _kept(container, target, runner)),
        *([["--env-file", NCCL_SETTINGS]] if target.nccl else []),
        *(["-e", f"{name}={value}"] for name, value in launch.environment.items()),
        *(["-v", _volume(each, runner)] for each in container.mounts),
        *(["-v", volume] for volume in _cache(container, runner)),
        [_image(target, runner)],
        *_grouped(container.arguments),
    ]


def _render_run(launch: Launch, target: LaunchTarget, runner: str) -> str:
    # one in the background stays when it ends: its output has not been read yet
    first = ["-d"] if target.detached else ["--rm"]
    return _lines(_run_words(launch, target, runner, first)) + "\n"


def render_systemd(launch: Launch, target: LaunchTarget) -> str:
    """A unit that systemd starts again after a failure and after a reboot."""
    name, program = container_name(launch.recipe), f"/usr/bin/{target.runner}"
    words = _run_words(launch, target, target.runner, ["--rm", "--name", name])
    words[0][0] = program
    is_docker = target.runner == "docker"
    lines = [
        f"# {name}.service: into /etc/systemd/system;",
        f"# then `systemctl daemon-reload` and `systemctl enable --now {name}`.",
        *_unit(launch, target),
        f"After=network-online.target{' docker.service' if is_docker else ''}",
        "Wants=network-online.target",
        *(["Requires=docker.service"] if is_docker else []),
        "",
        "[Service]",
        # a container that survived a power cut would hold the name
        f"ExecStartPre=-{program} rm --force {name}",
        f"ExecStart={_lines(words, systemd_word)}",
        f"ExecStop={program} stop {name}",
        # an engine that was asked to stop did nothing wrong
        "SuccessExitStatus=143",
        *_service(target),
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _unit(launch: Launch, target: LaunchTarget) -> list[str]:
    about = f"{launch.model} by {launch.engine}"
    lines = ["[Unit]", f"Description={about.replace('%', '%%')}"]
    if target.deployed:
        # the role health writes it after an Xid that leaves a card unusable
        lines += ["After=sm120-health.service", "ConditionPathExists=!/run/sm120/out-of-service"]
    return lines


def render_quadlet(launch: Launch, target: LaunchTarget) -> str:
    """A `.container` file, of which Podman's generator (4.4 or newer) makes a systemd unit."""
    name, container = container_name(launch.recipe), contained(launch, target)
    if ";" in container.arguments:
        # the generator writes it without quotes, and systemd begins another command there
        raise RecipeInvalid(
            f"{launch.recipe}: a quadlet cannot give the engine `;` as an argument",
            "Render it with --as systemd --runtime podman.",
        )
    if awkward := [m.host for m in container.mounts if _AWKWARD.search(m.host)]:
        raise RecipeInvalid(
            f"{awkward[0]}: a quadlet mounts no folder with blanks, quotes, \\ or $ in its path",
            "Name the folder by another path, such as a link to it.",
        )
    is_bare = not launch.container.as_documented
    volumes = [_volume(mount, "podman").replace("%", "%%") for mount in container.mounts]
    lines = [
        f"# {name}.container: into /etc/containers/systemd, or ~/.config/containers/systemd;",
        f"# then `systemctl daemon-reload` and `systemctl start {name}`.",
        *_unit(launch, target),
        "",
        # only keys of Podman 4.4: later ones have keys for some of PodmanArgs
        "[Container]",
        f"ContainerName={name}",
        f"Image={_image(target, 'podman')}",
        *(f"AddDevice={device}" for device in container.devices),
        *([f"AddDevice={RDMA_DEVICES}"] if target.rdma else []),
        "Network=host" if container.host_network else f"PublishPort={published(container)}",
        *(["DropCapability=all", "NoNewPrivileges=true"] if is_bare else []),
        *(f"AddCapability={each}" for each in container.capabilities),
        *([f"EnvironmentFile={NCCL_SETTINGS}"] if target.nccl else []),
        *(f"Environment={systemd_word(f'{k}={v}')}" for k, v in launch.environment.items()),
        *(f"Volume={volume}" for volume in (*volumes, *_cache(container, "podman"))),
        *(f"PodmanArgs={word}" for word in _isolation(container, target)),
        *(f"PodmanArgs={systemd_word(word)}" for word in _kept(container, target, "podman")),
        f"Exec={_lines(_grouped(container.arguments), systemd_word)}",
        "",
        "[Service]",
        *_service(target),
        "WantedBy=multi-user.target default.target",
    ]
    return "\n".join(lines) + "\n"


# Stand in the place of addresses and ranks, which are known once Slurm has chosen the nodes.
_FIRST, _OWN = "@SM120-FIRST@", "@SM120-OWN@"
_CARDS_OF_STEP = """cards=()
for card in ${SLURM_STEP_GPUS//,/ }; do
  cards+=(--device "nvidia.com/gpu=$card")
done
"""


def render_slurm(launch: Launch, target: LaunchTarget) -> str:
    """A batch job that starts a rank on each node, and ends all of them when one ends."""
    name, with_pyxis = container_name(launch.recipe), target.runner == "pyxis"
    if target.gpus is not None:
        raise RecipeInvalid("Slurm chooses the GPUs itself", "Leave --gpus out.")
    if with_pyxis and target.is_local:
        raise RecipeInvalid(
            f"{launch.recipe}: pyxis takes an image from a registry, and this one was loaded here",
            "Name it with --registry REGISTRY/REPOSITORY.",
        )
    commands = []
    for rank in range(min(launch.nodes, 2)):
        place, its = NodePlace(rank, _FIRST, _OWN), launch
        if launch.nodes > 1:
            its = on_node(launch, place)
        container = contained(its, target)
        if with_pyxis:
            # pyxis does not run an image's entrypoint, and enroot knows its environment
            groups = [[f"export {k}={shlex.quote(v)}"] for k, v in its.environment.items()]
            groups += [[f"set -a; . {NCCL_SETTINGS}; set +a"]] if target.nccl else []
            words = container.arguments
            if launch.nodes == 1 and "--host" not in words:
                # a job's containers have the network of their host
                words = [*words, "--host", container.address]
            start = [["exec", *launch.program], *_grouped(words)]
            text = "\n".join([*(group[0] for group in groups), _lines(start)])
        else:
            # without cgroups of its own (of crun alone) what runs ends with its job
            first = ["--rm", "--replace", "--cgroups=disabled", "--name", name]
            text = "exec " + _lines(_run_words(its, target, "podman", first))
            text = text.replace("--device nvidia.com/gpu=all", '"${cards[@]}"')
        text = text.replace(_FIRST, '"$first"').replace(_OWN, '"$own"')
        commands.append(text.replace("--node-rank 1", '--node-rank "$SLURM_NODEID"'))
    step = ["srun", "--label", "--kill-on-bad-exit=1", "--wait=30"]
    if with_pyxis:
        mounts = [f"{m.host}:{m.inside}:{'ro' if m.read_only else 'rw'}" for m in container.mounts]
        mounts += [f"{NCCL_SETTINGS}:{NCCL_SETTINGS}:ro"] if target.nccl else []
        # enroot parts registry and image by `#`, and takes a digest where a tag stands
        # (github.com/NVIDIA/enroot, src/docker.sh: docker::import)
        registry, _, repository = target.image.replace("@sha256:", ":sha256:").partition("/")
        step += [f"--container-image={registry}#{repository}", "--no-container-mount-home"]
        step += [f"--container-mounts={','.join(mounts)}"]
    pull = ""
    if not with_pyxis and not target.is_local:
        # before the start: ranks wait for each other for a while only
        pull = f"srun --kill-on-bad-exit=1 podman pull --quiet {shlex.quote(target.image)}\n"
    # its --export=NONE: nothing of the caller's environment, which may hold keys, is kept by the
    # controller; the first rank alone answers clients
    values = {
        "NAME": name,
        "PORT": str(launch.port),
        "MASTER_PORT": str(MASTER_PORT),
        "NODES": str(launch.nodes),
        "GPUS": f"#SBATCH --gpus-per-node={launch.cards}\n" if launch.cards else "",
        "CARDS": _CARDS_OF_STEP if launch.cards and not with_pyxis else "",
        "FIRST": commands[0],
        "OTHERS": "".join(f"{command}\n" for command in commands[1:]),
        "PULL": pull,
        "STEP": shlex.join(step),
    }
    template = Path(__file__).with_name("slurm.sbatch").read_text(encoding="utf-8")
    # in one pass: a value may hold what looks like a place
    return re.sub(r"@([A-Z_]+)@", lambda place: values[place[1]], template)


CONTAINED: dict[str, Callable[[Launch, LaunchTarget], str]] = {
    "docker": lambda launch, target: _render_run(launch, target, "docker"),
    "podman": lambda launch, target: _render_run(launch, target, "podman"),
    "quadlet": render_quadlet,
    "systemd": render_systemd,
    "compose": render_compose,
    "kubernetes": render_kubernetes,
    "slurm": render_slurm,
}
# `env` is for clients, and needs no launch.
FORMATS = [*CONTAINED, "shell", "env"]


def render_launch(launch: Launch, target: LaunchTarget, format_name: str) -> str:
    """A launch in one of the formats that start an engine."""
    require_plain_text(launch, target)
    if format_name != "shell":
        if launch.image is None:
            raise RecipeInvalid(
                f"{launch.recipe}: has no image, it is for an engine of this machine",
                "Render it with --as shell, or choose a recipe with an image.",
            )
        return CONTAINED[format_name](launch, target)
    # a script that becomes the engine, without a container
    lines = [
        "#!/bin/sh",
        f"# {launch.recipe}: {launch.model} by {launch.engine}, without a container",
        "set -eu",
    ]
    if target.gpus is not None and launch.cards:
        require_count(launch, target.gpus)
        lines.append(f"export CUDA_VISIBLE_DEVICES={','.join(map(str, target.gpus))}")
    if target.nccl:
        lines.append(f"set -a; . {NCCL_SETTINGS}; set +a")
    lines += [f"export {name}={shlex.quote(v)}" for name, v in launch.environment.items()]
    command = [["exec", *launch.program], *_grouped(launch.arguments)]
    if not any(word.partition("=")[0] == "--host" for word in launch.arguments):
        # as the images' entrypoints do: some engines answer this host alone
        command.append(["--host", ANYWHERE])
    return "\n".join([*lines, _lines(command)]) + "\n"


def client_settings(model: str, port: int, node: str) -> dict[str, str]:
    """The variables by name, for a server at `node`."""
    if not _HOST.fullmatch(node):
        try:
            node = f"[{IPv6Address(node)}]"
        except AddressValueError:
            message = f"{node!r} is no host"
            raise RecipeInvalid(message, "Write --node NAME or --node ADDRESS.") from None
    base = f"http://{node}:{port}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": _NO_KEY,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": _NO_KEY,
        **dict.fromkeys(_CLAUDE_MODELS, model),
        "DISABLE_TELEMETRY": "1",
        "ENABLE_PROMPT_CACHING_1H": "1",
    }


def render_env(settings: Mapping[str, str]) -> str:
    """Lines for `eval` or a profile."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
