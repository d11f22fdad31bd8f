from __future__ import annotations

from pipeline.serving.report.from_host import memory_of_log

SGLANG = """\
[2026-01-28 14:34:24 TP0] Load weight end. type=X, avail mem=19.71 GB, mem usage=72.33 GB.
[2026-01-28 14:34:24 TP1] Load weight end. type=X, avail mem=19.72 GB, mem usage=72.31 GB.
[2026-01-28 14:34:26 TP0] KV Cache is allocated. #tokens: 4578, KV size: 0.30 GB
[2026-01-28 14:34:26 TP1] KV Cache is allocated. #tokens: 4578, KV size: 0.30 GB
[2026-01-28 14:34:26 TP0] Memory pool end. avail mem=19.38 GB
[2026-01-28 14:34:30 TP0] max_total_num_tokens=4578, available_gpu_mem=18.90 GB
"""
VLLM = """\
(Worker_TP0 pid=12) INFO [gpu_model_runner.py] Model loading took 70.14 GiB memory and 61.2 seconds
(Worker_TP0 pid=12) INFO [gpu_worker.py:359] Available KV cache memory: 7.58 GiB
(EngineCore pid=9) INFO [kv_cache_utils.py] GPU KV cache size: 523,008 tokens
"""
LLAMA = """\
load_tensors:   CPU_Mapped model buffer size =   306.00 MiB
load_tensors:        CUDA0 model buffer size =  2048.00 MiB
load_tensors:        CUDA1 model buffer size =   512.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =  1024.00 MiB
load_tensors:        CUDA0 model buffer size =   512.00 MiB
"""


def test_sglang_tells_of_every_card() -> None:
    first, second = memory_of_log(SGLANG.splitlines())
    assert (first.name, first.weights, first.kv, first.free) == ("GPU 0", 72.33, 0.3, 18.9)
    assert (second.name, second.weights, second.free) == ("GPU 1", 72.31, None)
    assert first.kv_tokens == 4578
    assert first.unit == "GiB"
    card = first.model_copy(update={"total": 96})
    assert round(card.other or 0, 2) == 4.47


def test_two_halves_of_a_cache_are_added() -> None:
    line = "KV Cache is allocated. #tokens: 371661, K size: 12.74 GB, V size: 12.74 GB"
    weights = "Load weight end. type=X, avail mem=19.71 GB, mem usage=72.33 GB."
    assert memory_of_log([weights, line])[0].kv == 25.48


def test_vllm_tells_of_its_workers() -> None:
    (memory,) = memory_of_log(VLLM.splitlines())
    assert (memory.weights, memory.kv, memory.kv_tokens) == (70.14, 7.58, 523_008)
    assert memory.free is None


def test_buffers_of_llama_cpp_are_added_for_each_card_and_main_memory_is_none() -> None:
    first, second = memory_of_log(LLAMA.splitlines())
    assert (first.weights, first.kv) == (2.5, 1.0)
    assert (second.weights, second.kv) == (0.5, None)


def test_ik_llama_cpp_names_the_weights_by_their_card_alone() -> None:
    log = """\
llm_load_tensors:        CPU buffer size =     4.73 MiB
llm_load_tensors:      CUDA0 buffer size = 16542.17 MiB
llama_kv_cache_init:      CUDA0 KV buffer size =   576.00 MiB
llama_init_from_model:      CUDA0 compute buffer size =  6298.15 MiB
"""
    (memory,) = memory_of_log(log.splitlines())
    assert (memory.weights, memory.kv) == (16.154, 0.562)


def test_a_log_that_tells_nothing_gives_nothing() -> None:
    assert (
        memory_of_log(["INFO: Application startup complete.", "Memory pool end. avail mem=1 GB"])
        == []
    )
