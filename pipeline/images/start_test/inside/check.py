"""Proves inside an image, as its own user and without a GPU, that its engine can start.

    python check.py WANTED            every check, each in a process of its own
    python check.py WANTED CHECK FD   one check, its rows written to a file descriptor

Standard library only. WANTED is a JSON file; rows are lines of JSON on standard output, after
MARK. An import that crashes ends its own check and no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import importlib
import importlib.util
import itertools
import json
import os
import pwd
import shutil
import signal
import ssl
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

try:
    from pipeline.images.start_test.inside import libraries
except ImportError:  # in an image this folder is all there is of us
    import libraries  # type: ignore[import-not-found, no-redef]

MARK = "sm120-start "
Row = tuple[str, str, str]  # name, verdict, message
Wanted = dict[str, Any]
Check = Callable[[Wanted], "Iterable[Row] | str"]
# By name: the title, and a function that returns rows, or what to print where all of it passed.
CHECKS: dict[str, tuple[str, Check]] = {}
_SHOWN = 3
_LONGEST = 600  # of a message
_MOST_ROWS = 20  # of missing libraries
_AT_ONCE = 3  # checks: the imports, the parser and the command each load the whole engine
_PTX_VERSIONS = ("8.7", "8.8")  # the first that know sm_120 and sm_121
_PTX = ".version {version}\n.target {arch}\n.address_size 64\n.visible .entry k() {{ ret; }}\n"
_CUDA = "#include <cuda_fp16.h>\n__global__ void k(__half *x) { x[0] = __hadd(x[0], x[0]); }\n"
_SHARED = 'extern "C" int runtime() { int n; return cudaRuntimeGetVersion(&n) || n < 1000; }\n'
_NO_DEVICE = "Failed to infer device type"  # vllm/config/device.py
_MODULE = """#include <Python.h>
static struct PyModuleDef about = {PyModuleDef_HEAD_INIT, "compiled_here", 0, -1, 0};
PyMODINIT_FUNC PyInit_compiled_here(void) { return PyModule_Create(&about); }
"""


class CheckFailed(Exception):
    """Why something does not do what the engine will ask of it."""


def register_check(name: str, title: str) -> Callable[[Check], Check]:
    """Registers a check; they run in the order of this file."""

    def register(function: Check) -> Check:
        CHECKS[name] = (title, function)
        return function

    return register


def run(command: Sequence[str], limit_s: float, cwd: str | None = None) -> str:
    """Returns what a program prints, or raises why it failed."""
    try:
        output = subprocess.check_output(
            command, cwd=cwd, timeout=limit_s, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise CheckFailed(f"{command[0]}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        last = last_lines(error.output.decode(errors="replace"))
        raise CheckFailed(
            f"{Path(command[0]).name}: {_ending(error.returncode)}: {last}"
        ) from error
    return output.decode(errors="replace")


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_lines(text: str) -> str:
    """The end of an output, on one line."""
    return " ".join(text.split())[-_LONGEST // 2 :] or "it printed nothing"


@register_check("user", "user")
def check_user(wanted: Wanted) -> str:
    """It runs as the user that the spec names, and that user has its home."""
    entry = pwd.getpwuid(os.getuid())
    if entry.pw_name != wanted["user"]:
        raise CheckFailed(f"it runs as {entry.pw_name} ({entry.pw_uid}), not as {wanted['user']}")
    if os.getuid() == 0:
        raise CheckFailed("it runs as root")
    home = os.environ.get("HOME")
    if home != entry.pw_dir:
        raise CheckFailed(f"HOME is {home}, and the home of {entry.pw_name} is {entry.pw_dir}")
    return f"{entry.pw_name} ({entry.pw_uid}:{os.getgid()}), home {home}"


@register_check("folders", "folders")
def check_folders(wanted: Wanted) -> str:
    """It can write to every folder that the engine will write to."""
    bad = []
    for folder in map(Path, wanted["folders"]):
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            about = nearest.stat()
            owner = f"{about.st_uid}:{about.st_gid}, mode {about.st_mode & 0o7777:04o}"
            bad.append(f"{folder}: {error.strerror} ({nearest} belongs to {owner})")
    if bad:
        raise CheckFailed("; ".join(bad[:_SHOWN]))
    return f"written to: {', '.join(wanted['folders'])}"


@register_check("libraries", "libraries")
def check_libraries(wanted: Wanted) -> Iterator[Row]:
    """Every library that a program or module of the image asks for is in it, or the driver's."""
    files = list(libraries.linked_files())
    python = libraries.read_needs(Path(sys.executable).resolve())
    if python is None:
        raise CheckFailed(f"{sys.executable}: cannot be read")
    loader = libraries.Loader(files, os.environ)
    missing = libraries.missing_libraries(files, loader, python.machine)
    drivers = [name for name in missing if name in wanted["driver"]]
    bad: dict[str, list[str]] = {}
    optional: dict[str, list[str]] = {}
    for name in (name for name in missing if name not in drivers):
        for path in missing[name]:
            pattern = next((p for p in wanted["optional"] if fnmatch.fnmatchcase(path, p)), None)
            if pattern is None:
                bad.setdefault(name, []).append(path)
            elif name not in optional.setdefault(pattern, []):
                optional[pattern].append(name)
    for pattern, names in optional.items():
        message = f"{wanted['optional'][pattern]} ({', '.join(names)})"
        yield f"libraries of {pattern}", "skipped", message
    for name, by in itertools.islice(bad.items(), _MOST_ROWS):
        more = f" and {len(by) - 1} more" if len(by) > 1 else ""
        yield f"library {name}", "failed", f"missing from the image; {by[0]}{more} asks for it"
    if len(bad) > _MOST_ROWS:
        raise CheckFailed(f"{len(bad)} are missing from the image")
    count = sum(file.machine == python.machine for file in files)
    rest = f"; the driver brings {', '.join(drivers)}" if drivers else ""
    found = f"all but {len(bad)} of" if bad else "all"
    yield "libraries", "failed" if bad else "passed", f"{found} those of {count} files{rest}"


@register_check("programs", "programs")
def check_programs(wanted: Wanted) -> Iterator[Row]:
    """Programs that engines call by name are on the PATH."""
    for name in wanted["programs"]:
        path = shutil.which(name)
        verdict = "passed" if path else "failed"
        yield f"program {name}", verdict, path or f"not found on PATH ({os.environ.get('PATH')})"


@register_check("certificates", "certificates")
def check_certificates(wanted: Wanted) -> str:
    """CAs, without which nothing can be downloaded from the Hub."""
    count = ssl.create_default_context().cert_store_stats()["x509_ca"]
    if not count:
        raise CheckFailed("Python finds no certificate authorities")
    return f"{count} certificate authorities"


@contextlib.contextmanager
def _sources(files: Mapping[str, str]) -> Iterator[Path]:
    """Writes source files where the engine would compile its own: below its home."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("HOME")) as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        yield Path(folder)


@register_check("c", "C compiler")
def check_c(wanted: Wanted) -> str:
    """gcc and Python's headers: Triton compiles its launchers with them."""
    extension = f"compiled_here{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_paths()["include"]
    with _sources({"x.c": _MODULE}) as folder:
        flags = ["-O1", "-shared", "-fPIC", f"-I{include}", "x.c", "-o", extension]
        run(["gcc", *flags], wanted["limit_s"], str(folder))
        sys.path.insert(0, str(folder))
        importlib.import_module("compiled_here")
    return f"gcc made a module of Python's headers in {include}, and it loads"


@register_check("cxx", "C++ compiler")
def check_cxx(wanted: Wanted) -> str:
    """g++ and its headers: FlashInfer's kernels are C++."""
    text = "#include <vector>\nint main() { return std::vector<int>(3).size() != 3; }\n"
    with _sources({"x.cpp": text}) as folder:
        run(["g++", "-std=c++17", "x.cpp", "-o", "x"], wanted["limit_s"], str(folder))
        run([str(folder / "x")], wanted["limit_s"])
    return "g++ made a program, and it runs"


@register_check("ninja", "ninja")
def check_ninja(wanted: Wanted) -> str:
    """ninja, which FlashInfer and torch call by name."""
    rules = "rule copy\n command = cp $in $out\nbuild y.txt: copy x.txt\n"
    with _sources({"x.txt": "x\n", "x.ninja": rules}) as folder:
        run(["ninja", "-f", "x.ninja"], wanted["limit_s"], str(folder))
        if not (folder / "y.txt").is_file():
            raise CheckFailed("ninja built nothing")
    version = run(["ninja", "--version"], wanted["limit_s"]).strip()
    return f"{version}: built a target"


@register_check("nvcc", "CUDA compiler")
def check_nvcc(wanted: Wanted) -> str:
    """nvcc with its headers, for the image's card, and a library of it finds the CUDA runtime."""
    arch, limit_s = wanted["arch"], wanted["limit_s"]
    with _sources({"x.cu": _CUDA, "y.cu": _SHARED}) as folder:
        run(["nvcc", f"-arch={arch}", "-cubin", "x.cu", "-o", "x.cubin"], limit_s, str(folder))
        if not (folder / "x.cubin").read_bytes().startswith(b"\x7fELF"):
            raise CheckFailed("nvcc made something that is not a cubin")
        flags = ["-shared", "-Xcompiler", "-fPIC", "-cudart=shared", "y.cu", "-o", "y.so"]
        run(["nvcc", f"-arch={arch}", *flags], limit_s, str(folder))
        # in a process of its own: it looks for the runtime as a kernel compiled at run time does
        code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).runtime())"
        run([sys.executable, "-c", code, str(folder / "y.so")], limit_s)
    return f"nvcc made a kernel for {arch}; the CUDA runtime answers"


@register_check("triton", "Triton's ptxas")
def check_triton(wanted: Wanted) -> str:
    """Triton's own ptxas, which assembles every kernel at run time."""
    spec = importlib.util.find_spec("triton")
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise CheckFailed("there is no module triton")
    found = sorted(Path(places[0], "backends/nvidia/bin").glob("ptxas*"))
    if not found:
        raise CheckFailed(f"{places[0]}: holds no ptxas")
    arch, failures = wanted["arch"], []
    for version, program in itertools.product(_PTX_VERSIONS, found):
        with _sources({"x.ptx": _PTX.format(version=version, arch=arch)}) as folder:
            command = [str(program), f"-arch={arch}", "x.ptx", "-o", "x.cubin"]
            try:
                run(command, wanted["limit_s"], str(folder))
                return f"{program} assembled a kernel for {arch}"
            except CheckFailed as error:
                failures.append(str(error))
    raise CheckFailed("; ".join(failures))


@register_check("modules", "modules")
def check_modules(wanted: Wanted) -> Iterator[Row]:
    """The engine's modules can be imported."""
    for name in wanted["modules"]:
        yield f"import {name}", "doing", ""
        try:
            module = importlib.import_module(name)
            row = ("passed", str(getattr(module, "__version__", "")))
        except Exception as error:
            row = ("failed", f"{type(error).__name__}: {error}")
            driver = next((lib for lib in wanted["driver"] if lib in str(error)), None)
            if driver and isinstance(error, (ImportError, OSError)):
                row = ("skipped", f"needs the driver's {driver}")
        yield (f"import {name}", *row)


@register_check("parser", "argument parser")
def check_parser(wanted: Wanted) -> str:
    """The argument parser answers, and knows the flags that recipes are checked against."""
    parser = wanted["parser"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "flags.json")
        kind, *rest = parser["arguments"]
        script = str(Path(__file__).with_name("print_flags.py"))
        run([sys.executable, script, kind, str(result), *rest], wanted["limit_s"])
        flags = json.loads(result.read_text(encoding="utf-8"))["flags"]
    known = {x for flag, about in flags.items() for x in (flag, *about.get("aliases", []))}
    if not known:
        raise CheckFailed("it knows no flag")
    if lacking := sorted(set(parser["flags"]) - known):
        raise CheckFailed(
            f"it does not know {', '.join(lacking[:_SHOWN])}, unlike {parser['file']}"
        )
    like = f", all of {parser['file']}" if parser["flags"] else ""
    return f"knows {len(flags)} flags{like}"


@register_check("command", "command")
def check_command(wanted: Wanted) -> Iterator[Row]:
    """The image without arguments prints the engine's help."""
    try:
        output = run(wanted["command"], wanted["limit_s"], cwd=tempfile.gettempdir())
    except CheckFailed as error:
        if _NO_DEVICE not in str(error):
            raise
        yield "command", "skipped", f"without a GPU it refuses even --help: {error}"
        return
    if "usage" not in output.lower():
        raise CheckFailed(f"printed no usage: {last_lines(output)}")
    lines = len(output.splitlines())
    yield "command", "passed", f"{' '.join(wanted['command'])}: {lines} lines of help"


def one(wanted: Wanted, name: str, write: Callable[[Row], None]) -> None:
    """Runs a check; an error that stops it is its verdict."""
    title, function = CHECKS[name]
    write((title, "doing", ""))
    try:
        found = function(wanted)
        for row in [(title, "passed", found)] if isinstance(found, str) else found:
            write(row)
    except subprocess.TimeoutExpired as error:
        write((title, "unknown", f"took longer than {error.timeout:.0f} s"))
    except (Exception, SystemExit) as error:
        message = (
            str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
        )
        write((title, "failed", message))


def every(path: str, wanted: Wanted) -> None:
    """Runs the wanted checks, a few at a time, and prints their rows in the order of the checks."""
    # its threads stay to the end: a check dies with the thread that started it
    with ThreadPoolExecutor(min(_AT_ONCE, len(os.sched_getaffinity(0)))) as pool:
        found = pool.map(partial(_apart, path, wanted), wanted["checks"])
        for name, rows in zip(wanted["checks"], found, strict=True):
            for title, verdict, message in rows:
                row = {"check": name, "name": title, "verdict": verdict}
                print(MARK + json.dumps({**row, "message": message[:_LONGEST]}), flush=True)


def _apart(path: str, wanted: Wanted, name: str) -> list[Row]:
    """Runs one check in a process of its own and returns its rows."""
    reader, writer = os.pipe()
    command = [sys.executable, str(Path(__file__).resolve()), path, name, str(writer)]
    child = subprocess.Popen(
        command, pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
    )
    os.close(writer)
    verdict, ended, limit_s = "failed", "", wanted["limit_s"] * 2
    try:
        if code := child.wait(limit_s):
            ended = _ending(code)
    except subprocess.TimeoutExpired:
        verdict, ended = "unknown", f"took longer than {limit_s:.0f} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    with os.fdopen(reader, encoding="utf-8") as lines:
        rows: list[Row] = [(row[0], row[1], row[2]) for row in map(json.loads, lines)]
    done = [row for row in rows if row[1] != "doing"]
    if ended or not done:
        begun = [title for title, state, _ in rows if state == "doing"]
        last = begun[-1] if begun else CHECKS[name][0]
        done.append((last, verdict, ended or "ended without a verdict"))
    return done


def main(path: str, name: str = "", handle: str = "") -> None:
    """Runs all checks, or one of them."""
    wanted = json.loads(Path(path).read_text(encoding="utf-8"))
    if not name:
        return every(path, wanted)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
    with os.fdopen(int(handle), "w", encoding="utf-8") as out:
        one(wanted, name, lambda row: print(json.dumps(row), file=out, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
