"""The same digest whatever the machine looks like, and without any network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.app.workspace import host_platform
from pipeline.core.errors import GoldenMismatch, OfflineMiss
from tests.integration.built import STRANGE, build_image, checkout_of, run_sm120, sm120
from tests.testbed.forked import ROOT

IMAGE = "llama-cpp-cpu"
# may read root's folders, where the interpreter of this test may lie, but owns and writes nothing
NOBODY_WITHOUT_NETWORK = [
    *("unshare", "-n", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]


def test_built_in_another_time_zone_locale_and_hash_seed_the_digest_is_golden(
    small_store: Path,
) -> None:
    # the image that all files share was built so (conftest.py)
    built = build_image(small_store, IMAGE, host_platform())
    golden = yaml.safe_load((ROOT / "lockfiles" / "golden.yaml").read_text(encoding="utf-8"))
    name = f"{IMAGE}.{built.platform.rpartition('/')[2]}"
    assert built.digest == golden["images"][name]["digest"]


@pytest.mark.big
def test_a_rebuild_in_another_time_zone_locale_and_hash_seed_is_identical(
    small_store: Path,
) -> None:
    platform = "linux/arm64"
    built = build_image(small_store, IMAGE, platform)
    done = sm120(small_store, "image", "rebuild", IMAGE, "--platform", platform, **STRANGE)
    assert done.stdout.strip() == f"{IMAGE} for {built.platform}: identical, {built.digest}"


def test_another_folder_user_and_umask_without_network_give_the_same_digest(
    lean_store: Path, tmp_path: Path
) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("unshare"):
        pytest.skip("Another user and an empty network namespace need root.")
    folder = collected(lean_store, tmp_path)
    checkout = tmp_path / "elsewhere"
    for name in ("images", "lockfiles"):
        shutil.copytree(checkout_of(lean_store) / name, checkout / name)
    shutil.copytree(ROOT / "pipeline", checkout / "pipeline")
    subprocess.run(["chown", "-R", "65534:65534", str(tmp_path)], check=True)
    build = (
        f"umask 077; exec {sys.executable} -m pipeline build {IMAGE} --offline --mirror {folder}"
    )
    done = subprocess.run(
        [*NOBODY_WITHOUT_NETWORK, "sh", "-c", build],
        cwd=checkout,
        env={**os.environ, "SM120_STORE": str(tmp_path / "store"), "HOME": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert build_image(lean_store, IMAGE, host_platform()).digest in done.stdout


def collected(store: Path, tmp_path: Path) -> Path:
    """Every locked file of the image in a folder, as for a machine without network."""
    build_image(store, IMAGE, host_platform())
    folder = tmp_path / "air-gapped"
    sm120(store, "image", "collect", IMAGE, "--output", str(folder))
    return folder


def test_offline_without_the_files_names_the_first_missing_one(tmp_path: Path) -> None:
    done = run_sm120(tmp_path / "store", "build", IMAGE, "--offline")
    assert done.returncode == OfflineMiss.exit_code
    assert "not in the store" in done.stderr


def test_a_build_of_other_inputs_fails_and_says_which(small_store: Path, tmp_path: Path) -> None:
    build_image(small_store, IMAGE, "linux/amd64")
    checkout = tmp_path / "checkout"
    for name in ("images", "lockfiles"):
        shutil.copytree(ROOT / name, checkout / name)
    launcher = checkout / "images" / IMAGE / "serve.py"
    launcher.write_text(launcher.read_text(encoding="utf-8") + "# edited\n", encoding="utf-8")
    command = [sys.executable, "-m", "pipeline", "--checkout", str(checkout)]
    command += ["--store", str(small_store), "build", IMAGE, "--platform", "linux/amd64"]
    done = subprocess.run(command, text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == GoldenMismatch.exit_code
    assert "these inputs changed: files" in done.stderr
