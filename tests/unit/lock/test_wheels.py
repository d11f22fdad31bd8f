from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging import _manylinux, tags
from packaging.utils import parse_wheel_filename
from pydantic import ValidationError

from pipeline.core.errors import ResolveFailed
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.images.fetch import inputs
from pipeline.images.lock import make
from pipeline.images.lock.make import Transport, resolve_wheels, tag_ranks
from pipeline.images.lock.model import WheelPin, split_variant
from pipeline.images.spec.image import PythonSpec
from tests.testbed import fault_server as faults
from tests.testbed.fault_server import FaultServer
from tests.unit.support import AMD64, ARM64, make_wheel

SPEC = PythonSpec(requirements=["thing"])


def pylock(*files: str, **more: Any) -> dict[str, Any]:
    wheels = [{"name": f, "hashes": {"sha256": f"{n:064x}"}} for n, f in enumerate(files)]
    return {"packages": [{"name": "thing", "version": "1.0", "wheels": wheels, **more}]}


def choose_wheels(lock: dict[str, Any], spec: PythonSpec, platform: str) -> list[WheelPin]:
    """The wheels that are chosen where uv answers with this lock."""
    ask = Transport(nobody, nobody, lambda project, filename, sha256: 1)
    with mock.patch.object(make, "_ask_uv", return_value=lock):
        return resolve_wheels(spec, platform, ask)


def chosen(*tags: str, platform: str = AMD64, version: str = "3.11") -> str:
    files = [f"thing-1.0-{tag}.whl" for tag in tags]
    spec = PythonSpec(requirements=["thing"], version=version)
    results = set()
    for seed in range(4):
        random.Random(seed).shuffle(files)
        (pin,) = choose_wheels(pylock(*files), spec, platform)
        results.add(pin.file)
    (only,) = results
    return only.removeprefix("thing-1.0-").removesuffix(".whl")


@pytest.mark.parametrize(
    ("best", "others"),
    [
        (
            "cp311-cp311-manylinux_2_28_x86_64",
            ["py3-none-any", "cp312-cp312-manylinux_2_28_x86_64"],
        ),
        ("cp311-cp311-manylinux_2_28_x86_64", ["cp38-abi3-manylinux_2_28_x86_64"]),
        ("cp39-abi3-manylinux_2_28_x86_64", ["cp38-abi3-manylinux_2_28_x86_64", "py3-none-any"]),
        ("cp38-abi3-manylinux_2_17_x86_64", ["py3-none-manylinux_2_28_x86_64"]),
        ("cp311-abi3-manylinux2014_x86_64", ["py3-none-any", "cp312-abi3-manylinux2014_x86_64"]),
        ("cp311-cp311-manylinux_2_17_x86_64", ["cp311-cp311-manylinux2014_x86_64"]),
        (
            "cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64",
            ["cp311-cp311-manylinux2010_x86_64", "cp311-cp311-manylinux1_x86_64"],
        ),
        ("cp311-cp311-manylinux1_x86_64", ["cp311-cp311-linux_x86_64"]),
        ("cp311-cp311-manylinux_2_36_x86_64", ["cp311-cp311-manylinux_2_37_x86_64"]),
        ("cp311-cp311-manylinux_2_28_x86_64", ["cp311-cp311-musllinux_1_2_x86_64"]),
        ("cp311-cp311-manylinux_2_28_x86_64", ["cp311-cp311-manylinux_2_28_aarch64"]),
        ("cp311-cp311-manylinux_2_28_x86_64", ["cp311-cp311t-manylinux_2_28_x86_64"]),
        ("py3-none-manylinux_2_28_x86_64", ["py3-none-any", "py2.py3-none-any"]),
        ("py311-none-any", ["py3-none-any"]),
        ("py2.py3-none-any", ["cp311-cp311-win_amd64", "cp311-cp311-macosx_11_0_arm64"]),
        ("2-py3-none-any", ["1-py3-none-any", "py3-none-any"]),
        ("10-py3-none-any", ["9-py3-none-any"]),
        ("0-py3-none-any", ["py3-none-any"]),
    ],
)
def test_the_wheel_pip_would_take_is_chosen(best: str, others: list[str]) -> None:
    assert chosen(best, *others) == best


def test_another_platform_gets_another_wheel() -> None:
    both = ["cp311-cp311-manylinux_2_28_x86_64", "cp311-cp311-manylinux_2_28_aarch64"]
    assert chosen(*both, platform=ARM64) == both[1]
    assert chosen(*both, platform=AMD64) == both[0]


def test_another_python_gets_another_wheel() -> None:
    both = ["cp311-cp311-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_28_x86_64"]
    assert chosen(*both, version="3.12") == both[1]


@pytest.mark.parametrize(("platform", "machine"), [(AMD64, "x86_64"), (ARM64, "aarch64")])
def test_the_order_of_tags_is_that_of_pip_inside_debian_12(
    platform: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_manylinux, "_get_glibc_version", lambda: (2, 36))
    monkeypatch.setattr(_manylinux, "_have_compatible_abi", lambda executable, archs: True)
    platforms = [*_manylinux.platform_tags([machine]), f"linux_{machine}"]
    expected = [
        *tags.cpython_tags((3, 11), platforms=platforms),
        *tags.compatible_tags((3, 11), "cp311", platforms),
    ]
    ranks = tag_ranks("3.11", platform)
    assert sorted(ranks, key=ranks.__getitem__) == list(dict.fromkeys(expected))


@pytest.mark.parametrize(
    "files",
    [
        [],
        ["thing-1.0-cp311-cp311-win_amd64.whl"],
        ["thing-1.0-cp311-cp311-manylinux_2_28_aarch64.whl"],
        ["thing-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"],
        ["thing-1.0-cp311-cp311-musllinux_1_2_x86_64.whl"],
        ["thing-1.0-cp311-cp311-manylinux_2_39_x86_64.whl"],
        ["thing.whl"],
    ],
)
def test_no_wheel_for_the_platform_is_said_plainly(files: list[str]) -> None:
    with pytest.raises(ResolveFailed, match=r"thing 1\.0: no wheel for linux/amd64"):
        choose_wheels(pylock(*files), SPEC, AMD64)


def test_a_wheel_without_a_hash_is_not_locked() -> None:
    lock = pylock("thing-1.0-py3-none-any.whl")
    lock["packages"][0]["wheels"][0]["hashes"] = {}
    with pytest.raises(ResolveFailed, match="no sha256"):
        choose_wheels(lock, SPEC, AMD64)


def test_a_wheel_may_be_known_by_its_address_only() -> None:
    url = "https://example.invalid/a/thing-1.0%2Bcu130-py3-none-any.whl"
    lock = {"packages": [{"name": "Thing", "version": "1.0+cu130", "wheels": [{"url": url}]}]}
    lock["packages"][0]["wheels"][0]["hashes"] = {"sha256": "0" * 64}  # type: ignore[index]
    (pin,) = choose_wheels(lock, SPEC, AMD64)
    file = "thing-1.0+cu130-py3-none-any.whl"
    assert (pin.name, pin.version, pin.file) == ("thing", "1.0+cu130", file)


def test_what_is_left_out_on_purpose_needs_no_wheel() -> None:
    spec = PythonSpec(requirements=["thing"], omit={"thing": "not on this platform"})
    assert choose_wheels(pylock(), spec, AMD64) == []


# The real uv, against an index on loopback.


@pytest.fixture
def index(server: FaultServer, tmp_path: Path) -> FaultServer:
    folder = tmp_path / "wheels"
    for machine in ("x86_64", "aarch64"):
        make_wheel(
            folder, "thing", requires=["Dep_A>=1"], tag=f"cp311-cp311-manylinux_2_28_{machine}"
        )
    make_wheel(folder, "dep-a", "1.5", requires=['other; sys_platform == "win32"'])
    make_wheel(folder, "dep-a", "1.0")
    make_wheel(folder, "old", tag="cp311-cp311-win_amd64")
    for path in folder.iterdir():
        server.add(path.name, path.read_bytes())
    return server


def nobody(path: str, most_bytes: int) -> bytes:
    raise AssertionError(f"asked for {path}")


def resolve(
    requirements: list[str],
    settings: NetworkSettings,
    scratch: Path,
    platform: str = AMD64,
    *,
    needs_cuda: bool = False,
    override: dict[str, str] | None = None,
) -> dict[str, tuple[str, int]]:
    spec = PythonSpec(requirements=requirements, override=override or {})
    scratch.mkdir()
    with (
        mock.patch.object(inputs, "read_settings", return_value=settings),
        mock.patch.object(inputs, "NetClient", partial(NetClient, first_wait_s=0.001)),
    ):
        ask = inputs.make_transport()
    env = {**ask.index_env, "UV_CACHE_DIR": str(scratch / "cache")}
    ask = replace(ask, debian=nobody, debian_security=nobody, index_env=env)
    pins = resolve_wheels(spec, platform, ask, needs_cuda=needs_cuda)
    return {p.name: (p.file, p.size_bytes) for p in pins}


@pytest.mark.parametrize("platform", [AMD64, ARM64])
@pytest.mark.parametrize("page", [faults.JSON_PAGE, faults.HTML_PAGE])
def test_uv_resolves_for_any_platform_from_any_index(
    index: FaultServer, tmp_path: Path, platform: str, page: str
) -> None:
    index.page_type = page
    index.says_size = False
    chosen = resolve(["thing"], NetworkSettings(indexes=(index.index,)), tmp_path / "s", platform)
    machine = "x86_64" if platform == AMD64 else "aarch64"
    files = [f"thing-1.0-cp311-cp311-manylinux_2_28_{machine}.whl", "dep_a-1.5-py3-none-any.whl"]
    sizes = {name: len(index.files[f"/files/{name}"]) for name in files}
    assert chosen == {"thing": (files[0], sizes[files[0]]), "dep-a": (files[1], sizes[files[1]])}


@pytest.mark.parametrize("wanted", ["absent", "thing==9", "old", "dep-a<1"])
def test_what_cannot_be_resolved_is_told_in_uvs_words(
    index: FaultServer, tmp_path: Path, wanted: str
) -> None:
    with pytest.raises(ResolveFailed, match=wanted.split("=")[0].split("<")[0]):
        resolve([wanted], NetworkSettings(indexes=(index.index,)), tmp_path / "s")


@pytest.fixture
def unpublished(index: FaultServer, tmp_path: Path) -> NetworkSettings:
    """An engine that asks for a release candidate which has no wheel: sglang 0.5.18 to 0.5.22."""
    folder = tmp_path / "more"
    make_wheel(folder, "engine", requires=["tile==1.6.0rc5"])
    for version in ("1.6.0rc6", "1.7.0"):
        make_wheel(folder, "tile", version)
    return NetworkSettings(indexes=(index.index,), folders=(folder,))


def test_what_a_wheel_asks_for_and_nobody_published_is_refused_with_the_way_out(
    unpublished: NetworkSettings, tmp_path: Path
) -> None:
    with pytest.raises(ResolveFailed, match=r"tile==1\.6\.0rc5") as caught:
        resolve(["engine"], unpublished, tmp_path / "s")
    assert "`python: override:`" in caught.value.hint


@pytest.mark.parametrize("version", ["1.7.0", "1.6.0rc6"])
def test_an_override_takes_the_place_of_what_a_wheel_asks_for(
    unpublished: NetworkSettings, tmp_path: Path, version: str
) -> None:
    override = {f"tile=={version}": "no wheel of 1.6.0rc5 was published"}
    chosen = resolve(["engine"], unpublished, tmp_path / "s", override=override)
    assert chosen["tile"][0] == f"tile-{version}-py3-none-any.whl"


def test_an_override_of_what_nobody_asks_for_adds_nothing(
    index: FaultServer, tmp_path: Path
) -> None:
    override = {"tile==1.7.0": "nobody asks for it here"}
    settings = NetworkSettings(indexes=(index.index,))
    assert resolve(["dep-a"], settings, tmp_path / "s", override=override).keys() == {"dep-a"}


def test_a_second_index_is_asked_too(index: FaultServer, tmp_path: Path) -> None:
    index.fail("/empty/thing/", faults.status(404), 9)
    index.fail("/empty/dep-a/", faults.status(404), 9)
    settings = NetworkSettings(indexes=(f"{index.url}/empty/", index.index))
    assert resolve(["thing"], settings, tmp_path / "s").keys() == {"thing", "dep-a"}


def test_a_folder_alone_is_enough(index: FaultServer, tmp_path: Path) -> None:
    settings = NetworkSettings(indexes=(), folders=(tmp_path / "wheels", tmp_path / "gone"))
    assert resolve(["thing"], settings, tmp_path / "s").keys() == {"thing", "dep-a"}
    assert index.asked == []


@pytest.fixture
def two_kinds(index: FaultServer, tmp_path: Path) -> NetworkSettings:
    """An index with torch as published, and a folder with the same version for other machines."""
    index_wheels, folder = tmp_path / "published", tmp_path / "links"
    make_wheel(index_wheels, "torch", "2.13.0")
    make_wheel(index_wheels, "engine", requires=["torch==2.13.0"])
    for path in index_wheels.iterdir():
        index.add(path.name, path.read_bytes())
    for local in ("cpu", "cpu.cxx11.abi", "rocm6.4", "xpu"):
        make_wheel(folder, "torch", f"2.13.0+{local}")
    return NetworkSettings(indexes=(index.index,), folders=(folder,))


def test_an_image_with_CUDA_gets_no_build_for_another_machine(
    two_kinds: NetworkSettings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = resolve(["engine"], two_kinds, tmp_path / "s", needs_cuda=True)
    assert chosen["torch"][0] == "torch-2.13.0-py3-none-any.whl"
    assert "skipped, because the image needs CUDA: torch==2.13.0+xpu" in capfd.readouterr().err


def test_an_image_without_CUDA_gets_what_uv_chooses(
    two_kinds: NetworkSettings, tmp_path: Path
) -> None:
    chosen = resolve(["engine"], two_kinds, tmp_path / "s")
    assert chosen["torch"][0].startswith("torch-2.13.0+")


def test_a_build_for_CUDA_is_taken(two_kinds: NetworkSettings, tmp_path: Path) -> None:
    make_wheel(tmp_path / "links", "torch", "2.13.0+cu130")
    chosen = resolve(["engine"], two_kinds, tmp_path / "s", needs_cuda=True)
    assert chosen["torch"][0] == "torch-2.13.0+cu130-py3-none-any.whl"


@pytest.mark.parametrize("wanted", ["torch==2.13.0+cpu", "torch===2.13.0+rocm6.4"])
def test_a_build_without_CUDA_that_is_asked_for_is_refused(
    two_kinds: NetworkSettings, tmp_path: Path, wanted: str
) -> None:
    with pytest.raises(ResolveFailed, match=r"torch==2\.13\.0\+"):
        resolve([wanted], two_kinds, tmp_path / "s", needs_cuda=True)


def test_where_there_is_only_a_build_without_CUDA_nothing_is_locked(
    two_kinds: NetworkSettings, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "links", "torchaudio", "2.13.0+cpu")
    with pytest.raises(ResolveFailed, match=r"without torchaudio==2\.13\.0\+cpu"):
        resolve(["torchaudio"], two_kinds, tmp_path / "s", needs_cuda=True)


def test_uvs_words_show_no_password(index: FaultServer, tmp_path: Path) -> None:
    secret = "tr0ub4dor"
    index.login = f"me:{secret}"
    private = index.index.replace("://", f"://me:{secret}@")
    assert resolve(["thing"], NetworkSettings(indexes=(private,)), tmp_path / "s").keys() >= {
        "thing"
    }
    index.login = "me:changed"
    with pytest.raises(ResolveFailed) as caught:
        resolve(["thing"], NetworkSettings(indexes=(private,)), tmp_path / "t")
    assert secret not in str(caught.value)


def test_the_file_names_made_here_are_wheels(index: FaultServer) -> None:
    names = {parse_wheel_filename(path.rpartition("/")[2])[0] for path in index.files}
    assert "thing" in names


VARIANTS = [
    "thing-1.0-cp311-cp311-manylinux_2_28_x86_64-x86_64_v3.whl",
    "thing-1.0-2-cp311-cp311-manylinux_2_28_x86_64-null.whl",
    "thing-1.0-cp311-cp311-manylinux_2_28_aarch64-armv9.whl",
]


def test_a_variant_is_locked_only_by_the_label_that_a_spec_names() -> None:
    plain = "thing-1.0-py3-none-any.whl"
    (pin,) = choose_wheels(pylock(*VARIANTS, plain), SPEC, AMD64)
    assert pin.file == plain
    spec = PythonSpec(requirements=["thing"], variants={"thing": "x86_64_v3"})
    (pin,) = choose_wheels(pylock(*VARIANTS, plain), spec, AMD64)
    # the lock names the label, as the name of the file has it
    assert split_variant(pin.file) == (
        "thing-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "x86_64_v3",
    )


@pytest.mark.parametrize(
    ("variants", "files", "reason"),
    [
        ({}, VARIANTS, r"no wheel for linux/amd64 \(variants: armv9, null, x86_64_v3\)"),
        ({"thing": "v9"}, VARIANTS, r"no wheel of the variant 'v9' for linux/amd64 \(variants: ar"),
        ({"thing": "armv9"}, VARIANTS, "no wheel of the variant 'armv9'"),
        ({"thing": "v9"}, ["thing-1.0-py3-none-any.whl"], r"variant 'v9' .*\(variants: none\)"),
    ],
)
def test_an_unknown_variant_is_refused(
    variants: dict[str, str], files: list[str], reason: str
) -> None:
    spec = PythonSpec(requirements=["thing"], variants=variants)
    with pytest.raises(ResolveFailed, match=reason):
        choose_wheels(pylock(*files), spec, AMD64)


def test_a_spec_that_names_no_variant_is_hashed_as_before() -> None:
    assert "variants" not in SPEC.model_dump()
    with pytest.raises(ValidationError):
        PythonSpec(requirements=["thing"], variants={"thing": "Not A Label"})
