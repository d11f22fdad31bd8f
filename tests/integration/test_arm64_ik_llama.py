"""ik_llama.cpp for arm64, compiled on amd64: it starts where the processor can run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.artifacts.store.store import open_store
from tests.integration.built import build_image
from tests.testbed.emulated import EmulatedImage, require_emulation, unpack_image

pytestmark = pytest.mark.big
START = "/opt/sm120/start.sh"
PROGRAMS = ("llama-server", "llama-bench", "llama-sweep-bench", "llama-quantize")


@pytest.fixture(scope="module")
def image(big_store: Path, tmp_path_factory: pytest.TempPathFactory) -> EmulatedImage:
    """The image's files; compiling takes twenty CPU-minutes the first time."""
    require_emulation()
    built = build_image(big_store, "ik-llama-cpu", "linux/arm64")
    record = open_store(big_store).image_record("ik-llama-cpu", "linux/arm64")
    assert record
    folder = tmp_path_factory.mktemp("arm64")
    blobs = big_store / "oci" / "blobs" / "sha256"
    return unpack_image(blobs, built.digest, folder, record.unpacked_bytes * 11 // 10)


def test_the_server_says_its_version_on_arm64(image: EmulatedImage) -> None:
    done = image.run(START, "llama-server", "--version")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "llama-server built for armv8.2" in done.stderr
    assert "55d3c05b" in done.stderr.partition("built for armv8.2")[2]
    assert "aarch64-linux-gnu" in done.stderr


@pytest.mark.parametrize("processor", ["cortex-a53", "cortex-a72"])
def test_an_older_processor_is_refused_in_words(image: EmulatedImage, processor: str) -> None:
    done = image.run(START, "llama-server", "--version", QEMU_CPU=processor)
    assert done.returncode == 78
    assert "no dot products and half floats" in done.stderr


def test_every_library_of_every_program_is_in_the_image(image: EmulatedImage) -> None:
    for program in PROGRAMS:
        done = image.run("/usr/bin/ldd", f"/opt/ik-llama/armv8.2/{program}")
        assert done.returncode == 0, done.stderr
        assert "libggml.so => /opt/ik-llama/armv8.2/" in done.stdout
        assert "not found" not in done.stdout
