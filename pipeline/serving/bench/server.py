"""The server beside the load: its facts, how it counts tokens, whether it is idle, its samples.

vLLM always has /metrics, SGLang with --enable-metrics, llama.cpp with --metrics. The cards are read
with nvidia-smi: power, clocks, what slows them, memory, and the PCIe link.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from pipeline.core import log, proc
from pipeline.core.errors import BenchUnanswered
from pipeline.core.foreign_json import JsonInvalid, read_json, value_at
from pipeline.core.known import Known, Unknown, then, unknown
from pipeline.core.model import Frozen
from pipeline.core.net.wire import Address, AnswerLost, Raw, send
from pipeline.core.yaml_file import read_yaml
from pipeline.hosts.facts.model import Gpu
from pipeline.hosts.facts.smi import read_gpus, read_smi_log, text_at
from pipeline.serving.bench.model import Engine, EngineSeries, GpuSeries, Samples, ServerFacts
from pipeline.serving.bench.plan import TokenScale, fit_scale, unique_text

Value = TypeVar("Value")
_LINE = re.compile(r"^([a-z_]+:[a-zA-Z0-9_:]+)(?:\{[^}]*\})? ([-+0-9.eE]+)", re.M)
# By the names with which their metrics begin.
ENGINES: dict[str, Engine] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}


class _EngineMetrics(Frozen):
    """`engine_metrics.yaml`: our names, and the engines' names for them."""

    gauges: dict[str, list[str]]
    counters: dict[str, list[str]]
    settings: list[str]


_METRICS = read_yaml(Path(__file__).with_name("engine_metrics.yaml"), _EngineMetrics)
GAUGES = _METRICS.gauges
# No slowdown: clocks that an administrator set on purpose.
_HARMLESS = ("applications_clocks_setting", "display_clocks_setting")
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
# Who a list of models says that it is owned by; the last is our own stub.
_OWNERS: dict[str, Engine] = {**ENGINES, "sm120": "stub"}
_SMI_LIMIT_S = 10.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class MetricsReading(NamedTuple):
    """One answer of /metrics: every name with its sum over all labels, and with its highest."""

    sums: Mapping[str, float]
    most: Mapping[str, float]

    @property
    def engine(self) -> Engine | None:
        prefixes = {name.split(":")[0] for name in self.sums}
        return next((engine for p, engine in ENGINES.items() if p in prefixes), None)

    def gauge(self, name: str) -> float | None:
        """A gauge by our name."""
        # a share is not added up over replicas
        table = self.most if name in ("kv_use", "acceptance") else self.sums
        return next((table[each] for each in GAUGES[name] if each in table), None)

    def counters(self) -> dict[str, float]:
        """The counters by our names, as far as the engine has them."""
        known = {
            name: [n for n in theirs if n in self.sums]
            for name, theirs in _METRICS.counters.items()
        }
        return {name: self.sums[theirs[0]] for name, theirs in known.items() if theirs}

    @property
    def busy(self) -> float | None:
        """Requests that run or wait."""
        running, waiting = self.gauge("running"), self.gauge("waiting")
        return None if running is None else running + (waiting or 0.0)


class CardReading(NamedTuple):
    """One card at one time."""

    gpu: Gpu
    temperature_c: float | None
    memory_used_bytes: int | None
    utilization_percent: float | None


def _plain(value: Known[Value]) -> Value | None:
    return None if isinstance(value, Unknown) else value


@dataclass
class MeasuredServer:
    """One address, which answers small questions between trials."""

    address: Address
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    has_metrics: bool = True
    lost: str = ""  # why the last missing answer did not come

    def _ask(self, method: str, path: str, body: bytes, limit_s: float) -> Raw | None:
        headers, self.lost = {"Content-Type": "application/json", **self.headers}, ""
        sent = self.address, method, path, body, headers
        try:
            return asyncio.run(send(*sent, limit_s=limit_s, most_bytes=_MOST_BYTES))
        except AnswerLost as error:
            self.lost = str(error)
        except asyncio.LimitOverrunError:
            self.lost = "the answer cannot be read: a chunk of it has no size"
        return None

    def get_json(self, path: str) -> Any:
        """The JSON of an answer with status 200; none if there is no such answer."""
        raw = self._ask("GET", path, b"", _LIMIT_S)
        return _json(raw) if raw and raw.status == 200 else None

    def metrics(self) -> MetricsReading | None:
        """Reads /metrics now; never again from a server that has none."""
        raw = self._ask("GET", "/metrics", b"", _LIMIT_S) if self.has_metrics else None
        if raw is None or raw.status != 200:
            return None
        sums: dict[str, float] = {}
        most: dict[str, float] = {}
        for name, number in _LINE.findall(raw.data.decode(errors="replace")):
            try:
                value = float(number)
            except ValueError:
                continue
            sums[name] = sums.get(name, 0.0) + value
            most[name] = max(most.get(name, value), value)
        reading = MetricsReading(sums, most)
        return reading if reading.engine else None

    def scale(
        self, model: str, seed: int, limit_s: float = 600.0, context: int | None = None
    ) -> TokenScale:
        """Measures how long prompts must be, by the server's own count.

        It sends the same texts for the same seed: two runs of a workload aim alike.
        """

        def counted(words: int, texts: int) -> tuple[int, float]:
            found = []
            for number in range(texts):
                text = unique_text(f"{seed} scale {words} {number}", words)
                asked = {"max_tokens": 1, "messages": [{"role": "user", "content": text}]}
                body = json.dumps({"model": model, **asked}).encode()
                raw = self._ask("POST", "/v1/chat/completions", body, limit_s)
                tokens = value_at(_json(raw) if raw else None, "usage", "prompt_tokens")
                if not isinstance(tokens, int) or tokens < 1:
                    why = self.lost
                    if raw:
                        text = log.redacted(" ".join(raw.data.decode(errors="replace").split()))
                        why = f"{raw.status}: {text[:_SHOWN_CHARS]}"
                    raise BenchUnanswered(
                        f"{self.url}: gives no answer with a count of prompt tokens ({why})",
                        "Ask it for one answer, as `sm120 smoke URL --up-to first-answer` does.",
                    )
                found.append(tokens)
            return words, fmean(found)

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
        """Wait for all requests to end; return whether they did, and how long it took.

        A server without metrics does not show that: it gets a moment of rest.
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


def server_facts(server: MeasuredServer, model: str | None) -> ServerFacts:
    """What a server says of itself; the model is the first that it has, unless one is named."""
    models = server.get_json("/v1/models")
    data = value_at(models, "data")
    entries = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    if not entries and models is None and server.lost:
        raise BenchUnanswered(f"{server.url}: {server.lost}")
    if not entries:
        hint = "Name the address of an engine that answers at /v1/models."
        raise BenchUnanswered(f"{server.url}: has no list of models", hint)
    entry = next((each for each in entries if each.get("id") == model), entries[0])
    reading = server.metrics()
    server.has_metrics = reading is not None
    # only SGLang has the first, only llama.cpp the second
    info = server.get_json("/get_server_info")
    info = info if isinstance(info, dict) else None
    props = None if info is not None else server.get_json("/props")
    engine = (reading.engine if reading else None) or ("sglang" if info is not None else None)
    engine = engine or _OWNERS.get(str(entry.get("owned_by", "")))
    engine = engine or ("llama.cpp" if isinstance(props, dict) else None)
    version = value_at(info, "version") or value_at(props, "build_info")
    version = version or value_at(server.get_json("/version"), "version")
    context = value_at(props, "default_generation_settings", "n_ctx")
    contexts = (entry.get("max_model_len"), value_at(info, "context_length"), context)
    settings = {name: str(info[name]) for name in _METRICS.settings if info and name in info}
    if not settings and isinstance(slots := value_at(props, "total_slots"), int):
        settings = {"total_slots": str(slots)}  # of llama.cpp, how many requests share the cache
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
        settings=settings,
    )


@dataclass
class Sampler:
    """A thread that samples the engine and the cards until its block ends."""

    server: MeasuredServer
    every_s: float = 1.0
    engine: list[tuple[float, MetricsReading]] = field(default_factory=list)
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
        text = answer.stdout.decode(errors="replace")
        gpus, root = read_gpus(text, unknown("not asked for")), read_smi_log(text)
        if isinstance(gpus, Unknown):
            return self._give_cards_up(gpus.unknown)
        assert not isinstance(root, Unknown)  # `read_gpus` has read it
        cards = []
        for gpu, card in zip(gpus, root.findall("gpu"), strict=True):
            paths = ("temperature/gpu_temp", "fb_memory_usage/used", "utilization/gpu_util")
            # such as `61 C`, `1024 MiB` and `98 %`
            values = [
                then(text_at(card, path), lambda text: float(text.split()[0])) for path in paths
            ]
            celsius, mebibytes, percent = (_plain(value) for value in values)
            used = None if mebibytes is None else int(mebibytes) << 20
            cards.append(CardReading(gpu, celsius, used, percent))
        self.cards.append((at, cards))

    def _give_cards_up(self, why: str) -> None:
        self._smi = None
        self.absent.append(f"GPUs: {' '.join(why.split())[:200]}")

    def samples(self) -> Samples:
        """One series for each card and one for the engine, with the rise of each counter."""
        engine, gpus = None, []
        if self.engine:
            first, last = self.engine[0][1].counters(), self.engine[-1][1].counters()
            gauges = {name: [reading.gauge(name) for _, reading in self.engine] for name in GAUGES}
            if not any(value is not None for value in gauges["acceptance"]):
                gauges["acceptance"] = []
            # a counter that fell belongs to an engine that was started anew
            rises = {n: last[n] - value for n, value in first.items() if last.get(n, -1) >= value}
            at_s = [round(at, 3) for at, _ in self.engine]
            engine = EngineSeries(at_s=at_s, counters=rises, **gauges)
        # a card that got lost ends all series: later readings have fewer cards
        known = len(self.cards[0][1]) if self.cards else 0
        whole = [(at, each) for at, each in self.cards if len(each) == known]
        for index in range(known):
            cards = [each[index] for _, each in whole]
            gpu, slowed = cards[0].gpu, [_plain(card.gpu.slowed_by) or [] for card in cards]
            gpus.append(
                GpuSeries(
                    index=gpu.index,
                    name=_plain(gpu.name) or "unknown",
                    uuid=_plain(gpu.uuid) or "",
                    at_s=[round(at, 3) for at, _ in whole],
                    power_w=[_plain(card.gpu.power.draw_w) for card in cards],
                    sm_clock_mhz=[_plain(card.gpu.clocks.sm_mhz) for card in cards],
                    memory_clock_mhz=[_plain(card.gpu.clocks.memory_mhz) for card in cards],
                    temperature_c=[card.temperature_c for card in cards],
                    memory_used_bytes=[card.memory_used_bytes for card in cards],
                    utilization_percent=[card.utilization_percent for card in cards],
                    throttle=[[why for why in each if why not in _HARMLESS] for each in slowed],
                    pcie_generation=[_plain(card.gpu.link.generation) for card in cards],
                    pcie_width=[_plain(card.gpu.link.width) for card in cards],
                    pcie_generation_most=_plain(gpu.link.generation_max),
                    pcie_width_most=_plain(gpu.link.width_max),
                    pcie_replays=[_plain(card.gpu.link.replays) for card in cards],
                )
            )
        return Samples(gpus=gpus, engine=engine, absent=list(self.absent))
