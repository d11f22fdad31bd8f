"""Weights as a spec and its lock: which files of which commit, and the hash of every one."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from pipeline.core import log
from pipeline.core.errors import LockEdited, LockStale, SpecInvalid, WeightsUnknown, there_are
from pipeline.core.files import write_bytes
from pipeline.core.model import (
    FILE_VERSION,
    Digest,
    Frozen,
    Hex,
    HubRepository,
    Name,
    Sha1,
    canonical_json,
    sha256_of,
    stays_below,
)
from pipeline.core.sealed import UNSEALED, Sealed, read_sealed
from pipeline.core.yaml_file import read_yaml
from pipeline.images.spec.checkout import Checkout

# It becomes a file's name below `refs` of a Hub cache, so it must not lead out of there.
Revision = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][\w./-]*$", max_length=200),
    AfterValidator(stays_below),
]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=200)]
MOST_FILES = 20_000  # a bound for hostile listings; Kimi K2.6 has 96
_MOST_FILE_BYTES = 1 << 44  # a file of 16 TiB is the largest that ext4 takes
_MOST_NAME_BYTES = 255  # and this the longest name
_MOST_NAME_CHARS = 80  # of a spec
_OWN_FOLDER = ".sm120"  # the folder of fetches and receipts, next to the files
COMMIT = re.compile(r"[0-9a-f]{40}")
FILE_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # as the Hub names blobs: git's, or SHA-256


def _is_plain(path: str) -> str:
    """Allow spaces and letters of any script, but nothing that terminals or disks act on."""
    # category C: control characters, and those that turn text around (trojansource.codes)
    if "\\" in path or any(unicodedata.category(c)[0] == "C" for c in path):
        raise ValueError("has a character that is not allowed in a file name")
    # a disk that normalises names (HFS+) would give the file another name than the lock has
    if unicodedata.normalize("NFC", path) != path:
        raise ValueError("is not in Unicode normal form C")
    if any(len(part.encode()) > _MOST_NAME_BYTES for part in path.split("/")):
        raise ValueError("has a name of more than 255 bytes, the most that disks take")
    # else a repository could bring its own receipt, which says that its files are proved
    if path.split("/")[0].casefold() == _OWN_FOLDER:
        raise ValueError(f"{_OWN_FOLDER} is this tool's own folder")
    return path


HubPath = Annotated[
    str,
    StringConstraints(min_length=1, max_length=1024),
    AfterValidator(stays_below),
    AfterValidator(_is_plain),
]


class WeightsSpec(Frozen):
    """`lockfiles/weights/<name>.yaml`: which model, which revision, which of its files."""

    name: Name
    repository: HubRepository
    revision: Revision = "main"
    include: list[Pattern] = Field(default=["*"], min_length=1)
    exclude: list[Pattern] = []
    # both for people and for `fit`; a model that is only named by its repository has neither
    format: Literal["safetensors", "gguf", "any"] = "any"
    quant: Annotated[str, StringConstraints(min_length=1, max_length=40)] = "unknown"
    about: Annotated[str, StringConstraints(min_length=20, max_length=1000)]

    def wants(self, path: str) -> bool:
        """Whether a file of the repository is part of the set; `*` also crosses folders."""
        return is_chosen(path, self.include, self.exclude)

    def lock_digest(self) -> str:
        """The digest that a lock records: all but the description."""
        # the description is for people: to reword it must not make the lock stale
        return sha256_of(canonical_json(self.model_dump(exclude={"about"})))


def is_reference(text: str) -> bool:
    """Whether a user names a model by its repository, not by a spec."""
    return "/" in text or "@" in text


def weights_spec(reference: str) -> WeightsSpec:
    """The spec of `organisation/model[@revision]`: all files of any model, no file needed."""
    repository, at, revision = reference.partition("@")
    # A name for the lock and its files: `--` is in no repository's name (huggingface_hub,
    # utils/_validators.py); of a commit twelve digits are enough to tell it from others.
    short = revision[:12] if COMMIT.fullmatch(revision) else revision
    whole = "--".join([*repository.split("/"), *([short] if short else [])]).lower()
    name = re.sub(r"[^a-z0-9.+-]", "+", whole)
    if len(name) > _MOST_NAME_CHARS:
        digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
        name = f"{name[: _MOST_NAME_CHARS - 13]}-{digest}"
    about = f"All files of {repository}, as its publisher has them on the Hub."
    try:
        revision = revision if at else "main"
        return WeightsSpec(name=name, repository=repository, revision=revision, about=about)
    except ValidationError as error:
        part = "revision" if error.errors()[-1]["loc"] == ("revision",) else "repository"
        # people copy the address of a model's page
        page = re.match(r"https?://[^/]+/([^/?#]+/[^/?#]+)", reference)
        example = f"here {page[1]}" if page and page[1].isprintable() else "as the Hub shows it"
        raise SpecInvalid(
            f"{reference[:100]!r}: its {part} is not one that the Hub can have",
            f"Write organisation/model or organisation/model@revision, {example}.",
        ) from error


class FilePin(Frozen):
    """One file. Large ones are known by SHA-256, small ones by git's hash of their blob."""

    path: HubPath
    size_bytes: Annotated[int, Field(ge=0, le=_MOST_FILE_BYTES)]
    sha256: Hex | None = None
    git_sha1: Sha1 | None = None

    @model_validator(mode="after")
    def _has_one_hash(self) -> FilePin:
        if (self.sha256 is None) == (self.git_sha1 is None):
            raise ValueError("a file has exactly one hash: sha256 or git_sha1")
        return self

    def new_hash(self) -> hashlib._Hash:
        """Start a hash with what must come before the file's own bytes."""
        if self.sha256 is not None:
            return hashlib.sha256()
        # the Hub knows files that are not in LFS by git's own blob hash only
        return hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)

    @property
    def want(self) -> str:
        """The hexadecimal digest that `new_hash` must end with."""
        return self.sha256 or self.git_sha1 or ""


class WeightsLock(Sealed):
    """Every file of a set at one commit. Where the bytes come from is not part of it."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    name: Name
    spec: Digest
    repository: HubRepository
    commit: Sha1
    files: list[FilePin] = Field(min_length=1, max_length=MOST_FILES)
    seal: Digest

    @model_validator(mode="after")
    def _names_each_path_once(self) -> WeightsLock:
        # names that differ in letter case only are two files on most disks: a fetch asks its disk
        paths = [pin.path for pin in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("two files have the same name")
        folders = {path.rpartition("/")[0] for path in paths}
        parents = {f[: i or len(f)] for f in folders for i, c in enumerate(f + "/") if c == "/"}
        if clash := parents & set(paths):
            raise ValueError(f"{min(clash)}: is both a file and a folder")
        return self

    @property
    def size_bytes(self) -> int:
        return sum(pin.size_bytes for pin in self.files)


def sealed_weights_lock(spec: WeightsSpec, commit: str, files: list[FilePin]) -> WeightsLock:
    """A new lock, sorted and sealed."""
    return WeightsLock(
        name=spec.name,
        spec=spec.lock_digest(),
        repository=spec.repository,
        commit=commit,
        # in one order, whatever the Hub's is: equal sets have equal locks
        files=sorted(files, key=lambda pin: pin.path),
        seal=UNSEALED,
    ).sealed()


def dump_weights_lock(lock: WeightsLock) -> str:
    """Write the lock as text: one line per file, so that a diff shows only what moved."""
    # JSON is YAML too: a file stays on one line, whatever characters its name has
    rows = [json.dumps(p.model_dump(exclude_none=True), ensure_ascii=False) for p in lock.files]
    lines = [
        "# Written by `sm120 weights lock`; do not edit: the seal would not match.",
        f"format: {lock.format}",
        f"name: {json.dumps(lock.name)}",
        f"spec: {lock.spec}",
        f"repository: {json.dumps(lock.repository)}",
        f"commit: {json.dumps(lock.commit)}",
        "files:",
        *(f"- {row}" for row in rows),
        f"seal: {lock.seal}",
        "",
    ]
    return "\n".join(lines)


def spec_path(checkout: Checkout, name: str) -> Path:
    """Where a set's spec lies."""
    return checkout.root / "lockfiles" / "weights" / f"{name}.yaml"


def lock_path(checkout: Checkout, name: str) -> Path:
    """Where its lock lies, beside it."""
    return checkout.root / "lockfiles" / "weights" / f"{name}.lock.yaml"


def spec_names(checkout: Checkout) -> list[str]:
    """The names of all weights specs, sorted."""
    paths = (checkout.root / "lockfiles" / "weights").glob("*.yaml")
    return sorted(p.stem for p in paths if not p.name.endswith(".lock.yaml"))


def read_spec(checkout: Checkout, name: str) -> WeightsSpec:
    """One set's spec, by its name; any model's by `organisation/model[@revision]`."""
    if is_reference(name):
        plain = weights_spec(name)
        if plain.name not in spec_names(checkout):
            return plain
        # it was saved, and perhaps edited since
        saved = read_spec(checkout, plain.name)
        if (saved.repository, saved.revision) != (plain.repository, plain.revision):
            raise SpecInvalid(
                f"{spec_path(checkout, plain.name)}: is of {saved.repository} at {saved.revision},"
                f" not of {plain.repository} at {plain.revision}",
                f"Name it {plain.name} if that spec is meant; else rename its file.",
            )
        return saved
    path = spec_path(checkout, name)
    if name not in spec_names(checkout):
        known = there_are(name, spec_names(checkout))
        raise WeightsUnknown(
            f"there is no weights spec {name!r} ({known})",
            "Any model without a spec is named as on the Hub: organisation/model[@revision].",
        )
    spec = read_yaml(path, WeightsSpec)
    if spec.name != name:
        raise SpecInvalid(f"{path}: the name in it is {spec.name!r}, not that of its file")
    return spec


def write_weights_lock(path: Path, lock: WeightsLock) -> None:
    """Put the lock in its place, whole."""
    text = dump_weights_lock(lock)
    write_bytes(path, text.encode())


def read_weights_lock(path: Path, *, name: str = "NAME", edited: str = "") -> WeightsLock:
    """Read a lock; refuse a damaged or edited one."""
    lock_it = f"`sm120 weights lock {name}`"
    edited = edited or f"Restore it (`git checkout lockfiles`), or make it again with {lock_it}."
    return read_sealed(path, WeightsLock, missing=f"Make it with {lock_it}.", edited=edited)


def kept_locks(checkout: Checkout) -> list[WeightsLock]:
    """Read every lock of the checkout; report and skip unreadable ones."""
    locks = []
    for path in sorted((checkout.root / "lockfiles" / "weights").glob("*.lock.yaml")):
        try:
            locks.append(read_weights_lock(path))
        except LockEdited as error:
            log.say(f"skipped: {error}")
    return locks


def current_weights_lock(checkout: Checkout, name: str) -> WeightsLock:
    """Read a set's lock; refuse one made for another spec."""
    spec = read_spec(checkout, name)
    path = lock_path(checkout, spec.name)
    lock = read_weights_lock(path, name=name)
    # a lock that was copied to another name has a good seal, so the name inside counts
    if lock.name != spec.name or lock.repository != spec.repository:
        raise LockEdited(
            f"{path.name}: is the lock of {lock.name} ({lock.repository})",
            f"Make it again with `sm120 weights lock {name}`.",
        )
    if lock.spec != spec.lock_digest():
        raise LockStale(
            f"{path.name}: the spec has changed since it was locked",
            f"Look at it with `sm120 weights lock {name} --dry-run`, then lock again.",
        )
    return lock


def is_chosen(path: str, only: Sequence[str], exclude: Sequence[str] = ()) -> bool:
    """Whether `only` is empty or matches the path, and `exclude` does not."""
    if only and not any(fnmatchcase(path, pattern) for pattern in only):
        return False
    return not any(fnmatchcase(path, pattern) for pattern in exclude)


def chosen_files(
    lock: WeightsLock, only: Sequence[str], exclude: Sequence[str] = ()
) -> list[FilePin]:
    """Select the requested files. Matching none is a mistake in the pattern, not a success."""
    pins = [pin for pin in lock.files if is_chosen(pin.path, only, exclude)]
    if not pins:
        without = f" without {' or '.join(exclude)}" if exclude else ""
        raise WeightsUnknown(
            f"{lock.name}: no file matches {' or '.join(only) or '*'}{without}",
            "Patterns are those of a shell, on the whole path: `*` also crosses folders.",
        )
    return pins
