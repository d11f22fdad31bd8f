"""What an image uses of its warm kernels: whole entries, of this Triton at this place."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.images.assemble.plan import WARM_READER

KEY, LAUNCHER = "K" * 52, "L" * 52
FILES = {
    KEY: {"_fwd.cubin": b"machine code", "_fwd.json": b'{"shared": 1}'},
    LAUNCHER: {"__triton_launcher.so": b"launcher"},
}
# Triton's cache on disk, as far as the reader uses it: entries in folders below TRITON_CACHE_DIR.
TRITON = {
    "__init__.py": "__version__ = '3.5.1'\n",
    "runtime/__init__.py": "",
    # keys, as Triton 3.5 to 3.7 makes them
    "runtime/jit.py": """
class DependenciesFinder:
    def __init__(self):
        self.used_global_vals, self.ret = {}, ""
    def _update_hash(self, func):
        self.used_global_vals.update(func.used_global_vals)
        self.ret += func.cache_key
class JITCallable:
    def __init__(self, name, *callees, **global_vals):
        self.name, self.callees, self.global_vals = name, callees, global_vals
        self.hash, self.used_global_vals = None, {}
    @property
    def cache_key(self):
        if self.hash is None:
            finder = DependenciesFinder()
            finder.used_global_vals.update(self.global_vals)
            for callee in self.callees:
                finder._update_hash(callee)
            self.used_global_vals = dict(sorted(finder.used_global_vals.items()))
            self.hash = f"{self.name}({finder.ret}{self.used_global_vals})"
        return self.hash
""",
    "runtime/cache.py": """
import json, os
class CacheManager: pass
class FileCacheManager(CacheManager):
    def __init__(self, key, override=False, dump=False):
        self.folder = os.path.join(os.environ["TRITON_CACHE_DIR"], key)
        os.makedirs(self.folder, exist_ok=True)
    def get_file(self, name):
        path = os.path.join(self.folder, name)
        return path if os.path.exists(path) else None
    def get_group(self, name):
        path = os.path.join(self.folder, "__grp__" + name)
        return json.load(open(path))["child_paths"] if os.path.exists(path) else None
""",
}


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An image's folder with two entries, a Triton beside it, and an empty cache on disk."""
    for name, text in TRITON.items():
        path = tmp_path / "site" / "triton" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder = tmp_path / "warm"
    for key, files in FILES.items():
        (folder / "triton" / key).mkdir(parents=True)
        for name, data in files.items():
            (folder / "triton" / key / name).write_bytes(data)
    entries = {
        key: {"files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}}
        for key, files in FILES.items()
    }
    index = {"triton": "3.5.1", "site": str(tmp_path / "site"), "entries": entries}
    (folder / "index.json").write_text(json.dumps(index))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("SM120_WARM", str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SM120_WARM_LOG", str(tmp_path / "log"))
    yield folder
    for name in [n for n in sys.modules if n.partition(".")[0] == "triton"]:
        del sys.modules[name]


@pytest.fixture
def cache(warm: Path) -> Callable[[str], Any]:
    """Opens an entry by its key, as Triton does; the reader is loaded anew for each test."""

    def open_entry(key: str) -> Any:
        spec = importlib.util.spec_from_file_location("warm_reader_here", WARM_READER)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.WarmCache(key)

    return open_entry


def noted(warm: Path) -> list[str]:
    log = warm.parent / "log"
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def test_a_whole_entry_is_used_and_counted(warm: Path, cache: Callable[[str], Any]) -> None:
    paths = {name: str(warm / "triton" / KEY / name) for name in FILES[KEY]}
    assert cache(KEY).get_group("_fwd.json") == paths
    launcher = str(warm / "triton" / LAUNCHER / "__triton_launcher.so")
    assert cache(LAUNCHER).get_file("__triton_launcher.so") == launcher
    assert noted(warm) == ["hit", "hit"]


def test_what_the_image_lacks_is_looked_for_on_disk(
    warm: Path, cache: Callable[[str], Any]
) -> None:
    other = cache("M" * 52)
    assert other.get_group("_fwd.json") is None
    (Path(other.folder) / "__grp___fwd.json").write_text('{"child_paths": {"_fwd.json": "/x"}}')
    assert cache("M" * 52).get_group("_fwd.json") == {"_fwd.json": "/x"}
    assert noted(warm) == ["miss", "disk"]


def test_old_entries_of_a_volume_do_not_hide_the_images(
    warm: Path, cache: Callable[[str], Any]
) -> None:
    (warm.parent / "cache" / KEY).mkdir(parents=True)
    old = warm.parent / "cache" / KEY / "__grp___fwd.json"
    old.write_text('{"child_paths": {"_fwd.json": "/old"}}')
    assert "/old" not in cache(KEY).get_group("_fwd.json").values()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "one flipped byte": lambda path: path.write_bytes(b"Machine code"),
    "truncated": lambda path: path.write_bytes(b"machine"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("name", sorted(FILES[KEY]))
def test_a_damaged_entry_is_not_used_at_all_and_said(
    what: str, name: str, warm: Path, cache: Callable[[str], Any], capfd: Any
) -> None:
    DAMAGE[what](warm / "triton" / KEY / name)
    assert cache(KEY).get_group("_fwd.json") is None
    assert cache(KEY).get_file("_fwd.cubin") is None
    assert "refused" in noted(warm)
    assert f"{KEY}/{name}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"), [("triton", "3.6.0"), ("site", "/usr/lib/python3/dist-packages")]
)
def test_entries_of_another_triton_or_place_are_not_used_and_it_is_said(
    field: str, value: str, warm: Path, cache: Callable[[str], Any], capfd: Any
) -> None:
    index = json.loads((warm / "index.json").read_text())
    (warm / "index.json").write_text(json.dumps({**index, field: value}))
    assert cache(KEY).get_group("_fwd.json") is None
    error = capfd.readouterr().err
    assert "no warm kernels" in error
    assert value in error


@pytest.mark.parametrize(
    ("whole", "cut"),
    [('"files"', '"filet"'), ('{"files": ', '["files", '), ('{"_fwd.cubin": ', '{"_fwd.cubin",')],
)
def test_a_flipped_byte_in_the_index_is_said_and_nothing_of_it_used(
    whole: str, cut: str, warm: Path, cache: Callable[[str], Any], capfd: Any
) -> None:
    path = warm / "index.json"
    path.write_text(path.read_text().replace(whole, cut, 1))
    assert cache(LAUNCHER).get_file("__triton_launcher.so") is None
    assert "no warm kernels" in capfd.readouterr().err


def test_a_hit_writes_nothing_so_that_a_read_only_system_will_do(
    warm: Path, cache: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    # below a file, where nobody can make a folder, not even root
    closed = warm / "index.json" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(closed))
    monkeypatch.setenv("SM120_WARM_LOG", str(closed / "log"))
    assert cache(KEY).get_group("_fwd.json")
    assert "is not noted" in capfd.readouterr().err
    with pytest.raises(OSError, match="Not a directory"):
        cache("M" * 52).get_group("_fwd.json")


def test_only_what_is_not_there_makes_a_folder_on_disk(
    warm: Path, cache: Callable[[str], Any]
) -> None:
    found = cache(KEY)
    found.get_group("_fwd.json")
    assert not (warm.parent / "cache").exists()
    with pytest.raises(AttributeError):
        found.nothing_of_triton  # noqa: B018
    assert found.get_file("other.so") is None
    assert found.folder == str(warm.parent / "cache" / KEY)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"triton": "3.5.1"}'])
def test_a_damaged_index_is_said_and_nothing_of_it_used(
    text: str, warm: Path, cache: Callable[[str], Any], capfd: Any
) -> None:
    (warm / "index.json").write_text(text)
    assert cache(KEY).get_group("_fwd.json") is None
    assert "no warm kernels" in capfd.readouterr().err


def test_a_proof_ends_at_the_first_kernel_that_is_not_there(
    cache: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_WARM_ONLY", "1")
    assert cache(KEY).get_group("_fwd.json")
    with pytest.raises(RuntimeError, match="no warm kernel of this image"):
        cache("M" * 52).get_group("_fwd.json")
    with pytest.raises(RuntimeError, match="no warm kernel of this image"):
        cache("M" * 52).get_file("cuda_utils.so")


def test_the_times_of_a_tuner_are_no_kernel_that_could_be_missing(
    warm: Path, cache: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_WARM_ONLY", "1")
    other = cache("M" * 52)
    assert other.get_file("_fwd.autotune.json") is None
    (Path(other.folder) / "_fwd.autotune.json").touch()
    assert cache("M" * 52).get_file("_fwd.autotune.json") == f"{other.folder}/_fwd.autotune.json"
    assert noted(warm) == ["table", "table"]


def test_a_key_does_not_depend_on_what_was_called_before(
    warm: Path, cache: Callable[[str], Any]
) -> None:
    def keys(*order: str) -> dict[str, str]:
        jit = importlib.import_module("triton.runtime.jit")
        noise = jit.JITCallable("noise", SALT=1)
        sample = jit.JITCallable("sample", noise, LEAST=2)
        made = {"noise": noise, "walk": jit.JITCallable("walk", sample), "sample": sample}
        return {name: made[name].cache_key for name in order}

    orders = [("noise", "sample", "walk"), ("sample", "walk", "noise"), ("walk", "noise", "sample")]
    assert len({keys(*order)["walk"] for order in orders}) > 1
    cache(KEY)
    assert len({keys(*order)["walk"] for order in orders}) == 1
    assert "SALT" in keys("walk")["walk"]
