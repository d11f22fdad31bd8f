"""The trust file: which keys are believed, for which kinds of evidence, and until when.

A signature has no time of its own; it was made after the time in its statement. So a key is
trusted from `not_before` on, also for older statements that it signs again, and for no statement
newer than `until`. The time in a statement is only claimed by its signer: a stolen key is `revoked`
with `compromised: true`, and then nothing it ever signed is trusted; a key that was merely replaced
keeps what it signed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints, ValidationError, model_validator

from pipeline.attest.keys import PublicKey, key_id, public_pem, read_key_file, read_public
from pipeline.attest.names import KINDS, Kind, kind_of
from pipeline.attest.statement import CLOCKS_APART
from pipeline.errors import KeyInvalid, SpecInvalid, TrustInvalid
from pipeline.model import Digest, Frozen, Name
from pipeline.yaml_file import read_yaml

FILE_NAME = "trust.yaml"

Reason = Annotated[str, StringConstraints(min_length=5, max_length=400)]


class Revoked(Frozen):
    """A key that is no longer used, and what that means for what it signed."""

    since: AwareDatetime
    reason: Reason
    compromised: bool


class TrustedKey(Frozen):
    """One key and the kinds of evidence it is trusted for."""

    name: Name
    id: Digest
    public: Annotated[str, StringConstraints(max_length=1000)]
    kinds: Annotated[list[Kind], Field(alias="for", min_length=1)]
    not_before: AwareDatetime
    until: AwareDatetime
    revoked: Revoked | None = None

    @model_validator(mode="after")
    def _is_itself(self) -> TrustedKey:
        try:
            actual = key_id(self.key)
        except KeyInvalid as error:
            raise ValueError(str(error)) from error
        if actual != self.id:
            raise ValueError(f"{self.name}: its public key is {actual}, not {self.id}")
        if self.until <= self.not_before:
            raise ValueError(f"{self.name}: `until` is not after `not_before`")
        return self

    @property
    def key(self) -> PublicKey:
        return read_public(self.public.encode(), self.name)

    def objection(self, predicate_type: str, made_at: datetime | None, now: datetime) -> str:
        """Why this key is not trusted for this statement; empty when it is."""
        kind = kind_of(predicate_type)
        if kind not in self.kinds:
            return f"the key {self.name} is not trusted for {kind}"
        if made_at is not None and made_at > now + CLOCKS_APART:
            return f"is dated {made_at:%Y-%m-%d %H:%M:%S}, which is in the future"
        # a statement without a time may be of today
        when = made_at or now
        if self.revoked and (self.revoked.compromised or when >= self.revoked.since):
            return f"the key {self.name} is revoked: {self.revoked.reason}"
        # compared with now, not with the claimed time, which a signer can choose
        if now < self.not_before:
            return f"the key {self.name} is not trusted before {self.not_before:%Y-%m-%d}"
        if when > self.until:
            return f"made after the key {self.name} expired ({self.until:%Y-%m-%d})"
        return ""


class Trust(Frozen):
    """All trusted keys, and the foreign base images that are accepted."""

    format: Literal[1] = 1
    keys: list[TrustedKey] = []
    bases: dict[Digest, Reason] = Field(
        default={}, description="foreign base images that are accepted as published, and why"
    )

    @model_validator(mode="after")
    def _has_no_doubles(self) -> Trust:
        for what in ("id", "name"):
            values = [getattr(key, what) for key in self.keys]
            if len(values) != len(set(values)):
                raise ValueError(f"two keys share one {what}")
        return self

    def find(self, wanted: str | None) -> list[TrustedKey]:
        """The key with that id; all keys where a signature names none."""
        return [key for key in self.keys if wanted in (None, key.id)]


def read_trust(path: Path) -> Trust:
    """The trust file, or an error with the reason why it cannot be used."""
    if not path.exists():
        raise TrustInvalid(f"{path}: no such trust file")
    try:
        return read_yaml(path, Trust)
    except SpecInvalid as error:
        raise TrustInvalid(str(error)) from error


def with_own_keys(trust: Trust | None, public_keys: Sequence[Path]) -> Trust | None:
    """The trust file's keys and this user's own; an entry of the file wins, also a revocation."""
    # the user's own keys need no entry in the file
    known, bases = (trust.keys, trust.bases) if trust else ([], {})
    ids, names = {key.id for key in known}, {key.name for key in known}
    own = []
    for path in public_keys:
        try:
            public = read_public(read_key_file(path), str(path))
            name = path.stem if path.stem not in names else f"{path.stem}-own"
            key = _own_key(name, public)
        # a stray file among the user's keys is no reason to trust nobody
        except (KeyInvalid, ValidationError):
            continue
        if key.id not in ids and key.name not in names:
            own.append(key)
            names.add(key.name)
            ids.add(key.id)
    return Trust(keys=[*known, *own], bases=bases) if trust or own else None


def _own_key(name: str, public: PublicKey) -> TrustedKey:
    return TrustedKey.model_validate(
        {
            "name": name,
            "id": key_id(public),
            "public": public_pem(public),
            "for": list(KINDS),
            # one's own key is trusted until it is deleted
            "not_before": datetime(2000, 1, 1, tzinfo=UTC),
            "until": datetime(9999, 1, 1, tzinfo=UTC),
        }
    )


def trust_entry(name: str, public: str, kid: str, now: datetime, days: int = 365) -> str:
    """A key's entry to paste into a trust file."""
    start = now.astimezone(UTC).replace(microsecond=0)
    end = datetime.fromtimestamp(start.timestamp() + days * 86_400, UTC)
    kinds = ", ".join(kind for kind in KINDS)
    return "\n".join(
        [
            f"- name: {name}",
            f"  id: {kid}",
            "  public: |",
            *(f"    {line}" for line in public.strip().splitlines()),
            f"  for: [{kinds}]",
            f"  not_before: {start:%Y-%m-%dT%H:%M:%SZ}",
            f"  until: {end:%Y-%m-%dT%H:%M:%SZ}",
        ]
    )
