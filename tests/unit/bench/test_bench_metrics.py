"""Each metric by hand-made requests whose answers can be computed in one's head."""

from __future__ import annotations

import pytest

from pipeline.serving.bench.metrics import (
    DEFINITIONS,
    flat,
    interval,
    intervals,
    metrics_of,
    quantiles,
    tpot_ms,
)
from pipeline.serving.bench.model import Metrics, RequestRow
from pipeline.serving.bench.record import read_run
from pipeline.serving.bench.workload import Objectives
from tests.unit.bench.example_run import FOLDER


def _row(sent_s: float = 0.0, **values: object) -> RequestRow:
    base = {
        "number": 0,
        "sent_s": sent_s,
        "first_token_s": 0.5,
        "end_s": 1.0,
        "gaps_us": [100_000] * 4,
        "chunks": 5,
        "input_tokens": 20,
        "output_tokens": 5,
    }
    return RequestRow.model_validate({**base, **values})


def test_every_metric_has_a_definition_and_every_definition_a_metric() -> None:
    assert list(DEFINITIONS) == list(Metrics.model_fields)


def test_output_and_total_throughput_are_two_numbers() -> None:
    metrics = metrics_of([_row(), _row(sent_s=1.0)])
    assert metrics.duration_s == 2.0
    assert metrics.output_tok_s == 5.0
    assert metrics.total_tok_s == 25.0
    assert metrics.requests_s == 1.0
    assert metrics.concurrency == 1.0


def test_tpot_leaves_the_first_token_out() -> None:
    assert tpot_ms(_row()) == pytest.approx(100.0)


def test_tpot_counts_tokens_and_itl_counts_events() -> None:
    several = _row(output_tokens=9)
    assert tpot_ms(several) == pytest.approx(50.0)
    metrics = metrics_of([several])
    assert metrics.itl_ms is not None
    assert metrics.itl_ms.mean == 100.0
    assert metrics.tokens_per_chunk == 1.8


def test_one_token_has_no_tpot() -> None:
    assert tpot_ms(_row(output_tokens=1, chunks=1, gaps_us=[])) is None


def test_failed_requests_give_no_tokens_and_are_counted() -> None:
    metrics = metrics_of([_row(), _row(failure="lost", retries=2)])
    assert (metrics.requests, metrics.completed, metrics.failed) == (2, 1, 1)
    assert metrics.output_tokens == 5
    assert metrics.retries == 2


def test_events_are_counted_where_the_server_gives_no_usage() -> None:
    assert metrics_of([_row(output_tokens=None)]).output_tokens == 5


def test_cached_tokens_do_not_count_as_read() -> None:
    metrics = metrics_of([_row(cached_tokens=10)])
    assert metrics.prefill_tok_s is not None
    assert metrics.prefill_tok_s.mean == 20.0
    assert metrics.cached_tokens == 10


def test_the_peak_is_of_one_second_of_the_trial() -> None:
    burst = _row(first_token_s=2.1, gaps_us=[1000] * 9, chunks=10, output_tokens=10, end_s=2.2)
    assert metrics_of([_row(), burst]).peak_output_tok_s == 10.0


def test_goodput_counts_requests_that_keep_every_objective() -> None:
    rows = [_row(), _row(first_token_s=0.9), _row(gaps_us=[200_000] * 4)]
    assert metrics_of(rows, Objectives(ttft_ms=600, tpot_ms=150)).goodput_s == 1.0
    assert metrics_of(rows).goodput_s is None


def test_energy_is_shared_by_output_tokens() -> None:
    assert metrics_of([_row()], energy_j=50.0).joules_per_output_token == 10.0
    assert metrics_of([_row()]).joules_per_output_token is None


def test_no_requests_are_no_error() -> None:
    metrics = metrics_of([])
    assert metrics.output_tok_s == 0.0
    assert metrics.ttft_ms is None


def test_quantiles_are_linear_between_values() -> None:
    two, result = quantiles([0.0, 10.0]), quantiles([3.0, 1.0, 2.0])
    assert two is not None
    assert two.p90 == 9.0
    assert result is not None
    assert (result.p50, result.least, result.most, result.mean) == (2.0, 1.0, 3.0, 2.0)
    assert quantiles([]) is None


def test_an_interval_of_one_trial_has_no_width() -> None:
    assert (interval([4.0]).low, interval([4.0]).high) == (None, None)


def test_an_interval_is_students() -> None:
    result = interval([9.0, 10.0, 11.0])
    # 4.303 / sqrt(3)
    assert result.low == pytest.approx(10 - 2.484, abs=1e-3)
    assert result.high == pytest.approx(10 + 2.484, abs=1e-3)


def test_void_trials_are_left_out_of_intervals() -> None:
    cell = read_run(FOLDER).cells[1]
    assert [bool(trial.void) for trial in cell.trials] == [False, True, False]
    assert intervals(cell.trials)["output_tok_s"].trials == 2


def test_flat_names_are_those_of_the_definitions() -> None:
    names = {name.split(".")[0] for name in flat(read_run(FOLDER).cells[0].trials[0].metrics)}
    assert names <= set(DEFINITIONS)
    assert "ttft_ms" in names


def _beside(*reads: tuple[float, float], **writer: object) -> Metrics:
    """A writer whose first token comes at 1.0 s, and reads of 1000 tokens from and to."""
    rows = [
        _row(begin, part="reader", first_token_s=end - begin, end_s=end - begin, input_tokens=1000)
        for begin, end in reads
    ]
    first: dict[str, object] = {"part": "writer", "first_token_s": 1.0, "end_s": 9.0}
    return metrics_of([*rows, _row(**{**first, **writer})])  # type: ignore[arg-type]


def test_decode_speed_is_told_apart_by_whether_somebody_reads() -> None:
    gaps = [100_000] * 10 + [500_000] * 4 + [100_000] * 10
    metrics = _beside((2.0, 4.0), gaps_us=gaps, chunks=25, output_tokens=25)
    assert metrics.reads == 1
    assert metrics.decode_alone_tok_s == pytest.approx(10.0)
    assert metrics.decode_under_load_tok_s == pytest.approx(2.0)
    assert metrics.decode_kept == pytest.approx(0.2)
    assert metrics.worst_pause_ms == pytest.approx(500.0)
    assert metrics.read_tok_s == pytest.approx(500.0)
    # a reader's first token is no writer's
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.mean == pytest.approx(1000.0)


def test_a_pause_counts_whole_and_its_token_by_the_part_that_was_read() -> None:
    # from 1.0 to 3.0 nothing comes, and somebody reads from 2.0 on
    metrics = _beside((2.0, 3.0), gaps_us=[2_000_000, 100_000], chunks=3, output_tokens=3)
    assert metrics.worst_pause_ms == pytest.approx(2000.0)
    assert metrics.decode_under_load_tok_s == pytest.approx(0.5)
    assert metrics.decode_alone_tok_s == pytest.approx(1.5 / 1.1)


def test_events_with_several_tokens_count_all_of_them() -> None:
    metrics = _beside((2.0, 3.0), gaps_us=[500_000] * 6, chunks=7, output_tokens=14)
    assert metrics.decode_under_load_tok_s == pytest.approx(4.0)
    assert metrics.decode_kept == pytest.approx(1.0)


@pytest.mark.parametrize("read", [(20.0, 21.0), (0.0, 0.5)])
def test_a_read_while_nobody_decodes_says_nothing(read: tuple[float, float]) -> None:
    metrics = _beside(read)
    assert metrics.decode_alone_tok_s == pytest.approx(10.0)
    assert metrics.decode_under_load_tok_s is None
    assert metrics.decode_kept is None
    assert metrics.worst_pause_ms is None


def test_a_cell_without_reads_is_as_before() -> None:
    assert "reads" not in metrics_of([_row()]).model_dump()


@pytest.mark.parametrize(("cached", "counted"), [(20, 20), (21, None), (0, 0)])
def test_no_more_tokens_are_cached_than_the_prompt_has(cached: int, counted: int | None) -> None:
    assert metrics_of([_row(cached_tokens=cached)]).cached_tokens == counted
