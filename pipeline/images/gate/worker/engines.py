"""What each engine needs before its functions can be called, and how to find them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .errors import FunctionGone, Json, Stopped
from .operators import define_operators
from .stand_ins import StandIn


def prepare_vllm(card: Json) -> None:
    """vLLM asks NVML which platform it runs on; there is none here, so it is set."""
    import vllm.platforms as platforms
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class CardPlatform(Platform):  # type: ignore[misc]
        _enum = PlatformEnum.CUDA
        device_name = "cuda"
        device_type = "cuda"
        dispatch_key = "CUDA"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*card["capability"])

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return str(card["name"])

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return int(card["memory_bytes"])

        @classmethod
        def supports_fp8(cls) -> bool:
            return True

        @classmethod
        def fp8_dtype(cls) -> Any:
            import torch

            return torch.float8_e4m3fn

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return int(card["multiprocessors"])

    platforms._current_platform = CardPlatform()


# By package; sglang asks torch alone, which `card` has prepared.
PREPARE = {"vllm": prepare_vllm}


def settle() -> None:
    """Functions that choose configurations ask for the server's settings: all off, no server."""
    for module, name in (
        ("sglang.srt.server_args", "_global_server_args"),
        ("sglang.srt.runtime_context", "_CONTEXT"),
    ):
        if module in sys.modules:
            setattr(sys.modules[module], name, _no_server())
    define_operators()


def _no_server() -> StandIn:
    """Settings that are all off; only buffers that functions keep from call to call are real."""
    resources, settings = StandIn(), StandIn()
    vars(resources)["buffers"] = {}
    vars(settings)["resources"] = resources
    return settings


def find(functions: list[str], package: str) -> Any:
    """The first of several names that this version knows; each must be the engine's own."""
    missing = []
    for name in functions:
        module, _, attribute = name.partition(":")
        if module.partition(".")[0] != package:
            raise Stopped(f"{name}: is not a function of {package}")
        try:
            function = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            # the module itself is gone; one that it imports would be another error
            if error.name and module.startswith(error.name):
                missing.append(name)
                continue
            raise
        if function is None or isinstance(function, StandIn):
            missing.append(name)
            continue
        owner = str(getattr(function, "__module__", "")).partition(".")[0]
        # an autotuner is an object of Triton's around the engine's own function `fn`
        if not callable(function) or (owner != package and not hasattr(function, "fn")):
            raise Stopped(f"{name}: is not a function of {package}")
        settle()
        return function
    raise FunctionGone(", ".join(missing))
