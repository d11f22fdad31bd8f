"""Small wheels, and what a layer makes of them."""

from __future__ import annotations

import csv
import hashlib
import io
import zlib
from pathlib import Path

from pipeline.artifacts.oci.record import WrittenLayer
from pipeline.images.assemble.layer import Entry, Slice, with_parents, write_layer
from pipeline.images.assemble.venv import Venv, wheel_entries
from pipeline.images.assemble.wheel import Wheel, open_wheel
from tests.makers import Parts, make_wheel, record_line, record_of, wheel_parts

VENV = Venv()
SITE = "opt/venv/lib/python3.11/site-packages"
INFO = "pkg-1.0.dist-info"
MODULE = b"def main() -> int:\n    return 0\n" * 20
GOOD: Parts = {"pkg/__init__.py": b"", "pkg/mod.py": MODULE}


def opened(path: Path) -> Wheel:
    return open_wheel(path, path.name)


def placed(path: Path) -> dict[str, Entry]:
    return {entry.path: entry for entry in wheel_entries(opened(path), VENV)}


def written(path: Path) -> WrittenLayer:
    """All checks of a wheel: its directory, then its bytes."""
    return write_layer(with_parents(wheel_entries(opened(path), VENV)), io.BytesIO())


def content(entry: Entry) -> bytes:
    data = entry.content
    assert data is not None
    if isinstance(data, bytes):
        return data
    raw = Path(data.path).read_bytes()[data.offset :]
    if isinstance(data, Slice):
        return raw[: data.size_bytes]
    return zlib.decompress(raw[: data.packed_bytes], -15)


def with_points(text: str, **parts: bytes) -> Parts:
    return {**GOOD, **parts, f"{INFO}/entry_points.txt": text.encode()}


def rows(entries: dict[str, Entry]) -> dict[str, list[str]]:
    text = content(entries[f"{SITE}/{INFO}/RECORD"]).decode()
    return {row[0]: row[1:] for row in csv.reader(io.StringIO(text))}


def lying(tmp_path: Path, record: str, parts: Parts | None = None) -> Path:
    """A wheel with RECORD as given, after true rows for its metadata."""
    others = {n: p for n, p in wheel_parts("pkg", "1.0", {}).items() if "RECORD" not in n}
    text = record_of(others, f"{INFO}/RECORD") + record
    return make_wheel(tmp_path, "pkg", {**(parts or GOOD), f"{INFO}/RECORD": text.encode()})


TRUE = record_line("pkg/__init__.py", b"") + record_line("pkg/mod.py", MODULE)
DIGEST = record_line("", MODULE).split(",")[1]
LIES = {
    "wrong hash": TRUE.replace(DIGEST, record_line("", b"other").split(",")[1]),
    "missing row": record_line("pkg/__init__.py", b""),
    "extra row": TRUE + record_line("pkg/more.py", b""),
    "sha1": TRUE.replace(DIGEST, "sha1=" + hashlib.sha1(MODULE).hexdigest()),
    "md5": TRUE.replace(DIGEST, "md5=abc"),
    "no hash": TRUE.replace(DIGEST, ""),
    "no fields": TRUE.replace(f",{DIGEST},{len(MODULE)}", ""),
    "empty hash": TRUE.replace(DIGEST, "sha256="),
    "short hash": TRUE.replace(DIGEST, "sha256=abcd"),
    "not base64": TRUE.replace(DIGEST, "sha256=a"),
    "contradicts itself": TRUE + record_line("pkg/mod.py", b"other"),
    "not CSV": TRUE + '"' + "x" * 200_000,
    "a path that leaves": TRUE + record_line("../../etc/passwd", b""),
}
