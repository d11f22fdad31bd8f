"""The apt source, trusted by its key only."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.hosts.fleet.promised import RepositoryPromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none

_SOURCE = "/etc/apt/sources.list.d/sm120-nvidia.sources"
_SYSTEM = "/etc/apt/sources.list.d/sm120-system.sources"
# options of a source by which apt does not require a signature, see sources.list(5)
_WITHOUT = ("trusted", "allow-insecure", "allow-weak", "allow-downgrade-to-insecure")
# and by which it takes an index of any age: an old one offers packages with known holes
_DATES = ("check-date", "check-valid-until")
_OPTIONS = re.compile(r"^\s*deb(?:-src)?\s+\[([^\]]*)\]")
# settings of apt: unsigned sources, checks of certificates, another judge of signatures
_ALLOWS = re.compile(r"::Allow(Unauthenticated|\w*Insecure\w*|Weak\w*)$", re.I)
_CHECKS = re.compile(r"::(Verify-(Peer|Host)|Check-(Date|Valid-Until))$", re.I)
_AGE = re.compile(r"^Acquire::(Max-FutureTime|Min-ValidTime)$", re.I)
_KEYS = "/etc/apt/trusted.gpg /etc/apt/trusted.gpg.d"
_PROGRAM = re.compile(r"^APT::Key::gpgvcommand$", re.I)


def test_the_source_is_the_one_of_the_inventory(host: Host, wanted: RepositoryPromise) -> None:
    """Address, suite and components; those of the system's own packages, too."""
    want = {"Types": "deb", "URIs": wanted.url, "Suites": wanted.suite}
    want["Signed-By"] = wanted.key_place
    if wanted.components:
        want["Components"] = " ".join(wanted.components)
    places = {_SOURCE: want}
    if wanted.system_url:
        places[_SYSTEM] = {
            **{"Types": "deb", "URIs": wanted.system_url, "Suites": wanted.system_suite},
            **{"Components": " ".join(wanted.system_components), "Languages": "none"},
            "Signed-By": wanted.system_key,
        }
    for place, want in places.items():
        lines = [x for x in checks.text_of(host, place).splitlines() if x and x[0] != "#"]
        source = {key: value.strip() for key, _, value in (x.partition(":") for x in lines)}
        require(source == want, f"{place} has {source}")


def test_the_source_is_believed_by_its_own_key_only(host: Host, wanted: RepositoryPromise) -> None:
    """The key on the host is the controller's."""
    checks.require_same_file(host, wanted.key_place, Path(wanted.key))


def test_no_source_of_the_host_is_believed_without_a_signature(host: Host) -> None:
    """Whoever answers at its address could bring any package, as root."""
    folder = "/etc/apt/sources.list.d"
    places = ("/etc/apt/sources.list", f"{folder}/*.list", f"{folder}/*.sources")
    texts = checks.texts_in(host, *places)
    wrong = [
        f"{path} has {option}" for path, text in texts.items() for option in unsigned(path, text)
    ]
    fix = "Remove the option, and name the source's key with Signed-By; or remove the file."
    require_none(wrong, "trusted without a signature or at any age", fix)


def unsigned(path: str, text: str) -> list[str]:
    """Find options that let apt accept a source unsigned; a disabled stanza has none."""
    lines = [x for x in text.splitlines() if not x.lstrip().startswith("#")]
    if not path.endswith(".sources"):
        options = [o for x in lines for group in _OPTIONS.findall(x.lower()) for o in group.split()]
        pairs = [o.partition("=") for o in options]
        return ["".join(pair) for pair in pairs if _loosens(pair[0], pair[2])]
    # a line that begins with a blank continues the field before it
    unfolded = re.sub(r"\n[ \t]+(?=\S)", " ", "\n".join(lines))
    loose = []
    for part in re.split(r"\n\s*\n", unfolded):
        rows = (line.partition(":") for line in part.splitlines() if line[:1].strip())
        stanza = {name.strip().lower(): value.strip() for name, _, value in rows}
        if _is_on(stanza.get("enabled", "yes")):
            named = [n for n in (*_WITHOUT, *_DATES) if n in stanza and _loosens(n, stanza[n])]
            loose += [f"{name.title()}: {stanza[name]}" for name in named]
    return loose


def _loosens(option: str, value: str) -> bool:
    return _is_on(value) if option in _WITHOUT else option in _DATES and not _is_on(value)


def _is_on(value: str) -> bool:
    """As apt reads it."""
    return value.strip().lower() not in ("no", "false", "without", "off", "disable", "0", "")


def test_apt_checks_signatures_and_certificates(host: Host) -> None:
    """As apt itself reads its settings."""
    output = dict(re.findall(r'^(\S+) "([^"]*)";$', host.run("apt-config dump").stdout, re.M))
    wrong = []
    for name, value in output.items():
        allows = _ALLOWS.search(name) and _is_on(value)
        unchecked = _CHECKS.search(name) and not _is_on(value)
        # more than a day: apt accepts an index that is dated that far off
        old = _AGE.search(name) and value.isdigit() and int(value) > 86400
        if allows or unchecked or old or (_PROGRAM.search(name) and value):
            wrong.append(f"{name} is {value}")
    names = "|".join(x.split()[0].rpartition("::")[2] for x in wrong)
    fix = f"Take it out of the file that `grep -riE '{names}' /etc/apt/apt.conf*` names."
    require_none(wrong, "apt's settings", fix)


def test_no_foreign_key_speaks_for_every_source(host: Host) -> None:
    """A key in trusted.gpg.d may sign any source that names no key of its own."""
    found = host.run(f"find {_KEYS} -type f -o -type l 2>/dev/null").stdout.split()
    if not found:
        return
    owned = host.run(f"dpkg -S {' '.join(found)} 2>/dev/null").stdout
    owners = dict(line.rpartition(": ")[::-2] for line in owned.splitlines())
    foreign = [path for path in found if path not in owners]
    fix = "Move it to /etc/apt/keyrings, and name it with Signed-By in the one source it is for."
    require_none(foreign, "no package brought", fix)
    packages = " ".join(sorted({p.partition(":")[0] for p in owners.values()}))
    output = host.run(f"dpkg --verify {packages}").stdout
    changed = [x.split()[-1] for x in output.splitlines() if x.split()[-1] in found]
    fix = f"apt-get install --reinstall -o Dpkg::Options::=--force-confnew {packages}"
    require_none(changed, "changed since its package brought it", fix)


def test_what_the_host_had_before_is_noted(host: Host) -> None:
    """Without it `state: absent` would not know what to leave."""
    path = "/var/lib/sm120/before/packages"
    fix = f"rm {path}, then run the playbook again; it notes what is installed now, ours with it."
    require(checks.text_of(host, path).strip(), "the note is empty", fix)
