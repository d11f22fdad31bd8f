"""`sm120 weights sign`, `check-signature` and `attest`: what others can check a set by."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from pipeline import log
from pipeline.attest.envelope import enclose
from pipeline.attest.keys import (
    ANY_NIST,
    find_signer,
    read_key_file,
    read_private_file,
    read_public,
)
from pipeline.cli.context import say_json
from pipeline.cli.options import EXISTING_FILE, EXISTING_FOLDER, json_option, key_option
from pipeline.cli.weights.places import backing_of, places_in
from pipeline.errors import WeightsDamaged, WeightsUnknown
from pipeline.files import write_bytes
from pipeline.weights.disk.receipt import check_by_receipt
from pipeline.weights.place import Place
from pipeline.weights.sign import record as records
from pipeline.weights.sign import signing
from pipeline.weights.sign.record import record_path
from pipeline.weights.sign.signing import NAME

_folder = click.argument("folder", metavar="DIR", type=EXISTING_FOLDER)
_set = click.option("--set", "name", help="Name of the set, where a Hub cache holds several.")
_full = click.option("--full", is_flag=True, help="Read every file again, even with a receipt.")
_signature = click.option(
    "--signature",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Signature file [default: .sm120/model.sig].",
)


@click.command()
@_folder
@click.option(
    "--key", required=True, type=EXISTING_FILE, help="Private key, PEM [SM120_KEY_PASSPHRASE]."
)
@_signature
@_set
@_full
@json_option
@click.pass_context
def sign(
    context: click.Context,
    folder: Path,
    key: Path,
    signature: Path | None,
    name: str | None,
    full: bool,
    as_json: bool,
) -> None:
    """Sign a whole set in the OpenSSF model-signing format.

    Files that a receipt vouches for are not read again. The stock tool accepts the signature:
    `model_signing verify key DIR --signature SIG --public_key KEY.pub`.
    """
    place = _one(places_in(context, folder), folder, name)
    log.say(f"{place.lock.name}: {backing_of(context, place).sentence()}")
    passphrase = os.environ.get("SM120_KEY_PASSPHRASE", "").encode() or None
    loaded = read_private_file(key, passphrase, ANY_NIST)
    target = signature or signing.default_signature(place)
    done = signing.sign(place, loaded, target, full=full)
    if as_json:
        return say_json({**asdict(done), "signature": str(done.signature)})
    for path in done.not_covered:
        log.say(f"not covered by the format: {path}")
    # the Hub's cache consists of symlinks, which the tool refuses by default
    links = " --allow_symlinks" if place.hub_cache else ""
    click.echo(
        f"signed {log.count(done.files, 'file')} ({done.files_read} read) with key {done.key[:16]}"
    )
    log.say("to check it with the format's own tool:")
    log.say(
        f"  model_signing verify key {place.snapshot} --signature {target}"
        f" --public_key KEY.pub{links}"
    )


@click.command("check-signature")
@_folder
@click.option(
    "--public-key", required=True, type=EXISTING_FILE, help="Public key of the signer, PEM."
)
@_signature
@_set
@_full
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
    """Check a folder against a model-signing signature, whoever made it."""
    place = _place_or_none(context, folder, name, needed=signature is None)
    target = signature or (signing.default_signature(place) if place else folder / signing.NAME)
    # hashes that a receipt proves for unchanged files; --full reads them all again
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
    click.echo(
        f"{log.count(done.files, 'file is', 'files are')} as signed ({done.files_read} read),"
        f" key {done.key[:16]}"
    )


@click.command()
@_folder
@_set
@_full
@key_option
@click.pass_context
def attest(
    context: click.Context, folder: Path, name: str | None, full: bool, key_path: Path | None
) -> None:
    """Print what a set is and how it was verified, as an in-toto statement.

    With a key it is also signed and kept beside the set, where `sm120 verify DIR` looks for it,
    in place of the one that `fetch` or `verify` left.
    """
    sets = places_in(context, folder)
    place = _one(sets, folder, name)
    backing_of(context, place)
    verification = records.verification(place, sets, full=full)
    statement = records.weights_statement(place, verification)
    # printed also where the set is damaged: that, too, is a statement about it
    say_json(statement.as_json())
    # without a key it is only printed; the unsigned one beside the set stays
    if signer := find_signer(key_path, os.environ):
        write_bytes(record_path(place), enclose(statement, [signer]).dump())
        log.say(f"signed and kept as {record_path(place)}")
    if verification.result == "damaged":
        raise WeightsDamaged(f"{place.lock.name}: {'; '.join(verification.why)}")
    if verification.result != "verified":
        log.say(f"{verification.result}: {'; '.join(verification.why)}")


def _one(sets: list[Place], folder: Path, name: str | None) -> Place:
    chosen = [p for p in sets if name in (None, p.lock.name)]
    names = ", ".join(p.lock.name for p in sets)
    if not chosen:
        raise WeightsUnknown(f"{folder}: holds no set {name!r}", f"There are: {names}.")
    if len(chosen) > 1:
        raise WeightsUnknown(f"{folder}: holds several sets", f"Choose with --set: {names}.")
    return chosen[0]


def _place_or_none(
    context: click.Context, folder: Path, name: str | None, *, needed: bool
) -> Place | None:
    """A signed folder need not be a locked one, where its signature is named or beside it."""
    try:
        return _one(places_in(context, folder), folder, name)
    except WeightsUnknown:
        if name or (needed and not (folder / NAME).exists()):
            raise
        return None
