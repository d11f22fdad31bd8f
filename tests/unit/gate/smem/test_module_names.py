"""Names of modules that an image has and its gate environment has not, from the lock alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.images.assemble.plan import ImagePlan, plan_image
from pipeline.images.gate.smem import environment
from pipeline.images.gate.smem.engine import GateContext
from pipeline.images.gate.smem.environment import modules_of
from pipeline.images.spec.checkout import Checkout
from tests.unit.gate.smem.test_run import FACTS
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


def absent(plan: ImagePlan, folder: Path, *wheels: str) -> tuple[str, ...]:
    """The modules that the environment of an image is found not to hold."""
    context = SimpleNamespace(host="linux/amd64", store=open_store(folder / "store"))
    with (
        mock.patch.object(environment, "known_facts", return_value=FACTS),
        mock.patch.object(environment, "mark_used"),
    ):
        return environment.make_environment(cast(GateContext, context), plan, wheels).absent


@pytest.mark.parametrize("image", ["sglang-k2", "sglang", "vllm", "vllm-b12x"])
def test_what_is_absent_follows_from_the_lock_and_from_nothing_else(
    image: str, tmp_path: Path
) -> None:
    result = {*absent(plan_image(Checkout(ROOT), image, "linux/amd64"), tmp_path)}
    # sglang imports zmq and vLLM imports PIL where their kernels are imported
    assert {"zmq", "PIL", "google", "nvidia"} <= result
    assert not {"torch", "triton", "numpy"} & result


def test_a_module_that_an_unpacked_project_brings_is_not_absent(tmp_path: Path) -> None:
    plan = plan_image(Checkout(ROOT), "sglang", "linux/amd64")
    needed = ("torch", "triton", "nvidia-cuda-runtime")
    pins = [pin for pin in plan.lock.wheels if pin.name in needed]
    more = ("cuda-core", "cuda-bindings", "pyzmq")
    pins += [pins[0].model_copy(update={"name": name}) for name in more]
    plan = replace(plan, lock=plan.lock.model_copy(update={"wheels": pins}))
    # cuda is shared by several projects: with one of them unpacked it can be imported
    assert absent(plan, tmp_path, "cuda-core", "pyzmq", "nvidia-cuda-runtime") == ()
    assert absent(plan, tmp_path, "pyzmq", "nvidia-cuda-runtime") == ("cuda",)
