"""A small source, a toolchain and an image of it, and a backend that compiles by copying."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.containers.backend import Kind, Running, StepContainer
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.model import sha256_of
from pipeline.core.sealed import UNSEALED
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.plan import TreePlan, plan_image
from pipeline.images.lock.model import ArchivePin, SourceLock, write_source_lock
from pipeline.images.source.archive import unpack_source
from pipeline.images.source.compiled import Compiler, compile_tree
from pipeline.images.spec.checkout import Checkout
from tests import makers
from tests.makers import AMD64, Edit, Image
from tests.testbed.deb_file import Item

EDIT = Edit("main.c", b"int main() { return 1; }\n", b"int main() { return 0; }\n")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HELLO = "/opt/hello/bin/hello"


def source_spec(**changes: Any) -> dict[str, Any]:
    """A source with a file of ours, a patch and two builds."""
    build = {
        "toolchain": "tools",
        "to": "/opt/hello",
        "platforms": [AMD64],
        "steps": [{"name": "compile", "run": ["cc", "-o", "hello", "/src/main.c"]}],
        "cpu_minutes": 1,
    }
    spec = {
        "name": "hello",
        "summary": "a small source for tests",
        "licence": "MIT",
        "archive": {"file": "hello-1.0.tar"},
        "upstream": {"repository": "somebody/hello", "commit": COMMIT},
        "files": [{"from": "config.h", "to": "/config.h"}],
        "patches": [
            {
                "file": "patches/0001.patch",
                "why": "because a test needs a reason that is long enough",
                "upstream": ["https://example.org/1"],
                "files": [EDIT.promise],
            }
        ],
        "outputs": [
            {"from": "hello", "to": "bin/hello", "executable": True},
            {"from": "notes", "to": "notes"},
        ],
        "builds": {"plain": build, "other": {**build, "to": "/opt/other"}},
    }
    return {**spec, **changes}


def write_archive(folder: Path, name: str = "hello-1.0.tar") -> Path:
    """A source archive with one C file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / name, "w") as tar:
        for path, data in {"hello/main.c": EDIT.before, "hello/LICENSE": b"MIT\n"}.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return folder / name


def add_source(checkout: Checkout, archive: Path, spec: dict[str, Any]) -> None:
    """Write a source's spec, its files and its lock into a checkout."""
    folder = checkout.source_folder(spec["name"])
    files = {"config.h": "#define X 1\n", "patches/0001.patch": EDIT.diff}
    for name, text in {"source.yaml": json.dumps(spec), **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    lock_source(checkout, archive, spec["name"])


def lock_source(checkout: Checkout, archive: Path, name: str) -> None:
    """The lock of a source, of an archive at hand."""
    source, data = checkout.source(name), archive.read_bytes()
    pin = ArchivePin(
        kind="file",
        name=name,
        file=archive.name,
        size_bytes=len(data),
        sha256=sha256_of(data).removeprefix("sha256:"),
    )
    place = checkout.root.parent / f"unpacked-{archive.name}-{sha256_of(data)[7:15]}"
    tree = unpack_source(archive, source.archive, place, archive.name)
    lock = SourceLock(
        source=name,
        spec=source.lock_digest(),
        archive=pin,
        tree=tree.tree,
        files=tree.files,
        seal=UNSEALED,
    ).sealed()
    path = checkout.source_lock_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_source_lock(path, lock)


def outputs_of(source: Path) -> dict[str, bytes]:
    """What the copying compiler makes of a source."""
    return {"hello": b"program of " + (source / "main.c").read_bytes(), "notes": b"some notes\n"}


@dataclass
class CopyingBackend:
    """A backend that runs nothing: `compile` writes the outputs from the prepared source.

    A disassembler, asked about objects, prints `shown` (else one instruction of each) and ends
    with `code`.
    """

    make: Callable[[Path], dict[str, bytes]] = outputs_of
    kind: Kind = field(default="namespaces")
    shown: str | None = None
    code: int = 0
    asked: list[list[str]] = field(default_factory=list)

    @contextmanager
    def running(self, container: StepContainer, command: Sequence[str]) -> Iterator[Running]:
        output, into = os.pipe()
        code = 0
        if "objdump" in command[0]:
            self.asked.append(list(command))
            named = [name for name in command[1:] if (container.mounts["/build"] / name).is_file()]
            one = "".join(f"{name}:  file format elf64\n 0:\t90 \tnop\n" for name in named)
            os.write(into, (one if self.shown is None else self.shown).encode())
            code = self.code
        else:
            for name, data in self.make(container.mounts["/src"]).items():
                (container.mounts["/build"] / name).write_bytes(data)
        os.close(into)
        yield Running(output, lambda: code)
        os.close(output)


COPYING = CopyingBackend()


@dataclass(frozen=True)
class CompiledWorld:
    """A checkout with a source, and the image of it, built."""

    place: Path
    checkout: Checkout
    store: Store
    built: Built

    @property
    def mirror(self) -> Path:
        return self.place / "mirror"

    @property
    def tree(self) -> TreePlan:
        return self.built.plan.trees[0]


def compiler_in(
    checkout: Checkout, store: Store, mirror: Path, backend: CopyingBackend
) -> Compiler:
    """A compiler that fetches from a folder."""

    def toolchain(tree: TreePlan) -> Built:
        name, platform = tree.toolchain.spec.name, tree.toolchain.platform
        return makers.build(checkout, store, mirror, name, platform=platform)[0]

    fetcher = lambda: makers.folder_fetcher(store, mirror)  # noqa: E731
    return Compiler(checkout, store, fetcher, toolchain, backend)


def compiled_checkout(place: Path, tools_on: str = AMD64, **source: Any) -> Checkout:
    """A checkout with root, toolchain, source and an image of two of its builds."""
    mirror = place / "mirror"
    architecture = "amd64" if tools_on == AMD64 else "all"
    tool = Item("./usr/bin/tool", b"#!")
    root = makers.root_image([makers.make_deb(mirror, "tool", tool, architecture=architecture)])
    tools = makers.wheel_image("tools", [makers.make_wheel(mirror, "cc")])
    tools.spec["files"] = [{"from": "cc.sh", "to": "/usr/bin/cc", "mode": "0755"}]
    tools.files["cc.sh"] = "#!/bin/sh\n"
    engine = Image(
        {
            "name": "engine",
            "summary": "a small compiled engine",
            "base": "root",
            "platforms": [AMD64],
            "compiled": [
                {"source": "hello", "build": "plain"},
                {"source": "hello", "build": "other"},
            ],
            "files": [{"from": "start.sh", "to": "/opt/start.sh"}],
        },
        files={"start.sh": "#!/bin/sh\n"},
    )
    images = [root, engine]
    if tools_on != AMD64:
        # a lock of its own for the same root, below the toolchain alone
        root.spec["platforms"], tools.spec["platforms"] = [AMD64, tools_on], [tools_on]
        tools = replace(tools, platform=tools_on)
        images.append(replace(root, platform=tools_on))
    checkout = makers.make_checkout(place / "checkout", *images, tools)
    add_source(checkout, write_archive(mirror), source_spec(**source))
    return checkout


def build_compiled(
    place: Path, backend: CopyingBackend = COPYING, tools_on: str = AMD64, **source: Any
) -> CompiledWorld:
    """Compile the source and build the image."""
    checkout = compiled_checkout(place, tools_on, **source)
    store = open_store(place / "store")
    plan = plan_image(checkout, "engine", AMD64)
    for tree in plan.trees:
        compile_tree(compiler_in(checkout, store, place / "mirror", backend), tree)
    built = makers.build(checkout, store, place / "mirror", "engine")[0]
    return CompiledWorld(place, checkout, store, built)
