"""From a spec to a lock: who is asked for what, and what is left to the base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.images.lock import make
from pipeline.images.lock.make import Transport, make_lock
from pipeline.images.lock.model import DebPin, read_lock
from tests.makers import AMD64, make_checkout, make_deb, make_wheel, root_image, wheel_image


def nobody(name: str, most_bytes: int) -> bytes:
    raise AssertionError(f"{name} was asked for")


def pin(name: str) -> DebPin:
    path = f"pool/{name}_1.0_amd64.deb"
    return DebPin(name=name, version="1.0", path=path, size_bytes=1, sha256="0" * 64)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the resolver of .debs was asked; it answers with all of it and one thing more."""
    calls: list[tuple[Any, ...]] = []

    def resolve(*args: Any) -> list[DebPin]:
        calls.append(args)
        return [pin(name) for name in (*args[0], "needed")]

    monkeypatch.setattr(make, "resolve_debs", resolve)
    return calls


ASK = Transport(debian=nobody, debian_security=nobody, wheel_size=lambda *_: 1)


def test_what_a_base_has_is_not_locked_again(tmp_path: Path, asked: list[tuple[Any, ...]]) -> None:
    deb = make_deb(tmp_path / "mirror", "tool")
    image = wheel_image("engine", [make_wheel(tmp_path / "mirror", "pkg")], debs=["extra"])
    del image.spec["python"]
    checkout = make_checkout(tmp_path, root_image([deb]), image)
    lock = make_lock(checkout, "engine", AMD64, ASK)
    assert [pin.name for pin in lock.debs] == ["extra", "needed"]
    names, exclude, suites, _, architecture, *_ = asked[0]
    assert (names, exclude, architecture) == (["extra", "tool"], [], "amd64")
    assert len(suites) == 1


def test_security_updates_are_asked_of_their_own_mirror(
    tmp_path: Path, asked: list[tuple[Any, ...]]
) -> None:
    deb = make_deb(tmp_path / "mirror", "tool")
    root = root_image([deb], debian={"security": True})

    def security(name: str, most_bytes: int) -> bytes:
        return nobody(name, most_bytes)

    ask = replace(ASK, debian_security=security)
    lock = make_lock(make_checkout(tmp_path, root), "root", AMD64, ask)
    assert lock.base_lock is None
    assert asked[0][2] == [("bookworm", nobody), ("bookworm-security", security)]


def test_a_fresh_lock_of_the_base_counts_more_than_the_kept_one(
    tmp_path: Path, asked: list[tuple[Any, ...]]
) -> None:
    deb = make_deb(tmp_path / "mirror", "tool")
    image = wheel_image("engine", [make_wheel(tmp_path / "mirror", "pkg")])
    del image.spec["python"]
    checkout = make_checkout(tmp_path, root_image([deb]), image)
    fresh = make_lock(checkout, "root", AMD64, ASK)
    lock = make_lock(checkout, "engine", AMD64, ASK, {"root": fresh})
    assert (lock.base_lock, lock.debs) == (fresh.seal, [])


@pytest.mark.parametrize("where", ["itself", "base", "nowhere"])
def test_an_image_with_a_CUDA_home_is_locked_to_wheels_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    asked: list[bool] = []

    def resolve(*_: Any, needs_cuda: bool) -> list[Any]:
        asked.append(needs_cuda)
        return []

    monkeypatch.setattr(make, "resolve_wheels", resolve)
    deb, wheel = make_deb(tmp_path / "mirror", "tool"), make_wheel(tmp_path / "mirror", "pkg")
    cuda = {"cuda": {"from": ["nvidia/cu13"]}}
    first = wheel_image("first", [wheel], **(cuda if where == "base" else {}))
    second = wheel_image("second", [wheel], base="first", **(cuda if where == "itself" else {}))
    checkout = make_checkout(tmp_path, root_image([deb]), first, second)
    make_lock(checkout, "second", AMD64, ASK)
    assert asked == [where != "nowhere"]


def test_a_lock_names_the_image_right_below_it(
    tmp_path: Path, asked: list[tuple[Any, ...]]
) -> None:
    root = root_image([make_deb(tmp_path / "mirror", "tool")])
    middle = wheel_image("middle", [make_wheel(tmp_path / "mirror", "pkg")])
    top = wheel_image("top", [make_wheel(tmp_path / "mirror", "more")], base="middle")
    for image in (middle, top):
        del image.spec["python"]
    checkout = make_checkout(tmp_path, root, middle, top)
    lock = make_lock(checkout, "top", AMD64, ASK)
    assert lock.base_lock == read_lock(checkout.lock_path("middle", AMD64)).seal
