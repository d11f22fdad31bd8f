"""What a host boots with: the kernel's command line and its modules' options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from pipeline.core.model import Frozen
from pipeline.hosts.promises.checks import Host, kernel_arguments, require, texts_in

# of these the last one counts; others, such as console=, may be given several times
_ONE_VALUE = ("iommu", "amd_iommu", "intel_iommu", "pcie_aspm", "pcie_port_pm")
GRUB = "/etc/default/grub.d/60-sm120.cfg"
ROLE_FILES = Path(__file__).resolve().parents[3] / "ansible" / "roles" / "pcie" / "files"
# in the order in which modprobe searches them
_MODPROBE_FOLDERS = ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")


def without_effect(wanted: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Wanted arguments that are missing, or that a later one overrides."""
    last = {name: a for a in arguments if (name := a.partition("=")[0]) in _ONE_VALUE}
    return [w for w in wanted if w not in arguments or last.get(w.partition("=")[0], w) != w]


def grub_arguments(host: Host) -> list[tuple[str, list[str]]]:
    """List GRUB's settings files in order, each with the kernel arguments after it."""
    script = (ROLE_FILES / "grub_arguments.sh").read_text(encoding="utf-8")
    output = host.run("/bin/sh -c %s", script).stdout
    rows = [line.partition("\t") for line in output.splitlines() if "\t" in line]
    last = rows[-1][0] if rows else "end"
    fix = "`sh -n` on each of GRUB's settings files shows the error; update-grub stops at it."
    require(last == "end", f"GRUB's settings cannot be read beyond {last}", fix)
    return [(path, arguments.split()) for path, _, arguments in rows[:-1]]


def overriding_file(rows: Sequence[tuple[str, list[str]]], wanted: Sequence[str]) -> str | None:
    """Find the first file after ours that makes a wanted argument ineffective."""
    names = [path for path, _ in rows]
    if GRUB not in names or not without_effect(wanted, rows[-1][1]):
        return None
    later = rows[names.index(GRUB) + 1 :]
    return next((path for path, arguments in later if without_effect(wanted, arguments)), None)


# menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'gnulinux-simple-UUID' {
_ENTRY = re.compile(r"^\s*(menuentry|submenu)\s+(['\"])(.*?)\2(?:.*?_option\s+'([^']*)')?.*\{\s*$")


class BootEntry(Frozen):
    """An entry of GRUB's menu, or a menu of entries, and the kernel that it starts."""

    names: tuple[str, ...]  # its title, and the id by which grub-set-default names it
    kernel: str
    entries: tuple[BootEntry, ...] = ()


def chosen_kernel(grub_cfg: str, choice: str) -> str | None:
    """Find the kernel that GRUB_DEFAULT names (`0`, `1>2`, a title, an id), or None.

    An entry without a Linux kernel has an empty one.
    """
    # of each open menu: its names, its kernel, its entries
    stack: list[tuple[tuple[str, ...], list[str], list[BootEntry]]] = [((), [], [])]
    for line in grub_cfg.splitlines():
        entry = _ENTRY.match(line)
        kernel = re.match(r"\s*linux\S*\s+\S*?vmlinu[xz]-(\S+)", line)
        if entry:
            stack.append(((entry[3], entry[4] or ""), [], []))
        elif kernel:
            stack[-1][1].append(kernel[1])
        elif line.strip() == "}" and len(stack) > 1:
            names, kernels, inner = stack.pop()
            first = kernels[0] if kernels else (inner[0].kernel if inner else "")
            stack[-1][2].append(BootEntry(names=names, kernel=first, entries=tuple(inner)))
    entries: Sequence[BootEntry] = stack[0][2]
    chosen: str | None = None
    for part in (choice or "0").split(">"):
        at = int(part) if part.isdigit() else None
        found = next((e for i, e in enumerate(entries) if i == at or part in e.names), None)
        if found is None:
            return None
        chosen, entries = found.kernel, found.entries
    return chosen


# prints modprobe's files in an initramfs, each below its name, and whether it has the driver
READ_INITRAMFS = r"""
import re, subprocess, sys
data, at = open(sys.argv[1], "rb").read(), 0
tools = {
    b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd",
    b"\x02\x21\x4c\x18": "lz4", b"BZh": "bzip2", b"\x89LZO": "lzop",
}
while at < len(data):
    tool = next((t for magic, t in tools.items() if data.startswith(magic, at)), None)
    if tool:
        done = subprocess.run([tool, "-dc"], input=data[at:], stdout=subprocess.PIPE)
        data, at = done.stdout, 0
        if not data: sys.exit("%s does not read it" % tool)
    elif data[at:at + 4] == b"\0\0\0\0": at += 4
    elif data[at:at + 6] in (b"070701", b"070702"):
        size, length = (int(data[at + 6 + 8 * n:at + 14 + 8 * n], 16) for n in (6, 11))
        name = data[at + 110:at + 109 + length].decode(errors="replace")
        start = (at + 110 + length + 3) & ~3
        if re.search(r"modprobe\.d/[^/]*\.conf$", name):
            text = data[start:start + size].decode("ascii", "replace").replace("\x1e", "")
            print("\x1e/%s\n%s" % (name.lstrip("./"), text))
        elif re.search(r"/nvidia\.ko(\.\w+)?$", name): print("\x1edriver\n")
        at = (start + size + 3) & ~3
    else: break
print("\x1eend\n")
"""


class ModuleLine(Frozen):
    """A line of modprobe's settings, `options nvidia_uvm uvm_disable_hmm=1`, and its file."""

    path: str
    command: str
    module: str
    rest: str

    @property
    def options(self) -> dict[str, str]:
        """Value by name; the last one of a name counts."""
        try:
            settings = shlex.split(self.rest)
        except ValueError:
            settings = self.rest.split()
        return {name: value for name, _, value in (x.partition("=") for x in settings)}


def module_settings(host: Host) -> list[ModuleLine]:
    """Read every line about a module, in modprobe's files and the kernel's arguments."""
    texts = texts_in(host, *(f"{folder}/modprobe.d/*.conf" for folder in _MODPROBE_FOLDERS))
    # of two files with one name modprobe reads only that of the first folder
    first = {PurePosixPath(path).name: path for path in reversed(texts)}
    rows = [row for path in first.values() for row in parse_lines(path, texts[path])]
    return [*rows, *kernel_options("/proc/cmdline", kernel_arguments(host))]


def kernel_options(path: str, arguments: Sequence[str]) -> list[ModuleLine]:
    """Read options such as `nvidia_uvm.uvm_disable_hmm=0` from kernel arguments."""
    lines = []
    for argument in arguments:
        # MODULE.OPTION=VALUE; an argument without a dot is for the kernel itself
        module, dot, _ = argument.partition("=")[0].rpartition(".")
        if dot:
            rest, name = argument.removeprefix(f"{module}."), module.replace("-", "_")
            lines.append(ModuleLine(path=path, command="options", module=name, rest=rest))
    return lines


def parse_lines(path: str, text: str) -> list[ModuleLine]:
    """Parse modprobe's lines; a backslash continues one, names treat `-` as `_`."""
    rows = [x.strip().split(None, 2) for x in text.replace("\\\n", " ").splitlines()]
    return [
        ModuleLine(path=path, command=r[0], module=r[1].replace("-", "_"), rest=" ".join(r[2:]))
        for r in rows
        if len(r) > 1 and not r[0].startswith("#")
    ]


def other_values(lines: Sequence[ModuleLine], wanted: Sequence[str], ours: str) -> list[str]:
    """Find options that other files set differently from ours."""
    want = {
        (r.module, n): v for r in parse_lines(ours, "\n".join(wanted)) for n, v in r.options.items()
    }
    return [
        f"{row.path} has {name}={value}"
        for row in lines
        if row.command == "options" and row.path != ours
        for name, value in row.options.items()
        if want.get((row.module, name), value) != value
    ]
