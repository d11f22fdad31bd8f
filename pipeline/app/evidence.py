"""Make evidence: statements about an image or any file, bills of materials, and keys."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from pipeline.app.image_statements import sign_store
from pipeline.app.images import find_image
from pipeline.app.signing import own_trust_file, signer_of, trust_files, trust_of
from pipeline.app.statements import sign_file
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest import keys
from pipeline.artifacts.attest.envelope import Envelope
from pipeline.artifacts.attest.keyring import (
    default_folder,
    own_public_keys,
    public_id,
    use_first_key,
)
from pipeline.artifacts.attest.names import KINDS
from pipeline.artifacts.attest.predicates import MODELS
from pipeline.artifacts.attest.statement import moment
from pipeline.artifacts.attest.strict import read_signed_json
from pipeline.artifacts.attest.trust import (
    TrustedKey,
    add_entry,
    key_name,
    read_trust,
    remove_entry,
    trust_entry,
)
from pipeline.core.errors import KeyInvalid, RecordInvalid, StoreUnwritable
from pipeline.core.model import Name, canonical_json
from pipeline.evidence.statements.bill import bill_of
from pipeline.evidence.statements.image import record_image
from pipeline.evidence.statements.sbom import cyclonedx, cyclonedx_bytes, spdx_bytes
from pipeline.evidence.verify.artifact import read_bounded
from pipeline.images.assemble.image import Built

# only kinds whose content we can check; of others we would sign anything
OWN_KINDS = sorted(name for name, uri in KINDS.items() if uri in MODELS)


class ImageEvidence(NamedTuple):
    """An image, and its statements by name."""

    built: Built
    statements: dict[str, Envelope]


class NewKey(NamedTuple):
    """A new key: its two files, and its entry for a trust file."""

    private: Path
    public: Path
    entry: str
    signer: keys.Signer


class ListedKey(NamedTuple):
    """A trusted key, and the file that says so."""

    key: TrustedKey
    state: str
    file: Path


def state_and_keep_image(
    workspace: Workspace,
    name: str,
    *,
    key_path: Path | None = None,
    unsigned: bool = False,
    spdx: bool = False,
    platform: str | None = None,
) -> ImageEvidence:
    """State and sign what a built image is made of; the statements are kept in the store."""
    checkout, store = workspace.checkout(), workspace.store()
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        # without a key an error, not silence: who calls this wants a signature
        signers = [] if unsigned else [signer_of(key_path)]
        statements = record_image(checkout, store, built, signers, moment(), spdx=spdx)
    return ImageEvidence(built, statements)


def attest_file(artifact: Path, kind: str, predicate: Path, key_path: Path | None = None) -> Path:
    """Sign a statement about any file; returns where it is, next to the file."""
    # strict and bounded: every reader must understand the signed content alike
    try:
        body = read_signed_json(read_bounded(predicate), predicate.name)
        return sign_file(artifact, kind, body, signer_of(key_path))
    except RecordInvalid as error:
        # the general hint is for evidence of others, these facts are the user's own
        hint = f"Correct {predicate}; `sm120 image schema {kind}` prints its form."
        raise RecordInvalid(str(error), hint) from error


def bill_of_materials(
    workspace: Workspace,
    name: str,
    form: Literal["cyclonedx", "spdx"] = "cyclonedx",
    platform: str | None = None,
    weights: Sequence[str] = (),
) -> bytes:
    """Every wheel, .deb, file and patch of a built image, by layer, as JSON.

    With weights it is the bill of a run: each set is a `machine-learning-model` beside the image.
    """
    checkout, store = workspace.checkout(), workspace.store_to_read()
    with store.in_use():
        bill = bill_of(checkout, store, find_image(checkout, store, name, platform))
    if not weights:
        return cyclonedx_bytes(bill) if form == "cyclonedx" else spdx_bytes(bill)
    # slow to load, and most bills name no weights
    from pipeline.app.weights import find_set
    from pipeline.weights.model import current_weights_lock
    from pipeline.weights.sign.record import set_digest

    document = cyclonedx(bill)
    for each in weights:
        folder = Path(each)
        known = find_set(workspace, folder).lock if folder.is_dir() else None
        lock = known or current_weights_lock(checkout, each)
        # https://github.com/package-url/purl-spec: the Hub's own type, by commit
        purl, digest = f"pkg:huggingface/{lock.repository}@{lock.commit}", set_digest(lock)
        files = []
        for pin in lock.files:
            hashes = [{"alg": "SHA-256", "content": pin.sha256}] if pin.sha256 else []
            # git's hash of a blob is no hash of the file alone: readers must not take it for one
            noted = {"git:blob": pin.git_sha1, "size": str(pin.size_bytes)}
            notes = [{"name": f"sm120:{k}", "value": v} for k, v in noted.items() if v]
            file = {"type": "file", "name": pin.path, "properties": notes}
            files.append({**file, "hashes": hashes} if hashes else file)
        document["components"].append(
            {
                "type": "machine-learning-model",
                "bom-ref": purl,
                "name": lock.repository,
                "version": lock.commit,
                "purl": purl,
                "properties": [{"name": "sm120:files:digest", "value": digest}],
                "components": files,
            }
        )
        document["dependencies"].append({"ref": purl, "dependsOn": []})
        # not the image's own bill, so it needs another number
        own = uuid.UUID(document["serialNumber"].removeprefix("urn:uuid:"))
        document["serialNumber"] = f"urn:uuid:{uuid.uuid5(own, digest)}"
    return canonical_json(document) + b"\n"


def new_key(name: str, folder: Path | None = None, secret: str | None = None) -> NewKey:
    """Make a key (ECDSA P-256) that only its owner can read; never overwrites one."""
    require_key_name(name)
    path = (folder or default_folder(os.environ)) / f"{name}.pem"
    passphrase = secret.encode() if secret else None
    # a run that was killed or had no more space between the two halves
    is_half = path.is_file() and not os.path.lexists(path.with_suffix(".pub"))
    key = keys.read_private_file(path, passphrase) if is_half else keys.make_private_key()
    try:
        public = keys.write_key(path, key, passphrase, is_half=is_half)
    except StoreUnwritable as error:
        raise StoreUnwritable(str(error), "Name a folder you can write with --output.") from error
    return NewKey(path, public, _entry(name, public), keys.LocalSigner(key))


def sign_with_first_key(workspace: Workspace, made: NewKey) -> Iterator[str]:
    """Let a user's first key sign what the store holds unsigned; yields a line for each image."""
    if not use_first_key(os.environ, made.private.stem):
        return
    checkout = workspace.checkout_or_none()
    # to open a store makes its folders, which a new key alone does not need
    if checkout and (workspace.store_root() / "images").is_dir():
        yield from sign_store(checkout, workspace.store(), made.signer)


def require_key_name(name: str) -> None:
    """Refuse a name that does not suit file names, trust files and messages."""
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        raise KeyInvalid(
            f"{name!r}: a key name has lower case letters, digits, . and - only",
            "Choose another name.",
        ) from error


def _entry(name: str, public: Path, believed: Sequence[str] = ()) -> str:
    pem = keys.public_pem(keys.read_public(keys.read_key_file(public), str(public)))
    return trust_entry(name, pem, _id_of(public), datetime.now(UTC), believed=believed)


def _id_of(public: Path) -> str:
    return keys.key_id(keys.read_public(keys.read_key_file(public), str(public)))


def key_entry(name: str) -> str:
    """Make a key's entry for a trust file, given the key's name or file."""
    path = Path(name)
    # a name, as new_key took it
    if not path.exists():
        path = default_folder(os.environ) / f"{name}.pub"
    if not path.with_suffix(".pub").exists():
        raise KeyInvalid(
            f"{name}: there is no such key ({path.with_suffix('.pub')} does not exist)",
            "`sm120 evidence list-keys` lists them; a path to a .pub works too.",
        )
    return _entry(path.stem, path.with_suffix(".pub"))


def trust_key(
    public: Path, name: str | None = None, believed: Sequence[str] = (), path: Path | None = None
) -> str:
    """Add a public key to a trust file; returns what was done, in one line."""
    name = name or key_name(public)
    require_key_name(name)
    target = path or _own_file("--trust")
    key_id, entry = _id_of(public), _entry(name, public, believed)
    known = read_trust(target).find(key_id) if target.exists() else []
    if known:
        return f"{target}: has {known[0].name} {key_id} already"
    add_entry(target, entry, key_id)
    return f"{target}: now has {name} {key_id}"


def _own_file(option: str) -> Path:
    if (own := own_trust_file()) is None:
        raise StoreUnwritable("this user has no home folder", f"Name a trust file with {option}.")
    return own


def untrust_key(workspace: Workspace, wanted: str, path: Path | None = None) -> str:
    """Take a key out of a trust file; returns what was done, in one line."""
    target = path or _own_file("--from")
    known = read_trust(target).keys if target.exists() else []
    trust = trust_of(workspace, None)
    trusted = trust.keys if trust else []
    # if two files name keys alike, list_keys renames one of them
    names = {wanted, *(key.id for key in trusted if key.name == wanted)}
    # a file that happens to share a key's name is not meant
    if Path(wanted).is_file() and not any({key.name, key.id} & names for key in known):
        names = {_id_of(Path(wanted))}
    if matches := [key for key in known if {key.name, key.id} & names]:
        remove_entry(target, matches[0].id)
        return f"{target}: no longer has {matches[0].name} {matches[0].id}"
    for key in trusted:
        if not {key.name, key.id} & names:
            continue
        where = _trusted_by(workspace, key.id)
        if where in trust_files(workspace):
            hint = f"`sm120 evidence untrust-key {key.name} --trust {where}` takes it out there."
            raise KeyInvalid(f"{wanted}: is trusted by {where}, not by {target}", hint)
        hint = "Your own keys are trusted while they lie there; `rm` takes one away."
        raise KeyInvalid(f"{wanted}: is a key of your own, {where}", hint)
    message = f"{wanted}: {target} trusts no key of this name or id"
    raise KeyInvalid(message, "`sm120 evidence list-keys` lists the keys that are trusted.")


def _trusted_by(workspace: Workspace, key_id: str) -> Path:
    """Find the trust file that has a key, or the user's own key file."""
    files = [path for path in trust_files(workspace) if read_trust(path).find(key_id)]
    own = [path for path in own_public_keys(os.environ) if public_id(path) == key_id]
    return [*files, *own, default_folder(os.environ)][0]


def list_keys(workspace: Workspace, trust_path: Path | None = None) -> list[ListedKey]:
    """The trusted keys, whether each counts today, and the file that has it."""
    trust, now = trust_of(workspace, trust_path), datetime.now(UTC)
    listed = []
    for key in trust.keys if trust else ():
        state = "trusted"
        # revoked first: that counts, however long the key would be valid
        if key.revoked:
            state = f"revoked: {key.revoked.reason}"
        elif now > key.until:
            state = "expired"
        elif now < key.not_before:
            state = "not valid yet"
        listed.append(ListedKey(key, state, trust_path or _trusted_by(workspace, key.id)))
    return listed
