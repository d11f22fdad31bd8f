"""Do kernels that were compiled without a card serve on one? Counts hits and misses, cold and warm.

    python -m tests.gpu.warm collect DIR         # here: engine files and cases, a few megabytes
    python tests/gpu/warm.py prove DIR RESULT    # on the machine with the card; needs torch, Triton
    python tests/gpu/warm.py keep RESULT         # here: into measured/first-calls-CARD.json

`collect DIR MEASURED` leaves out the cases that a file of measurements has.

`prove` compiles in processes that see no card, with the worker that makes warm layers, for the card
that is there. Then it calls the engine's real functions on the card: once as they are, compiling
everything, and once with the entries alone, where compilers fail and all but a hit is an error.
RESULT gets, for each case, both times of the first call, hits, misses, and whether numbers agree.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import types
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSIDE = ROOT / "pipeline/images/warm/inside"
READER = ROOT / "pipeline/images/warm/reader"
GATE_WORKER = ROOT / "pipeline/images/gate/worker"
IMAGES = ("sglang-k2", "sglang", "vllm")
WORKERS = max(1, (os.cpu_count() or 2) * 3 // 4)
OWN_PATH = os.environ.get("PYTHONPATH", "")
FAILING = '#!/bin/sh\necho no compiler: "$0" >&2\nexit 1\n'
# its version is part of every key, so only that is answered
FAILING_PTXAS = '#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\nexit 1\n'
# What a machine may have although the image's gates stand in for it: another version is worse than
# none. Torch finds CUDA's libraries in `nvidia`.
HIDING = """
import importlib.machinery

absent = frozenset({absent!r}) - {{"nvidia"}}
find = importlib.machinery.PathFinder.find_spec


def find_spec(name, *more):
    return None if name.partition(".")[0] in absent else find(name, *more)


importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""
CALL_SECONDS = 100.0


def collect(
    folder: Path, images: tuple[str, ...] = IMAGES, arch: str = "sm_90", known: Path | None = None
) -> None:
    """Every engine's code with its patches, and the job of all cases without numbers."""
    import tarfile

    from pipeline.artifacts.store.store import default_root, open_store
    from pipeline.images.assemble.plan import plan_image
    from pipeline.images.gate.smem.image_gate import open_gate
    from pipeline.images.gate.smem.limits import card_for
    from tests.gpu.collect import gate_context

    context = gate_context(open_store(default_root()))
    measured = json.loads(known.read_text(encoding="utf-8")) if known else {}
    for image in images:
        with context.store.in_use():
            gate = open_gate(context, plan_image(context.checkout, image, "linux/amd64"))
            tree = gate.patched()
            done = measured.get(image, {"cases": {}})["cases"]
            todo = [case for case in gate.gates.cases() if case.name not in done]
            job = gate.target(tree, card_for(arch)).job(todo)
        place = folder / image
        place.mkdir(parents=True, exist_ok=True)
        (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
        with tarfile.open(place / "engine.tar.xz", "w:xz") as archive:
            archive.add(tree.folder / tree.package, tree.package)
            # vLLM uses no Triton where it finds no version of its own
            for facts in tree.folder.glob("*.dist-info"):
                archive.add(facts, facts.name)
            # SGLang's arguments are pickled by it at import, and the other machine has none
            if (dill := gate.environment.folder / "site" / "dill").is_dir():
                archive.add(dill, "dill")


def unpacked_job(folder: Path, work: Path) -> dict[str, Any]:
    """Unpacks an engine that was collected; its job, with the paths of this machine."""
    (work / "engine").mkdir(parents=True)
    # Debian 12's tarfile knows no filters; this archive is our own
    archive = str((folder / "engine.tar.xz").resolve())
    subprocess.run(["tar", "-xJf", archive], cwd=work / "engine", check=True)
    job: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    return {**job, "engine": str(work / "engine"), "gate_worker": str(GATE_WORKER)}


def compiled(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Entries of all cases, compiled where no card is in sight; the index that was written."""
    entries: dict[str, Any] = {}
    ended: dict[str, str] = {}

    def compile_part(part: int) -> None:
        todo = job["cases"][part::WORKERS]
        while todo:
            work = folder / f"compile-{part}-{len(todo)}"
            work.mkdir(parents=True)
            (work / "job.json").write_text(json.dumps({**job, "cases": todo}), encoding="utf-8")
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            env["PYTHONPATH"] = f"{folder}:{READER}:{OWN_PATH}"
            env["TRITON_CACHE_DIR"] = str(work / "triton")
            words = [sys.executable, str(INSIDE), "job.json", "answers"]
            subprocess.run(words, cwd=work, env=env, check=False)
            path = work / "answers"
            lines = path.read_text().splitlines() if path.exists() else []
            answers = [a for a in map(json.loads, lines) if "begins" not in a]
            for answer in answers:
                ended[answer["case"]] = f"{answer['ended']} {answer['message']}".strip()
                for entry in answer["entries"]:
                    known = entries.setdefault(entry["key"], {**entry, "cases": []})
                    known["cases"].append(answer["case"])
            # a case that ended its process is not asked again
            died = todo[len(answers) : len(answers) + 1] if len(lines) > 2 * len(answers) else []
            ended.update((case["name"], "died") for case in died)
            todo = todo[len(answers) + len(died) :] if answers or died else []

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(compile_part, range(WORKERS)))
    import triton

    for key, entry in entries.items():
        for name, data in entry["files"].items():
            path = folder / "warm" / "triton" / key / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(zlib.decompress(base64.b85decode(data)))
            entry["files"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
    index = {
        "triton": triton.__version__,
        "site": str(Path(triton.__file__).parents[1]),
        "entries": entries,
        "ended": ended,
    }
    (folder / "warm" / "index.json").write_text(json.dumps(index), encoding="utf-8")
    return index


def call_on_card(job: dict[str, Any], case: dict[str, Any], result: Path) -> None:
    """One case on the card, in this process: its first call's time, and its numbers."""
    import torch

    sys.modules["gate_worker"] = types.ModuleType("gate_worker")
    sys.modules["gate_worker"].__path__ = [str(GATE_WORKER)]
    names = ("calling", "arguments", "card", "engines", "stand_ins")
    modules: list[Any] = [importlib.import_module(f"gate_worker.{each}") for each in names]
    calling, arguments, card, engines, stand_ins = modules
    sys.path.insert(0, job["engine"])
    card.tolerate_missing_operators()
    sys.meta_path.insert(0, stand_ins.BarePackages(job["engine"], job["bare"]))
    sys.meta_path.append(stand_ins.StandIns(job["absent"]))
    if prepare := engines.PREPARE.get(job["package"]):
        prepare(job["card"])
    real = arguments.build

    def build(argument: Any, made: Any, package: str) -> Any:
        return torch.device("cuda") if "device" in argument else real(argument, made, package)

    arguments.build = calling.build = build
    # what the gate keeps in CPU memory lies on the card here
    torch.set_default_device("cuda")
    torch.manual_seed(1)
    function, made = calling.prepare(case, job["package"])
    torch.cuda.synchronize()
    start = time.monotonic()
    returned = function(**made)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    values = [*made.values(), *(returned if isinstance(returned, (tuple, list)) else [returned])]
    numbers = [v.detach().float().cpu() for v in values if isinstance(v, torch.Tensor)]
    torch.save({"seconds": seconds, "numbers": numbers}, result)


def call_all(work: Path, way: str) -> None:
    """Every case in a process of its own that has imported torch and Triton, but not seen the card.

    A case that takes too long is stopped; what stopped one is in its file of errors.
    """
    import torch
    import triton.runtime.jit  # noqa: F401

    job = json.loads((work / "job.json").read_text(encoding="utf-8"))
    todo = list(reversed(job["cases"]))
    running: dict[int, float] = {}
    while todo or running:
        while todo and len(running) < WORKERS:
            case = todo.pop()
            if (child := os.fork()) == 0:
                os.environ["TRITON_CACHE_DIR"] = str(work / way / case["name"])
                os.environ["SM120_WARM_LOG"] = str(work / f"{case['name']}.log")
                torch.set_num_threads(1)
                failed = work / f"{case['name']}.{way}.error"
                try:
                    call_on_card(job, case, work / f"{case['name']}.{way}.pt")
                except BaseException as error:
                    failed.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
                os._exit(0)
            running[child] = time.monotonic() + CALL_SECONDS
        child, _ = os.waitpid(-1, os.WNOHANG)
        running.pop(child, None)
        if child == 0:
            time.sleep(0.02)
            for late in [pid for pid, limit in running.items() if time.monotonic() > limit]:
                os.kill(late, signal.SIGKILL)


def call_both_ways(work: Path, no_compilers: Path, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """All cases, compiling and with entries alone: times, hits and misses, the numbers."""
    import torch
    import triton

    backend = Path(triton.__file__).parent / "backends/nvidia/bin"
    for way in ("cold", "warm"):
        env = {**os.environ, "PYTHONPATH": f"{work}:{READER}:{OWN_PATH}"}
        if way == "warm":
            env |= {"TRITON_CACHE_MANAGER": "sm120_warm:WarmCache"}
            env |= {"SM120_WARM": str(work / "warm"), "SM120_WARM_ONLY": "1"}
            env["PATH"] = f"{no_compilers}:{env['PATH']}"
            env["CC"] = str(no_compilers / "gcc")
            for tool in backend.glob("ptxas*"):
                variable = f"TRITON_{tool.name.upper().replace('-', '_')}_PATH"
                env[variable] = str(no_compilers / tool.name)
        subprocess.run([sys.executable, __file__, "call", str(work), way], env=env, check=True)
    rows: dict[str, Any] = {}
    for case in cases:
        row: dict[str, Any] = {}
        made = {}
        for way in ("cold", "warm"):
            path = work / f"{case['name']}.{way}.pt"
            if path.exists():
                made[way] = torch.load(path)
                row[way] = round(made[way]["seconds"], 4)
                path.unlink()
            else:
                error = path.with_suffix(".error")
                row[way] = error.read_text()[:300] if error.exists() else "died, or took too long"
        log = work / f"{case['name']}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        for what in ("hit", "disk", "miss", "refused", "table"):
            row[what] = sum(line.startswith(what) for line in lines)
        if len(made) == 2:
            pairs = zip(made["cold"]["numbers"], made["warm"]["numbers"], strict=True)
            row["same numbers"] = all(
                torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs
            )
        rows[case["name"]] = row
    return rows


def prove(collected: Path, result: Path) -> None:
    """All images: what was compiled, and what the card made of it."""
    import torch
    import triton

    result.mkdir(parents=True, exist_ok=True)
    major, minor = torch.cuda.get_device_capability()
    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["triton"] = triton.__version__
    no_compilers = result / "no-compilers"
    no_compilers.mkdir(exist_ok=True)
    tools = dict.fromkeys(("gcc", "cc", "clang", "nvcc"), FAILING)
    backend = Path(triton.__file__).parent / "backends/nvidia/bin"
    for tool in sorted(backend.glob("ptxas*")):
        tools[tool.name] = FAILING_PTXAS.format(real=tool)
    for name, text in tools.items():
        (no_compilers / name).write_text(text)
        (no_compilers / name).chmod(0o755)
    for folder in sorted(path for path in collected.iterdir() if (path / "job.json").is_file()):
        work = result / folder.name
        job = {**unpacked_job(folder, work), "cache": None}
        # the card that is there decides which code is compiled, its name which tables are read
        job["card"] |= {"capability": [major, minor], "name": report["card"]}
        job["cuda"] = torch.version.cuda
        (work / "sitecustomize.py").write_text(HIDING.format(absent=job["absent"]))
        index = compiled(job, work)
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")

        rows = {
            name: {"compiled": index["ended"].get(name, "not asked"), **row}
            for name, row in call_both_ways(work, no_compilers, job["cases"]).items()
        }
        report[folder.name] = {"entries": len(index["entries"]), "cases": rows}
        (result / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        served = [r for r in rows.values() if isinstance(r.get("warm"), float)]
        print(folder.name, len(index["entries"]), "entries;", len(rows), "cases,", end=" ")
        print(
            len(served), "served without a compiler,", sum(r["hit"] for r in rows.values()), "hits"
        )


def keep(result: Path) -> None:
    """What a run measured, added to what is known of its card."""
    report = json.loads((result / "report.json").read_text(encoding="utf-8"))
    card = report["card"].lower().replace(" ", "-")
    path = Path(__file__).with_name("measured") / f"first-calls-{card}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else dict(report)
    for image in (name for name in IMAGES if name in report):
        rows = report[image]["cases"]
        of_image = known[image] if "not_run" in known.get(image, {}) else {"cases": {}}
        not_run = {
            reason: left
            for reason, names in of_image.get("not_run", {}).items()
            if (left := [name for name in names if name not in rows])
        }
        for name, row in rows.items():
            if isinstance(row["cold"], float) and isinstance(row["warm"], float):
                of_image["cases"][name] = {k: v for k, v in row.items() if k != "compiled"}
            else:
                way = "cold" if isinstance(row["cold"], str) else "warm"
                reason = f"{way}: {row[way].partition(chr(10))[0][:160]}"
                not_run.setdefault(reason, []).append(name)
        known[image] = {"not_run": not_run, "cases": of_image["cases"]}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "call":
        call_all(Path(words[0]), words[1])
    elif verb == "collect":
        collect(Path(words[0]), known=Path(words[1]) if words[1:] else None)
    elif verb == "keep":
        keep(Path(words[0]))
    else:
        prove(*map(Path, words))
