"""The hashes in a series.yaml, written where they belong; every other byte of the file stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import yaml

# an entry of the series and a file of that entry, both counted from 0
Place = tuple[int, int]


def with_hashes(text: str, hashes: Mapping[Place, Mapping[str, str]]) -> str:
    """The text with `before` and `after` of some files replaced, or added where they are missing.

    By position and not by the old value: new entries may have none, or all the same one.
    """
    patches = _values(yaml.compose(text, Loader=yaml.SafeLoader))["patches"]
    edits: list[tuple[int, int, str]] = []
    for (entry, at), new in hashes.items():
        edits += _edits(_values(patches.value[entry])["files"].value[at], new)
    # from the end, so that places before an edit stay where they are
    for start, end, value in sorted(edits, reverse=True):
        text = f"{text[:start]}{value}{text[end:]}"
    return text


def _values(node: yaml.Node) -> dict[str, yaml.Node]:
    return {key.value: value for key, value in node.value}


def _edits(file: yaml.MappingNode, new: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    values, added = _values(file), ""
    # a flow mapping, {path: …}, has its keys on one line
    between = ", " if file.flow_style else "\n" + " " * file.value[0][0].start_mark.column
    for key, value in new.items():
        if key in values:
            start, end = values[key].start_mark.index, values[key].end_mark.index
            # an empty value (`before:`) ends at its colon
            yield start, end, value if end > start else f" {value}"
        else:
            added += f"{between}{key}: {value}"
    if added:
        end = values["path"].end_mark.index
        yield end, end, added
