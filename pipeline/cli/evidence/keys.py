"""The keys that sign evidence: making one, showing it, and those that are trusted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from pipeline import log
from pipeline.attest import keys
from pipeline.attest.keyring import default_folder, own_public_keys, public_id, use_first_key
from pipeline.attest.names import KINDS
from pipeline.attest.trust import (
    TrustedKey,
    add_entry,
    key_name,
    read_trust,
    remove_entry,
    trust_entry,
)
from pipeline.cli.context import checkout_or_none, say_json, store_of
from pipeline.cli.image_statements import sign_store
from pipeline.cli.options import ANY_PATH, EXISTING_FILE, json_option, trust_option
from pipeline.cli.signing import own_trust_file, trust_files, trust_of
from pipeline.errors import KeyInvalid, StoreUnwritable
from pipeline.model import Name
from pipeline.store.store import default_root


@click.command("new-key")
@click.argument("name")
@click.option(
    "--to",
    "folder",
    type=ANY_PATH,
    help="Folder for the key [default: your own keys].",
)
@click.option(
    "--passphrase", "ask", is_flag=True, help="Ask for a passphrase [SM120_KEY_PASSPHRASE]."
)
@click.pass_context
def new_key(context: click.Context, name: str, folder: Path | None, ask: bool) -> None:
    """Make a key (ECDSA P-256) that only you can read. An old key is never overwritten.

    Your first key signs the statements of every later command, and now those in the store that
    are unsigned and still true. On this machine it is trusted without an entry. With --to, the
    key is only written.
    """
    _require_plain(name)
    # never an option: the arguments of a process can be read by every user of a machine
    secret = os.environ.get("SM120_KEY_PASSPHRASE")
    if ask and not secret:
        secret = click.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
    key = keys.new_key()
    path = (folder or default_folder(os.environ)) / f"{name}.pem"
    try:
        public = keys.write_key(path, key, secret.encode() if secret else None)
    except StoreUnwritable as error:
        raise StoreUnwritable(str(error), "Name a folder you can write with --to.") from error
    # on stderr, so that stdout is the entry alone and can be appended to a trust file
    log.say(f"{path}: the private key, keep it secret")
    log.say(f"{public}: the public key, for those who verify\n")
    log.say("Entry for their trust file, under `keys:` (shorten `for` to what it may sign):")
    click.echo(_entry(name, public))
    # a key that is written elsewhere may be for somebody else: it signs nothing here
    if folder is None and use_first_key(os.environ, name):
        _sign_store(context, keys.LocalSigner(key))


def _sign_store(context: click.Context, signer: keys.Signer) -> None:
    """Sign the statements of all images that the store holds and the checkout still describes."""
    root, checkout = context.obj["store"] or default_root(), checkout_or_none(context)
    # to open a store makes its folders, which a new key alone does not need
    if checkout and (root / "images").is_dir():
        for line in sign_store(checkout, store_of(context), signer):
            log.say(line)


def _require_plain(name: str) -> None:
    try:
        # it becomes a file name, and stands in trust files and messages
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


@click.command("show-key")
@click.argument("name", metavar="NAME|FILE.pub")
def show_key(name: str) -> None:
    """Print the entry of a key for a trust file: its id, its public half, what it may sign."""
    path = Path(name)
    # a name, as new-key took it
    if not path.exists():
        path = default_folder(os.environ) / f"{name}.pub"
    if not path.with_suffix(".pub").exists():
        raise KeyInvalid(
            f"{name}: there is no such key ({path.with_suffix('.pub')} does not exist)",
            "`sm120 evidence list-keys` lists them; a path to a .pub works too.",
        )
    click.echo(_entry(path.stem, path.with_suffix(".pub")))


@click.command("trust-key")
@click.argument("public", metavar="FILE.pub", type=EXISTING_FILE)
@click.option("--name", help="Name of the key in messages [default: that of its file].")
@click.option(
    "--for",
    "believed",
    multiple=True,
    metavar="KIND",
    type=click.Choice([*KINDS]),
    help="Believe it only about this, e.g. provenance. Repeatable [default: all kinds].",
)
@click.option(
    "--to",
    "path",
    # the file that verify believes then, and no other
    envvar="SM120_TRUST",
    type=ANY_PATH,
    help="Trust file to add it to, e.g. lockfiles/trust.yaml [SM120_TRUST; default: your own].",
)
def trust_key(public: Path, name: str | None, believed: tuple[str, ...], path: Path | None) -> None:
    """Add somebody's public key to a trust file, so that `sm120 verify` believes what it signed.

    For a year, which the file says and you may change. Compare the id that is printed with the
    owner of the key, over another channel than the one that the key came by.
    """
    name = name or key_name(public)
    _require_plain(name)
    target = path or _own_file("--to")
    key_id, entry = _id_of(public), _entry(name, public, believed)
    known = read_trust(target).find(key_id) if target.exists() else []
    if known:
        return click.echo(f"{target}: has {known[0].name} {key_id} already")
    add_entry(target, entry, key_id)
    click.echo(f"{target}: now has {name} {key_id}")


def _own_file(option: str) -> Path:
    if (own := own_trust_file()) is None:
        raise StoreUnwritable("this user has no home folder", f"Name a trust file with {option}.")
    return own


@click.command("untrust-key")
@click.argument("wanted", metavar="NAME|ID|FILE.pub")
@click.option(
    "--from",
    "path",
    envvar="SM120_TRUST",
    type=EXISTING_FILE,
    help="Trust file to take it from, e.g. lockfiles/trust.yaml [SM120_TRUST; default: your own].",
)
@click.pass_context
def untrust_key(context: click.Context, wanted: str, path: Path | None) -> None:
    """Take a key out of a trust file, so that `sm120 verify` no longer believes what it signed.

    The way back from trust-key. A key that was stolen is better left there as `revoked`: what it
    signed is then broken, and not merely unknown.
    """
    target = path or _own_file("--from")
    known = read_trust(target).keys if target.exists() else []
    trust = trust_of(context, None)
    # of two keys with one name in two files, list-keys gives one another name
    names = {wanted, *(key.id for key in (trust.keys if trust else ()) if key.name == wanted)}
    # a file that happens to have the name of a key is not meant
    if Path(wanted).is_file() and not any({key.name, key.id} & names for key in known):
        names = {_id_of(Path(wanted))}
    matches = [key for key in known if {key.name, key.id} & names]
    if not matches:
        raise _not_trusted(context, wanted, names, target)
    remove_entry(target, matches[0].id)
    click.echo(f"{target}: no longer has {matches[0].name} {matches[0].id}")


def _not_trusted(context: click.Context, wanted: str, names: set[str], target: Path) -> KeyInvalid:
    """Why a key cannot be taken out of this file: nobody trusts it, or something else does."""
    trust = trust_of(context, None)
    for key in trust.keys if trust else []:
        where = _trusted_by(context, key.id)
        if not {key.name, key.id} & names:
            continue
        if where in trust_files(context):
            hint = f"`sm120 evidence untrust-key {key.name} --from {where}` takes it out there."
            return KeyInvalid(f"{wanted}: is trusted by {where}, not by {target}", hint)
        hint = "Your own keys are trusted while they lie there; `rm` takes one away."
        return KeyInvalid(f"{wanted}: is a key of your own, {where}", hint)
    message = f"{wanted}: {target} trusts no key of this name or id"
    return KeyInvalid(message, "`sm120 evidence list-keys` lists the keys that are trusted.")


def _trusted_by(context: click.Context, key_id: str) -> Path:
    """The trust file that has a key, or the file of a key of one's own."""
    files = [path for path in trust_files(context) if read_trust(path).find(key_id)]
    own = [path for path in own_public_keys(os.environ) if public_id(path) == key_id]
    return [*files, *own, default_folder(os.environ)][0]


@click.command("list-keys")
@trust_option
@json_option
@click.pass_context
def list_keys(context: click.Context, trust_path: Path | None, as_json: bool) -> None:
    """List the keys that are trusted, by which file, what for and until when."""
    trust = trust_of(context, trust_path)
    now = datetime.now(UTC)
    rows = [
        {**_row(key, now), "in": str(trust_path or _trusted_by(context, key.id))}
        for key in (trust.keys if trust else ())
    ]
    if as_json:
        return say_json(rows)
    if not rows:
        return click.echo(
            "no key is trusted here: `sm120 evidence trust-key FILE.pub` believes somebody's,"
            " `sm120 evidence new-key NAME` makes one"
        )
    head = ["name", "id", "state", "until", "in", "for"]
    table = [[*(r[name] for name in head[:-1]), ", ".join(r["for"])] for r in rows]
    click.echo(log.table(head, table))


def _row(key: TrustedKey, now: datetime) -> dict[str, Any]:
    # revoked first: that is what counts, however long the key would be valid
    state = "trusted"
    if key.revoked:
        state = f"revoked: {key.revoked.reason}"
    elif now > key.until:
        state = "expired"
    elif now < key.not_before:
        state = "not valid yet"
    until = f"{key.until:%Y-%m-%d}"
    return {"name": key.name, "id": key.id, "state": state, "until": until, "for": key.kinds}
