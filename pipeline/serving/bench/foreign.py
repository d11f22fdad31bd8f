"""Results of vLLM's, SGLang's and aiperf's benchmarks, for a look side by side.

A number of theirs counts as one of ours only if both are defined alike; otherwise it keeps its own
name, and we name the difference. A file may be hostile: everything is bounded.

- `vllm bench serve --save-result`, also appended, and the folders of `vllm bench sweep`: read in
  vllm/benchmarks/serve.py, lib/endpoint_request_func.py and sweep/serve.py of vllm-project/vllm. A
  result is one flat object; a sweep keeps each as `run=N.json` and all of a combination as a list
  in `summary.json`, with `run_number` and the swept parameters added.
- `sglang.bench_serving --output-file`, a line of JSON for each run: read in
  python/sglang/benchmark/serving.py of sgl-project/sglang. It writes its default rate as
  `Infinity`, which is no JSON.
- aiperf's `profile_export_aiperf.json`, for each metric an object of statistics and its unit: read
  in docs/reference/json-export-schema.md and docs/metrics-reference.md of ai-dynamo/aiperf.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pipeline.artifacts.attest.strict import plain
from pipeline.core.errors import RunInvalid
from pipeline.core.files import read_plain
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Digest, Frozen, sha256_of
from pipeline.core.yaml_file import read_yaml

Program: TypeAlias = Literal["vllm bench", "sglang.bench_serving", "aiperf"]
# A file may hold every text and gap of thousands of requests.
_MOST_BYTES = 64 << 20
_MOST_RESULTS = 10_000  # lines of a file, or runs of a sweep
_SWEEP = "run=*.json"
_HINT = (
    "A RUN is a folder that `sm120 bench` made: it holds bench.json. Of other programs, sm120 reads"
    " results of vllm bench serve and sweep, sglang.bench_serving and aiperf."
)
_AIPERF_FILE = "profile_export_aiperf.json"
# A run may name hundreds of settings, and a hostile file may name millions.
_MOST_SETTINGS = 200
_MOST_TEXT = 200
_LARGEST = 1e18  # of anything that is measured; squares of it are still numbers
_QUANTILES = {"mean": "mean", "avg": "mean", "median": "p50", "p50": "p50"}
_QUANTILES |= {name: name for name in ("p90", "p95", "p99")}
_STATISTIC = re.compile(r"(mean|median|p\d+(?:\.\d+)?)_(\w+)_ms")


class ForeignNumber(Frozen):
    """One number; several values where the program repeated the measurement."""

    name: str  # as its program calls it
    values: list[float]
    like: str | None = None  # the nearest metric of ours, such as `ttft_ms.p99`
    difference: str = ""  # how its definition differs from that one; empty: not at all

    @property
    def ours(self) -> str | None:
        """The metric of ours that it may be compared with."""
        return self.like if not self.difference else None


class ForeignCell(Frozen):
    """One step of a foreign benchmark."""

    name: str  # as our cells are called, where it has a concurrency or a rate
    settings: dict[str, str]
    numbers: list[ForeignNumber]


class ForeignRun(Frozen):
    """The results in a file or folder of another program."""

    program: Program
    file: str
    digest: Digest
    cells: list[ForeignCell]


class _Rule(Frozen):
    """Which metric of ours a number is nearest to, and how their definitions differ."""

    ours: str | None = None
    difference: str = ""
    of_tokens: bool = False


class _ForeignMetrics(Frozen):
    """`foreign_metrics.yaml`: by program and name."""

    vllm: dict[str, _Rule]
    sglang: dict[str, _Rule]
    aiperf: dict[str, _Rule]


_METRICS = read_yaml(Path(__file__).with_name("foreign_metrics.yaml"), _ForeignMetrics)
_VLLM_ROLE = (
    "begins with the first chunk that has a choice; over the chat API that one carries the role"
    " and no text"
)
_VLLM_END = "ends with the last chunk that has a choice, ours with the answer's last byte"
_SGLANG_CONNECTS = "also has the time to connect: each request opens a connection of its own"
_SGLANG_END = "ends with the last line of the answer, ours with the last event that has text"
_SGLANG_ASKED = "takes the tokens that were asked for where the stream has no usage"
_SGLANG_INPUT = "counts prompt tokens with its own tokenizer"
_SGLANG_SHARED = "is divided by the tokens of a chunk, once for each of them"
# These read the engine's own count of tokens, and divide a gap by the tokens it brought.
_SGLANG_NATIVE = ("sglang", "sglang-native")

_STATISTICS = ("avg", "p50", "p90", "p95", "p99")
_AIPERF_TOKENS = "counts tokens with its own tokenizer (--use-server-token-count was not given)"
_MS_PER_UNIT = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3}


def _flat_cell(program: Program, result: dict[str, Any]) -> ForeignCell:
    """A flat object of vLLM or SGLang: numbers that a rule knows; all other values are settings."""
    rules = _METRICS.vllm if program == "vllm bench" else _METRICS.sglang
    table = {name: (rule.ours, rule.difference) for name, rule in rules.items()}
    if program == "vllm bench":
        is_chat = "chat" in str(result.get("backend") or result.get("endpoint_type"))
        begin = _VLLM_ROLE if is_chat else ""
        times = {name: (f"{name}_ms", begin) for name in ("ttft", "tpot", "itl")}
        times["e2el"] = ("latency_ms", _VLLM_END)
        left_out = {"date", "run_number", *(name for name in result if name.startswith("probe_"))}
    else:
        is_native = result.get("backend") in _SGLANG_NATIVE
        output = "" if is_native else _SGLANG_ASKED
        table |= {
            "output_throughput": ("output_tok_s", output),
            "total_throughput": ("total_tok_s", "; ".join(filter(None, (output, _SGLANG_INPUT)))),
            "total_output_tokens": ("output_tokens", output),
        }
        is_shared = is_native or bool(result.get("accept_length"))
        times = {
            "ttft": ("ttft_ms", _SGLANG_CONNECTS),
            "tpot": ("tpot_ms", _SGLANG_END),
            "itl": ("itl_ms", _SGLANG_SHARED if is_shared else ""),
            "e2e_latency": ("latency_ms", _SGLANG_CONNECTS),
        }
        left_out = {"server_info", "tag", "max_itl_ms", "total_output_tokens_retokenized"}
    numbers = []
    for name, value in result.items():
        rule, match = table.get(name), _STATISTIC.fullmatch(name)
        if rule is None and match and match[2] in times:
            metric, difference = times[match[2]]
            rule = _quantile(metric, match[1]), difference
        if rule and _is_number(value):
            numbers.append(_number(name, float(value), *rule))
    left_out |= {name for name in result if name.startswith("std_")}
    settings = _settings(result, left_out | {number.name for number in numbers})
    name = _cell_name(result.get("max_concurrency"), result.get("request_rate"))
    return ForeignCell(name=name, settings=settings, numbers=numbers)


def _aiperf_cell(summary: dict[str, Any]) -> ForeignCell:
    flat = _leaves(summary.get("input_config"))
    by_server = flat.get("endpoint.use_server_token_count") is True
    numbers = []
    for name, block in summary.items():
        rule = _METRICS.aiperf.get(name)
        like = (rule.ours if rule else None) or ""
        # an unknown unit would make a number of another size
        factor = _MS_PER_UNIT.get(str(block.get("unit"))) if isinstance(block, dict) else None
        has_spread = like.endswith("_ms")
        if not rule or not like or not isinstance(block, dict) or (has_spread and factor is None):
            continue
        difference = _AIPERF_TOKENS if rule.of_tokens and not by_server else rule.difference
        for each in _STATISTICS if has_spread else ("avg",):
            value: Any = block.get(each)
            if not _is_number(value):
                continue
            if has_spread:
                scaled, metric = float(value) * (factor or 1.0), _quantile(like, each)
                numbers.append(_number(f"{name}.{each}", scaled, metric, difference))
            else:
                numbers.append(_number(name, float(value), like, difference))
    # where these two stand differs by version, so that the end of their path counts
    ends = {path.rpartition(".")[2]: value for path, value in reversed(flat.items())}
    name = _cell_name(ends.get("concurrency"), ends.get("request_rate"))
    settings = _settings({**_settings(summary, ("start_time", "end_time")), **flat})
    return ForeignCell(name=name, settings=settings, numbers=numbers)


def _leaves(value: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Single values of nested settings by their path."""
    if isinstance(value, dict) and depth < 8:
        found: dict[str, Any] = {}
        for name, each in value.items():
            found |= _leaves(each, f"{path}.{name}" if path else str(name), depth + 1)
        return found
    return {path: value} if path and isinstance(value, str | int | float) else {}


def _is_number(value: Any) -> bool:
    """Whether we can calculate with a value; True is no number."""
    try:
        is_one = isinstance(value, int | float) and not isinstance(value, bool)
        return is_one and abs(float(value)) <= _LARGEST
    # an int may have more digits than any float
    except OverflowError:
        return False


def _number(name: str, value: float, like: str | None, difference: str) -> ForeignNumber:
    return ForeignNumber(name=name, values=[value], like=like, difference=difference)


def _quantile(metric: str, statistic: str) -> str | None:
    """`ttft_ms.p99` for a statistic that we compute, too."""
    ours = _QUANTILES.get(statistic)
    return f"{metric}.{ours}" if ours else None


def _settings(values: Mapping[str, Any], leave: Iterable[str] = ()) -> dict[str, str]:
    """Every single value as one line of text, unknown fields too."""
    settings = {}
    for name, value in values.items():
        if name not in leave and isinstance(value, str | int | float) and value != "":
            text = f"{value:g}" if isinstance(value, float) else str(value)
            name, text = (plain(each).replace("\n", " ")[:_MOST_TEXT] for each in (name, text))
            settings[name] = text
    return dict(sorted(settings.items())[:_MOST_SETTINGS])


def _cell_name(concurrency: Any, rate: Any) -> str:
    """Names a cell like our own: c128, r4."""
    if _is_number(concurrency) and concurrency:
        return f"c{concurrency:g}"
    return f"r{rate:g}" if _is_number(rate) and rate else "all"


# The fields that only the results of a program have together.
_FIELDS: dict[Program, set[str]] = {
    "vllm bench": {"model_id", "total_token_throughput"},
    "sglang.bench_serving": {"total_output_tokens_retokenized", "duration"},
    "aiperf": {"request_throughput", "request_latency"},
}


def read_foreign(path: Path) -> ForeignRun:
    """Reads the result of another program from its file or folder."""
    values, digest = _read_all(path)
    objects = [value for value in values if isinstance(value, dict)]
    for program, fields in _FIELDS.items() if objects and objects[0] is values[0] else ():
        if not fields <= objects[0].keys():
            continue
        cells: dict[str, ForeignCell] = {}
        for result in (each for each in objects if fields <= each.keys()):
            cell = _aiperf_cell(result) if program == "aiperf" else _flat_cell(program, result)
            # repeats become one; cells of one name with other settings get names of their own
            name, number = cell.name, 2
            while name in cells and cells[name].settings != cell.settings:
                name, number = f"{cell.name}-{number}", number + 1
            numbers = {each.name: each for each in cells[name].numbers} if name in cells else {}
            for each in cell.numbers:
                before = numbers[each.name].values if each.name in numbers else []
                numbers[each.name] = each.model_copy(update={"values": [*before, *each.values]})
            update = {"name": name, "numbers": list(numbers.values())}
            cells[name] = cell.model_copy(update=update)
        if not any(cell.numbers for cell in cells.values()):
            raise RunInvalid(f"{path}: is of {program}, but holds no numbers")
        every = list(cells.values())
        return ForeignRun(program=program, file=path.name, digest=digest, cells=every)
    raise RunInvalid(f"{path}: is not a result of a program that is known here", _HINT)


def _read_all(path: Path) -> tuple[list[Any], str]:
    """Every result of a file or of the files of a folder, and the digest of all of them."""
    files, values, digests = [path], [], []
    if path.is_dir():
        files = [path / _AIPERF_FILE]
        if not files[0].is_file():
            files = sorted(islice(path.rglob(_SWEEP), _MOST_RESULTS + 1))
    if not files:
        raise RunInvalid(f"{path}: holds no result that is known here", _HINT)
    if len(files) > _MOST_RESULTS:
        raise RunInvalid(f"{path}: has more than {_MOST_RESULTS} results")
    for file in files:
        try:
            data = read_plain(file, _MOST_BYTES)
        except OSError as error:
            raise RunInvalid(f"{file}: cannot be read: {error.strerror or error}") from error
        if data is None:
            raise RunInvalid(f"{file}: larger than {_MOST_BYTES} bytes")
        digests.append(sha256_of(data))
        # a list, one object, or an object on each line
        lines = data.strip().split(b"\n", _MOST_RESULTS)
        if len(lines) > _MOST_RESULTS and lines[0].rstrip().endswith(b"}"):
            raise RunInvalid(f"{file}: has more than {_MOST_RESULTS} lines")
        try:
            # the first line of an indented file is one bracket
            is_object_per_line = len(lines) > 1 and isinstance(_json(lines[0]), dict)
        except JsonInvalid:
            is_object_per_line = False
        try:
            if is_object_per_line:
                values += [_json(line) for line in lines if line.strip()]
            else:
                value = _json(data)
                values += value if isinstance(value, list) else [value]
        except JsonInvalid as error:
            raise RunInvalid(f"{file}: {error}", _HINT) from error
    # of a folder: all of its files in order
    return values, digests[0] if len(files) == 1 else sha256_of("".join(digests).encode())


def _json(data: bytes) -> Any:
    # any_int: nanoseconds of clocks and the like; Infinity: sglang's default rate
    return read_json(data, most_bytes=_MOST_BYTES, any_int=True, no_number_is_null=True)
