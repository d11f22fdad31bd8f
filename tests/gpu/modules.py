"""Do FlashInfer's modules that were compiled ahead serve on a card? Numbers and times, both ways.

    python -m tests.gpu.modules collect DIR       # here: FlashInfer of the image vllm, some 10 MB
    python tests/gpu/modules.py prove DIR WORK    # on the machine with the card; needs torch, nvcc

`prove` compiles modules in processes that see no card, with the program that makes warm layers, for
the card that is there. Then it calls FlashInfer's own functions on the card: cold, where FlashInfer
compiles, and warm with the modules alone, where compilers fail and FlashInfer may not compile.
Numbers are compared with torch's, and both times of the first call are printed. Last come
modules that must not be used: a changed one, one for another architecture, one of another version.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import types
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPILER = ROOT / "pipeline/images/warm/compiler"
READER = ROOT / "pipeline/images/warm/reader/flashinfer_jit_cache.py"
GATE_WORKER = ROOT / "pipeline/images/gate/worker"
FAILING = '#!/bin/sh\necho no compiler: "$0" >&2\nexit 1\n'
# What FlashInfer imports and the functions below do not call.
UNUSED = ["pynvml", "einops", "tqdm", "requests", "tabulate", "click", "nvtx"]
HEAD, SEED = 128, 1
ATTENTION = {
    **dict.fromkeys(("dtype_q", "dtype_kv", "dtype_o"), "torch.bfloat16"),
    **dict.fromkeys(("head_dim_qk", "head_dim_vo"), HEAD),
    **{"pos_encoding_mode": 0, "use_sliding_window": False, "use_logits_soft_cap": False},
}
BF16 = "dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16"
DECODE = f"single_decode_with_kv_cache_{BF16}_head_dim_qk_128_head_dim_vo_128_posenc_0_"
DECODE += "use_swa_False_use_logits_cap_False"
MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "sampling": ("flashinfer.jit.sampling:gen_sampling_module", {}),
    "norm": ("flashinfer.jit.norm:gen_norm_module", {}),
    "silu_and_mul": ("flashinfer.jit.activation:gen_act_and_mul_module", {"act_func_name": "silu"}),
    "rope": ("flashinfer.jit.rope:gen_rope_module", {}),
    "page": ("flashinfer.jit.page:gen_page_module", {}),
    DECODE: ("flashinfer.jit.attention.modules:gen_single_decode_module", ATTENTION),
}
PYTHON = "3.12"
WHEELS = ("apache-tvm-ffi==0.1.11", "ninja==1.13.2", "packaging==25.0", "typing-extensions==4.15.0")


def collect(folder: Path) -> None:
    """FlashInfer's code of the image vllm, and wheels for the other machine's Python."""
    import tarfile

    from pipeline.artifacts.store.store import default_root, open_store
    from pipeline.images.assemble.image import find_built
    from pipeline.images.assemble.plan import plan_image
    from pipeline.images.gate.smem.engine import unpack_kept
    from pipeline.images.spec.checkout import Checkout

    store = open_store(default_root())
    plan = plan_image(Checkout(ROOT), "vllm", "linux/amd64")
    built, site = find_built(store, plan), f"{plan.venv.site}/"
    if built is None:
        raise SystemExit("build the image vllm first")

    def place(path: str) -> str | None:
        name = path.removeprefix(site)
        if not name.startswith(("flashinfer/", "flashinfer_python")):
            return None
        *_, data = name.rpartition("flashinfer/data/")
        if data == name:
            return name if name.endswith((".py", "METADATA")) else None
        # of the sources, the folders of other kernels are most bytes
        is_kept = data.startswith(("include/", "cutlass/include/", "cccl/", "spdlog/"))
        return name if is_kept or (data.startswith("csrc/") and data.count("/") == 1) else None

    with store.in_use(), store.scratch() as scratch:
        layers = [layer.record for layer in built.layers]
        unpack_kept(store, layers, lambda row: place(row.path), scratch / "site")
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / "flashinfer.tar.xz", "w:xz") as archive:
            for path in sorted((scratch / "site").iterdir()):
                archive.add(path, path.name)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    words += ["--only-binary=:all:", f"--python-version={PYTHON}"]
    words += ["--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64"]
    subprocess.run([*words, *WHEELS], check=True)


def unpack_site(collected: Path, work: Path) -> Path:
    """Puts what was collected where Python and PATH find it."""
    site = work / "site"
    site.mkdir(parents=True)
    # Debian 12's tarfile knows no filters; this archive is our own
    archive = str((collected / "flashinfer.tar.xz").resolve())
    subprocess.run(["tar", "-xJf", archive], cwd=site, check=True)
    for wheel in collected.glob("*.whl"):
        shutil.unpack_archive(wheel, site, "zip")
    (ninja,) = site.glob("ninja-*.data/scripts/ninja")
    (work / "bin").mkdir()
    shutil.copy(ninja, work / "bin/ninja")
    (work / "bin/ninja").chmod(0o755)
    (work / "lib").mkdir()
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, check=False).stdout.decode()
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8")  # after `import torch`
    for name in ("libcuda.so", "libcudart.so"):
        words = [w for w in (known + loaded).split() if f"/{name}." in w and Path(w).exists()]
        if words:
            (work / "lib" / name).symlink_to(words[0])
    return site


def environment(work: Path, name: str) -> dict[str, str]:
    """Variables for a process with a home of its own."""
    home = work / "homes" / name
    home.mkdir(parents=True)
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), Path(nvcc).resolve().parents[1]]
    places += [
        *sorted(Path("/usr/local").glob("cuda*")),
        *(Path(p, "nvidia/cu13") for p in sys.path),
    ]
    parts = ("include/cuda_runtime.h", "bin/nvcc")
    cuda = next(place for place in places if all((place / part).is_file() for part in parts))
    own = {**os.environ, **dict.fromkeys(("HOME", "FLASHINFER_WORKSPACE_BASE"), str(home))}
    # where the toolkit has no libraries to link with, those of torch and of the driver
    own["LIBRARY_PATH"] = f"{work / 'lib'}:{os.environ.get('LIBRARY_PATH', '')}"
    own |= {"CUDA_HOME": str(cuda), "PATH": f"{work / 'bin'}:{cuda}/bin:{os.environ['PATH']}"}
    own |= {"FLASHINFER_USE_CUDA_NORM": "1", "FLASHINFER_LOGGING_LEVEL": "error"}
    own["LD_LIBRARY_PATH"] = f"{cuda}/lib64:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {**own, "MAX_JOBS": "4", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}


def compile_ahead(work: Path, name: str, arch: str) -> dict[str, Any]:
    """One module, by the program that makes warm layers, where no card is in sight."""
    make, arguments = MODULES[name]
    case = {"name": name, "make": make, "arguments": arguments}
    env = {**environment(work, f"ahead-{name}"), "CUDA_VISIBLE_DEVICES": ""}
    job, answers = (work / "homes" / f"{name}.{each}" for each in ("job", "answers"))
    job.write_text(json.dumps({"site": str(work / "site"), "cases": [case]}), encoding="utf-8")
    words = [sys.executable, str(COMPILER), str(job), str(answers)]
    done = subprocess.run(
        words, env={**env, "FLASHINFER_CUDA_ARCH_LIST": arch}, capture_output=True, check=False
    )
    lines = answers.read_text().splitlines() if answers.exists() else []
    if len(lines) < 2:
        return {"ended": "died", "message": done.stderr.decode(errors="replace")[-600:]}
    answer: dict[str, Any] = json.loads(lines[-1])
    if library := answer.pop("library", ""):
        path = work / "warm/flashinfer" / name / f"{name}.so"
        path.parent.mkdir(parents=True)
        path.write_bytes(zlib.decompress(base64.b85decode(library)))
        answer["size_bytes"] = path.stat().st_size
    return answer


def flashinfer_module(name: str) -> Any:
    """A module of FlashInfer, without its top-level package, which imports all others."""
    return importlib.import_module(f"flashinfer.{name}")


def call_sampling(torch: Any) -> tuple[list[Any], float]:
    """Top-k masks every other token; the softmax is torch's."""
    sampling = flashinfer_module("sampling")
    logits = torch.randn(8, 32000, device="cuda")
    probs = torch.softmax(logits, -1)
    kept = sampling.top_k_renorm_probs(probs, 40)
    chosen = sampling.top_k_sampling_from_probs(probs, 1, deterministic=True)
    values, places = probs.topk(40, -1)
    wanted = torch.zeros_like(probs).scatter(-1, places, values / values.sum(-1, keepdim=True))
    wrong = (chosen.long() != probs.argmax(-1)).sum().item()
    return [kept], (kept - wanted).abs().max().item() + wrong


def call_norm(torch: Any) -> tuple[list[Any], float]:
    """RMSNorm against its formula in float32."""
    x = torch.randn(64, 7168, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(7168, device="cuda", dtype=torch.bfloat16)
    out = flashinfer_module("norm").rmsnorm(x, weight, 1e-6)
    exact = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    return [out], ((out.float() - exact).abs() / (exact.abs() + 1)).max().item()


def call_activation(torch: Any) -> tuple[list[Any], float]:
    """SiLU times the other half."""
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    out = flashinfer_module("activation").silu_and_mul(x)
    gate, up = x.float().chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    return [out], ((out.float() - exact).abs() / (exact.abs() + 1)).max().item()


def call_rope(torch: Any) -> tuple[list[Any], float]:
    """Rotation by a table, in place, as vLLM and SGLang call it."""
    tokens, heads = 32, 8
    angles = torch.arange(256, device="cuda")[:, None] * 10000 ** (
        -torch.arange(0, HEAD, 2, device="cuda") / HEAD
    )
    table = torch.cat([angles.cos(), angles.sin()], -1).float()
    q = torch.randn(tokens, heads * HEAD, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(tokens, HEAD, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(tokens, device="cuda") * 3
    halves = q.float().view(tokens, heads, HEAD).chunk(2, -1)
    cos, sin = (each[:, None, :] for each in table[positions].chunk(2, -1))
    exact = torch.cat(
        [halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin], -1
    ).view(tokens, -1)
    flashinfer_module("rope").apply_rope_with_cos_sin_cache_inplace(positions, q, k, HEAD, table)
    return [q, k], ((q.float() - exact).abs() / (exact.abs() + 1)).max().item()


def call_page(torch: Any) -> tuple[list[Any], float]:
    """Appended keys and values lie where the page table says."""
    size, heads, tokens = 16, 2, 40
    cache = torch.zeros(4, 2, size, heads, HEAD, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, tokens, heads, HEAD, device="cuda", dtype=torch.bfloat16)
    pages = torch.tensor([2, 0, 3], device="cuda", dtype=torch.int32)

    def whole(*numbers: int) -> Any:
        return torch.tensor(numbers, device="cuda", dtype=torch.int32)

    flashinfer_module("page").append_paged_kv_cache(
        *(keys, values, torch.zeros(tokens, device="cuda", dtype=torch.int32)),
        torch.arange(tokens, device="cuda", dtype=torch.int32),
        *(cache, pages, whole(0, 3), whole(tokens - 2 * size)),
    )
    for which, wanted in enumerate((keys, values)):
        found = cache[pages.long(), which].reshape(-1, heads, HEAD)[:tokens]
        if not torch.equal(found, wanted):
            return [cache], float("inf")
    return [cache], 0.0


def call_decode(torch: Any) -> tuple[list[Any], float]:
    """One query against a cache, in groups of heads."""
    q = torch.randn(32, HEAD, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 777, 8, HEAD, device="cuda", dtype=torch.bfloat16)
    out = flashinfer_module("decode").single_decode_with_kv_cache(q, k, v)
    keys, values = (each.float().repeat_interleave(4, 1) for each in (k, v))
    share = torch.einsum("hd,nhd->hn", q.float(), keys).mul(HEAD**-0.5).softmax(-1)
    exact = torch.einsum("hn,nhd->hd", share, values)
    return [out], (out.float() - exact).abs().max().item()


# with the largest difference from torch that the type of numbers explains
CALLS: dict[str, tuple[Callable[[Any], tuple[list[Any], float]], float]] = {
    "sampling": (call_sampling, 1e-4),
    "norm": (call_norm, 2e-2),
    "silu_and_mul": (call_activation, 2e-2),
    "rope": (call_rope, 2e-2),
    "page": (call_page, 0.0),
    DECODE: (call_decode, 2e-2),
}


def call_on_card(site: str, name: str, result: str) -> None:
    """One function on the card, in this process: the time of its first call, and its numbers."""
    start = time.monotonic()
    import torch

    sys.modules["gate_worker"] = types.ModuleType("gate_worker")
    sys.modules["gate_worker"].__path__ = [str(GATE_WORKER)]
    stand_ins: Any = importlib.import_module("gate_worker.stand_ins")
    lacking = [each for each in UNUSED if importlib.util.find_spec(each) is None]
    sys.meta_path.append(stand_ins.StandIns(lacking))
    sys.path.insert(0, site)
    package = types.ModuleType("flashinfer")
    package.__path__ = [str(Path(site) / "flashinfer")]
    sys.modules["flashinfer"] = package
    package.__dict__["__version__"] = importlib.import_module("flashinfer.version").__version__
    torch.manual_seed(SEED)
    torch.zeros(1, device="cuda")
    function, _ = CALLS[name]
    importlib.import_module("flashinfer.jit")
    ready = time.monotonic()
    numbers, difference = function(torch)
    torch.cuda.synchronize()
    seconds = {"imports": ready - start, "seconds": time.monotonic() - ready}
    made = [each.float().cpu() for each in numbers]
    torch.save({**seconds, "difference": difference, "numbers": made}, result)


def called(work: Path, name: str, way: str, arch: str, **more: str) -> dict[str, Any]:
    """Calls one function in a new process with a new home; what it took, or why it failed."""
    import torch

    env = {**environment(work, f"{way}-{name}"), "FLASHINFER_CUDA_ARCH_LIST": arch}
    if way != "cold":
        env |= {"FLASHINFER_DISABLE_JIT": "1", "SM120_WARM": str(work / "warm")}
        env["PYTHONPATH"] = f"{work / 'reader'}:{env['PYTHONPATH']}"
        env["PATH"] = f"{work / 'no-compilers'}:{env['PATH']}"
        env["FLASHINFER_NVCC"] = env["CXX"] = str(work / "no-compilers/nvcc")
    out = work / "homes" / f"{way}-{name}.pt"
    words = [sys.executable, __file__, "call", str(work / "site"), name, str(out)]
    done = subprocess.run(words, env={**env, **more}, capture_output=True, check=False)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode:
        own = [line for line in said if line.startswith("sm120:")]
        return {"failed": said[-1:], "said": own}
    row: dict[str, Any] = torch.load(out)
    return row


def must_fail(work: Path, name: str, arch: str) -> dict[str, Any]:
    """Modules that are not what the index says; each call must end in FlashInfer's refusal."""
    warm = work / "warm"
    index = json.loads((warm / "index.json").read_text())
    path = warm / "flashinfer" / name / f"{name}.so"
    whole = path.read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    rows = {}
    for what, data in (("truncated", whole[:half]), ("flipped byte", flipped), ("gone", None)):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        rows[what] = called(work, name, what.replace(" ", "-"), arch)
        path.write_bytes(whole)
    rows["another architecture"] = called(work, name, "other-arch", "8.9")
    modules = {**index["modules"], "flashinfer": "0.0.1"}
    (warm / "index.json").write_text(json.dumps({**index, "modules": modules}))
    rows["another version"] = called(work, name, "other-version", arch)
    (warm / "index.json").write_text(json.dumps(index))
    return {
        what: {"refused": "MissingJITCacheError" in str(row.get("failed")), **row}
        for what, row in rows.items()
    }


def prove(collected: Path, work: Path) -> None:
    """All modules: what was compiled, and what the card made of them; prints and writes JSON."""
    import torch

    begun = time.monotonic()
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}.{minor}a"
    site = unpack_site(collected, work)
    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    for folder, name, text in [
        *(("no-compilers", each, FAILING) for each in ("nvcc", "ninja", "gcc", "c++", "g++")),
        ("reader", READER.name, READER.read_text(encoding="utf-8")),
    ]:
        (work / folder).mkdir(exist_ok=True)
        (work / folder / name).write_text(text, encoding="utf-8")
        (work / folder / name).chmod(0o755)
    with ThreadPoolExecutor(len(MODULES)) as pool:
        ahead = dict(
            zip(MODULES, pool.map(lambda n: compile_ahead(work, n, arch), MODULES), strict=True)
        )
    report["ahead"], report["ahead_s"] = ahead, round(time.monotonic() - begun, 1)
    # at once: a run that is stopped has said this much
    print(json.dumps(report), flush=True)
    version: dict[str, Any] = {}
    exec((site / "flashinfer/_build_meta.py").read_text(encoding="utf-8"), version)
    compiled = {name: row for name, row in ahead.items() if row["ended"] == "compiled"}
    entries = {name: {"sha256": row["sha256"]} for name, row in compiled.items()}
    modules = {"flashinfer": version["__version__"], "architectures": arch, "site": str(site)}
    index = {"modules": {**modules, "entries": entries}}
    (work / "warm/index.json").write_text(json.dumps(index), encoding="utf-8")
    rows: dict[str, Any] = {}
    with ThreadPoolExecutor(len(CALLS)) as pool:
        cold = dict(
            zip(CALLS, pool.map(lambda n: called(work, n, "cold", arch), CALLS), strict=True)
        )
    print("cold calls done after", round(time.monotonic() - begun, 1), "s", flush=True)
    for name, (_, most) in CALLS.items():
        # one after the other: nothing is compiled, and times are not disturbed
        both = {"cold": cold[name], "warm": called(work, name, "warm", arch)}
        pairs = [row.pop("numbers", None) for row in both.values()]
        same = None not in pairs and all(map(torch.equal, *pairs))
        right = all(row.get("difference", float("inf")) <= most for row in both.values())
        rows[name] = {"right": right, "same_numbers": same, "most": most, **both}
    report |= {"calls": rows, "must_fail": must_fail(work, "page", arch)}
    for row in report["must_fail"].values():
        row.pop("numbers", None)
    digests = {
        name: hashlib.sha256((work / "warm/flashinfer" / name / f"{name}.so").read_bytes())
        for name in compiled
    }
    report["unchanged"] = all(d.hexdigest() == entries[n]["sha256"] for n, d in digests.items())
    good = all(row["right"] and row["same_numbers"] for row in rows.values())
    report["proved"] = good and all(row["refused"] for row in report["must_fail"].values())
    report["seconds"] = round(time.monotonic() - begun, 1)
    text = json.dumps(report, indent=1)
    (work / "report.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "call":
        call_on_card(*words)
    elif verb == "collect":
        collect(Path(words[0]))
    else:
        prove(*map(Path, words))
