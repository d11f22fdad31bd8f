"""Signatures that model-signing's own releases made: one form is read, all others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from pipeline.core.errors import ModelSignatureInvalid
from pipeline.weights.sign.signing import compare_signature, signed_files

CORPUS = Path(__file__).resolve().parents[3] / "fixtures" / "model-signing"
NOW = CORPUS / "v1.1.0-elliptic-key.sig"


def key() -> ec.EllipticCurvePublicKey:
    found = load_pem_public_key((CORPUS / "signing-key.pub").read_bytes())
    assert isinstance(found, ec.EllipticCurvePublicKey)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that were signed, byte for byte."""
    (tmp_path / "signme-1").write_bytes(b"signme-1\n")
    (tmp_path / "signme-2").write_bytes(b"signme-2")
    return tmp_path


def test_what_release_1_1_signed_is_accepted(folder: Path) -> None:
    (folder / "ignore-me").write_bytes(b"not signed")
    found = compare_signature(folder, NOW, key())
    material = json.loads(NOW.read_text())["verificationMaterial"]
    assert (found.files, found.key) == (2, material["publicKey"]["hint"])


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("signme-1", b"signme-1", "changed: signme-1"),
        ("signme-2", b"signme-2\n", "changed: signme-2"),
        ("signme-2", None, "missing: signme-2"),
        ("signme-3", b"", "extra: signme-3"),
        ("ignore-me-too", b"", "extra: ignore-me-too"),
    ],
)
def test_another_folder_than_the_signed_one_is_refused(
    name: str, data: bytes | None, reason: str, folder: Path
) -> None:
    (folder / name).unlink(missing_ok=True)
    if data is not None:
        (folder / name).write_bytes(data)
    with pytest.raises(ModelSignatureInvalid, match=reason):
        compare_signature(folder, NOW, key())


def test_another_key_is_refused() -> None:
    other = ec.generate_private_key(ec.SECP384R1()).public_key()
    with pytest.raises(ModelSignatureInvalid, match="was signed with another key"):
        signed_files(NOW, other)


def old() -> Any:
    """The bundle of release 0.3.1: a file signed by itself, as `.`, with the key inside."""
    return json.loads((CORPUS / "v0.3.1-elliptic-key.sig").read_text())


def swapped(one: str) -> Any:
    """One part of the newer bundle, taken from the older."""
    body = json.loads(NOW.read_text())
    body["dsseEnvelope"][one] = old()["dsseEnvelope"][one]
    return body


def padded(one: str) -> Any:
    """The newer bundle with a character that base64 does not have, which lax readers drop."""
    body = json.loads(NOW.read_text())
    envelope = body["dsseEnvelope"]
    place = envelope["signatures"][0] if one == "sig" else envelope
    place[one] = f"!{place[one]}"
    return body


def certified() -> Any:
    """As with a certificate, which is another way to trust than by a key."""
    return {**json.loads(NOW.read_text()), "verificationMaterial": {"certificate": {}}}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        # its signature is good: only what it says is refused
        (old, "is not a model-signing statement over files"),
        (lambda: swapped("signatures"), "does not match its statement and key"),
        (lambda: swapped("payload"), "does not match its statement and key"),
        (lambda: padded("sig"), "does not match its statement and key"),
        (lambda: padded("payload"), "does not match its statement and key"),
        (certified, "is not a Sigstore bundle"),
    ],
)
def test_older_releases_and_mixtures_are_refused(
    body: Callable[[], Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.sig"
    path.write_text(json.dumps(body()))
    with pytest.raises(ModelSignatureInvalid, match=reason):
        signed_files(path, key())
