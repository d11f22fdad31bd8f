"""The server beside the load: its facts, how it counts tokens, whether it is idle, its samples."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pipeline.core import log, proc
from pipeline.core.errors import BenchUnanswered
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.known import Unknown
from pipeline.core.net.wire import Address, Lost, Raw, send
from pipeline.serving.bench.model import Engine, Samples, ServerFacts
from pipeline.serving.bench.plan import Scale, fit_scale, unique_text
from pipeline.serving.bench.samples import (
    ENGINES,
    CardReading,
    Reading,
    engine_series,
    gpu_series,
    read_cards,
    read_metrics,
)

_LIMIT_S = 10.0
_MOST_BYTES = 16 << 20
# Prompts of two lengths tell the tokens of a word from those of the chat template: (words, how many
# texts). Words differ in length, so that a few texts of a few words would say little.
_FEW, _MANY = (20, 4), (400, 1)
# With the letters of a tiny model as tokens, 400 words do not fit into its 512.
_SHORT_FEW, _SHORT_MANY = (12, 12), (36, 12)
# A prompt that a server cuts off to fit into its context is counted too short.
_CONTEXT_SHARE = 0.9
_SHOWN_CHARS = 200
# What tells how a server was started, of all that SGLang reports.
_SETTINGS = (
    *("quantization", "attention_backend", "kv_cache_dtype", "tp_size", "dp_size", "ep_size"),
    *("context_length", "mem_fraction_static", "disable_cuda_graph", "chunked_prefill_size"),
    *("speculative_algorithm", "speculative_num_steps", "moe_runner_backend"),
)
# Who a list of models says that it is owned by; the last is our own stub.
_OWNERS: dict[str, Engine] = {**ENGINES, "sm120": "stub"}
_SMI_LIMIT_S = 10.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class Server:
    """One address, asked small things between trials."""

    address: Address
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    has_metrics: bool = True
    lost: str = ""  # why the last answer that did not come did not

    def _ask(self, method: str, path: str, body: bytes, limit_s: float) -> Raw | None:
        headers, self.lost = {"Content-Type": "application/json", **self.headers}, ""
        sent = self.address, method, path, body, headers
        try:
            return asyncio.run(send(*sent, limit_s=limit_s, most_bytes=_MOST_BYTES))
        except Lost as error:
            self.lost = str(error)
        except asyncio.LimitOverrunError:
            self.lost = "the answer cannot be read: a chunk of it has no size"
        return None

    def get_json(self, path: str) -> Any:
        """An answer with status 200 as JSON; none where there is none."""
        raw = self._ask("GET", path, b"", _LIMIT_S)
        return _json(raw) if raw and raw.status == 200 else None

    def metrics(self) -> Reading | None:
        """The answer of /metrics now; a server that has none is not asked again."""
        raw = self._ask("GET", "/metrics", b"", _LIMIT_S) if self.has_metrics else None
        if raw is None or raw.status != 200:
            return None
        reading = read_metrics(raw.data.decode(errors="replace"))
        return reading if reading.engine else None

    def count_tokens(self, model: str, words: int, key: str, limit_s: float) -> int:
        """How many tokens the server counts in a prompt of so many words."""
        messages = [{"role": "user", "content": unique_text(key, words)}]
        body = json.dumps({"model": model, "max_tokens": 1, "messages": messages}).encode()
        raw = self._ask("POST", "/v1/chat/completions", body, limit_s)
        tokens = _at(_json(raw) if raw else None, "usage", "prompt_tokens")
        if isinstance(tokens, int) and tokens >= 1:
            return tokens
        why = self.lost
        if raw:
            text = log.redacted(" ".join(raw.data.decode(errors="replace").split()))
            why = f"{raw.status}: {text[:_SHOWN_CHARS]}"
        raise BenchUnanswered(
            f"{self.url}: gives no answer with a count of prompt tokens ({why})",
            "Ask it for one answer, as `sm120 smoke URL --up-to first-answer` does.",
        )

    def scale(
        self, model: str, seed: int, limit_s: float = 600.0, context: int | None = None
    ) -> Scale:
        """How long prompts must be, by the server's own count.

        The same texts for the same seed: two runs of a workload aim alike.
        """

        def counted(words: int, texts: int) -> tuple[int, float]:
            keys = [f"{seed} scale {words} {number}" for number in range(texts)]
            return words, fmean(self.count_tokens(model, words, key, limit_s) for key in keys)

        try:
            few, many = counted(*_FEW), counted(*_MANY)
        except BenchUnanswered:
            # one that answered may find it too long; one that did not will not answer less either
            if self.lost:
                raise
        else:
            if context is None or many[1] < _CONTEXT_SHARE * context:
                return fit_scale(few, many)
        return fit_scale(counted(*_SHORT_FEW), counted(*_SHORT_MANY))

    def wait_until_idle(self, limit_s: float) -> tuple[bool | None, float]:
        """Wait for all requests to end; whether they did, and how long it took.

        Of a server without metrics that is not known: it gets a moment of rest.
        """
        start = time.monotonic()
        while True:
            reading = self.metrics()
            busy = reading.busy if reading else None
            waited = time.monotonic() - start
            if busy is None:
                time.sleep(min(1.0, limit_s))
                return None, time.monotonic() - start
            if busy == 0 or waited > limit_s:
                return busy == 0, waited
            time.sleep(0.1)


def _json(raw: Raw) -> Any:
    try:
        return read_json(raw.data, most_bytes=_MOST_BYTES, any_int=True)
    except JsonInvalid:
        return None


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def server_facts(server: Server, model: str | None) -> ServerFacts:
    """What a server says of itself; the model is the first that it has, unless one is named."""
    models = server.get_json("/v1/models")
    data = _at(models, "data")
    entries = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    if not entries and models is None and server.lost:
        raise BenchUnanswered(f"{server.url}: {server.lost}")
    if not entries:
        raise BenchUnanswered(
            f"{server.url}: has no list of models",
            "Name the address of an engine that answers at /v1/models.",
        )
    entry = next((each for each in entries if each.get("id") == model), entries[0])
    reading = server.metrics()
    server.has_metrics = reading is not None
    # only SGLang has the first, only llama.cpp the second
    info = server.get_json("/get_server_info")
    info = info if isinstance(info, dict) else None
    props = None if info is not None else server.get_json("/props")
    engine = reading.engine if reading else None
    if engine is None:
        owner = _OWNERS.get(str(entry.get("owned_by", "")))
        engine = (
            "sglang"
            if info is not None
            else owner or ("llama.cpp" if isinstance(props, dict) else None)
        )
    version = _at(info, "version") or _at(props, "build_info")
    version = version or _at(server.get_json("/version"), "version")
    contexts = (
        entry.get("max_model_len"),
        _at(info, "context_length"),
        _at(props, "default_generation_settings", "n_ctx"),
    )
    speculation = None
    if info and "speculative_algorithm" in info:
        speculation = info["speculative_algorithm"] is not None
    elif reading and reading.engine == "vllm":
        # vLLM has these counters only where it speculates
        speculation = "drafts" in reading.counters()
    return ServerFacts(
        url=server.url,
        model=model or str(entry.get("id")),
        engine=engine,
        # ik_llama.cpp answers with the number of its interface, which is no version
        version=version[:100] if isinstance(version, str) else None,
        context_tokens=next((v for v in contexts if isinstance(v, int) and v > 0), None),
        speculation=speculation,
        settings={name: str(info[name]) for name in _SETTINGS if info and name in info},
    )


@dataclass
class Sampler:
    """A thread that samples the engine and the cards until its block ends."""

    server: Server
    every_s: float = 1.0
    engine: list[tuple[float, Reading]] = field(default_factory=list)
    cards: list[tuple[float, list[CardReading]]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def __enter__(self) -> Sampler:
        self._stop = threading.Event()
        self._start = time.monotonic()
        self._smi = shutil.which("nvidia-smi")
        if self.server.address.socket or self.server.address.host not in _LOOPBACK:
            self._give_cards_up("the server is on another machine")
        elif self._smi is None:
            self._give_cards_up("nvidia-smi is not installed")
        if not self.server.has_metrics:
            self.absent.append("engine: it has no /metrics, or not in a form that is known")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        if failure[0] is None:
            self._thread.join()
            # counters are compared with those after the last request
            self._look()

    def _run(self) -> None:
        self._look()
        while not self._stop.wait(self.every_s):
            self._look()

    def _look(self) -> None:
        at = time.monotonic() - self._start
        if (reading := self.server.metrics()) is not None:
            self.engine.append((at, reading))
        if not self._smi:
            return
        at = time.monotonic() - self._start
        try:
            answer = proc.read([self._smi, "-q", "-x"], timeout_s=_SMI_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return self._give_cards_up(str(error))
        cards = read_cards(answer.stdout.decode(errors="replace"))
        if isinstance(cards, Unknown):
            self._give_cards_up(cards.unknown)
        else:
            self.cards.append((at, cards))

    def _give_cards_up(self, why: str) -> None:
        self._smi = None
        self.absent.append(f"GPUs: {' '.join(why.split())[:200]}")

    def samples(self) -> Samples:
        """All samples of the trial."""
        engine = engine_series(self.engine)
        return Samples(gpus=gpu_series(self.cards), engine=engine, absent=list(self.absent))
