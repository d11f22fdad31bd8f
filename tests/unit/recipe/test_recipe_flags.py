"""From a typed field to the words that an engine reads."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.serving.recipe.flags import Flags, LlamaFlags, SglangFlags, VllmFlags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (VllmFlags(tensor_parallel_size=8), ["--tensor-parallel-size", "8"]),
        (VllmFlags(enable_auto_tool_choice=True), ["--enable-auto-tool-choice"]),
        (VllmFlags(enable_prefix_caching=False), ["--no-enable-prefix-caching"]),
        (VllmFlags(enable_prefix_caching=True), ["--enable-prefix-caching"]),
        (VllmFlags(gpu_memory_utilization=0.90), ["--gpu-memory-utilization", "0.9"]),
        (VllmFlags(hf_overrides={"a": [1, 2]}), ["--hf-overrides", '{"a":[1,2]}']),
        (
            VllmFlags(compilation_config={"pass_config.fuse": True, "level": 3}),
            ["--compilation_config.pass_config.fuse", "true", "--compilation_config.level", "3"],
        ),
        (SglangFlags(tensor_parallel_size=8), ["--tp", "8"]),
        (SglangFlags(disable_cuda_graph=True), ["--disable-cuda-graph"]),
        (LlamaFlags(gpu_layers=0), ["-ngl", "0"]),
        (LlamaFlags(mla=0), ["-mla", "0"]),
        (LlamaFlags(temperature=0), ["--temp", "0.0"]),
        (LlamaFlags(grouped_expert_routing=True), ["-ger"]),
        (LlamaFlags(override_tensor=["b=CUDA1", "a=CPU"]), ["-ot", "b=CUDA1", "-ot", "a=CPU"]),
        (
            LlamaFlags(chat_template_kwargs={"thinking": False}),
            ["--chat-template-kwargs", '{"thinking":false}'],
        ),
        (LlamaFlags(extra=["--new", "a b"]), ["--new", "a b"]),
        (LlamaFlags(), []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else type(value).__name__,
)
def test_a_field_becomes_the_engine_s_words(flags: Flags, words: list[str]) -> None:
    assert flags.arguments() == words


def test_flags_stand_in_the_order_of_their_class_and_extra_ones_last() -> None:
    one = VllmFlags(max_model_len=1, tensor_parallel_size=2, extra=["--z"])
    other = VllmFlags(extra=["--z"], tensor_parallel_size=2, max_model_len=1)
    assert one.arguments() == other.arguments()
    assert one.arguments() == ["--tensor-parallel-size", "2", "--max-model-len", "1", "--z"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (VllmFlags, {"trust_remote_code": False}),
        (VllmFlags, {"tensor_parallel_size": 0}),
        (VllmFlags, {"tensor_parallel_size": 1.5}),
        (VllmFlags, {"attention_backend": "TRITON MLA"}),
        (VllmFlags, {"attention_backend": "a\x00b"}),
        (VllmFlags, {"gpu_memory_utilization": 0}),
        (VllmFlags, {"no_such_flag": 1}),
        (SglangFlags, {"mem_fraction_static": -0.5}),
        (SglangFlags, {"tp": 8}),
        (LlamaFlags, {"override_tensor": ["a=CPU\nb"]}),
        (LlamaFlags, {"temperature": -1}),
        (LlamaFlags, {"extra": [""]}),
        # as YAML reads them where they have no quotes
        (VllmFlags, {"default_chat_template_kwargs": {"since": date(2026, 1, 1)}}),
        (VllmFlags, {"hf_overrides": {"raw": [b"x"]}}),
        (LlamaFlags, {"chat_template_kwargs": {"a": {"b": {date(2026, 1, 1)}}}}),
    ],
)
def test_a_value_that_no_engine_takes_is_refused(kind: type[Flags], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(fields)


@pytest.mark.parametrize("kind", [VllmFlags, SglangFlags, LlamaFlags])
def test_what_is_spelled_otherwise_is_a_field(kind: type[Flags]) -> None:
    assert set(kind.spelled) <= set(kind.model_fields)
    assert len({kind.flag(name) for name in kind.model_fields}) == len(kind.model_fields)
