from __future__ import annotations

from pathlib import Path

from pipeline.artifacts.store.store import Store
from pipeline.images.source.objects import (
    STATS,
    count_objects,
    kept_objects,
    objects_folder,
    replaced_objects,
)

RESULT, OTHER = "0/3/" + "a" * 30 + "R", "0/3/" + "b" * 30 + "R"
MANIFEST = "0/3/" + "c" * 30 + "M"


def write(store: Store, name: str, data: bytes) -> None:
    path = objects_folder(store) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".tmp")
    new.write_bytes(data)
    new.replace(path)  # as ccache writes


def test_a_kept_object_that_was_written_anew_was_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in (RESULT, OTHER, MANIFEST):
        write(store, name, b"1234")
    before = kept_objects(store)
    assert replaced_objects(store, before) == 0
    write(store, MANIFEST, b"12345678")  # a manifest grows, and is not damaged
    (objects_folder(store) / OTHER).touch()  # as ccache does where it uses one
    write(store, "0/3/" + "d" * 30 + "R", b"new")
    assert replaced_objects(store, before) == 0
    write(store, RESULT, b"5678")
    assert replaced_objects(store, before) == 1


def test_objects_are_counted_by_what_ccache_wrote_for_each_compiler(tmp_path: Path) -> None:
    assert (count_objects(tmp_path).compiled, count_objects(tmp_path).kept) == (0, 0)
    lines = "# a\ncache_miss\n# b\ndirect_cache_hit\n# c\npreprocessed_cache_hit\n"
    (tmp_path / STATS).write_text(lines)
    counts = count_objects(tmp_path)
    assert (counts.compiled, counts.kept, counts.imported, counts.manifests) == (1, 2, 0, [])
