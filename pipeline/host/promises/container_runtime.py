"""The engine, its limits, CDI and the private registry."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pipeline.host.facts.model import HostFacts
from pipeline.host.fleet.promised import RuntimePromise
from pipeline.host.promises.checks import (
    Host,
    installed,
    require_same_file,
    require_text,
    require_unit,
    require_untouched_unit,
    text_of,
    texts_in,
)
from pipeline.host.promises.outcome import Broken, not_applicable, require, require_none

_DAEMON = "/etc/docker/daemon.json"
# a name in the middle, so that a site can override ours with a later file
_PODMAN = "/etc/containers/containers.conf.d/60-sm120.conf"
# where the toolkit's unit writes it, and where people write it by hand
_SPECS = "/var/run/cdi/nvidia.yaml /etc/cdi/nvidia.yaml /run/cdi/nvidia.yaml"


def missing_from(want: dict[str, Any], have: Any, path: str = "") -> list[str]:
    """Settings that are missing or different; others are the site's own."""
    missing = []
    for key, value in want.items():
        got = have.get(key) if isinstance(have, dict) else None
        if isinstance(value, dict):
            missing += missing_from(value, got, f"{path}{key}.")
        elif got != value:
            missing.append(f"{path}{key} is {json.dumps(got)}")
    return missing


def test_the_engine_is_installed_and_runs(host: Host, wanted: RuntimePromise) -> None:
    """Podman has no daemon."""
    if not installed(host, wanted.packages):
        raise Broken(f"not installed: {' or '.join(wanted.packages)}")
    if wanted.engine == "docker":
        require_unit(host, "docker")


def test_the_engines_command_is_there(host: Host, wanted: RuntimePromise) -> None:
    """On Debian 13 the daemon comes without it."""
    fix = "" if wanted.engine == "podman" else "apt-get install docker-cli, or docker-ce-cli."
    done = host.run(f"command -v {wanted.engine}")
    require(done.rc == 0, f"there is no command `{wanted.engine}`", fix)


def test_the_limits_are_set(host: Host, wanted: RuntimePromise) -> None:
    """Locked memory, shared memory, CDI and NVIDIA's runtime."""
    if wanted.engine == "podman":
        require_text(host, _PODMAN, wanted.limits)
        return require_none(
            later_settings(texts_in(host, "/etc/containers/containers.conf.d/*.conf")),
            "set otherwise by a file that is read after ours",
            "Take it out of that file.",
        )
    try:
        output = json.loads(text_of(host, _DAEMON))
    except ValueError:
        fix = f"Repair or remove {_DAEMON}; the playbook stops at it and does not change it."
        raise Broken(f"{_DAEMON} is not JSON", fix) from None
    require_none(missing_from(wanted.settings, output), _DAEMON)


def later_settings(texts: dict[str, str]) -> list[str]:
    """Our names in Podman's files that are read after ours."""
    return [
        f"{path} has {line.strip()}"
        for path, text in texts.items()
        if path > _PODMAN
        for line in text.splitlines()
        if line.partition("=")[0].strip() in ("default_ulimits", "shm_size")
    ]


def test_the_engine_was_started_with_them(host: Host, wanted: RuntimePromise) -> None:
    """A daemon that was started before its settings were written has the older ones."""
    if wanted.engine == "podman":
        not_applicable("Podman reads its settings at each start of a container")
    started = "systemctl show docker --property=ActiveEnterTimestamp --value"
    # both by the host's clock
    output = host.run(f'date +%s -d "$({started})"; stat -c %Y {_DAEMON}').stdout.split()
    if len(output) != 2:
        raise Broken(f"docker does not run, or {_DAEMON} is missing")
    require(int(output[0]) >= int(output[1]), f"{_DAEMON} is newer", "systemctl restart docker")
    command = host.run("systemctl show docker --property=ExecStart --value").stdout
    other = re.search(r"--config-file[= ](\S+)", command)
    fix = "Take --config-file out of the unit: `systemctl cat docker` shows where it stands."
    require(not other or other[1] == _DAEMON, f"Docker reads {other and other[1]} instead", fix)


def test_cdi_is_made_again_after_each_change_of_the_driver(host: Host) -> None:
    """By the toolkit's own units: at each boot, and when the driver's modules change."""
    require_unit(host, "nvidia-cdi-refresh", running=False)
    require_unit(host, "nvidia-cdi-refresh.path")
    for name in ("nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path"):
        require_untouched_unit(host, name)


def test_cdi_names_the_cards(host: Host, facts: HostFacts) -> None:
    """Without a CDI file no container gets a card."""
    if not facts.pci.gpus:
        not_applicable("no GPU is on the bus of this host")
    specs = host.run(f"cat {_SPECS} 2>/dev/null").stdout
    fix = "systemctl start nvidia-cdi-refresh, and look at its journal."
    require("nvidia.com/gpu" in specs, "no CDI file names nvidia.com/gpu", fix)


def test_the_private_registry_is_trusted_by_its_own_ca(host: Host, wanted: RuntimePromise) -> None:
    """The controller's file, byte for byte."""
    if not wanted.registry or not wanted.registry_ca:
        not_applicable("no private registry with a CA is named")
    path = f"{wanted.certs}/{wanted.registry}/ca.crt"
    require_same_file(host, path, Path(wanted.registry_ca))


def test_the_login_is_there_and_nobody_elses_to_read(host: Host, wanted: RuntimePromise) -> None:
    """Compared by digest, and never printed."""
    if not wanted.login_sha256:
        not_applicable("no login is given")
    path = "/root/.docker/config.json"
    try:
        output = json.loads(text_of(host, path)).get("auths", {}).get(wanted.registry, {})
    except ValueError:
        fix = f"Repair or remove {path}; the playbook stops at it and does not change it."
        raise Broken(f"{path} is not JSON", fix) from None
    good = hashlib.sha256(str(output.get("auth", "")).encode()).hexdigest() == wanted.login_sha256
    require(good, f"{path} has no or another login for {wanted.registry}")
    mode = host.file(path).mode
    require(mode & 0o077 == 0, f"{path} is open to others ({mode:04o})", f"chmod 600 {path}")
