"""Which libraries an image's files ask for, and where the loader finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.images.start_test.inside.libraries import (
    Loader,
    linked_files,
    missing_libraries,
    read_needs,
)
from tests.unit.start_test.elf_file import AMD, ARM, write_elf

PACKAGES = "opt/venv/lib/python3.11/site-packages"


def missing(root: Path, library_path: str = "", machine: int = ARM) -> dict[str, list[str]]:
    files = list(linked_files(str(root)))
    loader = Loader(files, {"LD_LIBRARY_PATH": library_path}, str(root))
    found = missing_libraries(files, loader, machine)
    return {name: [by.removeprefix(str(root)) for by in each] for name, each in found.items()}


def test_what_a_library_needs_is_read_from_its_bytes(tmp_path: Path) -> None:
    path = write_elf(
        tmp_path / "x.so", ["liba.so.1", "libb.so"], soname="libx.so.2", runpath="$ORIGIN:/opt/lib"
    )
    needs = read_needs(path)
    assert needs
    assert (needs.machine, needs.soname) == (ARM, "libx.so.2")
    assert (needs.needed, needs.rpath) == (("liba.so.1", "libb.so"), ())
    assert needs.runpath == ("$ORIGIN", "/opt/lib")


@pytest.mark.parametrize("keep", [0, 10, 63, 100, 180, 200])
def test_a_file_that_is_cut_off_needs_nothing(tmp_path: Path, keep: int) -> None:
    path = write_elf(tmp_path / "x.so", ["liba.so.1"])
    path.write_bytes(path.read_bytes()[:keep])
    needs = read_needs(path)
    assert needs is None or needs.needed == ()


def test_a_library_with_a_table_of_many_megabytes_is_read(tmp_path: Path) -> None:
    path = write_elf(tmp_path / "libcusparseLt.so.0", ["libc.so.6"], soname="libcusparseLt.so.0")
    with path.open("r+b") as file:
        file.truncate(40 << 20)
    needs = read_needs(path)
    assert needs
    assert needs.soname == "libcusparseLt.so.0"


def test_a_file_of_another_kind_needs_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("/* GNU ld script */ INPUT ( libncurses.so.6 )\n")
    assert read_needs(tmp_path / "x.so") is None
    assert read_needs(tmp_path / "nothing") is None
    assert read_needs(tmp_path) is None


def test_a_library_that_nothing_answers_to_is_missing_and_its_asker_is_named(
    tmp_path: Path,
) -> None:
    write_elf(tmp_path / "usr/bin/tool", ["libgone.so.1", "libc.so.6"])
    write_elf(tmp_path / "usr/lib/x.so", ["libgone.so.1"])
    write_elf(tmp_path / "usr/lib/aarch64-linux-gnu/libc.so.6")
    assert missing(tmp_path) == {"libgone.so.1": ["/usr/bin/tool", "/usr/lib/x.so"]}


PLACES = {
    "usual folder": ("usr/lib/aarch64-linux-gnu/liba.so.1", {}, ""),
    "its own folder": ("opt/x/liba.so.1", {"runpath": "$ORIGIN"}, ""),
    "a folder beside it": ("opt/libs/liba.so.1", {"runpath": "${ORIGIN}/../libs"}, ""),
    "an old rpath": ("opt/libs/liba.so.1", {"rpath": "/opt/libs"}, ""),
    "the environment": ("usr/local/cuda/lib64/liba.so.1", {}, "/usr/local/cuda/lib64"),
    "ld.so.conf": ("opt/conf/liba.so.1", {}, ""),
}


@pytest.mark.parametrize(("place", "paths", "library_path"), PLACES.values(), ids=PLACES)
def test_a_library_is_found_where_the_loader_looks(
    tmp_path: Path, place: str, paths: dict[str, str], library_path: str
) -> None:
    (tmp_path / "etc/ld.so.conf.d").mkdir(parents=True)
    (tmp_path / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    (tmp_path / "etc/ld.so.conf.d/own.conf").write_text("# our own\n/opt/conf\n")
    write_elf(tmp_path / "opt/x/x.so", ["liba.so.1"], **paths)  # type: ignore[arg-type]
    assert missing(tmp_path, library_path) == {"liba.so.1": ["/opt/x/x.so"]}
    write_elf(tmp_path / place)
    assert missing(tmp_path, library_path) == {}


def test_a_library_elsewhere_does_not_count_for_a_program_of_the_system(tmp_path: Path) -> None:
    write_elf(tmp_path / "usr/bin/tool", ["liba.so.1"])
    write_elf(tmp_path / f"{PACKAGES}/a.libs/liba.so.1", soname="liba.so.1")
    assert missing(tmp_path) == {"liba.so.1": ["/usr/bin/tool"]}


def test_python_packages_load_each_others_libraries_first(tmp_path: Path) -> None:
    write_elf(tmp_path / f"{PACKAGES}/vllm/_C.so", ["libtorch.so"])
    write_elf(tmp_path / f"{PACKAGES}/torch/lib/libtorch.so", soname="libtorch.so")
    assert missing(tmp_path) == {}


def test_a_package_does_not_load_libraries_of_the_system_from_odd_places(tmp_path: Path) -> None:
    write_elf(tmp_path / f"{PACKAGES}/x/_C.so", ["libgomp.so.1"])
    write_elf(tmp_path / "usr/lib/aarch64-linux-gnu/libgomp.so.1.0.0", soname="libgomp.so.1")
    assert list(missing(tmp_path)) == ["libgomp.so.1"]


def test_a_file_that_is_no_library_does_not_answer_for_one(tmp_path: Path) -> None:
    write_elf(tmp_path / "usr/bin/tool", ["liba.so.1"])
    (tmp_path / "usr/lib").mkdir()
    (tmp_path / "usr/lib/liba.so.1").write_text("junk\n")
    assert list(missing(tmp_path)) == ["liba.so.1"]


def test_a_link_to_a_library_answers_and_one_to_nothing_does_not(tmp_path: Path) -> None:
    write_elf(tmp_path / "usr/bin/tool", ["liba.so.1"])
    (tmp_path / "usr/lib").mkdir()
    (tmp_path / "usr/lib/liba.so.1").symlink_to("liba.so.1.2.3")
    assert list(missing(tmp_path)) == ["liba.so.1"]
    write_elf(tmp_path / "usr/lib/liba.so.1.2.3")
    assert missing(tmp_path) == {}


def test_a_library_for_another_processor_does_not_answer(tmp_path: Path) -> None:
    write_elf(tmp_path / "usr/bin/tool", ["liba.so.1"])
    write_elf(tmp_path / "usr/lib/liba.so.1", machine=AMD)
    assert list(missing(tmp_path)) == ["liba.so.1"]


def test_code_for_another_processor_is_data_here(tmp_path: Path) -> None:
    write_elf(tmp_path / "usr/lib/firmware.so", ["libgone.so"], machine=AMD)
    assert missing(tmp_path) == {}
    assert list(missing(tmp_path, machine=AMD)) == ["libgone.so"]
