from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from pipeline.core.errors import GateEnvironment, ResolveFailed
from pipeline.images.gate.smem.engine import WheelFinder, for_host
from pipeline.images.gate.smem.environment import cuda_of
from pipeline.images.lock.model import WheelPin

HOST = "linux/arm64"


def pin(name: str, version: str, tag: str = "cp311-cp311-manylinux_2_28_x86_64") -> WheelPin:
    file = f"{name}-{version}-{tag}.whl"
    return WheelPin(name=name, version=version, file=file, size_bytes=1, sha256="0" * 64)


class Finder:
    """An index with these versions for this machine."""

    def __init__(self, *has: str) -> None:
        self.has, self.asked = set(has), 0
        self.versions_asked: list[str] = []

    def find(self, project: str, version: str, python: str, platform: str) -> WheelPin:
        self.asked += 1
        self.versions_asked.append(version)
        if version not in self.has:
            raise ResolveFailed(f"{project} {version}: no wheel")
        return pin(project, version, "cp311-cp311-manylinux_2_28_aarch64")

    def versions(self, project: str) -> list[Version]:
        return [Version(v) for v in ("2.8.0", "2.9.0", "2.9.1", "2.10.0rc1", "2.10.0", "2.11.0")]


def look_up(wanted: WheelPin, finder: Finder, folder: Path) -> WheelPin:
    give: Any = lambda: finder  # noqa: E731
    return for_host(wanted, "3.11", HOST, folder, give)


def test_the_same_version_for_this_machine_is_looked_up_once(tmp_path: Path) -> None:
    finder = Finder("3.5.1")
    first = look_up(pin("triton", "3.5.1"), finder, tmp_path)
    assert first.file.endswith("aarch64.whl")
    assert look_up(pin("triton", "3.5.1"), finder, tmp_path) == first
    assert finder.asked == 1


def test_what_was_kept_halfway_is_looked_up_again(tmp_path: Path) -> None:
    finder = Finder("3.5.1")
    look_up(pin("triton", "3.5.1"), finder, tmp_path)
    (kept,) = tmp_path.rglob("*.json")
    kept.write_bytes(kept.read_bytes()[:20])
    assert look_up(pin("triton", "3.5.1"), finder, tmp_path).version == "3.5.1"
    assert finder.asked == 2


def test_a_wheel_for_any_machine_is_taken_as_it_is(tmp_path: Path) -> None:
    anywhere = pin("sympy", "1.14", "py3-none-any")
    assert look_up(anywhere, Finder(), tmp_path) is anywhere


def test_the_nearest_torch_stands_in_for_one_that_is_not_published(tmp_path: Path) -> None:
    result = look_up(pin("torch", "2.9.1"), Finder("2.8.0", "2.10.0"), tmp_path)
    assert result.version == "2.10.0"


def test_nothing_stands_in_for_triton(tmp_path: Path) -> None:
    with pytest.raises(ResolveFailed, match="triton"):
        look_up(pin("triton", "3.5.1"), Finder("3.5.0", "3.6.0"), tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_no_torch_at_all_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(GateEnvironment, match=r"no version near"):
        look_up(pin("torch", "2.9.1"), Finder(), tmp_path)


def test_nearness_is_by_published_versions_the_newer_first_and_never_a_prerelease(
    tmp_path: Path,
) -> None:
    finder = Finder()
    with pytest.raises(GateEnvironment):
        look_up(pin("torch", "2.9.1"), finder, tmp_path)
    assert finder.versions_asked == ["2.9.1", "2.9.0", "2.10.0", "2.8.0", "2.11.0"]


class Plan:
    """As much of an image's plan as `cuda_of` reads."""

    def __init__(self, **locked: str) -> None:
        wheels = [pin(n.replace("_", "-"), v) for n, v in locked.items()]
        self.lock = type("Lock", (), {"wheels": wheels})
        self.spec = type("Spec", (), {"name": "image"})


def test_torchs_cuda_is_that_of_the_runtime_locked_for_it() -> None:
    both: Any = Plan(nvidia_cuda_runtime="13.0.96", nvidia_cuda_runtime_cu12="12.8.90")
    assert cuda_of(both) == "12.8"
    new: Any = Plan(nvidia_cuda_runtime="13.0.96")
    assert cuda_of(new) == "13.0"
    none: Any = Plan(numpy="2.0")
    with pytest.raises(GateEnvironment):
        cuda_of(none)


def offer(file: str, **changes: Any) -> Any:
    """A file as an index lists it."""
    kind, version = "wheel" if file.endswith(".whl") else "sdist", file.split("-")[1]
    given = {"package_type": kind, "version": version, "is_yanked": False, "size": 5}
    listed = {
        "filename": file,
        "url": f"https://index.test/{file}",
        "digests": {"sha256": "a" * 64},
    }
    return SimpleNamespace(**{**listed, **given, **changes})


def index(monkeypatch: pytest.MonkeyPatch, *offers: Any) -> WheelFinder:
    monkeypatch.setattr(
        "pipeline.images.fetch.index.list_index_files", lambda client, place, project: offers
    )
    settings = SimpleNamespace(indexes=["https://index.test/simple"])
    client: Any = SimpleNamespace(settings=settings, size_of=lambda url: 7)
    return WheelFinder(client)


def test_the_wheel_an_installer_would_choose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = index(
        monkeypatch,
        offer("tool-1.0-py3-none-any.whl"),
        offer("tool-1.0-1-cp311-cp311-manylinux_2_17_x86_64.whl"),
        offer("tool-1.0-2-cp311-cp311-manylinux_2_17_x86_64.whl", size=None),
        offer("tool-1.0-3-cp311-cp311-manylinux_2_17_aarch64.whl"),
        offer("tool-2.0-cp311-cp311-manylinux_2_17_x86_64.whl"),
        offer("tool-1.0.tar.gz"),
    )
    found = finder.find("tool", "1.0", "3.11", "linux/amd64")
    assert found.file == "tool-1.0-2-cp311-cp311-manylinux_2_17_x86_64.whl"
    assert found.size_bytes == 7  # asked of the server where the index does not name it


@pytest.mark.parametrize(
    "offered",
    [
        offer("tool-1.0-cp311-cp311-manylinux_2_17_aarch64.whl"),
        offer("tool-1.0-cp312-cp312-manylinux_2_17_x86_64.whl"),
        offer("tool-1.1-py3-none-any.whl"),
        offer("tool-1.0.tar.gz"),
        offer("not-a-wheel.whl"),
    ],
)
def test_a_wheel_that_does_not_run_here_is_not_found(
    monkeypatch: pytest.MonkeyPatch, offered: Any
) -> None:
    with pytest.raises(ResolveFailed, match="no index has a wheel for linux/amd64"):
        index(monkeypatch, offered).find("tool", "1.0", "3.11", "linux/amd64")


def test_a_wheel_without_a_hash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = index(monkeypatch, offer("tool-1.0-py3-none-any.whl", digests={}))
    with pytest.raises(ResolveFailed, match="no sha256"):
        finder.find("tool", "1.0", "3.11", "linux/amd64")


def test_withdrawn_versions_count_only_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finder = index(
        monkeypatch,
        offer("tool-1.10-py3-none-any.whl"),
        offer("tool-1.9-py3-none-any.whl"),
        offer("tool-2.0-py3-none-any.whl", is_yanked=True),
        offer("tool-3.0.tar.gz"),
        offer("tool-odd-py3-none-any.whl"),
    )
    assert finder.versions("tool") == [Version("1.9"), Version("1.10")]
    assert finder.versions("tool", withdrawn=True) == [*finder.versions("tool"), Version("2.0")]
