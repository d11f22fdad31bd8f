"""A card that is not there, as torch sees it: its tensors stay in CPU memory."""

from __future__ import annotations

import contextlib
import types
from typing import Any

from .errors import Json, Stopped
from .stand_ins import StandIn

# Operators of the engines' own C++ libraries, as they name them.
ENGINE_OPERATORS = ("_C", "_C_cache_ops", "_moe_C", "sgl_kernel")


def pretend_card(card: Json, cuda: str) -> None:
    """Make torch.cuda describe the card; tensors meant for it stay in CPU memory."""
    import torch

    # where a torch for CPUs alone stands in, engines would see that and choose other blocks
    if torch.version.cuda not in (None, cuda):
        raise Stopped(f"torch is for CUDA {torch.version.cuda}, the image's for {cuda}")
    torch.version.cuda = cuda

    capability = tuple(card["capability"])
    properties = types.SimpleNamespace(
        name=card["name"],
        major=capability[0],
        minor=capability[1],
        total_memory=card["memory_bytes"],
        multi_processor_count=card["multiprocessors"],
        warp_size=32,
        regs_per_multiprocessor=card["registers_per_sm"],
        # without opting in, a block has 48 KiB on every card
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=card["shared_bytes"],
        shared_memory_per_multiprocessor=card["shared_bytes_per_sm"],
        max_threads_per_multi_processor=card["threads_per_sm"],
        # of an RTX PRO 6000
        L2_cache_size=128 << 20,
        gcnArchName="",
        uuid="GPU-0",
        is_integrated=0,
    )
    memory = (card["memory_bytes"], card["memory_bytes"])
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": True,
        "get_device_capability": capability,
        "get_device_name": card["name"],
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        "mem_get_info": memory,
        "get_arch_list": [card["arch"]],
        "current_stream": _Stream(),
        "default_stream": _Stream(),
        **dict.fromkeys(("set_device", "synchronize", "_lazy_init", "empty_cache")),
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *a, _value=value, **k: _value)
    for name in ("device", "stream"):
        setattr(torch.cuda, name, lambda *a, **k: contextlib.nullcontext())
    # a function may go by its tensor's index: `with torch.accelerator.device_index(x.device.index)`
    accelerator: Any = torch.accelerator
    accelerator.device_index = lambda *a, **k: contextlib.nullcontext()
    accelerator.current_device_index = lambda: 0
    for name in ("set_device_index", "synchronize"):
        setattr(accelerator, name, lambda *a, **k: None)
    # functions choose by both, and would take the way for CPUs
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.Tensor.device = property(lambda self: torch.device("cuda", 0))
    _stay_on_cpu()
    tolerate_missing_operators()


class _Stream:
    cuda_stream = 0
    device = "cpu"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *a, **k: None


def _is_card(device: Any) -> bool:
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith(
        "cuda"
    )


def _stay_on_cpu() -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    class CpuMemory(TorchFunctionMode):  # type: ignore[misc]
        """`device="cuda"` in the engine's code gives CPU memory."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None and _is_card(kwargs["device"]):
                kwargs["device"] = "cpu"
            name = getattr(func, "__name__", "")
            # tensor.cuda(), and tensor.to("cuda") with the device in second place
            if name == "cuda":
                return args[0]
            if name == "to":
                args = tuple(
                    "cpu" if isinstance(a, (str, torch.device)) and _is_card(a) else a for a in args
                )
            return func(*args, **kwargs)

    # never left: this process does nothing but the gate's work
    CpuMemory().__enter__()


def tolerate_missing_operators() -> None:
    """Engines describe operators of C++ libraries that are not loaded here; let them."""
    import torch

    for name in ("register_fake", "impl", "impl_abstract"):
        real = getattr(torch.library, name, None)
        if real is not None:
            setattr(torch.library, name, _tolerant(real))
    namespace: Any = torch._ops._OpNamespace
    look_up = namespace.__getattr__

    def get_operator(self: Any, name: str) -> Any:
        try:
            return look_up(self, name)
        except AttributeError:
            if name.startswith("__") or self.name not in ENGINE_OPERATORS:
                raise
            # in the image it exists: its library is there
            return StandIn()

    namespace.__getattr__ = get_operator


def _tolerant(real: Any) -> Any:
    def register(*args: Any, **kwargs: Any) -> Any:
        try:
            registered = real(*args, **kwargs)
        except RuntimeError:
            return lambda function: function
        if not callable(registered):
            return registered

        def decorate(function: Any) -> Any:
            try:
                return registered(function)
            except RuntimeError:
                return function

        return decorate

    return register
