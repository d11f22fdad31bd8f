"""What a host boots with: the kernel's command line, and options of kernel modules."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from pipeline.host.promises.checks import Host, arguments_of, texts_in
from pipeline.host.promises.outcome import Broken
from pipeline.model import Frozen

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
    """GRUB's settings files in their order, each with the arguments as they are after it."""
    script = (ROLE_FILES / "grub_arguments.sh").read_text(encoding="utf-8")
    output = host.run("/bin/sh -c %s", script).stdout
    rows = [line.partition("\t") for line in output.splitlines() if "\t" in line]
    if rows and rows[-1][0] != "end":
        fix = (
            "`sh -n` on each of GRUB's settings files shows the error; update-grub stops at it too."
        )
        raise Broken(f"GRUB's settings cannot be read beyond {rows[-1][0]}", fix)
    return [(path, arguments.split()) for path, _, arguments in rows[:-1]]


def overriding_file(rows: Sequence[tuple[str, list[str]]], wanted: Sequence[str]) -> str | None:
    """The file after ours from which on a wanted argument has no effect any more."""
    names = [path for path, _ in rows]
    if GRUB not in names or not without_effect(wanted, rows[-1][1]):
        return None
    later = rows[names.index(GRUB) + 1 :]
    return next((path for path, arguments in later if without_effect(wanted, arguments)), None)


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
    """Every line about a module: of all files that modprobe reads and of the kernel's arguments."""
    texts = texts_in(host, *(f"{folder}/modprobe.d/*.conf" for folder in _MODPROBE_FOLDERS))
    # of two files with one name modprobe reads only that of the first folder
    first = {PurePosixPath(path).name: path for path in reversed(texts)}
    rows = [row for path in first.values() for row in parse_lines(path, texts[path])]
    return [*rows, *_kernel_arguments(arguments_of(host, "/proc/cmdline"))]


def _kernel_arguments(arguments: Sequence[str]) -> list[ModuleLine]:
    """`nvidia_uvm.uvm_disable_hmm=0` on the kernel's command line is an option too."""
    # of `MODULE.OPTION=VALUE`; what has no dot is for the kernel itself
    parts = [(a, *a.partition("=")[0].rpartition(".")) for a in arguments]
    return [
        ModuleLine(
            path="/proc/cmdline",
            command="options",
            module=module.replace("-", "_"),
            rest=argument.removeprefix(f"{module}."),
        )
        for argument, module, dot, _ in parts
        if dot
    ]


def parse_lines(path: str, text: str) -> list[ModuleLine]:
    """modprobe's lines; a backslash continues one, `-` and `_` are the same in names."""
    rows = [x.strip().split(None, 2) for x in text.replace("\\\n", " ").splitlines()]
    kept = [r for r in rows if len(r) > 1 and not r[0].startswith("#")]
    return [
        ModuleLine(
            path=path, command=r[0], module=r[1].replace("-", "_"), rest=r[2] if len(r) > 2 else ""
        )
        for r in kept
    ]


def other_values(lines: Sequence[ModuleLine], wanted: Sequence[str], ours: str) -> list[str]:
    """Options that other files set to another value than ours."""
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
