"""Launches held against small parsers of each engine: what passes, what is refused, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import RecipeInvalid
from pipeline.core.model import Engine
from pipeline.images.engine.parser_flags import (
    FlagSpec,
    ParserFlags,
    flags_folder,
    write_parser_flags,
)
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import ContainerSpec
from pipeline.serving.recipe.parser import check_flags, require_known_flags

DIGEST = f"sha256:{'7' * 64}"
CONFIG_FIELDS = ["mode", "pass_config", "pass_config.fuse_allreduce_rms", "extra", "extra.*"]

VLLM = ParserFlags(
    engine="vllm",
    version="0.32.0",
    image="vllm",
    digest=DIGEST,
    read_from="the image",
    syntax="vllm",
    plain_words=1,
    flags={
        "--served-model-name": FlagSpec(takes="many"),
        "--port": FlagSpec(takes="one", type="integer"),
        "--max-model-len": FlagSpec(takes="one", type="size", words=["auto"]),
        "--gpu-memory-utilization": FlagSpec(takes="one", type="number"),
        "--tensor-parallel-size": FlagSpec(takes="one", type="integer", aliases=["-tp"]),
        "--pipeline-parallel-size": FlagSpec(takes="one", type="integer", aliases=["-pp"]),
        "--decode-context-parallel-size": FlagSpec(takes="one", type="integer", aliases=["-dcp"]),
        "--distributed-executor-backend": FlagSpec(takes="one"),
        "--nnodes": FlagSpec(takes="one", type="integer"),
        "--optimization-level": FlagSpec(takes="one"),
        "--kv-cache-dtype": FlagSpec(takes="one", choices=["auto", "fp8", "fp8_e4m3"]),
        "--attention-backend": FlagSpec(
            takes="one", choices=["auto", "TRITON_MLA", "FLASHINFER"], any_case=True
        ),
        "--enable-auto-tool-choice": FlagSpec(takes="none", off=["--no-enable-auto-tool-choice"]),
        "--tool-call-parser": FlagSpec(
            takes="one", choices=["kimi_k2", "hermes"], opened_by="--tool-parser-plugin"
        ),
        "--tool-parser-plugin": FlagSpec(takes="one"),
        "--enable-prefix-caching": FlagSpec(takes="none", off=["--no-enable-prefix-caching"]),
        "--trust-remote-code": FlagSpec(takes="none", off=["--no-trust-remote-code"]),
        "--compilation-config": FlagSpec(
            takes="one", type="json", fields=CONFIG_FIELDS, aliases=["-cc"]
        ),
        "--speculative-config": FlagSpec(takes="one", type="json", words=["None"]),
        "--hf-overrides": FlagSpec(takes="one", type="json-or-text"),
        "--middleware": FlagSpec(takes="one", repeats=True),
        "--hf-token": FlagSpec(takes="optional"),
        "--quick": FlagSpec(takes="none"),
        "--slow": FlagSpec(takes="none"),
    },
    exclusive=[["--quick", "--slow"]],
    prefixes=["VLLM_"],
    variables=["VLLM_LOGGING_LEVEL", "VLLM_USE_V2_MODEL_RUNNER"],
)
SGLANG = ParserFlags(
    engine="sglang",
    version="0.5.23",
    image="sglang",
    digest=DIGEST,
    read_from="the image",
    syntax="argparse",
    flags={
        "--model-path": FlagSpec(takes="one", aliases=["--model"]),
        "--tp-size": FlagSpec(takes="one", type="integer", aliases=["--tensor-parallel-size"]),
        "--context-length": FlagSpec(takes="one", type="size"),
        "--quantization": FlagSpec(takes="one", choices=["modelopt_fp4", "fp8"]),
        "--cuda-graph-bs-decode": FlagSpec(takes="many", type="integer"),
        "--cuda-graph-bs-prefill": FlagSpec(takes="many", type="integer"),
        "--disable-radix-cache": FlagSpec(takes="none"),
        "--old": FlagSpec(takes="none", retired="Use --disable-radix-cache instead."),
    },
    prefixes=["SGLANG_", "SGL_"],
    variables=["SGLANG_ENABLE_SPEC_V2"],
)
LLAMA = ParserFlags(
    engine="ik-llama",
    version="55d3c05b",
    image="ik-llama",
    tree=DIGEST,
    read_from="a program",
    syntax="llama",
    flags={
        "--model": FlagSpec(takes="one", aliases=["-m"]),
        "--ctx-size": FlagSpec(takes="one", type="integer", aliases=["-c"]),
        "--flash-attn": FlagSpec(takes="one", choices=["on", "off", "auto"], aliases=["-fa"]),
        "--no-flash-attn": FlagSpec(takes="none", aliases=["-no-fa"]),
        "--override-tensor": FlagSpec(takes="one", repeats=True, aliases=["-ot"]),
        "--chat-template-kwargs": FlagSpec(takes="one", type="json"),
        "--cpu-moe": FlagSpec(takes="none"),
        "--temp": FlagSpec(takes="one", type="number"),
    },
    exclusive=[["--flash-attn", "--no-flash-attn"]],
    prefixes=["LLAMA_ARG_"],
    variables=["LLAMA_ARG_CTX_SIZE"],
)
PARSERS: dict[Engine, ParserFlags] = {"vllm": VLLM, "sglang": SGLANG, "ik-llama": LLAMA}


def launch(engine: Engine, arguments: list[str], **environment: str) -> Launch:
    return Launch(
        recipe="one",
        engine=engine,
        image=PARSERS[engine].image,
        program=[engine],
        arguments=arguments,
        environment=environment,
        mounts=[],
        port=8000,
        cards=8,
        container=ContainerSpec(),
        model="m",
    )


def problems(engine: Engine, *arguments: str, **environment: str) -> list[str]:
    found = check_flags(launch(engine, list(arguments), **environment), PARSERS[engine])
    return [str(problem) for problem in found]


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("vllm", ["/models", "--served-model-name", "a", "b", "--port", "8000"]),
        ("vllm", ["/models", "--max_model_len", "64k", "-tp", "8"]),
        ("vllm", ["/models", "--max-model-len=auto", "--gpu-memory-utilization=0.94"]),
        ("vllm", ["/models", "--attention-backend", "triton_mla", "--kv-cache-dtype", "fp8"]),
        ("vllm", ["/models", "--enable-auto-tool-choice", "--tool-call-parser", "kimi_k2"]),
        ("vllm", ["/models", "--tool-parser-plugin", "p.py", "--tool-call-parser", "mine"]),
        ("vllm", ["--compilation_config.pass_config.fuse_allreduce_rms", "false"]),
        ("vllm", ["-cc", '{"mode":3,"pass_config":{"fuse_allreduce_rms":false},"extra":{"a":1}}']),
        ("vllm", ["--compilation-config.mode", "3", "--compilation-config.extra.a.b", "1"]),
        ("vllm", ["--speculative-config", "None", "--hf-overrides", "my.module"]),
        ("vllm", ["--middleware", "a", "--middleware", "b", "--hf-token", "--port", "1"]),
        ("vllm", ["--no-enable-prefix-caching"]),
        ("vllm", ["--no_enable_auto_tool_choice"]),
        ("vllm", ["--no-enable-auto"]),
        ("vllm", ["--trust-remote", "--gpu-memory-utilization", ".9"]),
        ("vllm", ["-O3"]),
        ("vllm", ["-O=3", "--max-model-len", "1.5k"]),
        ("vllm", ["-O", "3", "--max-model-len", "2K"]),
        ("vllm", ["-tp", "4", "-pp", "2", "-dcp", "4"]),
        ("vllm", ["-tp", "2", "-pp", "2"]),
        ("vllm", ["-tp", "8", "-pp", "2", "--nnodes", "2"]),
        ("vllm", ["-tp", "16", "--distributed-executor-backend", "ray"]),
        ("sglang", ["--tp", "-1"]),
        ("sglang", ["--context-length", "64Ki"]),
        ("sglang", ["--context-length", "1.5M"]),
        ("sglang", ["--model-path", "/models", "--tp", "8", "--disable-radix-cache"]),
        ("sglang", ["--cuda-graph-bs-decode", "1", "2", "4", "--quantization", "modelopt_fp4"]),
        ("ik-llama", ["-m", "a.gguf", "-fa", "on", "-ot", "exps=CPU", "-ot", "x=CUDA0"]),
        ("ik-llama", ["--ctx_size", "4096", "--temp", "-0.5"]),
        ("ik-llama", ["--chat-template-kwargs", '{"thinking":false}', "--cpu-moe"]),
    ],
)
def test_what_the_engine_accepts_passes(engine: Engine, arguments: list[str]) -> None:
    assert problems(engine, *arguments) == []


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        # invented, or of another version or engine
        (
            "vllm",
            ["--max-model-length", "1"],
            "no flag of vLLM 0.32.0; did you mean --max-model-len?",
        ),
        ("vllm", ["--tensor-paralel-size", "8"], "did you mean --tensor-parallel-size"),
        ("vllm", ["--mla"], "is no flag of vLLM 0.32.0"),
        ("vllm", ["--compilation-confg.mode", "3"], "did you mean --compilation-config"),
        ("sglang", ["--quantisation", "fp8"], "did you mean --quantization?"),
        ("sglang", ["--model_path", "/models"], "did you mean --model-path"),
        ("sglang", ["--cuda-graph-bs", "8"], "is the beginning of more than one flag"),
        ("sglang", ["--old"], "was removed: Use --disable-radix-cache instead."),
        ("ik-llama", ["--override-tensors", "a=CPU"], "did you mean --override-tensor?"),
        ("ik-llama", ["--ctx", "4096"], "is no flag of ik_llama.cpp 55d3c05b"),
        ("ik-llama", ["--ctx-size=4096"], "is no flag of ik_llama.cpp"),
        # values
        ("vllm", ["--max-model-len"], "--max-model-len: needs a value"),
        ("vllm", ["--max-model-len", "--port", "1"], "--max-model-len: needs a value"),
        ("vllm", ["--served-model-name"], "--served-model-name: needs a value"),
        ("vllm", ["--compilation-config.mode"], "--compilation-config.mode: needs a value"),
        ("vllm", ["--trust-remote-code=true"], "--trust-remote-code: takes no value"),
        ("vllm", ["--port", "http"], "'http' is no integer"),
        ("sglang", ["--tp", "-1.5"], "'-1.5' is no integer"),
        ("vllm", ["--max-model-len", "many"], "'many' is no size"),
        ("vllm", ["--max-model-len", "1.5K"], "'1.5K' is no size"),
        ("vllm", ["--max-model-len", "64Ki"], "'64Ki' is no size"),
        ("sglang", ["--context-length", "64K"], "'64K' is no size"),
        ("sglang", ["--context-length", "1.5Ki"], "'1.5Ki' is no size"),
        ("vllm", ["-O"], "-O: is no flag"),
        ("vllm", ["-O2", "--optimization-level", "3"], "is given twice"),
        ("vllm", ["--gpu-memory-utilization", "94%"], "'94%' is no number"),
        ("vllm", ["--kv-cache-dtype", "fp8_e4m4"], "not among its values (nearest: fp8_e4m3"),
        ("vllm", ["--kv-cache-dtype", "zzz"], "not among its values (it has auto, fp8, fp8_e4m3)"),
        ("vllm", ["--tool-call-parser", "kimi-k2"], "nearest: kimi_k2"),
        ("sglang", ["--quantization", "nvfp4"], "'nvfp4' is not among its values"),
        ("sglang", ["--cuda-graph-bs-decode", "1", "x"], "'x' is no integer"),
        ("ik-llama", ["-fa"], "-fa: needs a value"),
        ("ik-llama", ["-fa", "--cpu-moe"], "-fa: needs a value"),
        ("ik-llama", ["-fa", "yes"], "'yes' is not among its values"),
        # JSON
        ("vllm", ["--speculative-config", "{method: eagle3}"], "is not JSON"),
        ("vllm", ["--hf-overrides", "{no"], "is not JSON"),
        ("vllm", ["-cc", "[]"], "is no JSON object"),
        ("vllm", ["-cc", '{"pass_config":{"fuse_allreduce":1}}'], "nearest: pass_config.fuse_all"),
        (
            "vllm",
            ["--compilation-config.pass_config.fuse_allreduce_rns", "1"],
            "did you mean --compilation-config.pass_config.fuse_allreduce_rms",
        ),
        ("vllm", ["--port.number", "1"], "takes no JSON"),
        ("ik-llama", ["--chat-template-kwargs", "{thinking:false}"], "is not JSON"),
        # twice, and contradictions
        ("vllm", ["--port", "1", "--port", "2"], "--port: is given twice"),
        ("vllm", ["-tp", "1", "--tensor_parallel_size", "2"], "is given twice"),
        ("vllm", ["--compilation-config.mode", "1", "-cc.mode", "2"], "-cc.mode: is given twice"),
        ("vllm", ["-cc", "{}", "-cc.mode", "2"], "-cc.mode: only the parts count beside -cc"),
        ("sglang", ["--tp", "8", "--tp-size", "4"], "is given twice"),
        (
            "vllm",
            ["--enable-prefix-caching", "--no-enable-prefix-caching"],
            "--no-enable-prefix-caching: contradicts --enable-prefix-caching",
        ),
        (
            "vllm",
            ["--enable-prefix-caching", "--no_enable_prefix_caching"],
            "--no_enable_prefix_caching: contradicts --enable-prefix-caching",
        ),
        ("vllm", ["-tp", "16"], "-tp: 16 parts need a GPU each, and the recipe is for 8"),
        ("vllm", ["-tp=4", "-pp", "4"], "-tp × -pp: 16 parts need a GPU each"),
        ("vllm", ["-tp", "16", "--distributed-executor-backend", "mp"], "16 parts need a GPU"),
        ("sglang", ["--tp", "16"], "--tp: 16 parts need a GPU each"),
        ("vllm", ["-tp", "8", "-dcp", "3"], "3 does not divide --tensor-parallel-size 8"),
        ("vllm", ["-dcp", "2"], "2 does not divide --tensor-parallel-size 1"),
        ("vllm", ["--quick", "--slow"], "--slow: cannot stand beside --quick"),
        ("ik-llama", ["-fa", "on", "-no-fa"], "-no-fa: cannot stand beside -fa"),
        ("vllm", ["--enable-auto-tool-choice"], "needs --tool-call-parser"),
        # words of no flag
        ("vllm", ["/models", "/more"], "/more: is a word that no flag takes"),
        ("sglang", ["/models"], "/models: is a word that no flag takes"),
        ("sglang", ["--disable-radix-cache", "true"], "true: is a word that no flag takes"),
        ("ik-llama", ["--cpu-moe", "1"], "1: is a word that no flag takes"),
    ],
)
def test_what_the_engine_refuses_is_named(
    engine: Engine, arguments: list[str], message: str
) -> None:
    found = problems(engine, *arguments)
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize(
    ("engine", "name", "near"),
    [
        ("vllm", "VLLM_LOGING_LEVEL", "did you mean VLLM_LOGGING_LEVEL?"),
        ("vllm", "VLLM_USE_V1", "is no variable of vLLM 0.32.0"),
        ("sglang", "SGLANG_ENABLE_SPEC_V3", "did you mean SGLANG_ENABLE_SPEC_V2?"),
        ("sglang", "SGL_ANYTHING", "is no variable of SGLang"),
        ("ik-llama", "LLAMA_ARG_CTX", "did you mean LLAMA_ARG_CTX_SIZE?"),
    ],
)
def test_a_variable_that_the_engine_does_not_read_is_named(
    engine: Engine, name: str, near: str
) -> None:
    (found,) = problems(engine, **{name: "1"})
    assert found.startswith(f"{name}: ")
    assert near in found


def test_a_negative_fraction_is_a_name_with_a_dot_to_vllm() -> None:
    """vllm/utils/argparse_utils.py: every word with a dash before and a dot in it is one."""
    needs, unknown = problems("vllm", "--gpu-memory-utilization", "-0.5")
    assert needs == "--gpu-memory-utilization: needs a value"
    assert unknown.startswith("-0.5: is no flag")


def test_variables_of_others_are_not_the_engines_business() -> None:
    assert problems("vllm", NCCL_P2P_LEVEL="SYS", VLLM_LOGGING_LEVEL="DEBUG") == []
    assert problems("ik-llama", VLLM_NO="1") == []


def test_every_problem_is_found_and_the_first_is_the_error(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    flags_folder(checkout).mkdir(parents=True)
    write_parser_flags(flags_folder(checkout), VLLM)
    wrong = launch("vllm", ["/models", "--prot", "1", "--kv-cache-dtype", "x"], VLLM_NO="1")
    assert len(check_flags(wrong, VLLM)) == 3
    with pytest.raises(RecipeInvalid, match=r"one: --prot: is no flag .* --port\?.* \(and 2 more"):
        require_known_flags(checkout, wrong)
    require_known_flags(checkout, launch("vllm", ["/models", "--port", "1"]))
