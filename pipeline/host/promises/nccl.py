"""NCCL's settings and, where it applies, the patched library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.host.facts.model import HostFacts
from pipeline.host.fleet.promised import NcclPromise
from pipeline.host.promises.checks import Host, require_gone, require_same_file, text_of, texts_in
from pipeline.host.promises.outcome import Broken, known, not_applicable, require, require_none

_CONF, _ENV = "/etc/nccl.conf", "/etc/sm120/nccl.env"
_OURS = "# Written by the role nccl"
_ZEN_5 = 26  # CPU family
_PLAIN = re.compile(r"/[\w./@+-]*")
# NAME=value, as files of shells, systemd, Podman and NCCL have it, and `NAME DEFAULT=value` of PAM
_VARIABLE = re.compile(
    r"(?<![\w$])(NCCL_[A-Z0-9_]+|VLLM_NCCL_SO_PATH)\s*(?:\s(?:DEFAULT|OVERRIDE))?"
    r"=\s*[\"']?([^\s\"';\]]*)"
)
_ENVIRONMENTS = (
    *("/etc/environment", "/etc/environment.d/*.conf", "/usr/lib/environment.d/*.conf"),
    *("/etc/security/pam_env.conf", "/etc/profile", "/etc/profile.d/*", "/etc/bash.bashrc"),
    *("/root/.bashrc", "/root/.profile", "/root/.bash_profile", "/root/.pam_environment"),
    *("/etc/systemd/system.conf", "/etc/systemd/system.conf.d/*.conf"),
    *("/run/systemd/system.conf.d/*.conf", "/etc/systemd/user.conf"),
    *("/etc/systemd/user.conf.d/*.conf", "/etc/containers/containers.conf"),
    "/etc/containers/containers.conf.d/*.conf",
)


def require_settings(host: Host, path: str, want: dict[str, Any]) -> None:
    """Exactly these lines, in any order."""
    lines = [x for x in text_of(host, path).splitlines() if x and not x.startswith("#")]
    output = {name: value for name, _, value in (x.partition("=") for x in lines)}
    wanted = {name: str(value) for name, value in want.items()}
    wrong = [
        f"{n}={output.get(n, '(none)')}"
        for n in sorted({*output, *wanted})
        if output.get(n) != wanted.get(n)
    ]
    require_none(wrong, f"{path} has")


def test_programs_on_the_host_get_the_settings(host: Host, wanted: NcclPromise) -> None:
    """By the file that NCCL itself reads; none where no profile is chosen."""
    output = host.run(f"head -n 1 {_CONF} 2>/dev/null").stdout
    if wanted.container_settings:
        if output.strip() and _OURS not in output:
            raise Broken(
                f"{_CONF} was not written by the role nccl",
                "Move its settings to nccl_extra in the inventory, remove it, and run the playbook "
                "again: the role does not overwrite it.",
            )
        return require_settings(host, _CONF, wanted.settings)
    require(_OURS not in output, f"{_CONF} of an earlier profile is still there")


def test_no_home_has_settings_of_its_own(host: Host, wanted: NcclPromise) -> None:
    """~/.nccl.conf takes precedence over /etc/nccl.conf."""
    if not wanted.settings:
        not_applicable("no profile is chosen")
    homes = {x.split(":")[5] for x in text_of(host, "/etc/passwd").splitlines() if x.count(":") > 5}
    files = [f"{home}/.nccl.conf" for home in sorted(homes) if _PLAIN.fullmatch(home)]
    wrong = overriding(texts_in(host, *files), wanted.settings)
    fix = "Remove the file, or move what is needed to nccl_extra in the inventory."
    require_none(wrong, "takes precedence over /etc/nccl.conf", fix)


def test_no_environment_has_settings_of_its_own(host: Host, wanted: NcclPromise) -> None:
    """Variables take precedence over any file: of logins, of services, and of containers."""
    if not wanted.settings:
        not_applicable("no profile is chosen")
    texts = texts_in(host, *_ENVIRONMENTS)
    texts |= {"systemd's environment": host.run("systemctl show-environment").stdout}
    wrong = overriding(texts, wanted.settings)
    fix = (
        "Take the line out of the file (systemd: `systemctl unset-environment NAME`), or move it "
        "to nccl_extra in the inventory; programs that run have it until they are started again."
    )
    require_none(wrong, "takes precedence over /etc/nccl.conf", fix)


def overriding(texts: dict[str, str], want: dict[str, Any]) -> list[str]:
    """NCCL's variables that are not as promised; NCCL_DEBUG only changes what is printed."""
    return [
        f"{path} has {name}={value}"
        for path, text in texts.items()
        for line in text.splitlines()
        if not line.lstrip().startswith(("#", ";"))
        for name, value in _VARIABLE.findall(line)
        if not name.startswith("NCCL_DEBUG") and str(want.get(name)) != value
    ]


def test_containers_get_the_settings(host: Host, wanted: NcclPromise) -> None:
    """By the file that they are started with."""
    if not wanted.container_settings:
        return require_gone(host, [_ENV])
    require_settings(host, _ENV, wanted.container_settings)


def test_the_patched_library_is_ours_or_none(host: Host, wanted: NcclPromise) -> None:
    """Byte for byte."""
    if not wanted.patched:
        return require_gone(host, [wanted.patched_at])
    require_same_file(host, wanted.patched_at, Path(wanted.patched))


def test_the_patched_library_is_only_where_it_works(facts: HostFacts, wanted: NcclPromise) -> None:
    """NVIDIA/nccl#2127 was measured with eight GPUs on Zen 5, and nowhere else."""
    if not wanted.patched:
        not_applicable("no patched library is asked for")
    cpu, gpus = facts.cpu, known(facts.gpus)
    good = cpu.vendor == "AuthenticAMD" and cpu.family == _ZEN_5 and len(gpus) == 8
    fix = "Leave nccl_patched_library out for this host and run the playbook again."
    require(good, f"{cpu.vendor} family {cpu.family} with {len(gpus)} GPUs", fix)
