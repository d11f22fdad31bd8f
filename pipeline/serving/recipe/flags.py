"""The flags of each engine as typed fields, and how they become a command line.

A field is named as the engine names its flag. A flag that stands here was looked up in the engine's
own argument parser; one that does not can be given through `extra`, and is checked like the others
before anything starts.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, StringConstraints

from pipeline.core.model import Frozen, Word

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]+$", max_length=2000)]


class Flags(Frozen):
    """What all engines have in common: fields that are not set are not on the command line."""

    # fields whose flag is not `--` and the name with dashes
    spelled: ClassVar[dict[str, str]] = {}

    extra: list[Text] = []

    @classmethod
    def flag(cls, field: str) -> str:
        """A field as the engine spells it."""
        return cls.spelled.get(field, "--" + field.replace("_", "-"))

    def given(self) -> dict[str, Any]:
        """The fields that are set, in the order of the class."""
        return {
            name: value
            for name in type(self).model_fields
            if name != "extra" and (value := getattr(self, name)) is not None
        }

    def arguments(self) -> list[str]:
        """The flags as an engine reads them."""
        words: list[str] = []
        for name, value in self.given().items():
            flag = self.flag(name)
            if value is True:
                words.append(flag)
            elif value is False:
                words.append(f"--no-{flag.removeprefix('--')}")
            elif isinstance(value, list):
                words += [word for each in value for word in (flag, str(each))]
            elif name == "compilation_config":
                # as the documents write it: each part by its dotted name
                for path, each in value.items():
                    text = str(each).lower() if isinstance(each, bool) else str(each)
                    words += [f"--{name}.{path}", text]
            elif isinstance(value, dict):
                words += [flag, json.dumps(value, separators=(",", ":"))]
            else:
                words += [flag, str(value)]
        return [*words, *self.extra]


class VllmFlags(Flags):
    """Flags of `vllm serve`."""

    tensor_parallel_size: Positive | None = None
    decode_context_parallel_size: Positive | None = None
    data_parallel_size: Positive | None = None
    pipeline_parallel_size: Positive | None = None
    enable_expert_parallel: Literal[True] | None = None
    mm_encoder_tp_mode: Literal["data", "weights"] | None = None
    # dotted names below it, as `pass_config.fuse_allreduce_rms`
    compilation_config: dict[Word, bool | int | Word] | None = None
    tool_call_parser: Word | None = None
    reasoning_parser: Word | None = None
    reasoning_config: dict[Word, str] | None = None
    enable_auto_tool_choice: Literal[True] | None = None
    default_chat_template_kwargs: dict[str, JsonValue] | None = None
    trust_remote_code: Literal[True] | None = None
    tokenizer_mode: Word | None = None
    attention_backend: Word | None = None
    attention_config: dict[Word, bool | int | Word] | None = None
    kv_cache_dtype: Word | None = None
    mamba_cache_mode: Literal["align", "none"] | None = None
    mamba_ssm_cache_dtype: Word | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    max_model_len: Positive | None = None
    gpu_memory_utilization: Fraction | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    max_cudagraph_capture_size: Positive | None = None
    block_size: Positive | None = None
    load_format: Word | None = None
    quantization: Word | None = None
    moe_backend: Word | None = None
    linear_backend: Word | None = None
    cpu_offload_gb: Positive | None = None
    # n-gram tables of DeepSeek-V4.1 and Qwen3.8-Flash-Next
    engram_config: dict[Word, bool] | None = None
    kv_offloading_size: Positive | None = None
    kv_offloading_backend: Word | None = None
    limit_mm_per_prompt: dict[Word, int] | None = None
    distributed_executor_backend: Word | None = None
    enforce_eager: Literal[True] | None = None
    language_model_only: Literal[True] | None = None
    disable_custom_all_reduce: Literal[True] | None = None
    enable_flashinfer_autotune: bool | None = None
    fail_on_environ_validation: Literal[True] | None = None
    jit_monitor_mode: Literal["warn", "error"] | None = None
    hf_overrides: dict[str, JsonValue] | None = None


class SglangFlags(Flags):
    """Flags of `sglang.launch_server`."""

    spelled = {"tensor_parallel_size": "--tp"}

    tensor_parallel_size: Positive | None = None
    ep_size: Positive | None = None
    quantization: Word | None = None
    trust_remote_code: Literal[True] | None = None
    context_length: Positive | None = None
    mem_fraction_static: Fraction | None = None
    attention_backend: Word | None = None
    kv_cache_dtype: Word | None = None
    disable_cuda_graph: Literal[True] | None = None
    # of releases before the two below; 0.5.23 does not know it any more
    cuda_graph_max_bs: Positive | None = None
    cuda_graph_max_bs_decode: Positive | None = None
    cuda_graph_backend_prefill: Literal["full", "breakable", "disabled"] | None = None
    page_size: Positive | None = None
    mamba_radix_cache_strategy: Word | None = None
    mamba_ssm_dtype: Word | None = None
    mamba_track_interval: Positive | None = None
    max_mamba_cache_size: Positive | None = None
    ple_offload_embedding: bool | None = None
    chunked_prefill_size: Positive | None = None
    max_running_requests: Positive | None = None
    moe_runner_backend: Word | None = None
    fp4_gemm_backend: Word | None = None
    tool_call_parser: Word | None = None
    reasoning_parser: Word | None = None
    disable_shared_experts_fusion: Literal[True] | None = None
    disable_radix_cache: Literal[True] | None = None
    enable_deterministic_inference: Literal[True] | None = None
    disable_custom_all_reduce: Literal[True] | None = None
    watchdog_timeout: Positive | None = None
    enable_metrics: Literal[True] | None = None


class LlamaFlags(Flags):
    """Flags of `llama-server`, of ik_llama.cpp and of mainline."""

    spelled = {
        "batch_size": "-b",
        "ubatch_size": "-ub",
        "gpu_layers": "-ngl",
        "mla": "-mla",
        "grouped_expert_routing": "-ger",
        "attention_max_batch": "-amb",
        "flash_attention": "-fa",
        "override_tensor": "-ot",
        "no_fused_moe": "-no-fmoe",
        "cache_type_k": "-ctk",
        "cache_type_v": "-ctv",
        "temperature": "--temp",
    }

    ctx_size: Positive | None = None
    parallel: Positive | None = None
    threads: Positive | None = None
    threads_batch: Positive | None = None
    batch_size: Positive | None = None
    ubatch_size: Positive | None = None
    gpu_layers: Annotated[int, Field(ge=0)] | None = None
    mla: Literal[0, 1, 2, 3] | None = None
    grouped_expert_routing: Literal[True] | None = None
    special: Literal[True] | None = None
    attention_max_batch: Positive | None = None
    flash_attention: Literal["on", "off", "auto"] | None = None
    no_fused_moe: Literal[True] | None = None
    jinja: Literal[True] | None = None
    warmup_batch: Literal[True] | None = None
    cpu_moe: Literal[True] | None = None
    # the first pattern that matches a tensor counts
    override_tensor: list[Text] | None = None
    cache_type_k: Word | None = None
    cache_type_v: Word | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
