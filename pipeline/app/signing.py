"""Which key signs the statements that a command writes, and which keys it trusts.

The modules that hold key material load `cryptography`, a tenth of a second that a build with
nothing to do and a nightly scrub need not spend: they are imported where a key is really used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.keyring import default_folder, own_key, own_public_keys, public_id
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import KeyInvalid, SigningFailed

if TYPE_CHECKING:
    from pipeline.artifacts.attest.keys import Signer
    from pipeline.artifacts.attest.trust import Trust

# a file in the store: whoever wants no key is not asked again at each build
_OFFERED = "key-offered"
_TRUST_FILE = "trust.yaml"


class Signing:
    """The key of the environment, else the user's own; where there is none, nothing is signed.

    A key that was named must be good, and is read before any work is done. The user's own key may
    need a passphrase that nobody can type here: then the statements stay unsigned, and say so.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ if environment is None else environment
        named = ("SM120_SIGNING_KEY", "SM120_SIGNING_AGENT")
        self._is_named = any(self._environment.get(name) for name in named)
        self.reason = ""
        if self._is_named:
            # reads the key now; a wrong passphrase after an hour of building would be too late
            _ = self.signers

    @cached_property
    def key_id(self) -> str | None:
        """The key that would sign, identified without loading it."""
        if self._is_named:
            # an agent names its key only when it is asked
            return self.signers[0].key_id
        path = own_key(self._environment)
        return public_id(path.with_suffix(".pub")) if path else None

    @cached_property
    def signers(self) -> Sequence[Signer]:
        """One signer, or none."""
        if not self._is_named and own_key(self._environment) is None:
            return ()
        from pipeline.artifacts.attest.keys import find_signer

        try:
            signer = find_signer(None, self._environment)
        except KeyInvalid as error:
            if self._is_named:
                raise
            # nobody named the user's own key, so it may be unusable without an error
            self.reason = str(error)
            return ()
        return (signer,) if signer else ()

    def state(self, keys: Sequence[str]) -> str:
        """Who signed a statement, for a table."""
        if not keys:
            # why, so that nobody wonders what became of the key
            return f"unsigned ({self.reason})" if self.reason else "unsigned"
        own = {public_id(path): path.stem for path in own_public_keys(self._environment)}
        names = [own.get(key) or f"{key[:19]}…" for key in keys]
        return f"signed by {', '.join(names)}"

    def offer_key(self, store: Store, is_unsigned: bool) -> None:
        """Mention once, for each store, how evidence gets signed."""
        path = store.root / _OFFERED
        if not is_unsigned or self.key_id or path.exists():
            return
        store.write(path, b"")
        log.say(
            "This evidence is unsigned. `sm120 evidence new-key NAME` makes a key that signs it"
        )
        log.say("and all that follows. A key is optional; this note is shown once.")


def signer_of(key_path: Path | None) -> Signer:
    """Return the named or configured key; raise if there is none."""
    from pipeline.artifacts.attest.keys import find_signer

    signer = find_signer(key_path, os.environ)
    if signer is None:
        raise SigningFailed("there is no key to sign with")
    return signer


def trust_of(workspace: Workspace, path: Path | None) -> Trust | None:
    """Read the named trust file, else the checkout's, the user's and the user's own keys."""
    from pipeline.artifacts.attest.trust import both, read_trust, with_own_keys

    if path is not None:
        return read_trust(path)
    trust = reduce(both, map(read_trust, trust_files(workspace)), None)
    return with_own_keys(trust, own_public_keys(os.environ))


def trust_files(workspace: Workspace) -> list[Path]:
    """List the trust files that count if none is named; the first has the last word."""
    checkout = workspace.checkout_or_none()
    # a checkout's trust file is reviewed like its code; the user's own is added to it
    shared = checkout.root / "lockfiles" / _TRUST_FILE if checkout else None
    return [p for p in (shared, own_trust_file()) if p and p.exists()]


def own_trust_file() -> Path | None:
    """Return this user's trust file; a user id without an account has none."""
    try:
        return default_folder(os.environ).with_name(_TRUST_FILE)
    except KeyInvalid:
        return None
