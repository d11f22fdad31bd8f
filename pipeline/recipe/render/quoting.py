"""Words as shells and systemd read them back unchanged."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence

# What systemd takes as it stands in a command line.
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


def systemd_word(word: str) -> str:
    """One word of ExecStart= or Environment=, or of a quadlet's Exec=."""
    # `%` begins a specifier, `$` a variable, also within quotes
    escaped = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(escaped):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'


def systemd_value(text: str) -> str:
    """A whole value that is no command line, such as Description=."""
    return text.replace("%", "%%")


def shell_lines(groups: Sequence[Sequence[str]]) -> str:
    """A command for a shell, a group of words on each line."""
    return continued(groups, shlex.quote) + "\n"


def continued(groups: Sequence[Sequence[str]], quote: Callable[[str], str]) -> str:
    """Groups of words on lines that are one command."""
    return " \\\n  ".join(" ".join(map(quote, group)) for group in groups if group)


def grouped(arguments: Sequence[str]) -> list[list[str]]:
    """Each flag with its values, so that every flag has its line."""
    groups: list[list[str]] = []
    for word in arguments:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups
