"""Engine images for arm64, assembled on amd64: their engine can be imported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.images.gate.smem.stub_libraries import read_links, shared_object
from tests.integration.built import build_image
from tests.testbed.emulated import EmulatedImage, require_emulation, unpack_image

SITE = "opt/venv/lib/python3.11/site-packages"
AARCH64 = 183
# The engine, what serves requests, and its own compiled operators.
MODULES = {
    "vllm": (
        "vllm",
        "vllm.entrypoints.openai.api_server",
        "vllm._C_stable_libtorch",
        "vllm._moe_C_stable_libtorch",
        "flashinfer",
    ),
    "sglang": ("sglang", "sglang.launch_server", "flashinfer"),
}
OPERATORS = {
    "vllm": (
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C_stable_libtorch.abi3.so",
    ),
    "sglang": ("sgl_kernel/sm100/common_ops.abi3.so",),
}
IMPORT = """
import importlib, json, platform, sys, torch
for name in sys.argv[1].split(","):
    importlib.import_module(name)
for path in sys.argv[2].split(","):
    torch.ops.load_library(path)
versions = {name: sys.modules[name].__version__ for name in ("torch", "triton", sys.argv[3])}
print(json.dumps({"machine": platform.machine(), "cuda": torch.version.cuda, **versions}))
"""


@pytest.mark.parametrize("name", MODULES)
def test_the_engine_can_be_imported_in_its_image_for_arm64(
    big_store: Path, tmp_path: Path, name: str
) -> None:
    """The driver's library comes with a GPU; a stub takes its place, so that operators load."""
    require_emulation()
    built = build_image(big_store, name, "linux/arm64")
    record = open_store(big_store).image_record(name, "linux/arm64")
    assert record
    blobs = big_store / "oci" / "blobs" / "sha256"
    try:
        image = unpack_image(blobs, built.digest, tmp_path, record.unpacked_bytes * 11 // 10)
        put_driver(image, OPERATORS[name])
        wanted = [",".join(MODULES[name]), ",".join(f"/{SITE}/{x}" for x in OPERATORS[name])]
        libraries = f"/usr/local/cuda/lib64:/{SITE}/torch/lib:/opt/driver"
        done = image.run(
            "/opt/venv/bin/python", "-c", IMPORT, *wanted, name, LD_LIBRARY_PATH=libraries
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answer = json.loads(done.stdout.splitlines()[-1])
        assert (answer["machine"], answer["cuda"]) == ("aarch64", "13.0")
        assert answer[name] in image.config["config"]["Labels"].values()
    finally:
        shutil.rmtree(tmp_path / "root", ignore_errors=True)


def put_driver(image: EmulatedImage, operators: tuple[str, ...]) -> None:
    """A libcuda.so.1 with the names that the operators and torch ask for, and no code."""
    site = image.root / SITE
    libraries = [*(site / name for name in operators), *(site / "torch" / "lib").glob("*.so")]
    links = [found for path in libraries if (found := read_links(path))]
    # cuInit and the like; cudaMalloc, cublasCreate and so on are other libraries'
    names = {s for found in links for _, _, s in found.wanted if re.match("cu[A-Z]", s)}
    folder = image.root / "opt" / "driver"
    folder.mkdir()
    stub = shared_object("libcuda.so.1", [("", name) for name in sorted(names)], AARCH64)
    (folder / "libcuda.so.1").write_bytes(stub)
