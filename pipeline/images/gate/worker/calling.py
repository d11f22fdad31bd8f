"""One case: the engine's function is called as the case describes, and the outcome reported."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .arguments import build
from .engines import find
from .errors import FunctionGone, Json, Stopped
from .recorder import Recorder


def prepare(case: Json, package: str) -> tuple[Any, Json]:
    """The engine's function, and the arguments that this version of it takes."""
    function = find(case["function"], package)
    made: Json = {}
    for name, argument in case["arguments"].items():
        made[name] = build(argument, made, package)
    # versions differ in their arguments; only what a case calls optional may be left out
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
        raise Stopped(f"{function.__name__} needs {', '.join(missing)} in this version")
    return function, made


def call(case: Json, package: str) -> None:
    """Call the engine's function as the case describes."""
    function, made = prepare(case, package)
    function(**made)


def compiling(card: Json, cache: str | None) -> Callable[[Json, str], Json]:
    """Triton, made to compile for the card; what then judges a case."""
    recorder = Recorder(card, cache)
    recorder.install()
    return lambda case, package: judge(case, recorder, package)


def judge(case: Json, recorder: Recorder, package: str) -> Json:
    """Run one case; what stopped it, if anything did, and every kernel it compiled."""
    from triton.runtime.errors import OutOfResources

    def compile_all() -> None:
        try:
            call(case, package)
        except OutOfResources:
            # as on the card, the call ends here; once more without the limit, to see the rest
            _forget_kernels()
            recorder.records, recorder.strict = [], False
            call(case, package)

    recorder.records, recorder.strict = [], True
    recorder.override = case["override"]
    answer = attempt(case, compile_all)
    answer["records"] = recorder.records
    _forget_kernels()
    return answer


def attempt(case: Json, work: Callable[[], None]) -> Json:
    """How a case ends: its work done, or what stopped it."""
    start = time.monotonic()
    answer: Json = {"case": case["name"], "ended": "called", "message": ""}
    try:
        work()
    except FunctionGone as error:
        answer.update(ended="function gone", message=str(error))
    except Stopped as error:
        answer.update(ended="stopped", message=str(error))
    except ImportError as error:
        answer.update(ended="not imported", message=_shown(error))
    except Exception as error:
        answer.update(ended="raised", message=_shown(error))
    answer["seconds"] = round(time.monotonic() - start, 3)
    return answer


def _shown(error: BaseException) -> str:
    """The error and the engine's line it came from."""
    trace = error.__traceback__
    line = ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if "site-packages" not in file.parts and file.parent != Path(__file__).parent:
            line = f" ({file.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}{line}"


def _forget_kernels() -> None:
    """Triton keeps what it compiled in this process; the next case is to be seen in full."""
    import gc

    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    for thing in gc.get_objects():
        # the type, not isinstance: some of torch's objects warn when they are looked at
        if issubclass(type(thing), JITFunction):
            thing.device_caches.clear()
        elif issubclass(type(thing), Autotuner):
            thing.cache.clear()
