"""The kernel's command line: which words count, and which of GRUB's files takes them away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.host.promises.answers import Broken
from pipeline.host.promises.look import Host

# of these the last one counts; others, such as console=, may stand several times
_ONE_VALUE = ("iommu", "amd_iommu", "intel_iommu", "pcie_aspm", "pcie_port_pm")
GRUB = "/etc/default/grub.d/60-sm120.cfg"
ROLE = Path(__file__).resolve().parents[3] / "ansible" / "roles" / "pcie" / "files"


def without_effect(wanted: Sequence[str], words: Sequence[str]) -> list[str]:
    """Wanted words that are missing, or after which another one sets the same thing otherwise."""
    last = {name: w for w in words if (name := w.partition("=")[0]) in _ONE_VALUE}
    return [w for w in wanted if w not in words or last.get(w.partition("=")[0], w) != w]


def made_by_grub(host: Host) -> list[tuple[str, list[str]]]:
    """GRUB's settings files in their order, each with the words as they stand after it."""
    said = host.run("/bin/sh -c %s", (ROLE / "grub_words.sh").read_text(encoding="utf-8")).stdout
    rows = [line.partition("\t") for line in said.splitlines() if "\t" in line]
    if rows and rows[-1][0] != "end":
        fix = (
            "`sh -n` on each of GRUB's settings files shows the fault; update-grub stops at it too."
        )
        raise Broken(f"GRUB's settings cannot be read beyond {rows[-1][0]}", fix)
    return [(path, words.split()) for path, _, words in rows[:-1]]


def culprit(rows: Sequence[tuple[str, list[str]]], wanted: Sequence[str]) -> str | None:
    """The file after ours from which on a wanted word has no effect any more."""
    names = [path for path, _ in rows]
    if GRUB not in names or not without_effect(wanted, rows[-1][1]):
        return None
    later = rows[names.index(GRUB) + 1 :]
    return next((path for path, words in later if without_effect(wanted, words)), None)
