"""With what the stages sign the statements that they leave, and how that is said."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.errors import KeyInvalid

if TYPE_CHECKING:
    from pipeline.attest.keys import Signer
    from pipeline.store.store import Store

_OFFERED = "key-offered"


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
            _ = self.signers

    @cached_property
    def key_id(self) -> str | None:
        """The key that would sign, found without loading it."""
        from pipeline.attest.keyring import own_key, public_id

        if self._is_named:
            return self.signers[0].key_id
        path = own_key(self._environment)
        return public_id(path.with_suffix(".pub")) if path else None

    @cached_property
    def signers(self) -> Sequence[Signer]:
        """None or one."""
        from pipeline.attest.keyring import own_key

        if not self._is_named and own_key(self._environment) is None:
            return ()
        from pipeline.attest.keys import find_signer

        try:
            found = find_signer(None, self._environment)
        except KeyInvalid as error:
            if self._is_named:
                raise
            self.reason = str(error)
            return ()
        return (found,) if found else ()

    def words(self, keys: Sequence[str]) -> str:
        """How a table says who signed a statement."""
        if not keys:
            return f"unsigned ({self.reason})" if self.reason else "unsigned"
        names = [_own_name(self._environment, key) or f"{key[:19]}…" for key in keys]
        return f"signed by {', '.join(names)}"

    def offer_key(self, store: Store, is_unsigned: bool) -> None:
        """Say once, for each store, how evidence gets signed."""
        path = store.root / _OFFERED
        if not is_unsigned or self.key_id or path.exists():
            return
        store.write(path, b"")
        log.say("Nobody signed this. `sm120 keys new NAME` makes a key that signs what is here and")
        log.say("what follows; all of it works without one, too. (This is said once.)")


def _own_name(environment: Mapping[str, str], key_id: str) -> str | None:
    from pipeline.attest.keyring import own_public_keys, public_id

    return next((p.stem for p in own_public_keys(environment) if public_id(p) == key_id), None)
