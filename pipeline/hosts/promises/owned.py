"""The files that each role owns: only root writes them, and they go when the role is undone."""

from __future__ import annotations

from pathlib import Path

from pydantic import RootModel

from pipeline.core.model import Frozen
from pipeline.core.yaml_file import read_yaml
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none


class _Files(Frozen):
    """The files of one role; `owned.yaml` says what each field means."""

    left: list[str]
    used: list[str] = []
    owner: str | None = None


class _Owned(RootModel[dict[str, _Files]]):
    """`owned.yaml`: by role."""


FILES = read_yaml(Path(__file__).with_name("owned.yaml"), _Owned).root
# lists what users other than root can change: these paths, what is below them, folders above
LOOSE = """
import os, pwd, stat, sys
def name(uid):
    try: return pwd.getpwuid(uid).pw_name
    except KeyError: return str(uid)
def fault(path, owners):
    seen = os.lstat(path)
    if stat.S_ISLNK(seen.st_mode): return
    if name(seen.st_uid) not in owners: return "%s belongs to %s" % (path, name(seen.st_uid))
    if seen.st_mode & 0o022: return "%s has mode %04o" % (path, stat.S_IMODE(seen.st_mode))
def above(path):
    while path != "/":
        path = os.path.dirname(path)
        yield path
def below(path):
    yield path
    for place, folders, files in os.walk(path):
        for one in folders + files: yield os.path.join(place, one)
owners, faults = sys.argv[1].split(","), []
for path in filter(os.path.lexists, sys.argv[2:]):
    if os.path.islink(path): faults.append("%s is a link to %s" % (path, os.readlink(path)))
    places = [path, os.path.realpath(path)]
    faults += [fault(p, ["root"]) for place in places for p in above(place)]
    faults += [fault(p, owners) for p in below(places[1]) if os.path.lexists(p)]
print("\\n".join(dict.fromkeys(filter(None, faults))))
"""


def test_nobody_but_root_can_change_its_files(host: Host, role: str) -> None:
    """Programs that root runs, keys, sources, settings, and every folder above them."""
    own = FILES[role]
    owners = f"root,{own.owner}" if own.owner else "root"
    command = f"python3 -c %s {owners} {' '.join([*own.left, *own.used])}"
    output = checks.output_of(host, "owners and modes cannot be read", command, LOOSE)
    fix = (
        "`chown root:root` and `chmod go-w` what is named (replace a link by the file), then run "
        "the playbook again: somebody else could have changed what is in it."
    )
    require_none(list(filter(None, output.splitlines())), "others can change it", fix)


def test_nothing_of_the_role_is_left(host: Host, role: str) -> None:
    """Its files are gone, and the driver is not loaded any more."""
    checks.require_gone(host, FILES[role].left)
    if role == "nvidia_driver":
        loaded = host.file("/proc/driver/nvidia/version").exists
        require(not loaded, "the driver is still loaded", "Reboot the host.")
