from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipeline.images.lock.model import ImageLock, pylock, requirements, sealed_lock
from pipeline.images.spec.image import PythonSpec
from tests.makers import wheel_pin
from tests.unit.support import AMD64, make_wheel

SPEC = PythonSpec(requirements=["thing"])


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    make_wheel(tmp_path / "wheels", "thing", requires=["dep-a"])
    make_wheel(tmp_path / "wheels", "dep-a", "1.5+local.1")
    return tmp_path / "wheels"


@pytest.fixture
def lock(wheels: Path) -> ImageLock:
    pins = [wheel_pin(p) for p in wheels.iterdir()]
    return sealed_lock("tiny", AMD64, f"sha256:{'0' * 64}", None, pins, [])


def pip_install(wheels: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = wheels.parent / "requirements.txt"
    path.write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-input"]
    args = ["--find-links", str(wheels), "--require-hashes", "-r", str(path)]
    return subprocess.run([*pip, *args], capture_output=True, text=True, check=False)


def test_real_pip_takes_the_exported_requirements(wheels: Path, lock: ImageLock) -> None:
    done = pip_install(wheels, requirements(lock))
    assert done.returncode == 0, done.stderr
    assert "Would install dep-a-1.5+local.1 thing-1.0" in done.stdout


def test_real_pip_refuses_other_bytes(wheels: Path, lock: ImageLock) -> None:
    make_wheel(wheels, "thing", requires=["dep-a"], files={"thing/more.py": b"#"})
    done = pip_install(wheels, requirements(lock))
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_the_pylock_is_valid_and_says_the_same(lock: ImageLock) -> None:
    text = pylock(lock, SPEC)
    packages = tomllib.loads(text)["packages"]
    assert [(p["name"], p["version"]) for p in packages] == [
        (w.name, w.version) for w in lock.wheels
    ]
    module = pytest.importorskip("packaging.pylock", reason="This packaging has no pylock module.")
    parsed = module.Pylock.from_dict(tomllib.loads(text))
    parsed.validate()
    assert [p.wheels[0].hashes["sha256"] for p in parsed.packages] == [
        w.sha256 for w in lock.wheels
    ]
    assert [p.wheels[0].size for p in parsed.packages] == [w.size_bytes for w in lock.wheels]


def test_the_pylock_names_files_beside_it_and_no_address(lock: ImageLock) -> None:
    text = pylock(lock, SPEC)
    wheels = [p["wheels"][0] for p in tomllib.loads(text)["packages"]]
    assert all(w["path"] == w["name"] for w in wheels)
    assert "://" not in text
