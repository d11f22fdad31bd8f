"""Where an image has its parser, and what is believed of what was read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.containers.backend import Kind, Running, StepContainer, StepLimits
from pipeline.core.errors import ParserUnreadable, SpecInvalid
from pipeline.images.assemble.plan import plan_image
from pipeline.images.engine import read_flags
from pipeline.images.engine.read_flags import as_parser_flags, find_parser
from pipeline.images.spec.checkout import Checkout

CHECKOUT = Checkout(Path(__file__).parents[3])
FLAGS = {"flags": {"--a": {"takes": "one"}}, "syntax": "argparse", "version": "1"}
PARSER = read_flags.Parser("sglang", "python", ["sglang"])


@pytest.mark.parametrize(
    ("image", "engine", "arguments"),
    [
        ("vllm", "vllm", ["vllm"]),
        ("vllm-nccl", "vllm", ["vllm"]),
        ("sglang-k2", "sglang", ["sglang"]),
        ("llama-cpp-cpu", "llama-cpp", ["script", "/opt/sm120/serve.py"]),
        (
            "ik-llama-cpu",
            "ik-llama",
            ["program", "/opt/ik-llama/avx2", "/opt/sm120/start.sh", "llama-server"],
        ),
    ],
)
def test_the_entrypoint_says_which_parser_an_image_has(
    image: str, engine: str, arguments: list[str]
) -> None:
    found = find_parser(plan_image(CHECKOUT, image, "linux/amd64"))
    assert (found.engine, found.arguments) == (engine, arguments)


@pytest.mark.parametrize("image", ["debian-python", "toolchain"])
def test_an_image_that_starts_no_engine_has_no_parser(image: str) -> None:
    with pytest.raises(SpecInvalid, match="starts no engine whose flags are known"):
        find_parser(plan_image(CHECKOUT, image, "linux/amd64"))


class Written:
    """In place of a sandbox: a command that leaves this result and this output."""

    kind: Kind = "namespaces"

    def __init__(self, result: bytes | None, code: int = 0) -> None:
        self.result, self.code = result, code

    @contextmanager
    def running(self, container: StepContainer, command: Sequence[str]) -> Iterator[Running]:
        place = container.mounts["/build"] / Path(command[3]).name
        if self.result is not None:
            place.write_bytes(self.result)
        read, write = os.pipe()
        os.write(write, b"ImportError: no module named engine\n")
        os.close(write)
        try:
            yield Running(read, lambda: self.code)
        finally:
            os.close(read)


def described(tmp_path: Path, result: bytes | None, code: int = 0) -> dict[str, Any]:
    limits = StepLimits(cpus=1, memory_bytes=1 << 30, silent_s=10)
    container = StepContainer(tmp_path, "engine:1", {"/build": tmp_path}, {}, limits, tmp_path)
    return read_flags._described(Written(result, code), container, PARSER)


def test_what_the_script_wrote_is_read(tmp_path: Path) -> None:
    assert described(tmp_path, json.dumps(FLAGS).encode()) == FLAGS


@pytest.mark.parametrize(
    ("result", "code", "message"),
    [
        (None, 0, "ImportError: no module named engine"),
        (b"{}", 1, "ImportError: no module named engine"),
        (b'{"flags": ', 0, "is not JSON"),
        (b'{"a": 1, "a": 2}', 0, "appears twice"),
    ],
)
def test_a_parser_that_cannot_be_read_is_an_error_with_the_reason(
    tmp_path: Path, result: bytes | None, code: int, message: str
) -> None:
    with pytest.raises(ParserUnreadable, match=message):
        described(tmp_path, result, code)


@pytest.mark.parametrize(
    "wrong",
    [
        {"flags": {"--a": {"takes": "ten"}}},
        {"flags": {"rm -rf": {"takes": "none"}}},
        {"syntax": "shell"},
        {"secret": "x"},
    ],
)
def test_nothing_that_engine_code_wrote_is_believed(wrong: dict[str, Any]) -> None:
    known = {"engine": "sglang", "image": "sglang", "tree": f"sha256:{'0' * 64}", "read_from": "x"}
    assert as_parser_flags({**FLAGS, **known}).flags["--a"].takes == "one"
    with pytest.raises(ParserUnreadable, match="sglang: its parser says"):
        as_parser_flags({**FLAGS, **known, **wrong})
