"""The trust file: which keys are believed, for which kinds of evidence, and until when.

A signature has no time of its own; it was made after the time in its statement. So a key is
trusted from `not_before` on, also for older statements that it signs again, and for no statement
newer than `until`. The time in a statement is only claimed by its signer: a stolen key is `revoked`
with `compromised: true`, and then nothing it ever signed is trusted; a key that was merely replaced
keeps what it signed before.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import chain, count
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import (
    AwareDatetime,
    Field,
    StrictBool,
    StringConstraints,
    ValidationError,
    model_validator,
)

from pipeline.artifacts.attest.keys import PublicKey, key_id, public_pem, read_key_file, read_public
from pipeline.artifacts.attest.names import KINDS, Kind, predicate_kind
from pipeline.artifacts.attest.statement import CLOCKS_APART, stamp
from pipeline.core.errors import KeyInvalid, SpecInvalid, TrustInvalid
from pipeline.core.files import write_bytes
from pipeline.core.model import FILE_VERSION, Digest, Frozen, Name
from pipeline.core.yaml_file import parse_yaml, read_yaml

_BY_HAND = "Nothing was written. Put what `sm120 evidence show-key FILE.pub` prints under `keys:`."
# of a new entry; a reviewer of the trust file may set another end
_BELIEVED_FOR = timedelta(days=365)

Reason = Annotated[str, StringConstraints(min_length=5, max_length=400)]


class Revoked(Frozen):
    """A key that is no longer used, and what that means for what it signed."""

    since: AwareDatetime
    reason: Reason
    # a text such as 'no' is refused: what it means must not be guessed
    compromised: StrictBool


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
        kind = predicate_kind(predicate_type)
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

    schema_name: ClassVar[str] = "trust"

    format: Annotated[Literal[1], FILE_VERSION] = 1
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


class OwnKeys(Trust):
    """This user's own keys, where no file says whom else to believe."""


def judges_strangers(trust: Trust | None) -> bool:
    """Whether a trust file names keys; until then an unknown key proves nothing."""
    return trust is not None and bool(trust.keys) and not isinstance(trust, OwnKeys)


def read_trust(path: Path) -> Trust:
    """The trust file, or an error with the reason why it cannot be used."""
    if not path.exists():
        raise TrustInvalid(f"{path}: no such trust file")
    return read_yaml(path, Trust, TrustInvalid)


def with_own_keys(trust: Trust | None, public_keys: Sequence[Path]) -> Trust | None:
    """The trust file's keys and this user's own; an entry of the file wins, also a revocation."""
    own = []
    for path in public_keys:
        # a stray file among the user's keys is no reason to trust none of them
        with suppress(KeyInvalid, ValidationError):
            own.append(_named_key(path))
    if trust is None or not trust.keys:
        bases = trust.bases if trust else {}
        return OwnKeys(keys=_joined([], own), bases=bases) if own or bases else None
    return Trust(keys=_joined(trust.keys, own), bases=trust.bases)


def with_named_keys(trust: Trust | None, public_keys: Sequence[Path]) -> Trust | None:
    """Adds keys that the user named for this run alone; an entry of a file wins here, too."""
    if not public_keys:
        return trust
    known, bases = (trust.keys, trust.bases) if trust else ([], {})
    return Trust(keys=_joined(known, [_named_key(path) for path in public_keys]), bases=bases)


def both(first: Trust | None, second: Trust | None) -> Trust | None:
    """Two trust files as one; the first wins, but a key that either revokes is revoked."""
    if first is None or second is None:
        return first or second
    keys = []
    for key in first.keys:
        revoked = [each.revoked for each in (key, *second.find(key.id)) if each.revoked]
        # the strictest of all: stolen first, then the earliest
        strictest = min(revoked, key=lambda r: (not r.compromised, r.since), default=None)
        keys.append(key.model_copy(update={"revoked": strictest}))
    return Trust(keys=_joined(keys, second.keys), bases={**second.bases, **first.bases})


def _joined(known: Sequence[TrustedKey], more: Iterable[TrustedKey]) -> list[TrustedKey]:
    """All keys, each once; one whose name is taken gets a number, and none is dropped."""
    joined = {key.id: key for key in known}
    for key in more:
        names = {each.name for each in joined.values()}
        numbered = (f"{key.name[:70]}-own-{number}" for number in count(2))
        free = chain([key.name, f"{key.name[:70]}-own"], numbered)
        name = next(each for each in free if each not in names)
        joined.setdefault(key.id, key.model_copy(update={"name": name}))
    return list(joined.values())


def key_name(path: Path) -> str:
    """A key's name in a trust file, from the name of its own file."""
    return re.sub(r"[^a-z0-9.+-]+", "-", path.stem.lower()).strip(".+-")[:80] or "key"


def _named_key(path: Path) -> TrustedKey:
    public = read_public(read_key_file(path), str(path))
    return TrustedKey.model_validate(
        {
            "name": key_name(path),
            "id": key_id(public),
            "public": public_pem(public),
            "for": list(KINDS),
            # until its file is deleted, or no longer named
            "not_before": datetime(2000, 1, 1, tzinfo=UTC),
            "until": datetime(9999, 1, 1, tzinfo=UTC),
        }
    )


def trust_entry(
    name: str, public: str, kid: str, now: datetime, *, believed: Sequence[str] = ()
) -> str:
    """A key's entry to paste into a trust file: trusted for some kinds of evidence, or for all."""
    start = now.astimezone(UTC).replace(microsecond=0)
    return "\n".join(
        [
            f"- name: {name}",
            f"  id: {kid}",
            "  public: |",
            *(f"    {line}" for line in public.strip().splitlines()),
            f"  for: [{', '.join(believed or KINDS)}]",
            f"  not_before: {stamp(start)}",
            f"  until: {stamp(start + _BELIEVED_FOR)}",
        ]
    )


def add_entry(path: Path, entry: str, wanted: str) -> None:
    """Puts a key's entry into a trust file, whose other lines stay as they are."""
    text = path.read_text("utf-8") if path.exists() else "format: 1\nkeys:\n"
    # entries of one list begin in one column, which is the writer's choice
    column = re.search(r"^keys:.*\n(?: *#.*\n|\n)*( *)- ", text, re.MULTILINE)
    indented = textwrap.indent(entry, column[1] if column else "")
    lines = f"keys:\n{indented}"
    changed = re.sub(r"^keys: *(\[\])? *(#.*)?$", lambda _: lines, text, count=1, flags=re.M)
    try:
        if not parse_yaml(changed.encode(), Trust, path).find(wanted):
            raise SpecInvalid(f"{path}: has no list of keys")
    except SpecInvalid as error:
        raise TrustInvalid(str(error), _BY_HAND) from error
    write_bytes(path, changed.encode())


def remove_entry(path: Path, wanted: str) -> None:
    """Takes a key's entry out of a trust file, whose other lines stay as they are."""
    trust, text = read_trust(path), path.read_text("utf-8")
    lines = f"{text.rstrip()}\n".splitlines(keepends=True)
    at = [key.id for key in trust.keys].index(wanted)
    root = yaml.compose("".join(lines), Loader=yaml.SafeLoader)
    entries = next(list(value.value) for key, value in root.value if key.value == "keys")
    # a comment below an entry is about the next one
    start, end = entries[at].start_mark.line, entries[at].end_mark.line
    while end > start + 1 and re.fullmatch(r"\s*(#.*)?\n?", lines[end - 1]):
        end -= 1
    changed = "".join([*lines[:start], *lines[end:]])
    if len(entries) == 1:
        changed = re.sub(r"^keys:", "keys: []", changed, count=1, flags=re.M)
    remaining = [key for key in trust.keys if key.id != wanted]
    try:
        if parse_yaml(changed.encode(), Trust, path).keys != remaining:
            raise SpecInvalid(f"{path}: is written in a way that only its author can change")
    except SpecInvalid as error:
        raise TrustInvalid(str(error), "Nothing was written. Delete the entry by hand.") from error
    write_bytes(path, changed.encode())
