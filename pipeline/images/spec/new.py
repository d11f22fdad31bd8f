"""Writes specs for people to go on with: an image.yaml, one more patch in a series.

Edits go where they belong in the text; every other byte of a file stays.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.core.errors import SpecInvalid
from pipeline.core.files import os_errors_explained, write_bytes
from pipeline.core.yaml_file import mistakes
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ImageFile, ImageSpec, PatchSpec

SERIES = "patches/series.yaml"
_SCHEMA = "# yaml-language-server: $schema={up}{kind}.schema.json\n"
_STYLE: dict[str, Any] = {"sort_keys": False, "allow_unicode": True}


class _Indented(yaml.SafeDumper):
    """PyYAML puts the dashes of a list below its key, people two further in."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def new_image(
    checkout: Checkout,
    name: str,
    base: str,
    platforms: Sequence[str],
    summary: str,
    requirements: Sequence[str],
) -> Path:
    """Write the image.yaml of an image on another one, as short as it can be."""
    body = {
        "name": name,
        "summary": summary,
        "base": base,
        "platforms": list(platforms),
        # an empty list of requirements is refused
        **({"python": {"requirements": list(requirements)}} if requirements else {}),
    }
    path = _new_folder(checkout, body) / "image.yaml"
    # lists of one line, as people write them: [linux/amd64]
    style = {**_STYLE, "default_flow_style": None, "width": 100}
    text = _SCHEMA.format(up="../", kind="image") + yaml.safe_dump(body, **style)
    write_bytes(path, text.encode())
    return path


def copy_image(checkout: Checkout, name: str, like: str) -> Path:
    """Copy an image's folder under another name: its spec, files, patches and gates."""
    body = {**checkout.spec(like).model_dump(by_alias=True), "name": name}
    folder = _new_folder(checkout, body)
    with os_errors_explained(folder):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(checkout.folder(like), folder, ignore=ignore)
    path = folder / "image.yaml"
    # by its place in the text, so that all comments stay
    text = path.read_bytes().decode()
    old = _fields(yaml.compose(text, Loader=yaml.SafeLoader))["name"]
    start, end = old.start_mark.index, old.end_mark.index
    # quoted where it must be, such as a number
    quoted = yaml.safe_dump(name).splitlines()[0]
    write_bytes(path, f"{text[:start]}{quoted}{text[end:]}".encode())
    return path


def add_to_series(checkout: Checkout, spec: ImageSpec, patch: PatchSpec, text: str) -> list[Path]:
    """Put a patch next to the others of an image, last in its series; return what was written."""
    folder = checkout.folder(spec.name)
    series = folder / (spec.patches or SERIES)
    # the patch first: a series must not name a file that is not there
    write_bytes(series.parent / patch.file, text.encode())
    head = _SCHEMA.format(up="../../", kind="series") + "patches: []\n"
    before = series.read_bytes().decode() if series.exists() else head
    entry = patch.model_dump(mode="json", exclude_defaults=True)
    write_bytes(series, with_patch(before, entry).encode())
    written = [series.parent / patch.file, series]
    if spec.patches is None:
        path = folder / "image.yaml"
        # one more field at its end; every other byte stays
        root = yaml.compose(image := path.read_bytes().decode(), Loader=yaml.SafeLoader)
        if root.flow_style:
            end = root.end_mark.index - 1
            image = f'{image[:end]}, "patches": {json.dumps(SERIES)}{image[end:]}'
        else:
            image = f"{image.rstrip(chr(10))}\npatches: {SERIES}\n"
        write_bytes(path, image.encode())
        written.append(path)
    return written


def next_patch_name(folder: Path, title: str) -> str:
    """`0002-what.patch`: after the highest number that is there."""
    numbers = [int(m[1]) for p in folder.glob("*.patch") if (m := re.match(r"(\d+)", p.name))]
    plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "patch"
    return f"{max(numbers, default=0) + 1:04d}-{plain}.patch"


def with_patch(text: str, entry: dict[str, object]) -> str:
    """A series.yaml with one more patch at its end; every other byte stays."""
    patches = _fields(yaml.compose(text, Loader=yaml.SafeLoader))["patches"]
    is_json = text.lstrip().startswith("{")
    if patches.flow_style and not is_json and not patches.value:
        start, end = patches.start_mark.index, patches.end_mark.index
        return f"{text[:start].rstrip()}\n{_indented([entry], 2)}{text[end:].lstrip(chr(10))}"
    if patches.flow_style:
        # JSON is YAML of this style
        end = patches.end_mark.index - 1
        comma = ", " if patches.value else ""
        return f"{text[:end]}{comma}{json.dumps(entry, ensure_ascii=False)}{text[end:]}"
    # `patches` is the only field, so its end is that of the file
    return text.rstrip("\n") + "\n" + _indented([entry], patches.start_mark.column)


def _fields(node: Any) -> dict[str, Any]:
    return {key.value: value for key, value in node.value}


def _new_folder(checkout: Checkout, body: dict[str, Any]) -> Path:
    """The folder of a new image, whose spec must be valid and whose name must be free."""
    try:
        ImageFile.model_validate(body)
    except ValidationError as error:
        raise SpecInvalid(f"{body['name']}: {mistakes(error)}", "Nothing was written.") from error
    folder = checkout.folder(body["name"])
    if folder.exists():
        raise SpecInvalid(f"{folder}: is there already", "Edit it, or choose another name.")
    return folder


def _indented(entries: list[dict[str, object]], column: int) -> str:
    lines = yaml.dump(entries, Dumper=_Indented, width=100 - column, **_STYLE)
    return "".join(f"{' ' * column}{line}\n" for line in lines.splitlines())


def with_hashes(text: str, hashes: Mapping[tuple[int, int], Mapping[str, str]]) -> str:
    """Replaces `before` and `after` of some files in the text, or adds them where they are missing.

    It goes by the position of an entry and of a file in it, not by the old value: new entries may
    have none, or all the same one.
    """
    patches = _fields(yaml.compose(text, Loader=yaml.SafeLoader))["patches"]
    edits: list[tuple[int, int, str]] = []
    for (entry, at), new in hashes.items():
        file = _fields(patches.value[entry])["files"].value[at]
        values, added = _fields(file), ""
        # a flow mapping, {path: …}, has its keys on one line
        between = ", " if file.flow_style else "\n" + " " * file.value[0][0].start_mark.column
        for key, value in new.items():
            if key not in values:
                added += f"{between}{key}: {value}"
                continue
            start, end = values[key].start_mark.index, values[key].end_mark.index
            # an empty value (`before:`) ends at its colon
            edits.append((start, end, value if end > start else f" {value}"))
        end = values["path"].end_mark.index
        edits.append((end, end, added))
    # from the end, so that places before an edit stay where they are
    for start, end, value in sorted(edits, reverse=True):
        text = f"{text[:start]}{value}{text[end:]}"
    return text
