"""The engine, its limits, CDI and the private registry."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import RuntimePromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none, skip_unless

_DAEMON = "/etc/docker/daemon.json"
# a name in the middle, so that a site can override ours with a later file
_PODMAN = "/etc/containers/containers.conf.d/60-sm120.conf"
# where the toolkit's unit writes it, and where people write it by hand
_SPECS = ("/etc/cdi/*.yaml", "/etc/cdi/*.json", "/run/cdi/*.yaml", "/run/cdi/*.json")
# libraries of the driver carry its version in their names
_DRIVER_FILE = re.compile(r"lib(?:cuda|nvidia-[\w-]+)\.so\.(\d{3}\.\d+(?:\.\d+)?)\b")
# A container inherits what its flags do not set: least limits of the daemons that start it.
# systemd's own default for locked memory is 8 MiB; an engine with eight GPUs opens thousands of
# files.
_LEAST = {"MEMLOCK": 8 << 20, "NOFILE": 16384}
_LIMIT = re.compile(r"^\s*(?:Default)?Limit(MEMLOCK|NOFILE)\s*=\s*(\S+)", re.M)
_UNITS = ("docker", "containerd")
_ROOTS = ("/etc/systemd", "/run/systemd")
_UNIT_FILES = (
    *("/etc/systemd/system.conf", "/etc/systemd/system.conf.d/*.conf"),
    *("/run/systemd/system.conf.d/*.conf", "/usr/lib/systemd/system.conf.d/*.conf"),
    *(f"{root}/system/service.d/*.conf" for root in _ROOTS),
    *(f"{root}/system/{unit}.service" for root in _ROOTS for unit in _UNITS),
    *(f"{root}/system/{unit}.service.d/*.conf" for root in _ROOTS for unit in _UNITS),
)
_TOOLKIT = "/etc/nvidia-container-runtime/config.toml"


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
    have = checks.installed_packages(host, wanted.packages)
    require(have, f"not installed: {' or '.join(wanted.packages)}")
    if wanted.engine == "docker":
        checks.require_unit(host, "docker")


def test_the_engines_command_is_there(host: Host, wanted: RuntimePromise) -> None:
    """On Debian 13 the daemon comes without it."""
    fix = "" if wanted.engine == "podman" else "apt-get install docker-cli, or docker-ce-cli."
    done = host.run(f"command -v {wanted.engine}")
    require(done.rc == 0, f"there is no command `{wanted.engine}`", fix)


def test_the_limits_are_set(host: Host, wanted: RuntimePromise) -> None:
    """Locked memory, shared memory, CDI and NVIDIA's runtime."""
    if wanted.engine == "podman":
        checks.require_text(host, _PODMAN, wanted.limits)
        texts = checks.texts_in(host, "/etc/containers/containers.conf.d/*.conf")
        later = [
            f"{path} has {line.strip()}"
            for path, text in texts.items()
            if path > _PODMAN
            for line in text.splitlines()
            if line.partition("=")[0].strip() in ("default_ulimits", "shm_size")
        ]
        why = "set otherwise by a file that is read after ours"
        return require_none(later, why, "Take it out of that file.")
    require_none(missing_from(wanted.settings, _json_in(host, _DAEMON)), _DAEMON)


def _json_in(host: Host, path: str) -> Any:
    try:
        return json.loads(checks.text_of(host, path))
    except ValueError:
        fix = f"Repair or remove {path}; the playbook stops at it and does not change it."
        raise checks.Broken(f"{path} is not JSON", fix) from None


def test_the_engine_was_started_with_them(host: Host, wanted: RuntimePromise) -> None:
    """A daemon that started before somebody wrote its settings has the older ones."""
    skip_unless(wanted.engine != "podman", "Podman reads its settings at each start of a container")
    started = "systemctl show docker --property=ActiveEnterTimestamp --value"
    # both by the host's clock
    output = host.run(f'date +%s -d "$({started})"; stat -c %Y {_DAEMON}').stdout.split()
    require(len(output) == 2, f"docker does not run, or {_DAEMON} is missing")
    require(int(output[0]) >= int(output[1]), f"{_DAEMON} is newer", "systemctl restart docker")
    command = host.run("systemctl show docker --property=ExecStart --value").stdout
    other = re.search(r"--config-file[= ](\S+)", command)
    fix = "Take --config-file out of the unit: `systemctl cat docker` shows where it stands."
    require(not other or other[1] == _DAEMON, f"Docker reads {other and other[1]} instead", fix)


def test_no_limit_of_the_engine_is_lower_than_a_container_needs(
    host: Host, wanted: RuntimePromise
) -> None:
    """Of the running daemons, of their units, and of systemd's defaults for the next start."""
    skip_unless(wanted.engine != "podman", "Podman has no daemon")
    wrong = [
        f"{path} has Limit{name}={value}"
        for path, text in checks.texts_in(host, *_UNIT_FILES).items()
        for name, value in _LIMIT.findall(text)
        if too_low(name, value)
    ]
    properties = [f"DefaultLimit{name}" for name in _LEAST]
    wrong += [
        f"systemd runs with {name}={value}"
        for name, value in checks.unit_properties(host, "", *properties).items()
        if too_low(name.removeprefix("DefaultLimit"), value)
    ]
    for unit in _UNITS:
        command = checks.unit_properties(host, unit, "MainPID", "ExecStart")
        flags = re.findall(r"--default-(?:ulimit|shm-size)[= ]\S+", command.get("ExecStart", ""))
        wrong += [f"{unit} is started with {flag}" for flag in flags]
        limits = host.run(f"cat /proc/{command.get('MainPID') or 0}/limits").stdout
        rows = re.findall(r"^Max (open|locked) \S+ +\S+ +(\S+)", limits, re.M)
        running = [({"open": "NOFILE", "locked": "MEMLOCK"}[kind], hard) for kind, hard in rows]
        wrong += [f"{unit} runs with {n}={hard}" for n, hard in running if too_low(n, hard)]
    fix = (
        "Take the line out of that file, then `systemctl daemon-reexec` and, when no container "
        "works, `systemctl restart docker`."
    )
    require_none(wrong, "too low", fix)


def too_low(name: str, value: str) -> bool:
    """Whether systemd's value (`64K`, `1024:4096`, `infinity`) is below what is needed."""
    hard = value.rpartition(":")[2]
    found = re.fullmatch(r"(\d+)([KMGTPE]?)", hard)
    if name not in _LEAST or found is None:
        return False
    return int(found[1]) << (10 * "_KMGTPE".index(found[2] or "_")) < _LEAST[name]


def test_the_toolkit_hands_the_cards_to_containers(host: Host) -> None:
    """With no-cgroups a container sees the cards and may not open them."""
    text = checks.texts_in(host, _TOOLKIT).get(_TOOLKIT, "")
    try:
        settings = tomllib.loads(text).get("nvidia-container-cli", {})
    except tomllib.TOMLDecodeError as error:
        fix = f"Repair {_TOOLKIT}: `nvidia-ctk config --in-place` writes it anew."
        raise checks.Broken(f"{_TOOLKIT} is not TOML: {error}", fix) from None
    wrong = ["no-cgroups = true"] if settings.get("no-cgroups") is True else []
    # another root has another driver's libraries
    if settings.get("root", "/") not in ("", "/"):
        wrong.append(f"root = {settings['root']}")
    fix = f"Take it out of {_TOOLKIT}; containers that run keep it until they are started again."
    require_none(wrong, f"{_TOOLKIT} has", fix)


def test_the_private_registry_is_asked_over_tls_only(host: Host, wanted: RuntimePromise) -> None:
    """The engine also asks an insecure registry without TLS, or with any certificate."""
    skip_unless(wanted.registry, "no private registry is named")
    if wanted.engine == "podman":
        paths = ("/etc/containers/registries.conf", "/etc/containers/registries.conf.d/*.conf")
        tables = {p: tomllib.loads(t) for p, t in checks.texts_in(host, *paths).items()}
        insecure = [
            (p, str(row.get("location") or row.get("prefix", "")))
            for p, table in tables.items()
            for row in table.get("registry", [])
            if row.get("insecure")
        ]
    else:
        daemon = json.loads(checks.texts_in(host, _DAEMON).get(_DAEMON) or "{}")
        insecure = [(_DAEMON, str(x)) for x in daemon.get("insecure-registries", [])]
        command = checks.unit_properties(host, "docker", "ExecStart").get("ExecStart", "")
        found = re.findall(r"--insecure-registry[= ](\S+)", command)
        insecure += [("docker.service", x) for x in found]
    wrong = [f"{p} lists {x} as insecure" for p, x in insecure if covers(x, wanted.registry)]
    fix = "Take it out, and restart Docker when no container works; the CA of the registry is here."
    require_none(wrong, wanted.registry, fix)


def covers(entry: str, registry: str) -> bool:
    """Whether an entry of Docker's or Podman's list is for a registry: its name, or its network."""
    name = registry.rpartition(":")[0] or registry
    if entry.partition("/")[0] in (registry, name):
        return True
    try:
        network = ipaddress.ip_network(entry, strict=False)
        return ipaddress.ip_address(name) in network
    except ValueError:
        # every name may have an address of that network
        return entry in ("0.0.0.0/0", "::/0")


def test_cdi_is_made_again_after_each_change_of_the_driver(host: Host) -> None:
    """By the toolkit's own units: at each boot, and when the driver's modules change."""
    checks.require_unit(host, "nvidia-cdi-refresh", running=False)
    checks.require_unit(host, "nvidia-cdi-refresh.path")
    for name in ("nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path"):
        checks.require_untouched_unit(host, name)


def test_cdi_names_the_cards(host: Host, facts: HostFacts) -> None:
    """Without a CDI file no container gets a card."""
    skip_unless(facts.pci.gpus, "no GPU is on the bus of this host")
    specs = "".join(checks.texts_in(host, *_SPECS).values())
    fix = "systemctl start nvidia-cdi-refresh, and look at its journal."
    require("nvidia.com/gpu" in specs, "no CDI file names nvidia.com/gpu", fix)


def test_cdi_is_of_the_loaded_driver(host: Host, facts: HostFacts) -> None:
    """Another driver's file names libraries that are gone, and no container starts."""
    named = {p: set(_DRIVER_FILE.findall(t)) for p, t in checks.texts_in(host, *_SPECS).items()}
    skip_unless(any(named.values()), "no CDI file names a driver's library")
    loaded = checks.known(facts.driver.version)
    wrong = [f"{p} is of driver {v}" for p, vs in named.items() for v in sorted(vs - {loaded})]
    fix = "systemctl start nvidia-cdi-refresh; remove a file in /etc/cdi that it does not write."
    require_none(wrong, f"loaded is {loaded}", fix)


def test_the_private_registry_is_trusted_by_its_own_ca(host: Host, wanted: RuntimePromise) -> None:
    """The controller's file, byte for byte."""
    skip_unless(wanted.registry and wanted.registry_ca, "no private registry with a CA is named")
    path = f"{wanted.certs}/{wanted.registry}/ca.crt"
    checks.require_same_file(host, path, Path(wanted.registry_ca))


def test_the_login_is_there_and_nobody_elses_to_read(host: Host, wanted: RuntimePromise) -> None:
    """Compared by digest, and never printed."""
    skip_unless(wanted.login_sha256, "no login is given")
    path = "/root/.docker/config.json"
    output = _json_in(host, path).get("auths", {}).get(wanted.registry, {})
    good = hashlib.sha256(str(output.get("auth", "")).encode()).hexdigest() == wanted.login_sha256
    require(good, f"{path} has no or another login for {wanted.registry}")
    mode = host.file(path).mode
    require(mode & 0o077 == 0, f"{path} is open to others ({mode:04o})", f"chmod 600 {path}")
