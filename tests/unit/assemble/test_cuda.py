from __future__ import annotations

import posixpath

import pytest

from pipeline.artifacts.oci.record import Kind
from pipeline.core.errors import PathConflict, SpecInvalid
from pipeline.images.assemble.own_layers import cuda_home

HOME = "/usr/local/cuda"
NVCC = "site/nvidia/nvcc"
RUNTIME = "site/nvidia/runtime"
PATHS = [
    f"{NVCC}/bin/nvcc",
    f"{NVCC}/nvvm/bin/cicc",
    f"{NVCC}/include/crt/host.h",
    f"{NVCC}/include/fatbinary.h",
    f"{NVCC}/__init__.py",
    f"{RUNTIME}/include/cuda.h",
    f"{RUNTIME}/include/crt/math.h",
    f"{RUNTIME}/lib/libcudart.so.12",
    f"{RUNTIME}/lib/libcudart_static.a",
    f"{RUNTIME}/__init__.py",
    "site/other/include/cuda.h",
]


def home(paths: list[str], *sources: str, architecture: str = "amd64") -> dict[str, str]:
    entries = cuda_home(paths, HOME, sources, architecture)
    assert all(entry.kind is Kind.SYMLINK for entry in entries)
    links = {entry.path.removeprefix("usr/local/cuda/"): entry.target for entry in entries}
    assert len(links) == len(entries)
    return links


def test_a_folder_of_one_source_is_one_link() -> None:
    links = home(PATHS, NVCC, RUNTIME)
    assert links["nvvm"] == f"/{NVCC}/nvvm"


def test_bin_is_a_folder_so_that_nvcc_finds_lib64_beside_it() -> None:
    links = home(PATHS, NVCC)
    assert links["bin/nvcc"] == f"/{NVCC}/bin/nvcc"
    assert "bin" not in links


def test_a_folder_of_several_sources_is_made_and_its_contents_linked() -> None:
    links = home(PATHS, NVCC, RUNTIME)
    assert links["include/fatbinary.h"] == f"/{NVCC}/include/fatbinary.h"
    assert links["include/cuda.h"] == f"/{RUNTIME}/include/cuda.h"
    assert links["include/crt/host.h"] == f"/{NVCC}/include/crt/host.h"
    assert links["include/crt/math.h"] == f"/{RUNTIME}/include/crt/math.h"
    assert "include" not in links


def test_every_file_is_reached_and_no_link_lies_below_another() -> None:
    links = home(PATHS, NVCC, RUNTIME)
    for path in PATHS[:-1]:
        source = NVCC if path.startswith(NVCC) else RUNTIME
        below = path.removeprefix(f"{source}/")
        above = [below, *(below[:i] for i, c in enumerate(below) if c == "/")]
        assert any(p in links for p in above), path
    for path in links:
        assert not any(path.startswith(f"{other}/") for other in links)


def test_the_first_source_wins_where_both_have_a_file() -> None:
    assert home(PATHS, NVCC, RUNTIME)["__init__.py"] == f"/{NVCC}/__init__.py"
    assert home(PATHS, RUNTIME, NVCC)["__init__.py"] == f"/{RUNTIME}/__init__.py"


def test_linkers_find_a_library_without_its_number() -> None:
    links = home(PATHS, RUNTIME)
    assert links["lib/libcudart.so.12"] == f"/{RUNTIME}/lib/libcudart.so.12"
    assert links["lib/libcudart.so"] == "libcudart.so.12"
    assert "lib/libcudart_static" not in links


def test_a_library_that_has_its_plain_name_keeps_it() -> None:
    paths = [f"{RUNTIME}/lib/libx.so", f"{RUNTIME}/lib/libx.so.1", f"{RUNTIME}/lib/liby.so.2.3.4"]
    links = home(paths, RUNTIME)
    assert links["lib/libx.so"] == f"/{RUNTIME}/lib/libx.so"
    assert links["lib/liby.so"] == "liby.so.2.3.4"


def test_lib64_leads_to_lib() -> None:
    assert home(PATHS, NVCC)["lib64"] == "lib"


def test_a_source_with_its_own_lib64_keeps_it() -> None:
    assert home([f"{NVCC}/lib64/libx.a"], NVCC)["lib64"] == f"/{NVCC}/lib64"


@pytest.mark.parametrize(
    ("architecture", "triplet"), [("amd64", "x86_64-linux-gnu"), ("arm64", "aarch64-linux-gnu")]
)
def test_the_stub_leads_to_the_driver(architecture: str, triplet: str) -> None:
    links = home(PATHS, RUNTIME, architecture=architecture)
    assert links["lib/stubs/libcuda.so"] == f"/usr/lib/{triplet}/libcuda.so.1"


def test_the_stub_stands_beside_those_a_wheel_ships() -> None:
    links = home([f"{RUNTIME}/lib/stubs/libnvml.so", f"{RUNTIME}/lib/libx.so.1"], RUNTIME)
    assert links["lib/stubs/libnvml.so"] == f"/{RUNTIME}/lib/stubs/libnvml.so"
    assert posixpath.basename(links["lib/stubs/libcuda.so"]) == "libcuda.so.1"
    assert "lib/stubs" not in links


def test_a_stub_that_a_wheel_ships_is_used() -> None:
    links = home([f"{RUNTIME}/lib/stubs/libcuda.so"], RUNTIME)
    assert links["lib/stubs/libcuda.so"] == f"/{RUNTIME}/lib/stubs/libcuda.so"


def test_the_same_path_from_two_layers_counts_once() -> None:
    assert home(PATHS + PATHS, NVCC, RUNTIME) == home(PATHS, NVCC, RUNTIME)


@pytest.mark.parametrize("sources", [("site/nvidia/none",), (NVCC, "site/nvidia/nvc")])
def test_a_source_that_no_wheel_has_is_refused(sources: tuple[str, ...]) -> None:
    with pytest.raises(SpecInvalid, match="no wheel has anything below"):
        home(PATHS, *sources)


def test_a_file_here_and_a_folder_there_is_refused() -> None:
    for order in ((NVCC, RUNTIME), (RUNTIME, NVCC)):
        with pytest.raises(PathConflict, match="include"):
            home([f"{NVCC}/include/x.h", f"{RUNTIME}/include"], *order)


def test_a_file_below_a_file_is_refused() -> None:
    with pytest.raises(PathConflict, match="which is a file"):
        home([f"{NVCC}/include", f"{NVCC}/include/x.h"], NVCC)


def test_an_architecture_without_a_name_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        home(PATHS, NVCC, architecture="riscv64")
