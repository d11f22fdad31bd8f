"""A reader of unit files, written from systemd.syntax(7) and systemd.service(5)."""

from __future__ import annotations

import re

_BLANKS = " \t\n\r"  # none beyond ASCII ends a word


def settings(text: str, section: str) -> list[tuple[str, str]]:
    """The settings of a section, with continued lines joined and comments left out."""
    found, here, joined = [], "", ""
    for line in text.splitlines():
        # also within a continued line
        if line.lstrip().startswith(("#", ";")):
            continue
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        whole, joined = joined + line, ""
        if whole.startswith("["):
            here = whole.strip("[]")
        elif whole and here == section:
            key, _, value = whole.partition("=")
            found.append((key, value))
    return found


def words(line: str) -> list[str]:
    """The words of a command line, with quotes, escapes, specifiers and variables resolved."""
    found: list[str] = []
    rest = line.strip(_BLANKS)
    while rest:
        assert not re.match(r";(\s|$)", rest), "a `;` of its own begins another command"
        word, rest = _word(rest)
        found.append(_resolved(word))
        rest = rest.lstrip(_BLANKS)
    return found


def _word(text: str) -> tuple[str, str]:
    word, quote, at = "", "", 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            assert text[at + 1] in "\\\"'", f"{text[at : at + 2]} is another character"
            word, at = word + text[at + 1], at + 1
        elif quote:
            word, quote = (word, "") if char == quote else (word + char, quote)
        elif char in "\"'" and not word:
            quote = char
        elif char in _BLANKS:
            break
        else:
            word += char
        at += 1
    assert not quote, "a quote has no end"
    return word, text[at:]


def _resolved(word: str) -> str:
    plain = re.sub(r"%%|\$\$", "", word)
    assert "%" not in plain, f"{word} holds a specifier"
    assert "$" not in plain, f"{word} holds a variable"
    return word.replace("%%", "%").replace("$$", "$")
