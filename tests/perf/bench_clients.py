"""Load clients side by side: the same stub, the same load, each in an environment of its own.

Every one of them is told the same: so many streams, prompts and answers of a hundred tokens. The
stub knows when it wrote each token; what a client reports is compared with that. CPU is of the
client's whole process tree; a run with few requests tells how much of it was its start, which is
subtracted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.serving.bench.self_test import stub, truth
from tests.perf.measure import Cost, Report, in_turns, run, spread

ROOT = Path(__file__).resolve().parents[2]
_STREAMS, _TOKENS = 256, 100
_MANY, _FEW = 1024, 256
_TTFT_S, _TPOT_S = 0.2, 0.02
_WORDS = "perf/words"
_COMMIT = "a" * 40
Reading = tuple[float, float]


@dataclass(frozen=True)
class Client:
    """A load client: what it needs, how it is called, and where it says what it read."""

    name: str
    packages: Sequence[str]
    command: Callable[[Path, int, Path, int], list[str]]
    read: Callable[[Path], Reading]
    # packages that it imports but whose own dependencies it does not need to send requests
    bare_packages: Sequence[str] = ()


def _ours(programs: Path, port: int, out: Path, requests: int) -> list[str]:
    load = ["--concurrency", str(_STREAMS), "--requests", str(requests), "--repeats", "1"]
    lengths = ["--input-tokens", str(_TOKENS), "--output-tokens", str(_TOKENS), "--no-self-test"]
    url = f"http://127.0.0.1:{port}"
    return [str(programs / "sm120"), "bench", url, *load, *lengths, "--output", str(out)]


def _read_ours(out: Path) -> Reading:
    value = _json(out / "quick" / "bench.json")["cells"][0]["trials"][0]["metrics"]
    return value["ttft_ms"]["mean"], value["tpot_ms"]["mean"]


def _aiperf(programs: Path, port: int, out: Path, requests: int) -> list[str]:
    return [
        *(str(programs / "aiperf"), "profile", "-m", "stub", "--endpoint-type", "chat"),
        *("--url", f"http://127.0.0.1:{port}", "--streaming", "--tokenizer", _WORDS),
        *("--concurrency", str(_STREAMS), "--request-count", str(requests)),
        *("--synthetic-input-tokens-mean", str(_TOKENS), "--output-tokens-mean", str(_TOKENS)),
        *("--artifact-dir", str(out), "--ui", "none"),
    ]


def _read_aiperf(out: Path) -> Reading:
    value = _json(next(out.rglob("profile_export_aiperf.json")))
    return value["time_to_first_token"]["avg"], value["inter_token_latency"]["avg"]


def _guidellm(programs: Path, port: int, out: Path, requests: int) -> list[str]:
    backend = f"kind=openai_http,target=http://127.0.0.1:{port},model=stub"
    data = f"kind=synthetic_text,prompt_tokens={_TOKENS},output_tokens={_TOKENS}"
    return [
        *(str(programs / "guidellm"), "run", "--backend", backend, "--data", data),
        *("--profile", f"kind=concurrent,streams={_STREAMS}", "--disable-console"),
        *("--constraint", f"kind=max_requests,count={requests}"),
        *("--tokenizer", f"kind=hf_auto,model={_WORDS}"),
        *("--output", f"kind=json,path={out / 'guidellm.json'}"),
    ]


def _read_guidellm(out: Path) -> Reading:
    metrics = _json(out / "guidellm.json")["benchmarks"][0]["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]["mean"]
    return ttft, metrics["inter_token_latency_ms"]["successful"]["mean"]


def _sglang(programs: Path, port: int, out: Path, requests: int) -> list[str]:
    return [
        *(str(programs / "python"), "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", f"http://127.0.0.1:{port}", "--model", "stub", "--tokenizer", _WORDS),
        *("--dataset-name", "random-ids", "--random-range-ratio", "1"),
        *("--random-input-len", str(_TOKENS), "--random-output-len", str(_TOKENS)),
        *("--num-prompts", str(requests), "--max-concurrency", str(_STREAMS)),
        *("--warmup-requests", "0", "--disable-tqdm", "--output-file", str(out / "sglang.jsonl")),
    ]


def _read_sglang(out: Path) -> Reading:
    value = _json(out / "sglang.jsonl")
    return value["mean_ttft_ms"], value["mean_tpot_ms"]


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


OURS = Client("sm120 bench", [f"{ROOT}[bench]"], _ours, _read_ours)
OTHERS = (
    Client("aiperf", ["aiperf"], _aiperf, _read_aiperf),
    Client("guidellm", ["guidellm"], _guidellm, _read_guidellm),
    Client(
        "sglang",
        [
            *("aiohttp", "numpy", "requests", "tqdm", "transformers", "pybase64", "pillow"),
            *("torch", "torchvision", "datasets", "setproctitle", "psutil", "pydantic", "orjson"),
            *("fastapi", "uvloop", "msgspec", "pyzmq", "ipython", "apache-tvm-ffi", "gguf"),
            *("sentencepiece", "compressed_tensors"),
        ],
        _sglang,
        _read_sglang,
        bare_packages=["sglang"],
    ),
)


def compare_clients(report: Report, scratch: Path, environments: Path, turns: int) -> None:
    """Time and CPU for further requests, and how wrong TTFT and TPOT are read, of each."""
    home = _tokenizer_home(scratch / "hub")
    able = []
    for client in (OURS, *OTHERS):
        try:
            # a first start reads its files from the disk, which costs CPU time as well
            _run(client, environments, scratch / "first", home, _FEW)
        except (OSError, SystemExit, StopIteration, LookupError, ValueError) as error:
            report.fact(f"load client {client.name}, not measured", str(error))
        else:
            able.append(client)
    loads: dict[str, list[_Load]] = {client.name: [] for client in able}

    def further(client: Client) -> Cost:
        turn = scratch / f"turn-{len(loads[client.name])}"
        few = _run(client, environments, turn, home, _FEW)
        loads[client.name].append(many := _run(client, environments, turn, home, _MANY))
        cost = many.cost
        return Cost(cost.wall_s - few.cost.wall_s, cost.cpu_s - few.cost.cpu_s)

    costs = in_turns(turns, *(partial(further, client) for client in able))
    for client, theirs in zip(able[1:], costs[1:], strict=True):
        title = f"{_MANY - _FEW} further requests of {_TOKENS} tokens at {_STREAMS} streams"
        report.compare(f"bench: {title}", costs[0], client.name, theirs)
    for name, found in loads.items():
        ttft = spread([100 * load.ttft_error for load in found], " %", 1)
        tpot = spread([100 * load.tpot_error for load in found], " %", 1)
        report.fact(f"{name}, error of what it reads", f"TTFT {ttft}, TPOT {tpot}")


@dataclass(frozen=True)
class _Load:
    """One run of a client."""

    cost: Cost
    ttft_error: float
    tpot_error: float


def _run(client: Client, environments: Path, scratch: Path, home: Path, requests: int) -> _Load:
    programs = _environment(client, environments)
    out = scratch / f"{client.name.replace(' ', '-')}-{requests}"
    out.mkdir(parents=True)
    env = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with stub(_TTFT_S, _TPOT_S) as (port, process):
        cost = run(client.command(programs, port, out, requests), env=env, cwd=scratch)
        true: Mapping[str, float] = truth(process)
    ttft, tpot = client.read(out)
    ttft_error, tpot_error = ttft / true["ttft_ms"] - 1, tpot / true["tpot_ms"] - 1
    return _Load(cost, ttft_error, tpot_error)


def _environment(client: Client, environments: Path) -> Path:
    """Made once; what is there is used as it is."""
    folder = environments / client.name.replace(" ", "-")
    python = folder / "bin" / "python"
    if not python.exists():
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "-q", str(folder)], check=True)
        install = [*uv, "pip", "install", "-q", "-p", str(python)]
        subprocess.run([*install, *client.packages], check=True)
        if client.bare_packages:
            subprocess.run([*install, "--no-deps", *client.bare_packages], check=True)
    return folder / "bin"


def _tokenizer_home(home: Path) -> Path:
    """A tokenizer of made-up words in a cache of the Hub, as clients look for one."""
    folder = home / "hub" / f"models--{_WORDS.replace('/', '--')}"
    snapshot = folder / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(_COMMIT, encoding="ascii")
    vocabulary = {"<unk>": 0, **{f"w{number}": number for number in range(1, 8000)}}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<unk>"),
    }
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    for name, value in {**files, "config.json": {"model_type": "gpt2"}}.items():
        (snapshot / name).write_text(json.dumps(value), encoding="utf-8")
    return home
