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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

try:
    from pipeline.starts.inside.libraries import (
        Loader,
        linked_files,
        missing_libraries,
        read_needs,
    )
except ImportError:  # in an image this folder is all there is of us
    from libraries import (  # type: ignore[import-not-found, no-redef]
        Loader,
        linked_files,
        missing_libraries,
        read_needs,
    )

MARK = "sm120-start "
Row = tuple[str, str, str]  # name, verdict, message
Wanted = dict[str, Any]
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


class Broken(Exception):
    """Why something does not do what the engine will ask of it."""


def run(command: Sequence[str], limit_s: float, cwd: str | None = None) -> str:
    """What a program prints, or why it failed."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except OSError as error:
        raise Broken(f"{command[0]}: {error.strerror}") from error
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise Broken(f"{Path(command[0]).name}: {_ending(done.returncode)}: {last_lines(output)}")
    return output


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_lines(text: str) -> str:
    """The end of an output, on one line."""
    return " ".join(text.split())[-_LONGEST // 2 :] or "it printed nothing"


def check_user(wanted: Wanted) -> Iterator[Row]:
    """It runs as the user that the spec names, and that user has its home."""
    entry = pwd.getpwuid(os.getuid())
    if entry.pw_name != wanted["user"]:
        raise Broken(f"it runs as {entry.pw_name} ({entry.pw_uid}), not as {wanted['user']}")
    if os.getuid() == 0:
        raise Broken("it runs as root")
    home = os.environ.get("HOME")
    if home != entry.pw_dir:
        raise Broken(f"HOME is {home}, and the home of {entry.pw_name} is {entry.pw_dir}")
    yield "user", "passed", f"{entry.pw_name} ({entry.pw_uid}:{os.getgid()}), home {home}"


def check_folders(wanted: Wanted) -> Iterator[Row]:
    """Everything that it will write to can be written to."""
    bad = [why for folder in wanted["folders"] if (why := _unwritable(Path(folder)))]
    if bad:
        raise Broken("; ".join(bad[:_SHOWN]))
    yield "folders", "passed", f"written to: {', '.join(wanted['folders'])}"


def _unwritable(folder: Path) -> str:
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        about = there.stat()
        owner = f"{about.st_uid}:{about.st_gid}, mode {about.st_mode & 0o7777:04o}"
        return f"{folder}: {error.strerror} ({there} belongs to {owner})"
    return ""


def check_libraries(wanted: Wanted) -> Iterator[Row]:
    """Every library that a program or module of the image asks for is in it, or the driver's."""
    files = list(linked_files())
    here = read_needs(Path(sys.executable).resolve())
    if here is None:
        raise Broken(f"{sys.executable}: cannot be read")
    missing = missing_libraries(files, Loader(files, os.environ), here.machine)
    drivers = [name for name in missing if name in wanted["driver"]]
    bad, optional = _sorted_out(missing, drivers, wanted["optional"])
    for pattern, names in optional.items():
        yield f"libraries of {pattern}", "skipped", f"{wanted['optional'][pattern]} ({names})"
    for name, by in list(bad.items())[:_MOST_ROWS]:
        more = f" and {len(by) - 1} more" if len(by) > 1 else ""
        yield f"library {name}", "failed", f"missing from the image; {by[0]}{more} asks for it"
    if len(bad) > _MOST_ROWS:
        raise Broken(f"{len(bad)} are missing from the image")
    count = sum(file.machine == here.machine for file in files)
    rest = f"; the driver brings {', '.join(drivers)}" if drivers else ""
    found = f"all but {len(bad)} of" if bad else "all"
    yield "libraries", "failed" if bad else "passed", f"{found} those of {count} files{rest}"


def _sorted_out(
    missing: dict[str, list[str]], drivers: Sequence[str], optional: dict[str, str]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What is missed by files that must have it, and, by pattern, what others go without."""
    bad: dict[str, list[str]] = {}
    without: dict[str, str] = {}
    for name in (name for name in missing if name not in drivers):
        for path in missing[name]:
            pattern = next((p for p in optional if fnmatch.fnmatchcase(path, p)), None)
            if pattern is None:
                bad.setdefault(name, []).append(path)
            elif name not in without.setdefault(pattern, ""):
                without[pattern] += f", {name}" if without[pattern] else name
    return bad, without


def check_modules(wanted: Wanted) -> Iterator[Row]:
    """The engine's modules can be imported."""
    for name in wanted["modules"]:
        yield f"import {name}", "doing", ""
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:
            driver = next((lib for lib in wanted["driver"] if lib in str(error)), None)
            if driver is None:
                yield f"import {name}", "failed", f"{type(error).__name__}: {error}"
            else:
                yield f"import {name}", "skipped", f"needs the driver's {driver}"
            continue
        except Exception as error:
            yield f"import {name}", "failed", f"{type(error).__name__}: {error}"
            continue
        yield f"import {name}", "passed", str(getattr(module, "__version__", ""))


def check_parser(wanted: Wanted) -> Iterator[Row]:
    """The argument parser answers, and knows the flags that recipes are checked against."""
    name, parser = "argument parser", wanted["parser"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "flags.json")
        kind, *rest = parser["arguments"]
        script = str(Path(__file__).with_name("print_flags.py"))
        run([sys.executable, script, kind, str(result), *rest], wanted["limit_s"])
        flags = json.loads(result.read_text(encoding="utf-8"))["flags"]
    known = {x for flag, about in flags.items() for x in (flag, *about.get("aliases", []))}
    if not known:
        raise Broken("it knows no flag")
    if lacking := sorted(set(parser["flags"]) - known):
        raise Broken(f"it does not know {', '.join(lacking[:_SHOWN])}, unlike {parser['file']}")
    like = f", all of {parser['file']}" if parser["flags"] else ""
    yield name, "passed", f"knows {len(flags)} flags{like}"


def check_command(wanted: Wanted) -> Iterator[Row]:
    """What the image runs when it is given no arguments: for engines, the help."""
    try:
        output = run(wanted["command"], wanted["limit_s"], cwd=tempfile.gettempdir())
    except Broken as error:
        if _NO_DEVICE not in str(error):
            raise
        yield "command", "skipped", f"without a GPU it refuses even --help: {error}"
        return
    if "usage" not in output.lower():
        raise Broken(f"printed no usage: {last_lines(output)}")
    lines = len(output.splitlines())
    yield "command", "passed", f"{' '.join(wanted['command'])}: {lines} lines of help"


def check_programs(wanted: Wanted) -> Iterator[Row]:
    """Programs that are called by name."""
    for name in wanted["programs"]:
        path = shutil.which(name)
        verdict = "passed" if path else "failed"
        yield f"program {name}", verdict, path or f"not found on PATH ({os.environ.get('PATH')})"


@contextlib.contextmanager
def _sources(**files: str) -> Iterator[Path]:
    """Source files in a folder where the engine would compile its own: below its home."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("HOME")) as name:
        for suffix, text in files.items():
            Path(name, f"x.{suffix}").write_text(text, encoding="utf-8")
        yield Path(name)


def check_c(wanted: Wanted) -> Iterator[Row]:
    """gcc and Python's headers: Triton compiles its launchers with them."""
    extension = Path(f"compiled_here{sysconfig.get_config_var('EXT_SUFFIX')}")
    include = sysconfig.get_paths()["include"]
    with _sources(c=_MODULE) as folder:
        flags = ["-O1", "-shared", "-fPIC", f"-I{include}", "x.c", "-o", str(extension)]
        run(["gcc", *flags], wanted["limit_s"], str(folder))
        sys.path.insert(0, str(folder))
        importlib.import_module("compiled_here")
    yield (
        "C compiler",
        "passed",
        f"gcc made a module of Python's headers in {include}, and it loads",
    )


def check_cxx(wanted: Wanted) -> Iterator[Row]:
    """g++ and its headers: FlashInfer's kernels are C++."""
    text = "#include <vector>\nint main() { return std::vector<int>(3).size() != 3; }\n"
    with _sources(cpp=text) as folder:
        run(["g++", "-std=c++17", "x.cpp", "-o", "x"], wanted["limit_s"], str(folder))
        run([str(folder / "x")], wanted["limit_s"])
    yield "C++ compiler", "passed", "g++ made a program, and it runs"


def check_ninja(wanted: Wanted) -> Iterator[Row]:
    """ninja, which FlashInfer and torch call by name."""
    rules = "rule copy\n command = cp $in $out\nbuild y.txt: copy x.txt\n"
    with _sources(txt="x\n", ninja=rules) as folder:
        run(["ninja", "-f", "x.ninja"], wanted["limit_s"], str(folder))
        if not (folder / "y.txt").is_file():
            raise Broken("ninja built nothing")
    version = run(["ninja", "--version"], wanted["limit_s"]).strip()
    yield "ninja", "passed", f"{version}: built a target"


def check_nvcc(wanted: Wanted) -> Iterator[Row]:
    """nvcc with its headers, for the image's card, and a library of it finds the CUDA runtime."""
    arch = wanted["arch"]
    with _sources(cu=_CUDA, shared=_SHARED) as folder:
        (folder / "y.cu").write_text((folder / "x.shared").read_text(), encoding="utf-8")
        run(["nvcc", f"-arch={arch}", "-cubin", "x.cu", "-o", "x.cubin"], *_at(wanted, folder))
        if not (folder / "x.cubin").read_bytes().startswith(b"\x7fELF"):
            raise Broken("nvcc made something that is not a cubin")
        flags = ["-shared", "-Xcompiler", "-fPIC", "-cudart=shared", "y.cu", "-o", "y.so"]
        run(["nvcc", f"-arch={arch}", *flags], *_at(wanted, folder))
        # in a process of its own: it looks for the runtime as a kernel compiled at run time does
        code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).runtime())"
        run([sys.executable, "-c", code, str(folder / "y.so")], wanted["limit_s"])
    yield "CUDA compiler", "passed", f"nvcc made a kernel for {arch}; the CUDA runtime answers"


def _at(wanted: Wanted, folder: Path) -> tuple[float, str]:
    return wanted["limit_s"], str(folder)


def check_triton(wanted: Wanted) -> Iterator[Row]:
    """Triton's own ptxas, which assembles every kernel at run time."""
    spec = importlib.util.find_spec("triton")
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise Broken("there is no module triton")
    found = sorted(Path(places[0], "backends/nvidia/bin").glob("ptxas*"))
    if not found:
        raise Broken(f"{places[0]}: holds no ptxas")
    arch, failures = wanted["arch"], []
    for version, program in itertools.product(_PTX_VERSIONS, found):
        with _sources(ptx=_PTX.format(version=version, arch=arch)) as folder:
            try:
                run([str(program), f"-arch={arch}", "x.ptx", "-o", "x.cubin"], *_at(wanted, folder))
            except Broken as error:
                failures.append(str(error))
                continue
        yield "Triton's ptxas", "passed", f"{program} assembled a kernel for {arch}"
        return
    raise Broken("; ".join(failures))


def check_certificates(wanted: Wanted) -> Iterator[Row]:
    """CAs, without which nothing can be downloaded from the Hub."""
    count = ssl.create_default_context().cert_store_stats()["x509_ca"]
    if not count:
        raise Broken("Python finds no certificate authorities")
    yield "certificates", "passed", f"{count} certificate authorities"


CHECKS: dict[str, tuple[str, Callable[[Wanted], Iterable[Row]]]] = {
    "user": ("user", check_user),
    "folders": ("folders", check_folders),
    "libraries": ("libraries", check_libraries),
    "programs": ("programs", check_programs),
    "certificates": ("certificates", check_certificates),
    "c": ("C compiler", check_c),
    "cxx": ("C++ compiler", check_cxx),
    "ninja": ("ninja", check_ninja),
    "nvcc": ("CUDA compiler", check_nvcc),
    "triton": ("Triton's ptxas", check_triton),
    "modules": ("modules", check_modules),
    "parser": ("argument parser", check_parser),
    "command": ("command", check_command),
}


def one(wanted: Wanted, check: str, write: Callable[[Row], None]) -> None:
    """Run a check; whatever stops it is its verdict."""
    title, function = CHECKS[check]
    write((title, "doing", ""))
    try:
        for row in function(wanted):
            write(row)
    except subprocess.TimeoutExpired as error:
        write((title, "unknown", f"took longer than {error.timeout:.0f} s"))
    except (Exception, SystemExit) as error:
        message = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        write((title, "failed", message))


def every(path: str, wanted: Wanted) -> None:
    """All checks that are wanted, a few at a time; their rows in the order of the checks."""
    # its threads stay to the end: a check dies with the thread that started it
    with ThreadPoolExecutor(min(_AT_ONCE, len(os.sched_getaffinity(0)))) as pool:
        found = pool.map(partial(_apart, path, wanted), wanted["checks"])
        for check, rows in zip(wanted["checks"], found, strict=True):
            for name, verdict, message in rows:
                row = {"check": check, "name": name, "verdict": verdict}
                print(MARK + json.dumps({**row, "message": message[:_LONGEST]}), flush=True)


def _apart(path: str, wanted: Wanted, check: str) -> list[Row]:
    """The rows of one check that runs in a process of its own."""
    reader, writer = os.pipe()
    command = [sys.executable, str(Path(__file__).resolve()), path, check, str(writer)]
    child = subprocess.Popen(
        command, pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
    )
    os.close(writer)
    timer_s = wanted["limit_s"] * 2
    ended = ""
    try:
        code = child.wait(timer_s)
        ended = _ending(code) if code else ""
    except subprocess.TimeoutExpired:
        ended = f"took longer than {timer_s:.0f} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    with os.fdopen(reader, encoding="utf-8") as lines:
        rows: list[Row] = [(row[0], row[1], row[2]) for row in map(json.loads, lines)]
    begun = [name for name, verdict, _ in rows if verdict == "doing"]
    done = [row for row in rows if row[1] != "doing"]
    if ended or not done:
        last = begun[-1] if begun else CHECKS[check][0]
        verdict = "unknown" if ended.startswith("took") else "failed"
        done.append((last, verdict, ended or "ended without a verdict"))
    return done


def main(path: str, check: str = "", handle: str = "") -> None:
    """All checks, or one of them."""
    wanted = json.loads(Path(path).read_text(encoding="utf-8"))
    if not check:
        every(path, wanted)
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
    with os.fdopen(int(handle), "w", encoding="utf-8") as out:

        def write(row: Row) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        one(wanted, check, write)


if __name__ == "__main__":
    main(*sys.argv[1:])
