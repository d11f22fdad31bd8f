"""What FlashInfer is offered of an image's modules: whole ones, of this version and these cards."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.images.assemble.plan import MODULE_READER

LISTS = '{"modules": {"flashinfer": "0", "architectures": "", "site": "", "entries": []}}'
FILES = {"page": b"library of page", "norm": b"library of norm"}


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image's folder with two modules, and a FlashInfer that they are for."""
    site = tmp_path / "site"
    for name, data in FILES.items():
        path = tmp_path / "warm/flashinfer" / name / f"{name}.so"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    entries = {name: {"sha256": hashlib.sha256(data).hexdigest()} for name, data in FILES.items()}
    modules = {"flashinfer": "0.7.0", "architectures": "12.0f", "site": str(site)}
    index = {"modules": {**modules, "entries": entries}}
    (tmp_path / "warm/index.json").write_text(json.dumps(index))
    package = types.ModuleType("flashinfer")
    version = types.ModuleType("flashinfer.version")
    version.__version__ = "0.7.0"  # type: ignore[attr-defined]
    version.__file__ = str(site / "flashinfer/version.py")
    package.version = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.version", version)
    monkeypatch.setenv("SM120_WARM", str(tmp_path / "warm"))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "12.0f")
    # the reader sets it: what is there before and after is noted here
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "")
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    return tmp_path / "warm"


@pytest.fixture
def reader(warm: Path) -> Callable[[], Any]:
    """Loads the reader anew, as a process of the engine does."""

    def load() -> Any:
        spec = importlib.util.spec_from_file_location("module_reader_here", MODULE_READER)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def edited(warm: Path, **changes: object) -> None:
    path = warm / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({"modules": {**index["modules"], **changes}}))


def test_both_generations_of_flashinfer_find_whole_modules(
    reader: Callable[[], Any], warm: Path
) -> None:
    offered = reader()
    assert offered.__version__ == "0.7.0"
    assert offered.get_jit_cache_dir() == str(warm / "flashinfer")
    (provider,) = offered.get_jit_cache_providers()
    assert provider.modules == ["norm", "page"]
    assert provider.cuda_architectures == ["sm120f"]
    assert (provider.version, provider.jit_cache_dir) == ("0.7.0", str(warm / "flashinfer"))


def flip(warm: Path) -> None:
    (warm / "flashinfer/page/page.so").write_bytes(b"library of pagf")


def cut(warm: Path) -> None:
    (warm / "flashinfer/page/page.so").write_bytes(FILES["page"][:5])


def remove(warm: Path) -> None:
    (warm / "flashinfer/page/page.so").unlink()


@pytest.mark.parametrize("damage", [flip, cut, remove])
def test_a_damaged_module_is_not_offered_and_is_said(
    damage: Callable[[Path], None],
    reader: Callable[[], Any],
    warm: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(warm)
    (provider,) = reader().get_jit_cache_providers()
    assert provider.modules == ["norm"]
    assert "page.so is " in capsys.readouterr().err
    # an older FlashInfer takes whatever lies in the folder, so it gets none of it
    assert not Path(reader().get_jit_cache_dir()).exists()


def test_a_module_that_is_not_listed_keeps_an_older_flashinfer_from_all(
    reader: Callable[[], Any], warm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (warm / "flashinfer/rope").mkdir()
    (warm / "flashinfer/rope/rope.so").write_bytes(b"from a volume")
    offered = reader()
    assert not Path(offered.get_jit_cache_dir()).exists()
    assert "flashinfer/rope is not in the index" in capsys.readouterr().err
    # a newer one is told names
    assert offered.get_jit_cache_providers()[0].modules == ["norm", "page"]


@pytest.mark.parametrize(
    "changes",
    [
        {"flashinfer": "0.7.2"},
        {"architectures": "12.0a"},
        {"site": "/opt/venv/lib/python3.12/site-packages"},
    ],
)
def test_modules_for_something_else_are_not_offered(
    changes: dict[str, str],
    reader: Callable[[], Any],
    warm: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edited(warm, **changes)
    offered = reader()
    (provider,) = offered.get_jit_cache_providers()
    assert provider.modules == []
    assert not Path(offered.get_jit_cache_dir()).exists()
    assert "no warm modules: made for" in capsys.readouterr().err
    # FlashInfer refuses to start with a package of another version; it compiles in place of it
    assert offered.__version__ == "0.7.0"


@pytest.mark.parametrize("arch", ["9.0a", "12.0a", "12.0f 9.0a", None])
def test_another_list_of_architectures_gets_no_module(
    arch: str | None, reader: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    if arch:
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", arch)
    (provider,) = reader().get_jit_cache_providers()
    assert provider.modules == []


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "{}", '{"modules": null}', '{"modules": {}}', LISTS]
)
def test_an_image_without_a_readable_index_offers_nothing(
    text: str | None,
    reader: Callable[[], Any],
    warm: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (warm / "index.json").unlink()
    if text is not None:
        (warm / "index.json").write_text(text)
    offered = reader()
    assert offered.get_jit_cache_providers()[0].modules == []
    assert not Path(offered.get_jit_cache_dir()).exists()
    assert "no warm modules" in capsys.readouterr().err


@pytest.mark.parametrize(("only", "strict"), [("1", "1"), ("0", None)])
def test_only_warm_modules_means_that_flashinfer_may_not_compile(
    only: str, strict: str | None, reader: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    monkeypatch.setenv("SM120_WARM_ONLY", only)
    reader()
    assert os.environ.get("FLASHINFER_DISABLE_JIT") == strict
