"""Air gap, whole: a host is provisioned, an image built, published, served and measured, offline.

Real: the bundle, Debian's packages with Debian's signature, apt, Docker, the registry, Ansible, the
engine, the smoke test, the benchmark, all evidence. Stand-ins: NVIDIA's packages, the Hub on the
outer side; the node is a container with systemd, and has no card.
"""

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
from pipeline.artifacts.store.store import default_root
from pipeline.serving.recipe.tiny import tiny_gguf
from tests.integration.built import build_image, checkout_of
from tests.integration.closed_side import REGISTRY
from tests.integration.test_air_gap import sm120
from tests.testbed.apt_repository import new_repository, nvidia_packages
from tests.testbed.debian import BOOKWORM
from tests.testbed.forked import ROOT
from tests.testbed.hub import test_hub as small_hub
from tests.testbed.nodes import base_tar
from tests.testbed.signer import new_signer

pytestmark = [pytest.mark.big, pytest.mark.timeout(5400)]
IMAGE, RECIPE, WEIGHTS = "llama-cpp-cpu", "site", "tiny"
PLACE = f"{REGISTRY}:5000/team/{IMAGE}"
ON = "--on n1 -i inventory.json"
LOOK = "--look-in models/tiny --look-in records --look-in bench"
STAGES = {
    "image": {"run": f"build {IMAGE} --platform host"},
    "weights": {"run": f"weights fetch {WEIGHTS} --output models/{WEIGHTS}"},
    "hosts": {"run": "host provision -i inventory.json"},
    "publish": {
        "run": f"publish {IMAGE} {PLACE}:v1 --platform host --ca ca.crt",
        "needs": ["image", "hosts"],
    },
    "pushed": {"run": f"verify {PLACE}:v1 --deep --ca ca.crt", "needs": ["publish"]},
    "deploy": {
        # pulled by the host from the registry of this side, by digest
        "run": f"host deploy {RECIPE} -i inventory.json --registry {PLACE} --ca ca.crt"
        # the stage `smoke` asks: of this model only what any sound server guarantees
        " --timeout 120 --smoke none",
        "needs": ["pushed"],
    },
    "state": {"run": "host verify -i inventory.json --brief", "needs": ["deploy"]},
    # what `serve` starts is bound to the numbers by its digests
    "removed": {"run": f"host deploy {RECIPE} -i inventory.json --absent", "needs": ["state"]},
    "serve": {
        "run": f"serve {RECIPE} --weights /models/{WEIGHTS} {ON}",
        "needs": ["removed", "weights"],
        "lasts": False,
    },
    "smoke": {
        "run": f"smoke {RECIPE} {ON} --quick --up-to streams --no-quality",
        "needs": ["serve"],
    },
    "bench": {
        "run": f"bench {RECIPE} {ON} --host-facts records/n1.json --requests 4 --repeats 1"
        " --concurrency 1 --output bench",
        "needs": ["smoke", "serve"],
    },
    "report": {"run": f"report bench/tiny --output report.html {LOOK}", "needs": ["bench"]},
    "check": {"run": f"verify report.html --deep {LOOK}", "needs": ["report"]},
}


def committed_checkout(lean: Path, folder: Path, hub_url: str) -> Path:
    """What a site has: an image, a recipe, locked weights and locked packages of hosts."""
    code = folder / "code"
    shutil.copytree(checkout_of(lean), code, symlinks=True)
    (code / "ansible").unlink()  # a link out of the checkout, to spare a copy
    for name in ("pipeline", "ansible"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    spec = {"name": WEIGHTS, "repository": "team/tiny", "format": "gguf", "quant": "f16"}
    about = {"about": "A model of 1 MB that can only recite, made on the spot."}
    path = code / "lockfiles" / "weights" / f"{WEIGHTS}.yaml"
    path.write_text(yaml.safe_dump({**spec, **about}))
    recipe = {
        **yaml.safe_load((ROOT / "recipes" / "tiny-cpu.yaml").read_text()),
        **{"name": RECIPE, "bench": ["tiny"]},
        "model": {
            **{"repository": "team/tiny", "weights": WEIGHTS, "file": "tiny.gguf"},
            "name": "tiny",
        },
    }
    (code / "recipes" / f"{RECIPE}.yaml").write_text(yaml.safe_dump(recipe))
    store = folder / "store"
    done = sm120(code, store, "weights", "lock", WEIGHTS, HF_ENDPOINT=hub_url)
    assert done.returncode == 0, done.stderr
    with new_signer("testbed") as signer:
        nvidia = new_repository(folder / "nvidia", signer, nvidia_packages())
        shutil.copyfile(nvidia.keyring, folder / "nvidia.gpg")
        given = ("--repository", str(nvidia.root), "--keyring", str(nvidia.keyring))
        done = sm120(code, store, "host", "lock", "--target", BOOKWORM.target, *given)
    assert done.returncode == 0, done.stderr
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", str(code), *words], check=True)
    return code


def test_a_fresh_host_becomes_a_measured_engine_without_a_route_to_anywhere(
    lean_store: Path, tmp_path: Path
) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("git"):
        pytest.skip("An empty network namespace needs root, a bundle needs git.")
    digest = build_image(lean_store, IMAGE, host_platform()).digest
    (tmp_path / "node.txt").write_text(str(base_tar(default_root().parent / "sm120-testbed")))
    with small_hub() as hub:
        hub.add("team/tiny", {"tiny.gguf": tiny_gguf(), "README.md": b"It can only recite.\n"})
        code = committed_checkout(lean_store, tmp_path, hub.url)
        plan = {"format": 1, "stages": STAGES}
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
        assert sm120(code, tmp_path / "store", "evidence", "new-key", "maker").returncode == 0
        shutil.copyfile(tmp_path / "home/.config/sm120/keys/maker.pub", tmp_path / "maker.pub")
        words = ["bundle", str(tmp_path / "plan.yaml"), "--output", str(tmp_path / "usb"), "--json"]
        words += ["--repository", f"{BOOKWORM.target}={tmp_path / 'nvidia'}"]
        words += ["--keyring", str(tmp_path / "nvidia.gpg")]
        for role in ("container_runtime", "registry", "weights"):
            words += ["--role", role]
        made = sm120(code, lean_store, *words, HF_ENDPOINT=hub.url, HOME=str(tmp_path / "home"))
    assert made.returncode == 0, made.stderr[-3000:]
    (tmp_path / "bundle.json").write_text(made.stdout)
    alone = ["unshare", "--net", "--mount", "--propagation", "private"]
    command = [*alone, sys.executable, "-m", "tests.integration.closed_side", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    found = json.loads((tmp_path / "closed.json").read_text())
    assert {row["stage"]: row["state"] for row in found["stages"]} == dict.fromkeys(STAGES, "run")
    assert set(found["again"]) == {"done"}
    # from inputs alone, to the digest that is committed
    assert found["digest"] == digest
    assert len(found["installed"]) == 3
    assert len(found["refused"]) == 14
    page = (tmp_path / "place" / "plan" / "report.html").read_text()
    assert digest[7:19] in page
