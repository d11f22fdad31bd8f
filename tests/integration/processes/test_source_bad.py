"""Sources that go wrong: one clear line, the exit code of its family, nothing half installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import (
    CompileFailed,
    DigestMismatch,
    DiskFull,
    LockEdited,
    OutputWrong,
    PatchConflict,
    PipelineError,
    StepFailed,
    UnknownSource,
)
from pipeline.images.assemble.plan import plan_tree
from pipeline.images.source.objects import entries, objects_folder
from pipeline.images.source.toolchain import unpacked_root
from pipeline.images.spec.image import CompiledSpec
from tests.integration.built import need_sandbox
from tests.testbed.tiny_source import FILES, HERE, Bench, processes_in, toolchain_deb

Make = Callable[..., Bench]


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_sandbox("namespaces")
    return toolchain_deb(tmp_path_factory.mktemp("mirror"), compiler=True)


@pytest.fixture(scope="module")
def with_toolchain(deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the toolchain's image, built and unpacked: three seconds of each test."""
    made = Bench(tmp_path_factory.mktemp("toolchain"), deb)
    made.write()
    unpacked_root(made.store, made._toolchain(made.plan()))
    return made.store.root


@pytest.fixture
def bench(tmp_path: Path, deb: Path, with_toolchain: Path) -> Make:
    # a copy, not links: tests damage files in their place
    shutil.copytree(with_toolchain, tmp_path / "store", symlinks=True)

    def make(script: str = FILES["build.sh"], **more: Any) -> Bench:
        made = Bench(tmp_path, deb, {**FILES, "build.sh": script}, **more)
        made.write()
        return made

    return make


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("exec 3<>/dev/tcp/127.0.0.1/80", StepFailed, "compile ended with"),
        ("echo x > /usr/bin/x", StepFailed, "Read-only file system"),
        ("echo x > /etc/x", StepFailed, "Read-only file system"),
        ("mkdir /x", StepFailed, "Read-only file system"),
        ("rm -r /src /usr", StepFailed, "compile ended with"),
        ("echo '#include \"none.h\"' > /src/one.c\n" + FILES["build.sh"], StepFailed, "none.h"),
        ("no-such-program", StepFailed, "not found"),
        ("exit 7", StepFailed, "ended with 7"),
        ("true", OutputWrong, "left no file one.o"),
        ("ln -s /src/one.c one.o; cp /src/two.c two.o", OutputWrong, "left no file one.o"),
        ("mkdir one.o two.o", OutputWrong, "left no file one.o"),
        ("dd if=/dev/zero of=/dev/full count=1", DiskFull, "No space left on device"),
    ],
)
def test_a_step_that_goes_wrong_is_one_line_and_leaves_nothing(
    bench: Make, script: str, error: type[PipelineError], message: str
) -> None:
    made = bench(script)
    with pytest.raises(error, match=message) as raised:
        made.compile()
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("tiny (plain)")
    assert raised.value.exit_code == (40 if error is DiskFull else 33)
    assert made.left() == []


def test_what_did_not_compile_compiles_once_it_is_corrected(bench: Make) -> None:
    made = bench("exit 1")
    with pytest.raises(CompileFailed):
        made.compile()
    bench().compile()
    assert made.tree().objects.compiled == 2


def test_another_archive_than_the_locked_one_is_refused(bench: Make) -> None:
    made = bench()
    pin = made.plan().lock.archive
    made.store.input_path(pin.sha256).unlink()
    (made.home / pin.file).write_bytes(b"x" * pin.size_bytes)
    with pytest.raises(DigestMismatch):
        made.compile()
    assert made.left() == []


def test_an_edited_lock_and_an_unknown_build_are_refused_before_anything_is_done(
    bench: Make,
) -> None:
    made = bench()
    with pytest.raises(UnknownSource):
        plan_tree(made.checkout, CompiledSpec(source="tiny", build="other"), HERE)
    path = made.checkout.source_lock_path("tiny")
    path.write_text(path.read_text().replace("files: 4", "files: 5"))
    with pytest.raises(LockEdited):
        made.plan()


def test_a_patch_that_does_not_fit_is_refused(bench: Make) -> None:
    made = bench()
    folder = made.checkout.source_folder("tiny")
    (folder / "a.patch").write_text("--- a/two.c\n+++ b/two.c\n@@ -1 +1 @@\n-nothing\n+else\n")
    entry = {"path": "two.c", "before": "sha256:" + "0" * 64, "after": "sha256:" + "0" * 64}
    why = "because a test needs a reason that is long enough"
    made.patches = [{"file": "a.patch", "why": why, "upstream": ["none"], "files": [entry]}]
    made.write()
    with pytest.raises(PatchConflict):
        made.compile()
    assert made.left() == []


def test_a_toolchain_that_was_changed_on_disk_is_made_anew(bench: Make, deb: Path) -> None:
    made = bench()
    first = made.compile()
    (root,) = (made.store.root / "toolchains").iterdir()
    (root / "usr/bin/cat").write_bytes(b"#!/bin/sh\n")
    (root / "usr/bin/more").write_bytes(b"not of the image")
    made.files["two.c"] += "\n"
    made.write()
    made.compile()
    assert (root / "usr/bin/cat").stat().st_size > 100
    assert not (root / "usr/bin/more").exists()
    assert first.digest


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "replaced"])
def test_a_damaged_object_is_compiled_again(bench: Make, damage: str) -> None:
    made = bench()
    first = made.compile()
    folder = objects_folder(made.store)
    results = [folder / name for name in entries(folder) if name.endswith("R")]
    assert len(results) == 2
    data = [path.read_bytes() for path in results]
    for path, own in zip(results, data, strict=True):
        broken = {
            "truncated": own[: len(own) // 2],
            "flipped": own[:-30] + bytes([own[-30] ^ 1]) + own[-29:],
            "emptied": b"",
            "replaced": b"\x7fELF" * 50,
        }
        path.write_bytes(broken[damage])
    _forget(made)
    assert made.compile().digest == first.digest
    assert made.tree().objects.compiled == 2


def test_an_object_under_another_s_key_is_used_and_shows_in_the_digest(bench: Make) -> None:
    """ccache checks that an entry is whole, not that it is the right one: the digest tells."""
    made = bench()
    first = made.compile()
    folder = objects_folder(made.store)
    one, two = (folder / name for name in entries(folder) if name.endswith("R"))
    one.write_bytes(two.read_bytes())
    _forget(made)
    assert made.compile().digest != first.digest
    assert made.tree().objects.kept == 2


def test_only_what_an_edit_touches_is_compiled_again(bench: Make) -> None:
    made = bench()
    made.compile()
    assert (made.tree().objects.compiled, made.tree().objects.kept) == (2, 0)
    made.files["one.c"] = made.files["one.c"].replace("+ 1", "+ 2")
    made.write()
    made.compile()
    assert (made.tree().objects.compiled, made.tree().objects.kept) == (1, 1)


def _forget(made: Bench) -> None:
    """The tree, not its objects."""
    key = made.plan().key.removeprefix("sha256:")
    (made.store.root / "layers" / f"{key}.json").unlink()


SLOW = FILES["build.sh"] + "echo begun; sleep 60\n"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_stopped_leaves_no_process_and_goes_on_with_its_objects(
    bench: Make, tmp_path: Path, how: signal.Signals
) -> None:
    made = bench(SLOW)
    made._toolchain(made.plan())
    command = ["source", "build", "tiny", "plain", "--offline", "--mirror", str(tmp_path)]
    places = ["--checkout", str(made.checkout.root), "--store", str(made.store.root)]
    child = subprocess.Popen(
        [sys.executable, "-m", "pipeline", *places, *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SM120_DEBIAN_MIRROR": str(tmp_path)},
    )
    log = made.store.root / "logs" / "tiny-plain.log"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        if log.exists() and "begun" in log.read_text():
            break
        time.sleep(0.1)
    assert child.poll() is None, child.stderr.read() if child.stderr else ""
    child.send_signal(how)
    _, errors = child.communicate(timeout=30)
    assert child.returncode != 0
    assert "Traceback" not in errors
    deadline = time.monotonic() + 10
    while list(processes_in(made.store.root)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(processes_in(made.store.root)) == []
    made.store.sweep()
    assert made.left() == []
    made.files["build.sh"] = FILES["build.sh"]
    made.write()
    made.compile()
    assert (made.tree().objects.compiled, made.tree().objects.kept) == (0, 2)
