"""Signatures in the OpenSSF model-signing format (OMS), over the digests that the lock proves.

`model_signing verify key DIR --signature DIR/.sm120/model.sig --public_key KEY.pub` accepts what
is made here, and what `model_signing sign key` makes is accepted here.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from pipeline.artifacts.attest import bundle
from pipeline.core.errors import ModelSignatureInvalid, WeightsDamaged
from pipeline.core.files import on_all_cores, write_bytes
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import ForeignModel, Hex, stays_below
from pipeline.weights.check.verify import WeightsVerifyOptions, verify_files
from pipeline.weights.disk import hashing
from pipeline.weights.disk.hashing import FileUnfit, FileUnreadable
from pipeline.weights.disk.survey import some, walk_folder
from pipeline.weights.model import FilePin
from pipeline.weights.place import STATE, LockedFolder

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
NAME = "model.sig"
# What the format's own tool (model_signing) leaves out by default.
GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
# What our and the Hub's own tools keep beside the files; no engine loads it.
OWN_PATHS = (STATE, ".cache/huggingface")

Digests = dict[str, str | FileUnfit | FileUnreadable]  # or why a file has none

_Path = Annotated[str, StringConstraints(min_length=1), AfterValidator(stays_below)]


class _Subject(ForeignModel):
    name: str
    digest: dict[Literal["sha256"], Hex]


class _Resource(ForeignModel):
    name: _Path
    algorithm: Literal["sha256"]
    digest: Hex


class _Serialization(ForeignModel):
    method: Literal["files"]
    hash_type: Literal["sha256"]
    allow_symlinks: bool = False
    ignore_paths: list[_Path] = []


class _Predicate(ForeignModel):
    serialization: _Serialization
    resources: list[_Resource] = Field(min_length=1)


class _Statement(ForeignModel):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: list[_Subject] = Field(min_length=1, max_length=1)
    predicateType: Literal["https://model_signing/signature/v1.0"]
    predicate: _Predicate


def locked_digests(place: LockedFolder, pins: Sequence[FilePin]) -> Digests:
    """Find the SHA-256 of locked files; read only those that the lock knows by git's SHA-1."""
    locked: Digests = {pin.path: pin.sha256 for pin in pins if pin.sha256}
    small = {pin.path: pin for pin in pins if not pin.sha256}

    def digest(path: str, stop: threading.Event) -> str:
        pin = small[path]
        handle = hashing.open_pin(place, pin)
        try:
            # once for either hash: files outside LFS are small
            proof = hashing.read_open(handle, pin.new_hash(), stop=stop)
            reading = hashing.read_open(handle, hashlib.sha256(), stop=stop)
        finally:
            os.close(handle)
        if proof.digest != pin.want or proof.identity != reading.identity:
            raise FileUnfit("does not have the locked bytes")
        return reading.digest

    return locked | read_digests(digest, list(small))


def read_digests(work: Callable[[str, threading.Event], str], paths: list[str]) -> Digests:
    """The digests that `work` reads, on all cores; Ctrl-C sets its event."""
    stop = threading.Event()

    def read(path: str) -> str | FileUnfit | FileUnreadable:
        try:
            return work(path, stop)
        except (FileUnfit, FileUnreadable) as reason:
            return reason
        except hashing.Moved as error:
            return FileUnfit(str(error))
        except OSError as error:
            return FileUnreadable(f"could not be read now ({error.strerror})")

    return dict(zip(paths, on_all_cores(read, paths, stop.set), strict=True))


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of some paths, or lies in one of them."""
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def signed_files_below(root: Path, ignored: Iterable[str]) -> list[str]:
    """List every file below a folder but the ignored ones; follow no link.

    It names an unreadable folder, with a slash: no signature can cover it.
    """
    skip = list(ignored)
    paths = (path for path in walk_folder(root, skip) if not is_below(path, skip))
    return sorted(paths, key=PurePosixPath)


def sha256_below(root: Path, path: str, stop: threading.Event | None = None) -> str:
    """Hash a file in a folder; a link may only lead into the same folder."""
    home, where, name = root.resolve(), root, path
    if (root / path).is_symlink():
        # a snapshot of a Hub cache is all links: its blobs lie beside it in the same repository
        home = home.parent.parent if home.parent.name == "snapshots" else home
        real = (root / path).resolve()
        if not real.is_relative_to(home):
            raise FileUnfit("is a link out of the folder")
        where, name = real.parent, real.name
    handle = hashing.open_below(where, name)
    try:
        return hashing.read_open(handle, hashlib.sha256(), stop=stop).digest
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Signed:
    """What a signature covers."""

    signature: Path
    key: str
    files: int
    files_read: int
    not_covered: list[str]


def default_signature(place: LockedFolder) -> Path:
    """A set's default signature file, where verify does not take it for an extra file."""
    return place.state / NAME


def root_digest(digests: list[str]) -> str:
    """The digest of the whole: over the digests of the files, in their order."""
    # as model_signing computes it: over the raw digests, without the names
    return hashlib.sha256(b"".join(bytes.fromhex(d) for d in digests)).hexdigest()


def statement(name: str, digests: Mapping[str, str], *, links: bool) -> dict[str, Any]:
    """The in-toto statement of a set, with the format's own field names."""
    # the format's order: by the parts of a path, not by its characters
    paths = sorted(digests, key=PurePosixPath)
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": root_digest([digests[p] for p in paths])}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": links,
                "ignore_paths": [*OWN_PATHS, *GIT_PATHS],
            },
            "resources": [{"name": p, "algorithm": "sha256", "digest": digests[p]} for p in paths],
        },
    }


def sign_folder(
    place: LockedFolder, key: ec.EllipticCurvePrivateKey, signature: Path, *, full: bool = False
) -> Signed:
    """Sign a set that is whole, and alone in its folder."""
    ignored = [*OWN_PATHS, *GIT_PATHS, *_inside(signature, place.snapshot)]
    known = {pin.path for pin in place.lock.files}
    report = verify_files(place, WeightsVerifyOptions(full=full)).report
    if damage := report.damage:
        files = some([f"{finding.path} ({finding.kind})" for finding in damage])
        raise WeightsDamaged(f"{place.lock.name}: not signed, for it is damaged: {files}")
    # the stock tool compares the whole folder, and would call the set changed
    if extra := [p for p in signed_files_below(place.snapshot, ignored) if p not in known]:
        raise WeightsDamaged(
            f"{place.lock.name}: not in the lock, but in the folder to be signed: {some(extra)}",
            "Move what is not part of the set out of the folder.",
        )
    digests = {}
    # after verify: large files need not be read again
    for path, digest in locked_digests(place, place.lock.files).items():
        if not isinstance(digest, str):
            raise WeightsDamaged(f"{path}: {digest}")
        digests[path] = digest
    covered = {p: d for p, d in digests.items() if not is_below(p, ignored)}
    if not covered:
        raise WeightsDamaged(
            f"{place.lock.name}: the set has no file that a signature covers",
            "All files of the set are among those that are ignored.",
        )
    text = statement(place.lock.name, covered, links=place.hub_cache)
    place.require_own_state()
    write_bytes(signature, bundle.signed(text, key))
    return Signed(
        signature,
        bundle.key_hint(key.public_key()),
        len(covered),
        report.files_read,
        sorted(set(digests) - set(covered)),
    )


@dataclass(frozen=True)
class SignedFiles:
    """What a signature claims about files, before any of them is read."""

    files: dict[str, str]
    ignored: tuple[str, ...]
    allows_links: bool

    def ignores(self, path: str) -> bool:
        """Whether the signature does not cover it."""
        return is_below(path, self.ignored)


def signed_files(signature: Path, key: ec.EllipticCurvePublicKey) -> SignedFiles:
    """The SHA-256 of each file, as its signer claims."""
    payload = bundle.opened(signature, key)
    try:
        claimed = _Statement.model_validate(read_json(payload, most_bytes=len(payload)))
    except (ValidationError, JsonInvalid) as error:
        raise ModelSignatureInvalid(
            f"{signature.name}: is not a model-signing statement over files with SHA-256"
        ) from error
    resources, rules = claimed.predicate.resources, claimed.predicate.serialization
    files = {resource.name: resource.digest for resource in resources}
    # the later digest would win here, the earlier one perhaps elsewhere
    if len(files) != len(resources):
        raise ModelSignatureInvalid(f"{signature.name}: lists a file twice")
    if claimed.subject[0].digest["sha256"] != root_digest([each.digest for each in resources]):
        raise ModelSignatureInvalid(f"{signature.name}: contradicts itself (root digest)")
    return SignedFiles(files, tuple(rules.ignore_paths), rules.allow_symlinks)


def compare_signature(
    folder: Path,
    signature: Path,
    key: ec.EllipticCurvePublicKey,
    known: Mapping[str, str] | None = None,
) -> Signed:
    """Compare a folder with a signature. `known` are digests that need not be computed again."""
    claimed = signed_files(signature, key)
    wanted = claimed.files
    own = [*OWN_PATHS, *_inside(signature, folder)]
    ignored = [*claimed.ignored, *own]
    # a file both listed and ignored would never be compared
    if hidden := [path for path in wanted if is_below(path, ignored)]:
        raise ModelSignatureInvalid(f"{signature.name}: both lists and ignores {hidden[0]}")
    present = signed_files_below(folder, ignored)
    _compare("missing", set(wanted) - set(present))
    _compare("extra", set(present) - set(wanted))
    if not claimed.allows_links:
        _compare("links", {p for p in present if (folder / p).is_symlink()})
    unread = [p for p in present if p not in (known or {})]
    read = read_digests(partial(sha256_below, folder), unread)
    digests = read | {p: d for p, d in (known or {}).items() if p in wanted}
    # first: a failing disk must not be reported as a forged file
    if failed := {p: d for p, d in digests.items() if isinstance(d, FileUnreadable)}:
        path, reason = min(failed.items())
        raise ModelSignatureInvalid(
            f"{path}: {reason}",
            "Its bytes were not judged. Check the disk and the limit of open files.",
        )
    bad = {p for p, d in digests.items() if isinstance(d, FileUnfit) or d != wanted[p]}
    _compare("changed", bad)
    return Signed(
        signature,
        bundle.key_hint(key),
        len(wanted),
        len(unread),
        [p for p in signed_files_below(folder, own) if is_below(p, ignored)],
    )


def _compare(what: str, paths: set[str]) -> None:
    if paths:
        raise ModelSignatureInvalid(
            f"the folder differs from what was signed: {what}: {some(sorted(paths))}"
        )


def _inside(signature: Path, folder: Path) -> list[str]:
    """The signature itself, if it is in the folder that it covers."""
    # the format has no rule for it; its own tool ignores the signature file in the same way
    real, root = signature.resolve(), folder.resolve()
    return [real.relative_to(root).as_posix()] if real.is_relative_to(root) else []
