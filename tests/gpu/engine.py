"""An engine's one file, loaded alone: the modules it imports are a few words long here."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(names)
    sys.modules[name] = module
    return module


class Platform:
    """vLLM's platform, as far as the decode kernels ask."""

    family = 90

    def is_rocm(self) -> bool:
        return False

    def is_device_capability_family(self, family: int) -> bool:
        return self.family // 10 == family // 10

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the kernels ask for {name}, which this program does not know")


PLATFORM = Platform()


def install_imports() -> None:
    """What the three files import from the rest of their engines."""
    import triton
    import triton.language as tl

    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention"):
        _module(name)
    _module("sglang.srt.utils", is_cuda=lambda: True, is_hip=lambda: False)
    _module("sglang.srt.layers.attention.triton_ops")
    place = "sglang.srt.layers.attention.triton_ops.prefill_attention"
    _module(place, context_attention_fwd=None)
    _module("vllm")
    _module("vllm.platforms", current_platform=PLATFORM)
    _module("vllm.triton_utils", tl=tl, triton=triton)


def load(folder: Path, image: str, form: str) -> Any:
    """One engine's module, `published` or `patched`, under a name of its own."""
    (path,) = (folder / image / form).glob("*.py")
    name = f"engine_{image.replace('-', '_')}_{form}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
