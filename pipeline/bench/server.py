"""The server beside the load: what it says of itself, how it counts tokens, whether it rests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pipeline import log
from pipeline.bench.engine_metrics import Reading, read_metrics
from pipeline.bench.model import Engine, ServerFacts
from pipeline.bench.prompts import Scale, fit_scale, unique_text
from pipeline.errors import BenchUnanswered
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.smoke.wire import Address, Lost, Raw, send

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


@dataclass
class Server:
    """One address, asked small things between trials."""

    address: Address
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    has_metrics: bool = True
    lost: str = ""  # why the last answer that did not come did not

    def get(self, path: str) -> Raw | None:
        """An answer with status 200; none where there is none."""
        raw = self._ask("GET", path, b"", _LIMIT_S)
        return raw if raw and raw.status == 200 else None

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
        """An answer as JSON; none where it is none."""
        raw = self.get(path)
        return _json(raw) if raw else None

    def metrics(self) -> Reading | None:
        """What /metrics says now; not asked again where there is none."""
        if not self.has_metrics:
            return None
        raw = self.get("/metrics")
        reading = read_metrics(raw.data.decode(errors="replace")) if raw else None
        return reading if reading and reading.engine else None

    def count_tokens(self, model: str, words: int, key: str, limit_s: float) -> int:
        """How many tokens the server counts in a prompt of so many words."""
        body = {
            "model": model,
            "max_tokens": 1,
            "messages": [{"role": "user", "content": unique_text(key, words)}],
        }
        raw = self._ask("POST", "/v1/chat/completions", json.dumps(body).encode(), limit_s)
        value = _json(raw) if raw else None
        tokens = _at(value, "usage", "prompt_tokens")
        if not isinstance(tokens, int) or tokens < 1:
            why = f" ({raw.status}: {_shown(raw.data)})" if raw else f" ({self.lost})"
            raise BenchUnanswered(
                f"{self.url}: gives no answer with a count of prompt tokens{why}",
                "Ask it for one answer, as `sm120 smoke URL --up-to first-answer` does.",
            )
        return tokens

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


def _shown(data: bytes) -> str:
    text: str = log.redacted(" ".join(data.decode(errors="replace").split()))
    return text[:_SHOWN_CHARS]


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
    info = server.get_json("/get_server_info")
    props = None if isinstance(info, dict) else server.get_json("/props")
    return ServerFacts(
        url=server.url,
        model=model or str(entry.get("id")),
        engine=(reading.engine if reading else None) or _engine(entry, info, props),
        version=_version(server, info, props),
        context_tokens=_context(entry, info, props),
        speculation=_speculates(reading, info),
        settings={k: str(info[k]) for k in _SETTINGS if isinstance(info, dict) and k in info},
    )


def _engine(entry: Mapping[str, Any], info: Any, props: Any) -> Engine | None:
    if isinstance(info, dict):
        return "sglang"
    owner = str(entry.get("owned_by", ""))
    known: dict[str, Engine] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
    if owner in known:
        return known[owner]
    if owner == "sm120":
        return "stub"
    return "llama.cpp" if isinstance(props, dict) else None


def _version(server: Server, info: Any, props: Any) -> str | None:
    found = _at(info, "version") or _at(props, "build_info")
    found = found or _at(server.get_json("/version"), "version")
    # ik_llama.cpp answers with the number of its interface, which is no version
    return found[:100] if isinstance(found, str) else None


def _context(entry: Mapping[str, Any], info: Any, props: Any) -> int | None:
    values = (
        entry.get("max_model_len"),
        _at(info, "context_length"),
        _at(props, "default_generation_settings", "n_ctx"),
    )
    return next((v for v in values if isinstance(v, int) and v > 0), None)


def _speculates(reading: Reading | None, info: Any) -> bool | None:
    if isinstance(info, dict) and "speculative_algorithm" in info:
        return info["speculative_algorithm"] is not None
    if reading and reading.engine == "vllm":
        # vLLM has these counters only where it speculates
        return "drafts" in reading.counters()
    return None
