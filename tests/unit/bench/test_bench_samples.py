"""What engines and cards say while a trial runs, and what follows from it."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from pipeline.core import proc
from pipeline.core.net.wire import Address, Raw
from pipeline.serving.bench.marks import client_marks, sample_marks
from pipeline.serving.bench.metrics import energy_j, metrics_of, speculated
from pipeline.serving.bench.model import EngineSeries, GpuSeries, Mark, Samples, SelfTest
from pipeline.serving.bench.record import read_run
from pipeline.serving.bench.server import MeasuredServer, MetricsReading, Sampler
from pipeline.serving.bench.workers import WorkerStats
from tests.unit.bench.example_run import FOLDER, example_rows
from tests.unit.hosts.machines import H200

_VLLM = """\
# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:generation_tokens_total{engine="0",model_name="m"} %d
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %d
"""


def _engine(**counters: float) -> EngineSeries:
    return EngineSeries(at_s=[0], running=[0], waiting=[0], kv_use=[None], counters=counters)


class _Server(MeasuredServer):
    """A server whose /metrics has this text."""

    def __init__(self, text: str = "") -> None:
        url = "http://127.0.0.1:1"
        super().__init__(Address.read(url), url, has_metrics=bool(text))
        self.answer = Raw(200, {}, [(0.0, text.encode())], 0.0)

    def _ask(self, *_: object) -> Raw:
        return self.answer


def _reading(text: str) -> MetricsReading | None:
    return _Server(text).metrics()


def _sampler() -> Sampler:
    return Sampler(_Server(), every_s=60)


def _sampled(*texts: str) -> EngineSeries | None:
    """What the engine said of itself, second by second."""
    sampler = _sampler()
    readings = filter(None, map(_reading, texts))
    sampler.engine = [(float(n), reading) for n, reading in enumerate(readings)]
    return sampler.samples().engine


def test_vllms_metrics_are_added_up_over_engines_but_for_shares() -> None:
    reading = _reading(_VLLM % (5, 0, 0))
    assert reading is not None
    assert (reading.engine, reading.busy, reading.gauge("kv_use")) == ("vllm", 6.0, 0.75)


@pytest.mark.parametrize(
    ("text", "engine", "busy"),
    [
        ('sglang:num_running_reqs{model_name="m"} 4\nsglang:num_queue_reqs 1\n', "sglang", 5),
        ("llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n", "llama.cpp", 3),
        ("python_gc_objects 5\nprocess_cpu_seconds_total 1\n", None, None),
        ("vllm:num_requests_waiting 1\n", "vllm", None),
        ("vllm:num_requests_running NaN\n", None, None),
        ("", None, None),
    ],
)
def test_each_engine_is_known_by_its_names(
    text: str, engine: str | None, busy: float | None
) -> None:
    reading = _reading(text)
    assert (reading.engine, reading.busy) == (engine, busy) if reading else engine is None


def test_the_acceptance_length_counts_the_verifiers_own_token() -> None:
    result = _sampled(_VLLM % (0, 10, 20), _VLLM % (9, 110, 270))
    assert result is not None
    assert result.counters["drafts"] == 100
    assert speculated(result) == (3.5, 100)


def test_sglang_says_its_acceptance_length_itself() -> None:
    result = _sampled("sglang:spec_accept_length 0.0", "sglang:spec_accept_length 2.5")
    assert speculated(result) == (2.5, None)


def test_sampled_numbers_are_the_same_in_every_python() -> None:
    """`sum` of 3.11 gives 2.2913 and 0.9999999999999999, that of 3.12 gives 2.2912 and 1.0."""
    lengths: list[float | None] = [2.94, 2.07, 1.48, 3.49, 1.14, 2.99, 3.21, 1.01]
    said = _engine().model_copy(update={"acceptance": lengths})
    assert speculated(said).acceptance_length == 2.2913
    card = _card().model_copy(update={"at_s": list(range(11)), "power_w": [0.1] * 11})
    assert energy_j([card]) == 0.9999999999999999


def test_without_speculation_there_is_no_acceptance_length() -> None:
    assert speculated(None) == (None, None)
    assert speculated(_engine(drafts=0)) == (None, None)


def test_counters_that_fell_are_of_another_process() -> None:
    result = _sampled(_VLLM % (9, 5, 5), _VLLM % (2, 6, 6))
    assert result is not None
    assert "generated_tokens" not in result.counters
    assert _sampled() is None


@pytest.mark.parametrize(("counted", "marked"), [(48, False), (49, False), (60, True), (24, True)])
def test_the_engine_counts_what_was_answered(counted: int, marked: bool) -> None:
    metrics = metrics_of(example_rows(1, 0))
    samples = Samples(engine=_engine(generated_tokens=counted))
    assert bool(sample_marks(samples, metrics)) == marked


def _marks(card: GpuSeries) -> list[Mark]:
    return sample_marks(Samples(gpus=[card]), metrics_of(example_rows(1, 0)))


def _card(**changes: object) -> GpuSeries:
    card = read_run(FOLDER).cells[0].trials[0].samples.gpus[0]
    return GpuSeries.model_validate({**card.model_dump(), "throttle": [[], []], **changes})


def _captured() -> str:
    """What nvidia-smi wrote on a machine with an H200."""
    text: str = json.loads(H200.read_bytes())["commands"]["nvidia-smi"]["out"]
    return text


def _looked(text: str, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """A sampler that had this answer of nvidia-smi twice."""
    done = subprocess.CompletedProcess([], 0, text.encode(), b"")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(proc, "read", lambda *_, **__: done)
    with _sampler() as sampler:
        pass
    return sampler


def test_a_real_card_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = _looked(_captured(), monkeypatch)
    sampler.cards = [(float(n), cards) for n, (_, cards) in enumerate(sampler.cards)]
    (series_of_one,) = sampler.samples().gpus
    assert series_of_one.name == "NVIDIA H200"
    assert all(watts and watts > 0 for watts in series_of_one.power_w)
    assert all(series_of_one.temperature_c)
    assert series_of_one.memory_used_bytes[0] is not None
    assert series_of_one.utilization_percent[0] is not None
    assert energy_j([series_of_one]) == pytest.approx(series_of_one.power_w[0])


@pytest.mark.parametrize("text", ["", "No devices were found", "<nvidia_smi_log>", "<other/>"])
def test_what_is_no_answer_of_nvidia_smi_is_unknown(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = _looked(text, monkeypatch).samples()
    assert samples.gpus == []
    assert any(why.startswith("GPUs: ") for why in samples.absent)


def test_a_card_that_got_lost_ends_the_series(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = _looked(_captured(), monkeypatch)
    sampler.cards = [(0.0, sampler.cards[0][1]), (1.0, [])]
    assert [series.at_s for series in sampler.samples().gpus] == [[0.0]]


def test_a_card_at_full_speed_has_no_mark() -> None:
    assert _marks(_card()) == []
    # at rest it lowers its link by itself
    assert _marks(_card(pcie_generation=[1, 5])) == []


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"throttle": [[], ["hw_thermal_slowdown"]]}, "throttled", "1 of 2"),
        ({"pcie_replays": [3, 10]}, "link-errors", "7 PCIe replays"),
        ({"pcie_width": [8, 8]}, "link-errors", "x8 of x16"),
        ({"pcie_generation": [4, 4]}, "link-errors", "4.0 of 5.0"),
    ],
)
def test_a_slowed_card_or_a_bad_link_marks_the_trial(
    changes: dict[str, object], kind: str, text: str
) -> None:
    (mark,) = _marks(_card(**changes))
    assert mark.kind == kind
    assert text in mark.message


def test_energy_is_power_over_time_of_all_cards() -> None:
    assert energy_j([_card(), _card()]) == pytest.approx(2 * 0.5 * 415)
    assert energy_j([_card(), _card(power_w=[None, None])]) is None
    assert energy_j([]) is None


def _test(trusted: bool) -> SelfTest:
    test = read_run(FOLDER).self_tests[0]
    return test.model_copy(update={"trusted": trusted, "message": "it reads wrong"})


def test_a_client_that_kept_up_has_no_mark() -> None:
    assert client_marks(_test(True), [WorkerStats(0.5, 1.0, 0.01, 0)]) == []


@pytest.mark.parametrize(
    ("test", "effort"),
    [
        (_test(False), WorkerStats(0.1, 1.0, 0.0, 0)),
        (_test(True), WorkerStats(0.9, 1.0, 0.0, 0)),
        (_test(True), WorkerStats(0.1, 1.0, 0.5, 0)),
    ],
)
def test_a_client_that_was_the_limit_marks_the_trial(test: SelfTest, effort: WorkerStats) -> None:
    (mark,) = client_marks(test, [effort])
    assert mark.kind == "client-limited"


def test_a_client_that_was_not_measured_is_said() -> None:
    (mark,) = client_marks(None, [])
    assert mark.kind == "client-unmeasured"


def test_a_number_beyond_the_ceiling_of_the_client_is_marked() -> None:
    test = _test(True)
    assert client_marks(test, [], test.ceiling_tok_s - 1) == []
    (mark,) = client_marks(test, [], test.ceiling_tok_s + 1)
    assert mark.kind == "client-limited"
    assert "the server may be faster" in mark.message
