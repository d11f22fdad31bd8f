"""A toolchain's files are placed below their folder, whatever a foreign base names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.artifacts.oci.record import FileRow, Kind
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import HostileArchive
from pipeline.images.source import toolchain


def row(path: str, kind: str, target: str = "") -> FileRow:
    return FileRow(path, cast(Any, kind), 0o755, 4, "", 0, target, "")


def filled(folder: Path, monkeypatch: pytest.MonkeyPatch, *layers: list[FileRow]) -> Path:
    monkeypatch.setattr(toolchain, "read_pieces", lambda path, row: [b"text"])
    store = cast(Store, SimpleNamespace(blob_path=lambda digest: folder, contents=lambda x: x))
    image = SimpleNamespace(layers=[SimpleNamespace(record=rows) for rows in layers])
    root = folder / "root"
    found = {
        path: (SimpleNamespace(digest=""), row)
        for path, (_, row) in toolchain._rows(store, cast(Any, image)).items()
    }
    toolchain._fill(store, cast(Any, found), root)
    return root


@pytest.mark.parametrize(
    "upper",
    [
        [row("etc/evil", Kind.FILE)],
        [row("etc/evil", Kind.SYMLINK, "/tmp")],
        [row("etc/deep", Kind.DIR)],
        [row("a", Kind.FILE), row("etc/evil", Kind.HARDLINK, "a")],
        [row("evil", Kind.HARDLINK, "etc/own")],
    ],
)
def test_nothing_is_placed_or_read_through_a_link_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upper: list[FileRow]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "own").write_text("a file of this machine")
    base = [row("etc", Kind.SYMLINK, str(outside))]
    with pytest.raises(HostileArchive, match="is below a link or a file of the image"):
        filled(tmp_path, monkeypatch, base, upper)
    assert [x.name for x in outside.iterdir()] == ["own"]


def test_a_folder_over_a_link_is_a_folder_and_what_a_layer_deletes_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = [row("etc", Kind.SYMLINK, str(tmp_path)), row("old", Kind.FILE)]
    upper = [row("etc", Kind.DIR), row("etc/x", Kind.FILE), row("old", "whiteout")]
    root = filled(tmp_path, monkeypatch, base, upper)
    assert sorted(x.name for x in root.iterdir()) == ["etc"]
    assert (root / "etc/x").read_text() == "text"
