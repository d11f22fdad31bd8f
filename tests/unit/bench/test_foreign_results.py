"""Other programs' results: which numbers may be compared with ours, and what hostile files do.

The files have the shape that the programs' own sources write (named in serving/bench/foreign.py),
with small made-up numbers.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import RunInvalid
from pipeline.serving.bench.foreign import ForeignCell, ForeignNumber, read_foreign
from pipeline.serving.bench.metrics import DEFINITIONS
from pipeline.serving.bench.model import Quantiles

FOLDER = Path(__file__).parent / "foreign_results"
FILES = {
    "vllm-serve.json": "vllm bench",
    "vllm-sweep": "vllm bench",
    "sglang.jsonl": "sglang.bench_serving",
    "profile_export_aiperf.json": "aiperf",
}


def _cells(name: str) -> dict[str, ForeignCell]:
    return {cell.name: cell for cell in read_foreign(FOLDER / name).cells}


def _number(cell: ForeignCell, name: str) -> ForeignNumber:
    return next(number for number in cell.numbers if number.name == name)


@pytest.mark.parametrize(("file", "program"), FILES.items())
def test_each_program_is_recognised_by_its_file(file: str, program: str) -> None:
    run = read_foreign(FOLDER / file)
    assert run.program == program
    assert run.cells


@pytest.mark.parametrize("file", FILES)
def test_what_a_number_is_like_is_a_metric_of_ours(file: str) -> None:
    for number in (n for cell in read_foreign(FOLDER / file).cells for n in cell.numbers):
        if number.like is None:
            continue
        name, _, part = number.like.partition(".")
        assert name in DEFINITIONS
        assert not part or part in Quantiles.model_fields


def test_throughput_of_vllm_is_ours_and_its_latency_ends_elsewhere() -> None:
    (cell,) = _cells("vllm-sweep").values()
    assert cell.name == "c8"
    assert _number(cell, "output_throughput").ours == "output_tok_s"
    assert _number(cell, "total_token_throughput").ours == "total_tok_s"
    assert _number(cell, "median_tpot_ms").ours == "tpot_ms.p50"
    latency = _number(cell, "mean_e2el_ms")
    assert (latency.like, latency.ours) == ("latency_ms.mean", None)
    assert "last byte" in latency.difference


def test_runs_of_a_sweep_with_the_same_settings_are_repeats() -> None:
    (cell,) = _cells("vllm-sweep").values()
    assert _number(cell, "mean_ttft_ms").values == [210.0, 211.0, 212.0]
    (same,) = _cells("vllm-sweep/20260301_101500/BENCH--max_concurrency=8/summary.json").values()
    assert same == cell


def test_the_first_chunk_of_vllms_chat_has_no_text_so_its_ttft_is_not_ours() -> None:
    (cell,) = _cells("vllm-serve.json").values()
    for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms"):
        assert "role" in _number(cell, name).difference
    assert _number(cell, "output_throughput").ours == "output_tok_s"


def test_an_infinite_rate_of_sglang_is_no_number_and_lines_may_be_repeats() -> None:
    cells = _cells("sglang.jsonl")
    assert list(cells) == ["c8", "c8-2", "r4"]
    assert _number(cells["c8"], "output_throughput").values == [1600 / 9, 160.0]
    assert cells["c8"].settings["backend"] == "sglang"
    assert "request_rate" not in cells["c8"].settings


def test_tokens_that_sglang_did_not_count_are_not_ours() -> None:
    cells = _cells("sglang.jsonl")
    assert _number(cells["c8"], "output_throughput").ours == "output_tok_s"
    assert "asked for" in _number(cells["c8-2"], "output_throughput").difference
    assert _number(cells["c8"], "mean_itl_ms").ours is None
    assert _number(cells["c8-2"], "mean_itl_ms").ours == "itl_ms.mean"


def test_what_aiperf_calls_itl_is_our_tpot_only_with_the_servers_tokens(tmp_path: Path) -> None:
    (cell,) = _cells("profile_export_aiperf.json").values()
    assert cell.name == "c8"
    assert _number(cell, "time_to_first_token.p99").ours == "ttft_ms.p99"
    itl = _number(cell, "inter_token_latency.avg")
    assert (itl.like, itl.ours) == ("tpot_ms.mean", None)
    summary = json.loads((FOLDER / "profile_export_aiperf.json").read_text())
    summary["input_config"]["endpoint"]["use_server_token_count"] = True
    (tmp_path / "a.json").write_text(json.dumps(summary))
    (other,) = read_foreign(tmp_path / "a.json").cells
    assert _number(other, "inter_token_latency.avg").ours == "tpot_ms.mean"
    assert _number(other, "output_token_throughput").ours == "output_tok_s"


def test_the_unit_of_aiperf_decides_and_an_unknown_one_gives_no_number(tmp_path: Path) -> None:
    summary = json.loads((FOLDER / "profile_export_aiperf.json").read_text())
    summary["time_to_first_token"]["unit"] = "sec"
    summary["request_latency"]["unit"] = "fortnights"
    (tmp_path / "a.json").write_text(json.dumps(summary))
    (cell,) = read_foreign(tmp_path / "a.json").cells
    assert _number(cell, "time_to_first_token.avg").values == [215_000.0]
    assert not [n for n in cell.numbers if n.name.startswith("request_latency")]


@pytest.mark.parametrize(
    "data",
    [
        b'{"benchmarks": [{"metrics": {"requests_per_second": {}}}]}',  # guidellm
        b'[{"model_type": "llama 7B", "n_prompt": 512, "n_gen": 0, "avg_ts": 119.0}]',
        b'{"avg_ts": 119.0, "n_gen": 128}\n{"avg_ts": 118.0, "n_gen": 128}\n',
        b'{"schema": "lil-bench-result/1", "results": {}}',
        b'[\n  loading the model\n  {"avg_ts": 119.0}\n]',
    ],
)
def test_the_refusal_of_another_program_names_those_that_can_be_read(
    data: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(RunInvalid) as caught:
        read_foreign(tmp_path / "a.json")
    assert "vllm bench serve and sweep, sglang.bench_serving and aiperf" in caught.value.hint


def test_a_folder_is_read_by_the_file_that_its_program_leaves(tmp_path: Path) -> None:
    name = "profile_export_aiperf.json"
    shutil.copy(FOLDER / name, tmp_path / name)
    (tmp_path / "inputs.json").write_text("{}")
    assert read_foreign(tmp_path).cells == read_foreign(FOLDER / name).cells


def test_unknown_fields_do_not_matter_and_are_kept_as_settings(tmp_path: Path) -> None:
    result = json.loads((FOLDER / "vllm-serve.json").read_text())
    result |= {"new_in_2027": "yes", "deep": {"er": [1]}, "odd": None}
    (tmp_path / "a.json").write_text(json.dumps(result))
    (cell,) = read_foreign(tmp_path / "a.json").cells
    assert cell.settings["new_in_2027"] == "yes"
    assert cell.numbers == _cells("vllm-serve.json")["c8"].numbers


def _changed(**changes: Any) -> bytes:
    result = json.loads((FOLDER / "vllm-serve.json").read_text())
    return json.dumps({**result, **changes}).encode()


@pytest.mark.parametrize("value", ["fast", True, None, [1.0], {"a": 1}, 10**400])
def test_a_number_that_is_none_is_left_out(value: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(_changed(output_throughput=value))
    (cell,) = read_foreign(tmp_path / "a.json").cells
    assert not [n for n in cell.numbers if n.name == "output_throughput"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"[1, 2]",
        b'{"a": 1}\n{"a": 2}',
        b'{"model_id": 1, "total_token_throughput": "none"}',
        b"[" * 100_000,
        b'{"a": 1, "a": 2}',
        gzip.compress(b"{}", mtime=0),
        _changed()[:-20],
    ],
)
def test_what_is_no_result_is_refused_in_one_sentence(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(RunInvalid):
        read_foreign(tmp_path / "a.json")


def test_a_file_that_is_not_there_and_a_folder_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunInvalid, match="cannot be read"):
        read_foreign(tmp_path / "none.json")
    with pytest.raises(RunInvalid, match="no result"):
        read_foreign(tmp_path)


def test_settings_are_bounded_and_plain(tmp_path: Path) -> None:
    many = {f"x{n}": "y" * 1000 for n in range(1000)}
    (tmp_path / "a.json").write_bytes(_changed(**many, **{"dir\u202eection": "\x1b[31m"}))
    (cell,) = read_foreign(tmp_path / "a.json").cells
    assert len(cell.settings) == 200
    assert all(len(k) <= 200 and len(v) <= 200 for k, v in cell.settings.items())
    assert cell.settings["dir ection"] == " [31m"


STRANGE: list[Any] = [
    None,
    True,
    -1,
    10**30,
    1.5,
    "",
    "x" * 300,
    [],
    {},
    [[1]],
    {"a": {"b": 1}},
    [None, {}],
]


@pytest.mark.parametrize("file", [name for name in FILES if name.endswith("json")])
def test_any_value_in_any_place_is_read_or_refused(file: str, tmp_path: Path) -> None:
    text = (FOLDER / file).read_text()
    places = list(_places(json.loads(text)))
    chosen = random.Random(file).sample(places, min(len(places), 120))
    read = 0
    for number, place in enumerate(chosen):
        document = json.loads(text)
        _put(document, place, STRANGE[number % len(STRANGE)])
        (tmp_path / "a.json").write_text(json.dumps(document))
        # any other error than this one would be a stack trace in front of somebody
        with suppress(RunInvalid):
            read += bool(read_foreign(tmp_path / "a.json"))
    assert read  # most of a foreign file is not looked at


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if not isinstance(value, dict | list):
        return
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*place, name)
        yield from _places(each, (*place, name))


def _put(document: Any, place: tuple[str | int, ...], value: Any) -> None:
    *above, last = place
    for part in above:
        document = document[part]
    document[last] = value
