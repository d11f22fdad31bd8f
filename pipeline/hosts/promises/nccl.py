"""NCCL's settings and, where it applies, the patched library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import NcclPromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none, skip_unless

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
    *("/etc/systemd/system/*.service", "/etc/systemd/system/*.service.d/*.conf"),
)
# what shells and PAM read in each user's home
_OF_HOMES = (
    *(".bashrc", ".bash_profile", ".bash_login", ".profile", ".zshrc", ".zshenv"),
    *(".pam_environment", ".config/environment.d/*.conf"),
)
# libraries and folders that the linker takes before the system's, see ld.so(8)
_LINKER = re.compile(
    r"(?<![\w$])LD_(PRELOAD|AUDIT|LIBRARY_PATH)\s*(?:\s(?:DEFAULT|OVERRIDE))?=\s*[\"']?([^\"'\n;]*)"
)
# lists each libnccl that programs of the host would load or have loaded, and that no package
# brought: from the linker's cache and folders, preloaded files, folders of variables, processes
FOREIGN = r"""
import glob, os, re, subprocess, sys
ours, files, folders = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
def known(path):
    names = {path, os.path.realpath(path)}
    names |= {n[4:] for n in names if n.startswith("/usr/")} | {"/usr" + n for n in names}
    if ours in names: return True
    done = subprocess.run(["dpkg", "-S", *names], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return bool(done.stdout)
def text(path):
    try: return open(path, errors="replace").read()
    except OSError: return ""
found = {}
cache = subprocess.run(["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, text=True).stdout
for path in re.findall(r"libnccl\.so\S* .*=> (\S+)", cache): found[path] = "in the linker's cache"
for conf in ["/etc/ld.so.conf", *glob.glob("/etc/ld.so.conf.d/*.conf")]:
    for folder in re.findall(r"^\s*(/\S+)", text(conf), re.M):
        for path in glob.glob(folder + "/libnccl.so*"): found[path] = "by " + conf
for folder in folders:
    for path in glob.glob(folder + "/libnccl.so*"): found[path] = "by LD_LIBRARY_PATH"
for path in files + text("/etc/ld.so.preload").split():
    try: holds = "nccl" in path or b"ncclAllReduce" in open(path, "rb").read()
    except OSError: holds = "nccl" in path
    if holds: found[path] = "preloaded"
mine = os.stat("/proc/1/ns/mnt").st_ino
for place in glob.glob("/proc/[0-9]*"):
    try: same = os.stat(place + "/ns/mnt").st_ino == mine
    except OSError: continue
    for path in set(re.findall(r"(/\S*libnccl\S*)$", text(place + "/maps"), re.M)) if same else ():
        # an environment of Python brings its own, for its own programs
        if "/site-packages/" not in path: found[path] = "in process " + place[6:]
print("\n".join(sorted("%s (%s)" % row for row in found.items() if not known(row[0]))))
"""


def require_settings(host: Host, path: str, want: dict[str, Any]) -> None:
    """Exactly these lines, in any order."""
    lines = [x for x in checks.text_of(host, path).splitlines() if x and not x.startswith("#")]
    got = dict(line.partition("=")[::2] for line in lines)
    wanted = {name: str(value) for name, value in want.items()}
    differ = [n for n in sorted({*got, *wanted}) if got.get(n) != wanted.get(n)]
    require_none([f"{n}={got.get(n, '(none)')}" for n in differ], f"{path} has")


def test_programs_on_the_host_get_the_settings(host: Host, wanted: NcclPromise) -> None:
    """By the file that NCCL itself reads; none where no profile is chosen."""
    output = host.run(f"head -n 1 {_CONF} 2>/dev/null").stdout
    if wanted.container_settings:
        if output.strip() and _OURS not in output:
            raise checks.Broken(
                f"{_CONF} was not written by the role nccl",
                "Move its settings to nccl_extra in the inventory, remove it, and run the playbook "
                "again: the role does not overwrite it.",
            )
        return require_settings(host, _CONF, wanted.settings)
    require(_OURS not in output, f"{_CONF} of an earlier profile is still there")


def test_no_home_has_settings_of_its_own(host: Host, wanted: NcclPromise) -> None:
    """~/.nccl.conf takes precedence over /etc/nccl.conf."""
    skip_unless(wanted.settings, "no profile is chosen")
    wrong = overriding(checks.texts_in(host, *in_homes(host, ".nccl.conf")), wanted.settings)
    fix = "Remove the file, or move what is needed to nccl_extra in the inventory."
    require_none(wrong, "takes precedence over /etc/nccl.conf", fix)


def test_no_environment_has_settings_of_its_own(host: Host, wanted: NcclPromise) -> None:
    """Variables of logins, services and containers take precedence over any file."""
    skip_unless(wanted.settings, "no profile is chosen")
    wrong = overriding(environments(host), wanted.settings)
    fix = (
        "Take the line out of the file (systemd: `systemctl unset-environment NAME`), or move it "
        "to nccl_extra in the inventory; programs that run have it until they are started again."
    )
    require_none(wrong, "takes precedence over /etc/nccl.conf", fix)


def in_homes(host: Host, *names: str) -> list[str]:
    """These files in the home of each user."""
    users = [line.split(":") for line in checks.text_of(host, "/etc/passwd").splitlines()]
    homes = {fields[5] for fields in users if len(fields) > 6}
    return [f"{home}/{n}" for home in sorted(homes) if _PLAIN.fullmatch(home) for n in names]


def environments(host: Host) -> dict[str, str]:
    """Where variables of logins, services and containers come from."""
    texts = checks.texts_in(host, *_ENVIRONMENTS, *in_homes(host, *_OF_HOMES))
    return texts | {"systemd's environment": host.run("systemctl show-environment").stdout}


def test_no_other_library_takes_the_place_of_nccl(host: Host, wanted: NcclPromise) -> None:
    """By the linker's cache and folders, variables and /etc/ld.so.preload; loaded or not yet."""
    lines = [
        (name, value, path)
        for path, text in environments(host).items()
        for line in text.splitlines()
        if not line.lstrip().startswith(("#", ";"))
        for name, value in _LINKER.findall(line)
    ]
    folders = [
        p for name, value, _ in lines if name == "LIBRARY_PATH" for p in absolute_paths(value)
    ]
    files = [p for name, value, _ in lines if name != "LIBRARY_PATH" for p in absolute_paths(value)]
    arguments = (wanted.patched_at if wanted.patched else "-", " ".join(files), " ".join(folders))
    why = "the host's libraries cannot be listed"
    output = checks.output_of(host, why, "python3 -c %s %s %s %s", FOREIGN, *arguments)
    named = sorted({path for _, value, path in lines if absolute_paths(value)})
    origin = f"; {', '.join(named)} set LD_ variables" if named else ""
    fix = (
        "Take the folder or the variable out of the file that names it, run ldconfig, and start "
        f"the programs again{origin}."
    )
    require_none(list(filter(None, output.splitlines())), "no package brought", fix)


def absolute_paths(value: str) -> list[str]:
    """Absolute paths in the value of a variable of the linker."""
    return [p for p in re.split(r"[:\s]+", value) if _PLAIN.fullmatch(p)]


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
        return checks.require_gone(host, [_ENV])
    require_settings(host, _ENV, wanted.container_settings)


def test_the_patched_library_is_ours_or_none(host: Host, wanted: NcclPromise) -> None:
    """Byte for byte."""
    if not wanted.patched:
        return checks.require_gone(host, [wanted.patched_at])
    checks.require_same_file(host, wanted.patched_at, Path(wanted.patched))


def test_the_patched_library_is_only_where_it_works(facts: HostFacts, wanted: NcclPromise) -> None:
    """NVIDIA/nccl#2127 was measured with eight GPUs on Zen 5, and nowhere else."""
    skip_unless(wanted.patched, "no patched library is asked for")
    cpu, gpus = facts.cpu, checks.known(facts.gpus)
    good = cpu.vendor == "AuthenticAMD" and cpu.family == _ZEN_5 and len(gpus) == 8
    fix = "Leave nccl_patched_library out for this host and run the playbook again."
    require(good, f"{cpu.vendor} family {cpu.family} with {len(gpus)} GPUs", fix)
