"""A toolchain image as a folder that programs can run in."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from platform import machine

from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import HostileArchive
from pipeline.core.files import folder_below, os_errors_explained, remove_tree, sha256_of_file
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.layer import read_pieces
from pipeline.images.assemble.plan import TreePlan
from pipeline.images.assemble.view import see

BINFMT = "/proc/sys/fs/binfmt_misc"  # the kernel lists emulators for other processors here
NOT_HERE = "Compile it on a machine of that platform, or install qemu-user-static with binfmt."
_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
# O_EXCL and O_NOFOLLOW: no file of the image may lead us elsewhere.
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
Row = tuple[LayerRecord, FileRow]


def why_not_here(plan: TreePlan) -> str:
    """Why this machine cannot run the toolchain of a tree; empty where it can.

    Known before anything is fetched: another processor's programs need an emulator.
    """
    wanted = plan.toolchain.platform
    name = _MACHINES[wanted]
    emulators = Path(BINFMT).glob(f"qemu-{name}*")
    # the first word of such a file says whether it is in use
    if machine() == name or any(p.read_bytes().startswith(b"enabled") for p in emulators):
        return ""
    tools = f"{plan.toolchain.spec.name} for {wanted}"
    return f"{plan.title}: needs the toolchain {tools}, and this machine is {machine()}"


def unpacked_root(store: Store, image: Built) -> Path:
    """Unpacks the image into a folder of the store, and hashes every file before it is used.

    A changed compiler would change what it compiles, and the folder outlives the command that made
    it; hashing 1.4 GB takes some seconds, a build takes minutes.
    """
    final = store.root / "toolchains" / image.digest.removeprefix("sha256:")
    rows = _rows(store, image)
    with store.locked(f"toolchain-{final.name}"):
        if final.is_dir() and not _is_whole(final, rows):
            log.say(f"{image.name}: its unpacked copy was changed and is made anew")
            remove_tree(final)
        if not final.is_dir():
            title = f"Unpacking {image.name}, {log.size(image.record.unpacked_bytes)}"
            with log.step(title), store.scratch() as scratch:
                _fill(store, rows, scratch / "root")
                final.parent.mkdir(parents=True, exist_ok=True)
                os.replace(scratch / "root", final)
        # so that `sm120 store trim` knows that it is in use
        with os_errors_explained(final):
            os.utime(final)
    return final


@contextmanager
def unpacked(
    store: Store, image: Built, wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[Path]:
    """Unpacks the image into a folder that goes with the block: those of an engine are 8 GB.

    With `wanted`, only the paths that it says.
    """
    rows = {path: row for path, row in _rows(store, image).items() if wanted(path)}
    size = sum(row.size_bytes for _, row in rows.values())
    store.need_space(size)
    with store.scratch() as scratch:
        root = scratch / "root"
        with log.step(f"Unpacking {image.name}, {log.size(size)}"):
            _fill(store, rows, root)
        yield root


def _rows(store: Store, image: Built) -> dict[str, Row]:
    return see((layer.record, store.contents(layer.record)) for layer in image.layers)


def _is_whole(root: Path, rows: dict[str, Row]) -> bool:
    """Whether the folder holds exactly the image's files."""
    if sum(len(folders) + len(files) for _, folders, files in os.walk(root)) != len(rows):
        return False
    for path, (_, row) in rows.items():
        place, is_good = root / path, False
        if place.is_symlink():
            is_good = row.kind == Kind.SYMLINK and str(place.readlink()) == row.target
        elif row.kind == Kind.FILE:
            is_good = place.is_file() and sha256_of_file(place) == f"sha256:{row.sha256}"
        elif row.kind != Kind.SYMLINK:
            is_good = place.is_dir() if row.kind == Kind.DIR else place.is_file()
        if not is_good:
            return False
    return True


def _fill(store: Store, rows: dict[str, Row], root: Path) -> None:
    root.mkdir()
    # links to files come last: what they lead to must be there
    ordered = sorted(rows.items(), key=lambda item: (item[1][1].kind == Kind.HARDLINK, item[0]))
    for path, (layer, row) in ordered:
        *parents, last = path.split("/")
        try:
            with folder_below(root, parents, make=True) as parent:
                if row.kind == Kind.DIR:
                    with folder_below(root, [*parents, last], make=True):
                        pass
                elif row.kind == Kind.SYMLINK:
                    os.symlink(row.target, last, dir_fd=parent)
                elif row.kind == Kind.HARDLINK:
                    *above, name = row.target.split("/")
                    with folder_below(root, above) as source:
                        where = {"src_dir_fd": source, "dst_dir_fd": parent}
                        os.link(name, last, **where, follow_symlinks=False)
                else:
                    with os.fdopen(os.open(last, _NEW_FILE, dir_fd=parent), "wb") as out:
                        out.writelines(read_pieces(store.blob_path(layer.digest), row))
                        # the user who unpacks it must be able to remove it again
                        os.fchmod(out.fileno(), row.mode & 0o755 | 0o644)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
                raise
            # a foreign base may name files below a link of its own, which leads anywhere
            raise HostileArchive(f"/{path}: is below a link or a file of the image") from error
