"""`sm120 keys`: making and showing the keys that sign evidence."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.cli.common import checkout_of, json_option, say_json, store_of
from pipeline.errors import KeyInvalid, UnknownImage

if TYPE_CHECKING:
    from pipeline.attest.keys import Signer
    from pipeline.attest.trust import Trust, TrustedKey

trust_option = click.option(
    "--trust",
    "trust_path",
    envvar="SM120_TRUST",
    type=click.Path(path_type=Path),
    help="The trust file [SM120_TRUST]; else lockfiles/trust.yaml and your own keys.",
)


@click.group()
def keys() -> None:
    """Make and show the keys that sign evidence."""


@keys.command("new")
@click.argument("name")
@click.option("--to", "folder", type=click.Path(path_type=Path), help="Into this folder.")
@click.option("--passphrase", "ask", is_flag=True, help="Ask for one [SM120_KEY_PASSPHRASE].")
@click.pass_context
def new(context: click.Context, name: str, folder: Path | None, ask: bool) -> None:
    """Make a key (ECDSA P-256) that only you can read; an old one is never overwritten.

    Your first key signs what every later command states, and at once what the store holds unsigned,
    where that is still true. Here it is trusted without an entry. With --to neither is done.
    """
    from pipeline.attest.keyring import default_folder, use_first_key
    from pipeline.attest.keys import LocalSigner, new_key, write_key

    _require_plain(name)
    secret = os.environ.get("SM120_KEY_PASSPHRASE")
    if ask and not secret:
        secret = click.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
    key = new_key()
    path = (folder or default_folder(os.environ)) / f"{name}.pem"
    public = write_key(path, key, secret.encode() if secret else None)
    log.say(f"{path}: keep it secret\n{public}: give it to those who verify\n")
    log.say("For their trust file, under `keys:` (shorten `for` to what it may sign):")
    click.echo(_entry(name, public))
    if folder is None and use_first_key(os.environ, name):
        _sign_store(context, LocalSigner(key))


def _sign_store(context: click.Context, signer: Signer) -> None:
    """Sign the statements of all images that the store holds and the checkout still describes."""
    from pipeline.cli.statements import sign_store
    from pipeline.store.store import default_root

    root = context.obj["store"] or default_root()
    try:
        checkout = checkout_of(context)
    except UnknownImage:
        return
    if (root / "images").is_dir():
        for line in sign_store(checkout, store_of(context), signer):
            log.say(line)


def _require_plain(name: str) -> None:
    from pydantic import TypeAdapter, ValidationError

    from pipeline.model import Name

    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        raise KeyInvalid(
            f"{name!r}: a key's name is lower case letters, digits, . and -"
        ) from error


def _entry(name: str, public: Path) -> str:
    from pipeline.attest.keys import key_id, public_pem, read_key_file, read_public
    from pipeline.attest.trust import trust_entry

    key = read_public(read_key_file(public), str(public))
    return trust_entry(name, public_pem(key), key_id(key), datetime.now(UTC))


@keys.command("show")
@click.argument("name", metavar="NAME|FILE.pub")
def show(name: str) -> None:
    """Print a key's entry for a trust file: its id, its public half, what it is for."""
    from pipeline.attest.keyring import default_folder

    path = Path(name)
    if not path.exists():
        path = default_folder(os.environ) / f"{name}.pub"
    click.echo(_entry(path.stem, path.with_suffix(".pub")))


@keys.command("list")
@trust_option
@json_option
@click.pass_context
def list_keys(context: click.Context, trust_path: Path | None, as_json: bool) -> None:
    """List the keys of the trust file, what each is trusted for and until when."""
    trust = trust_of(context, trust_path)
    now = datetime.now(UTC)
    rows = [_row(key, now) for key in trust.keys] if trust else []
    if as_json:
        return say_json(rows)
    if not rows:
        return click.echo("no key is trusted here; `sm120 keys new NAME` makes one")
    head = ["name", "id", "state", "until", "for"]
    table = [[r["name"], r["id"], r["state"], r["until"], ", ".join(r["for"])] for r in rows]
    click.echo(log.table(head, table))


def _row(key: TrustedKey, now: datetime) -> dict[str, Any]:
    state = "trusted"
    if key.revoked:
        state = f"revoked: {key.revoked.reason}"
    elif now > key.until:
        state = "ended"
    elif now < key.not_before:
        state = "not yet"
    until = f"{key.until:%Y-%m-%d}"
    return {"name": key.name, "id": key.id, "state": state, "until": until, "for": key.kinds}


def trust_of(context: click.Context, named: Path | None) -> Trust | None:
    """The trust file that was named, else the checkout's with the user's own keys; or none."""
    from pipeline.attest.keyring import own_public_keys
    from pipeline.attest.trust import FILE_NAME, read_trust, with_own_keys

    if named is not None:
        return read_trust(named)
    try:
        path = checkout_of(context).root / "lockfiles" / FILE_NAME
    except UnknownImage:
        path = None
    trust = read_trust(path) if path and path.exists() else None
    return with_own_keys(trust, own_public_keys(os.environ))
