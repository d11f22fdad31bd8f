"""Small .debs, written byte by byte so that a test can also write a bad one."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAR_END = b"\0" * 1024


@dataclass(frozen=True)
class Item:
    """One entry of a tar archive, as it is to be written."""

    name: str
    content: bytes = b""
    flag: bytes = b"0"
    mode: int = 0o644
    target: str = ""
    uid: int = 0


def folder(name: str, mode: int = 0o755) -> Item:
    return Item(name, flag=b"5", mode=mode)


def symlink(name: str, target: str) -> Item:
    return Item(name, flag=b"2", mode=0o777, target=target)


def hard_link(name: str, target: str) -> Item:
    return Item(name, flag=b"1", target=target)


def tar_header(item: Item, size: int | None = None) -> bytes:
    """A GNU tar header, as dpkg-deb writes it."""
    length = len(item.content) if size is None else size
    block = b"".join(
        (
            item.name.encode()[:100].ljust(100, b"\0"),
            b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (item.mode, item.uid, item.uid, length, 0),
            b" " * 8,
            item.flag,
            item.target.encode()[:100].ljust(100, b"\0"),
            b"ustar  \0",
            b"\0" * 247,
        )
    )
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def tar_item(item: Item) -> bytes:
    """A header with its content, after GNU's entry for a name that is too long."""
    long_name = b""
    if len(item.name.encode()) > 100:
        long_name = tar_item(Item("././@LongLink", item.name.encode() + b"\0", flag=b"L"))
    return long_name + tar_header(item) + item.content + b"\0" * (-len(item.content) % 512)


def tar(items: Sequence[Item], end: bytes = TAR_END) -> bytes:
    return b"".join(map(tar_item, items)) + end


def ar_member(name: str, content: bytes, size: int | None = None) -> bytes:
    length = len(content) if size is None else size
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{length:<10}`\n"
    return header.encode() + content + b"\n" * (len(content) % 2)


def control(name: str, architecture: str = "amd64", extra: str = "") -> str:
    return (
        f"Package: {name}\nVersion: 1.0\nArchitecture: {architecture}\n{extra}Description: test\n"
    )


def deb_bytes(
    data_tar: bytes,
    control_text: str = control("sample"),
    extra_control: Sequence[Item] = (),
    preset: int | None = None,
) -> bytes:
    """A whole .deb around a data archive."""
    control_tar = tar([Item("./control", control_text.encode()), *extra_control])
    return b"".join(
        (
            b"!<arch>\n",
            ar_member("debian-binary", b"2.0\n"),
            ar_member("control.tar.xz", lzma.compress(control_tar)),
            ar_member("data.tar.xz", lzma.compress(data_tar, preset=preset)),
        )
    )


def write_deb(
    place: Path, name: str, items: Sequence[Item], *, architecture: str = "amd64", extra: str = ""
) -> Path:
    """A good .deb in a folder."""
    path = place / f"{name}_1.0_{architecture}.deb"
    path.write_bytes(deb_bytes(tar(items), control(name, architecture, extra)))
    return path
