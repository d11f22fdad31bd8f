"""The flags of mainline llama.cpp, read from the table in its source.

For images that take hours to compile. `common/arg.cpp` is a list of `add_opt(common_arg(…))`: the
names, those with the opposite meaning, a hint for each value, and a handler whose parameters say
what the value is.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.assemble.plan import TreePlan
from pipeline.errors import ParserUnreadable, SpecInvalid
from pipeline.files import sha256_of_file

TABLE = "common/arg.cpp"
_MOST_BYTES = 4 << 20
_ENTRY = "add_opt(common_arg("
_NAMES = re.compile(r'\{((?:\s*"-[^"]+"\s*,?)+)\}\s*,\s*')
_HINT = re.compile(r'"((?:[^"\\]|\\.)*)"\s*,\s*')
_HANDLER = re.compile(r"\[[^\]]*\]\s*\(common_params &\s*\w*\s*(?:, ([^)]*))?\)")
_REMOVED = re.compile(r'arg_removed\("([^"]*)"\)')
_COMMENT = re.compile(r"/\*.*?\*/|^\s*//[^\n]*\n", re.DOTALL | re.MULTILINE)
_EXAMPLES = re.compile(r"set_examples\(\{([^}]*)\}\)")
_VARIABLE = re.compile(r'set_env\("(\w+)"\)')
_LISTED = re.compile(r"^[\[{(]?([\w-]+(?:[|,][\w-]+)+)[\]})]?$")
_REPEATED = re.compile(r"be repeated|repeat to|multiple times|push_back|parse_tensor_buffer_over")


def read_source(archive: Path, tree: TreePlan) -> dict[str, Any]:
    """What the parser accepts, from the archive that the source is locked to."""
    pin = tree.lock.archive
    if sha256_of_file(archive) != f"sha256:{pin.sha256}":
        raise SpecInvalid(
            f"{archive}: is not the archive that {tree.source.name} is locked to",
            f"Name {pin.file} as the lock has it.",
        )
    name = f"{tree.source.archive.below}/{TABLE}"
    with tarfile.open(archive) as opened:
        member = opened.extractfile(name)
        text = member.read(_MOST_BYTES).decode("utf-8", "replace") if member else ""
    described = read_table(text)
    if not described["flags"]:
        raise ParserUnreadable(f"{archive}: {name} holds no table of flags", "")
    return {**described, "version": tree.source.upstream.commit[:8]}


def read_table(text: str) -> dict[str, Any]:
    """The flags of `llama-server` in the text of `common/arg.cpp`."""
    flags: dict[str, Any] = {}
    variables: set[str] = set()
    for entry in _COMMENT.sub("", text).split(_ENTRY)[1:]:
        variables.update(_VARIABLE.findall(entry))
        names = _NAMES.match(entry.lstrip())
        if names and _is_for_the_server(entry):
            own, flag = _flag(names, entry.lstrip()[names.end() :])
            flags[own] = flag
    return {
        "flags": flags,
        "syntax": "llama",
        "prefixes": ["LLAMA_ARG_"],
        "variables": sorted(name for name in variables if name.startswith("LLAMA_ARG_")),
    }


def _is_for_the_server(entry: str) -> bool:
    listed = _EXAMPLES.search(entry)
    return listed is None or bool({"LLAMA_EXAMPLE_SERVER", "LLAMA_EXAMPLE_COMMON"} & _words(listed))


def _words(listed: re.Match[str]) -> set[str]:
    return set(re.findall(r"\w+", listed[1]))


def _flag(names: re.Match[str], rest: str) -> tuple[str, dict[str, Any]]:
    own, opposite = _spellings(names), []
    if off := _NAMES.match(rest):
        opposite, rest = _spellings(off), rest[off.end() :]
    handler = _HANDLER.search(rest)
    values = [v for v in ((handler and handler[1]) or "").split(",") if v and "bool" not in v]
    flag: dict[str, Any] = {
        "takes": ("none", "one", "many")[min(len(values), 2)],
        "aliases": own[1:],
        "off": opposite,
        "repeats": bool(_REPEATED.search(rest)),
    }
    if removed := _REMOVED.search(rest):
        flag["retired"] = removed[1]
    elif len(values) == 1:
        flag |= dict(_value(values[0], rest))
    return own[0], flag


def _spellings(match: re.Match[str]) -> list[str]:
    """Long names first, as in the other engines' files."""
    found = re.findall(r'"([^"]+)"', match[1])
    return sorted(found, key=lambda name: not name.startswith("--"))


def _value(parameter: str, rest: str) -> Iterator[tuple[str, Any]]:
    if parameter.split()[0] == "int":
        yield "type", "integer"
    elif "json::parse(value)" in rest:
        yield "type", "json"
    hint = _HINT.match(rest)
    # `[on|off|auto]`; in `{a,b}` too, but `N0,N1,N2` are no values
    if hint and (listed := _LISTED.match(hint[1])) and hint[1][0] in "[{(":
        words = re.split(r"[|,]", listed[1])
        # llama.cpp takes more words for on and off than it names
        if not {"on", "off"} <= set(words):
            yield "choices", words
