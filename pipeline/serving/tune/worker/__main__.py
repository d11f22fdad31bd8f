"""Times an engine's own mixture-of-experts kernel on this card, a process for each trial.

    python WORKER JOB.json < requests > answers

JOB is what the shared-memory gate gives its worker, with one case that calls the kernel, and the
shape to time it at. Each line of the input is a request, each line of the output its answer. This
process never touches the card; each trial has one of its own, so that a kernel that crashes or
hangs takes nothing along.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

_LONGEST_ANSWER = 1 << 20
# Engines take seconds to import, and some of them take the card then, so that no process can be
# forked for the next trial: as many wait beside the one that works.
_AHEAD = 2
_IMPORT_S = 120.0
_CARD_FIELDS = (
    *("name", "compute_cap", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem"),
    *("temperature.gpu", "power.draw", "power.limit", "clocks_event_reasons.hw_slowdown"),
    *("clocks_event_reasons.hw_thermal_slowdown", "clocks_event_reasons.sw_thermal_slowdown"),
)


def main() -> None:
    """Answers one request after the other, until the input ends."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    waiting: list[subprocess.Popen[bytes]] = []
    for line in sys.stdin:
        while len(waiting) <= _AHEAD:
            waiting.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).parent), sys.argv[1], "--once"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
            )
        request = json.loads(line)
        answer = asked(waiting.pop(0), line.encode(), request["limit_s"])
        print(json.dumps({**answer, "id": request["id"], "card": look_at_card(job)}), flush=True)
    for process in waiting:
        os.killpg(process.pid, signal.SIGKILL)


def once() -> None:
    """Imports the engine, waits for a request, answers it, and ends."""
    # in a session of its own it would outlive a worker that is killed (PR_SET_PDEATHSIG)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # engines print while they are imported; only answers go to where answers are read
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = types.ModuleType("gate_worker")
    worker.__path__ = [job["gate_worker"]]
    sys.modules["gate_worker"] = worker
    names = ("calling", "engines", "stand_ins", "card")
    calling, engines, stand_ins, card_of = (
        importlib.import_module(f"gate_worker.{name}") for name in names
    )
    # the engine's C++ libraries are not loaded: the kernel needs none of them
    card_of.tolerate_missing_operators()
    sys.path.insert(0, job["engine"])
    # torch and Triton are whole
    for name in ("torch", "triton.backends", "triton.runtime"):
        importlib.import_module(name)
    # what the gate's environment has not is stood in for here as well, although the image has it:
    # half an engine with all of its libraries imports as nobody has tried it
    sys.meta_path.insert(0, stand_ins.StandIns(job["absent"]))
    sys.meta_path.insert(0, stand_ins.BarePackages(job["engine"], job["bare"]))
    card = look_at_card(job)
    if card:
        # the driver's word decides which tables the engine reads, and what it calls a new one
        numbers = [int(number) for number in card["compute_cap"].split(".")]
        job["card"] |= {"name": card["name"], "capability": numbers}
    if prepare := engines.PREPARE.get(job["package"]):
        prepare(job["card"])
    engines.find(job["case"]["function"], job["package"])
    print(file=answers, flush=True)
    request = json.loads(sys.stdin.readline() or "{}")
    work = trial if "tokens" in request else describe
    try:
        answer = work(job, request, calling)
    except BaseException as error:  # whatever it is, it is this trial's answer
        answer = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    # no destructors: a broken card would hang in them
    os._exit(0)


def asked(process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> dict[str, Any]:
    """The answer of a waiting process; how it ended, where it gave none."""
    assert process.stdin
    assert process.stdout
    with suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
    # a line once the engine is imported, then the answer
    found, limits = b"", [_IMPORT_S, limit_s]
    while (lines := found.count(b"\n")) < len(limits) and len(found) < _LONGEST_ANSWER:
        deadline = time.monotonic() + limits[lines]
        while found.count(b"\n") == lines and len(found) < _LONGEST_ANSWER:
            wait_s = max(0.0, deadline - time.monotonic())
            if not select.select([process.stdout], [], [], wait_s)[0]:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return {"failed": f"gave no answer in {limits[lines]:g} s"}
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            found += data
        if found.count(b"\n") == lines:
            break
    with suppress(subprocess.TimeoutExpired):
        # what crashed takes a moment to end
        process.wait(timeout=5)
    code = process.poll()
    with suppress(ProcessLookupError):
        # what it started may still compile
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    try:
        answer: dict[str, Any] = json.loads(found.split(b"\n")[1])
    except (ValueError, IndexError):
        how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
        return {"failed": f"its process ended by {how}"}
    return answer


def look_at_card(job: dict[str, Any]) -> dict[str, str]:
    """What the driver says of the card now, and whether it slows it down."""
    command = ["nvidia-smi", "-i", str(job["gpu"]), f"--query-gpu={','.join(_CARD_FIELDS)}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(_CARD_FIELDS, values, strict=False)) if len(values) > 2 else {}


def describe(job: dict[str, Any], request: dict[str, Any], calling: Any) -> dict[str, Any]:
    """What the card and its libraries are, and the engine's own name for a table of this shape."""
    import torch
    import triton

    names = job["case"]["arguments"]["config"]["call"]["function"]
    finder = importlib.import_module("gate_worker.engines").find
    named = finder([f"{n.partition(':')[0]}:get_config_file_name" for n in names], job["package"])
    shape = job["shape"]
    block = [shape["block"]] * 2 if shape["block"] else None
    return {
        "file": named(shape["experts"], shape["width"], shape["dtype"], block),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
    }


def trial(job: dict[str, Any], request: dict[str, Any], calling: Any) -> dict[str, Any]:
    """Times a configuration beside the engine's own choice, in turns, and compares their numbers.

    Both matrix products of a layer with random routing, as one CUDA graph: an engine decodes so.
    """
    import torch

    shape, tokens, case = job["shape"], request["tokens"], job["case"]
    look_up = case["arguments"]["config"]["call"]["arguments"]
    look_up["M"] = {"value": tokens}
    torch.cuda.set_device(0)
    torch.manual_seed(tokens)
    function, made = calling.prepare(case, job["package"])
    default = dict(made["config"])
    config = request["config"] or default
    experts, active = shape["experts"], shape["active"]
    chosen = torch.rand(tokens, experts, device="cuda").topk(active).indices
    weights = torch.rand(tokens, active, device="cuda")
    # gate and up together, then down, whose rows are pairs of a token and an expert
    products = (
        (tokens, active, shape["hidden"], 2 * shape["width"], False),
        (tokens * active, 1, shape["width"], shape["hidden"], True),
    )
    values, side = [], shape["block"]
    for rows, per_token, width, out, _ in products:
        # random, and of a size whose sums stay in range
        made["A"] = torch.randn(rows, width, device="cuda").to(made["A"].dtype)
        own = {"A": made["A"], "C": torch.zeros(rows, per_token, out, dtype=made["C"].dtype).cuda()}
        own["B"] = torch.empty(experts, out, width, dtype=made["B"].dtype, device="cuda")
        for expert in own["B"]:
            # one at a time: random numbers are made in float32
            expert.copy_(torch.randn(out, width, device="cuda") * width**-0.5)
        if side:
            groups = -(-width // side)
            if made.get("A_scale") is not None:
                own["A_scale"] = torch.ones(rows, groups, device="cuda")
            own["B_scale"] = torch.ones(experts, -(-out // side), groups, device="cuda")
        values.append(own)

    def calls(configuration: dict[str, int]) -> list[dict[str, Any]]:
        routed = _routed(chosen, experts, configuration["BLOCK_SIZE_M"])
        return [
            {**made, **own, **routed, "config": dict(configuration), "topk_weights": weights}
            | {"top_k": per_token, "mul_routed_weight": is_weighted}
            for own, (_, per_token, _, _, is_weighted) in zip(values, products, strict=True)
        ]

    def results(configuration: dict[str, int]) -> list[Any]:
        found = []
        for call in calls(configuration):
            call["C"].zero_()
            function(**call)
            found.append(call["C"].float().clone())
        torch.cuda.synchronize()
        return found

    expected, got = results(default), results(config)
    # both add the same products in another order
    errors = [
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
        for a, b in zip(expected, got, strict=True)
    ]
    # what writes nothing agrees with what writes nothing
    is_whole = all(bool(b.isfinite().all() and a.any()) for a, b in zip(expected, got, strict=True))
    timed = dict.fromkeys(("default", "tried"), _captured(function, calls(default)))
    if config != default:
        timed["tried"] = _captured(function, calls(config))
    times: dict[str, list[float]] = {"default": [], "tried": []}
    for turn in range(request["repeats"] + 1):
        for name in ("default", "tried")[:: 1 if turn % 2 else -1]:
            graph, count, _ = timed[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            # the first turn brings the clocks up
            if turn:
                times[name].append(round(1000 * start.elapsed_time(end) / count, 3))
    return {
        "default": default,
        "error": max(errors) if is_whole else None,
        "default_us": times["default"],
        "tried_us": times["tried"],
    }


def _routed(chosen: Any, experts: int, block: int) -> dict[str, Any]:
    """Pairs sorted by expert, each expert's filled up to whole blocks, as the engines do it."""
    import torch

    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    counts = torch.bincount(pairs, minlength=experts)
    padded = (counts + block - 1) // block * block
    starts, own = padded.cumsum(0) - padded, counts.cumsum(0) - counts
    # engines make room for the worst case, and the kernel's blocks beyond the last pair end at once
    room = min(pairs.numel() * block, pairs.numel() + experts * (block - 1))
    owners = pairs[order]
    # a number past the last pair marks rows that only fill their block
    ids = torch.full((room,), pairs.numel(), dtype=torch.int32, device="cuda")
    places = starts[owners] + torch.arange(pairs.numel(), device="cuda") - own[owners]
    ids[places] = order.to(torch.int32)
    used = torch.arange(experts, device="cuda").repeat_interleave(padded // block)
    of_blocks = torch.zeros(-(-room // block), dtype=torch.int32, device="cuda")
    of_blocks[: used.numel()] = used.to(torch.int32)
    return {
        "sorted_token_ids": ids,
        "expert_ids": of_blocks,
        "num_tokens_post_padded": padded.sum().to(torch.int32).reshape(1),
    }


def _captured(function: Any, calls: list[dict[str, Any]]) -> tuple[Any, int, Any]:
    """A graph of so many rounds of the calls that their time can be measured; and the calls.

    Who drops the calls gives their memory to others, and the graph works on what they write there.
    """
    import torch

    def round_once() -> None:
        for call in calls:
            function(**{**call, "config": dict(call["config"])})

    round_once()
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(3):
        round_once()
    torch.cuda.synchronize()
    count = max(1, min(50, round(3 * 0.005 / (time.monotonic() - start))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            round_once()
    return graph, count, calls


if __name__ == "__main__":
    once() if sys.argv[2:] == ["--once"] else main()
