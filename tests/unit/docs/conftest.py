"""The worlds in which the pages' commands are run: small ones, with real bytes in them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.artifacts.attest.keyring import default_folder
from pipeline.hosts.facts.gather import gather_facts
from tests import makers
from tests.compiled import COPYING, compiled_checkout
from tests.docs.walks import World
from tests.testbed.deb_file import Item
from tests.testbed.hub import test_hub
from tests.testbed.oci_door import Door
from tests.unit.bench.example_run import FOLDER as EXAMPLE
from tests.unit.hosts.machines import blackwell
from tests.unit.support import ROOT, Command

# names that the pages use for places of this machine
CONTEXT = "     return 'hello'\n"
STORE, REGISTRY, HUB = "/home/you/.cache/sm120", "myregistry:5000", "http://hub.example"


@pytest.fixture
def checkout(sm120: Command) -> World:
    """This checkout, with an empty store."""
    sm120.cwd = ROOT
    return World(sm120, {STORE: os.environ["SM120_STORE"]})


@pytest.fixture
def demo(sm120: Command, door: Door, tmp_path: Path) -> World:
    """A checkout with one small image on a small base, its parts in `parts/`, and a registry."""
    parts = tmp_path / "parts"
    code = b"def greet():\n    return 'hello'\n"
    edit = makers.Edit("greeter/__init__.py", code, code.replace(b"hello", b"hello, SM120"))
    wheel = makers.make_wheel(parts, "greeter", {edit.path: code})
    tool = makers.make_deb(parts, "tool", Item("./usr/bin/tool", b"#!/bin/sh\n", mode=0o755))
    image = makers.wheel_image("demo", [wheel], patches="patches/series.yaml")
    image.spec["summary"] = "A small image to try the commands on"
    image.files |= makers.patch_files(edit, applies_to="greeter==1.0")
    base = makers.root_image([tool], summary="A small base for it")
    makers.make_checkout(tmp_path, base, image)
    (tmp_path / "pr-7.diff").write_text(_pull_request(code), encoding="utf-8")
    here = {STORE: os.environ["SM120_STORE"], REGISTRY: door.host_port, "/code": str(tmp_path)}
    return World(sm120, {**here, "/home/you": os.environ["HOME"]})


def _pull_request(code: bytes) -> str:
    """A diff as upstream's repository has it: with its own folders, and a test."""
    asked = code.replace(b"greet()", b"greet(again=False)")
    edits = (
        makers.Edit("src/greeter/__init__.py", code, asked),
        makers.Edit("tests/test_greeter.py", b"greet()\n", b"greet(again=True)\n"),
    )
    # one line of context: the other one is changed by the image's patches
    return "".join(
        f"diff --git a/{e.path} b/{e.path}\n{e.diff.replace(CONTEXT, '').replace('1,2', '1')}"
        for e in edits
    )


@pytest.fixture
def stranger(demo: World, tmp_path: Path) -> World:
    """The same image as somebody published it, seen from a machine that trusts nobody."""
    sm120, here = demo.sm120, demo.names[REGISTRY]
    sm120("build", "demo", "--mirror", "parts", "--offline", "--accept")
    sm120("evidence", "new-key", "builder", "--output", tmp_path / "theirs")
    key = ("--key", tmp_path / "theirs" / "builder.pem")
    assert sm120("publish", "demo", f"{here}/team/demo:v1", *key).code == 0
    shutil.copy(tmp_path / "theirs" / "builder.pub", tmp_path)
    return demo


@pytest.fixture
def compiler(sm120: Command, door: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    """A machine that compiled a small source, with a key that signs, and a registry."""
    sm120.cwd = compiled_checkout(tmp_path).root
    monkeypatch.setenv("SM120_MIRRORS", str(tmp_path / "mirror"))
    monkeypatch.setattr("pipeline.app.sources.find_backend", lambda _: COPYING)
    monkeypatch.setattr("pipeline.images.source.toolchain.machine", lambda: "x86_64")
    monkeypatch.setattr("pipeline.app.sources.host_platform", lambda: makers.AMD64)
    for name in ("tools", "engine"):
        assert sm120("build", name, "--accept").code == 0
    sm120("evidence", "new-key", "builder")
    return World(sm120, {STORE: os.environ["SM120_STORE"], REGISTRY: door.host_port})


@pytest.fixture
def taker(compiler: World) -> World:
    """Another machine: an empty store, and the builder's public key."""
    for build in ("plain", "other"):
        place = f"{compiler.names[REGISTRY]}/team/layers"
        assert compiler.sm120("source", "publish", "hello", build, place).code == 0
    shutil.rmtree(os.environ["SM120_STORE"])
    keys = default_folder(os.environ)
    shutil.copy(keys / "builder.pub", compiler.sm120.cwd)
    shutil.rmtree(keys)
    return World(compiler.sm120, {**compiler.names, "/home/you": os.environ["HOME"]})


@pytest.fixture
def weights(sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    """A checkout that asks for one small repository, and a Hub that has it."""
    spec = {
        "name": "tiny",
        "repository": "org/tiny",
        "format": "safetensors",
        "quant": "bf16",
        "about": "A small set of weights to try the commands on.",
    }
    path = tmp_path / "lockfiles" / "weights" / "tiny.yaml"
    path.parent.mkdir(parents=True)
    (tmp_path / "images").mkdir()
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    files = {
        "config.json": b'{"model_type": "tiny"}',
        "modeling.py": b"one = 1\n",
        "model.safetensors": bytes(range(256)) * 40_000,
    }
    with test_hub() as hub:
        hub.add("org/tiny", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        here = {HUB: hub.url, "/models": str(tmp_path / "models")}
        yield World(sm120, {**here, "/home/you": os.environ["HOME"]})


@pytest.fixture
def host(sm120: Command, tmp_path: Path) -> World:
    """Two captured machines with two RTX PRO 6000, one of them set up wrong, and a log."""
    for name, iommu in (("node1", "identity"), ("node2", "translated")):
        facts = blackwell(2, iommu=iommu, total="97887 MiB").model_dump_json(exclude_none=True)
        (tmp_path / f"{name}.json").write_text(facts, encoding="utf-8")
    log = "NCCL WARN Call to posix_fallocate failed : No space left on device\n"
    (tmp_path / "engine.log").write_text(log, encoding="utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    line = next(part for part in readme.split("`") if part.startswith("OutOfResources"))
    (tmp_path / "crash.log").write_text(f"triton.runtime.errors.{line}\n", encoding="utf-8")
    return World(sm120, {"/code/sm120-pipeline": str(ROOT)})


@pytest.fixture
def measured(sm120: Command, tmp_path: Path) -> World:
    """A folder with a small run of a benchmark, and the facts of a host."""
    shutil.copytree(EXAMPLE, tmp_path / "runs" / "night")
    facts = gather_facts(blackwell(2, total="97887 MiB"), "rig1")
    (tmp_path / "facts.json").write_text(facts.model_dump_json(), encoding="utf-8")
    return World(sm120)


@pytest.fixture
def upstream(sm120: Command, tmp_path: Path) -> World:
    """This checkout's recipes, and a checkout of another project's with one file in it."""
    for name in ("images", "lockfiles", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    repo = tmp_path / "vllm-recipes"
    (repo / "models" / "org").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    file = {
        "model": {"model_id": "org/model", "base_args": ["--max-model-len", "131072"]},
        "features": {"reasoning": {"args": ["--reasoning-parser", "qwen3"]}},
        "variants": {
            "default": {"precision": "bf16"},
            "nvfp4": {"model_id": "org/model-NVFP4", "extra_args": ["--kv-cache-dtype", "fp8"]},
        },
        "guide": "```bash\nvllm serve org/model --max-model-len $CONTEXT\n```\n",
    }
    path = repo / "models" / "org" / "model.yaml"
    path.write_text(yaml.safe_dump(file), encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    origin = ["remote", "add", "origin", "https://github.com/vllm-project/recipes.git"]
    for words in (["init", "-q"], origin, ["add", "-A"], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(repo), *words], check=True)
    (repo / "newer.sh").write_text(
        "sed -i s/131072/262144/ models/org/model.yaml && git -c user.name=a -c user.email=a@b"
        " -c commit.gpgsign=false commit -qam two\n",
        encoding="utf-8",
    )
    return World(sm120)


@pytest.fixture
def later(sm120: Command, tmp_path: Path) -> World:
    """A run in a form that no release has written yet."""
    run = Path(shutil.copytree(EXAMPLE, tmp_path / "bench" / "quick")) / "bench.json"
    run.write_text(run.read_text("utf-8").replace("sm120-bench/1", "sm120-bench/9"), "utf-8")
    return World(sm120)
