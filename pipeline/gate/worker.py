"""Compiles an engine's kernels for a card that is not there. Runs in the gate's environment.

It knows nothing of the pipeline and imports only the standard library before torch and Triton:

    python worker.py JOB ANSWERS

JOB is a JSON file; ANSWERS gets a JSON line when a case begins and another when it has ended.
torch is told that a card is present, Triton gets a driver that compiles but neither loads nor
launches, and then the engine's own functions are called on small CPU tensors: the block sizes
that get compiled are those the engine itself would choose on that card.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import re
import subprocess
import sys
import time
import types
from typing import Any

Json = dict[str, Any]
# Operators of the engines' own C++ libraries, as they name them.
ENGINE_OPERATORS = ("_C", "_C_cache_ops", "_moe_C", "sgl_kernel")


class FunctionGone(Exception):
    """None of the names a case gives leads to a function in this version."""


class Stopped(Exception):
    """A case cannot go on, for a reason a person should read."""


# torch ------------------------------------------------------------------------------------------


def pretend_card(card: Json) -> None:
    """Make torch.cuda describe the card; tensors meant for it stay in CPU memory."""
    import torch

    capability = tuple(card["capability"])
    properties = types.SimpleNamespace(
        name=card["name"],
        major=capability[0],
        minor=capability[1],
        total_memory=card["memory_bytes"],
        multi_processor_count=card["multiprocessors"],
        warp_size=32,
        regs_per_multiprocessor=card["registers_per_sm"],
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=card["shared_bytes"],
        shared_memory_per_multiprocessor=card["shared_bytes_per_sm"],
        max_threads_per_multi_processor=card["threads_per_sm"],
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
    torch.Tensor.is_cuda = property(lambda self: True)
    _stay_on_cpu()
    _tolerate_missing_operators()


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
            if name == "cuda":
                return args[0]
            if name == "to":
                args = tuple(
                    "cpu" if isinstance(a, (str, torch.device)) and _is_card(a) else a for a in args
                )
            return func(*args, **kwargs)

    CpuMemory().__enter__()


def _tolerate_missing_operators() -> None:
    """Engines describe operators of C++ libraries that are not loaded here; let them."""
    import torch

    for name in ("register_fake", "impl", "impl_abstract"):
        real = getattr(torch.library, name, None)
        if real is not None:
            setattr(torch.library, name, _tolerant(real))
    namespace: Any = torch._ops._OpNamespace
    look_up = namespace.__getattr__

    def found(self: Any, name: str) -> Any:
        try:
            return look_up(self, name)
        except AttributeError:
            if name.startswith("__") or self.name not in ENGINE_OPERATORS:
                raise
            # in the image it exists: its library is there
            return _StandIn()

    namespace.__getattr__ = found


def _tolerant(real: Any) -> Any:
    def register(*args: Any, **kwargs: Any) -> Any:
        try:
            found = real(*args, **kwargs)
        except RuntimeError:
            return lambda function: function
        if not callable(found):
            return found

        def decorate(function: Any) -> Any:
            try:
                return found(function)
            except RuntimeError:
                return function

        return decorate

    return register


# imports ----------------------------------------------------------------------------------------


class _StandIn:
    """Absorbs what module-level code does with a package that is not here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # as a decorator it leaves the function alone
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return _StandIn()

    def __getitem__(self, key: Any) -> Any:
        return _StandIn()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: Any) -> Any:
        return (_StandInBase,)


class _StandInBase:
    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: packages that the image has and the gate's environment has not."""

    def __init__(self, names: list[str]) -> None:
        self._names = set(names)
        self.used: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        # a submodule that a real package only looks for is not ours to invent
        parent = getattr(sys.modules.get(top), "__spec__", None)
        if top in self._names and (name == top or getattr(parent, "loader", None) is self):
            self.used.add(top)
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = "9999"  # type: ignore[attr-defined]

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _StandIn()

        module.__getattr__ = missing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class BarePackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages whose __init__.py would start the whole engine: their modules, without it.

    A name that only the __init__.py would have defined is a stand-in, and is noted.
    """

    def __init__(self, root: str, names: list[str]) -> None:
        self._root, self._names = root, set(names)
        self.used: set[str] = set()

    def _folder(self, name: str) -> str:
        return os.path.join(self._root, *name.split("."))  # noqa: PTH118

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        folder = self._folder(name)
        if name not in self._names or not os.path.isdir(folder):  # noqa: PTH112
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [folder]
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        package, folder = module.__name__, self._folder(module.__name__)

        def missing(name: str) -> Any:
            place = os.path.join(folder, name)  # noqa: PTH118
            if name.startswith("__"):
                raise AttributeError(name)
            if os.path.isdir(place) or os.path.isfile(f"{place}.py"):  # noqa: PTH112, PTH113
                return importlib.import_module(f"{package}.{name}")
            self.used.add(f"{package}.{name}")
            return _StandIn()

        module.__getattr__ = missing  # type: ignore[method-assign]


def prepare_vllm(card: Json) -> None:
    """vLLM asks NVML which platform it runs on; here it is told."""
    import vllm.platforms as platforms
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class Card(Platform):  # type: ignore[misc]
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

    platforms._current_platform = Card()


PREPARE = {"vllm": prepare_vllm}


def settle() -> None:
    """Functions that choose configurations ask for the server's settings: all off, no server."""
    for module, name in (
        ("sglang.srt.server_args", "_global_server_args"),
        ("sglang.srt.runtime_context", "_CONTEXT"),
    ):
        if module in sys.modules:
            setattr(sys.modules[module], name, _StandIn())


# Triton -----------------------------------------------------------------------------------------


class Recorder:
    """Stands where Triton's compiler stood: compiles, notes what came out, launches nothing."""

    def __init__(self, card: Json, cache: str | None) -> None:
        self.card, self.cache = card, cache
        self.records: list[Json] = []
        self.strict = True
        self.tuning: str | None = None
        self.override: Json | None = None
        self._ptxas_words = ""

    def install(self) -> None:
        import triton
        from triton.backends.nvidia import compiler as nvidia
        from triton.runtime import autotuner, jit
        from triton.runtime.driver import driver

        driver.set_active(_driver(self.card))
        driver._default = driver._active
        self._real = triton.compiler.compiler.compile
        for place in (triton.compiler.compiler, triton.compiler, triton):
            place.compile = self.compile
        nvidia.subprocess = _Listening(self)
        self._wrap_autotuner(autotuner.Autotuner)
        self._wrap_launches(jit.JITFunction)

    def _wrap_autotuner(self, kind: Any) -> None:
        recorder, real = self, kind.run

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            # every configuration is compiled, the first that fits is taken
            recorder.tuning = f"{tuner.base_fn.__name__}#{len(recorder.records)}"
            try:
                return real(tuner, *args, **kwargs)
            finally:
                recorder.tuning = None

        kind.run = run

    def _wrap_launches(self, kind: Any) -> None:
        recorder, real = self, kind.run

        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = recorder.override
            if wanted and wanted["kernel"] == function.fn.__name__:
                for name, value in wanted["values"].items():
                    if name not in kwargs and not name.startswith("num_"):
                        raise Stopped(f"{function.fn.__name__} is launched without {name}")
                    kwargs[name] = value
            return real(function, *args, **kwargs)

        kind.run = run

    def compile(self, src: Any, target: Any = None, options: Any = None, **kwargs: Any) -> Any:
        """What triton.compile is while the gate runs."""
        options = options or {}
        record: Json = {
            "kernel": src.fn.__name__,
            "module": src.fn.__module__,
            "group": self.tuning,
            "blocks": _blocks(src),
        }
        start = time.monotonic()
        key = self._key(src, options)
        found = self._read(key)
        if found is None:
            try:
                found = self._compiled(src, target, options, kwargs)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error)[:400]}"
                self.records.append(record)
                raise
            found["seconds"] = round(time.monotonic() - start, 3)
            self._write(key, found)
        record.update(found)
        self.records.append(record)
        limit = self.card["shared_bytes"]
        if self.strict and found["shared_bytes"] > limit:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(found["shared_bytes"], limit, "shared memory")
        return _Compiled(src, found)

    def _compiled(self, src: Any, target: Any, options: Any, kwargs: Any) -> Json:
        self._ptxas_words = ""
        kernel = self._real(src, target=target, options=options, **kwargs)
        words = self._ptxas_words
        return {
            "shared_bytes": kernel.metadata.shared,
            "num_warps": kernel.metadata.num_warps,
            "num_stages": kernel.metadata.num_stages,
            "registers": _number(r"Used (\d+) registers", words),
            "spill_bytes": _number(r"(\d+) bytes spill stores", words),
            "stack_bytes": _number(r"(\d+) bytes stack frame", words),
        }

    def heard(self, words: str) -> None:
        self._ptxas_words += words

    def _key(self, src: Any, options: Json) -> str:
        import triton

        parts = [src.hash(), placeless(options), triton.__version__, self.card["arch"]]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _read(self, key: str) -> Json | None:
        if self.cache is None:
            return None
        try:
            with open(os.path.join(self.cache, key), encoding="utf-8") as handle:  # noqa: PTH118, PTH123
                found = json.load(handle)
        except (OSError, ValueError):
            return None
        # half-written or foreign: as if it were not there
        whole = isinstance(found, dict) and isinstance(found.get("shared_bytes"), int)
        return found if whole and found.pop("key", None) == key else None

    def _write(self, key: str, found: Json) -> None:
        if self.cache is None:
            return
        path = os.path.join(self.cache, key)  # noqa: PTH118
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as handle:  # noqa: PTH123
            json.dump({**found, "key": key}, handle)
        os.replace(temporary, path)


def placeless(options: Json) -> str:
    """Compile options as text, without the folder that Triton's own libraries lie in."""
    shown = json.dumps(options, sort_keys=True, default=str)
    return re.sub(r'[^"\'\s(]*/site/triton/', "triton/", shown)


def _blocks(src: Any) -> Json:
    """The compile-time numbers that shape a kernel."""
    names = src.fn.arg_names
    shown = {}
    for path, value in src.constants.items():
        name = names[path[0] if isinstance(path, tuple) else path]
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and name.isupper() | (name[0] == "L")
        ):
            shown[name] = value
    return shown


def _number(pattern: str, words: str) -> int | None:
    found = re.findall(pattern, words)
    return max(map(int, found)) if found else None


class _Listening:
    """`subprocess` as Triton's NVIDIA backend sees it: what ptxas says is kept."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, args: Any, *more: Any, **kwargs: Any) -> Any:
        done = subprocess.run(args, *more, **kwargs)
        log = getattr(kwargs.get("stderr"), "name", None)
        if isinstance(log, str) and "ptxas" in str(args[0]):
            with open(log, encoding="utf-8", errors="replace") as handle:  # noqa: PTH123
                self._recorder.heard(handle.read())
        return done


class _Compiled:
    """What Triton's launcher wants of a compiled kernel, and nothing behind it."""

    def __init__(self, src: Any, found: Json) -> None:
        self.name, self.hash = src.fn.__name__, "gate"
        self.n_regs, self.n_spills = found["registers"], found["spill_bytes"]
        self.n_max_threads = 1024
        self.metadata = types.SimpleNamespace(
            shared=found["shared_bytes"],
            num_warps=found["num_warps"],
            num_stages=found["num_stages"],
            name=self.name,
        )
        self.asm: Json = {}
        self.function = 1
        self.module = 1
        self.packed_metadata = (found["num_warps"], 1, found["shared_bytes"])

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _init_handles(self) -> None:
        return None

    def __getitem__(self, grid: Any) -> Any:
        return self.run


def _driver(card: Json) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Utils:
        def get_device_properties(self, device: int) -> Json:
            return {
                "max_shared_mem": card["shared_bytes"],
                "max_num_regs": card["registers_per_sm"],
                "warpSize": 32,
                "multiprocessor_count": card["multiprocessors"],
                "sm_clock_rate": 2600000,
                "mem_clock_rate": 14001000,
                "mem_bus_width": 512,
            }

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *a, **k: None

    class Driver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = Utils()
            self.launcher_cls = lambda src, metadata: None

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_current_target(self) -> Any:
            major, minor = card["capability"]
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
                call()
                return [1.0, 1.0, 1.0] if quantiles else 1.0

            return bench

    return Driver()


# cases ------------------------------------------------------------------------------------------


def build(argument: Json, made: Json, package: str) -> Any:
    """An argument's value from its description."""
    import torch

    kind, value = next(iter(argument.items()))
    if kind == "tensor":
        return _tensor(value)
    if kind == "view":
        return made[value["of"]][..., : value["columns"]]
    if kind == "call":
        inner = {k: build(a, made, package) for k, a in value["arguments"].items()}
        return find([value["function"]], package)(**inner)
    if kind == "dtype":
        return getattr(torch, value)
    if kind == "triton_dtype":
        return _triton_dtype(value)
    if kind == "device":
        return torch.device("cpu")
    if kind == "items":
        return [build(a, made, package) for a in value]
    if kind == "mapping":
        return {k: build(a, made, package) for k, a in value.items()}
    return None if kind == "none" else value


def _tensor(wanted: Json) -> Any:
    import torch

    dtype, shape = getattr(torch, wanted["dtype"]), wanted["shape"]
    if wanted["values"] is not None:
        return torch.tensor(wanted["values"], dtype=dtype).reshape(shape)
    if wanted["fill"] == "arange":
        count = 1
        for size in shape:
            count *= size
        return (torch.arange(count) * wanted["step"]).to(dtype).reshape(shape)
    fill = torch.ones if wanted["fill"] == "ones" else torch.zeros
    return fill(shape, dtype=dtype)


def _triton_dtype(name: str) -> Any:
    import triton.language as tl

    renamed = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5", "bool": "int1"}
    return getattr(tl, renamed.get(name, name))


def find(functions: list[str], package: str) -> Any:
    """The first of several names that this version knows; each must be the engine's own."""
    missing = []
    for name in functions:
        module, _, attribute = name.partition(":")
        if module.partition(".")[0] != package:
            raise Stopped(f"{name}: is not a function of {package}")
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            if error.name and module.startswith(error.name):
                missing.append(name)
                continue
            raise
        if found is None or isinstance(found, _StandIn):
            missing.append(name)
            continue
        owner = str(getattr(found, "__module__", "")).partition(".")[0]
        if not callable(found) or (owner != package and not hasattr(found, "fn")):
            raise Stopped(f"{name}: is not a function of {package}")
        settle()
        return found
    raise FunctionGone(", ".join(missing))


def call(case: Json, package: str) -> None:
    """Call the engine's function as the case says."""
    function = find(case["function"], package)
    made: Json = {}
    for name, argument in case["arguments"].items():
        made[name] = build(argument, made, package)
    known = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if not takes_any:
        for name in [n for n in made if n not in known]:
            if name not in case["optional"]:
                raise Stopped(f"{function.__name__} has no argument {name!r} in this version")
            del made[name]
    wanted = [
        p.name
        for p in known.values()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    missing = [name for name in wanted if name not in made]
    if missing:
        raise Stopped(f"{function.__name__} wants {', '.join(missing)} in this version")
    function(**made)


def judge(case: Json, recorder: Recorder, package: str) -> Json:
    """Run one case; what stopped it, if anything did, and every kernel it compiled."""
    from triton.runtime.errors import OutOfResources

    recorder.records = []
    recorder.override = case["override"]
    start = time.monotonic()
    answer: Json = {"case": case["name"], "ended": "called", "words": ""}
    try:
        recorder.strict = True
        try:
            call(case, package)
        except OutOfResources:
            # as on the card, the call ends here; once more without the limit, to see the rest
            _forget_kernels()
            recorder.records, recorder.strict = [], False
            call(case, package)
    except FunctionGone as error:
        answer.update(ended="function gone", words=str(error))
    except Stopped as error:
        answer.update(ended="stopped", words=str(error))
    except Exception as error:
        answer.update(ended="raised", words=_shown(error))
    answer["seconds"] = round(time.monotonic() - start, 3)
    answer["records"] = recorder.records
    _forget_kernels()
    return answer


def _shown(error: BaseException) -> str:
    """The error and the engine's line it came from."""
    trace = error.__traceback__
    line = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "site-packages" not in code.co_filename and "worker.py" not in code.co_filename:
            line = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"  # noqa: PTH119
        trace = trace.tb_next
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}{line}"


def _forget_kernels() -> None:
    """Triton keeps what it compiled in this process; the next case is to be seen in full."""
    import gc

    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    for found in gc.get_objects():
        # the type, not isinstance: some of torch's objects warn when they are looked at
        if issubclass(type(found), JITFunction):
            found.device_caches.clear()
        elif issubclass(type(found), Autotuner):
            found.cache.clear()


def main(job_path: str, answers_path: str) -> None:
    """Work through a job's cases, one line of answer after the other."""
    with open(job_path, encoding="utf-8") as handle:  # noqa: PTH123
        job = json.load(handle)
    sys.path.insert(0, job["engine"])
    import torch
    import triton

    card = job["card"]
    pretend_card(card)
    recorder = Recorder(card, job["cache"])
    recorder.install()
    stand_ins = StandIns(job["absent"])
    bare = BarePackages(job["engine"], job["bare"])
    sys.meta_path.insert(0, bare)
    sys.meta_path.append(stand_ins)
    prepare = PREPARE.get(job["package"])
    if prepare:
        prepare(card)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    with open(answers_path, "a", encoding="utf-8") as answers:  # noqa: PTH123
        for case in job["cases"]:
            print(json.dumps({"begins": case["name"]}), file=answers, flush=True)
            answer = judge(case, recorder, job["package"])
            answer.update(versions=versions, stand_ins=sorted({*stand_ins.used, *bare.used}))
            print(json.dumps(answer), file=answers, flush=True)
            if answer["ended"] == "raised":
                # modules may be half imported now; the next case gets a process of its own
                return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
