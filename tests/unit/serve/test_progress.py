"""Every line here was written by an engine: in the thread that is named, or by the image here."""

from __future__ import annotations

import pytest

from pipeline.core.model import Engine
from pipeline.serving.serve.log_reader import STAGES, read_progress

# engine, line, what it tells
LINES: list[tuple[Engine, str, str]] = [
    # vllm-project/vllm#38820
    (
        "vllm",
        "Loading safetensors checkpoint shards:  56% Completed | 5/9 [00:13<00:11,  2.87s/it]",
        "loading weights, files: 5 of 9",
    ),
    (
        "vllm",
        "(Worker_TP0 pid=34322) INFO 05-06 20:59:57 [default_loader.py:384] Loading weights took"
        " 24.84 seconds",
        "weights are loaded",
    ),
    # foundation-model-stack/fastsafetensors
    (
        "vllm",
        "Loading safetensors using Fastsafetensor loader: 100% Completed | 1/1"
        " [00:00<00:00,  1.23it/s]",
        "loading weights, files: 1 of 1",
    ),
    # vllm-project/vllm#44106
    (
        "vllm",
        "(EngineCore pid=1265223) INFO 06-02 00:51:49 [backends.py:1089] Using cache directory:"
        " /root/.cache/vllm/torch_compile_cache/a00dd112c3/rank_0_0/backbone for vLLM's"
        " torch.compile",
        "compiling",
    ),
    # from public logs, of an older and a newer version
    (
        "vllm",
        "(EngineCore_DP0 pid=2120) INFO 02-19 10:12:13 [monitor.py:34] torch.compile takes 11.50 s"
        " in total",
        "compiled",
    ),
    (
        "vllm",
        "(Worker_TP0 pid=11) INFO 10-02 19:03:02 [monitor.py:1] torch.compile and initial"
        " profiling/warmup run together took 98.20 s in total",
        "compiled",
    ),
    # gpustack/gpustack#3098
    (
        "vllm",
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  34%|███▍      | 23/67"
        " [00:02<00:04,  8.92it/s]",
        "capturing CUDA graphs: 23 of 67",
    ),
    # vllm-project/vllm#46389
    (
        "vllm",
        "Capturing CUDA graphs (decode, FULL):   6%|▌         | 2/35 [00:00<00:02, 14.82it/s]",
        "capturing CUDA graphs: 2 of 35",
    ),
    # vllm-project/vllm#11349
    (
        "vllm",
        "INFO 12-19 22:58:41 model_runner.py:1535] Graph capturing finished in 14 secs, took"
        " 0.21 GiB",
        "CUDA graphs are captured",
    ),
    # sgl-project/sglang#17157
    (
        "sglang",
        "[2026-01-15 13:31:50 DP0 TP0] Load weight begin. avail mem=60.40 GB",
        "loading weights",
    ),
    (
        "sglang",
        "Loading safetensors checkpoint shards:   8% Completed | 1/13 [00:08<01:40,  8.40s/it]",
        "loading weights, files: 1 of 13",
    ),
    # sgl-project/sglang#13666
    (
        "sglang",
        "[2025-11-20 17:55:15] Load weight end. type=Olmo2ForCausalLM, dtype=torch.bfloat16,"
        " avail mem=117.54 GB, mem usage=60.20 GB.",
        "weights are loaded",
    ),
    (
        "sglang",
        "[2025-11-20 17:55:15] KV Cache is allocated. #tokens: 335808, K size: 41.00 GB, V size:"
        " 41.00 GB",
        "KV cache is allocated",
    ),
    (
        "sglang",
        "Capturing batches (bs=1 avail_mem=25.10 GB): 100%|██████████| 52/52"
        " [00:37<00:00,  1.40it/s]",
        "capturing CUDA graphs: 52 of 52",
    ),
    # sgl-project/sglang#7324
    (
        "sglang",
        "Capturing batches (avail_mem=7.08 GB):   0%|          | 0/17 [00:00<?, ?it/s]",
        "capturing CUDA graphs: 0 of 17",
    ),
    (
        "sglang",
        "[2025-11-20 17:55:54] Capture cuda graph end. Time elapsed: 37.99 s. mem usage=8.60 GB."
        " avail mem=25.09 GB.",
        "CUDA graphs are captured",
    ),
    (
        "sglang",
        "[2026-07-27 08:54:44] The server is fired up and ready to roll!",
        "ready",
    ),
    # the image llama-cpp-cpu
    (
        "llama-cpp",
        "0.00.010.993 I srv    load_model: loading model '/models/tiny.gguf'",
        "loading the model",
    ),
    ("llama-cpp", "0.00.047.711 I srv          init: model loaded", "the model is loaded"),
    # ggml-org/llama.cpp#18546
    (
        "llama-cpp",
        "llama_model_loader: loaded meta data with 36 key-value pairs and 197 tensors from"
        " C:\\Users\\lavan\\win-x64\\External\\Models\\phi-3.5-mini-instruct.gguf (version GGUF V3"
        " (latest))",
        "reading the model's head",
    ),
    (
        "llama-cpp",
        "load_tensors: offloaded 62/62 layers to GPU",
        "layers on cards: 62 of 62",
    ),
    (
        "ik-llama",
        "llm_load_tensors: offloaded 62/62 layers to GPU",
        "layers on cards: 62 of 62",
    ),
    (
        "ik-llama",
        'INFO [                    main] model loaded | tid="123282723551424" timestamp=1752553001',
        "the model is loaded",
    ),
]

QUIET: list[tuple[Engine, str]] = [
    ("vllm", "(Worker_TP0 pid=34322)"),
    (
        "vllm",
        "(Worker_TP0 pid=34322) INFO 05-06 20:59:59 [gpu_model_runner.py:4879] Model loading took"
        " 12.66 GiB memory and 31.657031 seconds",
    ),
    ("sglang", "[2025-12-04 20:58:41] Init torch distributed begin."),
    ("llama-cpp", "0.00.008.482 I cmn  common_param: common_params_print_info: verbosity = 3"),
    # of another engine
    ("llama-cpp", "Loading safetensors checkpoint shards:  56% Completed | 5/9"),
]


@pytest.mark.parametrize(("engine", "line", "told"), LINES)
def test_a_line_of_an_engine_tells_how_far_it_is(engine: Engine, line: str, told: str) -> None:
    assert str(read_progress(engine, line)) == told


@pytest.mark.parametrize(("engine", "line"), QUIET)
def test_other_lines_tell_nothing(engine: Engine, line: str) -> None:
    assert read_progress(engine, line) is None


def test_every_engine_has_a_line_that_counts() -> None:
    counted = {engine for engine, _, told in LINES if " of " in told}
    assert counted == set(STAGES)


def test_a_line_without_end_is_not_searched_to_its_end() -> None:
    assert read_progress("vllm", "x" * 5_000_000 + "Loading weights took 1 seconds") is None
