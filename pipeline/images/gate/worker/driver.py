"""A Triton driver for a card that is not there: it compiles, and neither loads nor launches."""

from __future__ import annotations

from typing import Any

from .errors import Json


def compiling_driver(card: Json) -> Any:
    """Triton's driver for a card, without the card."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Utils:
        def get_device_properties(self, device: int) -> Json:
            return {
                "max_shared_mem": card["shared_bytes"],
                "max_num_regs": card["registers_per_sm"],
                "warpSize": 32,
                "multiprocessor_count": card["multiprocessors"],
                # only estimates of speed use these, and no gate makes any; the numbers are of an
                # RTX PRO 6000
                "sm_clock_rate": 2600000,
                "mem_clock_rate": 14001000,
                "mem_bus_width": 512,
            }

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *a, **k: None

    class CompilingDriver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = Utils()
            # Triton's own would compile a launcher in C, and need a compiler for that
            self.launcher_cls = lambda src, metadata: None

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_current_target(self) -> Any:
            major, minor = card["capability"]
            # a plain number: from sm_90 on Triton itself compiles for the `a` variant
            return GPUTarget("cuda", major * 10 + minor, 32)

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            return None

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_device_capability(self, device: int | None = None) -> Any:
            return tuple(card["capability"])

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            import torch

            return torch.cuda

        def get_empty_cache_for_benchmark(self) -> None:
            return None

        def clear_cache(self, cache: Any) -> None:
            return None

        def get_benchmarker(self) -> Any:
            def bench(call: Any, quantiles: Any = None, **kwargs: Any) -> Any:
                # every configuration is compiled this way, and all are equally fast
                call()
                return [1.0, 1.0, 1.0] if quantiles else 1.0

            return bench

    return CompilingDriver()
