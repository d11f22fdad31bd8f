"""Keys are kept safe, named by their bytes, and only of one kind."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from pipeline.app.evidence import new_key
from pipeline.artifacts.attest.keyring import default_folder, own_key
from pipeline.artifacts.attest.keys import (
    AgentSigner,
    LocalSigner,
    find_signer,
    is_valid_signature,
    key_id,
    make_private_key,
    public_pem,
    read_private,
    read_private_file,
    read_public,
    write_key,
)
from pipeline.core.errors import DiskFull, KeyExists, KeyInvalid, SigningFailed

PEM = serialization.Encoding.PEM
PKCS8 = serialization.PrivateFormat.PKCS8
OPEN = serialization.NoEncryption()


def test_a_new_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    key = make_private_key()
    public = write_key(tmp_path / "keys" / "mine.pem", key)
    assert (tmp_path / "keys" / "mine.pem").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    again = read_private_file(tmp_path / "keys" / "mine.pem")
    assert key_id(again.public_key()) == key_id(key.public_key())
    assert key_id(read_public(public.read_bytes(), "it")) == key_id(key.public_key())


def test_the_key_id_is_the_digest_of_the_DER_form() -> None:
    public = make_private_key().public_key()
    body = "".join(public_pem(public).splitlines()[1:-1])
    digest = hashlib.sha256(base64.b64decode(body)).hexdigest()
    assert key_id(public) == f"sha256:{digest}"


@pytest.mark.parametrize("there", ["mine.pem", "mine.pub"])
def test_no_key_is_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("precious")
    with pytest.raises(KeyExists, match=there):
        write_key(tmp_path / "mine.pem", make_private_key())
    assert (tmp_path / there).read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_is_full_leaves_no_half_key_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(DiskFull):
            write_key(tmp_path / "mine.pem", make_private_key())
    assert list(tmp_path.iterdir()) == []
    write_key(tmp_path / "mine.pem", make_private_key())


def test_a_key_whose_public_half_a_kill_kept_back_gets_it(tmp_path: Path) -> None:
    first = new_key("mine", tmp_path)
    first.public.unlink()
    again = new_key("mine", tmp_path)
    assert again.signer.key_id == first.signer.key_id
    assert key_id(read_public(again.public.read_bytes(), "it")) == first.signer.key_id


@pytest.mark.parametrize("secret", [None, "another"])
def test_a_half_key_of_another_passphrase_stays_as_it_is(
    tmp_path: Path, secret: str | None
) -> None:
    made = new_key("mine", tmp_path, "secret")
    made.public.unlink()
    before = made.private.read_bytes()
    with pytest.raises(KeyInvalid, match="passphrase"):
        new_key("mine", tmp_path, secret)
    assert made.private.read_bytes() == before
    assert not made.public.exists()


def test_a_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyExists):
        write_key(tmp_path / "mine.pem", make_private_key())
    assert not (tmp_path / "elsewhere").exists()


def test_a_passphrase_guards_a_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.pem"
    write_key(path, make_private_key(), b"secret")
    assert b"ENCRYPTED" in path.read_bytes()
    read_private_file(path, b"secret")
    with pytest.raises(KeyInvalid, match="needs its passphrase"):
        read_private_file(path)
    with pytest.raises(KeyInvalid, match="passphrase is wrong"):
        read_private_file(path, b"guess")


def test_a_passphrase_for_an_open_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.pem"
    write_key(path, make_private_key())
    with pytest.raises(KeyInvalid, match="has no passphrase"):
        read_private_file(path, b"secret")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.pem"
    write_key(path, make_private_key())
    path.chmod(0o640)
    with pytest.raises(KeyInvalid, match="others can read it"):
        read_private_file(path)


def test_a_public_key_in_the_place_of_a_private_one_is_named_as_that(tmp_path: Path) -> None:
    public = write_key(tmp_path / "mine.pem", make_private_key())
    with pytest.raises(KeyInvalid, match="is not a private key"):
        read_private_file(public)


def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def test_keys_of_other_kinds_are_refused() -> None:
    for key in (rsa_key(), ec.generate_private_key(ec.SECP384R1())):
        private = key.private_bytes(PEM, PKCS8, OPEN)
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        with pytest.raises(KeyInvalid, match="not an ECDSA key on P-256"):
            read_private(private, "it")
        with pytest.raises(KeyInvalid, match="not an ECDSA key on P-256"):
            read_public(key.public_key().public_bytes(PEM, form), "it")


@pytest.mark.parametrize("data", [b"", b"hello", b"-----BEGIN PUBLIC KEY-----\n"])
def test_what_is_no_key_is_refused(data: bytes) -> None:
    with pytest.raises(KeyInvalid, match="not a private key"):
        read_private(data, "it")
    with pytest.raises(KeyInvalid, match="not a public key"):
        read_public(data, "it")


def test_files_that_cannot_be_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyInvalid, match="cannot be read"):
        read_private_file(tmp_path / "missing.pem")
    (tmp_path / "huge.pem").write_bytes(b"x" * 100_000)
    with pytest.raises(KeyInvalid, match="larger than"):
        read_private_file(tmp_path / "huge.pem")


def test_a_signature_holds_for_its_bytes_and_key_only() -> None:
    key = make_private_key()
    sig = LocalSigner(key).sign(b"data")
    assert is_valid_signature(key.public_key(), sig, b"data")
    assert not is_valid_signature(key.public_key(), sig, b"dat")
    assert not is_valid_signature(make_private_key().public_key(), sig, b"data")
    assert not is_valid_signature(key.public_key(), b"", b"data")
    assert not is_valid_signature(key.public_key(), sig[:-1], b"data")


def test_openssl_agrees(tmp_path: Path) -> None:
    """An independent judge, where this machine has it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed.")
    key = make_private_key()
    public = write_key(tmp_path / "k.pem", key)
    (tmp_path / "data").write_bytes(b"data")
    (tmp_path / "sig").write_bytes(LocalSigner(key).sign(b"data"))
    args = ["openssl", "dgst", "-sha256", "-verify", str(public), "-signature"]
    done = subprocess.run([*args, tmp_path / "sig", tmp_path / "data"], capture_output=True)
    assert done.returncode == 0, done.stderr


def agent_script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "agent.py"
    path.write_text(body)
    return shlex.join([sys.executable, str(path)])


GOOD_AGENT = """
import sys
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
key = serialization.load_pem_private_key(open({path!r}, "rb").read(), None)
sys.stdout.buffer.write(key.sign(sys.stdin.buffer.read(), ec.ECDSA(hashes.SHA256())))
"""


def test_an_agent_signs_what_it_reads(tmp_path: Path) -> None:
    key = make_private_key()
    public = write_key(tmp_path / "hidden.pem", key)
    agent = agent_script(tmp_path, GOOD_AGENT.format(path=str(tmp_path / "hidden.pem")))
    signer = find_signer(
        None, {"SM120_SIGNING_AGENT": agent, "SM120_SIGNING_PUBLIC_KEY": str(public)}
    )
    assert isinstance(signer, AgentSigner)
    assert signer.key_id == key_id(key.public_key())
    assert is_valid_signature(key.public_key(), signer.sign(b"data"), b"data")


def test_an_agent_with_another_key_is_found_out(tmp_path: Path) -> None:
    write_key(tmp_path / "hidden.pem", make_private_key())
    agent = agent_script(tmp_path, GOOD_AGENT.format(path=str(tmp_path / "hidden.pem")))
    signer = AgentSigner(tuple(shlex.split(agent)), make_private_key().public_key())
    with pytest.raises(SigningFailed, match="its output is not a signature by sha256:"):
        signer.sign(b"data")


@pytest.mark.parametrize(
    ("body", "message"),
    [("print()", "not a signature"), ("import sys; sys.exit('locked')", "exit code 1: locked")],
)
def test_an_agent_that_fails_is_reported(tmp_path: Path, body: str, message: str) -> None:
    agent = agent_script(tmp_path, body)
    signer = AgentSigner(tuple(shlex.split(agent)), make_private_key().public_key())
    with pytest.raises(SigningFailed, match=message):
        signer.sign(b"data")


def test_an_agent_that_is_not_there_is_reported() -> None:
    signer = AgentSigner(("/nonexistent/agent",), make_private_key().public_key())
    with pytest.raises(SigningFailed, match="No such file"):
        signer.sign(b"data")


def test_a_key_comes_from_file_then_environment_then_agent(tmp_path: Path) -> None:
    one, other = make_private_key(), make_private_key()
    write_key(tmp_path / "one.pem", one, b"secret")
    pem = other.private_bytes(PEM, PKCS8, OPEN).decode()
    first = find_signer(
        tmp_path / "one.pem", {"SM120_SIGNING_KEY": pem, "SM120_KEY_PASSPHRASE": "secret"}
    )
    second = find_signer(None, {"SM120_SIGNING_KEY": pem, "SM120_SIGNING_AGENT": "x"})
    assert first is not None
    assert second is not None
    assert first.key_id == key_id(one.public_key())
    assert second.key_id == key_id(other.public_key())
    assert find_signer(None, {}) is None


@pytest.mark.parametrize("value", ["one.pem", "/keys/one.pem", "-----BEGIN PUBLIC KEY-----"])
def test_a_path_or_a_public_key_in_the_environment_is_told_what_belongs_there(value: str) -> None:
    with pytest.raises(KeyInvalid, match="is not a private key") as caught:
        find_signer(None, {"SM120_SIGNING_KEY": value})
    assert "not its path" in caught.value.hint


def test_an_agent_needs_to_say_for_which_key() -> None:
    with pytest.raises(SigningFailed, match="its public key is not named"):
        find_signer(None, {"SM120_SIGNING_AGENT": "agent"})


def test_keys_lie_in_the_configuration_folder(tmp_path: Path) -> None:
    assert default_folder({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "sm120" / "keys"
    assert default_folder({}).parts[-3:] == (".config", "sm120", "keys")


def test_a_home_that_cannot_be_looked_into_holds_no_key_that_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(self: Path, pattern: str) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(self))

    # root may look everywhere
    monkeypatch.setattr(Path, "glob", closed)
    assert own_key({"XDG_CONFIG_HOME": str(tmp_path)}) is None
