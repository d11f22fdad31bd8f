"""`sm120 weights sign`, `check-signature` and `record`: what others can check a set by."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import json_option, say_json
from pipeline.cli.records import key_option
from pipeline.cli.weights_places import backing_of, places_in
from pipeline.errors import KeyInvalid, WeightsDamaged, WeightsUnknown

if TYPE_CHECKING:
    from pipeline.attest.keys import Signer
    from pipeline.attest.statement import Statement
    from pipeline.weights.place import Place

_folder = click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_set = click.option("--set", "name", help="Which set, where a Hub cache holds several.")
_signature = click.option(
    "--signature",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The signature file [.sm120/model.sig].",
)


@click.command()
@_folder
@click.option("--key", required=True, type=_file, help="The signing key, PEM (P-256).")
@click.option("--password-file", type=_file, help="Its password [SM120_KEY_PASSPHRASE].")
@_signature
@_set
@click.option("--full", is_flag=True, help="Read every file again; believe no receipt.")
@json_option
@click.pass_context
def sign(
    context: click.Context,
    folder: Path,
    key: Path,
    password_file: Path | None,
    signature: Path | None,
    name: str | None,
    full: bool,
    as_json: bool,
) -> None:
    """Sign a whole set in the OpenSSF model-signing format.

    Files that a receipt vouches for are not read again. The stock tool accepts the signature:
    `model_signing verify key DIR --signature SIG --public_key KEY.pub`.
    """
    from pipeline.attest.keys import ANY_NIST, read_private_file
    from pipeline.weights.sign import signing

    place = _one(places_in(context, folder), folder, name)
    log.say(f"{place.lock.name}: {backing_of(context, place).sentence()}")
    loaded = read_private_file(key, _password(password_file), ANY_NIST)
    target = signature or signing.default_signature(place)
    done = signing.sign(place, loaded, target, full=full)
    if as_json:
        return say_json({**asdict(done), "signature": str(done.signature)})
    for path in done.not_covered:
        log.say(f"not covered by the format: {path}")
    links = " --allow_symlinks" if place.hub_cache else ""
    click.echo(f"signed {done.files} files ({done.files_read} read) with key {done.key[:16]}")
    log.say("to check it with the format's own tool:")
    log.say(
        f"  model_signing verify key {place.snapshot} --signature {target}"
        f" --public_key KEY.pub{links}"
    )


@click.command("check-signature")
@_folder
@click.option("--public-key", required=True, type=_file, help="The signer's public key, PEM.")
@_signature
@_set
@click.option("--full", is_flag=True, help="Read every file again; believe no receipt.")
@json_option
@click.pass_context
def check_signature(
    context: click.Context,
    folder: Path,
    public_key: Path,
    signature: Path | None,
    name: str | None,
    full: bool,
    as_json: bool,
) -> None:
    """Hold a folder against a model-signing signature, by whomever it was made."""
    from pipeline.attest.keys import ANY_NIST, read_key_file, read_public
    from pipeline.weights.disk.receipt import check_by_receipt
    from pipeline.weights.sign import signing

    place = _place_or_none(context, folder, name, needed=signature is None)
    target = signature or (signing.default_signature(place) if place else folder / signing.NAME)
    known: dict[str, str] = {}
    if place and not full:
        known = {pin.path: pin.sha256 for pin in check_by_receipt(place).proved if pin.sha256}
    where = place.snapshot if place else folder
    signer = read_public(read_key_file(public_key), str(public_key), ANY_NIST)
    done = signing.check(where, target, signer, known)
    if as_json:
        return say_json({**asdict(done), "signature": str(done.signature)})
    for path in done.not_covered:
        log.say(f"not covered by the signature: {path}")
    click.echo(f"{done.files} files are as signed ({done.files_read} read), key {done.key[:16]}")


@click.command()
@_folder
@_set
@click.option("--full", is_flag=True, help="Read every file; else the receipt must vouch for all.")
@key_option
@click.option("--json", "as_json", is_flag=True, help="Always so: a record is JSON.")
@click.pass_context
def record(
    context: click.Context,
    folder: Path,
    name: str | None,
    full: bool,
    key_path: Path | None,
    as_json: bool,
) -> None:
    """Say what a set is and how it was verified, as an in-toto statement.

    With a key it is also signed and kept beside the set, where `sm120 verify DIR` looks for it, in
    the place of the one that `fetch` or `verify` left.
    """
    from pipeline.attest.keys import find_signer
    from pipeline.weights.sign import record as records

    sets = places_in(context, folder)
    place = _one(sets, folder, name)
    backing_of(context, place)
    found = records.verification(place, sets, full=full)
    statement = records.weights_statement(place, found)
    say_json(statement.as_json())
    if signer := find_signer(key_path, os.environ):
        _keep(place, statement, signer)
    if found.result == "damaged":
        raise WeightsDamaged(f"{place.lock.name}: {'; '.join(found.why)}")
    if found.result != "verified":
        log.say(f"{found.result}: {'; '.join(found.why)}")


def _keep(place: Place, statement: Statement, signer: Signer) -> None:
    from pipeline.attest.envelope import enclose
    from pipeline.files import write_bytes
    from pipeline.weights.sign.record import record_path

    write_bytes(record_path(place), enclose(statement, [signer]).dump())
    log.say(f"signed and kept as {record_path(place)}")


def _one(sets: list[Place], folder: Path, name: str | None) -> Place:
    found = [p for p in sets if name in (None, p.lock.name)]
    names = ", ".join(p.lock.name for p in sets)
    if not found:
        raise WeightsUnknown(f"{folder}: holds no set {name!r}", f"There are: {names}.")
    if len(found) > 1:
        raise WeightsUnknown(f"{folder}: holds several sets", f"Choose with --set: {names}.")
    return found[0]


def _place_or_none(
    context: click.Context, folder: Path, name: str | None, *, needed: bool
) -> Place | None:
    """A signed folder need not be a locked one, if it is told where the signature is."""
    from pipeline.weights.sign.signing import NAME

    try:
        return _one(places_in(context, folder), folder, name)
    except WeightsUnknown:
        if name or (needed and not (folder / NAME).exists()):
            raise
        return None


def _password(path: Path | None) -> bytes | None:
    if path is None:
        given = os.environ.get("SM120_KEY_PASSPHRASE")
        return given.encode() if given else None
    if not (word := path.read_bytes().rstrip(b"\r\n")):
        raise KeyInvalid(f"{path.name}: is empty", "Write the key's password into it.")
    return word
