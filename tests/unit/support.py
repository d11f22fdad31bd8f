"""Small wheels, pins and checkouts, and the command run as a user runs it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import main as door
from pipeline.core.errors import PipelineError
from pipeline.images.lock.model import DebPin, ImageLock, WheelPin, sealed_lock, write_lock
from pipeline.images.spec.checkout import Checkout
from tests import makers

ROOT = Path(__file__).resolve().parents[2]
AMD64, ARM64 = makers.AMD64, "linux/arm64"


def make_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    tag: str = "py3-none-any",
    requires: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """A wheel for some platform, with requirements, that pip and uv accept too."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    lines += [f"Requires-Dist: {r}\n" for r in requires]
    parts = {
        f"{stem}/__init__.py": b"one = 1\n",
        **(files or {}),
        f"{info}/METADATA": "".join(lines).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    path = folder / f"{stem}-{version}-{tag}.whl"
    return makers.write_zip(path, makers.wheel_parts(stem, version, parts))


def pin_for(data: bytes, file: str = "thing-1.0-py3-none-any.whl") -> WheelPin:
    """A pin of any bytes."""
    sha256 = hashlib.sha256(data).hexdigest()
    size = len(data)
    return WheelPin(name="thing", version="1.0", file=file, size_bytes=size, sha256=sha256)


def deb_pin_for(data: bytes) -> DebPin:
    sha256 = hashlib.sha256(data).hexdigest()
    path = "pool/main/t/thing/thing_1.0_amd64.deb"
    return DebPin(name="thing", version="1.0", path=path, size_bytes=len(data), sha256=sha256)


def tiny_spec(name: str = "tiny", **changes: Any) -> dict[str, Any]:
    """An image.yaml that needs no .debs."""
    spec = {
        "name": name,
        "summary": "a small image for tests",
        "platforms": [AMD64],
        "debian": {"suite": "bookworm"},
        "python": {"requirements": ["thing"]},
        **changes,
    }
    return {key: value for key, value in spec.items() if value is not None}


def write_spec(checkout: Checkout, spec: Mapping[str, Any]) -> None:
    path = checkout.folder(spec["name"]) / "image.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(spec), sort_keys=False))


def make_checkout(root: Path, wheels: Sequence[Path] = (), **changes: Any) -> Checkout:
    """A checkout with one image, `tiny`, locked to some wheels."""
    return makers.make_checkout(root, makers.Image(tiny_spec(**changes), wheels))


def lock_to(
    checkout: Checkout,
    name: str,
    wheels: Sequence[WheelPin],
    platform: str = AMD64,
    base_lock: str | None = None,
) -> ImageLock:
    """Write the lock of an image as it is asked for now."""
    spec = checkout.spec(name)
    lock = sealed_lock(name, platform, spec.lock_digest(), base_lock, list(wheels), [])
    write_lock(checkout.lock_path(name, platform), lock)
    return lock


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "pipeline", *map(str, args)]


def sm120(
    *args: str | Path, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        command(*args),
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def temporary_files(store_root: Path) -> list[Path]:
    """What a build that ended must not leave behind."""
    return [*(store_root / "tmp").glob("*"), *store_root.rglob(".new-*")]


def misnamed(store_root: Path) -> list[Path]:
    """Blobs and inputs whose name is not their hash."""
    folders = (store_root / "oci" / "blobs" / "sha256", store_root / "inputs")
    found = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return [p for p in found if hashlib.sha256(p.read_bytes()).hexdigest() != p.name]


@dataclass(frozen=True)
class Ended:
    """How the command ended, and what it said."""

    code: int
    out: str
    err: str
    error: str = ""  # the class of the error, where one was raised

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


class Command:
    """The command, run in this process: as a user does it, but quickly."""

    def __init__(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cwd: Path
    ) -> None:
        self._capfd, self._monkeypatch, self.cwd = capfd, monkeypatch, cwd

    def __call__(self, *args: str | Path) -> Ended:
        self._capfd.readouterr()
        raised: list[PipelineError] = []
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["sm120", *map(str, args)])
            patch.setattr(door, "_end", _noting(door._end, raised))
            patch.chdir(self.cwd)
            code = _ended(door.main)
        assert not raised or code == raised[0].exit_code
        return Ended(code, *self._capfd.readouterr(), *(type(e).__name__ for e in raised))


def build_tiny(sm120: Command, *args: str) -> Ended:
    """Build `tiny` from the folder `mirror` alone."""
    return sm120("build", "tiny", "--offline", "--mirror", sm120.cwd / "mirror", *args)


def _noting(
    end: Callable[[PipelineError, bool], None], raised: list[PipelineError]
) -> Callable[[PipelineError, bool], None]:
    def noted(error: PipelineError, debug: bool) -> None:
        raised.append(error)
        end(error, debug)

    return noted


def _ended(run: Callable[[], None]) -> int:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        run()
    except SystemExit as ending:
        return int(ending.code or 0)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    return 0
