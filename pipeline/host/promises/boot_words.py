"""The kernel's command line: which words count, and which of GRUB's files takes them away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.host.promises.look import Host

GRUB = "/etc/default/grub.d/60-sm120.cfg"
ROLE = Path(__file__).resolve().parents[3] / "ansible" / "roles" / "pcie" / "files"


def without_effect(wanted: Sequence[str], words: Sequence[str]) -> list[str]:
    """Wanted words that are missing, or after which another one sets the same thing otherwise."""
    last = {word.partition("=")[0]: word for word in words}
    return [w for w in wanted if w not in words or last[w.partition("=")[0]] != w]


def made_by_grub(host: Host) -> list[tuple[str, list[str]]]:
    """GRUB's settings files in their order, each with the words as they stand after it."""
    said = host.run("/bin/sh -c %s", (ROLE / "grub_words.sh").read_text(encoding="utf-8")).stdout
    rows = [line.partition("\t") for line in said.splitlines() if "\t" in line]
    return [(path, words.split()) for path, _, words in rows]


def culprit(rows: Sequence[tuple[str, list[str]]], wanted: Sequence[str]) -> str | None:
    """The file after ours from which on a wanted word has no effect any more."""
    names = [path for path, _ in rows]
    if GRUB not in names or not without_effect(wanted, rows[-1][1]):
        return None
    later = rows[names.index(GRUB) + 1 :]
    return next((path for path, words in later if without_effect(wanted, words)), None)
