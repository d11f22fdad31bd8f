"""The OpenSSF model-signing tool and ours, each judging what the other has signed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pipeline.weights.place import LockedFolder
from tests.testbed.forked import run_forked
from tests.testbed.locked_set import SMALL, make_set, random_bytes

ROOT = Path(__file__).resolve().parents[2]
LARGE = {"model.safetensors": random_bytes(1_000_000), "sub dir/b.safetensors": b"more"}


@pytest.fixture(scope="module")
def stock() -> str:
    beside = Path(sys.executable).with_name("model_signing")
    program = str(beside) if beside.is_file() else shutil.which("model_signing")
    if not program:
        pytest.skip("model-signing (OpenSSF, on PyPI; it needs pyOpenSSL too) is not installed.")
    return program


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, "key")


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, kind))
    return private, public


def run_command(*command: object) -> tuple[bool, str]:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode == 0, done.stdout + done.stderr


def ours(*args: object) -> tuple[bool, str]:
    done = run_forked("weights", *map(str, args))
    return done.returncode == 0, done.stdout + done.stderr


def flip(place: LockedFolder) -> None:
    path = place.name(place.lock.files[-2]).resolve()
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def remove(place: LockedFolder) -> None:
    (place.snapshot / "config.json").unlink()


def add(place: LockedFolder) -> None:
    (place.snapshot / "sub dir" / "evil.py").write_bytes(b"")


FAULTS: dict[str, Callable[[LockedFolder], None]] = {
    "changed bytes": flip,
    "missing file": remove,
    "extra file": add,
}


@pytest.mark.parametrize(
    ("signer", "hub_cache"),
    [
        ("ours", True),
        ("stock", False),
        pytest.param("ours", False, marks=pytest.mark.big),
        pytest.param("stock", True, marks=pytest.mark.big),
    ],
)
def test_each_accepts_what_the_other_signs_and_both_refuse_damage(
    stock: str, keys: tuple[Path, Path], tmp_path: Path, signer: str, hub_cache: bool
) -> None:
    private, public = keys
    links = ["--allow_symlinks"] if hub_cache else []
    place = make_set(tmp_path / "set", SMALL, LARGE, hub_cache=hub_cache)
    sound = shutil.copytree(tmp_path / "set", tmp_path / "sound", symlinks=True)
    signature = tmp_path / "set.sig"
    if signer == "ours":
        good, output = ours("sign", place.root, "--key", private, "--signature", signature)
    else:
        own = ["--ignore-paths", place.root / ".sm120"]
        sign = [stock, "sign", "key", place.snapshot, "--private_key", private]
        good, output = run_command(*sign, "--signature", signature, *own, *links)
    assert good, output
    check = ["check-signature", place.root, "--public-key", public, "--signature", signature]
    verify = [stock, "verify", "key", place.snapshot, "--public_key", public]
    verify += ["--signature", signature, *links]

    def verdicts() -> dict[str, bool]:
        return {"ours": ours(*check)[0], "stock": run_command(*verify)[0]}

    assert verdicts() == {"ours": True, "stock": True}
    for name, fault in FAULTS.items():
        fault(place)
        assert verdicts() == {"ours": False, "stock": False}, name
        shutil.rmtree(tmp_path / "set")
        shutil.copytree(sound, tmp_path / "set", symlinks=True)
    assert verdicts() == {"ours": True, "stock": True}


@pytest.mark.parametrize("signer", ["ours", "stock"])
def test_both_refuse_another_key_and_an_edited_statement(
    stock: str, keys: tuple[Path, Path], tmp_path: Path, signer: str
) -> None:
    private, public = keys
    _, other = write_keys(tmp_path, "other")
    place = make_set(tmp_path / "set", SMALL, LARGE)
    signature = place.state / "model.sig"
    if signer == "ours":
        assert ours("sign", place.root, "--key", private)[0]
    else:
        sign = [stock, "sign", "key", place.root, "--private_key", private]
        own = ["--ignore-paths", place.state]
        assert run_command(*sign, "--signature", signature, *own)[0]

    def verdicts(key: Path) -> tuple[bool, bool]:
        verify = [stock, "verify", "key", place.root, "--public_key", key]
        return (
            ours("check-signature", place.root, "--public-key", key, "--full")[0],
            run_command(*verify, "--signature", signature)[0],
        )

    assert verdicts(public) == (True, True)
    assert verdicts(other) == (False, False)
    text = signature.read_text(encoding="utf-8")
    start = text.index('"payload"') + 40
    swapped = text[:start] + ("A" if text[start] != "A" else "B") + text[start + 1 :]
    signature.write_text(swapped, encoding="utf-8")
    assert verdicts(public) == (False, False)
