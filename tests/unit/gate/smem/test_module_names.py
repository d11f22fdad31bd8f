"""Names of modules that an image has and its gate environment has not, from the lock alone."""

from __future__ import annotations

import pytest

from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.smem.environment import absent_modules, modules_of
from pipeline.images.spec.checkout import Checkout
from tests.unit.support import ROOT


@pytest.mark.parametrize(
    ("project", "modules"),
    [
        ("pyzmq", ("pyzmq", "zmq")),
        ("pillow", ("PIL", "pillow")),
        ("nvidia-nccl-cu13", ("nvidia",)),
        ("nvidia-ml-py", ("pynvml",)),
        ("opentelemetry-exporter-otlp", ("opentelemetry",)),
        ("hf-xet", ("hf_xet",)),
    ],
)
def test_a_project_is_known_by_the_modules_of_its_wheel(
    project: str, modules: tuple[str, ...]
) -> None:
    assert modules_of(project) == modules


@pytest.mark.parametrize("image", ["sglang-k2", "sglang", "vllm", "vllm-b12x"])
def test_what_is_absent_follows_from_the_lock_and_from_nothing_else(image: str) -> None:
    plan = plan_image(Checkout(ROOT), image, "linux/amd64")
    locked = [pin.name for pin in plan.lock.wheels]
    absent = absent_modules(locked, {"torch", "triton", "numpy"})
    # sglang imports zmq and vLLM imports PIL where their kernels are imported
    assert {"zmq", "PIL", "google", "nvidia"} <= {*absent}
    assert not {"torch", "triton", "numpy"} & {*absent}


def test_a_module_that_an_unpacked_project_brings_is_not_absent() -> None:
    # cuda is shared by several projects: with one of them unpacked it can be imported
    assert absent_modules(["cuda-core", "cuda-bindings", "pyzmq"], {"cuda-core", "pyzmq"}) == ()
    assert absent_modules(["cuda-core", "cuda-bindings"], set()) == ("cuda",)
