"""A source that compiles in a second, and a toolchain image of this machine's own programs."""

from __future__ import annotations

import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.app.workspace import host_platform
from pipeline.artifacts.containers.backend import SandboxBackend
from pipeline.artifacts.containers.container_engine import find_backend
from pipeline.artifacts.oci.record import LayerRecord
from pipeline.artifacts.store.store import Store, open_store
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.plan import TreePlan, plan_tree
from pipeline.images.lock.model import write_source_lock
from pipeline.images.source.archive import lock_file
from pipeline.images.source.compiled import CompiledTree, Compiler, compile_tree, tree_path
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import CompiledSpec
from pipeline.images.spec.source import SourceSpec
from tests import makers
from tests.testbed.deb_file import Item, control, deb_bytes, tar
from tests.testbed.packages import CannotHave, ensure_debian_packages

SHELL = "sh env cat cp mkdir sleep date uname nproc dd ls sort id touch rm ln seq head true"
COMPILER = f"gcc as ccache {platform.machine()}-linux-gnu-objdump"
HERE = host_platform()  # its programs are this machine's
# Two objects, of which an edit of one leaves the other alone.
FILES = {
    "one.c": '#include "shared.h"\nint one(void) { return SHARED + 1; }\n',
    "two.c": "int two(void) { return 2; }\n",
    "shared.h": "#define SHARED 40\n",
    "build.sh": (
        "for name in one two; do\nccache gcc -ffreestanding -O2 -c /src/$name.c -o $name.o\ndone\n"
    ),
}


def programs(*names: str) -> list[Item]:
    """Programs of this machine with the libraries that they need, as files of a .deb."""
    paths = {str(_program(name)) for name in names}
    for path in sorted(paths):
        paths |= _libraries(path)
    return [Item(path.lstrip("/"), Path(path).read_bytes(), mode=0o755) for path in sorted(paths)]


def _program(name: str) -> Path:
    path = shutil.which(name, path="/usr/bin:/bin") or name
    if not Path(path).is_absolute():
        raise CannotHave(f"This machine has no {name}.")
    return Path(path)


def _libraries(path: str) -> set[str]:
    shown = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", shown))


def toolchain_deb(mirror: Path, *, compiler: bool = False) -> Path:
    """A .deb of a shell with the usual programs, and of a C compiler with ccache."""
    names = SHELL.split()
    if compiler:
        if not shutil.which("ccache", path="/usr/bin:/bin"):
            ensure_debian_packages(["ccache"])
        asked = ["gcc", "-print-prog-name=cc1"]
        cc1 = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        names += [*COMPILER.split(), cc1]
    mirror.mkdir(parents=True, exist_ok=True)
    architecture = HERE.removeprefix("linux/")
    path = mirror / f"tool_1.0_{architecture}.deb"
    # fast: a compiler has 30 MB
    path.write_bytes(deb_bytes(tar(programs(*names)), control("tool", architecture), preset=0))
    return path


def toolchain_image(deb: Path) -> makers.Image:
    """What the source is compiled in."""
    env = {"PATH": "/usr/bin:/bin"}
    return makers.root_image([deb], platform=HERE, accounts=[], env=env)


@dataclass
class Bench:
    """A checkout with one small source, and where it is compiled."""

    home: Path
    deb: Path
    files: dict[str, str] = field(default_factory=lambda: dict(FILES))
    outputs: tuple[str, ...] = ("one.o", "two.o")
    build: dict[str, Any] = field(default_factory=dict)
    patches: list[dict[str, Any]] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return open_store(self.home / "store")

    @property
    def checkout(self) -> Checkout:
        return Checkout(self.home / "checkout")

    def write(self) -> None:
        """Spec, archive and lock."""
        checkout = makers.make_checkout(self.home / "checkout", toolchain_image(self.deb))
        folder = checkout.source_folder("tiny")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "source.yaml").write_text(json.dumps(self.spec()))
        archive = self.home / "tiny.tar"
        archive.write_bytes(tar_of({f"tiny/{n}": t.encode() for n, t in self.files.items()}))
        lock = lock_file(self.store, checkout.source("tiny"), archive)
        path = checkout.source_lock_path("tiny")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_source_lock(path, lock)

    def spec(self) -> dict[str, Any]:
        spec = {
            "name": "tiny",
            "summary": "a small source for tests",
            "licence": "MIT",
            "archive": {"file": "tiny.tar"},
            "upstream": {"repository": "none", "commit": "none"},
            "patches": self.patches,
            "outputs": [{"from": name, "to": name} for name in self.outputs],
            "builds": {
                "plain": {
                    "toolchain": "root",
                    "to": "/opt/tiny",
                    "platforms": [HERE],
                    "steps": [{"name": "compile", "run": ["sh", "-e", "/src/build.sh"]}],
                    "cpu_minutes": 1,
                    **self.build,
                }
            },
        }
        return SourceSpec.model_validate(spec).model_dump(mode="json", by_alias=True)

    def plan(self) -> TreePlan:
        return plan_tree(self.checkout, CompiledSpec(source="tiny", build="plain"), HERE)

    def compile(self, backend: SandboxBackend | None = None, **more: Any) -> LayerRecord:
        """Compile it, in namespaces unless told otherwise."""
        store = self.store
        compiler = Compiler(
            self.checkout,
            store,
            lambda: makers.folder_fetcher(store, self.home),
            self._toolchain,
            backend or find_backend("namespaces"),
            **more,
        )
        return compile_tree(compiler, self.plan())

    def _toolchain(self, tree: TreePlan) -> Built:
        name = tree.toolchain.spec.name
        return makers.build(self.checkout, self.store, self.deb.parent, name, platform=HERE)[0]

    def tree(self) -> CompiledTree:
        """What the store remembers of it."""
        path = tree_path(self.store, self.plan().key)
        return CompiledTree.model_validate_json(path.read_bytes())

    def output(self, record: LayerRecord, name: str) -> bytes:
        """A file of the compiled layer."""
        blob = self.store.blob_path(record.digest)
        with tarfile.open(blob) as tar:
            content = tar.extractfile(f"opt/tiny/{name}")
            assert content is not None
            return content.read()

    def left(self) -> list[Path]:
        """What stands in the way of a clean end: scratch, trees and layers of a failed build."""
        root = self.store.root
        key = self.plan().key.removeprefix("sha256:")
        kept = [root / "trees" / f"{key}.json", root / "layers" / f"{key}.json"]
        return [*(root / "tmp").iterdir(), *(path for path in kept if path.exists())]


def tar_of(files: dict[str, bytes]) -> bytes:
    """A tar archive of plain files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def processes_in(folder: Path) -> Iterator[int]:
    """Processes of this machine whose command names a folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                yield int(path.parent.name)
        except OSError:
            continue
