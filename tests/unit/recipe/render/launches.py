"""Launches that the tests of renderings start from."""

from __future__ import annotations

from typing import Any

from pipeline.artifacts.containers.arguments import Mount
from pipeline.serving.recipe.container import LaunchTarget
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import ContainerSpec

DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE = f"registry.example/engines/vllm@{DIGEST}"
TARGET = LaunchTarget(image=IMAGE)
# What quoting gets wrong first: each must arrive as it is.
HOSTILE = [
    "two words",
    "it's",
    'say "hi"',
    "50%h",
    "$HOME ${HOME} $(id) `id`",
    "back\\slash\\",
    "; # & | > *",
    ";",
    "#comment",
    "ünïcode",
    "{'a': \"b\"}",
    "!important",
    "-",
    "~",
    "yes",
    "1e3",
    "$$(X) $$",
    "%%n %",
    "\\x41\\",
    "\"\"''",
    "a\u00a0b",
    "😀",
    "- a: b",
    "--x=",
    "x" * 2000,
]

VARIABLES = [f"HOSTILE_{number}={value}" for number, value in enumerate(HOSTILE)]
# Podman's generator loses the quotes of this one, so that it is refused.
QUADLET_HOSTILE = [value for value in HOSTILE if value != ";"]


def small_launch(**changes: Any) -> Launch:
    """vLLM on two cards."""
    values: dict[str, Any] = {
        "recipe": "small-2x",
        "engine": "vllm",
        "image": "vllm",
        "digest": DIGEST,
        "program": ["vllm", "serve"],
        "arguments": ["/models", "--served-model-name", "small", "--port", "8000"],
        "environment": {"NCCL_P2P_LEVEL": "SYS"},
        "mounts": [Mount(host="/data/small", inside="/models")],
        "port": 8000,
        "cards": 2,
        "container": ContainerSpec(capabilities=["SYS_NICE"]),
        "model": "small",
    }
    return Launch(**{**values, **changes})


def hostile_launch(format_name: str = "") -> Launch:
    """A launch whose arguments and environment are hard to quote."""
    environment = dict(each.split("=", 1) for each in VARIABLES)
    words = QUADLET_HOSTILE if format_name == "quadlet" else HOSTILE
    return small_launch(arguments=["/models", *words], environment=environment)
