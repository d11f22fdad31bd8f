"""What a log of vLLM or SGLang says of a start; nothing is guessed from any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.serving.serve.engine_log import MOST_CHOICES, kernel_choices, start_phases

VLLM = """\
(Worker_TP0 pid=7) INFO 11-02 08:00:01 [cuda.py:300] Using FLASHINFER attention backend out of [..]
(Worker_TP1 pid=8) INFO 11-02 08:00:01 [cuda.py:300] Using FLASHINFER attention backend out of [..]
(Worker_TP0 pid=7) INFO 11-02 08:00:02 [nvfp4.py:242] Using 'MARLIN' NvFp4 MoE backend out of [..]
(Worker_TP0 pid=7) INFO 11-02 08:00:02 [__init__.py:1240] Using MarlinNvFp4 for NVFP4 GEMM
(Worker_TP0 pid=7) INFO 11-02 08:00:20 [default_loader.py:502] Loading weights took 18.30 seconds
(Worker_TP1 pid=8) INFO 11-02 08:00:21 [default_loader.py:502] Loading weights took 19.10 seconds
(Worker_TP0 pid=7) INFO 11-02 08:00:28 [monitor.py:33] torch.compile took 27.26 s in total
(Worker_TP0 pid=7) INFO 11-02 08:00:30 [kernel_warmup.py:190] JIT kernel warmup finished in 2.50s.
2026-11-02 08:00:31,500 - INFO - autotuner.py:256 - [Autotuner]: Autotuning process starts ...
2026-11-02 08:01:31,750 - INFO - autotuner.py:262 - [Autotuner]: Autotuning process ends
(Worker_TP0 pid=7) INFO 11-02 08:01:53 [gpu.py:1128] Graph capturing finished in 20 secs, took 0 GiB
"""
SGLANG = """\
[2026-11-02 08:00:01 TP0] Load weight end. elapsed=12.50 s, type=DeepseekV3ForCausalLM
[2026-11-02 08:00:02 TP1] Load weight end. elapsed=13.00 s, type=DeepseekV3ForCausalLM
[2026-11-02 08:00:09 TP0] Capture decode CUDA graph end. elapsed=6.00 s, mem usage=0.3 GB
[2026-11-02 08:00:11 TP0] Capture draft extend CUDA graph end. elapsed=2.00 s, mem usage=0.1 GB
[2026-11-02 08:00:11 TP1] Capture decode CUDA graph end. elapsed=7.00 s, mem usage=0.3 GB
"""


def test_vllm_tells_its_parts_of_the_slowest_rank(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(VLLM)
    wanted = {"capture_s": 20.0, "compile_s": 29.76, "load_s": 19.1, "tune_s": 60.25}
    assert start_phases(tmp_path / "log") == wanted
    assert kernel_choices(tmp_path / "log") == [
        "Using 'MARLIN' NvFp4 MoE backend",
        "Using FLASHINFER attention backend",
        "Using MarlinNvFp4 for NVFP4 GEMM",
    ]


def test_graphs_that_one_rank_of_sglang_captures_add_up(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(SGLANG)
    assert start_phases(tmp_path / "log") == {"capture_s": 8.0, "load_s": 13.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "took a while\nLoading weights took long\ntorch.compile took NaN s in total\n",
        "Autotuning process ends\n2026-99-02 08:00:31 no\n",
        "x" * 200_000,
        "\x1b[2Jtook 5 s\n",
    ],
)
def test_another_log_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    assert (start_phases(tmp_path / "log"), kernel_choices(tmp_path / "log")) == ({}, [])


def test_tuning_without_an_end_and_a_clock_that_went_back_count_as_nothing(tmp_path: Path) -> None:
    line = "2026-11-02 08:{}:00 [Autotuner]: Autotuning process {}\n"
    (tmp_path / "log").write_text(line.format("10", "starts") + line.format("05", "ends"))
    assert start_phases(tmp_path / "log") == {"tune_s": 0.0}
    (tmp_path / "log").write_text(line.format("10", "starts"))
    assert start_phases(tmp_path / "log") == {}


def test_a_date_that_is_none_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("2026-13-40 08:10:00 Autotuning process starts\n")
    assert start_phases(tmp_path / "log") == {}


def test_an_engine_that_names_kernels_without_end_is_cut_off(tmp_path: Path) -> None:
    lines = (f"Using K{n}\x1b[31m attention backend\n" for n in range(500))
    (tmp_path / "log").write_text("".join(lines))
    chosen = kernel_choices(tmp_path / "log")
    assert len(chosen) == MOST_CHOICES
    assert all("\x1b" not in each for each in chosen)
