"""Traces as they are published and recorded: what is read, what is refused, what is replayed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import WorkloadInvalid
from pipeline.core.net.wire import Address
from pipeline.serving.bench import trace as trace_module
from pipeline.serving.bench.metrics import metrics_of
from pipeline.serving.bench.model import RequestRow
from pipeline.serving.bench.plan import TokenScale, WorkerJob, cells_of
from pipeline.serving.bench.trace import read_trace, record_trace, trace_sessions
from pipeline.serving.bench.workload import TracePrompts, Workload

_SCALE = TokenScale(per_word=1.0, overhead=10.0)


def _row(**changes: Any) -> dict[str, Any]:
    base = {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [0, 1]}
    return {**base, **changes}


def _weka(*requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"id": "one", "block_size": 50, "requests": [*requests], **changes}


def _ask(t: float, *ids: int, **changes: Any) -> dict[str, Any]:
    base = {"t": t, "type": "n", "model": "m", "in": 50 * len(ids), "out": 5, "api_time": 1.0}
    return {**base, "hash_ids": [*ids], **changes}


def _file(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines)
    )
    return path


def _prompts(**changes: Any) -> TracePrompts:
    base = {"kind": "trace", "path": "trace.jsonl", "block_tokens": 50}
    return TracePrompts.model_validate({**base, **changes})


def test_rows_of_mooncake_are_sessions_by_their_id(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        _row(session_id="a"),
        _row(timestamp=500),
        _row(session_id="a", timestamp=900, input_length=150, hash_ids=[0, 1, 2], delay=250),
    )
    first, second = read_trace(path, _prompts())
    assert [(r.at_s, r.think_s, r.input) for r in first] == [(0.0, None, 100), (0.9, 0.25, 150)]
    assert [r.blocks for r in second] == [("0", "1")]


def test_a_session_of_weka_has_its_pauses_and_its_subagents(tmp_path: Path) -> None:
    agent = {"t": 2, "type": "subagent", "agent_id": "x", "requests": [_ask(2.0, 1, 9)]}
    path = _file(
        tmp_path, _weka(_ask(0.0, 1), agent, _ask(4.0, 1, 2), _ask(9.0, 1, 2, 3, think_time=2.5))
    )
    own, sub = read_trace(path, _prompts())
    # 4 s less the second that the answer took
    assert [r.think_s for r in own] == [None, 3.0, 2.5]
    assert sub[0].blocks[0] == own[0].blocks[0]
    assert own[0].block_tokens == 50


def test_local_hashes_of_two_sessions_are_not_the_same(tmp_path: Path) -> None:
    lines = (_weka(_ask(0.0, 1, 2)), _weka(_ask(0.0, 2, 1), id="two"))
    one, two = read_trace(_file(tmp_path, *lines), _prompts())
    assert not {*one[0].blocks} & {*two[0].blocks}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([_row(timestamp=-1)], "timestamp: Input should be greater than or equal to 0"),
        ([_row(hash_ids=[0, 1, 2, 3])], "4 hashes for 100 tokens, of which 50 are a block"),
        ([_row(hash_ids=[])], "0 hashes for 100 tokens"),
        ([_row(), _row(hash_ids=[5, 1])], "the hash 1 follows another one than in line 1"),
        ([_row(hash_ids=[3, 3])], "the hash 3 follows another one"),
        ([_row(input_length=1 << 40)], "input_length: Input should be less than"),
        ([_row(output_length=0)], "output_length: Input should be greater"),
        ([_row(prompt="a secret")], "prompt: Extra inputs are not permitted"),
        ([_row(timestamp=5), _row(timestamp=4)], "before that of the line before"),
        ([_row(hash_ids=[-1, 2])], "hash_ids.0: Input should be greater"),
        ([_row(hash_ids=["a", "b"])], "hash_ids.0: Input should be a valid integer"),
        (['{"timestamp": NaN}'], "NaN is not a number"),
        (['{"timestamp": 0, "timestamp": 1}'], "line 1: "),
        (["not JSON"], "line 1: "),
        (["[1, 2]"], "line 1: "),
        ([], "has no requests"),
        ([_weka(_ask(5.0, 1), _ask(4.0, 1, 2))], "the times of its session go back"),
        ([_weka(_ask(0.0, 1)), _weka(_ask(0.0, 1))], "'one' is there twice"),
        ([_weka(_ask(0.0, 1, type="x"))], "requests.0"),
        ([_weka(_ask(0.0, 1), block_size=0)], "block_size: Input should be greater"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(WorkloadInvalid, match=re.escape(said)):
        read_trace(_file(tmp_path, *lines), _prompts())


def test_a_line_without_an_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_MOST_LINE_BYTES", 1 << 20)
    path = _file(tmp_path, _row(), "[" + "1, " * 600_000)
    with pytest.raises(WorkloadInvalid, match="line 2: has no end within 1 MiB"):
        read_trace(path, _prompts())


def test_too_many_requests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_MOST_REQUESTS", 2)
    with pytest.raises(WorkloadInvalid, match="more than 2 requests"):
        read_trace(_file(tmp_path, _row(), _row(), _row()), _prompts())


def test_a_trace_of_another_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadInvalid, match="the workload names sha256:00"):
        read_trace(_file(tmp_path, _row()), _prompts(digest=f"sha256:{'0' * 64}"))


def _job(
    path: Path, requests: int, prompts: dict[str, Any] | None = None, **more: Any
) -> WorkerJob:
    workload = Workload.model_validate(
        {
            "name": "w",
            "summary": "A trace",
            "prompts": _prompts(**(prompts or {})).model_dump(),
            "loads": [{"concurrency": 2, "requests": requests}],
        }
    )
    base = {"address": Address.read("h:1"), "model": "m", "requests": requests, "scale": _SCALE}
    cell = cells_of(workload)[0]
    told = {"workload": workload, "cell": cell, "prompt_file": str(path), **more}
    return WorkerJob.model_validate({**base, **told})


def _texts(job: WorkerJob) -> list[list[str]]:
    return [
        [json.loads(turn.body)["messages"][0]["content"] for turn in session]
        for session in trace_sessions(job)
    ]


_TALK = (
    _row(session_id="a"),
    _row(session_id="b", timestamp=10, hash_ids=[0, 7]),
    _row(session_id="a", timestamp=900, input_length=170, hash_ids=[0, 1, 2, 3], delay=99_000),
)


def test_the_same_hashes_are_the_same_words_and_others_are_not(tmp_path: Path) -> None:
    path = _file(tmp_path, *_TALK)
    (first, second), (other,) = _texts(_job(path, 2))
    block = " ".join(first.split()[:51])
    assert second.startswith(" ".join(first.split()[:91]))
    assert other.startswith(block)
    assert other.split()[51:91] != first.split()[51:91]
    # the wanted length, but for what the template has
    assert len(first.split()) - 15 == 90
    assert len(second.split()) - 15 == 160
    # another trial shares nothing with this one
    assert not _texts(_job(path, 2, trial=1))[0][0].startswith(" ".join(first.split()[:1]))


def test_pauses_are_kept_up_to_a_bound_and_repeats_are_counted(tmp_path: Path) -> None:
    sessions = list(trace_sessions(_job(_file(tmp_path, *_TALK), 2)))
    assert [[p.think_s for p in s] for s in sessions] == [[0.0, 60.0], [0.0]]
    assert [[p.repeated_tokens for p in s] for s in sessions] == [[0, 100], [50]]
    assert [[p.turn for p in s] for s in sessions] == [[0, 1], [0]]
    assert [p.number for s in sessions for p in s] == [0, 1, 2]


def test_each_worker_has_its_share(tmp_path: Path) -> None:
    path = _file(tmp_path, *_TALK)
    shares = [list(trace_sessions(_job(path, 2, workers=2, worker=n))) for n in (0, 1)]
    assert [[p.number for s in share for p in s] for share in shares] == [[0, 1], [2]]


def test_a_session_ends_before_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    sessions = list(trace_sessions(_job(_file(tmp_path, *_TALK), 2, {"most_input": 150})))
    assert [len(session) for session in sessions] == [1, 1]


def test_timestamps_say_when_a_session_begins(tmp_path: Path) -> None:
    sessions = trace_sessions(_job(_file(tmp_path, *_TALK), 2, {"timing": "timestamps"}))
    assert [session[0].due_s for session in sessions] == [0.0, 0.01]


def test_more_sessions_than_the_trace_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadInvalid, match="has 2 sessions, 3 are asked for"):
        list(trace_sessions(_job(_file(tmp_path, *_TALK), 3)))


def test_the_numbers_of_a_trace() -> None:
    def row(session: int, turn: int, sent_s: float, cached: int) -> RequestRow:
        told = {"conversation": session, "turn": turn, "sent_s": sent_s, "cached_tokens": cached}
        lengths = {"input_tokens": 100, "asked_input": 100, "repeated_tokens": 50 * bool(turn)}
        times = {"first_token_s": 0.1 + turn / 10, "end_s": 1.0, "gaps_us": [100], "chunks": 2}
        return RequestRow.model_validate(
            {"number": 0, "output_tokens": 2, **told, **lengths, **times}
        )

    rows = [row(0, 0, 0.0, 0), row(0, 1, 3.0, 40), row(0, 2, 5.0, 40), row(0, 3, 7.0, 40)]
    metrics = metrics_of([*rows, row(1, 0, 0.5, 0)])
    assert metrics.cached_share == pytest.approx(0.24)
    assert metrics.repeated_share == pytest.approx(0.3)
    by_turn = {n: round(value, 3) for n, value in (metrics.ttft_by_turn_ms or {}).items()}
    assert by_turn == {"1": 100.0, "2": 200.0, "3-4": 350.0}
    assert metrics.session_s is not None
    assert (metrics.session_s.least, metrics.session_s.most) == (1.0, 8.0)


def _vllm(second: int, text: str) -> str:
    return f"(APIServer pid=7) DEBUG 11-18 12:00:{second:02d} [logger.py:41] {text}"


def _details(second: int, name: str, ids: object, prompt: str = "SECRET") -> str:
    told = f"prompt: {prompt!r}, prompt_token_ids: {ids}, prompt_embeds shape: None."
    return _vllm(second, f"Request {name} details: {told}")


def _answer(second: int, name: str, ids: object) -> str:
    told = f"output: 'SECRET', output_token_ids: {ids}, finish_reason: None"
    return _vllm(second, f"Generated response {name}: {told}")


def test_a_log_of_vllm_becomes_a_trace_without_its_words(tmp_path: Path) -> None:
    first, second = [5] * 64 + [6] * 64, [5] * 64 + [6] * 64 + [7] * 30
    old = f"prompt: 'SECRET', params: SamplingParams(n=1), prompt_token_ids: {second}, lora: None."
    lines = [
        # a prompt may hold what the log has, too
        _details(1, "r-1", first, "SECRET prompt_token_ids: [1, 2], prompt_embeds"),
        _answer(3, "r-1", [9] * 4),
        "a line of something else",
        # as releases before 2025 wrote it
        _vllm(8, f"Received request r-2: {old}"),
        _answer(9, "r-2 (streaming delta)", [9, 9]),
        _answer(9, "r-2 (streaming delta)", [9]),
        _answer(9, "r-2 (streaming complete)", None),
        _details(10, "r-3", [1] * 70),
    ]
    source = tmp_path / "vllm.log"
    source.write_text("\n".join(lines))
    made = record_trace(source, tmp_path / "out.jsonl", 64)
    assert (made.requests, made.sessions, made.unfinished) == (2, 1, 1)
    text = (tmp_path / "out.jsonl").read_text()
    assert "SECRET" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["hash_ids"] for row in rows] == [[0, 1], [0, 1, 2]]
    assert [(row["input_length"], row["output_length"]) for row in rows] == [(128, 4), (158, 3)]
    assert [row["timestamp"] for row in rows] == [0, 7000]
    assert rows[1]["delay"] == 5000


def test_a_log_of_sglang_becomes_a_trace(tmp_path: Path) -> None:
    source = tmp_path / "sglang.log"
    asked = f"Receive: obj=GenerateReqInput(rid='q', text='SECRET', input_ids={[3] * 64})"
    out = "out={'meta_info': {'completion_tokens': 12}}"
    ended = f"Finish: obj=GenerateReqInput(rid='q', text='SECRET'), {out}"
    source.write_text(f"[2026-11-18 12:00:05] {asked}\n[2026-11-18 12:00:07] {ended}\n")
    made = record_trace(source, tmp_path / "out.jsonl", 64)
    assert (made.requests, made.unfinished) == (1, 0)
    (row,) = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert (row["output_length"], row["hash_ids"]) == (12, [0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing of use\n", "has no request with the tokens"),
        (_details(1, "r", None), "are not whole"),
        (_details(1, "r", "[1, 2, ... 9]"), "are not whole"),
        (_details(1, "r", [1]), "has no request"),
    ],
)
def test_a_log_without_tokens_is_refused(tmp_path: Path, text: str, said: str) -> None:
    source = tmp_path / "log"
    source.write_text(text)
    with pytest.raises(WorkloadInvalid, match=said):
        record_trace(source, tmp_path / "out.jsonl", 64)
    assert not (tmp_path / "out.jsonl").exists()
