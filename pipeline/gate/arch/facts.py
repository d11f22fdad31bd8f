"""What is known of one file, kept in the store by the file's hash: it never changes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import Field, ValidationError

from pipeline.binary import elf, fatbin, modules
from pipeline.binary.elf import Unreadable
from pipeline.binary.fatbin import Target
from pipeline.binary.modules import Opener, read_modules
from pipeline.files import write_bytes
from pipeline.model import Frozen, canonical_json, sha256_of
from pipeline.store.store import Store


class ModuleFacts(Frozen):
    """Modules that were compiled for the same targets, and how many of them there are."""

    targets: tuple[Target, ...]
    times: int = Field(ge=1)


class Facts(Frozen):
    """The CUDA code of a file, or why it cannot be read."""

    reader: str
    problem: str = ""
    modules: list[ModuleFacts] = []

    @property
    def targets(self) -> set[Target]:
        return {target for module in self.modules for target in module.targets}


@cache
def reader_digest() -> str:
    """The reader's own code: files that an older reader read are read again."""
    # verdict.py is left out: another rule judges the same facts
    sources = [Path(m.__file__ or "") for m in (modules, elf, fatbin)]
    return sha256_of(b"".join(path.read_bytes() for path in sources))


def read_facts(open_file: Opener, file_bytes: int) -> Facts:
    """Read a file; what cannot be read is a fact too."""
    try:
        counted = read_modules(open_file, file_bytes)
    except Unreadable as error:
        return Facts(reader=reader_digest(), problem=str(error))
    modules = [ModuleFacts(targets=module, times=times) for module, times in counted.items()]
    # one order, so that a note's bytes do not depend on where the linker put what
    return Facts(reader=reader_digest(), modules=sorted(modules, key=lambda m: str(m.targets)))


def kept_facts(store: Store, sha256: str) -> Facts | None:
    """The facts that this reader kept; a damaged note, or an older reader's, counts as none."""
    try:
        facts = Facts.model_validate_json(_path(store, sha256).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return facts if facts.reader == reader_digest() else None


def keep_facts(store: Store, sha256: str, facts: Facts) -> None:
    """Remember what a file holds."""
    write_bytes(_path(store, sha256), canonical_json(facts.model_dump()))


def _path(store: Store, sha256: str) -> Path:
    return store.root / "gates" / "arch" / f"{sha256}.json"
