"""Options of kernel modules, as modprobe gathers them from all of its folders."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from pipeline.host.promises.look import Host, texts_in, words_of
from pipeline.model import Frozen

_FOLDERS = ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")


class ModuleLine(Frozen):
    """A line of modprobe's settings, `options nvidia_uvm uvm_disable_hmm=1`, and its file."""

    path: str
    word: str
    module: str
    rest: str

    @property
    def options(self) -> dict[str, str]:
        """Value by name; the last one of a name counts."""
        try:
            words = shlex.split(self.rest)
        except ValueError:
            words = self.rest.split()
        return {name: value for name, _, value in (w.partition("=") for w in words)}


def module_settings(host: Host) -> list[ModuleLine]:
    """Every line about a module, of every file that modprobe reads, and of the kernel's words."""
    texts = texts_in(host, *(f"{folder}/modprobe.d/*.conf" for folder in _FOLDERS))
    # of two files of one name modprobe reads that of the first folder only
    first = {PurePosixPath(path).name: path for path in reversed(texts)}
    rows = [row for path in first.values() for row in parse_lines(path, texts[path])]
    return [*rows, *_booted_with(words_of(host, "/proc/cmdline"))]


def _booted_with(words: Sequence[str]) -> list[ModuleLine]:
    """`nvidia_uvm.uvm_disable_hmm=0` on the kernel's command line is an option too."""
    parts = [(w, *w.partition("=")[0].rpartition(".")) for w in words]
    return [
        ModuleLine(
            path="/proc/cmdline",
            word="options",
            module=module.replace("-", "_"),
            rest=word.removeprefix(f"{module}."),
        )
        for word, module, dot, _ in parts
        if dot
    ]


def parse_lines(path: str, text: str) -> list[ModuleLine]:
    """modprobe's lines; a backslash goes on in the next one, `-` and `_` are the same in names."""
    rows = [x.strip().split(None, 2) for x in text.replace("\\\n", " ").splitlines()]
    kept = [r for r in rows if len(r) > 1 and not r[0].startswith("#")]
    return [
        ModuleLine(
            path=path, word=r[0], module=r[1].replace("-", "_"), rest=r[2] if len(r) > 2 else ""
        )
        for r in kept
    ]


def other_values(lines: Sequence[ModuleLine], wanted: Sequence[str], ours: str) -> list[str]:
    """What files other than ours set to another value than ours do."""
    want = {
        (r.module, n): v for r in parse_lines(ours, "\n".join(wanted)) for n, v in r.options.items()
    }
    return [
        f"{row.path} has {name}={value}"
        for row in lines
        if row.word == "options" and row.path != ours
        for name, value in row.options.items()
        if want.get((row.module, name), value) != value
    ]
