from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from pipeline.artifacts.attest import bundle
from pipeline.core.errors import ModelSignatureInvalid, WeightsDamaged
from pipeline.weights.disk import hashing
from pipeline.weights.place import LockedFolder
from pipeline.weights.sign import signing
from tests.testbed.locked_set import SMALL, make_set, write
from tests.unit.support import Command

LARGE = {"model.safetensors": b"weights" * 1000, "sub dir/b.safetensors": b"more"}
KEY = ec.generate_private_key(ec.SECP256R1())
PUBLIC = KEY.public_key()


@pytest.fixture(params=[False, True], ids=["plain", "hub-cache"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> LockedFolder:
    return make_set(tmp_path / "set", SMALL, LARGE, hub_cache=request.param)


@pytest.fixture
def plain(tmp_path: Path) -> LockedFolder:
    return make_set(tmp_path / "set", SMALL, LARGE)


def signed(place: LockedFolder, key: ec.EllipticCurvePrivateKey = KEY) -> Path:
    return signing.sign_folder(place, key, signing.default_signature(place)).signature


def edited(path: Path, change: Callable[[Any], None], *, sign_again: bool) -> None:
    """Change the statement; with the right key, only its own rules can refuse it."""
    whole = json.loads(path.read_bytes())
    statement = json.loads(base64.b64decode(whole["dsseEnvelope"]["payload"]))
    change(statement)
    if sign_again:
        path.write_bytes(bundle.signed(statement, KEY))
        return
    whole["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    path.write_text(json.dumps(whole), encoding="utf-8")


def key_file(path: Path, key: Any, password: bytes | None = None) -> Path:
    lock: Any = serialization.NoEncryption()
    if password:
        lock = serialization.BestAvailableEncryption(password)
    kind = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, lock))
    path.chmod(0o600)
    return path


def public_file(path: Path, key: Any) -> Path:
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, kind))
    return path


def test_a_signed_set_is_accepted(place: LockedFolder) -> None:
    done = signing.compare_signature(place.snapshot, signed(place), PUBLIC)
    assert done.files == len(SMALL) + len(LARGE) - 1
    assert done.not_covered == [".gitattributes"]


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()])
def test_larger_curves_work_too(plain: LockedFolder, curve: ec.EllipticCurve) -> None:
    key = ec.generate_private_key(curve)
    assert signing.compare_signature(plain.root, signed(plain, key), key.public_key()).files == 6


def test_the_statement_lists_every_file_with_its_sha256(plain: LockedFolder) -> None:
    payload = json.loads(bundle.opened(signed(plain), PUBLIC))
    rows = {r["name"]: r["digest"] for r in payload["predicate"]["resources"]}
    assert set(rows) == {*SMALL, *LARGE} - {".gitattributes"}
    locked = {p.path: p.sha256 for p in plain.lock.files if p.sha256}
    assert {path: rows[path] for path in locked} == locked


def test_a_second_signature_reads_no_large_file(
    plain: LockedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.weights.disk.receipt.CLOCK_TICK_NS", -(10**9))
    assert signing.sign_folder(plain, KEY, signing.default_signature(plain)).files_read == 7
    assert signing.sign_folder(plain, KEY, signing.default_signature(plain)).files_read == 0
    assert (
        signing.sign_folder(plain, KEY, signing.default_signature(plain), full=True).files_read == 7
    )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "modeling_tiny.py"])
def test_a_changed_byte_is_refused_by_check_and_by_sign(place: LockedFolder, name: str) -> None:
    signature = signed(place)
    path = place.name(next(p for p in place.lock.files if p.path == name)).resolve()
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelSignatureInvalid, match=f"changed: {name}"):
        signing.compare_signature(place.snapshot, signature, PUBLIC)
    with pytest.raises(WeightsDamaged, match=name):
        signed(place)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_cannot_be_read_now_is_not_called_changed(
    plain: LockedFolder, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    signature = signed(plain)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    failing = SimpleNamespace(**{**vars(os), call: fails})
    monkeypatch.setattr(hashing, "os", failing)
    with pytest.raises(ModelSignatureInvalid, match=os.strerror(number)) as raised:
        signing.compare_signature(plain.root, signature, PUBLIC)
    assert "changed" not in str(raised.value)
    assert "Its bytes were not judged" in raised.value.hint


def test_a_folder_that_cannot_be_listed_is_named_by_check_and_by_sign(
    plain: LockedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = signed(plain)
    closed, real = plain.root / "closed", os.scandir
    closed.mkdir()

    def scandir(path: Path) -> Any:
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ModelSignatureInvalid, match="extra: closed/"):
        signing.compare_signature(plain.root, signature, PUBLIC)
    with pytest.raises(WeightsDamaged, match="closed/"):
        signed(plain)


def test_a_missing_file_is_refused(place: LockedFolder) -> None:
    signature = signed(place)
    (place.snapshot / "config.json").unlink()
    with pytest.raises(ModelSignatureInvalid, match=r"missing: config\.json"):
        signing.compare_signature(place.snapshot, signature, PUBLIC)
    with pytest.raises(WeightsDamaged):
        signed(place)


@pytest.mark.parametrize("name", ["evil.py", "sub dir/more.json", "notes.txt", "x/model.sig"])
def test_an_extra_file_is_refused(place: LockedFolder, name: str) -> None:
    signature = signed(place)
    (place.snapshot / name).parent.mkdir(exist_ok=True)
    (place.snapshot / name).write_bytes(b"x")
    with pytest.raises(ModelSignatureInvalid, match=f"extra: {name}"):
        signing.compare_signature(place.snapshot, signature, PUBLIC)
    with pytest.raises(WeightsDamaged):
        signed(place)


def test_files_that_swapped_their_names_are_refused(plain: LockedFolder) -> None:
    signature = signed(plain)
    a, b = plain.root / "config.json", plain.root / "modeling_tiny.py"
    a.rename(plain.root / "t")
    b.rename(a)
    (plain.root / "t").rename(b)
    with pytest.raises(ModelSignatureInvalid, match="changed"):
        signing.compare_signature(plain.root, signature, PUBLIC)


def test_a_link_in_a_plain_folder_is_refused(plain: LockedFolder, tmp_path: Path) -> None:
    signature = signed(plain)
    (plain.root / "config.json").rename(tmp_path / "outside")
    (plain.root / "config.json").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelSignatureInvalid, match="links"):
        signing.compare_signature(plain.root, signature, PUBLIC)


def test_a_link_out_of_a_hub_cache_is_refused(tmp_path: Path) -> None:
    place = make_set(tmp_path / "set", SMALL, LARGE, hub_cache=True)
    signature = signed(place)
    (tmp_path / "outside").write_bytes(SMALL["config.json"])
    (place.snapshot / "config.json").unlink()
    (place.snapshot / "config.json").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelSignatureInvalid, match=r"changed: config\.json"):
        signing.compare_signature(place.snapshot, signature, PUBLIC)


def test_another_key_is_refused_also_when_the_hint_is_forged(plain: LockedFolder) -> None:
    signature = signed(plain)
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    with pytest.raises(ModelSignatureInvalid, match="another key"):
        signing.compare_signature(plain.root, signature, other)
    whole = json.loads(signature.read_bytes())
    for hint in (bundle.key_hint(other), "", None):
        whole["verificationMaterial"]["publicKey"]["hint"] = hint
        signature.write_text(json.dumps(whole), encoding="utf-8")
        with pytest.raises(ModelSignatureInvalid, match="does not match"):
            signing.compare_signature(plain.root, signature, other)
        if hint is None:
            assert signing.compare_signature(plain.root, signature, PUBLIC).files == 6


def _first(name: str, value: Any) -> Callable[[Any], None]:
    return lambda s: s["predicate"]["resources"][0].__setitem__(name, value)


def _rule(name: str, value: Any) -> Callable[[Any], None]:
    return lambda s: s["predicate"]["serialization"].__setitem__(name, value)


EDITS: dict[str, Callable[[Any], None]] = {
    "another digest": _first("digest", "0" * 64),
    "another name": _first("name", "other.json"),
    "a name that leaves the folder": _first("name", "../config.json"),
    "an absolute name": _first("name", "/etc/passwd"),
    "another algorithm": _first("algorithm", "md5"),
    "a digest that is none": _first("digest", "xyz"),
    "one file fewer": lambda s: s["predicate"]["resources"].pop(),
    "one file twice": lambda s: s["predicate"]["resources"].append(s["predicate"]["resources"][0]),
    "no file at all": lambda s: s["predicate"].__setitem__("resources", []),
    "another root": lambda s: s["subject"][0]["digest"].__setitem__("sha256", "0" * 64),
    "no subject": lambda s: s.__setitem__("subject", []),
    "another predicate": lambda s: s.__setitem__("predicateType", "https://example.org/v1"),
    "another statement": lambda s: s.__setitem__("_type", "https://in-toto.io/Statement/v0.1"),
    "shards": _rule("method", "shards"),
    "another hash": _rule("hash_type", "blake2b"),
    "everything ignored": _rule("ignore_paths", ["."]),
    "a signed file ignored": _rule("ignore_paths", ["config.json", ".gitattributes"]),
    "git's files not ignored": _rule("ignore_paths", []),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_statement_is_refused(plain: LockedFolder, name: str) -> None:
    signature = signed(plain)
    edited(signature, EDITS[name], sign_again=False)
    with pytest.raises(ModelSignatureInvalid, match="does not match"):
        signing.compare_signature(plain.root, signature, PUBLIC)


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_statement_is_refused_even_with_a_right_signature(
    plain: LockedFolder, name: str
) -> None:
    signature = signed(plain)
    edited(signature, EDITS[name], sign_again=True)
    with pytest.raises(ModelSignatureInvalid):
        signing.compare_signature(plain.root, signature, PUBLIC)


BUNDLES: dict[str, Callable[[Any], Any]] = {
    "no object": lambda b: [],
    "no envelope": lambda b: {k: v for k, v in b.items() if k != "dsseEnvelope"},
    "another kind": lambda b: {**b, "mediaType": "application/json"},
    "not a signature": lambda b: _envelope(b, signatures=[]),
    "two signatures": lambda b: _envelope(b, signatures=b["dsseEnvelope"]["signatures"] * 2),
    "an empty signature": lambda b: _envelope(b, signatures=[{"sig": ""}]),
    "no base64": lambda b: _envelope(b, payload="%%%"),
    "another payload type": lambda b: _envelope(b, payloadType="text/plain"),
}


def _envelope(whole: Any, **more: Any) -> Any:
    return {**whole, "dsseEnvelope": {**whole["dsseEnvelope"], **more}}


@pytest.mark.parametrize("name", BUNDLES)
def test_what_is_no_bundle_is_refused(plain: LockedFolder, name: str) -> None:
    signature = signed(plain)
    whole = BUNDLES[name](json.loads(signature.read_bytes()))
    signature.write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(ModelSignatureInvalid):
        signing.compare_signature(plain.root, signature, PUBLIC)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_damaged_signature_file_is_refused(plain: LockedFolder, data: bytes) -> None:
    signature = signed(plain)
    signature.write_bytes(data)
    with pytest.raises(ModelSignatureInvalid):
        signing.compare_signature(plain.root, signature, PUBLIC)


def test_keys_of_other_kinds_are_refused(
    plain: LockedFolder, tmp_path: Path, sm120: Command
) -> None:
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    sign = ["weights", "sign", str(plain.root), "--key", str(key)]
    check = ["weights", "check-signature", str(plain.root), "--public-key", str(public)]
    for other in (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256K1())):
        key_file(key, other)
        public_file(public, other)
        for command in (sign, check):
            refused = sm120(*command)
            assert (refused.error, "P-256 or P-384" in refused.err) == ("KeyInvalid", True)
    for path in (key, public):
        path.write_bytes(b"nothing")
    assert sm120(*sign).error == sm120(*check).error == "KeyInvalid"


def test_a_key_with_a_password_needs_the_right_one_and_no_other_reader(
    plain: LockedFolder, tmp_path: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_file(tmp_path / "key.pem", KEY, b"secret")
    sign = ["weights", "sign", str(plain.root), "--key", str(key)]
    assert sm120(*sign).error == "KeyInvalid"
    for wrong in ("wrong", ""):
        monkeypatch.setenv("SM120_KEY_PASSPHRASE", wrong)
        assert sm120(*sign).error == "KeyInvalid"
    monkeypatch.setenv("SM120_KEY_PASSPHRASE", "secret")
    assert sm120(*sign).code == 0
    key.chmod(0o644)
    assert "others can read it" in sm120(*sign).err


def test_the_commands_sign_check_and_refuse(
    plain: LockedFolder, tmp_path: Path, sm120: Command
) -> None:
    key, public = key_file(tmp_path / "key.pem", KEY), public_file(tmp_path / "key.pub", KEY)
    done = sm120("weights", "sign", str(plain.root), "--key", str(key))
    assert done.code == 0, done.err
    assert "model_signing verify key" in done.err
    check = ["weights", "check-signature", str(plain.root), "--public-key", str(public)]
    assert "6 files are as signed" in sm120(*check).out
    pin = next(p for p in plain.lock.files if p.path == "config.json")
    write(plain, pin, b"{}")
    bad = sm120(*check)
    assert (bad.error, "changed: config.json" in bad.err) == ("ModelSignatureInvalid", True)
    signature = signing.default_signature(plain)
    signature.unlink()
    assert sm120(*check).error == "ModelSignatureInvalid"


def test_a_folder_without_a_lock_is_checked_by_its_signature_alone(
    plain: LockedFolder, tmp_path: Path, sm120: Command
) -> None:
    public = public_file(tmp_path / "key.pub", KEY)
    signature = signing.sign_folder(plain, KEY, tmp_path / "model.sig").signature
    plain.lock_file.unlink()
    check = ["weights", "check-signature", str(plain.root), "--public-key", str(public)]
    done = sm120(*check, "--signature", str(signature))
    assert (done.code, done.out[:22]) == (0, "6 files are as signed ")
    (plain.root / "evil.py").write_bytes(b"")
    assert sm120(*check, "--signature", str(signature)).error == "ModelSignatureInvalid"
