"""Packages at exactly the locked versions, and held; a row for each part of the lock."""

from __future__ import annotations

import re

from pipeline.hosts.lock_model import TargetLock
from pipeline.hosts.promises.checks import Host, installed_packages, require_none, text_of

# blocks of `apt-cache policy`, then of `apt-cache show`
_POLICY = re.compile(r"^(\S+):\n(?:  .*\n)*?  Candidate: (\S+)$", re.M)
_OFFERED = re.compile(r"^Package: (\S+)\n(?:.+\n)*?SHA256: ([0-9a-f]{64})$", re.M)


def pins_of(lock: TargetLock, part: str) -> dict[str, str]:
    """Version by name."""
    return {pin.name: pin.version for pin in getattr(lock, part).debs}


def test_the_locked_versions_are_installed(host: Host, lock: TargetLock, part: str) -> None:
    """All of them, and no other version."""
    pins = pins_of(lock, part)
    have = {name: version for name, (version, _) in installed_packages(host, list(pins)).items()}
    wrong = [
        f"{n} is {have.get(n, 'missing')}, not {v}" for n, v in pins.items() if have.get(n) != v
    ]
    require_none(wrong, "not as locked")


def test_they_are_held(host: Host, lock: TargetLock, part: str) -> None:
    """So that no upgrade by hand moves them."""
    names = list(pins_of(lock, part))
    have = installed_packages(host, names)
    require_none([n for n in names if have.get(n, ("", ""))[1] != "hold"], "not held")
    output = host.run("apt-config dump APT::Get::allow-change-held-packages").stdout
    off = re.search(r'"(true|yes|1|on|enable|with)"', output, re.I)
    fix = "Take it out of the file that `grep -ri change-held /etc/apt/apt.conf*` names."
    require_none([output.strip()] if off else [], "apt's settings let every upgrade move them", fix)


def test_apt_would_install_nothing_else(host: Host, lock: TargetLock, part: str) -> None:
    """As apt itself reads the preferences."""
    pins = pins_of(lock, part)
    output = host.run(f"apt-cache policy {' '.join(pins)}").stdout
    offered = {name.partition(":")[0]: version for name, version in _POLICY.findall(output)}
    wrong = [f"{n} {offered.get(n, '(none)')}" for n, v in pins.items() if offered.get(n) != v]
    fix = "Another file in /etc/apt/preferences.d is stronger: `apt-cache policy NAME` shows it."
    require_none(wrong, "apt would take", fix)


def test_no_source_offers_other_bytes_under_a_locked_version(
    host: Host, lock: TargetLock, part: str
) -> None:
    """The name and the version decide what apt installs, not who offers them."""
    debs = getattr(lock, part).debs
    output = host.run(f"apt-cache show {' '.join(f'{d.name}={d.version}' for d in debs)}").stdout
    offered = sorted(set(_OFFERED.findall(output)))
    locked = {d.name: d.sha256 for d in debs}
    wrong = [f"{n} with SHA-256 {d[:12]}…" for n, d in offered if locked.get(n, d) != d]
    fix = "Remove the source that offers it: `apt-cache policy NAME` names all of them."
    require_none(wrong, "other bytes are offered", fix)


def test_the_preferences_pin_these_and_no_others(host: Host, lock: TargetLock, part: str) -> None:
    """A pin of an older lock would come back one day."""
    path = f"/etc/apt/preferences.d/sm120-{part}.pref"
    text = text_of(host, path)
    # above 1000 apt also goes back to an older version, see apt_preferences(5)
    form = re.compile(r"^Package: (\S+)\nPin: version (\S+)\nPin-Priority: 1001$", re.M)
    names = re.findall(r"^Package: (\S+)", text, re.M)
    pinned = {**dict.fromkeys(names), **dict(form.findall(text))}
    pins = pins_of(lock, part)
    wrong = [n for n in sorted({*pinned, *pins}) if n not in pinned or pinned[n] != pins.get(n, "")]
    require_none(wrong, f"{path} is not as locked")


def test_their_files_are_as_they_came(host: Host, lock: TargetLock, part: str) -> None:
    """dpkg knows the digest of every file it installed; settings may differ."""
    names = list(pins_of(lock, part))
    have = installed_packages(host, names)
    require_none([n for n in names if n not in have], "not installed")
    output = host.run(f"dpkg --verify {' '.join(names)}").stdout.splitlines()
    # c marks settings, which a site may change
    changed = [line.split()[-1] for line in output if line.split()[1:2] != ["c"]]
    fix = "apt-get install --reinstall the package, then find out who changed it."
    require_none(changed, "changed or missing", fix)
