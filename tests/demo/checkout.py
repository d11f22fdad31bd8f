"""The demo's own checkout: an engine image with a patch, a recipe, and a spec of weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.demo.shell import ROOT

IMAGE, RECIPE, WEIGHTS, REPOSITORY = "llama-cpp-cpu", "demo", "tiny", "demo/tiny"
PATCH = "0001-say-that-it-is-patched.patch"
PATCHED_LINE = "xllamacpp: patched by the demo"
_IMAGES = ("debian-python", IMAGE)
_PATCH_TEXT = f"""\
--- a/xllamacpp/_version.py
+++ b/xllamacpp/_version.py
@@ -18,4 +18,5 @@ version_json = '''
 
 
 def get_versions():
+    print("{PATCHED_LINE}", flush=True)
     return json.loads(version_json)
"""


def write_checkout(folder: Path) -> None:
    """What a user has who adds a patch to an image of ours."""
    for name in _IMAGES:
        shutil.copytree(ROOT / "images" / name, folder / "images" / name)
        for lock in (ROOT / "lockfiles" / "images").glob(f"{name}.*.lock.yaml"):
            _copy(lock, folder / "lockfiles" / "images" / lock.name)
    for name in ("host.yaml", f"flags/{IMAGE}.yaml"):
        _copy(ROOT / "lockfiles" / name, folder / "lockfiles" / name)
    (folder / "ansible").symlink_to(ROOT / "ansible")
    _write_patch(folder / "images" / IMAGE)
    _write_yaml(folder / "lockfiles" / "weights" / f"{WEIGHTS}.yaml", _weights())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write_yaml(path: Path, body: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON is YAML, too
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def _write_patch(image: Path) -> None:
    """A patch without hashes, which `sm120 build --accept` writes; the gate reads machine code."""
    path = image / "image.yaml"
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    _write_yaml(path, {**spec, "patches": "patches/series.yaml", "gates": ["arch"]})
    patch = {
        "file": PATCH,
        "why": "The log of a running engine shows by it that the patch is in effect.",
        "upstream": ["of this demonstration alone"],
        "applies_to": spec["python"]["requirements"][0],
        "gate": "arch",
        "files": [{"path": "xllamacpp/_version.py"}],
    }
    # by yaml, one key a line: --accept adds the hashes to the text as it is
    text = yaml.safe_dump({"patches": [patch]}, sort_keys=False, width=200)
    (image / "patches").mkdir()
    (image / "patches" / "series.yaml").write_text(text, encoding="utf-8")
    (image / "patches" / PATCH).write_text(_PATCH_TEXT, encoding="utf-8")


def _weights() -> dict[str, str]:
    return {
        "name": WEIGHTS,
        "repository": REPOSITORY,
        "format": "gguf",
        "quant": "f16",
        "about": "A model of 1 MB that can only recite, made on the spot.",
    }


def write_recipe(folder: Path, port: int) -> None:
    """The engine and the weights together, and what a start must show."""
    why = "It runs on any machine; the tiny model has a token for each letter."
    patched = {"pattern": PATCHED_LINE, "why": "The patched engine says so itself."}
    body = {
        "name": RECIPE,
        "summary": "A tiny model with a patched llama.cpp, on the CPU",
        "backing": "proved",
        "engine": "llama-cpp",
        "image": IMAGE,
        "sources": {"demo": {"kind": "ours", "title": "the demonstration", "why": why}},
        "model": {
            "repository": REPOSITORY,
            "weights": WEIGHTS,
            "file": "tiny.gguf",
            "name": "tiny",
        },
        "hardware": {"cards": 0},
        "port": port,
        "flags": {"demo": {"threads": 1, "parallel": 8, "ctx_size": 32768}},
        "container": {"ipc": "private", "memory_locked": False},
        "expect": {"log": [patched]},
        "smoke": {"tools": False, "streams": [1, 2, 8]},
        "bench": ["tiny"],
    }
    _write_yaml(folder / "recipes" / f"{RECIPE}.yaml", body)
