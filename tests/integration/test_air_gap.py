"""A plan carried behind a firewall in a bundle: nothing there has a route to anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.app.workspace import host_platform
from tests.integration.built import build_image, checkout_of
from tests.testbed.forked import ROOT

IMAGE = "llama-cpp-cpu"
Outcome = subprocess.CompletedProcess[str]


@pytest.fixture
def site(lean_store: Path, tmp_path: Path) -> Path:
    """A committed checkout, a key, and a bundle of a plan that builds the image."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("git"):
        pytest.skip("An empty network namespace needs root, a bundle needs git.")
    build_image(lean_store, IMAGE, host_platform())
    code = tmp_path / "code"
    shutil.copytree(checkout_of(lean_store), code, symlinks=True)
    (code / "ansible").unlink()  # a link out of the checkout, to spare a copy
    shutil.copytree(ROOT / "pipeline", code / "pipeline")
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", str(code), *words], check=True)
    image, check = {"run": f"build {IMAGE} --platform host"}, {"run": f"verify {IMAGE}"}
    plan = {"format": 1, "stages": {"image": image, "check": {**check, "needs": ["image"]}}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
    made = sm120(code, tmp_path / "store", "evidence", "new-key", "maker")
    assert made.returncode == 0, made.stderr
    return tmp_path


def sm120(
    code: Path, store: Path, *words: str, before: tuple[str, ...] = (), **env: str
) -> Outcome:
    """The command of a checkout, in a process of its own, with a home of its own."""
    command = [*before, sys.executable, "-m", "pipeline", "--store", str(store), *words]
    home = {"HOME": str(store.parent / "home"), "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=code, env={**os.environ, **home, **env}, text=True, capture_output=True
    )


def test_a_plan_runs_behind_a_firewall_from_its_bundle_alone(site: Path, lean_store: Path) -> None:
    wheels = site / "usb" / "mirror" / "tool"
    public = site / "home" / ".config" / "sm120" / "keys" / "maker.pub"
    # pip would bring the tool's wheels, 45 MB: test_offline_bootstrap.py does that
    skip = "import sys; from pipeline.app import bundle, deliver; from pipeline.cli import main\n"
    skip += "bundle.collect_own_tool = lambda *a: deliver.Collected(0, 0); main.main()"
    words = ["--store", str(lean_store), "bundle", str(site / "plan.yaml")]
    made = subprocess.run(
        [sys.executable, "-c", skip, *words, "--output", str(site / "usb"), "--json"],
        cwd=site / "code",
        env={**os.environ, "HOME": str(site / "home"), "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        capture_output=True,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert not wheels.exists()
    digest = build_image(lean_store, IMAGE, host_platform()).digest

    def behind(code: Path, store: str, *words: str, **env: str) -> Outcome:
        return sm120(code, site / store, *words, before=("unshare", "-n"), **env)

    # a disk that lost one bit
    wheel = max((site / "usb" / "mirror").glob("*.whl"), key=lambda path: path.stat().st_size)
    good = wheel.read_bytes()
    wheel.unlink()
    wheel.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    usb, place = str(site / "usb"), site / "place"
    key, nobody = ("--key", str(public)), {"HOME": str(site / "nobody")}
    refused = behind(
        site / "code", "there", "unbundle", usb, "--output", str(place), *key, **nobody
    )
    assert (refused.returncode, wheel.name in refused.stderr) == (71, True), refused.stderr
    assert not place.exists()
    wheel.write_bytes(good)
    # nobody there trusts a key because it lies in the bundle
    stranger = behind(site / "code", "there", "unbundle", usb, **nobody)
    assert (stranger.returncode, "no key is trusted here" in stranger.stderr) == (73, True)
    done = behind(
        site / "code", "there", "unbundle", usb, "--output", str(place), *key, "--json", **nobody
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["images"] == [f"{IMAGE} for {host_platform()}"]
    checkout = place / "checkout"
    # from its inputs alone: the digest that is committed, or the build fails
    offline = {"SM120_OFFLINE": "1", "SM120_MIRRORS": str(place / "mirror")}
    ran = behind(checkout, "fresh", "run", str(place / "plan" / "plan.yaml"), "--json", **offline)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2000:]
    assert {row["state"] for row in json.loads(ran.stdout)["stages"]} == {"run"}
    fresh = behind(checkout, "fresh", "build", IMAGE, "--platform", "host", "--json", **offline)
    assert json.loads(fresh.stdout)[0]["digest"] == digest
    # and the image that was carried, in the other store
    carried = behind(checkout, "there", "build", IMAGE, "--platform", "host", "--json", **offline)
    assert json.loads(carried.stdout)[0]["digest"] == digest
    assert json.loads(carried.stdout)[0]["cached"] is True
