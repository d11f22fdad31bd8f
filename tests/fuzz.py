"""Mutated evidence against the parsers and the walk, for as long as one likes.

    python -m tests.fuzz 600        ten minutes; says what was tried and what came of it

Two things must never happen: an error that is not ours, and altered bytes that are called valid.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts.attest.cosign import (
    ENVELOPE_MEDIA,
    SIGNATURE_MEDIA,
    SIGNATURE_NOTE,
    Content,
    signature_attachment,
)
from pipeline.artifacts.attest.keys import LocalSigner
from pipeline.artifacts.attest.statement import read_statement
from pipeline.artifacts.attest.strict import read_base64, read_signed_json
from pipeline.artifacts.attest.trust import read_trust
from pipeline.artifacts.oci.document import read_document
from pipeline.core.errors import PipelineError
from pipeline.core.model import canonical_json
from pipeline.evidence.publish.attachment import Attachment
from pipeline.evidence.verify.chain import read_policy
from pipeline.evidence.verify.evidence import AttachedBlob, read_attached, read_item
from pipeline.evidence.verify.naming import believed_names
from pipeline.evidence.verify.verdict import Verdict
from tests.unit.verify.world import NOW, World, make_world, sign_bytes

TOKENS = [
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u0000", b"\\ud800", b"\\u202e"),
    *(b"null", b"true", b"NaN", b"1e999", b"-0", b"9" * 40, b'"a":1,"a":2', b"\xff", b"\x00"),
    *(b"[" * 200, b'{"a":' * 60, b"sha256:" + b"0" * 64, b"../", b"\xef\xbb\xbf", b"\xe2\x80\xae"),
    *(b'"digest":{}', b'"annotations":[]', b'"uri":5', b'"images":{}', b"e\xcc\x81"),
]


def mutate(data: bytes, dice: random.Random) -> bytes:
    """A few random edits: bits, cuts, copies, and tokens that parsers stumble over."""
    out = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4, 8))):
        at = dice.randrange(len(out) + 1)
        kind = dice.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del out[at : at + dice.choice((1, 2, 10, 100))]
        elif kind == 2:
            out[at:at] = dice.choice(TOKENS)
        elif kind == 3 and at < len(out):
            out[at] = dice.randrange(256)
        elif kind == 4:
            source = dice.randrange(len(out) + 1)
            out[at:at] = out[source : source + dice.choice((1, 10, 100))]
        else:
            token = dice.choice(TOKENS)
            out[at : at + len(token)] = token
    return bytes(out)


VALUES: list[Any] = [
    *(None, True, 0, -1, 2**62, 1.5, "", "x", [], {}, [[]], {"a": {}}, "sha256:" + "0" * 64),
    *("pkg:pypi/x@1", "urn:sm120-pipeline:lock:x", "urn:sm120-pipeline:checkout:%2e%2e/x", "é"),
]


def reshape(value: Any, dice: random.Random) -> Any:
    """The same JSON with one thing in it replaced, taken away, doubled or put elsewhere."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        if dice.random() < 0.05:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: reshape(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.9:
        at = dice.randrange(len(value))
        kind = dice.random()
        if kind < 0.05:
            return [*value[:at], *value[at + 1 :]]
        if kind < 0.1:
            return [*value, value[at]]
        return [*value[:at], reshape(value[at], dice), *value[at + 1 :]]
    return dice.choice(VALUES)


@dataclass
class Tally:
    """What was tried, and how it ended."""

    ends: dict[str, collections.Counter[str]] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )

    def count(self, target: str, end: str) -> None:
        self.ends[target][end] += 1

    @property
    def total(self) -> int:
        return sum(sum(c.values()) for c in self.ends.values())


class Fuzzer:
    """The targets, each with its seeds."""

    def __init__(self, world: World, folder: Path, seed: int) -> None:
        self.world, self.folder, self.dice = world, folder, random.Random(seed)
        self.tally = Tally()
        self.good = {name: e.dump() for name, e in world.envelopes().items()}
        self.read = {name: read_item(name, data) for name, data in self.good.items()}
        key = next(iter(world.trust.keys))
        self.trust = b"format: 1\nkeys:\n- " + b"\n  ".join(
            [
                f"name: {key.name}".encode(),
                f"id: {key.id}".encode(),
                b"public: |\n" + b"\n".join(b"    " + x for x in key.public.encode().splitlines()),
                b"for: [provenance]",
                b"not_before: 2026-01-01T00:00:00Z",
                b"until: 2027-01-01T00:00:00Z",
            ]
        )
        self.signer = LocalSigner(world.key)
        layer = Content(media_type=ENVELOPE_MEDIA, data=self.good["provenance"])
        made = Attachment(artifact_type=ENVELOPE_MEDIA, layers=(layer,))
        self.artifact = made.manifest(read_document(world.store.read_blob(world.built.digest))).data
        self.policy = b"format: 1\nrequire: [provenance]\ngates: {smem: passed}\nmax_age_days: 3\n"

    def once(self) -> None:
        """One mutation of everything."""
        parsers = (self.text, self.base64, self.files, self.naming, self.attached)
        for target in (*parsers, self.envelope, self.lie, self.shape):
            target()

    def text(self) -> None:
        seed = self.dice.choice([s.dump() for s in self.world.statements.values()])
        data = mutate(seed, self.dice)
        self._try("read_json", lambda: read_signed_json(data, "it"))
        self._try("read_statement", lambda: read_statement(data, "it"))

    def base64(self) -> None:
        text = mutate(b"QUJDREVGRw==", self.dice).decode("latin-1")
        self._try("read_base64", lambda: read_base64(text, "it"))

    def envelope(self) -> None:
        """Altered bytes are valid only where the signed payload is the same as ever."""
        name = self.dice.choice(list(self.good))
        item = read_item(name, mutate(self.good[name], self.dice))
        if item.envelope is None:
            return self.tally.count("envelope", "refused")
        others = [x for n, x in self.read.items() if n != name]
        node = self.world.walk([item, *others]).node
        same = item.envelope.payload == self.world.envelopes()[name].payload
        assert node.verdict is not Verdict.VALID or same, item
        self.tally.count("envelope", node.verdict.value)

    def lie(self) -> None:
        """A good key signs mutated bytes: any verdict, but one of ours."""
        name = self.dice.choice(list(self.good))
        payload = mutate(self.world.envelopes()[name].payload, self.dice)
        item = read_item(name, sign_bytes(payload, self.world.key).dump())
        others = [x for n, x in self.read.items() if n != name]
        self.tally.count("lie", self.world.walk([item, *others]).node.verdict.value)

    def shape(self) -> None:
        """A good key signs well-formed JSON of another shape."""
        name = self.dice.choice(list(self.good))
        body = json.loads(self.world.envelopes()[name].payload)
        body["predicate"] = reshape(body["predicate"], self.dice)
        item = read_item(name, sign_bytes(canonical_json(body), self.world.key).dump())
        others = [x for n, x in self.read.items() if n != name]
        self.tally.count("shape", self.world.walk([item, *others]).node.verdict.value)

    def naming(self) -> None:
        """An altered image signature names nothing, or what it named before."""
        good = signature_attachment(self.world.built.digest, "x.example/y:v1", self.signer)
        note = good.annotations[SIGNATURE_NOTE]
        altered = self.dice.random() < 0.5
        data = mutate(good.data, self.dice) if altered else good.data
        text = note if altered else mutate(note.encode(), self.dice).decode("latin-1")
        found = AttachedBlob("it", SIGNATURE_MEDIA, data, text)
        names, _ = believed_names([found], self.world.trust, NOW)
        assert not names or data == good.data, (data, text)
        self.tally.count("image signature", "believed" if names else "skipped")

    def attached(self) -> None:
        """An altered artifact's manifest is refused, passed over or read; nothing else happens."""
        data = mutate(self.artifact, self.dice)

        def act() -> None:
            document = read_document(data)
            read_attached(self.world.built.digest, [document], lambda d: mutate(b"{}", self.dice))

        self._try("attached", act)

    def files(self) -> None:
        path = self.folder / "file.yaml"
        path.write_bytes(mutate(self.trust, self.dice))
        self._try("read_trust", lambda: read_trust(path))
        path.write_bytes(mutate(self.policy, self.dice))
        self._try("read_policy", lambda: read_policy(path))

    def _try(self, target: str, act: Callable[[], object]) -> None:
        try:
            act()
        except PipelineError:
            self.tally.count(target, "refused")
        else:
            self.tally.count(target, "read")


def rounds(fuzzer: Fuzzer, seconds: float) -> Iterator[int]:
    """Round numbers until the time is over."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        yield number
        fuzzer.once()
        number += 1


def main(seconds: float, seed: int) -> None:
    """Fuzz and report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fuzzer = Fuzzer(make_world(folder / "world"), folder, seed)
        for number in rounds(fuzzer, seconds):
            if number % 1000 == 0:
                print(f"{number} rounds, {fuzzer.tally.total} inputs", flush=True)
        for target, ends in sorted(fuzzer.tally.ends.items()):
            print(target, dict(ends))
        print(f"{fuzzer.tally.total} inputs in {seconds:.0f} s, seed {seed}: nothing got through")


if __name__ == "__main__":
    given = sys.argv[1:]
    start = int(given[1]) if len(given) > 1 else int.from_bytes(os.urandom(4), "big")
    main(float(given[0]) if given else 600.0, start)
